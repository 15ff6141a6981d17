"""Small generated tasks: what makes them fair, and what keeps the splits apart."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.config import cache_dir
from understudy.errors import TaskError
from understudy.grade.verdict import validate
from understudy.model.scripted.changes import Edit, read_changes
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import python_environment
from understudy.tasks.generate import functions
from understudy.tasks.generate.functions import (
    MEANINGS,
    SPLITS,
    FunctionSpec,
    ModuleSpec,
    Split,
    make_functions,
    modules,
    split_of,
)
from understudy.tasks.prepare import prepare
from understudy.types import Files, PytestChecks, Task

from support import example_count

seeds = st.integers(0, 2**32)
splits = st.sampled_from(SPLITS)


def first(seed: int, split: Split, count: int = 1) -> list[ModuleSpec]:
    return list(itertools.islice(modules(seed, split), count))


def words(module: ModuleSpec) -> list[str]:
    """The made-up ones."""
    names = [name for function in module.functions for name in (function.name, *function.arguments)]
    return [*names, Path(module.path).stem]


def sources(task: Task) -> dict[str, str]:
    assert isinstance(task.source, Files)
    return dict(task.source.files)


def checks_of(task: Task) -> PytestChecks:
    assert isinstance(task.checks, PytestChecks)
    return task.checks


def mended(task: Task) -> str:
    """The module with the gold patch applied, by hand."""
    ((_, text),) = sources(task).items()
    (change,) = read_changes(task.gold_patch)
    assert isinstance(change, Edit)
    lines = text.splitlines(keepends=True)
    size = change.old.count("\n")
    assert "".join(lines[change.line - 1 : change.line - 1 + size]) == change.old
    lines[change.line - 1 : change.line - 1 + size] = [change.new]
    return "".join(lines)


def failing(task: Task, text: str) -> set[str]:
    """The ids of the tests that fail when the module is this text."""
    checks = checks_of(task)
    ((path, code),) = checks.files.items()
    module: dict[str, Any] = {}
    exec(text, module)
    namespace: dict[str, Any] = dict(module)
    body = code.partition("\n")[2]
    exec(body, namespace)
    failed_tests = set[str]()
    for name in re.findall(r"^def (test_\w+)", body, re.MULTILINE):
        try:
            namespace[name]()
        except AssertionError:
            failed_tests.add(f"{path}::{name}")
    return failed_tests


@given(seeds, splits, st.integers(1, 12), st.integers(0, 12))
def test_the_same_seed_makes_the_same_tasks_and_a_larger_count_extends_them(
    seed: int, split: Split, count: int, more: int
) -> None:
    tasks = make_functions(count, seed, split)
    assert tasks == make_functions(count + more, seed, split)[:count]
    assert len({task.instance_id for task in tasks}) == count


def test_many_tasks_are_all_different() -> None:
    tasks = make_functions(500, 1, "train")
    assert len({task.instance_id for task in tasks}) == len({task.instruction for task in tasks}) == 500
    assert len({task.gold_patch for task in tasks}) == 500
    assert make_functions(3, 1, "train") != make_functions(3, 2, "train")


@pytest.mark.parametrize("count", [0, -1, 20_001])
def test_a_count_out_of_bounds_is_refused(count: int) -> None:
    with pytest.raises(TaskError, match="1 to 20,000"):
        make_functions(count, 0, "train")


@given(seeds, seeds)
def test_the_splits_share_no_word(one: int, other: int) -> None:
    used = {
        split: {word for module in first(seed, split, 8) for word in words(module)}
        for split, seed in zip(SPLITS, (one, other), strict=True)
    }
    assert not used["train"] & used["held-out"]
    for split, split_words in used.items():
        assert {split_of(word) for word in split_words} == {split}


@given(seeds, splits)
def test_names_in_a_module_are_unique_and_shadow_no_builtin(seed: int, split: Split) -> None:
    for module in first(seed, split, 4):
        names = words(module)
        assert len(set(names)) == len(names)
        assert not {"max", "min", "len", "src", "lib", "app", "core", "util"} & set(names)
        assert all(name.isidentifier() for name in names)


@given(seeds, splits)
def test_the_fault_is_one_expression_that_occurs_once(seed: int, split: Split) -> None:
    """So that an edit needs no more than `return …`."""
    for module in first(seed, split, 4):
        broken, right = (module.text(mended=mended) for mended in (False, True))
        changed = [pair for pair in zip(broken.split("\n"), right.split("\n"), strict=True) if len(set(pair)) > 1]
        assert changed == [
            (
                f"    return {module.broken.expression(module.wrong_meaning)}",
                f"    return {module.broken.expression()}",
            )
        ]
        for number, function in enumerate(module.functions):
            expression = function.expression(module.wrong_meaning if number == module.faulty else None)
            assert broken.count(f"return {expression}") == 1
        assert module.broken.name in module.instruction and module.path in module.instruction


@settings(max_examples=example_count(60))
@given(seeds, splits)
def test_the_gold_patch_passes_all_tests_and_the_fault_fails_its_own(seed: int, split: Split) -> None:
    for task in make_functions(3, seed, split):
        checks = checks_of(task)
        ((_, text),) = sources(task).items()
        assert failing(task, text) == set(checks.fail_to_pass)
        assert len(checks.fail_to_pass) == 1
        assert failing(task, mended(task)) == set()
        assert len(checks.pass_to_pass) >= 1


PAIRS = [
    (meaning, other)
    for meaning in MEANINGS
    for other in MEANINGS
    if meaning.kind == other.kind and meaning is not other
]


@pytest.mark.parametrize("number", range(2, 10))
def test_no_wrong_variant_passes_the_tests_of_its_function(number: int) -> None:
    """Every test tells its function from all that may stand in its place."""
    for meaning, other in PAIRS:
        arguments = ("a", "b") if meaning.kind == "two" else ("a",)
        module = ModuleSpec("src/m.py", (FunctionSpec("f", arguments, meaning, number),), 0, other)
        task = functions._task(module, 0, "train")  # pyright: ignore[reportPrivateUsage]
        assert failing(task, module.text(mended=False)) == set(checks_of(task).fail_to_pass)
        assert failing(task, module.text(mended=True)) == set()


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.services), "held-out"])
async def test_the_grader_validates_generated_tasks(split: Split, tmp_path: Path) -> None:
    """By its own reporter in a sandbox: gold scores 1 and nothing scores 0."""
    sandboxes, environment = LocalSandboxes(), python_environment(cache_dir())
    for task in make_functions(2, 3, split):
        prepared = prepare(task, tmp_path, sandboxes)
        await validate(prepared, sandboxes=sandboxes, environment=environment, cache=tmp_path)
