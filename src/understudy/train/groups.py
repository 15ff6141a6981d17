"""The training data of the trainers: groups of graded rollouts, read from the stores of runs or from token
exports.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError
from understudy.export.files import read_manifest
from understudy.store import Store
from understudy.store.training import TokenValues
from understudy.trajectory.roles import Role
from understudy.trajectory.samples import Sample, samples
from understudy.trajectory.tree import build
from understudy.types import WORK_ROLES, Call, group_name
from understudy.util.files import atomic_path


class TokenSequence(Struct, frozen=True, kw_only=True):
    """One segment of a rollout's trajectory.

    `loss_mask` is 1 exactly on the tokens to learn. `logprobs` are those of the sampling policy, at its
    temperature, 0.0 outside the mask; None if the backend returned none (then only SFT can use the sequence).
    `policy_versions` are those of its calls. `calls` has the id of each call, and where its completion begins and
    ends in `token_ids`; it is empty for sequences of an export. `teacher_logprobs` are at temperature 1, 0.0
    outside the mask; None without a teacher.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    policy_versions: tuple[str | None, ...] = ()
    calls: tuple[tuple[str, int, int], ...] = ()
    teacher_logprobs: tuple[float, ...] | None = None

    @property
    def sampled(self) -> int:
        """Return the number of tokens that are trained on."""
        return sum(self.loss_mask)


class TrainingRollout(Struct, frozen=True, kw_only=True):
    """A graded rollout: all its sequences (branches, segments) have the same reward."""

    rollout_id: str
    task_id: str
    reward: float
    sequences: tuple[TokenSequence, ...]


class RolloutGroup(Struct, frozen=True, kw_only=True):
    """The rollouts of one task by one agent, among which advantages are computed.

    `name` distinguishes groups of the same task if several agents worked on it; otherwise it is empty.
    """

    task_id: str
    rollouts: tuple[TrainingRollout, ...]
    name: str = ""


_T = TypeVar("_T")

TOKENS = "trl-tokens"
"""The export format that keeps token ids and logprobs, so that training on it equals training on the store."""

NO_VERDICT = "rollouts without a verdict"
SUSPICIOUS = "rollouts with a suspicious patch"
NO_TOKENS = "calls without token ids"
NO_LOGPROBS = "sequences without logprobs"
BAD_LOGPROBS = "sequences whose logprobs are not numbers"
SUPERSEDED = "sequences of calls that were made again"
NO_TEACHER = "sequences without the teacher's logprobs"
NOTHING_SAMPLED = "sequences in which nothing was sampled"
NOTHING_LEFT = "rollouts of which no sequence is left"
BAD_REWARD = "rollouts whose reward is not a number"


class _ExportedSequence(msgspec.Struct):
    """A row of an export in the format trl-tokens."""

    input_ids: tuple[int, ...]
    assistant_masks: tuple[Literal[0, 1], ...]
    logprobs: tuple[float | None, ...]
    reward: float | None
    policy_versions: tuple[str | None, ...]
    instance_id: str
    rollout_id: str
    group: str = ""

    def __post_init__(self) -> None:
        if not len(self.input_ids) == len(self.assistant_masks) == len(self.logprobs):
            raise ValueError(
                "invalid row: expected the same length of input_ids, assistant_masks and logprobs, got "
                f"{len(self.input_ids)}, {len(self.assistant_masks)} and {len(self.logprobs)}; export it "
                "again"
            )


def load_groups(
    sources: Iterable[Path],
    *,
    run: str | None = None,
    roles: Collection[Role] = WORK_ROLES,
    include_suspicious: bool = False,
    logprobs: bool = True,
    imitation: bool = False,
    temperature: float | None = None,
    left_out: Counter[str] | None = None,
) -> Iterator[RolloutGroup]:
    """Yield the groups of `sources`, which are directories of stores or of exports in the format trl-tokens.

    A group is the rollouts of one task by one agent in one run or one export. With `logprobs`, sequences without
    logprobs of the sampling policy are left out, because policy gradients need them. With `imitation`, tokens of
    answers with a malformed tool call are not learned (see `Segment.target_mask`). What is left out is counted in
    `left_out` by reason. Raises ConfigError for a directory that is neither, or when a call is known to have been
    sampled at another `temperature`; StoreError for a damaged store.
    """
    reasons = Counter[str]() if left_out is None else left_out
    for source in sources:
        if is_export(source):
            yield from _groups_from_export(source, logprobs=logprobs, left_out=reasons)
        else:
            with Store.open(source, create=False) as store:
                yield from groups_from_store(
                    store,
                    run=run,
                    roles=roles,
                    include_suspicious=include_suspicious,
                    logprobs=logprobs,
                    imitation=imitation,
                    temperature=temperature,
                    left_out=reasons,
                )


def groups_from_store(
    store: Store,
    *,
    run: str | None = None,
    roles: Collection[Role] = WORK_ROLES,
    include_suspicious: bool = False,
    logprobs: bool = True,
    imitation: bool = False,
    temperature: float | None = None,
    left_out: Counter[str] | None = None,
    tasks: Collection[str] | None = None,
) -> Iterator[RolloutGroup]:
    """Yield the groups of an open store, only those of `tasks` where that is given; see `load_groups`."""
    reasons = Counter[str]() if left_out is None else left_out
    run_ids: list[str | None] = [run.id for run in store.runs.all()]
    for run_id in (run_ids or [None]) if run is None else [run]:
        selection = store.outcomes.select_graded(run_id, include_suspicious=include_suspicious)
        reasons[NO_VERDICT] += sum(selection.left_out.values())
        reasons[SUSPICIOUS] += sum(
            count for task, count in selection.suspicious.items() if tasks is None or task in tasks
        )
        groups = selection.groups()
        agents = Counter(task_id for task_id, _ in groups)
        for (task_id, agent), members in groups.items():
            if tasks is not None and task_id not in tasks:
                continue
            rollouts: list[TrainingRollout] = []
            for member in members:
                trajectory = build(store.calls.of_attempt(member.attempt.id))
                answered = [n.call for n in trajectory.nodes if n.role in roles and n.call.status == "ok"]
                reasons[NO_TOKENS] += sum(call.completion_token_ids is None for call in answered)
                if temperature is not None:
                    _check_temperature(answered, temperature)
                reward = member.verdict.reward
                member_samples = samples(trajectory, rollout_id=member.rollout.id, reward=reward, roles=roles)
                sequences = [
                    sequence
                    for sequence in (_sequence_of_sample(sample, imitation, reasons) for sample in member_samples)
                    if sequence is not None
                ]
                rollout = _rollout(member.rollout.id, task_id, reward, sequences, logprobs, reasons)
                if rollout is not None:
                    rollouts.append(rollout)
            if rollouts:
                name = group_name(task_id, agent) if agents[task_id] > 1 else ""
                yield RolloutGroup(task_id=task_id, rollouts=tuple(rollouts), name=name)
    _remove_zero_counts(reasons)


def is_export(directory: Path) -> bool:
    """Return whether a directory holds an export that the trainers read as one.

    False for a run's directory in which an export of another format lies. Raises ConfigError when the manifest
    cannot be read.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        return False
    # Some formats write their files into a run's own directory; such a directory counts as a store.
    return manifest.get("format") == TOKENS or not (directory / "store.db").exists()


def export_format(directory: Path) -> str | None:
    """Return the format of the export in a directory, or None if there is no export."""
    manifest = read_manifest(directory) if is_export(directory) else None
    return None if manifest is None else str(manifest.get("format"))


def write_groups(path: Path, groups: Iterable[RolloutGroup]) -> None:
    """Write groups to a file, atomically. Raises ConfigError when it cannot be written."""
    _write(path, list(groups))


def write_token_values(path: Path, values: Sequence[TokenValues]) -> None:
    """Write the values that an update computed for tokens to a file, atomically. Raises ConfigError as above."""
    _write(path, values)


def _write(path: Path, value: Any) -> None:
    try:
        with atomic_path(path) as fresh:
            fresh.write_bytes(msgspec.msgpack.encode(value))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; check the free disk space and the permissions of its "
            "directory, then run the same command again"
        ) from error


def read_groups(path: Path) -> list[RolloutGroup]:
    """Read the groups that `write_groups` wrote. Raises ConfigError when the file cannot be read or is invalid."""
    return _read(path, list[RolloutGroup], "rollout groups")


def read_token_values(path: Path) -> list[TokenValues]:
    """Read what `write_token_values` wrote. Raises ConfigError when the file cannot be read or is invalid."""
    return _read(path, list[TokenValues], "token values")


def _read(path: Path, kind: type[_T], content_name: str) -> _T:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(
            f"{path}: {content_name} cannot be read: {error.strerror}; check its permissions, then run the loop "
            "again"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path}: expected {content_name}, but this file of one step is damaged: {error}; it cannot be made "
            "again, so start the loop in a new --output-dir"
        ) from error


def format_counts(left_out: Counter[str]) -> str:
    """Return the counts as one line of text, or "nothing" if all are 0."""
    return ", ".join(f"{count} {why}" for why, count in left_out.most_common() if count) or "nothing"


def _check_temperature(calls: Iterable[Call], temperature: float) -> None:
    for call in calls:
        sampled_at = call.sampling.get("temperature")
        if isinstance(sampled_at, int | float) and not math.isclose(sampled_at, temperature, rel_tol=1e-6):
            raise ConfigError(
                f"call {call.id} was sampled at temperature {sampled_at:g}, and its logprobs would be recomputed "
                f"at {temperature:g}: "
                + (
                    f"give --temperature {sampled_at:g}"
                    if sampled_at > 0
                    else "collect rollouts with a temperature above 0"
                )
            )


def _sequence_of_sample(sample: Sample, imitation: bool, counts: Counter[str]) -> TokenSequence | None:
    segment = sample.segment
    if segment.superseded:
        counts[SUPERSEDED] += 1
        return None
    return TokenSequence(
        token_ids=segment.token_ids,
        loss_mask=segment.target_mask if imitation else segment.loss_mask,
        logprobs=_complete_logprobs(segment.logprobs),
        policy_versions=segment.policy_versions,
        calls=tuple((call, *span) for call, span in zip(segment.call_ids, segment.completions, strict=True)),
    )


def _complete_logprobs(logprobs: Sequence[float | None]) -> tuple[float, ...] | None:
    """Return the logprobs of a sequence; None if that of a token is missing."""
    values = tuple(value for value in logprobs if value is not None)
    return values if len(values) == len(logprobs) else None


def _rollout(
    rollout_id: str,
    task_id: str,
    reward: float,
    sequences: Sequence[TokenSequence],
    logprobs: bool,
    counts: Counter[str],
) -> TrainingRollout | None:
    if not math.isfinite(reward):
        counts[BAD_REWARD] += 1
        return None
    usable = leave_out(sequences, lambda sequence: _defect(sequence, logprobs), counts)
    if not usable:
        counts[NOTHING_LEFT] += 1
        return None
    return TrainingRollout(rollout_id=rollout_id, task_id=task_id, reward=reward, sequences=tuple(usable))


def leave_out(rows: Iterable[_T], defect: Callable[[_T], str | None], left_out: Counter[str]) -> list[_T]:
    """Return the rows without a defect. Those with one are counted in `left_out` under what `defect` returned."""
    usable: list[_T] = []
    for row in rows:
        if why := defect(row):
            left_out[why] += 1
        else:
            usable.append(row)
    return usable


def _defect(sequence: TokenSequence, logprobs: bool) -> str | None:
    if not sequence.sampled:
        return NOTHING_SAMPLED
    if logprobs and sequence.logprobs is None:
        return NO_LOGPROBS
    if logprobs and not all(map(math.isfinite, sequence.logprobs or ())):
        return BAD_LOGPROBS
    return None


def _groups_from_export(directory: Path, *, logprobs: bool, left_out: Counter[str]) -> Iterator[RolloutGroup]:
    """Yield the groups of an export's "train" split, with the sequences of each rollout and the rollouts of each
    task together.
    """
    name = export_format(directory)
    if name != TOKENS:
        raise ConfigError(
            f"--from {directory}: an export in the format {name}, which has no exact tokens; expected {TOKENS}: "
            f"write it with understudy export {TOKENS} RUN_DIR --output DIR"
        )
    path = directory / "train.parquet"
    try:
        rows = msgspec.convert(read_rows(path, _ExportedSequence.__struct_fields__), list[_ExportedSequence])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: invalid export in the format {TOKENS}: {error}; write it again with understudy export "
            f"{TOKENS} RUN_DIR --output DIR"
        ) from error
    sequences: dict[tuple[str, str], dict[str, list[TokenSequence]]] = {}
    rewards: dict[str, float] = {}
    for row in rows:
        sequence = TokenSequence(
            token_ids=row.input_ids,
            loss_mask=row.assistant_masks,
            logprobs=_complete_logprobs(row.logprobs),
            policy_versions=row.policy_versions,
        )
        group = sequences.setdefault((row.instance_id, row.group), {})
        group.setdefault(row.rollout_id, []).append(sequence)
        rewards[row.rollout_id] = math.nan if row.reward is None else row.reward
    for (task_id, name), members in sequences.items():
        rollouts = [
            _rollout(rollout_id, task_id, rewards[rollout_id], sequences_of_rollout, logprobs, left_out)
            for rollout_id, sequences_of_rollout in members.items()
        ]
        if complete := tuple(rollout for rollout in rollouts if rollout is not None):
            yield RolloutGroup(task_id=task_id, rollouts=complete, name=name)
    _remove_zero_counts(left_out)


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of an export's Parquet file; with `columns`, only those columns, as far as the file has
    them.

    Raises ConfigError when it cannot be read.
    """
    from understudy.export.parquet import require_pyarrow

    require_pyarrow()
    parquet: Any = import_module("pyarrow.parquet")
    try:
        # An open file, because from a path pyarrow would derive columns of directories named like name=value.
        with path.open("rb") as file:
            table = parquet.ParquetFile(file)
            names = columns and [name for name in columns if name in table.schema_arrow.names]
            return table.read(columns=names).to_pylist()
    except Exception as error:  # pyarrow's errors have no common narrower class
        raise ConfigError(
            f"{path}: cannot be read as Parquet ({error}); check the path and its permissions, or write the "
            "export again with understudy export"
        ) from error


def _remove_zero_counts(counts: Counter[str]) -> None:
    for why in [why for why, count in counts.items() if not count]:
        del counts[why]
