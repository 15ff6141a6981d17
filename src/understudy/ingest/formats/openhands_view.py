"""The conversation of an event log out of which a condenser takes events: both OpenHands' have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from understudy.ingest.trace import Fidelity, Message
from understudy.ingest.trace_builder import TraceBuilder


class EventView:
    """The events that the model is still shown, in order, each with its message; grows a story."""

    def __init__(self, builder: TraceBuilder) -> None:
        self.story = builder
        self._shown: list[tuple[set[Any], Message]] = []
        self._answers: dict[str, tuple[set[Any], Message]] = {}

    def add(self, number: Any, message: Message) -> None:
        """An event with its message."""
        self._shown.append(({_key(number)}, message))
        self.story.add(message)

    def turn(
        self,
        number: Any,
        key: str,
        message: Message,
        *,
        model: str | None,
        timestamp: str | None,
        fidelity: Fidelity | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """An answer of the model, named `key`, of which this is the first event."""
        self._answers[key] = (numbers := {_key(number)}, message)
        self._shown.append((numbers, message))
        self.story.add_turn(key, [message], model=model, timestamp=timestamp, fidelity=fidelity, notes=notes)

    def alias(self, number: Any, key: str) -> None:
        """Another event of the answer `key`."""
        self._answers[key][0].add(_key(number))

    def extend(self, number: Any, key: str, calls: list[dict[str, Any]]) -> None:
        """Another event of the answer `key`, with more of its calls.

        Results may stand between them in the log; the answer is one all the same.
        """
        self.alias(number, key)
        if calls:
            self._answers[key][1].setdefault("tool_calls", []).extend(calls)

    def numbers(self) -> Iterator[Any]:
        """The events that are shown."""
        for numbers, _ in self._shown:
            yield from numbers

    def condense(self, events: Iterable[Any], summary: str | None, offset: int | None) -> None:
        """Takes events out, and puts the summary of them where `offset` says (0 is the first message).

        A result goes with its call, and a call with its results: neither is shown alone.
        """
        if not self.story.may_repeat():
            return
        forgotten = {_key(number) for number in events}
        remaining = [(numbers, message) for numbers, message in self._shown if not numbers & forgotten]
        if len(remaining) == len(self._shown) and summary is None:
            return
        before = {message.get("tool_call_id") for _, message in self._shown}
        answered = {message["tool_call_id"] for _, message in remaining if message["role"] == "tool"}
        asked = {
            call["id"]
            for _, message in remaining
            for call in message.get("tool_calls") or ()
            if call["id"] in answered or call["id"] not in before
        }
        shown = [
            (numbers, message)
            for numbers, message in remaining
            if (message.get("tool_call_id") is None or message["tool_call_id"] in asked)
            and all(call["id"] in asked for call in message.get("tool_calls") or ())
        ]
        if summary is not None:
            at = len(shown) if offset is None else max(0, offset - 1 if self.story.trace.shape.system else offset)
            shown.insert(at, (set(), {"role": "user", "content": summary}))
        same = 0
        while same < min(len(shown), len(self._shown)) and shown[same][1] is self._shown[same][1]:
            same += 1
        self.story.count_repeated(len(shown) - same)
        self.story.continue_from(self._node(same))
        self._shown = shown
        for _, message in shown[same:]:
            self.story.add(message)

    def _node(self, count: int) -> int:
        """The node of the message that is `count` from the beginning of what is shown."""
        nodes = self.story.trace.nodes
        path: list[int] = []
        at = self.story.tip
        while at >= 0:
            path.append(at)
            at = nodes[at].parent
        path.reverse()
        return path[count - 1] if count else -1


def _key(number: Any) -> Any:
    return number if isinstance(number, str | int) else repr(number)
