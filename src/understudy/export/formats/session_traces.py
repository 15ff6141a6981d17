"""The session traces that the Hugging Face Hub displays: a JSON lines file for each rollout and each session.

In the Hub's "Session Trace Simple Format", a header is followed by one message a line, with tool results as
separate messages. A file holds one conversation, so subagents have files beside that of the session that started
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from understudy.export.base import ExportSummary, FormatTraits, ProgressCallback, exporter, no_progress
from understudy.export.corpus import Corpus, Split
from understudy.export.files import ExportWriter
from understudy.export.formats.atif import Document, trajectories, without_tokens, write_trajectory
from understudy.export.parquet import json_bytes
from understudy.wire.stored import text_content

_TITLE_CHARS = 80
_ABOUT = (
    "Each file but `train.jsonl` and `test.jsonl`, whose rows name the files of their split, is a session in the "
    "Hub's session trace format: its header (`harness` is the agent; `reward`, `task` and `model` where they are "
    "known), then its messages. Images are not in it, and token ids have no place in the format."
)
_LOAD = """import json

for line in open("{output}/train.jsonl"):
    header, *messages = map(json.loads, open("{output}/" + json.loads(line)["file"]))"""


@exporter(FormatTraits(chooses_thinking=False, clients=True))
def export(corpus: Corpus, output: Path, *, report: ProgressCallback = no_progress) -> ExportSummary:
    """Session traces that the Hugging Face Hub displays, a JSON lines file for each rollout and each session.

    Raises ConfigError if there is nothing to write, or it cannot be written.
    """
    data: dict[Split, list[str]] = {}
    with ExportWriter(corpus, output, "session-traces", report) as writing:
        for group, name, trajectory in trajectories(corpus):
            without_tokens(trajectory)
            for file, document in _files(name.removesuffix(".json"), trajectory):
                content = b"".join(json_bytes(line) + b"\n" for line in trace_lines(document))
                write_trajectory(writing, group, file, document, content)
                data.setdefault(corpus.split(group), []).append(file)
        return writing.finish(_ABOUT, _LOAD, data=data)


def _files(name: str, document: Document) -> Iterator[tuple[str, Document]]:
    """Return a trajectory and its subagents by file, because a file cannot contain another conversation."""
    yield _file_name(name), document
    identity = document["trajectory_id"]
    for number, child in enumerate(document.get("subagent_trajectories", ()), 1):
        unique_fields = {
            "trajectory_id": f"{identity}.{child['trajectory_id']}",
            "extra": {**child["extra"], "parent": identity},
        }
        yield from _files(f"{name}.agent-{number}", {**child, **unique_fields})


def _file_name(name: str) -> str:
    return f"trace-{name}.jsonl"


def trace_lines(document: Document) -> Iterator[dict[str, Any]]:
    """Yield the lines of a trajectory: the header, then the messages."""
    agent, extra = document["agent"], document["extra"]
    continued = document.get("continued_trajectory_ref")
    header_fields = {
        "name": _title(document),
        "version": agent["version"],
        "model": agent.get("model_name"),
        **{key: extra.get(key) for key in ("task", "reward", "resolved", "parent", "branch", "fidelity")},
        "continued_by": _file_name(continued.removesuffix(".json")) if continued else None,
        "tools": agent.get("tool_definitions"),
    }
    header = {"type": "session", "harness": agent["name"], "id": document["trajectory_id"]}
    yield header | {key: value for key, value in header_fields.items() if value is not None}
    for step in document["steps"]:
        for message in _messages(step):
            yield {"type": "message", "message": message}


def _messages(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the message of a step, then the results of its tool calls."""
    role = "assistant" if step["source"] == "agent" else step["source"]
    calls = [
        {
            "id": call["tool_call_id"],
            "type": "function",
            "function": {"name": call["function_name"], "arguments": _arguments(call)},
        }
        for call in step.get("tool_calls", ())
    ]
    optional = {
        "reasoningContent": step.get("reasoning_content"),
        "toolCalls": calls or None,
        "timestamp": _milliseconds(step.get("timestamp")),
        "model": step.get("model_name"),
    }
    yield {"role": role, "content": text_content(step["message"])} | {
        key: value for key, value in optional.items() if value is not None
    }
    for result in step.get("observation", {}).get("results", ()):
        content = text_content(result["content"])
        message = {"role": "tool", "toolCallId": result["source_call_id"], "content": content}
        yield message | ({"isError": True} if result.get("extra", {}).get("is_error") else {})


def _arguments(call: dict[str, Any]) -> str:
    """Return the arguments as JSON text; if the model wrote invalid ones, its own text."""
    written: Any = call.get("extra", {}).get("arguments")
    return written if isinstance(written, str) else json_bytes(call["arguments"]).decode()


def _milliseconds(timestamp: str | None) -> int | None:
    return None if timestamp is None else round(datetime.fromisoformat(timestamp).timestamp() * 1000)


def _title(document: Document) -> str | None:
    """Return the first line of the user's request."""
    steps = cast(list[dict[str, Any]], document["steps"])
    first_prompt = next((text_content(step["message"]) for step in steps if step["source"] == "user"), "")
    return first_prompt.strip().partition("\n")[0][:_TITLE_CHARS] or None
