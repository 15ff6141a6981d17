"""The table of log formats, the detection of a file's format, and which files must be read together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.ingest.claude_code.log_format import ClaudeCodeFormat
from understudy.ingest.formats.atif import AtifFormat
from understudy.ingest.formats.base import LogFormat
from understudy.ingest.formats.cline import ClineFormat
from understudy.ingest.formats.codex import CodexFormat
from understudy.ingest.formats.gemini import GeminiFormat
from understudy.ingest.formats.nemo_gym import NemoGymFormat
from understudy.ingest.formats.opencode import OpenCodeFormat
from understudy.ingest.formats.openhands import OpenHandsFormat, OpenHandsMessagesFormat, OpenHandsV1Format
from understudy.ingest.formats.pi import PiFormat
from understudy.ingest.formats.plain_text import AiderFormat, ClaudeTextFormat
from understudy.ingest.formats.qwen_code import QwenCodeFormat
from understudy.ingest.formats.session_traces import SessionTracesFormat
from understudy.ingest.formats.swe_agents import (
    MiniSweAgentFormat,
    ParquetRowFormat,
    SweAgentFormat,
    SweRebenchFormat,
    SweSmithFormat,
)
from understudy.ingest.log_files import LogFile, add_error, read_head

# A file belongs to the first format that detects it, so formats with stricter tests come first.
FORMATS: tuple[LogFormat, ...] = (
    QwenCodeFormat(),
    PiFormat(),
    ClaudeCodeFormat(),
    GeminiFormat(),
    CodexFormat(),
    AtifFormat(),
    SessionTracesFormat(),
    OpenHandsFormat(),
    OpenHandsV1Format(),
    OpenHandsMessagesFormat(),
    SweAgentFormat(),
    SweRebenchFormat(),
    ClineFormat(),
    OpenCodeFormat(),
    NemoGymFormat(),
    MiniSweAgentFormat(),
    SweSmithFormat(),
    ParquetRowFormat(),
    AiderFormat(),
    ClaudeTextFormat(),
)


class LogBatch(Struct, frozen=True):
    """Files of one format that must be read together, in search order."""

    format: LogFormat
    key: str
    files: list[LogFile]


_Key = tuple[str, str]  # the name of a format, and a key of its files


def format_named(name: str) -> LogFormat:
    """Return the format with this name. Raises ConfigError if there is none."""
    formats = {format.name: format for format in FORMATS}
    if name not in formats:
        raise ConfigError(f"unknown log format {name!r}; give one of: {', '.join(formats)}")
    return formats[name]


def detect(path: str, head: bytes) -> LogFormat | None:
    """Return the format of a file, detected by its path and its first 64 KB, or None."""
    return next((format for format in FORMATS if format.detect(path, head)), None)


def group_batches(
    files: Iterable[LogFile],
    skipped: Counter[str],
    only: LogFormat | None = None,
    errors: list[str] | None = None,
) -> list[LogBatch]:
    """Group files that must be read together. With `only`, all are assumed to have that format.

    `skipped` counts files of no known format as `unknown_format`, unreadable ones as `unreadable_file`, and empty
    ones as `empty_file`. `errors` collects the texts of errors.
    """
    groups: dict[_Key, LogBatch] = {}
    linked: dict[_Key, LogBatch] = {}
    for file in files:
        format = only
        try:
            head = read_head(file)
        except OSError as error:
            if only is None:
                skipped["unreadable_file"] += 1
                add_error(errors, error, file.path)
                continue
            head = b""  # the reader counts it as unreadable
        if format is None:
            format = detect(file.path, head)
            if format is None:
                skipped["unknown_format" if head.strip() else "empty_file"] += 1
                continue
        key = format.group(file.path)
        batch = groups.setdefault((format.name, key), LogBatch(format, key, []))
        batch.files.append(file)
        for link in format.links(file.path, head):
            linked_batch = linked.setdefault((format.name, link), batch)
            if linked_batch is not batch:
                _join(groups, linked, linked_batch, batch)
                batch = linked_batch
    return list({id(batch): batch for batch in groups.values()}.values())


def _join(groups: dict[_Key, LogBatch], linked: dict[_Key, LogBatch], first: LogBatch, second: LogBatch) -> None:
    """Merge the second batch into the first."""
    first.files.extend(second.files)
    for table in (groups, linked):
        for key, batch in table.items():
            if batch is second:
                table[key] = first
