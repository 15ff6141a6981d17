"""Reads rollouts of NeMo Gym: JSON lines with a Responses API request, all items that followed, and a reward.

`response.output` holds the items of all model calls of a rollout. Consecutive items up to a tool result, or to a
message that is not the model's, form one response. Some agents write transitions instead: lists of items, each of
which repeats the ones before it. Some do not log the prompt.
"""

from __future__ import annotations

import re
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
_SERVERS_ID = re.compile(r"resp_.{12,}")
"""An id that a model server gave a response. Ids that agents make, from the task's for example, are often the same
for all samples of a task.
"""
_FORMER_ID = 16
"""From this length on, earlier releases took any id for one of a rollout."""


class NemoGymFormat(LogFormat):
    """Reads rollouts of NeMo Gym. Tasks that have no response yet are counted as `no_response`."""

    name = "nemo-gym"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the first row has the request parameters of the Responses API."""
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
    output = _items_of(response.get("output"), losses)
    response_id = string(response.get("id")) or ""
    is_servers = _SERVERS_ID.fullmatch(response_id) is not None
    session = response_id if is_servers else fingerprint(source, [request_input, output])
    entries = [*map(mapping, request_input), *map(mapping, output[:1])]
    has_prompt = any(entry.get("role") == "user" for entry in entries)
    builder = TraceBuilder(
        "nemo-gym",
        source,
        session,
        losses=losses,
        fidelity="exact" if has_prompt else "repaired",
        notes=() if has_prompt else ("prompt_not_logged",),
    )
    if not is_servers and len(response_id) >= _FORMER_ID:
        builder.trace.former_ids = (f"nemo-gym:{response_id}",)
    builder.add_system(string(params.get("instructions")))
    tools = items(params.get("tools")) or items(response.get("tools"))
    builder.set_tools([_tool(mapping(tool)) for tool in tools])
    builder.trace.agent = string(mapping(row.get("agent_ref")).get("name"))
    builder.trace.outcome = outcome_from(
        reward=row.get("reward"), task=first_string(row, "instance_id", "task_id", "uuid")
    )
    model, created = string(response.get("model")), iso_time(response.get("created_at"))
    for item in _joined_items(request_input):
        if (message := chat(item, losses)) is not None and not builder.take_system(message):
            builder.add(message)
    for number, item in enumerate(_joined_items(output)):
        message = chat(item, losses)
        if message is None:
            continue
        if message["role"] == "assistant":
            builder.add_turn(f"m{number}", [message], model=model, timestamp=created)
        else:
            builder.add(message)
    return builder.finish()


def _items_of(output: Any, losses: Counter[str]) -> list[Any]:
    """Return the items of a rollout. Of transitions, the last one has all items, unless the agent dropped some."""
    entries = items(output)
    if not entries or not all(isinstance(entry, list) for entry in entries):
        return entries
    last_transition: list[Any] = entries[-1]
    losses["transition_left_out"] += sum(last_transition[: len(entry)] != entry for entry in entries)
    return last_transition


def _joined_items(entries: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the items as chat messages. Consecutive items of one response become one message."""
    response_items: list[dict[str, Any]] = []
    for item in map(mapping, entries):
        if item.get("type") in ("reasoning", "function_call") or item.get("role") == "assistant":
            text = item.get("content")
            is_plain_text = isinstance(text, str) and item.get("role") == "assistant"
            response_items.append(
                {**item, "type": "message", "content": [{"type": "text", "text": text}]} if is_plain_text else item
            )
            continue
        if response_items:
            yield response_as_chat({"object": "response", "output": response_items})
            response_items = []
        yield response_as_chat(item)
    if response_items:
        yield response_as_chat({"object": "response", "output": response_items})


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool of the Responses API to the form of chat completions."""
    if "function" in tool or tool.get("type") != "function":
        return tool
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}
