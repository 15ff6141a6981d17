"""What the readers of log formats share: their interface, the trace builder, and the reading of outcomes."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from understudy.ingest.chat import chat
from understudy.ingest.json_values import mapping, string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.trace import (
    Fidelity,
    Message,
    PlainRenderer,
    RequestShape,
    Trace,
    TraceNode,
    TraceOutcome,
    TraceTurn,
)


class LogFormat(ABC):
    """The reader of one log format.

    Logs are hostile input: whatever they contain, a reader must not raise, and counts each loss in the trace. A
    format implements `read`, or `read_file` if each file is read by itself, or `read_trace` if each file holds one
    trace.
    """

    name: str

    @abstractmethod
    def detect(self, path: str, head: bytes) -> bool:
        """Return whether a file has this format, judged by its name and its first 64 KB. Must be cheap."""

    def group(self, path: str) -> str:
        """Return a key; files with the same key are given to `read` together.

        By default, every file is read by itself.
        """
        return path

    def links(self, path: str, head: bytes) -> Iterable[str]:
        """Return further keys from a file's first 64 KB. Groups that share one of these keys are read together."""
        return ()

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """Yield the traces in a group of files. Raises OSError when a file cannot be read."""
        for file in files:
            yield from self.read_file(file)

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """Yield the traces of one file. Raises OSError when it cannot be read."""
        yield self.read_trace(file, Counter())

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the only trace of a file, with `losses` as its counter.

        Raises OSError when the file cannot be read.
        """
        raise NotImplementedError


_INSTANCE = re.compile(r"([\w.-]+?)__([\w.-]+?)(?:-\d+|\.[0-9a-f]{6,}(?:[._].*)?)")

_MAX_INSTANCE_CHARS = 200
MAX_CALLS = 1_000
"""How far back results of one response's calls are looked for; a log in which they are farther is hostile."""
_MAX_REPEATED = 10  # limit on the messages that compactions repeat, per message of the log


class TraceBuilder:
    """Builds a trace. New nodes follow `tip`; setting `tip` back begins a branch.

    After a compaction, `continue_from` begins a new path; the turns before it still count as active.
    """

    def __init__(
        self,
        format: str,
        source: str,
        session_id: str,
        *,
        losses: Counter[str],
        trace_id: str | None = None,
        fidelity: Fidelity = "exact",
        notes: tuple[str, ...] = (),
    ) -> None:
        """`fidelity` and `notes` are the defaults for turns that are added without their own."""
        self.trace = Trace(
            trace_id=f"{format}:{trace_id or session_id}",
            session_id=session_id,
            format=format,
            source=source,
            renderer=PlainRenderer(),
            losses=losses,
        )
        self.tip = -1
        self.losses = losses
        self.fidelity: Fidelity = fidelity
        self.notes = notes
        self._continued_tip: dict[int, int] = {}
        self._tip_to_continue: int | None = None
        self._ids: set[str] = set()
        self._repeats: Counter[str] = Counter()
        self._repeated = 0
        self._shared: dict[tuple[int, bytes], int] = {}

    def add(self, body: Any) -> int:
        """Add a node after the tip.

        `body` is a message, or whatever the trace's renderer accepts. Returns the new tip.
        """
        nodes = self.trace.nodes
        nodes.append(TraceNode(self.tip, body))
        self.tip = len(nodes) - 1
        if self._tip_to_continue is not None:
            self._continued_tip[self.tip] = self._tip_to_continue
            self._tip_to_continue = None
        return self.tip

    def continue_from(self, tip: int = -1) -> None:
        """Let new nodes follow `tip`.

        They count as a continuation of the conversation that ends at the current tip.
        """
        self._tip_to_continue = self.tip if self._tip_to_continue is None else self._tip_to_continue
        self.tip = tip

    def may_repeat(self) -> bool:
        """Return whether a compaction that repeats messages may be applied.

        If not, it is counted and later turns are lossy.

        A log with far more repetitions than any real conversation is hostile: the trace would grow without bound.
        """
        if self._repeated <= _MAX_REPEATED * (len(self.trace.nodes) - self._repeated + 1_000):
            return True
        self.losses["compaction_left_out"] += 1
        self.fidelity, self.notes = "lossy", ("compaction_left_out",)
        return False

    def count_repeated(self, count: int) -> None:
        """Record that a compaction repeats `count` messages."""
        self._repeated += count

    def shared_path(self, messages: Iterable[Message]) -> int:
        """Return the last node of a path of these messages from the root.

        Paths with equal beginnings share nodes.
        """
        tip = -1
        for message in messages:
            key = (tip, hashlib.blake2b(msgspec.json.encode(message), digest_size=16).digest())
            index = self._shared.get(key)
            if index is None:
                self.trace.nodes.append(TraceNode(tip, message))
                index = self._shared[key] = len(self.trace.nodes) - 1
            tip = index
        return tip

    def add_turn(
        self,
        message_id: str,
        bodies: Sequence[Any],
        *,
        model: str | None = None,
        timestamp: str | None = None,
        context: int | None = None,
        fidelity: Fidelity | None = None,
        notes: tuple[str, ...] = (),
        shape: RequestShape | None = None,
    ) -> TraceTurn:
        """Add a turn at the tip, with these bodies as the model's action. `context` defaults to the tip.

        An id that occurs again is made unique, and counted as `repeated_id`.
        """
        logged_id = message_id
        while message_id in self._ids:
            self._repeats[logged_id] += 1
            message_id = f"{logged_id}~{self._repeats[logged_id] + 1}"
        self.losses["repeated_id"] += message_id != logged_id
        self._ids.add(message_id)
        tip = self.tip
        turn = TraceTurn(
            message_id=message_id,
            context=tip if context is None else context,
            action=tuple([self.add(body) for body in bodies]),
            model=model,
            timestamp=timestamp,
            fidelity=fidelity or self.fidelity,
            notes=self.notes + notes,
            shape=shape,
        )
        self.trace.turns.append(turn)
        return turn

    def add_system(self, prompt: str | None) -> None:
        """Append a text to the system prompt."""
        if prompt:
            shape = self.trace.shape
            self.trace.shape = RequestShape(f"{shape.system}\n\n{prompt}" if shape.system else prompt, shape.tools)

    def take_system(self, message: Message) -> bool:
        """Append a system message to the system prompt if no other message came before.

        Returns whether it was appended.
        """
        leading = message["role"] == "system" and not self.trace.nodes and isinstance(message["content"], str)
        if leading:
            self.add_system(message["content"])
        return leading

    def set_tools(self, tools: Sequence[Any]) -> None:
        """Set the tools. Those that are not in OpenAI's form are counted and left out."""
        valid = [tool for raw in tools if mapping((tool := mapping(raw)).get("function"))]
        self.losses["unknown_tool"] += len(tools) - len(valid)
        self.trace.shape = RequestShape(self.trace.shape.system, valid or None)

    def finish(self) -> Trace:
        """Return the trace, with each turn marked as "active" (on the path to the last turn) or "branch"."""
        trace = self.trace
        active: set[int] = set()
        node = trace.turns[-1].action[-1] if trace.turns and trace.turns[-1].action else -1
        while node >= 0 and node not in active:
            active.add(node)
            node = self._continued_tip.get(node, trace.nodes[node].parent)
        for turn in trace.turns:
            turn.branch = "active" if active.intersection(turn.action) else "branch"
        trace.losses += Counter()
        return trace


def add_messages(
    builder: TraceBuilder,
    messages: Iterable[dict[str, Any]],
    model: str | None,
    models: Callable[[dict[str, Any]], Any] = lambda _: None,
    times: Callable[[dict[str, Any]], str | None] = lambda _: None,
) -> None:
    """Add a list of chat messages. Assistant messages become turns, with their index in the list as id.

    `models` and `times` return the model and the ISO time that a raw message states, or None; `model` is the
    default.
    """
    for index, raw in enumerate(messages):
        message = chat(raw, builder.losses)
        if message is None or builder.take_system(message):
            continue
        if message["role"] == "assistant" and not raw.get("is_demo"):
            builder.add_turn(f"m{index}", [message], model=string(models(raw)) or model, timestamp=times(raw))
        else:
            builder.add(message)


def repository(instance: str | None) -> str | None:
    """Return the repository in an instance id like SWE-bench's ("django__django-1" → "django/django"), or None."""
    match = _INSTANCE.fullmatch(instance[:_MAX_INSTANCE_CHARS]) if instance else None
    return f"{match.group(1)}/{match.group(2)}" if match else None


def timestamp_seconds(text: str | None) -> float | None:
    """Convert an ISO date or time to Unix seconds, in local time if it has no time zone; None if it is neither."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError, OSError):
        return None


def iso_time(moment: Any, unit: int = 1) -> str | None:
    """Convert a Unix time in units of 1/`unit` seconds to an ISO time in UTC; None if it is not a plausible
    time.
    """
    if not isinstance(moment, int | float) or not 0 < moment < 1e11 * unit:
        return None
    return datetime.fromtimestamp(moment / unit, UTC).isoformat()


def fingerprint(path: str, beginning: Any) -> str:
    """Return an id for a log that has none: a hash of its file name, its directory's name and its beginning."""
    name = "/".join(path.replace("\\", "/").split("/")[-2:])
    data = name.encode(errors="replace") + b"\0" + msgspec.json.encode(beginning)
    return hashlib.blake2b(data, digest_size=12).hexdigest()


_RESOLVED = {"true": True, "resolved": True, "false": False, "unresolved": False}
_MAX_STATUS_CHARS = 200
_SCORES = ("reward", "score")


def outcome_from(
    *, resolved: Any = None, reward: Any = None, task: Any = None, exit_status: Any = None
) -> TraceOutcome | None:
    """Return the outcome that these values describe, or None if none of them is valid."""
    outcome = TraceOutcome(
        resolved=_truth(resolved),
        reward=_number(reward),
        task=string(task),
        exit_status=status[:_MAX_STATUS_CHARS] if (status := string(exit_status)) else None,
    )
    return None if outcome == TraceOutcome() else outcome


def instance_id(name: str) -> str | None:
    """Return the name if it is an instance id like SWE-bench's, else None."""
    return name if repository(name) else None


def outcome_from_extra(*sources: Any) -> TraceOutcome | None:
    """Return the outcome in the free fields of an ATIF document.

    If several sources have a value, the first counts.
    """
    values: dict[str, Any] = {}
    for source in sources:
        fields = mapping(source)
        scores = mapping(fields.get("rewards")) or mapping(value_at(fields, "verifier_result", "rewards"))
        rewards = [
            reward for table in (fields, scores) for key in _SCORES if (reward := table.get(key)) is not None
        ]
        outcome = {
            "resolved": fields.get("resolved"),
            "reward": rewards[0] if rewards else None,
            "task": string(fields.get("task")) or fields.get("task_id") or fields.get("instance_id"),
            "exit_status": fields.get("exit_status"),
        }
        values = {key: value for key, value in outcome.items() if value is not None} | values
    return outcome_from(**values)


def _truth(value: Any) -> bool | None:
    if isinstance(value, str):
        return _RESOLVED.get(value.lower())
    return bool(value) if isinstance(value, bool) or value in (0, 1) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
