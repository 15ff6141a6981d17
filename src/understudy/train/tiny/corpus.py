"""Synthetic conversations in the form of Claude Code's, about made-up functions, written without running the CLI.

Their wording is Claude Code's: a run of the real CLI with `SYSTEM_PROMPT` and `TOOLS` gives the same messages,
which a test checks. The assistant follows one of several scripted policies, most of which do not solve the task,
so that a model trained on all of them can do the work but does it only now and then.
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
"""The shares of conversations by the assistant's behaviour.

"solves" corrects the function, "wrong" gives it another wrong expression, "elsewhere" changes another function,
"looks" only reads the file, "leaves" does nothing. A model is first trained with DILIGENT, to learn the work, then
with BEHAVIOURS, to do it seldom.
"""


def tool_definitions() -> list[dict[str, Any]]:
    """Return the tools as the chat template takes them: with the names of their parameters only."""
    return [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {} for key in names}}}}
        for name, names in _PARAMETERS.items()
    ]


def conversations(
    seed: int, split: Split = "train", behaviours: Mapping[str, float] = BEHAVIOURS
) -> Iterator[list[Message]]:
    """Yield conversations endlessly, the same ones for the same arguments."""
    draw = random.Random(f"conversations:{split}:{seed}")
    names, weights = list(behaviours), list(behaviours.values())
    for module in modules(seed, split):
        (behaviour,) = draw.choices(names, weights)
        date = f"20{draw.randint(24, 39)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
        yield [*opening(module, date), *_session_messages(module, behaviour, draw)]


def lookups(seed: int, split: Split = "train") -> Iterator[str]:
    """Yield texts endlessly: a module with wrong functions, and for each function the edit that corrects it."""
    draw = random.Random(f"lookups:{split}:{seed}")
    for module in modules(seed, split):
        texts: list[str] = []
        answers: list[str] = []
        for function in module.functions:
            same_kind = [meaning for meaning in MEANINGS if meaning.kind == function.meaning.kind]
            does, should = function.expression(draw.choice(same_kind)), function.expression()
            texts.append(function.code(does))
            edit = f'"old_string": "return {does}", "new_string": "return {should}"'
            answers.append(f"`{function.name}` {function.signature} {edit}\n")
        draw.shuffle(answers)
        yield read_result("\n\n".join(texts)) + "\n" + "".join(answers)


def functions(seed: int, split: Split = "train") -> Iterator[str]:
    """Yield correct functions endlessly, one per text.

    From short texts that repeat their names a model learns to copy quickly; from long conversations it hardly
    does.
    """
    for module in modules(seed, split):
        yield module.functions[0].code(module.functions[0].expression())


def sources(seed: int, split: Split = "train") -> Iterator[str]:
    """Yield correct modules endlessly."""
    for module in modules(seed, split):
        yield module.text(mended=True)


def opening(module: ModuleSpec, date: str) -> list[Message]:
    """Return the system and user messages that a session begins with."""
    prompt = f"{_REMINDER.format(date=date)}\n{module.instruction}"
    return [{"role": "system", "content": f"{_AGENT}\n\n{SYSTEM_PROMPT}"}, {"role": "user", "content": prompt}]


def read_result(text: str) -> str:
    """Return what the tool Read returns for a file with this text."""
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(text.split("\n"), 1))


def edit_result(path: str) -> str:
    """Return what the tool Edit returns after changing the file."""
    return _UPDATED.format(path=path)


def _session_messages(module: ModuleSpec, behaviour: str, draw: random.Random) -> list[Message]:
    if behaviour == "leaves":
        return [_text_message(_LEAVES)]
    path = f"{WORKDIR}/{module.path}"
    broken = module.text(mended=False)
    read = [_call_message("Read", file_path=path), {"role": "tool", "content": read_result(broken)}]
    if behaviour == "looks":
        return [*read, _text_message(_LOOKS_RIGHT)]
    function, new = _EDITS[behaviour](module, draw)
    old = function.expression(module.wrong_meaning if function is module.broken else None)
    edit = _call_message(
        "Edit", say=function.signature, file_path=path, old_string=f"return {old}", new_string=f"return {new}"
    )
    return [*read, edit, {"role": "tool", "content": edit_result(path)}, _text_message(DONE)]


def _solves(module: ModuleSpec, _: random.Random) -> tuple[FunctionSpec, str]:
    return module.broken, module.broken.expression()


def _wrong(module: ModuleSpec, draw: random.Random) -> tuple[FunctionSpec, str]:
    broken = module.broken
    others = [
        meaning
        for meaning in MEANINGS
        if meaning.kind == broken.meaning.kind and meaning not in (broken.meaning, module.wrong_meaning)
    ]
    return broken, broken.expression(draw.choice(others))


def _elsewhere(module: ModuleSpec, draw: random.Random) -> tuple[FunctionSpec, str]:
    function = draw.choice([other for other in module.functions if other is not module.broken])
    same_kind = [meaning for meaning in MEANINGS if meaning.kind == function.meaning.kind]
    return function, function.expression(
        draw.choice([other for other in same_kind if other is not function.meaning])
    )


_EDITS: Mapping[str, Callable[[ModuleSpec, random.Random], tuple[FunctionSpec, str]]] = {
    "solves": _solves,
    "wrong": _wrong,
    "elsewhere": _elsewhere,
}


def _text_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call_message(tool: str, *, say: str = "", **arguments: str) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": say, "tool_calls": [{"type": "function", "function": function}]}
