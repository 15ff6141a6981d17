"""Generates small tasks: a module of a few functions, one of which does not do what its docstring says.

Everything is written from a table of meanings and made-up names. So a small model can learn the work, and be
tested on names and files that it never saw: no word is in both splits.
"""

from __future__ import annotations

import hashlib
import keyword
import operator
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

from msgspec import Struct

from understudy.errors import TaskError
from understudy.types import Files, PytestChecks, Task
from understudy.util.diffs import unified

Split = Literal["train", "held-out"]
SPLITS: tuple[Split, ...] = ("train", "held-out")
REPO = "functions"

_NAMES_PER_HELD_OUT = 4
"""One name of so many belongs to the held-out split."""

# Made-up names have two syllables: an onset, a vowel and a coda each.
_ONSETS = (*"bdfgklmnprstvz", "br", "dr", "gr", "kl", "pl", "tr")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("", "", "n", "r", "l", "s")
_FOLDERS = ("src", "lib", "app", "core", "util")
_TASKS_LIMIT = 20_000
_CHECK_TIMEOUT_S = 60.0


class Meaning(Struct, frozen=True):
    """What a function does: its docstring and its expression, with placeholders `{a}`, `{b}` and `{n}`.

    `value` computes the result from the arguments and the number. Meanings of the same `kind` take the same
    arguments, so each one is a bug when it is used in place of another.
    """

    kind: Literal["two", "number", "list"]
    docstring: str
    expression_template: str
    value: Callable[..., Any]


MEANINGS = (
    Meaning("two", "Return the sum of {a} and {b}.", "{a} + {b}", operator.add),
    Meaning("two", "Return {a} minus {b}.", "{a} - {b}", operator.sub),
    Meaning("two", "Return the product of {a} and {b}.", "{a} * {b}", operator.mul),
    Meaning("two", "Return the larger of {a} and {b}.", "max({a}, {b})", max),
    Meaning("two", "Return the smaller of {a} and {b}.", "min({a}, {b})", min),
    Meaning("two", "Return whether {a} is less than {b}.", "{a} < {b}", operator.lt),
    Meaning("two", "Return whether {a} is greater than {b}.", "{a} > {b}", operator.gt),
    Meaning("number", "Return {a} plus {n}.", "{a} + {n}", operator.add),
    Meaning("number", "Return {a} minus {n}.", "{a} - {n}", operator.sub),
    Meaning("number", "Return {a} times {n}.", "{a} * {n}", operator.mul),
    Meaning("list", "Return the first item of {a}.", "{a}[0]", operator.itemgetter(0)),
    Meaning("list", "Return the last item of {a}.", "{a}[-1]", operator.itemgetter(-1)),
    Meaning("list", "Return the length of {a}.", "len({a})", len),
)
"""Every pair of one kind differs on `_INPUTS`."""

_INPUTS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "two": ((7, 3), (3, 8), (5, 5)),
    "number": ((9,), (2,)),
    "list": (([4, 6, 9],), ([8, 1],)),
}


class FunctionSpec(Struct, frozen=True):
    """A function of a module. `meaning` is what its docstring says, `number` the number in it, if it has one."""

    name: str
    arguments: tuple[str, ...]
    meaning: Meaning
    number: int

    @property
    def signature(self) -> str:
        """The function's first line."""
        return f"def {self.name}({', '.join(self.arguments)}):"

    def expression(self, meaning: Meaning | None = None) -> str:
        """Return the expression that the function returns; with `meaning`, the one it would return for that
        meaning.
        """
        return self._fill((meaning or self.meaning).expression_template)

    def code(self, expression: str) -> str:
        """Return the function's source with this expression."""
        return f'{self.signature}\n    """{self._fill(self.meaning.docstring)}"""\n    return {expression}\n'

    def _fill(self, text: str) -> str:
        return text.format(a=self.arguments[0], b=self.arguments[-1], n=self.number)


class ModuleSpec(Struct, frozen=True):
    """A module at `path` with one `faulty` function, which does what `wrong_meaning` means."""

    path: str
    functions: tuple[FunctionSpec, ...]
    faulty: int
    wrong_meaning: Meaning

    @property
    def broken(self) -> FunctionSpec:
        """The function that returns the wrong result."""
        return self.functions[self.faulty]

    def text(self, *, mended: bool) -> str:
        """Return the module's source, with the faulty function corrected if `mended`."""
        parts = [
            function.code(
                function.expression(self.wrong_meaning if number == self.faulty and not mended else None)
            )
            for number, function in enumerate(self.functions)
        ]
        return "\n\n".join(parts)

    @property
    def instruction(self) -> str:
        """The instruction for the agent."""
        return f"The function `{self.broken.name}` in {self.path} returns the wrong result. Fix it."


def make_functions(count: int, seed: int, split: Split) -> list[Task]:
    """Return `count` different tasks of a split; deterministic, and a larger count only appends tasks.

    Raises TaskError for a count that is not from 1 to 20,000.
    """
    if not 1 <= count <= _TASKS_LIMIT:
        raise TaskError(f"{REPO}: cannot make {count} tasks; give a --count from 1 to {_TASKS_LIMIT:,}")
    tasks: dict[str, Task] = {}
    for module in modules(seed, split):
        task = _task(module, seed, split)
        tasks.setdefault(task.instance_id, task)
        if len(tasks) == count:
            break
    return list(tasks.values())


def modules(seed: int, split: Split) -> Iterator[ModuleSpec]:
    """Yield modules endlessly, the same ones for the same arguments."""
    draw = random.Random(f"{REPO}:{split}:{seed}")
    while True:
        yield _module(draw, split)


def _module(draw: random.Random, split: Split) -> ModuleSpec:
    names = _new_names(draw, split)
    folder, functions = draw.choice(_FOLDERS), tuple(_function(draw, names) for _ in range(draw.randint(2, 3)))
    faulty = draw.randrange(len(functions))
    meaning = functions[faulty].meaning
    other_meanings = [other for other in MEANINGS if other.kind == meaning.kind and other is not meaning]
    return ModuleSpec(f"{folder}/{next(names)}.py", functions, faulty, draw.choice(other_meanings))


def _function(draw: random.Random, names: Iterator[str]) -> FunctionSpec:
    meaning = draw.choice(MEANINGS)
    arguments = tuple(next(names) for _ in range(2 if meaning.kind == "two" else 1))
    return FunctionSpec(next(names), arguments, meaning, draw.randint(2, 9))


def _new_names(draw: random.Random, split: Split) -> Iterator[str]:
    """Yield different made-up words of a split endlessly."""
    used: set[str] = set()
    while True:
        word = "".join(draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS) for _ in range(2))
        is_used = word in used or keyword.iskeyword(word) or word in sys.stdlib_module_names
        if not is_used and split_of(word) == split:
            used.add(word)
            yield word


def split_of(word: str) -> Split:
    """Return the split that a made-up word belongs to, by its hash."""
    held_out = hashlib.sha256(word.encode()).digest()[0] % _NAMES_PER_HELD_OUT == 0
    return "held-out" if held_out else "train"


def _task(module: ModuleSpec, seed: int, split: Split) -> Task:
    broken, mended = ({module.path: module.text(mended=mended)} for mended in (False, True))
    tests = f"tests/test_{module.path.rpartition('/')[2]}"
    ids = [f"{tests}::test_{function.name}" for function in module.functions]
    gold = unified(broken, mended)
    digest = hashlib.sha256(gold.encode()).hexdigest()
    return Task(
        instance_id=f"{REPO}__{module.broken.name}-{digest[:8]}",
        repo=REPO,
        instruction=module.instruction,
        source=Files(broken),
        checks=PytestChecks(
            files={tests: _tests(module)},
            fail_to_pass=(ids[module.faulty],),
            pass_to_pass=tuple(id_ for number, id_ in enumerate(ids) if number != module.faulty),
            timeout_s=_CHECK_TIMEOUT_S,
        ),
        gold_patch=gold,
        meta={
            "seed": seed,
            "split": split,
            "says": module.broken.meaning.expression_template,
            "does": module.wrong_meaning.expression_template,
        },
    )


def _tests(module: ModuleSpec) -> str:
    """Return the test file: a test for each function, with values computed from the function's meaning."""
    module_name = module.path.removesuffix(".py").replace("/", ".")
    tests = [f"from {module_name} import {', '.join(function.name for function in module.functions)}\n"]
    for function in module.functions:
        lines = [f"def test_{function.name}():"]
        for arguments in _INPUTS[function.meaning.kind]:
            inputs = (*arguments, function.number) if function.meaning.kind == "number" else arguments
            value = function.meaning.value(*cast("tuple[Any, ...]", inputs))
            compare = "is" if isinstance(value, bool) else "=="
            lines.append(f"    assert {function.name}({', '.join(map(repr, arguments))}) {compare} {value!r}")
        tests.append("\n".join(lines) + "\n")
    return "\n\n".join(tests)
