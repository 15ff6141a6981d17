"""Finds the logs below some paths, and counts their states without writing anything.

What is only counted needs no store, so nothing that takes long to import is imported here.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.ingest.batch_reader import (
    IngestJob,
    IngestProgress,
    IngestSummary,
    ProgressCallback,
    StateSelection,
    read_batches,
)
from understudy.ingest.formats.base import LogFormat
from understudy.ingest.formats.registry import LogBatch, group_batches
from understudy.ingest.log_files import INSIDE, LogFile, walk_logs


class FoundLogs(Struct):
    """The logs below some paths. `skipped` counts the other files by reason, `errors` has texts of errors."""

    batches: list[LogBatch]
    files: int
    skipped: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])

    def progress(self) -> IngestProgress:
        """Return the progress of reading these logs, of which nothing is read yet."""
        return IngestProgress(files=self.files, total=sum(len(batch.files) for batch in self.batches))


def find_logs(
    paths: Sequence[Path], only: LogFormat | None, output: Path | None, report: ProgressCallback
) -> FoundLogs:
    """Find the logs at and below the paths.

    `only` restricts them to one format; files that were named themselves are then read in this format without
    detection. Raises ConfigError when a path cannot be read, or `output` is one of the logs.
    """
    skipped: Counter[str] = Counter()
    errors: list[str] = []
    progress = IngestProgress()
    named_paths = {str(path.absolute()) for path in paths if path.is_file() and path.suffix.lower() != ".zip"}
    output_inode = _inode(output) if output else None

    def found_files() -> Iterator[LogFile]:
        for file in walk_logs(paths, skipped, errors):
            if output_inode is not None and _inode(Path(file.path.partition(INSIDE)[0])) == output_inode:
                raise ConfigError(f"--output: {output} is one of the logs to read; choose another output file")
            progress.files += 1
            report(progress)
            yield file

    if only is None:
        groups = group_batches(found_files(), skipped, errors=errors)
        return FoundLogs(groups, progress.files, skipped, errors)
    named_files: list[LogFile] = []
    other_files: list[LogFile] = []
    for file in found_files():
        (named_files if str(Path(file.path).absolute()) in named_paths else other_files).append(file)
    groups = {batch.key: batch for batch in group_batches(named_files, skipped, only, errors)}
    for batch in group_batches(other_files, skipped, errors=errors):
        if batch.format.name != only.name:
            skipped["other_format"] += len(batch.files)
        elif batch.key in groups:
            groups[batch.key].files.extend(batch.files)
        else:
            groups[batch.key] = batch
    return FoundLogs(list(groups.values()), progress.files, skipped, errors)


def count_states(logs: FoundLogs, selection: StateSelection, jobs: int, report: ProgressCallback) -> IngestSummary:
    """Count the selected states without writing anything."""
    total = IngestSummary(skipped=logs.skipped.copy(), errors=[*logs.errors])
    progress = logs.progress()
    known_ids: set[bytes] = set()
    for result, _ in read_batches(logs.batches, IngestJob(selection), jobs, None, progress, report):
        total.add(result, known_ids)
    return total


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
