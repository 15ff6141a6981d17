"""Reads rollouts of NeMo Gym: JSON lines with a Responses API request, all items that followed, and a reward.

`response.output` holds the items of all model calls of a rollout. Consecutive items up to a tool result, or to a
message that is not the model's, form one response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from understudy.ingest.chat import chat
from understudy.ingest.formats.base import LogFormat, TraceBuilder, fingerprint, iso_time, outcome_from
from understudy.ingest.formats.swe_agents import response_as_chat
from understudy.ingest.json_values import first_string, items, mapping, string
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import outline, read_records, take_losses
from understudy.ingest.trace import Trace

_PARAMS = "responses_create_params"
_SHORTEST_ID = 16


class NemoGymFormat(LogFormat):
    """Reads rollouts of NeMo Gym. Tasks that have no response yet are counted as `no_response`."""

    name = "nemo-gym"

    def detect(self, path: str, head: bytes) -> bool:
        """Whether the first row has the request parameters of the Responses API."""
        return outline(head).keys.get(_PARAMS) == "{"

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """Yield one trace for each row."""
        losses: Counter[str] = Counter()
        for row in read_records(file, losses):
            if mapping(row.get("response")):
                yield _trace(row, file.path, take_losses(losses))
            else:
                losses["no_response"] += 1
        if losses:
            yield TraceBuilder(self.name, file.path, fingerprint(file.path, None), losses=losses).finish()


def _trace(row: dict[str, Any], source: str, losses: Counter[str]) -> Trace:
    params, response = mapping(row.get(_PARAMS)), mapping(row.get("response"))
    request_input = params.get("input")
    request_input = (
        [{"role": "user", "content": request_input}] if isinstance(request_input, str) else items(request_input)
    )
    output = items(response.get("output"))
    session = string(response.get("id")) or ""
    if len(session) < _SHORTEST_ID:
        session = fingerprint(source, [request_input, output])  # some agents give every response the same short id
    builder = TraceBuilder("nemo-gym", source, session, losses=losses)
    builder.add_system(string(params.get("instructions")))
    builder.set_tools([_tool(mapping(tool)) for tool in items(params.get("tools"))])
    builder.trace.agent = string(mapping(row.get("agent_ref")).get("name"))
    builder.trace.outcome = outcome_from(
        reward=row.get("reward"), task=first_string(row, "instance_id", "task_id", "uuid")
    )
    model, created = string(response.get("model")), iso_time(response.get("created_at"))
    for run in _runs(request_input):
        if (message := chat(run, losses)) is not None and not builder.take_system(message):
            builder.add(message)
    for number, run in enumerate(_runs(output)):
        message = chat(run, losses)
        if message is None:
            continue
        if message["role"] == "assistant":
            builder.add_turn(f"m{number}", [message], model=model, timestamp=created)
        else:
            builder.add(message)
    return builder.finish()


def _runs(entries: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the items as chat messages. Consecutive items of one response become one message."""
    own: list[dict[str, Any]] = []
    for item in map(mapping, entries):
        if item.get("type") in ("reasoning", "function_call") or item.get("role") == "assistant":
            text = item.get("content")
            plain = isinstance(text, str) and item.get("role") == "assistant"
            own.append({**item, "type": "message", "content": [{"type": "text", "text": text}]} if plain else item)
            continue
        if own:
            yield response_as_chat({"object": "response", "output": own})
            own = []
        yield response_as_chat(item)
    if own:
        yield response_as_chat({"object": "response", "output": own})


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool of the Responses API to the form of chat completions."""
    if "function" in tool or tool.get("type") != "function":
        return tool
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}
