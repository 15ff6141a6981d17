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
    """What a replay asks. `again` asks once more what was refused, and what was under way when a process died.

    `name` is that of the replay: earlier invocations under it are counted, their cost too.
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
    """A state that is asked about, and its tools, which come of the whole session where its log lacks them."""

    state: TraceState
    tools: list[dict[str, Any]] | None
    teachers: tuple[Teacher, ...]


class SelectionCounts(Struct):
    """What a selection came to. `left_out` counts states by why no teacher may be asked about them.

    `not_asked` counts by teacher the states that it is not asked about though others are, or would be; `tools`
    the states by where their tools are from: own (the log), version, inferred (see `tool_lists.ToolsSource`),
    none.
    """

    states: int = 0
    families: Counter[str] = field(default_factory=Counter[str])
    left_out: Counter[str] = field(default_factory=Counter[str])
    not_asked: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    tools: Counter[str] = field(default_factory=Counter[str])


class TeacherShare(Struct):
    """What one teacher would be asked. Sums of dollars are None where its price is not known.

    `done` asks have their answer, or are not asked again. `worst_usd` is what is reserved for the rest.
    """

    asks: int = 0
    done: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    likely_usd: float | None = None
    worst_usd: float | None = None


class SessionSource:
    """The traces of a store with the turns that `where` is true of, redacted where there is a redactor.

    Raises ConfigError, when it is read, for an expression that is none.
    """

    def __init__(self, store: Store, where: str | None = None, redactor: Redactor | None = None) -> None:
        self._store = store
        self._where = where
        self._redactor = redactor

    def chosen(self, turns: TurnSelection | None = None) -> Iterator[Trace]:
        """The traces with the chosen turns, or with some of them."""
        return map(self._sendable, traces(self._store, self._where if turns is None else turns))

    def sample(
        self, accept: Callable[[str, str | None], bool], limit: int, seed: int, replay: str
    ) -> TurnSelection:
        """A random sample of the chosen turns of which `accept` is true; it gets the turn's role and model.

        States that the replay has asked about come first, so that it continues with the same ones.
        """

        def accepted(row: Mapping[str, Any]) -> bool:
            return accept(row["role"], text_or_none(row["model"]))

        asked_states = self._store.asks.states_of_replay(replay)
        return self._store.sessions.sample(accepted, ("role", "model"), self._where, limit, seed, asked_states)

    def whole(self, trace: Trace) -> Trace:
        """One of them with all its turns."""
        if self._where is None:
            return trace
        try:
            trace.trace_id.encode()
        except UnicodeEncodeError:
            return trace  # SQL has no word for it
        name = trace.trace_id.replace("'", "''")
        stored = next(traces(self._store, f"trace_id = '{name}'"), None)
        return trace if stored is None else self._sendable(stored)

    def _sendable(self, trace: Trace) -> Trace:
        """The trace as it may be sent. Its ids, and who wrote its turns, are only for us, and stay as they are."""
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
    """The states to ask about, counted in `counts`.

    A teacher is not asked about a turn that a model of its family wrote, nor where either family is not known,
    unless the options allow it.
    """
    sample: TurnSelection | None = None
    if options.limit is not None:

        def askable(role: str, model: str | None) -> bool:
            """Whether a teacher may be asked; what may not is counted now, for it is never read."""
            return _role_is_asked(role, options, counts) and bool(
                _chosen(model_family(model), teachers, options, counts)
            )

        sample = sessions.sample(askable, options.limit, options.seed, options.name)
        counts.not_asked.clear()  # counted again, of the sample alone
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
    """The id of an ask: the same for the same question to the same teacher with the same settings."""
    encoded = msgspec.json.encode([options.name, options.redacted, state_id, teacher.identity, number])
    return hashlib.blake2b(encoded, digest_size=16, person=b"ask").hexdigest()


def request_for(stated: TeachableState, teacher: Teacher) -> TeacherRequest:
    """The request that puts a state to a teacher."""
    return build_request(teacher.config, stated.state.messages, stated.tools)


def estimate(
    chosen: Iterable[TeachableState], options: ReplaySettings, existing_asks: Callable[[Iterable[str]], set[str]]
) -> dict[str, TeacherShare]:
    """What each teacher would be asked about these states, and what it would cost. Nothing is sent.

    `existing_asks` returns those of some ids whose asks are done.
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
            for teacher in stated.teachers:
                share = shares.setdefault(teacher.name, TeacherShare())
                of_teacher = ids[stated.state.state_id, teacher.name]
                finished = sum(id_ in done for id_ in of_teacher)
                share.asks += len(of_teacher)
                share.done += finished
                if finished < len(of_teacher):
                    size = sizer.size(teacher, stated.state.messages, stated.tools)
                    _add(share, stated, teacher, size, len(of_teacher) - finished)
    return shares


def _add(share: TeacherShare, stated: TeachableState, teacher: Teacher, size: RequestSize, asks: int) -> None:
    answer_tokens = length_of([message_of(stated.state.student_action)]) / _TOKEN_CHARS
    completion = min(max(int(answer_tokens), _LIKELY_LEAST), teacher.config.max_tokens)
    likely = size.likely_tokens
    share.prompt_tokens += likely * asks
    share.completion_tokens += completion * asks
    if (price := teacher.price) is not None:
        share.likely_usd = (share.likely_usd or 0.0) + likely_cost(price, likely, completion) * asks
        worst = worst_cost(price, size.most_tokens, teacher.config.max_tokens)
        share.worst_usd = (share.worst_usd or 0.0) + worst * asks
