"""Rows of data sets of trajectories: JSON lines, a list, or Parquet (with pyarrow)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from typing import Any

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.ingest.formats.base import SingleFileFormat
from understudy.ingest.formats.outcomes import outcome_from
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import (
    LARGEST_DOCUMENT,
    file_name,
    items,
    mapping,
    outline,
    parse_json,
    read_document,
    read_records,
    string,
    take_losses,
)
from understudy.ingest.trace import Trace
from understudy.ingest.trace_builder import TraceBuilder, add_messages, fingerprint, repository

PARQUET = b"PAR1"
_BATCH_ROWS = 16
_ASIDE = ("tools", "repo", "instance_id", "resolved", "target", "reward", "exit_status")


class RowSchema(Struct, frozen=True):
    """Where a data set keeps what; `ids` are the columns that name a trajectory, the best first."""

    format: str
    messages: str
    ids: tuple[str, ...]
    models: tuple[str, ...] = ()


SCHEMAS = (
    RowSchema("swe-smith", "messages", ("traj_id", "instance_id"), ("model",)),
    RowSchema("swe-rebench", "trajectory", ("trajectory_id", "instance_id"), ("model_name", "model")),
)


class RowFormat(SingleFileFormat):
    """Reads rows of one data set's kind."""

    def __init__(self, schema: RowSchema) -> None:
        self.name = schema.format
        self.schema = schema

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """One trace of each row."""
        losses: Counter[str] = Counter()
        for row in _json_rows(file, losses):
            yield _row_trace(self.schema, row, file.path, take_losses(losses))
        if losses:
            yield TraceBuilder(self.name, file.path, fingerprint(file.path, None), losses=losses).finish()


def _json_rows(file: LogFile, losses: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines, or of one list or object."""
    if file_name(file.path).endswith((".jsonl", ".ndjson")):
        yield from read_records(file, losses)
        return
    value = read_document(file, losses)
    for row in items(value) or ([value] if value is not None else []):
        if isinstance(row, dict):
            yield mapping(row)
        else:
            losses["not_an_object"] += 1


class ParquetRowFormat(SingleFileFormat):
    """Reads Parquet files of rows; which data set's they are, the columns tell."""

    name = "parquet"

    def detect(self, path: str, head: bytes) -> bool:
        """Whether it begins as Parquet does."""
        return head.startswith(PARQUET)

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """One trace of each row. Raises ConfigError when pyarrow is not installed."""
        try:
            arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError as missing:
            raise ConfigError(
                f"{file.path} is a Parquet file: reading it needs pyarrow, which is not installed. "
                'Install it: pip install "understudy[hf]"'
            ) from missing
        losses: Counter[str] = Counter()
        for schema, row in _parquet_rows(arrow, parquet, file, losses):
            yield _row_trace(schema, row, file.path, take_losses(losses))
        if losses:
            yield TraceBuilder(self.name, file.path, fingerprint(file.path, None), losses=losses).finish()


def _parquet_rows(
    arrow: Any, parquet: Any, file: LogFile, losses: Counter[str]
) -> Iterator[tuple[RowSchema, dict[str, Any]]]:
    with file.open() as stream:
        try:
            seekable = stream if stream.seekable() else BytesIO(stream.read(LARGEST_DOCUMENT))
            table: Any = parquet.ParquetFile(seekable, pre_buffer=False)
            present: list[str] = table.schema_arrow.names
            schema = next((one for one in SCHEMAS if one.messages in present), None)
            if schema is None:
                losses["unknown_columns"] += 1
                return
            wanted = {schema.messages, *schema.ids, *schema.models, *_ASIDE}
            columns = [column for column in present if column in wanted]
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    yield schema, row
        except (arrow.ArrowException, OSError, ValueError, NotImplementedError):
            losses["bad_parquet"] += 1


def _row_trace(schema: RowSchema, row: dict[str, Any], source: str, losses: Counter[str]) -> Trace:
    """The trace of a row."""
    raw = row.get(schema.messages)
    if isinstance(raw, str):
        raw = parse_json(raw.encode(errors="replace"), losses)
    messages = [_chatlike(mapping(message)) for message in items(raw)]
    session = next((value for key in schema.ids if (value := string(row.get(key)))), None)
    if schema.ids[0] not in row:
        # An instance is tried more than once: only with what it begins with is it one trajectory.
        session = f"{session or file_name(source)}-{fingerprint(source, messages[:3])}"
    if not messages:
        losses["no_messages"] += 1
    builder = TraceBuilder(schema.format, source, session or fingerprint(source, messages[:3]), losses=losses)
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = parse_json(tools.encode(errors="replace"), losses)
    builder.set_tools(items(tools))
    builder.trace.project = string(row.get("repo")) or repository(string(row.get("instance_id")))
    builder.trace.outcome = outcome_from(
        resolved=row.get("resolved", row.get("target")),  # nebius' SWE-agent rows call it their target
        reward=row.get("reward"),
        task=row.get("instance_id"),
        exit_status=row.get("exit_status"),
    )
    add_messages(
        builder, messages, model=next((value for key in schema.models if (value := string(row.get(key)))), None)
    )
    return builder.finish()


def _chatlike(message: dict[str, Any]) -> dict[str, Any]:
    """A message of nebius' SWE-agent rows, whose words are in `text` and `system_prompt`, as one of chat."""
    if "content" in message or "role" not in message:
        return message
    return {**message, "content": message.get("text") or message.get("system_prompt")}


_IDS = frozenset(("trajectory_id", "instance_id"))


class SweRebenchFormat(RowFormat):
    """Reads rows of nebius' data sets."""

    def __init__(self) -> None:
        super().__init__(SCHEMAS[1])

    def detect(self, path: str, head: bytes) -> bool:
        """Whether the first row is named as an attempt at an instance and has a trajectory."""
        keys = outline(head).keys
        return keys.get("trajectory", "{") != "{" and bool(_IDS & keys.keys())


_COLUMNS = frozenset(("messages", "instance_id", "resolved", "model", "traj_id", "patch"))


class SweSmithFormat(RowFormat):
    """Reads rows of SWE-smith-trajectories, and others that hold a conversation in `messages`."""

    def __init__(self) -> None:
        super().__init__(SCHEMAS[0])

    def detect(self, path: str, head: bytes) -> bool:
        """Whether the first row has messages and no column that is another format's."""
        seen = outline(head)
        if "messages" not in seen.keys or seen.keys["messages"] == "{":
            return False
        rows = seen.kind == "[" or file_name(path).endswith((".jsonl", ".ndjson")) or "traj_id" in seen.keys
        return rows and not seen.keys.keys() - _COLUMNS - {"tools", "id", "source"}
