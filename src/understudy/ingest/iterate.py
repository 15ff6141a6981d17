"""Iterates over the training states in logs, without writing a store or a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from understudy.ingest.formats.registry import format_named, group_batches
from understudy.ingest.log_files import walk_logs
from understudy.ingest.signals.annotate import annotate
from understudy.ingest.trace import TraceState, expand
from understudy.types import WORK_ROLES


def ingest(
    paths: Iterable[str | Path],
    *,
    format: str | None = None,
    all_roles: bool = False,
    skipped: Counter[str] | None = None,
) -> Iterator[TraceState]:
    """Yield the states in the logs at and below some paths, each once, in the order of the logs.

    `format`: read only this format. `all_roles`: also yield turns of agents that the program started for its own
    purposes. `skipped` counts, by reason, the files that were not read and what was lost of the others. Nothing is
    redacted. Raises ConfigError for an unknown format, OSError if a log cannot be read.
    """
    counts = Counter[str]() if skipped is None else skipped
    only = None if format is None else format_named(format)
    yielded_ids: set[str] = set()
    for batch in group_batches(walk_logs([Path(path) for path in paths], counts), counts, only):
        for trace in batch.format.read(batch.files):
            counts.update(trace.losses)
            if not all_roles and trace.role not in WORK_ROLES:
                continue
            annotate(trace)
            for state in expand(trace):
                if state.state_id not in yielded_ids:
                    yielded_ids.add(state.state_id)
                    yield state
