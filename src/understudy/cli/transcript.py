"""A rollout as text for a terminal. Everything in it was written by a model or a program it ran: nothing of
that may reach the terminal as a control sequence, nor rich as markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from understudy.trajectory.messages import Block
from understudy.trajectory.tree import Node, Trajectory
from understudy.types import Attempt, Call, ErrorInfo, Rollout, Task, Verdict

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_LINES, _CHARACTERS = 12, 2000
_UNWRAPPED = 1 << 16
_PASSING = ("passed", "xfailed", "skipped")
_PATCH_STYLES = (
    ("+++", "bold"),
    ("---", "bold"),
    ("diff ", "bold"),
    ("@@", "cyan"),
    ("+", "green"),
    ("-", "red"),
)
_STATUS_STYLES = {"succeeded": "green", "failed": "red", "timeout": "yellow", "unresponsive": "yellow"}


class Record(Struct, frozen=True, kw_only=True):
    """All that is shown of one rollout. `attempt` is the one shown, `patch` and `verdict` are its own."""

    rollout: Rollout
    attempts: list[Attempt]
    task: Task
    attempt: Attempt | None
    calls: list[Call]
    patch: bytes | None
    verdict: Verdict | None


def visible(text: str) -> str:
    """`text` with every character that steers a terminal, or hides, replaced by one that shows it.

    Line ends and tabs stay. CRLF becomes a plain line end.
    """
    return _UNSAFE.sub(lambda found: _picture(ord(found[0])), text.replace("\r\n", "\n"))


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return f"\\u{code:04x}"


def console() -> Console:
    """A console on stdout that interprets nothing in what it prints, and wraps lines on a terminal only."""
    made = Console(markup=False, highlight=False, emoji=False)
    if not made.is_terminal:
        made.width = _UNWRAPPED
    return made


class Printer:
    """Prints records to a console; `full` shortens nothing."""

    def __init__(self, console: Console, *, full: bool) -> None:
        self._console = console
        self._full = full

    def show(self, record: Record, trajectory: Trajectory) -> None:
        """Print the head, the instruction, every branch, the patch, the tests and the errors."""
        self._head(record, trajectory)
        self._section("instruction")
        self._text(record.task.instruction)
        for name, nodes in trajectory.branches.items():
            self._branch(name, nodes)
        if record.patch is not None:
            self._section("patch")
            self._patch(record.patch)
        if record.verdict is not None:
            self._tests(record.verdict)
        self._errors(record)

    # --- parts -----------------------------------------------------------------------------------------

    def _head(self, record: Record, trajectory: Trajectory) -> None:
        rollout, verdict = record.rollout, record.verdict
        calls = [node.call for node in trajectory.nodes]
        prompt = sum(call.usage.prompt_tokens for call in calls)
        completion = sum(call.usage.completion_tokens for call in calls)
        status = Text(rollout.status, style=_STATUS_STYLES.get(rollout.status, ""))
        self._fact("rollout", f"{rollout.id}   run {rollout.run_id}   sample {rollout.sample_index}")
        self._fact("task", f"{record.task.instance_id}   {record.task.repo}")
        self._fact("status", status)
        self._fact("reward", "none" if verdict is None else f"{verdict.reward:g}   {verdict.reason}")
        for attempt in record.attempts:
            ended = "" if attempt.ended_at is None else f"   {attempt.ended_at - attempt.started_at:.1f} s"
            mark = "   (shown)" if attempt is record.attempt and len(record.attempts) > 1 else ""
            self._fact("attempt", f"{attempt.number}   {attempt.status}{ended}{mark}")
        self._fact("calls", f"{len(calls)}   {prompt:,} prompt tokens, {completion:,} completion tokens")

    def _branch(self, name: str, nodes: Sequence[Node]) -> None:
        first = nodes[0]
        depth = _depth(first)
        title = f"branch {name}"
        if first.spawned_by is not None:
            title += f", started by call {first.spawned_by.call.sequence}"
        elif first.parent is not None:
            title += f", from call {first.parent.call.sequence}"
        elif first.origin not in (None, "first call"):
            title += f", {first.origin}"
        self._section(title, depth)
        for node in nodes:
            self._turn(node, depth)

    def _turn(self, node: Node, depth: int) -> None:
        """What is new in the request, then the answer; a superseded call's request is shown with its retry."""
        for block in node.conversation.blocks[node.fresh :]:
            if block.role != "assistant" and not node.superseded:
                self._block(block, depth)
        call = node.call
        note = f"call {call.sequence}   {call.backend_model}   {call.ended_at - call.started_at:.2f} s"
        note += f"   {call.usage.prompt_tokens:,} + {call.usage.completion_tokens:,} tokens"
        if call.status != "ok":
            note += f"   {call.status}"
        if node.superseded:
            note += "   superseded by a retry"
        self._line(note, "bold blue" if call.status == "ok" else "bold red", depth)
        if call.error is not None:
            self._line(_error(call.error), "red", depth + 1)
        for block in node.answer or ():
            self._block(block, depth)

    def _block(self, block: Block, depth: int) -> None:
        if block.kind == "tool_use":
            self._line(f"\u2192 {block.name}", "bold magenta", depth + 1)
            for key, value in _arguments(block):
                self._text(f"{key}: {value}", depth + 2)
        elif block.kind == "tool_result":
            self._line(
                "\u2190 error" if block.is_error else "\u2190 result",
                "red" if block.is_error else "green",
                depth + 1,
            )
            self._text(block.text, depth + 2, style="dim")
        elif block.kind == "thinking":
            self._text(block.text, depth + 1, style="italic dim")
        elif block.kind == "text":
            self._text(block.text, depth + 1, style="" if block.role == "assistant" else "yellow")
        else:
            self._line(f"[{block.name}]", "dim", depth + 1)

    def _patch(self, patch: bytes) -> None:
        if not patch:
            self._line("(empty)", "dim")
            return
        text = visible(patch.decode("utf-8", "replace"))
        for line in text.splitlines():
            style = next((style for start, style in _PATCH_STYLES if line.startswith(start)), "")
            self._console.print(Text(line, style=style), soft_wrap=True)

    def _tests(self, verdict: Verdict) -> None:
        if verdict.tests:
            self._section("tests")
        for name, outcome in sorted(verdict.tests.items(), key=lambda item: (item[1] in _PASSING, item[0])):
            self._line(f"{outcome:8} {name}", "green" if outcome in _PASSING else "red")
        if verdict.log and self._full:
            self._section("test log")
            self._text(verdict.log)

    def _errors(self, record: Record) -> None:
        found = [("rollout", record.rollout.error)]
        found += [(f"attempt {attempt.number}", attempt.error) for attempt in record.attempts]
        errors = [(where, error) for where, error in found if error is not None]
        if errors:
            self._section("errors")
        for where, error in errors:
            self._line(f"{where}: {_error(error)}", "red")

    # --- lines -----------------------------------------------------------------------------------------

    def _fact(self, name: str, value: str | Text) -> None:
        line = Text(f"{name:9}", style="bold")
        line.append_text(value if isinstance(value, Text) else Text(visible(value)))
        self._console.print(line, soft_wrap=True)

    def _section(self, title: str, depth: int = 0) -> None:
        self._console.print()
        self._line(f"\u2014\u2014 {title} \u2014\u2014", "bold", depth)

    def _line(self, text: str, style: str = "", depth: int = 0) -> None:
        self._console.print(Padding(Text(visible(text), style=style), (0, 0, 0, 2 * depth), expand=False))

    def _text(self, text: str, depth: int = 0, style: str = "") -> None:
        for line in self._shortened(visible(text)).split("\n"):
            # A tab has no width to measure, and an empty text no line.
            shown = Text(line.expandtabs() or " ", style=style)
            self._console.print(Padding(shown, (0, 0, 0, 2 * depth), expand=False))

    def _shortened(self, text: str) -> str:
        if self._full:
            return text
        lines = text.strip("\n").split("\n")
        cut = "\n".join(lines[:_LINES])[:_CHARACTERS]
        left = len(text.strip("\n")) - len(cut)
        return cut if left <= 0 else f"{cut}\n\u2026 {left:,} more characters (--full shows them)"


def summary(record: Record, trajectory: Trajectory) -> dict[str, Any]:
    """The record as JSON types: the rollout, its attempts, its branches with their turns, patch and verdict."""
    branches = {
        name: [
            {
                "call_id": node.call.id,
                "sequence": node.call.sequence,
                "status": node.call.status,
                "superseded": node.superseded,
                "prompt_tokens": node.call.usage.prompt_tokens,
                "completion_tokens": node.call.usage.completion_tokens,
                "new": _plain(node.conversation.blocks[node.fresh :]),
                "answer": _plain(node.answer or ()),
                "error": msgspec.to_builtins(node.call.error),
            }
            for node in nodes
        ]
        for name, nodes in trajectory.branches.items()
    }
    return {
        "rollout": msgspec.to_builtins(record.rollout),
        "attempts": msgspec.to_builtins(record.attempts),
        "instruction": record.task.instruction,
        "branches": branches,
        "patch": None if record.patch is None else record.patch.decode("utf-8", "replace"),
        "verdict": msgspec.to_builtins(record.verdict),
    }


def _plain(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(block) for block in blocks]


def _depth(first: Node) -> int:
    """How far in a branch stands: below the call that started it, or that it parted from."""
    depth, node = 0, first
    origin = first.spawned_by or first.parent
    while origin is not None and depth < 8:
        depth += 1
        node = origin
        while node.parent is not None and node.parent.branch == node.branch:
            node = node.parent
        origin = node.spawned_by or node.parent
    return depth


def _arguments(block: Block) -> Iterator[tuple[str, str]]:
    for key, value in block.inputs().items() or [("input", block.arguments)]:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield key, f"\n{text}" if "\n" in text else text


def _error(error: ErrorInfo) -> str:
    return f"{error.boundary} error, {error.type}: {error.message}"
