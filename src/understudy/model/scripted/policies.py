"""The scripted policies by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from understudy.errors import ConfigError
from understudy.model.scripted.action import Action, ChatTurn, Policy
from understudy.model.scripted.changes import Change, read_changes, spoil
from understudy.model.scripted.oracle import next_action
from understudy.model.scripted.task_index import ScriptedTask, TaskIndex

_Number = TypeVar("_Number", int, float)

_NO_TOOLS = Action("Working on the task")
_UNKNOWN = Action("I have no task for this request: none of the instructions I was given occurs in it.")


class PatchPolicy:
    """Works on the task that a conversation is about, with changes made from its gold patch."""

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
        """The next action on the latest task that a user message gives."""
        if not request.tools:
            return _NO_TOOLS
        for index in range(len(request.messages) - 1, -1, -1):
            message = request.messages[index]
            if message.role == "user" and (task := self._tasks.find(message.text)):
                changes = self._changes(request, task)
                return next_action(request, index, changes, task.workdir, terse=self._terse)
        return _UNKNOWN


class IdlePolicy:
    """Answers with text and changes nothing."""

    name = "idle"

    def act(self, request: ChatTurn) -> Action:
        """The same text for every request."""
        return Action("I looked at this and leave everything as it is.") if request.tools else _NO_TOOLS


def _gold_changes(task: ScriptedTask) -> list[Change]:
    return read_changes(task.gold_patch)


def _wrong_changes(task: ScriptedTask) -> list[Change]:
    return spoil(read_changes(task.gold_patch))


def _oracle(tasks: TaskIndex, arguments: Mapping[str, str]) -> Policy:
    _check_arguments(arguments, "oracle")
    return PatchPolicy("oracle", tasks, lambda _, task: _gold_changes(task))


def _terse(tasks: TaskIndex, arguments: Mapping[str, str]) -> Policy:
    _check_arguments(arguments, "terse")
    return PatchPolicy("terse", tasks, lambda _, task: _gold_changes(task), terse=True)


def _wrong_policy(tasks: TaskIndex, arguments: Mapping[str, str]) -> Policy:
    _check_arguments(arguments, "wrong")
    return PatchPolicy("wrong", tasks, lambda _, task: _wrong_changes(task))


def _idle(tasks: TaskIndex, arguments: Mapping[str, str]) -> Policy:
    _check_arguments(arguments, "idle")
    return IdlePolicy()


def _flaky(tasks: TaskIndex, arguments: Mapping[str, str]) -> Policy:
    _check_arguments(arguments, "flaky", "p", "seed")
    probability = _number(arguments, "p", 0.5)
    if not 0 <= probability <= 1:
        raise ConfigError(f"policy flaky: p is {probability}; expected a number from 0 to 1")
    seed = _number(arguments, "seed", 0)

    def changes(turn: ChatTurn, task: ScriptedTask) -> Sequence[Change]:
        # A hash and not a generator: the choice must be the same for every request of one conversation.
        digest = hashlib.sha256(f"{seed}\0{turn.seed}\0{task.instruction}".encode()).digest()
        return _gold_changes(task) if int.from_bytes(digest[:8]) < probability * 2**64 else _wrong_changes(task)

    return PatchPolicy("flaky", tasks, changes)


POLICIES: dict[str, Callable[[TaskIndex, Mapping[str, str]], Policy]] = {
    "flaky": _flaky,
    "idle": _idle,
    "oracle": _oracle,
    "terse": _terse,
    "wrong": _wrong_policy,
}


def make_policy(name: str, tasks: TaskIndex, arguments: Mapping[str, str]) -> Policy:
    """The policy called `name`. Raises ConfigError for an unknown name or a bad argument."""
    if name not in POLICIES:
        raise ConfigError(f"no policy is called {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name](tasks, arguments)


def _check_arguments(arguments: Mapping[str, str], policy: str, *expected: str) -> None:
    for key in arguments:
        if key not in expected:
            raise ConfigError(
                f"policy {policy}: unknown argument {key!r}; expected {' or '.join(expected) or 'none'}"
            )


def _number(arguments: Mapping[str, str], key: str, default: _Number) -> _Number:
    try:
        return type(default)(arguments.get(key, default))
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "number"
        raise ConfigError(f"policy flaky: {key} is {arguments[key]!r}; expected a {kind}") from None
