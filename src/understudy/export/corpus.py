"""The data of an export: the selected sessions and rollouts of a store, in one form, read lazily.

Every iterator can be requested again and then reads one trace or attempt at a time again, so that memory does not
grow with the number of rows. Session data is redacted on its way out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

from understudy.errors import ConfigError
from understudy.export.examples import (
    Example,
    TaskOrigin,
    attempt_examples,
    group_of,
    trace_examples,
    with_thinking,
)
from understudy.export.lengths import LengthFigures, LengthRule, length_figures
from understudy.export.mixture import NOT_DRAWN, Mixture, MixturePart, WeightRule
from understudy.export.overlap import Benchmark, NearDuplicates
from understudy.ingest import trace_store
from understudy.ingest.redaction import redact_trace, trace_texts
from understudy.ingest.trace import Trace, state_id
from understudy.preference.checks import LOSSY, NO_THINKING, Checks, Pair, PairCounts, Template, Thinking
from understudy.preference.pairs import replay_pairs
from understudy.preference.rollouts import rollout_pairs
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.store.keys import CLIENT
from understudy.store.outcomes import TOO_LITTLE_PROTECTION, VOTED_OUT, GradedRollout
from understudy.store.runs import check_run_id
from understudy.trajectory.roles import Role
from understudy.trajectory.samples import Sample, samples
from understudy.trajectory.tree import Trajectory, build
from understudy.types import WORK_ROLES, AgentIdentity, Attempt, Protection, group_name, is_solved

if TYPE_CHECKING:
    from understudy.redact.redactor import Redactor

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


def split(group: str, *, seed: int = 0, share: float = 0.1) -> Split:
    """Return the split of a group (a project or a task). About `share` of all groups, in [0, 1), are in "test"."""
    digest = blake2b(f"{seed}\0{group}".encode(errors="surrogatepass"), digest_size=8).digest()
    return "test" if int.from_bytes(digest) < share * 2**64 else "train"


Origin = Literal["sessions", "rollouts"]
Unit = Literal["turn", "conversation"]

ORIGINS: tuple[Origin, ...] = ("sessions", "rollouts")

_TRACE_ROLES: dict[str, Role] = {"main": "main", "subagent": "subagent", "compact": "compaction"}
"""The role of a trace in terms of call roles. Roles that are not listed are auxiliary."""


class ExportSelection(Struct, frozen=True, kw_only=True):
    """Which part of a store is exported.

    `run` selects one of its runs (None: all). `roles` are roles of calls and sessions. `where` is an SQL
    expression over the columns of turns and traces, for sessions. Turns with lossy fidelity are left out unless
    `include_lossy`. `thinking` is what happens to the thinking in answers; None means "only-when-both" in pairs
    and "as-logged" elsewhere. `protection` is what a rollout's reward needs at least. `solved_only`: leave out
    rollouts with a reward below 1, and sessions whose log says that the task was not solved. `test_share` of the
    groups, chosen by `seed`, go to the split "test".

    A session that is a near duplicate of another is left out if the two are in different splits, or, with
    `drop_near_duplicates`, in any case; so is one that nearly equals a session of the stores `apart_from`, which
    are not exported themselves. `exclude_tasks` is a file of tasks (rows with `instance_id`, `repo`, `patch`) that
    are not exported: see `overlap.Benchmark`.

    Conversations of more than `cut_tokens`, or `cut_chars`, are cut at turns (see `lengths.LengthRule`);
    `tokenizer` counts the tokens. `weights` say how often examples of sessions occur in the split "train" (see
    `mixture.Mixture`). With `clients`, the names of keys of a gateway that ran alone, their calls that began in
    [since, until), in Unix seconds, are exported instead; `origins` is then empty.
    """

    origins: tuple[Origin, ...] = ORIGINS
    run: str | None = None
    roles: tuple[Role, ...] = WORK_ROLES
    include_suspicious: bool = False
    protection: Protection = "none"
    include_lossy: bool = False
    thinking: Thinking | None = None
    where: str | None = None
    solved_only: bool = False
    test_share: float = 0.1
    seed: int = 0
    drop_near_duplicates: bool = False
    apart_from: tuple[StoreLocation, ...] = ()
    exclude_tasks: Path | None = None
    cut_tokens: int | None = None
    cut_chars: int | None = None
    tokenizer: str | None = None
    weights: tuple[WeightRule, ...] = ()
    clients: tuple[str, ...] = ()
    since: float = -math.inf
    until: float = math.inf


class ClientSession(Struct, frozen=True, kw_only=True):
    """The calls that a gateway's client made with one session id (None: calls without one), within the chosen
    time.

    It replaces a graded rollout where rows are made from calls: it has neither a rollout nor a verdict.
    """

    client: str
    attempt: Attempt
    session_id: str | None
    rollout: None = None
    verdict: None = None

    @property
    def id(self) -> str:
        """Its unique id within the store."""
        return self.attempt.id if self.session_id is None else f"{self.attempt.id}.{self.session_id}"


CallSource = GradedRollout | ClientSession
"""What rows with the tokens of calls are made from."""


class CorpusCounts(Struct, kw_only=True):
    """The result of an iteration: counts of examples, pairs or samples by origin, and of what was left out by
    reason.
    """

    total: int = 0
    origins: Counter[str] = field(default_factory=Counter[str])
    sources: Counter[str] = field(default_factory=Counter[str])
    licences: Counter[str] = field(default_factory=Counter[str])
    families: Counter[str] = field(default_factory=Counter[str])
    tools_sources: Counter[str] = field(default_factory=Counter[str])
    left_out: Counter[str] = field(default_factory=Counter[str])
    notes: Counter[str] = field(default_factory=Counter[str])
    lengths: Counter[int] = field(default_factory=Counter[int])

    def count(self, origin: str, source: str, licence: str | None, family: str | None, times: int = 1) -> None:
        """Count an exported item; -1 takes it back."""
        self.total += times
        self.origins[origin] += times
        self.sources[source] += times
        self.licences[licence or "unknown"] += times
        self.families[family or "unknown"] += times

    def count_item(self, item: Example | Pair, times: int = 1) -> None:
        """Count an example or a pair."""
        if isinstance(item, Example):
            origin, source, licence = item.origin, item.source, item.licence
            if item.length is not None:
                self.lengths[item.length] += times
        else:
            origin, source, licence = "session" if item.origin == "replay" else "rollout", item.origin, None
        self.count(origin, source, licence, item.family, times)
        if origin == "session":  # the tools of a rollout's agent are always known
            self.tools_sources[item.tools_source or "none"] += times

    def leave_out(self, item: Example | Pair, reason: str) -> None:
        """Count as left out what was already counted as exported."""
        self.count_item(item, -1)
        self.left_out[reason] += 1

    def tables(self) -> dict[str, Any]:
        """Return the counts by origin, the most frequent first."""
        names = ("origins", "sources", "licences", "families", "tools_sources")
        tables = {name: getattr(self, name) for name in names}
        return {name: positive_counts(counter) for name, counter in tables.items()}


def _state_ids(trace: Trace) -> list[str]:
    return [state_id(trace.trace_id, turn.message_id) for turn in trace.turns]


def origin_name(item: CallSource) -> str:
    """Return the origin under which rows made from these calls are counted."""
    return "client" if isinstance(item, ClientSession) else "rollout"


def positive_counts(counter: Counter[str]) -> dict[str, int]:
    """Return the counts above 0, the most frequent first."""
    return {name: count for name, count in counter.most_common() if count}


class Corpus:
    """The selected part of a store. `counts` are those of the latest iteration, updated during it.

    Raises ConfigError if session data would leave the store unredacted: it needs a redactor or `unredacted`, the
    user's consent. Calls of a gateway's clients always need `unredacted`, because exact tokens cannot be redacted.
    """

    def __init__(
        self,
        store: Store,
        selection: ExportSelection | None = None,
        redactor: Redactor | None = None,
        *,
        unredacted: bool = False,
        template: Template | None = None,
    ) -> None:
        self.store = store
        self.selection = selection or ExportSelection()
        self.template = template
        self._mixture: Mixture | None = None
        self.length_rule = LengthRule(
            template, max_tokens=self.selection.cut_tokens, max_chars=self.selection.cut_chars
        )
        self.redactor = None if unredacted else redactor
        self.unredacted = unredacted and bool("sessions" in self.selection.origins or self.selection.clients)
        self.counts = CorpusCounts()
        if "sessions" in self.selection.origins and redactor is None and not unredacted:
            raise ConfigError(
                "sessions contain secrets, names and paths, so exporting them needs a redactor; give one, leave "
                "out the sessions (--from rollouts), or export them unredacted (--unredacted)"
            )
        if self.selection.clients and not unredacted:
            raise ConfigError(
                "calls of a gateway's clients may contain secrets, and exact tokens cannot be redacted; give "
                "--unredacted to export them unchanged"
            )
        if not 0 <= self.selection.test_share < 1:
            raise ConfigError(
                f"--test-share: expected a number from 0 to below 1, got {self.selection.test_share}; give a "
                "share of the tasks and projects, such as 0.1"
            )

    def with_selection(self, selection: ExportSelection) -> Corpus:
        """Return the corpus of another selection from the same store."""
        return Corpus(self.store, selection, self.redactor, unredacted=self.unredacted, template=self.template)

    def refuse_length_options(self, rows: str) -> None:
        """Raise ConfigError if measuring, cutting or weighting was requested for `rows`, which do not support
        it.
        """
        selection = self.selection
        flags = {
            "max-tokens": selection.cut_tokens,
            "max-chars": selection.cut_chars,
            "tokenizer": selection.tokenizer,
            "weight": selection.weights or None,
        }
        for flag, value in flags.items():
            if value is not None:
                raise ConfigError(f"--{flag}: applies to conversations, not to {rows}; leave it out")

    def split(self, group: str) -> Split:
        """Return the split of a group of the corpus."""
        return split(group, seed=self.selection.seed, share=self.selection.test_share)

    def examples(self, unit: Unit = "conversation") -> Iterator[Example]:
        """Yield what there is to learn from: one example per turn, or one per path (see `examples.Example`).

        In the example of a path, every selected turn is learned once. Messages are plain text; an image becomes
        "[image]". Turns that did nothing, or whose tool calls have invalid arguments, are left out.
        """
        tally = self._begin()
        roles = self.selection.roles
        of_sessions = (
            example
            for trace in self._traces(tally)
            for example in trace_examples(trace, unit, tally.left_out, tally.notes)
        )
        of_rollouts = (
            example
            for graded in self._rollouts(tally)
            for example in attempt_examples(
                self.trajectory(graded), graded, self.task_origin(graded), unit, roles, tally.left_out
            )
        )
        for example in chain(of_sessions, of_rollouts):
            with_choice = with_thinking(example, self.selection.thinking or "as-logged")
            if with_choice is None:
                tally.left_out[NO_THINKING] += 1
                continue
            for piece in self.length_rule.pieces(with_choice, tally.left_out, tally.notes):
                copies = self._copies(piece)
                if copies == 0:
                    tally.left_out[NOT_DRAWN] += 1
                for _ in range(copies):
                    tally.count_item(piece)
                    yield piece

    def count_row_lengths(self, example: Example, ends: Sequence[int]) -> None:
        """Count the lengths of the rows that end with these of an example's messages, instead of its own
        length.
        """
        if example.length is None:
            return
        self.counts.lengths[example.length] -= 1
        for end in ends:
            is_end = end + 1 == len(example.messages)
            length = (
                example.length if is_end else self.length_rule.measure(example.messages[: end + 1], example.tools)
            )
            if length is not None:
                self.counts.lengths[length] += 1

    def _copies(self, example: Example) -> int:
        """Return how often an example is written."""
        weighted = example.origin == "session" and self.split(example.group) == "train"
        return self._mixture.copies(example) if self._mixture is not None and weighted else 1

    def samples(self) -> Iterator[tuple[GradedRollout, Sample]]:
        """Yield the token sequences of the rollouts, with exactly the sampled tokens."""
        tally = self._begin()
        for graded in self._rollouts(tally):
            for sample in self._samples(graded, tally):
                yield graded, sample

    def client_samples(self) -> Iterator[tuple[ClientSession, Sample]]:
        """Yield the token sequences of the selected clients, with exactly the sampled tokens."""
        tally = self._begin()
        for session in self._client_sessions(tally):
            for sample in self._samples(session, tally):
                yield session, sample

    def _samples(self, item: CallSource, tally: CorpusCounts) -> Iterator[Sample]:
        roles, origin, trajectory = self.selection.roles, self.task_origin(item), self.trajectory(item)
        calls = [node.call for node in trajectory.nodes if node.role in roles]
        if without_tokens := sum(call.status == "ok" and call.completion_token_ids is None for call in calls):
            tally.left_out["calls without token ids"] += without_tokens
        rollout_id = item.id if isinstance(item, ClientSession) else item.rollout.id
        reward = None if item.verdict is None else item.verdict.reward
        for sample in samples(trajectory, rollout_id=rollout_id, reward=reward, roles=roles):
            if sample.segment.superseded:
                tally.left_out["superseded calls"] += 1
            elif not any(sample.segment.loss_mask):
                tally.left_out["nothing sampled"] += 1
            else:
                tally.count(origin_name(item), origin.source, origin.licence, None)
                yield sample

    def pairs(self) -> Iterator[Pair]:
        """Yield the preference pairs: from replays if sessions are selected, from attempts if rollouts are."""
        tally, selection = self._begin(), self.selection
        counts = PairCounts(left_out=tally.left_out, notes=tally.notes)
        checked = Checks(thinking=selection.thinking or "only-when-both")
        of_replays = replay_pairs(
            self.store,
            where=selection.where,
            redactor=self.redactor,
            include_lossy=selection.include_lossy,
            checked=checked,
            tally=counts,
        )
        of_attempts = rollout_pairs(
            self.store,
            selection.run,
            include_suspicious=selection.include_suspicious,
            protection=selection.protection,
            redactor=self.redactor,
            checked=checked,
            tally=counts,
        )
        for origin, pairs in (("sessions", of_replays), ("rollouts", of_attempts)):
            for pair in pairs if origin in selection.origins else ():
                if self._benchmark is not None and (
                    reason := self._benchmark.overlap(pair.group, _texts(to_builtins(pair)))
                ):
                    tally.left_out[reason] += 1
                    continue
                tally.count_item(pair)
                yield pair

    def traces(self) -> Iterator[Trace]:
        """Yield the sessions with the selected turns only, redacted."""
        tally = self._begin()
        for trace in self._traces(tally):
            tally.count("session", trace.format, None, None)
            yield trace

    def rollouts(self) -> Iterator[GradedRollout]:
        """Return the rollouts with the attempt that decided each, in the order of the store."""
        tally = self._begin()
        for graded in self._rollouts(tally):
            origin = self.task_origin(graded)
            tally.count("rollout", origin.source, origin.licence, None)
            yield graded

    def client_sessions(self) -> Iterator[ClientSession]:
        """Return the sessions of a gateway's selected clients, by client, each list ordered by first call."""
        tally = self._begin()
        for session in self._client_sessions(tally):
            tally.count("client", self.task_origin(session).source, None, None)
            yield session

    def trajectory(self, item: CallSource) -> Trajectory:
        """Return the calls of a rollout's deciding attempt, or of a client's session, as a tree."""
        if isinstance(item, GradedRollout):
            return build(self.store.calls.of_attempt(item.attempt.id))
        selection = self.selection
        return build(
            self.store.calls.of_session(item.attempt.id, item.session_id, selection.since, selection.until)
        )

    def task_origin(self, item: CallSource) -> TaskOrigin:
        """Return what a rollout's task determines about its rows. A client's session is a group of its own."""
        if isinstance(item, ClientSession):
            return TaskOrigin(group=item.id, source="gateway", licence=None)
        graded = item
        task = self.store.runs.task(graded.rollout.run_id, graded.rollout.task_id)
        licence = task.meta.get("license")
        return TaskOrigin(
            group=task.instance_id,
            source=str(task.meta.get("dataset") or task.repo),
            licence=licence if isinstance(licence, str) else None,
        )

    @cached_property
    def shared_tasks(self) -> frozenset[str]:
        """The ids of tasks that several agents worked on; their rollouts form several groups."""
        agents: dict[str, set[AgentIdentity]] = {}
        for rollout in self.store.runs.rollouts(self.selection.run):
            agents.setdefault(rollout.task_id, set()).add(rollout.agent)
        return frozenset(task_id for task_id, names in agents.items() if len(names) > 1)

    def group_name(self, graded: GradedRollout) -> str:
        """Return the name of a rollout's group; "" if only one agent worked on its task."""
        rollout = graded.rollout
        return group_name(rollout.task_id, rollout.agent) if rollout.task_id in self.shared_tasks else ""

    @property
    def lengths(self) -> LengthFigures | None:
        """The lengths of the latest iteration's conversations; None if it had none."""
        rule = self.length_rule
        return length_figures(self.counts.lengths, rule.unit, self.selection.tokenizer, rule.limit)

    @property
    def redaction(self) -> dict[str, int]:
        """How often each rule of the redactor has replaced something so far."""
        return {} if self.redactor is None else dict(self.redactor.report.counts.most_common())

    @property
    def mixture(self) -> list[MixturePart]:
        """The effect of the weights in the latest iteration.

        Their conditions, which may name a project, are redacted.
        """
        parts = [] if self._mixture is None else self._mixture.parts
        if self.redactor is None:
            return parts
        return [replace(part, condition=self.redactor.text(part.condition)) for part in parts]

    def _begin(self) -> CorpusCounts:
        self.counts = CorpusCounts()
        selection = self.selection
        if selection.weights:
            self._mixture = Mixture(self.store.sessions, selection.weights, selection.seed)
        return self.counts

    def _traces(self, tally: CorpusCounts) -> Iterator[Trace]:
        if "sessions" not in self.selection.origins:
            return
        duplicates = self._near_duplicate_index()
        for trace in trace_store.traces(self.store.sessions, where=self.selection.where):
            role = _TRACE_ROLES.get(trace.role, "auxiliary")
            if role not in self.selection.roles:
                tally.left_out[f"role {role}"] += len(trace.turns)
                continue
            if self.selection.solved_only and trace.outcome and trace.outcome.resolved is False:
                tally.left_out["not solved"] += len(trace.turns)
                continue
            if not self.selection.include_lossy:
                faithful = [turn for turn in trace.turns if turn.fidelity != "lossy"]
                if len(faithful) < len(trace.turns):
                    tally.left_out[LOSSY] += len(trace.turns) - len(faithful)
                    trace = replace(trace, turns=faithful)
            if trace.turns:
                texts = [*trace_texts(trace)]
                exported = trace if self.redactor is None else redact_trace(trace, self.redactor, texts)
                if self._mixture is not None:
                    self._mixture.rename(_state_ids(exported), _state_ids(trace))
                reason = self._overlap(trace, texts, group_of(exported), duplicates)
                if reason is None:
                    yield exported
                else:
                    tally.left_out[reason] += len(trace.turns)

    def _near_duplicate_index(self) -> NearDuplicates:
        """Return an index of the sessions in the stores `apart_from`. Raises StoreError if one is not a store."""
        duplicates = NearDuplicates()
        for path in self.selection.apart_from:
            for trace in trace_store.traces(path):
                _, sketch = duplicates.find(_texts(list(trace_texts(trace))))
                header = replace(trace, nodes=[], turns=[])
                group = group_of(header if self.redactor is None else redact_trace(header, self.redactor))
                duplicates.add(group, sketch)
        return duplicates

    def _benchmark_reason(self, graded: GradedRollout) -> str | None:
        """Return why a rollout's task is excluded, or None."""
        task = self.store.runs.task(graded.rollout.run_id, graded.rollout.task_id)
        benchmark = self._benchmark
        return benchmark and (
            benchmark.overlap(task.instance_id, [task.gold_patch]) or benchmark.overlap(task.repo)
        )

    @cached_property
    def _benchmark(self) -> Benchmark | None:
        path = self.selection.exclude_tasks
        return None if path is None else Benchmark.read(path)

    def _overlap(self, trace: Trace, values: list[Any], group: str, duplicates: NearDuplicates) -> str | None:
        """Return why a session of a group, with these texts, is left out, because of an excluded task or a near
        duplicate; or None.
        """
        selection, benchmark = self.selection, self._benchmark
        if benchmark is None and not selection.drop_near_duplicates and not selection.test_share:
            return None
        texts = list(_texts(values))
        if benchmark is not None and (reason := benchmark.overlap(trace.project or group, texts)):
            return reason
        near_groups, sketch = duplicates.find(texts)
        if near_groups and selection.drop_near_duplicates:
            return "near-duplicate of another session"
        if any(self.split(near_group) != self.split(group) for near_group in near_groups):
            return "near-duplicate of a session in the other split"
        duplicates.add(group, sketch)
        return None

    def _client_sessions(self, tally: CorpusCounts) -> Iterator[ClientSession]:
        selection = self.selection
        attempts = {attempt.id.removeprefix(CLIENT): attempt for attempt in self.store.keys.clients()}
        if unknown_names := [name for name in selection.clients if name not in attempts]:
            raise ConfigError(
                f"the store has no key {unknown_names[0]!r}; give one of: "
                f"{', '.join(map(repr, attempts)) or 'none, it has no keys'}"
            )
        for name in dict.fromkeys(selection.clients):
            attempt = attempts[name]
            for session_id in self.store.calls.sessions(attempt.id, selection.since, selection.until):
                session = ClientSession(client=name, attempt=attempt, session_id=session_id)
                if self._benchmark is not None and (reason := self._benchmark_session(session, self._benchmark)):
                    tally.left_out[reason] += 1
                else:
                    yield session

    def _benchmark_session(self, session: ClientSession, benchmark: Benchmark) -> str | None:
        """Return why a client's session belongs to an excluded task, or None."""
        nodes = self.trajectory(session).nodes
        return benchmark.overlap(
            session.id,
            (block.text for node in nodes for block in (*node.conversation.blocks, *(node.answer or ()))),
        )

    def _rollouts(self, tally: CorpusCounts) -> Iterator[GradedRollout]:
        if "rollouts" not in self.selection.origins:
            return
        run_ids = [run.id for run in self.store.runs.all()]
        run = self.selection.run
        check_run_id(run, run_ids)
        if not run_ids and self.selection.origins == ("rollouts",):
            raise ConfigError(
                "nothing to export: the store has no runs, and sessions were not requested; to export calls of a "
                "gateway without a run, name their key with --key"
            )
        decisions = {graded.rollout.id: graded for graded in self.store.outcomes.decisions(run)}
        excluded = self.store.votes.excluded_rollouts()
        for rollout in self.store.runs.rollouts(run):
            graded = decisions.get(rollout.id)
            if rollout.id in excluded:
                tally.left_out[VOTED_OUT] += 1
            elif graded is None:
                tally.left_out[f"rollout without a verdict, {rollout.status}"] += 1
            elif graded.verdict.integrity.status != "clean" and not self.selection.include_suspicious:
                tally.left_out["suspicious patch"] += 1
            elif not graded.verdict.has_protection(self.selection.protection):
                tally.left_out[TOO_LITTLE_PROTECTION] += 1
            elif self.selection.solved_only and not is_solved(graded.verdict.reward):
                tally.left_out["not solved"] += 1
            elif self._benchmark is not None and (reason := self._benchmark_reason(graded)):
                tally.left_out[reason] += 1
            else:
                yield graded


def _texts(value: Any) -> Iterator[str]:
    """Return all strings in a JSON value. Redaction, whose rules load slowly, is imported only when this is
    called.
    """
    from understudy.redact.redactor import json_strings

    return (text for text, _ in json_strings(value))
