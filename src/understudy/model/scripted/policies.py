"""The scripted policies by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from understudy.errors import ConfigError
from understudy.model.scripted.action import Action, ChatTurn, Policy
from understudy.model.scripted.changes import Change, read_changes, spoil
from understudy.model.scripted.oracle import next_action
from understudy.model.scripted.task_index import KnownTask, KnownTasks

_Number = TypeVar("_Number", int, float)

_NO_TOOLS = Action("Working on the task")
_UNKNOWN = Action("I have no task for this request: none of the instructions I was given occurs in it.")


class Scripted:
    """Works on the task that a conversation is about, with changes made from its gold patch."""

    def __init__(
        self,
        name: str,
        tasks: KnownTasks,
        changes: Callable[[ChatTurn, KnownTask], Sequence[Change]],
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


class Idle:
    """Answers with text and changes nothing."""

    name = "idle"

    def act(self, request: ChatTurn) -> Action:
        """The same text for every request."""
        return Action("I looked at this and leave everything as it is.") if request.tools else _NO_TOOLS


def _gold(task: KnownTask) -> list[Change]:
    return read_changes(task.gold_patch)


def _wrong(task: KnownTask) -> list[Change]:
    return spoil(read_changes(task.gold_patch))


def _oracle(tasks: KnownTasks, arguments: Mapping[str, str]) -> Policy:
    _only(arguments, "oracle")
    return Scripted("oracle", tasks, lambda _, task: _gold(task))


def _terse(tasks: KnownTasks, arguments: Mapping[str, str]) -> Policy:
    _only(arguments, "terse")
    return Scripted("terse", tasks, lambda _, task: _gold(task), terse=True)


def _wrong_policy(tasks: KnownTasks, arguments: Mapping[str, str]) -> Policy:
    _only(arguments, "wrong")
    return Scripted("wrong", tasks, lambda _, task: _wrong(task))


def _idle(tasks: KnownTasks, arguments: Mapping[str, str]) -> Policy:
    _only(arguments, "idle")
    return Idle()


def _flaky(tasks: KnownTasks, arguments: Mapping[str, str]) -> Policy:
    _only(arguments, "flaky", "p", "seed")
    probability = _number(arguments, "p", 0.5)
    if not 0 <= probability <= 1:
        raise ConfigError(f"policy flaky: p is {probability}; expected a number from 0 to 1")
    seed = _number(arguments, "seed", 0)

    def changes(turn: ChatTurn, task: KnownTask) -> Sequence[Change]:
        # A hash and not a generator: the choice must be the same for every request of one conversation.
        digest = hashlib.sha256(f"{seed}\0{turn.seed}\0{task.instruction}".encode()).digest()
        return _gold(task) if int.from_bytes(digest[:8]) < probability * 2**64 else _wrong(task)

    return Scripted("flaky", tasks, changes)


POLICIES: dict[str, Callable[[KnownTasks, Mapping[str, str]], Policy]] = {
    "flaky": _flaky,
    "idle": _idle,
    "oracle": _oracle,
    "terse": _terse,
    "wrong": _wrong_policy,
}


def make_policy(name: str, tasks: KnownTasks, arguments: Mapping[str, str]) -> Policy:
    """The policy called `name`. Raises ConfigError for an unknown name or a bad argument."""
    if name not in POLICIES:
        raise ConfigError(f"no policy is called {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name](tasks, arguments)


def _only(arguments: Mapping[str, str], policy: str, *known: str) -> None:
    for key in arguments:
        if key not in known:
            raise ConfigError(
                f"policy {policy}: unknown argument {key!r}; expected {' or '.join(known) or 'none'}"
            )


def _number(arguments: Mapping[str, str], key: str, default: _Number) -> _Number:
    try:
        return type(default)(arguments.get(key, default))
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "number"
        raise ConfigError(f"policy flaky: {key} is {arguments[key]!r}; expected a {kind}") from None
