"""States out of a store: one at a time, or written to a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from understudy.errors import ConfigError
from understudy.ingest.jsonl import PrivateFile, state_line, unwritable_error
from understudy.ingest.parquet import ParquetWriter, require_pyarrow
from understudy.ingest.redaction import redact_trace
from understudy.ingest.trace import Trace, TraceState, expand
from understudy.ingest.trace_store import TraceSource, traces
from understudy.redact.redactor import Redactor
from understudy.util.atomic import atomic_path


def stored_states(
    library: TraceSource, where: str | None, limit: int | None, redactor: Redactor | None
) -> Iterator[tuple[TraceState, Trace]]:
    """The states for which `where` is true, each with its trace; redacted where a redactor is passed."""
    for trace in traces(library, where, limit=limit):
        clean = redact_trace(trace, redactor) if redactor else trace
        for state in expand(clean):
            yield state, clean


def extract_states(
    library: TraceSource, output: Path, where: str | None, limit: int | None, redactor: Redactor | None
) -> int:
    """Write states to a file that only its owner can read: Parquet where its name says so, else JSON lines.

    Returns how many. An existing file is replaced when the new one is complete. Raises ConfigError when the file
    cannot be written.
    """
    parquet = output.suffix == ".parquet"
    if parquet:
        require_pyarrow(output)
    if output.exists() and not output.is_file():
        raise ConfigError(f"--output: {output} exists and is not a regular file; choose another file")
    number = 0
    try:
        with atomic_path(output) as path:
            file = ParquetWriter(path) if parquet else PrivateFile(path)
            try:
                for state, trace in stored_states(library, where, limit, redactor):
                    if isinstance(file, ParquetWriter):
                        file.add(state, trace)
                    else:
                        file.write(state_line(state, trace))
                    number += 1
            finally:
                file.close()
    except OSError as error:
        raise unwritable_error(output, error) from error
    return number
