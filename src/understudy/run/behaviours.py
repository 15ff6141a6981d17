"""The scripts for testing a version of an agent with a scripted model, and the results that they must give."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from understudy.agents.base import AgentOutcome
from understudy.model.scripted.changes import Edit
from understudy.model.scripted.toolsets import ActionCall, Toolset, action_call

FILE = "calc.py"
BEFORE, AFTER = "x = 1\n", "x = 2\n"
NEW_FILE = "new.py"
_PATH, _NEW_PATH = f"/workspace/{FILE}", f"/workspace/{NEW_FILE}"
_EDIT = Edit(FILE, 1, (("-", BEFORE), ("+", AFTER)))
_MANY = 25

Calls = Callable[[Toolset], tuple[ActionCall, ...]]


class ScriptStep(Struct, frozen=True):
    """One answer of the model: a text and tool calls after some reasoning, or, with a `status`, an error."""

    text: str = ""
    calls: Calls = lambda tools: ()
    status: int = 0
    reasoning: str = ""


class Behaviour(Struct, frozen=True, kw_only=True):
    """A script, after which the model ends its work, and the required results.

    `ends` are the acceptable outcomes. `shows` are texts that the results of its tool calls must contain, in
    order. `file` is the required content of `FILE` at the end. `timeout_s` is the limit of the whole run.
    """

    name: str
    steps: tuple[ScriptStep, ...]
    ends: tuple[AgentOutcome, ...] = ("completed",)
    shows: tuple[str, ...] = ()
    file: str = BEFORE
    max_turns: int = 60
    timeout_s: float = 180.0


def _shell(*commands: str) -> Calls:
    return lambda tools: tuple(tools.run(command, "try it") for command in commands)


def _read(tools: Toolset) -> tuple[ActionCall, ...]:
    return (tools.read(_PATH),)


def _edit(tools: Toolset) -> tuple[ActionCall, ...]:
    return (tools.edit(_PATH, _EDIT, BEFORE.strip(), AFTER.strip()),)


def _write(tools: Toolset) -> tuple[ActionCall, ...]:
    if tools.can_write():
        return (tools.write(_NEW_PATH, "y = 'ü'\n"),)
    return (tools.run(f"""echo "y = 'ü'" > {_NEW_PATH}""", "Write the file"),)


BEHAVIOURS = (
    Behaviour(
        name="edit",
        steps=(ScriptStep("I look.", _read), ScriptStep("I mend.", _edit)),
        shows=(BEFORE.strip(), ""),
        file=AFTER,
    ),
    Behaviour(
        name="new file",
        steps=(ScriptStep("I write.", _write), ScriptStep("", _shell(f"cat {_NEW_PATH}"))),
        shows=("", "y = 'ü'"),
    ),
    Behaviour(
        name="parallel tools",
        steps=(ScriptStep("Three at once.", _shell("echo one-1", "echo two-2", "echo three-3")),),
        shows=("one-1", "two-2", "three-3"),
    ),
    Behaviour(
        name="failing command",
        steps=(ScriptStep("", _shell("sh -c 'echo broken >&2; exit 3'")),),
        shows=("broken",),
    ),
    Behaviour(name="long output", steps=(ScriptStep("Much.", _shell("seq 1 50000")),), shows=("1",)),
    Behaviour(
        name="unknown tool",
        steps=(ScriptStep("", lambda tools: (action_call("no_such_tool", path="x"),)),),
    ),
    Behaviour(
        name="missing arguments",
        steps=(ScriptStep("", lambda tools: (action_call(tools.shell),)), ScriptStep("So.", _shell("echo so"))),
    ),
    Behaviour(
        name="special characters",
        steps=(ScriptStep("„ü“ 🙂 <b>\\n</b>\t{x}", _shell("printf '%s' 'ä \"q\" \\\\ $HOME 🙂'")),),
        shows=("$HOME",),
    ),
    Behaviour(
        name="passing faults",
        steps=(
            ScriptStep(status=429),
            ScriptStep(status=500),
            ScriptStep(status=529),
            ScriptStep("", _shell("echo on")),
        ),
        shows=("on",),
    ),
    Behaviour(name="refusal", steps=(ScriptStep(status=400),) * 12, ends=("crashed",)),
    Behaviour(
        name="turn limit",
        steps=tuple(ScriptStep("On.", _shell(f"echo turn-{number}")) for number in range(9)),
        ends=("completed", "max_turns"),
        max_turns=3,
    ),
    Behaviour(
        name="many turns",
        steps=tuple(ScriptStep(f"Turn {number}.", _shell(f"echo turn-{number}")) for number in range(_MANY)),
        shows=tuple(f"turn-{number}" for number in range(_MANY)),
    ),
)
"""The behaviours that every agent must show."""
