"""The scripted policies by name."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError, TaskError
from understudy.model.scripted.changes import Change, read_changes, wrong_changes
from understudy.model.scripted.oracle import Action, ChatTurn, Policy, next_action

_ANCHOR_CHARACTERS = 24


class ScriptedTask(Struct, frozen=True):
    """The fields of a task record that a policy needs."""

    instance_id: str
    instruction: str
    gold_patch: str
    workdir: str = "/workspace"


class TaskIndex:
    """Finds tasks by their instruction. Raises TaskError when two tasks have the same one and different
    patches.
    """

    def __init__(self, tasks: Iterable[ScriptedTask]) -> None:
        texts: dict[str, ScriptedTask] = {}
        for task in tasks:
            first = texts.setdefault(task.instruction.strip(), task)
            if first.gold_patch != task.gold_patch:
                raise TaskError(
                    f"tasks {first.instance_id} and {task.instance_id} have the same instruction, but "
                    f"scripted policies identify tasks by it; give each task its own instruction"
                )
        texts.pop("", None)
        # For speed, an instruction is found by one short piece: its beginning, middle or end, whichever the fewest
        # instructions share. Beginnings alone would not do, since an author's instructions often begin alike.
        anchor_counts: Counter[str] = Counter(anchor for text in texts for anchor in set(_anchors(text)))
        self._by_anchor: defaultdict[str, list[tuple[str, ScriptedTask]]] = defaultdict(list)
        for text, task in texts.items():
            self._by_anchor[min(_anchors(text), key=lambda anchor: anchor_counts[anchor])].append((text, task))
        self._lengths = sorted({len(anchor) for anchor in self._by_anchor})
        self.find = lru_cache(maxsize=256)(self._find)

    def _find(self, text: str) -> ScriptedTask | None:
        """Return the task whose instruction occurs in the text; the one with the longest instruction if there are
        several.
        """
        candidates = {
            stretch
            for length in self._lengths
            for stretch in {text[start : start + length] for start in range(len(text) - length + 1)}
            if stretch in self._by_anchor
        }
        matches = [
            (instruction, task)
            for anchor in candidates
            for instruction, task in self._by_anchor[anchor]
            if instruction in text
        ]
        return max(matches, key=lambda match: len(match[0]))[1] if matches else None


def _anchors(text: str) -> tuple[str, ...]:
    middle = max(0, (len(text) - _ANCHOR_CHARACTERS) // 2)
    return (text[:_ANCHOR_CHARACTERS], text[middle : middle + _ANCHOR_CHARACTERS], text[-_ANCHOR_CHARACTERS:])


def read_tasks(path: Path) -> TaskIndex:
    """Return the tasks of a JSONL file of task records. Raises TaskError, naming file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TaskError(
            f"cannot read the task file {path}: {error.strerror}; give a readable JSONL file of tasks"
        ) from error
    tasks: list[ScriptedTask] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tasks.append(msgspec.json.decode(line, type=ScriptedTask))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TaskError(
                f"{path}, line {number}: invalid task record: {error}; expected a JSON object with instance_id, "
                "instruction and gold_patch: correct this line"
            ) from None
    return TaskIndex(tasks)


_Number = TypeVar("_Number", int, float)

_NO_TOOLS = Action("Working on the task")
_NO_TASK = Action("I have no task for this request: none of the instructions I was given occurs in it.")


class PatchPolicy:
    """Solves the task of a conversation, with changes made from its gold patch."""

    def __init__(
        self,
        name: str,
        tasks: TaskIndex,
        changes: Callable[[ChatTurn, ScriptedTask], Sequence[Change]],
        *,
        terse: bool = False,
    ) -> None:
        self.name = name
        self._terse = terse
        self._tasks = tasks
        self._changes = changes

    def act(self, request: ChatTurn) -> Action:
        """Return the next action for the latest task that a user message gives."""
        if not request.tools:
            return _NO_TOOLS
        for index in range(len(request.messages) - 1, -1, -1):
            message = request.messages[index]
            if message.role == "user" and (task := self._tasks.find(message.text)):
                changes = self._changes(request, task)
                return next_action(request, index, changes, task.workdir, terse=self._terse)
        return _NO_TASK


class IdlePolicy:
    """Responds with text and changes nothing."""

    name = "idle"

    def act(self, request: ChatTurn) -> Action:
        """Return the same text for every request."""
        return Action("I looked at this and leave everything as it is.") if request.tools else _NO_TOOLS


def _gold_changes(task: ScriptedTask) -> list[Change]:
    return read_changes(task.gold_patch)


def _wrong_changes(task: ScriptedTask) -> list[Change]:
    return wrong_changes(read_changes(task.gold_patch))


def _flaky(tasks: TaskIndex, arguments: Mapping[str, str]) -> Policy:
    probability = _number(arguments, "p", 0.5)
    if not 0 <= probability <= 1:
        raise ConfigError(
            f"policy flaky: p is {probability}, expected a probability; give a number from 0 to 1, such as p=0.5"
        )
    seed = _number(arguments, "seed", 0)

    def changes(turn: ChatTurn, task: ScriptedTask) -> Sequence[Change]:
        # A hash instead of a random generator, because the choice must be the same for all requests of a
        # conversation.
        digest = hashlib.sha256(f"{seed}\0{turn.seed}\0{task.instruction}".encode()).digest()
        return _gold_changes(task) if int.from_bytes(digest[:8]) < probability * 2**64 else _wrong_changes(task)

    return PatchPolicy("flaky", tasks, changes)


POLICIES: dict[str, Callable[[TaskIndex, Mapping[str, str]], Policy]] = {
    "flaky": _flaky,
    "idle": lambda tasks, arguments: IdlePolicy(),
    "oracle": lambda tasks, arguments: PatchPolicy("oracle", tasks, lambda _, task: _gold_changes(task)),
    "terse": lambda tasks, arguments: PatchPolicy("terse", tasks, lambda _, task: _gold_changes(task), terse=True),
    "wrong": lambda tasks, arguments: PatchPolicy("wrong", tasks, lambda _, task: _wrong_changes(task)),
}
_ARGUMENTS: dict[str, tuple[str, ...]] = {"flaky": ("p", "seed")}
"""The arguments that a policy takes."""


def make_policy(name: str, tasks: TaskIndex, arguments: Mapping[str, str]) -> Policy:
    """Return the policy called `name`. Raises ConfigError for an unknown name or an invalid argument."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; give one of {', '.join(sorted(POLICIES))}")
    expected = _ARGUMENTS.get(name, ())
    for key in arguments:
        if key not in expected:
            if not expected:
                raise ConfigError(f"policy {name}: it takes no arguments, got {key!r}; leave the argument out")
            raise ConfigError(f"policy {name}: unknown argument {key!r}; give one of {', '.join(expected)}")
    return POLICIES[name](tasks, arguments)


def _number(arguments: Mapping[str, str], key: str, default: _Number) -> _Number:
    try:
        return type(default)(arguments.get(key, default))
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "number"
        raise ConfigError(
            f"policy flaky: {key} is {arguments[key][:80]!r}, expected a {kind}; give one, such as {key}={default}"
        ) from None
