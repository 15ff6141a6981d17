"""OpenHands 1.x (its software agent SDK): a directory `events/event-<n>-<id>.json`, or a list or lines of events.

There is an event for each call; those of one answer have the same `llm_response_id`. `base_state.json` beside the
directory names the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from understudy.ingest.chat import calls, chat, content, think
from understudy.ingest.formats.openhands_view import EventView
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import (
    file_name,
    items,
    mapping,
    outline,
    parent_directory,
    read_document,
    read_records,
    string,
)
from understudy.ingest.trace import Message, Trace
from understudy.ingest.trace_builder import TraceBuilder, fingerprint

_EVENT_FILE = re.compile(r"events/event-\d+-[^/]*\.json$")
_STATE_FILE = "base_state.json"
# Events of the program itself, of which the model is told nothing.
_SILENT_TEXT = """
ConversationStateUpdateEvent CondensationRequest PauseEvent TokenEvent ConversationErrorEvent
LLMCompletionLogEvent StreamingDeltaEvent
"""
_SILENT = frozenset(_SILENT_TEXT.split())


class OpenHandsV1Format:
    """Reads logs of OpenHands 1.x."""

    name = "openhands-v1"

    def detect(self, path: str, head: bytes) -> bool:
        """Whether the first event has a kind, a source and an id, or it is the state beside such events."""
        seen = outline(head).keys
        if file_name(path) == _STATE_FILE:
            return "agent" in seen and "id" in seen
        return seen.get("kind", "{") not in "{[" and "source" in seen and "id" in seen and "timestamp" in seen

    def group(self, path: str) -> str:
        """The directory of a conversation, for its state and its events; else the file itself."""
        if _EVENT_FILE.search(path):
            return parent_directory(parent_directory(path))
        return parent_directory(path) if file_name(path) == _STATE_FILE else path

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """One trace."""
        losses: Counter[str] = Counter()
        state: dict[str, Any] = {}
        events: list[Any] = []
        session: str | None = None
        for file in sorted(files, key=lambda file: file.path):
            if file_name(file.path) == _STATE_FILE:
                state = mapping(read_document(file, losses))
            elif file_name(file.path).endswith(".jsonl"):
                events.extend(read_records(file, losses))
            else:
                value = read_document(file, losses)
                events.extend(items(value) or ([value] if value is not None else []))
            if _EVENT_FILE.search(file.path):
                session = file_name(parent_directory(parent_directory(file.path)))
        source = self.group(files[0].path)
        session = string(state.get("id")) or session or fingerprint(source, events[:2])
        yield _trace(events, state, source, session, losses)


def _trace(events: Sequence[Any], state: dict[str, Any], source: str, session: str, losses: Counter[str]) -> Trace:
    builder = TraceBuilder("openhands-v1", source, session, losses=losses)
    model = string(mapping(mapping(state.get("agent")).get("llm")).get("model"))
    builder.trace.project = string(mapping(state.get("workspace")).get("working_dir"))
    view = EventView(builder)
    answered: set[str] = set()
    for at, raw in enumerate(events):
        event = mapping(raw)
        kind = string(event.get("kind"))
        number = string(event.get("id")) or f"event-{at}"
        if kind == "SystemPromptEvent":
            for key in ("system_prompt", "dynamic_context"):
                builder.add_system(string(mapping(event.get(key)).get("text")))
            builder.set_tools(items(event.get("tools")))
        elif kind == "Condensation":
            offset = event.get("summary_offset")
            forgotten = items(event.get("forgotten_event_ids"))
            view.condense(forgotten, string(event.get("summary")), offset if isinstance(offset, int) else None)
        elif kind == "ActionEvent":
            _add_action(view, event, number, answered, model)
        elif kind == "MessageEvent":
            _add_message(view, event, number, answered, model)
        elif kind in _RESULTS:
            call_id = string(event.get("tool_call_id"))
            message: Message = {
                "role": "tool",
                "content": _RESULTS[kind](event, losses) or "",
                "tool_call_id": call_id,
            }
            if call_id is None:
                losses["result_without_id"] += 1
                message = {"role": "user", "content": message["content"]}
            elif kind == "AgentErrorEvent" or mapping(event.get("observation")).get("is_error") is True:
                message["is_error"] = True
            view.add(number, message)
        elif kind == "CondensationSummaryEvent":
            view.add(number, {"role": "user", "content": string(event.get("summary")) or ""})
        elif kind not in _SILENT:
            losses["not_an_event" if kind is None else f"unknown_event:{kind[:60]}"] += 1
    return builder.finish()


def _add_action(
    view: EventView, event: dict[str, Any], number: str, answered: set[str], model: str | None
) -> None:
    losses = view.story.losses
    call = mapping(event.get("tool_call")) or {"id": event.get("tool_call_id"), "name": event.get("tool_name")}
    calls_made = calls([call], losses)
    key = string(event.get("llm_response_id")) or number
    if key in answered:
        view.extend(number, key, calls_made)
        return
    answered.add(key)
    message: Message = {"role": "assistant", "content": content(items(event.get("thought")), losses)}
    if calls_made:
        message["tool_calls"] = calls_made
    think(message, string(event.get("reasoning_content")), items(event.get("thinking_blocks")))
    view.turn(number, key, message, model=model, timestamp=string(event.get("timestamp")))


def _add_message(
    view: EventView, event: dict[str, Any], number: str, answered: set[str], model: str | None
) -> None:
    raw_message = mapping(event.get("llm_message"))
    parts = items(raw_message.get("content")) or [raw_message.get("content") or ""]
    message = chat({**raw_message, "content": [*parts, *items(event.get("extended_content"))]}, view.story.losses)
    if message is None:
        return
    if message["role"] != "assistant":
        view.add(number, message)
        return
    key = string(event.get("llm_response_id")) or number
    key = key if key not in answered else number
    answered.add(key)
    view.turn(number, key, message, model=model, timestamp=string(event.get("timestamp")))


def _observation(event: dict[str, Any], losses: Counter[str]) -> Any:
    observation = mapping(event.get("observation"))
    parts = items(observation.get("content")) or [observation.get("content") or observation.get("output") or ""]
    return content([*parts, *items(event.get("extended_content"))], losses)


_RESULTS: dict[str | None, Callable[[dict[str, Any], Counter[str]], Any]] = {
    "ObservationEvent": _observation,
    "AgentErrorEvent": lambda event, _: string(event.get("error")),
    "UserRejectObservation": lambda event, _: f"Action rejected: {event.get('rejection_reason')}",
}
