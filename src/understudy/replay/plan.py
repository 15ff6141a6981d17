"""The selection of a replay: states with their tools, the teachers to ask about each, and the estimated cost."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import msgspec
from msgspec import Struct, field, structs

from understudy.ingest.model_families import model_family
from understudy.ingest.prompt_sizes import TOKEN_BYTES, PromptSize, TurnSize, turn_sizes
from understudy.ingest.redaction import redact_trace
from understudy.ingest.tool_lists import ToolList, ToolsSource
from understudy.ingest.trace import OfferedTools, Trace, TraceState, expand, state_id
from understudy.ingest.trace_store import text_or_none, traces
from understudy.redact.redactor import Redactor
from understudy.replay.requests import TeacherRequest, build_request, likely_cost, worst_cost
from understudy.replay.teachers import Teacher, Teachers
from understudy.store import Store
from understudy.store.sessions import StoredSize, TurnSelection
from understudy.types import WORK_ROLES
from understudy.util.settings import option

_MIN_ANSWER_TOKENS = 100
LAYOUT_BYTES = 128
"""How many bytes longer a message may be in a request than in the store."""


class ReplaySettings(Struct, frozen=True, kw_only=True):
    """The settings of a replay. `again` repeats asks that were refused, or were running when a process died.

    `name` identifies the replay: earlier invocations with this name are counted, and so is their cost.
    """

    table: ClassVar[str] = "replay"
    name: Annotated[str, option("The name of the replay; under the same name it continues.")] = "replay"
    where: Annotated[
        str | None,
        option("Only turns that match this SQL condition, such as \"tests = 'failed'\".", metavar="SQL"),
    ] = None
    limit: Annotated[int, option("Ask only about a random sample of this many states.", ge=1)] | None = None
    seed: Annotated[int, option("The random seed of the sample.")] = 0
    max_cost_usd: Annotated[
        float | None,
        option("Maximum cost of this replay in US dollars, over all invocations.", "--max-cost", metavar="USD"),
    ] = None
    samples: Annotated[
        int, option("Number of answers to request from each teacher about each state.", "--samples", "-n", ge=1)
    ] = 1
    concurrency: Annotated[
        int, option("Maximum number of requests in progress at a time.", "--concurrency", "-j", ge=1)
    ] = 8
    all_roles: Annotated[
        bool,
        option("Also turns that the agent program made for its own purposes: warm-ups, summaries.", "--all-roles"),
    ] = False
    allow_same_family: Annotated[
        bool, option("Also ask teachers about turns of models of their own family.", "--allow-same-family")
    ] = False
    allow_unknown_family: Annotated[
        bool,
        option(
            "Also ask if the model family of the turn's author, or of the teacher, is unknown.",
            "--allow-unknown-family",
        ),
    ] = False
    again: Annotated[
        bool,
        option("Repeat requests that a teacher refused, or that were in progress when a process died.", "--again"),
    ] = False
    redacted: Annotated[
        bool, option("Do not redact the secrets, names and paths in sessions.", "--unredacted", off=True)
    ] = True
    config: Annotated[
        Path | None, option("A TOML file with options in a table [replay].", metavar="FILE.toml")
    ] = None


class TeachableState(Struct, frozen=True):
    """A state to ask about, and its tools, which are inferred from the whole session if the log does not have
    them.
    """

    state: TraceState
    tools: list[dict[str, Any]] | None
    teachers: tuple[Teacher, ...]


class SelectionCounts(Struct):
    """The counts of a selection. `left_out` counts states that no teacher may be asked about, by reason.

    `not_asked` counts, by teacher, states that it may not be asked about although others may; `tools` counts
    states by the origin of their tools: own (the log), version, inferred (see `tool_lists.ToolsSource`), none.
    """

    states: int = 0
    families: Counter[str] = field(default_factory=Counter[str])
    left_out: Counter[str] = field(default_factory=Counter[str])
    not_asked: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    tools: Counter[str] = field(default_factory=Counter[str])


class TeacherEstimate(Struct):
    """What one teacher would be asked. Amounts in dollars are None if its price is not known.

    `done` asks are answered, or are not repeated. `worst_usd` is the highest possible cost of the rest, which is
    reserved.
    """

    asks: int = 0
    done: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    likely_usd: float | None = None
    worst_usd: float | None = None


class SessionSource:
    """The traces of a store with the turns that match `where`, redacted if there is a redactor.

    Raises ConfigError on reading for an invalid expression.
    """

    def __init__(self, store: Store, where: str | None = None, redactor: Redactor | None = None) -> None:
        self._store = store
        self._where = where
        self._redactor = redactor

    def chosen(self, turns: TurnSelection | None = None) -> Iterator[Trace]:
        """Yield the traces that contain the chosen turns, or some of them."""
        return map(self._sendable, traces(self._store, self._where if turns is None else turns))

    def sizes(self, turns: TurnSelection | None = None) -> Iterator[StoredSize]:
        """Yield the stored sizes of the chosen turns, or of some of them."""
        sizes = self._store.sessions.sizes(self._where)
        return (
            sizes if turns is None else (size for size in sizes if size.turn_key in turns.get(size.trace_key, ()))
        )

    def computed_sizes(self, stored: Iterable[StoredSize]) -> dict[str, TurnSize]:
        """Compute the sizes of turns from their conversations, by state id."""
        turns = TurnSelection([(size.trace_key, size.turn_key) for size in stored])
        conversations = self._store.sessions.whole_conversations(turns)
        return {
            state_id(trace.trace_id, turn.message_id): size
            for trace in traces(self._store, conversations)
            for turn, size in zip(trace.turns, turn_sizes(trace), strict=True)
        }

    def sample(
        self, accept: Callable[[str, str | None], bool], limit: int, seed: int, replay: str
    ) -> TurnSelection:
        """Return a random sample of the chosen turns for which `accept(role, model)` is true.

        States that this replay has asked about come first, so that a replay continues with the same states.
        """

        def accepted(row: Mapping[str, Any]) -> bool:
            return accept(row["role"], text_or_none(row["model"]))

        asked_states = self._store.asks.states_of_replay(replay)
        return self._store.sessions.sample(accepted, ("role", "model"), self._where, limit, seed, asked_states)

    def whole(self, trace: Trace) -> Trace:
        """Return one of the traces with all its turns."""
        if self._where is None:
            return trace
        try:
            trace.trace_id.encode()
        except UnicodeEncodeError:
            return trace  # done here, because SQL cannot do it
        name = trace.trace_id.replace("'", "''")
        stored = next(traces(self._store, f"trace_id = '{name}'"), None)
        return trace if stored is None else self._sendable(stored)

    def _sendable(self, trace: Trace) -> Trace:
        """Return the trace with redacted texts. Its ids and the authors of its turns are never sent, and stay as
        they are.
        """
        if self._redactor is None:
            return trace
        sent = redact_trace(trace, self._redactor)
        turns = [
            structs.replace(turn, message_id=original.message_id, model=original.model)
            for turn, original in zip(sent.turns, trace.turns, strict=True)
        ]
        return structs.replace(sent, trace_id=trace.trace_id, session_id=trace.session_id, turns=turns)


def select(
    sessions: SessionSource, teachers: Teachers, options: ReplaySettings, counts: SelectionCounts
) -> Generator[TeachableState]:
    """Yield the states to ask about, and count them in `counts`.

    A teacher is not asked about a turn by a model of its own family, nor if either family is unknown, unless the
    options allow it.
    """
    sample = _sample(sessions, teachers, options, counts)
    for trace in sessions.chosen(sample):
        if not _role_is_asked(trace.role, options, counts, len(trace.turns)):
            continue
        not_logged: ToolList | None = None
        for state in expand(trace):
            chosen = _teachers_to_ask(state.source_family, teachers, options, counts)
            if not chosen:
                continue
            tools, source = state.tools, state.tools_source
            if source != "logged":
                if not_logged is None:
                    complete = sessions.whole(trace)
                    not_logged = ToolList.of(state) if complete is trace else OfferedTools(complete).inferred_tools
                tools, source = not_logged.tools, not_logged.source
            counts.states += 1
            counts.families[state.source_family or "unknown"] += 1
            counts.tools["own" if source == "logged" else source or "none"] += 1
            yield TeachableState(state, tools, chosen)


def _sample(
    sessions: SessionSource, teachers: Teachers, options: ReplaySettings, counts: SelectionCounts
) -> TurnSelection | None:
    """Return the random sample that `--limit` asks for; None without a limit."""
    if options.limit is None:
        return None

    def askable(role: str, model: str | None) -> bool:
        """Return whether a teacher may be asked. Refusals are counted here, because refused turns are never
        read.
        """
        return _role_is_asked(role, options, counts) and bool(
            _teachers_to_ask(model_family(model), teachers, options, counts)
        )

    sample = sessions.sample(askable, options.limit, options.seed, options.name)
    counts.not_asked.clear()  # counted again, for the sample only
    return sample


def _role_is_asked(role: str, options: ReplaySettings, counts: SelectionCounts, turns: int = 1) -> bool:
    role_counts = options.all_roles or role in WORK_ROLES
    if not role_counts:
        counts.left_out["role"] += turns
    return role_counts


def _teachers_to_ask(
    family: str | None, teachers: Teachers, options: ReplaySettings, counts: SelectionCounts
) -> tuple[Teacher, ...]:
    if family is None and not options.allow_unknown_family:
        counts.left_out["unknown_family"] += 1
        return ()
    chosen: list[Teacher] = []
    for teacher in teachers.teachers:
        if teacher.family is None and not options.allow_unknown_family:
            reason = "unknown_family"
        elif teacher.family is not None and teacher.family == family and not options.allow_same_family:
            reason = "same_family"
        else:
            chosen.append(teacher)
            continue
        counts.not_asked.setdefault(teacher.name, Counter())[reason] += 1
    if not chosen:
        counts.left_out["no_teacher"] += 1
    return tuple(chosen)


def ask_id(options: ReplaySettings, state_id: str, teacher: Teacher, number: int) -> str:
    """Return the id of an ask, which is the same for the same question to the same teacher with the same
    settings.
    """
    encoded = msgspec.json.encode([options.name, options.redacted, state_id, teacher.identity, number])
    return hashlib.blake2b(encoded, digest_size=16, person=b"ask").hexdigest()


def request_for(teachable: TeachableState, teacher: Teacher) -> TeacherRequest:
    """Return the request that asks a teacher about a state."""
    return build_request(teacher.config, teachable.state.messages, teachable.tools)


class PlannedState(Struct, frozen=True):
    """A state of an estimate: its stored size, and the teachers, each with the number of asks that are left."""

    stored: StoredSize
    left: dict[str, int]


def plan(
    sessions: SessionSource, teachers: Teachers, options: ReplaySettings, settled: Set[str]
) -> tuple[SelectionCounts, dict[str, TeacherEstimate], list[PlannedState]]:
    """Return what each teacher would be asked, without sizes and costs, and the states with asks that are left.

    `settled` are the ids of asks that are not sent again. No conversation is read.
    """
    counts = SelectionCounts()
    shares: dict[str, TeacherEstimate] = {}
    planned: list[PlannedState] = []
    families: dict[Any, str | None] = {}
    for stored in sessions.sizes(_sample(sessions, teachers, options, counts)):
        if not _role_is_asked(stored.role, options, counts):
            continue
        if stored.model not in families:
            families[stored.model] = model_family(text_or_none(stored.model))
        family = families[stored.model]
        if not (chosen := _teachers_to_ask(family, teachers, options, counts)):
            continue
        counts.states += 1
        counts.families[family or "unknown"] += 1
        asks_left: dict[str, int] = {}
        for teacher in chosen:
            share = shares.setdefault(teacher.name, TeacherEstimate())
            numbers = range(options.samples if settled else 0)
            settled_asks = sum(ask_id(options, stored.state_id, teacher, number) in settled for number in numbers)
            share.asks += options.samples
            share.done += settled_asks
            asks_left[teacher.name] = options.samples - settled_asks
        planned.append(PlannedState(stored, asks_left))
    return counts, shares, planned


def estimate(
    planned: Iterable[PlannedState],
    sessions: SessionSource,
    teachers: Teachers,
    counts: SelectionCounts,
    shares: dict[str, TeacherEstimate],
) -> None:
    """Add the origin of the tools to `counts`, and the estimated tokens and costs to `shares`.

    The sizes are those of the stored messages, of which requests differ by a few bytes a message.
    """
    unsized: list[PlannedState] = []

    def add(planned_state: PlannedState, size: TurnSize) -> None:
        source = size.tools_source
        counts.tools["own" if source == "logged" else source or "none"] += 1
        for name, asks in planned_state.left.items():
            if asks and (teacher := teachers.named(name)) is not None:
                _add_to_estimate(shares[name], teacher, size, asks)

    for planned_state in planned:
        stored = planned_state.stored
        if stored.prompt_bytes is None or (stored.tools_bytes is None and not stored.is_logged):
            unsized.append(planned_state)
        else:
            add(planned_state, _stored_size(stored))
    if unsized:
        sizes = sessions.computed_sizes(planned_state.stored for planned_state in unsized)
        for planned_state in unsized:
            add(planned_state, sizes[planned_state.stored.state_id])


def _stored_size(stored: StoredSize) -> TurnSize:
    size = PromptSize(
        stored.prompt_bytes or 0,
        stored.prompt_escaped or 0,
        stored.prompt_messages or 0,
        stored.prompt_images or 0,
    )
    if not stored.is_logged:
        size = size.plus(PromptSize(stored.tools_bytes or 0, stored.tools_escaped or 0))
    source = "logged" if stored.is_logged else stored.tools_source
    return TurnSize(size, stored.answer_chars or 0, cast("ToolsSource | None", source))


def _add_to_estimate(share: TeacherEstimate, teacher: Teacher, size: TurnSize, asks: int) -> None:
    completion = min(max(int(size.answer_chars / TOKEN_BYTES), _MIN_ANSWER_TOKENS), teacher.config.max_tokens)
    likely = size.prompt.likely_tokens
    share.prompt_tokens += likely * asks
    share.completion_tokens += completion * asks
    if (price := teacher.price) is not None:
        share.likely_usd = (share.likely_usd or 0.0) + likely_cost(price, likely, completion) * asks
        most = size.prompt.most_tokens + LAYOUT_BYTES * size.prompt.messages
        worst = worst_cost(price, most, teacher.config.max_tokens)
        share.worst_usd = (share.worst_usd or 0.0) + worst * asks
