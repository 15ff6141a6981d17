"""OpenAI's fine-tuning files: one conversation a line, with weights that say which answers are learned."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, cast

from understudy.errors import ConfigError
from understudy.export.base import ExportSummary, FormatTraits, ProgressCallback, exporter, no_progress
from understudy.export.corpus import Corpus, Unit
from understudy.export.examples import Example
from understudy.export.files import ExportWriter
from understudy.export.parquet import JsonLinesWriter, json_bytes
from understudy.ingest.trace import Message

MIN_ROWS = 10
MAX_FILE_BYTES = 512_000_000
"""OpenAI's limit on the size of an uploaded file, in bytes."""
MAX_TOOLS = 128
MAX_ID_CHARACTERS = 40
"""OpenAI's limit on the length of a tool call's id, in characters."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BYTES_A_TOKEN = 4
_FIELDS_BY_ROLE = {
    "system": ("role", "content"),
    "developer": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls"),
    "tool": ("role", "content", "tool_call_id"),
}

_ABOUT = (
    "Each line is a conversation: `messages`, and `tools` where they are known. An assistant's message has the "
    "`weight` 1 where it is learned and 0 where it is only read. Thinking is not in it: the format has no place "
    "for it."
)
_LOAD = """from openai import OpenAI

client = OpenAI()
train = client.files.create(file=open("{output}/train.jsonl", "rb"), purpose="fine-tune")
client.fine_tuning.jobs.create(model=MODEL, training_file=train.id)"""


@exporter(FormatTraits(solved_only=True, chooses_thinking=False, cuts=True, weights=True))
def export(
    corpus: Corpus,
    output: Path,
    *,
    unit: Annotated[Unit, "What a row holds: a whole conversation, or one turn."] = "conversation",
    max_tokens: Annotated[int, "Leave out rows that are longer by estimate, 4 bytes a token (0: none)."] = 65_536,
    report: ProgressCallback = no_progress,
) -> ExportSummary:
    """Conversations for OpenAI's fine-tuning, with weights, within its limits.

    Raises ConfigError if there is nothing to write, it cannot be written, or a file exceeds OpenAI's limit.
    """
    with ExportWriter(corpus, output, "openai", report) as writing:
        for example in corpus.examples(unit):
            row = row_of(example)
            if reason := refusal_reason(row, max_tokens):
                corpus.counts.leave_out(example, reason)
            else:
                writing.add(example.group, row)
        too_few = 0 < writing.written.get("train", 0) < MIN_ROWS
        notes = (f"OpenAI wants {MIN_ROWS} rows or more to train on.",) if too_few else ()
        return writing.finish(_ABOUT, _LOAD, notes=notes, check=_check)


def _check(path: Path) -> None:
    size = path.stat().st_size
    if path.suffix == JsonLinesWriter.suffix and size > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path.name}: got {size / 1e6:.0f} MB, expected at most {MAX_FILE_BYTES / 1e6:.0f}, OpenAI's limit; "
            "select less with --where, --roles or --max-tokens"
        )


def row_of(example: Example) -> dict[str, Any]:
    """Return an example as a line."""
    learned = set(example.trained)
    row: dict[str, Any] = {
        "messages": [_message(message, index in learned) for index, message in enumerate(example.messages)]
    }
    if example.tools:
        row["tools"] = example.tools
    return row


def refusal_reason(row: dict[str, Any], max_tokens: int) -> str | None:
    """Return why OpenAI would reject a line, or truncate it; None if it would not."""
    tools: list[dict[str, Any]] = row.get("tools", [])
    if len(tools) > MAX_TOOLS:
        return f"rows with more than {MAX_TOOLS} tools"
    if not all(message["role"] in _FIELDS_BY_ROLE for message in row["messages"]):
        return "rows with a role that OpenAI does not take"
    called = [call for message in row["messages"] for call in message.get("tool_calls", ())]
    if not all(_NAME.fullmatch(_name(tool)) for tool in (*tools, *called)):
        return "rows with a tool whose name OpenAI does not take"
    if max_tokens and len(json_bytes(row)) > max_tokens * _BYTES_A_TOKEN:
        return f"rows of more than {max_tokens} tokens by estimate"
    return None


def _name(tool: dict[str, Any]) -> str:
    """Return the name of a tool or a call; "" if it is not in OpenAI's form."""
    function: Any = tool.get("function")
    return str(cast(dict[str, Any], function).get("name")) if isinstance(function, dict) else ""


def _message(message: Message, learned: bool) -> Message:
    fields: Message = {
        key: message[key] for key in _FIELDS_BY_ROLE.get(message["role"], ("role",)) if key in message
    }
    if "tool_call_id" in fields:
        fields["tool_call_id"] = _short_id(fields["tool_call_id"])
    if fields.get("tool_calls"):
        fields["tool_calls"] = [
            {"id": _short_id(call["id"]), "type": "function", "function": call["function"]}
            for call in fields["tool_calls"]
        ]
        fields["content"] = fields.get("content") or None
    if fields["role"] == "assistant":
        fields["weight"] = int(learned)
    return fields


def _short_id(call_id: str) -> str:
    """Return an id within the length limit. Equal ids give equal results."""
    if len(call_id) <= MAX_ID_CHARACTERS:
        return call_id
    return "call_" + hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[: MAX_ID_CHARACTERS - 5]
