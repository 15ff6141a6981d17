"""Reads trajectories of SWE-agent and mini-swe-agent, and rows of datasets of such trajectories.

SWE-agent's `.traj` has a `history` and, for each step, often the `query` that was really sent. mini-swe-agent
writes a list of messages, or an object with `messages` and a `trajectory_format` (1 or 1.1); with the Responses
API, 1.1 holds whole responses and `function_call_output` items. Datasets (SWE-smith, nebius) are JSON lines, a
list, or Parquet (which needs pyarrow).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from typing import Any

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.ingest.chat import chat, thinking_text
from understudy.ingest.formats.base import (
    LogFormat,
    TraceBuilder,
    add_messages,
    fingerprint,
    instance_id,
    iso_time,
    outcome_from,
    repository,
)
from understudy.ingest.json_values import first_string, items, mapping, string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import (
    MAX_DOCUMENT_BYTES,
    file_name,
    outline,
    parse_json,
    read_document,
    read_records,
    take_losses,
)
from understudy.ingest.trace import Message, PlainRenderer, Trace, TraceOutcome

_TRAJECTORY_KEYS = frozenset(("trajectory", "history", "environment", "replay_config", "info", "attempts"))
_STEPS_SEARCHED = 64
"""The step of a response is searched among this many steps; steps that are skipped were retried."""


class SweAgentFormat(LogFormat):
    """Reads trajectories of SWE-agent."""

    name = "swe-agent"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file is an object with a `trajectory` and without keys of a dataset row."""
        keys = outline(head).keys
        return keys.get("trajectory") == "[" and not keys.keys() - _TRAJECTORY_KEYS and outline(head).kind == "{"

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        log = mapping(read_document(file, losses))
        history, steps = items(log.get("history")), [mapping(step) for step in items(log.get("trajectory"))]
        if not history:
            # Some versions keep no history, and some runs end before an answer: then use the last query.
            history = _request_messages(steps[-1]) if steps else []
            losses["no_history"] += 1
        instance = string(log.get("environment")) or file_name(file.path).removesuffix(".traj")
        session = f"{instance}-{fingerprint(file.path, history[:4])}"
        builder = TraceBuilder("swe-agent", file.path, session, losses=losses)
        info = mapping(log.get("info"))
        builder.trace.version = string(info.get("swe_agent_version"))
        builder.trace.project = repository(instance)
        builder.trace.outcome = _run_outcome(log, instance_id(instance))
        model = _configured_model(log)
        next_step = 0
        for index, raw in enumerate(history):
            message = chat(raw, losses)
            if message is None or builder.take_system(message):
                continue
            if message["role"] != "assistant" or mapping(raw).get("is_demo"):
                builder.add(message)
                continue
            candidates = range(next_step, min(next_step + _STEPS_SEARCHED, len(steps)))
            step_number = next((number for number in candidates if _answered(steps[number], mapping(raw))), None)
            query: list[Message] = []
            if step_number is not None:
                next_step = step_number + 1
                query = _query(steps[step_number], losses)
            if query:
                context = builder.shared_path(query)
                builder.add_turn(f"m{index}", [message], model=model, context=context, fidelity="ledger")
            else:
                builder.add_turn(f"m{index}", [message], model=model)
        return builder.finish()


def _run_outcome(log: dict[str, Any], task: str | None) -> TraceOutcome | None:
    info = mapping(log.get("info"))
    return outcome_from(
        resolved=info.get("resolved", log.get("resolved")),
        reward=info.get("reward"),
        task=task,
        exit_status=info.get("exit_status"),
    )


def _answered(step: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Return whether an answer in the history is the response of this step."""
    return step.get("response") == answer.get("content") or (
        bool(step.get("action")) and step.get("action") == answer.get("action")
    )


def _request_messages(step: dict[str, Any]) -> list[Any]:
    return items(step.get("query")) or items(step.get("messages"))


def _query(step: dict[str, Any], losses: Counter[str]) -> list[Message]:
    """Return the messages of a step's request without the system prompt, or [] if the step does not hold them."""
    messages_sent = _request_messages(step)
    if len(messages_sent) < 2:
        return []
    messages = [message for raw in messages_sent if (message := chat(raw, losses)) is not None]
    rendered = [rendered for message in messages for rendered in PlainRenderer().history(message)]
    return rendered[1:] if rendered and rendered[0]["role"] == "system" else rendered


def _configured_model(log: dict[str, Any]) -> str | None:
    """Return the model that the run was configured with. Later versions store the settings as JSON text."""
    settings = _parsed(log.get("replay_config"), Counter())
    return string(value_at(settings, "agent", "model", "name")) or string(value_at(log, "info", "config", "model"))


class MiniSweAgentFormat(LogFormat):
    """Reads trajectories of mini-swe-agent."""

    name = "mini-swe-agent"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file names this format, has `info` and `messages`, or is a list that begins with a
        system message or is in a .traj.json file.
        """
        beginning = outline(head)
        if beginning.kind == "[":
            has_text = beginning.keys.get("content", "{") not in "{["
            return has_text and (beginning.keys.get("role") == "system" or file_name(path).endswith(".traj.json"))
        if beginning.keys.get("trajectory_format", "").startswith("mini-swe-agent"):
            return True
        return beginning.keys.get("info") == "{" and beginning.keys.get("messages") == "["

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        value = read_document(file, losses)
        log = mapping(value)
        messages = [response_as_chat(mapping(raw)) for raw in items(value) or items(log.get("messages"))]
        instance = string(log.get("instance_id")) or file_name(file.path).partition(".")[0]
        session = f"{instance}-{fingerprint(file.path, messages[:3])}"
        builder = TraceBuilder("mini-swe-agent", file.path, session, losses=losses)
        info = mapping(log.get("info"))
        builder.trace.version = string(info.get("mini_version"))
        directory = string(value_at(info, "config", "environment", "cwd"))
        builder.trace.project = repository(instance) or directory
        builder.trace.outcome = _run_outcome(log, string(log.get("instance_id")) or instance_id(instance))
        # The exit message is shown to the user, not to the model.
        conversation = [raw for raw in messages if raw.get("role") != "exit"]
        add_messages(
            builder,
            conversation,
            string(value_at(info, "config", "model", "model_name")),
            models=lambda raw: value_at(raw, "extra", "response", "model"),
            times=lambda raw: iso_time(value_at(raw, "extra", "timestamp")),
        )
        return builder.finish()


def response_as_chat(raw: dict[str, Any]) -> dict[str, Any]:
    """Convert a message or response of the Responses API to a chat completions message."""
    if raw.get("type") == "function_call_output":
        return {"role": "tool", "content": raw.get("output"), "tool_call_id": raw.get("call_id")}
    if raw.get("object") != "response":
        return raw
    output = [mapping(item) for item in items(raw.get("output"))]
    reasoning = [item for item in output if item.get("type") == "reasoning"]
    thoughts = [part for item in reasoning for part in (*items(item.get("summary")), *items(item.get("content")))]
    parts = [part for item in output if item.get("type") == "message" for part in items(item.get("content"))]
    calls = [{**item, "id": item.get("call_id")} for item in output if item.get("type") == "function_call"]
    return {
        "role": "assistant",
        "content": parts,
        "tool_calls": calls,
        "reasoning_content": thinking_text(thoughts, "text"),
        "thinking_blocks": reasoning,
        "extra": {"response": {"model": raw.get("model")}, "timestamp": raw.get("created_at")},
    }


def _parsed(value: Any, losses: Counter[str]) -> Any:
    """Return the value, decoded if it is a string with JSON."""
    return parse_json(value.encode(errors="replace"), losses) if isinstance(value, str) else value


PARQUET = b"PAR1"
_BATCH_ROWS = 16
_TRACE_COLUMNS = ("tools", "repo", "instance_id", "resolved", "target", "reward", "exit_status")


class RowSchema(Struct, frozen=True):
    """The columns of a dataset.

    `ids` identify a trajectory, `models` name its model; the preferred column comes first.
    """

    format: str
    messages: str
    ids: tuple[str, ...]
    models: tuple[str, ...]


SWE_SMITH = RowSchema("swe-smith", "messages", ("traj_id", "instance_id"), ("model",))
SWE_REBENCH = RowSchema("swe-rebench", "trajectory", ("trajectory_id", "instance_id"), ("model_name", "model"))
SCHEMAS = (SWE_SMITH, SWE_REBENCH)


class RowFormat(LogFormat):
    """Reads rows of datasets; each row becomes one trace."""

    schema: RowSchema

    def rows(self, file: LogFile, losses: Counter[str]) -> Iterator[tuple[RowSchema, dict[str, Any]]]:
        """Yield the rows of a file: JSON lines, a list, or a single object."""
        if file_name(file.path).endswith((".jsonl", ".ndjson")):
            for row in read_records(file, losses):
                yield self.schema, row
            return
        value = read_document(file, losses)
        for row in items(value) or ([value] if value is not None else []):
            if isinstance(row, dict):
                yield self.schema, mapping(row)
            else:
                losses["not_an_object"] += 1

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """Yield one trace for each row. Raises ConfigError if a library that is needed is not installed."""
        losses: Counter[str] = Counter()
        for schema, row in self.rows(file, losses):
            yield _row_trace(schema, row, file.path, take_losses(losses))
        if losses:
            yield TraceBuilder(self.name, file.path, fingerprint(file.path, None), losses=losses).finish()


class ParquetRowFormat(RowFormat):
    """Reads Parquet files whose columns match one of the datasets."""

    name = "parquet"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file begins with Parquet's magic bytes."""
        return head.startswith(PARQUET)

    def rows(self, file: LogFile, losses: Counter[str]) -> Iterator[tuple[RowSchema, dict[str, Any]]]:
        """Yield the rows of a file, each with the matching schema. Raises ConfigError if pyarrow is missing."""
        try:
            arrow: Any = import_module("pyarrow")
            parquet: Any = import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(
                f"{file.path} is a Parquet file: reading it needs pyarrow, which is not installed. "
                'Install it: pip install "understudy[hf]"'
            ) from error
        with file.open() as stream:
            try:
                seekable = stream if stream.seekable() else BytesIO(stream.read(MAX_DOCUMENT_BYTES))
                table = parquet.ParquetFile(seekable, pre_buffer=False)
                names: list[str] = table.schema_arrow.names
                schema = next((candidate for candidate in SCHEMAS if candidate.messages in names), None)
                if schema is None:
                    losses["unknown_columns"] += 1
                    return
                column_names = {schema.messages, *schema.ids, *schema.models, *_TRACE_COLUMNS}
                columns = [column for column in names if column in column_names]
                for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                    for row in batch.to_pylist():
                        yield schema, row
            except (arrow.ArrowException, OSError, ValueError, NotImplementedError):
                losses["bad_parquet"] += 1


def _row_trace(schema: RowSchema, row: dict[str, Any], source: str, losses: Counter[str]) -> Trace:
    raw = _parsed(row.get(schema.messages), losses)
    messages = [_row_as_chat(mapping(message)) for message in items(raw)]
    session = first_string(row, *schema.ids)
    if schema.ids[0] not in row:
        # An instance may be tried several times, so its id alone does not identify a trajectory: hash its
        # beginning too.
        session = f"{session or file_name(source)}-{fingerprint(source, messages[:3])}"
    if not messages:
        losses["no_messages"] += 1
    builder = TraceBuilder(schema.format, source, session or fingerprint(source, messages[:3]), losses=losses)
    builder.set_tools(items(_parsed(row.get("tools"), losses)))
    builder.trace.project = string(row.get("repo")) or repository(string(row.get("instance_id")))
    builder.trace.outcome = outcome_from(
        resolved=row.get("resolved", row.get("target")),  # nebius' SWE-agent rows call the outcome `target`
        reward=row.get("reward"),
        task=row.get("instance_id"),
        exit_status=row.get("exit_status"),
    )
    add_messages(builder, messages, first_string(row, *schema.models))
    return builder.finish()


def _row_as_chat(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a row's message to a chat message. nebius' SWE-agent rows have its content in `text` or
    `system_prompt`.
    """
    if "content" in message or "role" not in message:
        return message
    return {**message, "content": message.get("text") or message.get("system_prompt")}


_IDS = frozenset(("trajectory_id", "instance_id"))


class SweRebenchFormat(RowFormat):
    """Reads rows of nebius' datasets."""

    name = "swe-rebench"
    schema = SWE_REBENCH

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the first row identifies an attempt at an instance and has a trajectory."""
        keys = outline(head).keys
        return keys.get("trajectory", "{") != "{" and bool(_IDS & keys.keys())


_COLUMNS = frozenset(("messages", "instance_id", "resolved", "model", "traj_id", "patch"))


class SweSmithFormat(RowFormat):
    """Reads rows of SWE-smith-trajectories, and of other datasets that hold a conversation in `messages`."""

    name = "swe-smith"
    schema = SWE_SMITH

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the first row has messages and no column of another format."""
        beginning = outline(head)
        if "messages" not in beginning.keys or beginning.keys["messages"] == "{":
            return False
        has_rows = (
            beginning.kind == "[" or file_name(path).endswith((".jsonl", ".ndjson")) or "traj_id" in beginning.keys
        )
        return has_rows and not beginning.keys.keys() - _COLUMNS - {"tools", "id", "source"}
