"""The files that a run writes beside its store when a rollout ends: stream, dataset, logs, report.

The store has all of this data. Files that are missing, or from an earlier attempt, are written again when the run
continues.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError, StoreError, TaskError
from understudy.export.formats import hf
from understudy.export.formats.hf import spans
from understudy.grade import reports
from understudy.run.config import RunConfig
from understudy.run.store_reads import read_stored
from understudy.store import Store
from understudy.store.outcomes import GradedRollout
from understudy.trajectory.tree import Node, build
from understudy.types import Attempt, ErrorInfo, Rollout, Task
from understudy.util.files import atomic_path

_NOTE_FILE = "rollout.json"
_MAX_DEPTH, _MAX_NAME_BYTES = 8, 200

_log = logging.getLogger(__name__)

DatasetState = Literal["written", "no calls", "no token ids", "suspicious patch", "not installed", "no verdict"]
_STATES_WITHOUT_STREAM: frozenset[DatasetState] = frozenset({"suspicious patch", "no verdict"})
_DATASET_NOTES: dict[DatasetState, str] = {
    "no token ids": "{count} have no dataset: the {backend} backend gives no token ids; their streams and reports "
    "are there",
    "suspicious patch": "{count} have neither stream nor dataset: their patches look as if they were made to "
    "deceive the grader; see their reports, and: understudy export hf --include-suspicious",
    "not installed": "{count} have no dataset: the package pyarrow is not installed; "
    "pip install 'understudy[hf]', then run the same command again",
}
"""Why rollouts may have no dataset. States without an entry need no explanation."""


class RolloutNote(Struct, frozen=True, kw_only=True):
    """How a rollout ended: the content of `logs/<instance_id>/rollout.json`. `reward`: None without a verdict."""

    instance_id: str
    sample_index: int
    rollout_id: str
    attempt_id: str
    status: str
    reward: float | None
    reason: str
    dataset: DatasetState
    error: ErrorInfo | None = None


class _CheckedRollout(Struct, frozen=True):
    """A rollout whose files were complete at its `updated_at`, and how it was graded, if that was read then."""

    updated_at: float
    outcome: reports.GradingOutcome | None = None


class RolloutFiles:
    """The files of a run's rollouts in its output directory.

    File names contain the instance's id and, in runs with several samples, a dot and the sample index:
    `stream_<id>.json`, `dataset-<id>/`, `logs/<id>/`, and the harness's report (`grade.reports`). A file that
    cannot be written is noted and does not end the run. With `rewrite`, `catch_up` writes all files again.
    """

    def __init__(self, store: Store, config: RunConfig, directory: Path, *, rewrite: bool = False) -> None:
        self._store = store
        self._config = config
        self._directory = directory
        self._rewrite = rewrite
        self._one_at_a_time = asyncio.Lock()
        self._datasets: dict[str, DatasetState] = {}
        self._crashed: set[str] = set()
        self._checked: dict[str, _CheckedRollout] = {}
        """By id, rollouts that need not be read again: from a distant database, that takes several round trips."""
        self._tasks: dict[str, Task] = {}
        self._failures: dict[str, str] = {}
        self._save: Callable[[Iterable[dict[str, Any]], Path], None] | None = None

    async def write(self, rollout_id: str) -> None:
        """Write the files of a rollout that has just ended. Raises StoreError."""
        async with self._one_at_a_time:
            rollout = await read_stored(self._store.runs.rollout, rollout_id)
            await asyncio.to_thread(self._write_rollout, rollout, rewrite=True)

    async def catch_up(self) -> None:
        """Write missing files of rollouts that have ended. Raises StoreError."""
        async with self._one_at_a_time:
            await asyncio.to_thread(self._remove_leftovers)
            for rollout in await asyncio.to_thread(self._store.runs.rollouts, self._config.run_id):
                if self._rewrite or self._check_of(rollout) is None:
                    await asyncio.to_thread(self._write_rollout, rollout, rewrite=self._rewrite)
            self._rewrite = False

    async def finish(self) -> None:
        """Write missing files, and the report of the whole run. Raises StoreError."""
        await self.catch_up()
        await asyncio.to_thread(self._write_summary)

    def notes(self) -> tuple[str, ...]:
        """Return notes about the files for the user, one sentence each."""
        notes: list[str] = []
        for state, count in sorted(Counter(self._datasets.values()).items()):
            if state in _DATASET_NOTES:
                share = f"{count} of {len(self._datasets)} rollouts"
                notes.append(_DATASET_NOTES[state].format(count=share, backend=self._config.backend))
        if self._crashed:
            notes.append(
                f"{len(self._crashed)} rollouts were graded although the agent crashed in every attempt, since "
                "the model had answered it; their errors are in logs/*/rollout.json"
            )
        if self._failures:
            first = next(iter(self._failures.values()))
            notes.append(
                f"{len(self._failures)} outputs could not be written, though the store has all of them: {first}; "
                "free some disk space or correct the permissions, then run the same command again, which writes "
                "them"
            )
        return tuple(notes)

    def _remove_leftovers(self) -> None:
        """Remove half-written files that a killed run left behind."""
        try:
            if self._staging.exists():
                shutil.rmtree(self._staging)
            for leftover in reports.half_written(self._directory, self._config.run_id):
                leftover.unlink()
        except OSError as error:
            self._failures["half written"] = str(error)
            _log.warning(
                "incomplete files of an earlier start could not be removed; run the same command again: %s",
                error,
            )

    def _check_of(self, rollout: Rollout) -> _CheckedRollout | None:
        """Return what is remembered of a rollout, if it has not changed since."""
        checked = self._checked.get(rollout.id)
        return checked if checked is not None and checked.updated_at == rollout.updated_at else None

    def _write_rollout(self, rollout: Rollout, *, rewrite: bool) -> None:
        """Write the files of an ended rollout if they are missing, or in any case with `rewrite`."""
        if rollout.status not in ("succeeded", "failed"):
            return
        try:
            label = self._label(rollout)
            graded = self._store.outcomes.decision(rollout.id)
            attempt = graded.attempt if graded else self._store.runs.attempts(rollout.id)[-1]
            outcome = None
            if rewrite or not self._is_complete(label, attempt.id):
                task = self._task_of(rollout)
                if graded:
                    patch = self._store.runs.patch(attempt.id)
                    outcome = _outcome(graded, patch)
                    note = self._write_graded(label, task, graded, patch)
                else:
                    note = self._write_failed(label, task, rollout)
                self._remember(note)
            self._checked[rollout.id] = _CheckedRollout(rollout.updated_at, outcome)
            self._failures.pop(rollout.id, None)
            _log.debug("the files of rollout %s are written", rollout.id)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - the rollout has ended, and its files can be written again
            self._failures[rollout.id] = f"{type(error).__name__}: {error}"
            _log.warning(
                "the files of rollout %s could not be written, but it is stored; run the same command again: %s",
                rollout.id,
                error,
            )
            _log.debug("what went wrong", exc_info=error)

    def _task_of(self, rollout: Rollout) -> Task:
        """Return the task of a rollout, which is read once for all samples."""
        if (task := self._tasks.get(rollout.task_id)) is None:
            task = self._tasks[rollout.task_id] = self._store.runs.task(rollout.run_id, rollout.task_id)
        return task

    def _remember(self, note: RolloutNote) -> None:
        """Remember what `notes` counts."""
        self._datasets[note.rollout_id] = note.dataset
        if note.reward is not None and note.error is not None:
            self._crashed.add(note.rollout_id)

    def _label(self, rollout: Rollout) -> str:
        """Return the name of a rollout's files.

        Raises TaskError if the instance id cannot be part of a file name.
        """
        several = self._config.samples > 1
        label = reports.name_part(f"{rollout.task_id}.{rollout.sample_index}" if several else rollout.task_id)
        if label == reports.LOGS.name:
            raise TaskError(
                f"invalid instance_id {label!r}: logs/{label} is reserved for the reports; give the task another "
                "id"
            )
        return label

    def _is_complete(self, label: str, attempt_id: str) -> bool:
        """Return whether the files of this attempt are there, with everything that can be written now."""
        try:
            note = msgspec.json.decode(
                (self._directory / "logs" / label / _NOTE_FILE).read_bytes(), type=RolloutNote
            )
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
            return False
        if note.attempt_id != attempt_id or (note.dataset == "not installed" and self._saver()):
            return False
        required = (
            [] if note.dataset == "no verdict" else [self._stream(label), self._report(label) / reports.REPORT]
        )
        required += [self._dataset(label)] if note.dataset == "written" else []
        self._remember(note)
        return all(path.exists() for path in required)

    def _write_graded(self, label: str, task: Task, graded: GradedRollout, patch: bytes | None) -> RolloutNote:
        attempt, verdict = graded.attempt, graded.verdict
        nodes = build(self._store.calls.of_attempt(attempt.id)).nodes
        dataset = self._write_dataset(label, task, graded, nodes)
        self._write_stream(label, graded, nodes, keep=dataset not in _STATES_WITHOUT_STREAM)
        reports.write_report(
            self._report(label), task, patch, verdict, elapsed_s=attempt.timings.get("grade_s", 0.0)
        )
        note = _note(graded.rollout, attempt, verdict.reward, verdict.reason, dataset, attempt.error)
        own_files = {"patch.diff": patch or b"", "test_output.txt": verdict.log.encode(errors="replace")}
        self._write_logs(label, note, own_files | self._store.runs.logs(attempt.id))
        return note

    def _write_failed(self, label: str, task: Task, rollout: Rollout) -> RolloutNote:
        """Write the files of a rollout without a verdict, because of an infrastructure failure."""
        attempt = self._store.runs.attempts(rollout.id)[-1]
        error = rollout.error or attempt.error
        message = f"{error.boundary}: {error.message}" if error else attempt.status
        reports.write_failure(self._report(label), task, self._store.runs.patch(attempt.id), message)
        note = _note(rollout, attempt, None, message, "no verdict", error)
        self._write_logs(label, note, self._store.runs.logs(attempt.id))
        return note

    def _write_stream(self, label: str, graded: GradedRollout, nodes: Sequence[Node], *, keep: bool) -> None:
        if not keep:
            self._stream(label).unlink(missing_ok=True)
            return
        with self._replacing(self._stream(label)) as path, path.open("wb") as file:
            for span in spans(graded, nodes):
                file.write(msgspec.json.encode(span) + b"\n")

    def _write_dataset(self, label: str, task: Task, graded: GradedRollout, nodes: Sequence[Node]) -> DatasetState:
        directory = self._dataset(label)
        rows = list(hf.rows_of(task, graded, nodes))
        state: DatasetState = "written"
        if graded.verdict.integrity.status != "clean":
            state = "suspicious patch"
        elif not rows:
            state = "no token ids" if any(node.call.status == "ok" for node in nodes) else "no calls"
        elif (save := self._saver()) is None:
            state = "not installed"
        else:
            with self._replacing(directory) as path:
                save(rows, path)
        if state != "written":
            hf.remove_dataset(directory)
        return state

    def _write_logs(self, label: str, note: RolloutNote, files: dict[str, bytes]) -> None:
        directory = self._directory / "logs" / label
        directory.parent.mkdir(exist_ok=True)
        content = msgspec.json.format(msgspec.json.encode(note), indent=2) + b"\n"
        with self._replacing(directory) as fresh:
            for path, name in _safe_names(files).items():
                (fresh / path).parent.mkdir(parents=True, exist_ok=True)
                (fresh / path).write_bytes(files[name])
            fresh.mkdir(exist_ok=True)
            (fresh / _NOTE_FILE).write_bytes(content)

    @contextmanager
    def _replacing(self, target: Path) -> Generator[Path]:
        """Yield a path to write to. What was written there replaces `target` if the block succeeds."""
        self._staging.mkdir(exist_ok=True)
        try:
            with atomic_path(target, temporary=self._staging / f"{target.name}.new") as path:
                yield path
        finally:
            shutil.rmtree(self._staging)

    def _write_summary(self) -> None:
        """Write the harness's summary of the run."""
        outcomes: dict[str, reports.GradingOutcome] = {}
        labels: list[str] = []
        try:
            for rollout in self._store.runs.rollouts(self._config.run_id):
                label = self._label(rollout)
                labels.append(label)
                checked = self._check_of(rollout)
                if checked is not None and checked.outcome is not None:
                    outcomes[label] = checked.outcome
                elif graded := self._store.outcomes.decision(rollout.id):
                    outcomes[label] = _outcome(graded, self._store.runs.patch(graded.attempt.id))
                elif rollout.status == "failed" and rollout.error:
                    outcomes[label] = reports.failed_outcome(rollout.error.boundary, rollout.error.message)
            reports.write_summary(self._directory, self._config.run_id, self._model, outcomes, labels)
        except (OSError, TaskError, ConfigError) as error:
            self._failures["summary"] = str(error)
            _log.warning("the summary of the run could not be written: %s; run the same command again", error)

    def _saver(self) -> Callable[[Iterable[dict[str, Any]], Path], None] | None:
        """Return the function that saves rows as a dataset, or None if its package is missing."""
        if self._save is None:
            try:
                self._save = hf.dataset_saver()
            except ConfigError:
                return None
        return self._save

    @property
    def _model(self) -> str:
        return self._config.gateway.models.high.model or self._config.model

    @property
    def _staging(self) -> Path:
        return self._directory / ".writing"

    def _stream(self, label: str) -> Path:
        return self._directory / f"stream_{label}.json"

    def _dataset(self, label: str) -> Path:
        return self._directory / f"dataset-{label}"

    def _report(self, label: str) -> Path:
        return reports.instance_dir(self._directory, self._config.run_id, self._model, label)


def _outcome(graded: GradedRollout, patch: bytes | None) -> reports.GradingOutcome:
    """Return how a rollout counts in the summary."""
    judged = reports.outcome_of(graded.verdict)
    return judged if patch else reports.GradingOutcome("empty", judged.reason)


def _note(
    rollout: Rollout,
    attempt: Attempt,
    reward: float | None,
    reason: str,
    dataset: DatasetState,
    error: ErrorInfo | None,
) -> RolloutNote:
    return RolloutNote(
        instance_id=rollout.task_id,
        sample_index=rollout.sample_index,
        rollout_id=rollout.id,
        attempt_id=attempt.id,
        status=attempt.status,
        reward=reward,
        reason=reason,
        dataset=dataset,
        error=error,
    )


def _safe_names(names: Iterable[str]) -> dict[PurePosixPath, str]:
    """Return safe path → log name.

    An agent may have chosen the names, so one that is not a plain path is replaced.
    """
    paths: dict[PurePosixPath, str] = {}
    used_paths: set[PurePosixPath] = set()
    for name in sorted(names):
        path = PurePosixPath(name)
        plain = not path.is_absolute() and 0 < len(path.parts) <= _MAX_DEPTH and path != PurePosixPath(_NOTE_FILE)
        plain = plain and all(
            part != ".." and part.isprintable() and len(part.encode(errors="replace")) <= _MAX_NAME_BYTES
            for part in path.parts
        )
        # No path can be both a file and a directory. In sorted order, a name comes before the names inside it.
        if not plain or path in used_paths or any(parent in paths for parent in path.parents):
            path = PurePosixPath(f"unnamed-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:16]}")
        paths[path] = name
        used_paths.update((path, *path.parents))
    return paths
