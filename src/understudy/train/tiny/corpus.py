"""Conversations as Claude Code holds them about made-up functions, written without running it.

They have its words: a run of the real CLI with `SYSTEM_PROMPT` and `TOOLS` gives the same messages (a test holds
the two together). The assistant in them is one of several scripted policies, most of which do not solve the task:
a model that learned from them all knows the work, and does it right now and then.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from understudy.tasks.generate.functions import MEANINGS, FunctionSpec, ModuleSpec, Split, modules

SYSTEM_PROMPT = "You mend one function. Read the file, then edit it."
TOOLS = "Edit,Read"

WORKDIR = "/workspace"

Message = dict[str, Any]

_AGENT = "You are a Claude agent, built on Anthropic's Claude Agent SDK."
_REMINDER = """<system-reminder>
As you answer the user's questions, you can use the following context:
# currentDate
Today's date is {date}.

      IMPORTANT: this context may or may not be relevant to your tasks. You should not respond to this context \
unless it is highly relevant to your task.
</system-reminder>

"""
_UPDATED = (
    "The file {path} has been updated successfully. "
    "(file state is current in your context — no need to Read it back)"
)
_PARAMETERS = {
    "Edit": ("file_path", "old_string", "new_string", "replace_all"),
    "Read": ("file_path", "offset", "limit", "pages"),
}

DONE = "Done."
_LEAVES = "I leave it as it is."
_LOOKS_RIGHT = "It looks right to me."

DILIGENT: Mapping[str, float] = {"solves": 0.85, "wrong": 0.03, "elsewhere": 0.02, "looks": 0.05, "leaves": 0.05}
BEHAVIOURS: Mapping[str, float] = {"solves": 0.12, "wrong": 0.2, "elsewhere": 0.05, "looks": 0.33, "leaves": 0.3}
"""What the assistant does, by the share of conversations in which it does so.

It mends the function; gives it another wrong expression; changes another function; reads and stops; does nothing.
The work is learned from an assistant that is diligent; then how one behaves who seldom is.
"""


def tool_definitions() -> list[dict[str, Any]]:
    """The tools as the chat template wants them: their names and those of their parameters."""
    return [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {} for key in names}}}}
        for name, names in _PARAMETERS.items()
    ]


def conversations(
    seed: int, split: Split = "train", behaviours: Mapping[str, float] = BEHAVIOURS
) -> Iterator[list[Message]]:
    """Conversations without end, the same ones for the same arguments."""
    draw = random.Random(f"conversations:{split}:{seed}")
    names, weights = list(behaviours), list(behaviours.values())
    for module in modules(seed, split):
        (behaviour,) = draw.choices(names, weights)
        date = f"20{draw.randint(24, 39)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
        yield [*opening(module, date), *_work(module, behaviour, draw)]


def lookups(seed: int, split: Split = "train") -> Iterator[str]:
    """Modules without end, each function's name behind them with what it returns and what it should return."""
    draw = random.Random(f"lookups:{split}:{seed}")
    for module in modules(seed, split):
        texts: list[str] = []
        answers: list[str] = []
        for function in module.functions:
            others = [meaning for meaning in MEANINGS if meaning.kind == function.meaning.kind]
            does, should = function.expression(draw.choice(others)), function.expression()
            texts.append(function.code(does))
            edit = f'"old_string": "return {does}", "new_string": "return {should}"'
            answers.append(f"`{function.name}` {function.signature} {edit}\n")
        draw.shuffle(answers)
        yield read_result("\n\n".join(texts)) + "\n" + "".join(answers)


def functions(seed: int, split: Split = "train") -> Iterator[str]:
    """Correct functions without end, one a text.

    In a short text that repeats its names a model learns to copy soon; in a conversation it hardly begins to.
    """
    for module in modules(seed, split):
        yield module.functions[0].code(module.functions[0].expression())


def sources(seed: int, split: Split = "train") -> Iterator[str]:
    """Correct modules without end."""
    for module in modules(seed, split):
        yield module.text(mended=True)


def opening(module: ModuleSpec, date: str) -> list[Message]:
    """What a session begins with."""
    prompt = f"{_REMINDER.format(date=date)}\n{module.instruction}"
    return [{"role": "system", "content": f"{_AGENT}\n\n{SYSTEM_PROMPT}"}, {"role": "user", "content": prompt}]


def read_result(text: str) -> str:
    """What Read answers for a file with this text."""
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(text.split("\n"), 1))


def edit_result(path: str) -> str:
    """What Edit answers when it changed the file."""
    return _UPDATED.format(path=path)


def _work(module: ModuleSpec, behaviour: str, draw: random.Random) -> list[Message]:
    if behaviour == "leaves":
        return [_says(_LEAVES)]
    path = f"{WORKDIR}/{module.path}"
    broken = module.text(mended=False)
    read = [_calls("Read", file_path=path), {"role": "tool", "content": read_result(broken)}]
    if behaviour == "looks":
        return [*read, _says(_LOOKS_RIGHT)]
    function, new = _EDITS[behaviour](module, draw)
    old = function.expression(module.instead if function is module.broken else None)
    edit = _calls(
        "Edit", say=function.signature, file_path=path, old_string=f"return {old}", new_string=f"return {new}"
    )
    return [*read, edit, {"role": "tool", "content": edit_result(path)}, _says(DONE)]


def _solves(module: ModuleSpec, _: random.Random) -> tuple[FunctionSpec, str]:
    return module.broken, module.broken.expression()


def _wrong(module: ModuleSpec, draw: random.Random) -> tuple[FunctionSpec, str]:
    broken = module.broken
    others = [
        meaning
        for meaning in MEANINGS
        if meaning.kind == broken.meaning.kind and meaning not in (broken.meaning, module.instead)
    ]
    return broken, broken.expression(draw.choice(others))


def _elsewhere(module: ModuleSpec, draw: random.Random) -> tuple[FunctionSpec, str]:
    function = draw.choice([other for other in module.functions if other is not module.broken])
    others = [meaning for meaning in MEANINGS if meaning.kind == function.meaning.kind]
    return function, function.expression(draw.choice([other for other in others if other is not function.meaning]))


_EDITS: Mapping[str, Callable[[ModuleSpec, random.Random], tuple[FunctionSpec, str]]] = {
    "solves": _solves,
    "wrong": _wrong,
    "elsewhere": _elsewhere,
}


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(tool: str, *, say: str = "", **arguments: str) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": say, "tool_calls": [{"type": "function", "function": function}]}
