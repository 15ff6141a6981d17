"""Reads logs of OpenHands 0.x and 1.x (its software agent SDK): lists, lines, or one file per event.

0.x: a list of events, an evaluation's output with its `history`, or a session's `events/<n>.json`. The metadata of
each action contains the model's response. If it is missing (with agents that do not use function calling), the
action itself is converted to a call, and the turn is `repaired`.

1.x: a directory of `events/event-<n>-<id>.json`, or a list or lines of events. Each call has an event; events of
one response have the same `llm_response_id`. `base_state.json` beside the directory names the model.

The SDK's messages: a list in the form in which the SDK writes its `Message`, the system prompt first.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile
from typing import Any

from understudy.ingest.chat import calls, chat, content, response_message, result_message, thinking_text
from understudy.ingest.formats.base import (
    LogFormat,
    TraceBuilder,
    add_messages,
    fingerprint,
    outcome_from,
    repository,
)
from understudy.ingest.json_values import items, mapping, string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import (
    file_name,
    outline,
    parent_directory,
    read_document,
    read_records,
    take_losses,
)
from understudy.ingest.trace import Message, Trace, path_to, tool_call


class EventView:
    """The events that the model currently sees, in order, each with its message. Extends a builder accordingly."""

    def __init__(self, builder: TraceBuilder) -> None:
        self.builder = builder
        self._shown: list[tuple[set[Any], Message]] = []
        self._answers: dict[str, tuple[set[Any], Message]] = {}

    def add(self, number: Any, message: Message) -> None:
        """Add an event with its message."""
        self._shown.append(({_key(number)}, message))
        self.builder.add(message)

    def turn(self, number: Any, key: str, message: Message, **turn: Any) -> None:
        """Add a response with id `key`, whose first event this is. `turn` is passed to `TraceBuilder.add_turn`."""
        self._answers[key] = (numbers := {_key(number)}, message)
        self._shown.append((numbers, message))
        self.builder.add_turn(key, [message], **turn)

    def has(self, key: str) -> bool:
        """Return whether a response with this id exists."""
        return key in self._answers

    def extend(self, number: Any, key: str, calls: Sequence[dict[str, Any]] = ()) -> None:
        """Add another event, with further tool calls, to the response `key`.

        Results may come between the events in the log, but they belong to one response.
        """
        numbers, message = self._answers[key]
        numbers.add(_key(number))
        if calls:
            message.setdefault("tool_calls", []).extend(calls)

    def numbers(self) -> Iterator[Any]:
        """Yield the ids of the events that the model sees."""
        return chain.from_iterable(numbers for numbers, _ in self._shown)

    def condense(self, events: Iterable[Any], summary: str | None, offset: Any) -> None:
        """Remove events, and insert their summary at position `offset` (0 is the first message).

        A call whose results were removed is removed too, and so are results whose call was.
        """
        if not self.builder.may_repeat():
            return
        forgotten = {_key(number) for number in events}
        remaining = [(numbers, message) for numbers, message in self._shown if not numbers & forgotten]
        if len(remaining) == len(self._shown) and summary is None:
            return
        shown_results = {message.get("tool_call_id") for _, message in self._shown}
        answered = {message["tool_call_id"] for _, message in remaining if message["role"] == "tool"}
        call_ids = {
            call["id"]
            for _, message in remaining
            for call in message.get("tool_calls") or ()
            if call["id"] in answered or call["id"] not in shown_results
        }
        remaining_events = [
            (numbers, message)
            for numbers, message in remaining
            if (message.get("tool_call_id") is None or message["tool_call_id"] in call_ids)
            and all(call["id"] in call_ids for call in message.get("tool_calls") or ())
        ]
        if summary is not None:
            position = len(remaining_events)
            if isinstance(offset, int):
                position = max(0, offset - 1 if self.builder.trace.shape.system else offset)
            remaining_events.insert(position, (set(), {"role": "user", "content": summary}))
        pairs = zip(remaining_events, self._shown, strict=False)
        shared_count = sum(1 for _ in takewhile(lambda pair: pair[0][1] is pair[1][1], pairs))
        self.builder.count_repeated(len(remaining_events) - shared_count)
        self.builder.continue_from(self._node(shared_count))
        self._shown = remaining_events
        for _, message in remaining_events[shared_count:]:
            self.builder.add(message)

    def _node(self, count: int) -> int:
        """Return the node of the `count`-th message that the model sees (counted from 1), or -1 if `count` is
        0.
        """
        path = path_to(self.builder.trace.nodes, self.builder.tip, [])
        return path[count - 1] if count else -1


def _key(number: Any) -> Any:
    return number if isinstance(number, str | int) else repr(number)


_EVENT_FILE = re.compile(r"events/\d+\.json$")
# Internal events, which the model is not sent.
_SILENT = frozenset((
    "change_agent_state", "agent_state_changed", "null", "loop_detection_pause", "recall", "status", "push",
    "send_pr",
))  # fmt: skip
_CONDENSED = frozenset(("condensation", "condensation_request"))


class OpenHandsFormat(LogFormat):
    """Reads logs of OpenHands 0.x."""

    name = "openhands"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the first event has a source and an action or observation, or the first row has a
        history.
        """
        beginning = outline(head)
        if "history" in beginning.keys and "instance_id" in beginning.keys:
            return beginning.keys["history"] == "["
        is_event = "source" in beginning.keys and ("action" in beginning.keys or "observation" in beginning.keys)
        return (
            is_event and "kind" not in beginning.keys and (beginning.kind == "[" or bool(_EVENT_FILE.search(path)))
        )

    def group(self, path: str) -> str:
        """Return the events directory for a file with a single event, else the file's own path."""
        return parent_directory(path) if _EVENT_FILE.search(path) else path

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """Yield one trace for each list or directory of events, and one for each row of an evaluation's output."""
        stored = [file for file in files if _EVENT_FILE.search(file.path)]
        other_files = [file for file in files if not _EVENT_FILE.search(file.path)]
        if stored:
            losses: Counter[str] = Counter()
            events = sorted((mapping(read_document(file, losses)) for file in stored), key=_number)
            source = parent_directory(stored[0].path)
            yield _trace(events, source, file_name(parent_directory(source)), losses)
        yield from super().read(other_files)

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """Yield the trace of a list of events, or one trace for each row of an evaluation's output."""
        losses: Counter[str] = Counter()
        if file_name(file.path).endswith(".jsonl"):
            for row in read_records(file, losses):
                yield _row(row, file.path, take_losses(losses))
            if losses:
                yield _trace([], file.path, file_name(file.path), losses)
            return
        value = read_document(file, losses)
        if isinstance(value, list):
            events = items(value)
            yield _trace(events, file.path, fingerprint(file.path, events[:2]), losses)
        else:
            yield _row(mapping(value), file.path, losses)


def _row(row: dict[str, Any], source: str, losses: Counter[str]) -> Trace:
    # Older outputs hold pairs of an action and its observation.
    events: list[Any] = [event for entry in items(row.get("history")) for event in (items(entry) or [entry])]
    task = string(row.get("instance_id")) or file_name(source)
    model = string(value_at(row, "metadata", "llm_config", "model"))
    trace = _trace(events, source, f"{task}-{fingerprint(source, events[:2])}", losses, model)
    trace.project = repository(task)
    report = mapping(value_at(row, "test_result", "report")) or mapping(row.get("report"))
    trace.outcome = outcome_from(
        resolved=report.get("resolved", row.get("resolved")),
        task=row.get("instance_id"),
        exit_status=row.get("error"),
    )
    return trace


def _number(event: dict[str, Any]) -> int:
    number = event.get("id")
    return number if isinstance(number, int) else 1 << 62


def _trace(
    events: Sequence[Any], source: str, session: str, losses: Counter[str], model: str | None = None
) -> Trace:
    builder = TraceBuilder("openhands", source, session, losses=losses)
    view = EventView(builder)
    call_ids: set[str] = set()
    for index, raw in enumerate(events):
        event = mapping(raw)
        kind = event.get("action") or event.get("observation")
        number = event.get("id", index)
        if not isinstance(kind, str):
            losses["not_an_event"] += 1
        elif kind in _CONDENSED:
            _condense(view, mapping(event.get("args")))
        elif kind == "system":
            arguments = mapping(event.get("args"))
            builder.add_system(string(arguments.get("content")))
            builder.set_tools(items(arguments.get("tools")))
            builder.trace.version = string(arguments.get("openhands_version"))
            builder.trace.agent = string(arguments.get("agent_class"))
        elif kind in _SILENT:
            if kind == "recall" and "observation" in event:
                _add_recalled(view, number, event)
        elif "observation" in event:
            view.add(number, _observation(event, kind, call_ids, losses))
        elif event.get("source") == "user":
            view.add(number, _user_message(event, kind, losses))
        else:
            _add_action(view, event, kind, number, call_ids, model)
    return builder.finish()


def _add_action(
    view: EventView, event: dict[str, Any], kind: str, number: Any, call_ids: set[str], model: str | None
) -> None:
    arguments = mapping(event.get("args"))
    metadata = mapping(event.get("tool_call_metadata"))
    response = mapping(metadata.get("model_response"))
    choice = mapping(next(iter(items(response.get("choices"))), None))
    reply = {**mapping(choice.get("message")), "role": "assistant"}
    message = chat(reply, view.builder.losses) if choice else None
    notes: tuple[str, ...] = ()
    key = string(response.get("id")) if message else None
    if message is None:
        text = string(arguments.get("content") if kind == "message" else arguments.get("thought"))
        message = response_message(text, [])
        if kind == "finish":
            message["content"] = text or string(arguments.get("final_thought"))
        elif kind != "message":
            remaining_arguments = {name: value for name, value in arguments.items() if name != "thought"}
            call_id = string(metadata.get("tool_call_id")) or f"event_{number}"
            message["tool_calls"] = [
                tool_call(call_id, string(metadata.get("function_name")) or kind, remaining_arguments)
            ]
            notes = ("call_made_of_action",)
    key = key or f"event-{number}"
    if view.has(key):
        view.extend(number, key)  # this is another action of the same response
        return
    call_ids.update(call["id"] for call in message.get("tool_calls") or ())
    view.turn(
        number,
        key,
        message,
        model=string(response.get("model")) or model,
        timestamp=string(event.get("timestamp")),
        fidelity="repaired" if notes else None,
        notes=notes,
    )


def _user_message(event: dict[str, Any], kind: str, losses: Counter[str]) -> Message:
    arguments = mapping(event.get("args"))
    if kind == "run":
        return {"role": "user", "content": f"User executed the command:\n{arguments.get('command')}"}
    parts: list[Any] = [arguments.get("content") or ""]
    parts.extend({"type": "image_url", "image_url": url} for url in items(arguments.get("image_urls")))
    return {"role": "user", "content": content(parts, losses)}


_ENDINGS: dict[str, str] = {
    "error": "\n[Error occurred in processing last action]",
    "user_rejected": "\n[Last action has been rejected by the user]",
}


def _observation(event: dict[str, Any], kind: str, call_ids: set[str], losses: Counter[str]) -> Message:
    extras = mapping(event.get("extras"))
    raw = event.get("content")
    text = raw if isinstance(raw, str) else ""
    if kind == "run":
        text = _command_output(text, mapping(extras.get("metadata")))
    elif kind == "delegate":
        text = string(value_at(extras, "outputs", "content")) or text
    text += _ENDINGS.get(kind, "")
    call_id = string(value_at(event, "tool_call_metadata", "tool_call_id"))
    if call_id is None and (cause := f"event_{event.get('cause')}") in call_ids:
        call_id = cause
    if call_id is not None and call_id in call_ids:
        return result_message(call_id, text, is_error=kind == "error")
    if call_id is not None:
        losses["result_without_call"] += 1
    return {"role": "user", "content": text}


def _command_output(text: str, metadata: dict[str, Any]) -> str:
    """Return what the model is shown of a command: its output, working directory, interpreter and exit code."""
    output = f"{metadata.get('prefix') or ''}{text}{metadata.get('suffix') or ''}"
    for key, label in (
        ("working_dir", "Current working directory"),
        ("py_interpreter_path", "Python interpreter"),
    ):
        if value := metadata.get(key):
            output += f"\n[{label}: {value}]"
    code = metadata.get("exit_code")
    return output + (f"\n[Command finished with exit code {code}]" if isinstance(code, int) and code != -1 else "")


def _add_recalled(view: EventView, number: Any, event: dict[str, Any]) -> None:
    """Add recalled knowledge as a user message.

    The template around it is not logged, so the turns are `repaired`.
    """
    extras = mapping(event.get("extras"))
    fields: list[Any] = [extras.get("repo_instructions"), extras.get("additional_agent_instructions")]
    fields += [value_at(entry, "content") for entry in items(extras.get("microagent_knowledge"))]
    if texts := [text for value in fields if (text := string(value))]:
        view.add(number, {"role": "user", "content": "\n\n".join(texts)})
        view.builder.fidelity, view.builder.notes = "repaired", ("recall_template",)


def _condense(view: EventView, arguments: dict[str, Any]) -> None:
    forgotten: list[Any] = items(arguments.get("forgotten_event_ids"))
    first_id, last_id = arguments.get("forgotten_events_start_id"), arguments.get("forgotten_events_end_id")
    if isinstance(first_id, int) and isinstance(last_id, int):
        forgotten = [
            number for number in view.numbers() if isinstance(number, int) and first_id <= number <= last_id
        ]
    view.condense(forgotten, string(arguments.get("summary")), arguments.get("summary_offset"))


_V1_EVENT_FILE = re.compile(r"events/event-\d+-[^/]*\.json$")
_STATE_FILE = "base_state.json"
_COMMAND_RESULTS = ("TerminalObservation", "ExecuteBashObservation")
_ERROR_HEADER = "[An error occurred during execution.]\n"
_SHOWN_OUTPUT = 30_000
"""How many characters of a command's output the model is shown at most, with the note that takes the place of the
others.
"""
_CLIPPED = (
    "<response clipped><NOTE>Due to the max output limit, only part of the full response has been shown to you."
    "</NOTE>"
)
_CLIPPED_AND_SAVED = (
    "<response clipped><NOTE>Due to the max output limit, only part of the full response has been shown to you. "
    "The complete output has been saved to {path} - you can use other tools to view the full content (truncated "
    "part starts around line {line}).</NOTE>"
)
# Internal events, which the model is not sent.
_V1_SILENT = frozenset((
    "ConversationStateUpdateEvent", "CondensationRequest", "PauseEvent", "TokenEvent", "ConversationErrorEvent",
    "LLMCompletionLogEvent", "StreamingDeltaEvent",
))  # fmt: skip


class OpenHandsV1Format(LogFormat):
    """Reads logs of OpenHands 1.x."""

    name = "openhands-v1"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the first event has a kind, a source and an id, or the file is the state beside such
        events.
        """
        keys = outline(head).keys
        if file_name(path) == _STATE_FILE:
            return "agent" in keys and "id" in keys
        return keys.get("kind", "{") not in "{[" and "source" in keys and "id" in keys and "timestamp" in keys

    def group(self, path: str) -> str:
        """Return the conversation's directory for its state and its events, else the file's own path."""
        if _V1_EVENT_FILE.search(path):
            return parent_directory(parent_directory(path))
        return parent_directory(path) if file_name(path) == _STATE_FILE else path

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """Yield the one trace of a conversation's files."""
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
            if _V1_EVENT_FILE.search(file.path):
                session = file_name(parent_directory(parent_directory(file.path)))
        source = self.group(files[0].path)
        session = string(state.get("id")) or session or fingerprint(source, events[:2])
        yield _v1_trace(events, state, source, session, losses)


def _v1_trace(
    events: Sequence[Any], state: dict[str, Any], source: str, session: str, losses: Counter[str]
) -> Trace:
    builder = TraceBuilder("openhands-v1", source, session, losses=losses)
    model = string(value_at(state, "agent", "llm", "model"))
    builder.trace.project = string(value_at(state, "workspace", "working_dir"))
    view = EventView(builder)
    for index, raw in enumerate(events):
        event = mapping(raw)
        kind = string(event.get("kind"))
        number = string(event.get("id")) or f"event-{index}"
        if kind == "SystemPromptEvent":
            for key in ("system_prompt", "dynamic_context"):
                builder.add_system(string(value_at(event, key, "text")))
            builder.set_tools(items(event.get("tools")))
        elif kind == "Condensation":
            _condense(view, event)
        elif kind == "ActionEvent":
            _add_v1_action(view, event, number, model)
        elif kind == "MessageEvent":
            _add_message(view, event, number, model)
        elif kind in _RESULTS:
            call_id = string(event.get("tool_call_id"))
            text = _RESULTS[kind](event, losses) or ""
            failed = kind == "AgentErrorEvent" or value_at(event, "observation", "is_error") is True
            losses["result_without_id"] += call_id is None
            without_call: Message = {"role": "user", "content": text}
            view.add(number, result_message(call_id, text, is_error=failed) if call_id else without_call)
        elif kind == "CondensationSummaryEvent":
            view.add(number, {"role": "user", "content": string(event.get("summary")) or ""})
        elif kind not in _V1_SILENT:
            losses["not_an_event" if kind is None else f"unknown_event:{kind[:60]}"] += 1
    return builder.finish()


def _add_v1_action(view: EventView, event: dict[str, Any], number: str, model: str | None) -> None:
    losses = view.builder.losses
    call = mapping(event.get("tool_call")) or {"id": event.get("tool_call_id"), "name": event.get("tool_name")}
    tool_calls = calls([call], losses)
    key = string(event.get("llm_response_id")) or number
    if view.has(key):
        view.extend(number, key, tool_calls)
        return
    text, blocks = content(items(event.get("thought")), losses), items(event.get("thinking_blocks"))
    thinking = string(event.get("reasoning_content")) or thinking_text(blocks)
    message = response_message(text, tool_calls, thinking, hidden=bool(blocks))
    view.turn(number, key, message, model=model, timestamp=string(event.get("timestamp")))


def _add_message(view: EventView, event: dict[str, Any], number: str, model: str | None) -> None:
    raw_message = mapping(event.get("llm_message"))
    parts = items(raw_message.get("content")) or [raw_message.get("content") or ""]
    message = chat(
        {**raw_message, "content": [*parts, *items(event.get("extended_content"))]}, view.builder.losses
    )
    if message is None:
        return
    if message["role"] != "assistant":
        view.add(number, message)
        return
    key = string(event.get("llm_response_id")) or number
    key = number if view.has(key) else key
    view.turn(number, key, message, model=model, timestamp=string(event.get("timestamp")))


def _v1_observation(event: dict[str, Any], losses: Counter[str]) -> Any:
    observation = mapping(event.get("observation"))
    parts = items(observation.get("content")) or [observation.get("content") or observation.get("output") or ""]
    if observation.get("kind") in _COMMAND_RESULTS and (metadata := mapping(observation.get("metadata"))):
        text = "".join(part_text for part in parts if (part_text := _text(part)) is not None)
        directory = string(observation.get("full_output_save_dir"))
        parts = [_clipped(_command_output(text, metadata), directory)]
    if observation.get("is_error") is True:
        parts = [_ERROR_HEADER, *parts]
    parts += items(event.get("extended_content"))
    texts = [_text(part) for part in parts]
    # Texts are sent as one, a line each, unless there is an image.
    return content(parts, losses) if None in texts else "\n".join(text for text in texts if text is not None)


def _text(part: Any) -> str | None:
    return part if isinstance(part, str) else string(mapping(part).get("text"))


def _clipped(text: str, directory: str | None) -> str:
    """Return what the model is shown of a command's output: the beginning and the end of a long one.

    `directory` is where the whole output is kept. The line that is named is the one after the beginning, as it
    would be with the shorter note.
    """
    if len(text) <= _SHOWN_OUTPUT:
        return text
    note = _CLIPPED
    head = (_SHOWN_OUTPUT - len(note) + 1) // 2
    if directory is not None:
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
        line = len(text[:head].splitlines()) + 1
        note = _CLIPPED_AND_SAVED.format(path=f"{directory}/terminal_output_{digest}.txt", line=line)
    head = min(head, _SHOWN_OUTPUT - len(note))
    return text[:head] + note + text[len(text) - (_SHOWN_OUTPUT - len(note) - head) :]


_RESULTS: dict[str | None, Callable[[dict[str, Any], Counter[str]], Any]] = {
    "ObservationEvent": _v1_observation,
    "AgentErrorEvent": lambda event, _: string(event.get("error")),
    "UserRejectObservation": lambda event, _: f"Action rejected: {event.get('rejection_reason')}",
}


_SDK = re.compile(
    rb'"(?:responses_reasoning_item|responses_item_id)"\s*:|"origin"\s*:\s*"(?:completion|responses)"'
)


class OpenHandsMessagesFormat(LogFormat):
    """Reads message lists of the OpenHands SDK."""

    name = "openhands-messages"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file is a list of messages with a field that only this SDK writes."""
        beginning = outline(head)
        return (
            beginning.kind == "["
            and "role" in beginning.keys
            and "content" in beginning.keys
            and bool(_SDK.search(head))
        )

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        messages = [mapping(raw) for raw in items(read_document(file, losses))]
        builder = TraceBuilder(self.name, file.path, fingerprint(file.path, messages[:3]), losses=losses)
        add_messages(builder, messages, None)
        return builder.finish()
