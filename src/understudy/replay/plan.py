"""The selection of a replay: states with their tools, the teachers to ask about each, and the estimated cost."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Struct, field, structs

from understudy.ingest.model_families import model_family
from understudy.ingest.redaction import redact_trace
from understudy.ingest.tool_lists import ToolList
from understudy.ingest.trace import OfferedTools, Trace, TraceState, expand
from understudy.ingest.trace_store import text_or_none, traces
from understudy.preference.checks import length_of, message_of
from understudy.redact.redactor import Redactor
from understudy.replay.request_sizes import RequestSizer
from understudy.replay.requests import RequestSize, TeacherRequest, build_request, likely_cost, worst_cost
from understudy.replay.teachers import Teacher, Teachers
from understudy.store import Store
from understudy.store.sessions import TurnSelection
from understudy.types import WORK_ROLES
from understudy.util.settings import option

_LIKELY_LEAST = 100
_BATCH = 64
"""States whose asks are looked up at once: a query for each of them took most of a second in a thousand."""
_TOKEN_CHARS = 3.5


class ReplaySettings(Struct, frozen=True, kw_only=True):
    """The settings of a replay. `again` repeats asks that were refused, or were running when a process died.

    `name` identifies the replay: earlier invocations with this name are counted, and so is their cost.
    """

    table: ClassVar[str] = "replay"
    name: Annotated[str, option("The name of the replay; under the same name it continues.")] = "replay"
    where: Annotated[
        str | None,
        option("Only turns for which this SQL condition holds, as \"tests = 'failed'\".", metavar="SQL"),
    ] = None
    limit: Annotated[int, option("Only a random sample of so many states.", ge=1)] | None = None
    seed: Annotated[int, option("Another number gives another sample.")] = 0
    max_cost_usd: Annotated[
        float | None,
        option(
            "The most US dollars that this replay may cost, over all invocations.", "--max-cost", metavar="USD"
        ),
    ] = None
    samples: Annotated[int, option("Requests per teacher and state.", "--samples", "-n", ge=1)] = 1
    concurrency: Annotated[
        int, option("Requests that are sent at the same time.", "--concurrency", "-j", ge=1)
    ] = 8
    all_roles: Annotated[
        bool, option("Also turns that the agent program made for itself: warm-ups, summaries.", "--all-roles")
    ] = False
    allow_same_family: Annotated[
        bool, option("Also ask teachers about turns of models of their own family.", "--allow-same-family")
    ] = False
    allow_unknown_family: Annotated[
        bool,
        option(
            "Also ask where the family of the author, or of the teacher, is unknown.", "--allow-unknown-family"
        ),
    ] = False
    again: Annotated[
        bool, option("Ask again what a teacher refused, or what was under way when a process died.", "--again")
    ] = False
    redacted: Annotated[
        bool, option("Send sessions with the secrets, names and paths that are in them.", "--unredacted", off=True)
    ] = True
    config: Annotated[Path | None, option("Options from a table [replay].", metavar="FILE.toml")] = None


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


class TeacherShare(Struct):
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
            structs.replace(turn, message_id=own.message_id, model=own.model)
            for turn, own in zip(sent.turns, trace.turns, strict=True)
        ]
        return structs.replace(sent, trace_id=trace.trace_id, session_id=trace.session_id, turns=turns)


def select(
    sessions: SessionSource, teachers: Teachers, options: ReplaySettings, counts: SelectionCounts
) -> Generator[TeachableState]:
    """Yield the states to ask about, and count them in `counts`.

    A teacher is not asked about a turn by a model of its own family, nor if either family is unknown, unless the
    options allow it.
    """
    sample: TurnSelection | None = None
    if options.limit is not None:

        def askable(role: str, model: str | None) -> bool:
            """Return whether a teacher may be asked. Refusals are counted here, because refused turns are never
            read.
            """
            return _role_is_asked(role, options, counts) and bool(
                _chosen(model_family(model), teachers, options, counts)
            )

        sample = sessions.sample(askable, options.limit, options.seed, options.name)
        counts.not_asked.clear()  # counted again, for the sample only
    for trace in sessions.chosen(sample):
        if not _role_is_asked(trace.role, options, counts, len(trace.turns)):
            continue
        not_logged: ToolList | None = None
        for state in expand(trace):
            chosen = _chosen(state.source_family, teachers, options, counts)
            if not chosen:
                continue
            tools, source = state.tools, state.tools_source
            if source != "logged":
                if not_logged is None:
                    whole = sessions.whole(trace)
                    not_logged = ToolList.of(state) if whole is trace else OfferedTools(whole).unlogged
                tools, source = not_logged.tools, not_logged.source
            counts.states += 1
            counts.families[state.source_family or "unknown"] += 1
            counts.tools["own" if source == "logged" else source or "none"] += 1
            yield TeachableState(state, tools, chosen)


def _role_is_asked(role: str, options: ReplaySettings, counts: SelectionCounts, turns: int = 1) -> bool:
    role_counts = options.all_roles or role in WORK_ROLES
    if not role_counts:
        counts.left_out["role"] += turns
    return role_counts


def _chosen(
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


def request_for(stated: TeachableState, teacher: Teacher) -> TeacherRequest:
    """Return the request that asks a teacher about a state."""
    return build_request(teacher.config, stated.state.messages, stated.tools)


def estimate(
    chosen: Iterable[TeachableState], options: ReplaySettings, existing_asks: Callable[[Iterable[str]], set[str]]
) -> dict[str, TeacherShare]:
    """Return what each teacher would be asked about these states, and the cost. Nothing is sent.

    `existing_asks` returns those of the given ask ids that are done.
    """
    shares: dict[str, TeacherShare] = {}
    sizer = RequestSizer()
    remaining = iter(chosen)
    while batch := list(islice(remaining, _BATCH)):
        ids = {
            (stated.state.state_id, teacher.name): [
                ask_id(options, stated.state.state_id, teacher, number) for number in range(options.samples)
            ]
            for stated in batch
            for teacher in stated.teachers
        }
        done = existing_asks([id_ for some in ids.values() for id_ in some])
        for stated in batch:
            answer_tokens = int(length_of([message_of(stated.state.student_action)]) / _TOKEN_CHARS)
            for teacher in stated.teachers:
                share = shares.setdefault(teacher.name, TeacherShare())
                of_teacher = ids[stated.state.state_id, teacher.name]
                finished = sum(id_ in done for id_ in of_teacher)
                share.asks += len(of_teacher)
                share.done += finished
                if finished < len(of_teacher):
                    size = sizer.size(teacher, stated.state.messages, stated.tools)
                    _add(share, answer_tokens, teacher, size, len(of_teacher) - finished)
    return shares


def _add(share: TeacherShare, answer_tokens: int, teacher: Teacher, size: RequestSize, asks: int) -> None:
    completion = min(max(answer_tokens, _LIKELY_LEAST), teacher.config.max_tokens)
    likely = size.likely_tokens
    share.prompt_tokens += likely * asks
    share.completion_tokens += completion * asks
    if (price := teacher.price) is not None:
        share.likely_usd = (share.likely_usd or 0.0) + likely_cost(price, likely, completion) * asks
        worst = worst_cost(price, size.most_tokens, teacher.config.max_tokens)
        share.worst_usd = (share.worst_usd or 0.0) + worst * asks
