"""What the readers of log formats have in common: their interface, the trace builder, and reading outcomes."""

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
    """A kind of log. Logs are hostile input: nothing in them may raise, and each loss is counted in a trace.

    A format implements `read`, or where its files are read one by one `read_file`, or for one trace in each file
    `read_trace`.
    """

    name: str

    @abstractmethod
    def detect(self, path: str, head: bytes) -> bool:
        """Whether a file is of this format, by its name and its first 64 KB; cheap."""

    def group(self, path: str) -> str:
        """A key: files with the same one must be given to `read` together. By default each file has its own."""
        return path

    def links(self, path: str, head: bytes) -> Iterable[str]:
        """Further keys, from a file's first 64 KB: groups of which files have one in common are read together."""
        return ()

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """The traces in the files of a group. Raises OSError when a file cannot be read."""
        for file in files:
            yield from self.read_file(file)

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """The traces of one file. Raises OSError when it cannot be read."""
        yield self.read_trace(file, Counter())

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """The only trace of a file; `losses` becomes the trace's own. Raises OSError when it cannot be read."""
        raise NotImplementedError


_INSTANCE = re.compile(r"([\w.-]+?)__([\w.-]+?)(?:-\d+|\.[0-9a-f]{6,}(?:[._].*)?)")

_LONGEST_INSTANCE = 200
_MOST_REPEATED = 10  # messages that compactions add again, for each message of the log


class TraceBuilder:
    """A trace under construction. New nodes follow `tip`, which may be set back to begin a branch.

    A compaction begins a new path with `continue_from`; the turns before it still belong to the active branch.
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
        """`fidelity` and `notes` are for turns that are added without their own."""
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
        self._before: dict[int, int] = {}
        self._fresh: int | None = None
        self._ids: set[str] = set()
        self._repeats: Counter[str] = Counter()
        self._repeated = 0
        self._shared: dict[tuple[int, bytes], int] = {}

    def add(self, body: Any) -> int:
        """Add a node at the tip with a message, or what the trace's renderer takes. Returns the new tip."""
        nodes = self.trace.nodes
        nodes.append(TraceNode(self.tip, body))
        self.tip = len(nodes) - 1
        if self._fresh is not None:
            self._before[self.tip] = self._fresh
            self._fresh = None
        return self.tip

    def continue_from(self, tip: int = -1) -> None:
        """Let new nodes follow `tip`, as a continuation of the conversation that ends at the tip now."""
        self._fresh = self.tip if self._fresh is None else self._fresh
        self.tip = tip

    def may_repeat(self) -> bool:
        """Whether a compaction that adds messages again may be applied; a refused one is counted.

        A log with far more of them than real conversations have is hostile: it would grow without bound. The turns
        after a refused compaction are lossy.
        """
        if self._repeated <= _MOST_REPEATED * (len(self.trace.nodes) - self._repeated + 1_000):
            return True
        self.losses["compaction_left_out"] += 1
        self.fidelity, self.notes = "lossy", ("compaction_left_out",)
        return False

    def count_repeated(self, count: int) -> None:
        """Note that a compaction adds `count` messages again."""
        self._repeated += count

    def shared_path(self, messages: Iterable[Message]) -> int:
        """The last node of a path from the beginning with these messages; such paths share equal beginnings."""
        at = -1
        for message in messages:
            key = (at, hashlib.blake2b(msgspec.json.encode(message), digest_size=16).digest())
            index = self._shared.get(key)
            if index is None:
                self.trace.nodes.append(TraceNode(at, message))
                index = self._shared[key] = len(self.trace.nodes) - 1
            at = index
        return at

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
        """Add a turn whose action are these bodies, at the tip. `context` is the tip unless it is passed.

        A repeated id is made unique and counted as `repeated_id`.
        """
        own = message_id
        while message_id in self._ids:
            self._repeats[own] += 1
            message_id = f"{own}~{self._repeats[own] + 1}"
        self.losses["repeated_id"] += message_id != own
        self._ids.add(message_id)
        before = self.tip
        turn = TraceTurn(
            message_id=message_id,
            context=before if context is None else context,
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
        """Append to the system prompt."""
        if prompt:
            shape = self.trace.shape
            self.trace.shape = RequestShape(f"{shape.system}\n\n{prompt}" if shape.system else prompt, shape.tools)

    def take_system(self, message: Message) -> bool:
        """Append a system message to the system prompt, if nothing but such messages came before it."""
        leading = message["role"] == "system" and not self.trace.nodes and isinstance(message["content"], str)
        if leading:
            self.add_system(message["content"])
        return leading

    def set_tools(self, tools: Sequence[Any]) -> None:
        """Set the tools; those that are not in OpenAI's form are counted and left out."""
        good = [tool for raw in tools if mapping((tool := mapping(raw)).get("function"))]
        self.losses["unknown_tool"] += len(tools) - len(good)
        self.trace.shape = RequestShape(self.trace.shape.system, good or None)

    def finish(self) -> Trace:
        """The trace, with each turn marked as on the active path or on a branch."""
        trace = self.trace
        active: set[int] = set()
        at = trace.turns[-1].action[-1] if trace.turns and trace.turns[-1].action else -1
        while at >= 0 and at not in active:
            active.add(at)
            at = self._before.get(at, trace.nodes[at].parent)
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
    """Add a list of chat messages; those of the assistant become turns, named by their index in the list.

    `models` and `times` return the model and the time that a raw message itself names, or None; `model` is that of
    the others.
    """
    for at, raw in enumerate(messages):
        message = chat(raw, builder.losses)
        if message is None or builder.take_system(message):
            continue
        if message["role"] == "assistant" and not raw.get("is_demo"):
            builder.add_turn(f"m{at}", [message], model=string(models(raw)) or model, timestamp=times(raw))
        else:
            builder.add(message)


def repository(instance: str | None) -> str | None:
    """The repository in the id of a SWE-bench-like instance ("django__django-1" → "django/django"), or None."""
    match = _INSTANCE.fullmatch(instance[:_LONGEST_INSTANCE]) if instance else None
    return f"{match.group(1)}/{match.group(2)}" if match else None


def timestamp_seconds(text: str | None) -> float | None:
    """A date or a time as seconds, in this machine's zone where it names none; None where it is neither."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError, OSError):
        return None


def iso_time(moment: Any, unit: int = 1) -> str | None:
    """A time that a log has in seconds since the epoch, or in parts of them (`unit` a second); else None."""
    if not isinstance(moment, int | float) or not 0 < moment < 1e11 * unit:
        return None
    return datetime.fromtimestamp(moment / unit, UTC).isoformat()


def fingerprint(path: str, beginning: Any) -> str:
    """An id for a log that has none: a hash of its name, its directory's name and its beginning."""
    last = "/".join(path.replace("\\", "/").split("/")[-2:])
    data = last.encode(errors="replace") + b"\0" + msgspec.json.encode(beginning)
    return hashlib.blake2b(data, digest_size=12).hexdigest()


_RESOLVED = {"true": True, "resolved": True, "false": False, "unresolved": False}
_LONGEST = 200
_SCORES = ("reward", "score")


def outcome_from(
    *, resolved: Any = None, reward: Any = None, task: Any = None, exit_status: Any = None
) -> TraceOutcome | None:
    """The outcome that these values describe, None where none of them is valid."""
    outcome = TraceOutcome(
        resolved=_truth(resolved),
        reward=_number(reward),
        task=string(task),
        exit_status=status[:_LONGEST] if (status := string(exit_status)) else None,
    )
    return None if outcome == TraceOutcome() else outcome


def instance_id(name: str) -> str | None:
    """The name where it is that of an instance of SWE-bench or its like, else None."""
    return name if repository(name) else None


def outcome_from_extra(*sources: Any) -> TraceOutcome | None:
    """The outcome in the free fields of an ATIF document; of several values the first one counts."""
    values: dict[str, Any] = {}
    for source in sources:
        fields = mapping(source)
        scores = mapping(fields.get("rewards")) or mapping(value_at(fields, "verifier_result", "rewards"))
        rewards = [reward for one in (fields, scores) for key in _SCORES if (reward := one.get(key)) is not None]
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
