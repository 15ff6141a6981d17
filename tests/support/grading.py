"""Small tasks in the way of SWE-bench, made on the spot for the grader: one bug each."""

from __future__ import annotations

import atexit
import difflib
import functools
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from understudy.grade.gate import GatedPatch, gate
from understudy.tasks.prepare import PreparedTask
from understudy.types import Files, ImageTree, PytestChecks, SuiteChecks, Task

from support import calc_task
from support.docker_engine import Engine, instance_image

Protections = Callable[[Task, Mapping[str, str]], Awaitable[dict[str, tuple[str, str]]]]
"""Returns the protection of each patch of a task, by its name, and why it is not whole (see tests/attacks)."""

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
"""For ids of tasks that many tests grade: pytest's workers would wait for each other's gradings of one task."""


def diff(after: Mapping[str, str | None], before: Mapping[str, str]) -> str:
    """A git patch that writes the files of `after`; None deletes."""
    text = ""
    for path, new in after.items():
        old = before.get(path)
        if new == old:
            continue
        text += f"diff --git a/{path} b/{path}\n"
        text += "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
        for line in difflib.unified_diff(
            (old or "").splitlines(keepends=True),
            (new or "").splitlines(keepends=True),
            "/dev/null" if old is None else f"a/{path}",
            "/dev/null" if new is None else f"b/{path}",
        ):
            text += line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
    return text


def by_twins_alone(prepared: PreparedTask) -> PreparedTask:
    """The validated task without its other inputs, which each validation draws anew.

    How far a patch that passes is protected may depend on the draw.
    """
    return replace(prepared, options=replace(prepared.options, twin_inputs=()))


def suite_task(
    name: str, tree: Mapping[str, str], gold: Mapping[str, str | None], tests: Mapping[str, str], **checks: Any
) -> Task:
    """A task with `gold` as its right answer and `tests` laid over; `checks` are those of the suite."""
    return Task(
        instance_id=name,
        repo=name.rpartition("-")[0].replace("__", "/"),
        instruction="mend it",
        source=Files(dict(tree)),
        checks=SuiteChecks(files=tuple(tests), test_patch=diff(tests, tree), **checks),
        gold_patch=diff(gold, tree),
        workdir="/testbed",
    )


CALC = {
    "calc/__init__.py": '"""Arithmetic."""\n\nfrom calc.core import same, shift\n\n__all__ = ["same", "shift"]\n',
    "calc/core.py": '"""What it does."""\n\n\ndef shift(x):\n    if x is None:\n        raise KeyError(x)\n'
    "    return x - 1\n\n\ndef same(x):\n    return x\n",
    "tests/test_calc.py": "from calc import same\n\n\ndef test_same():\n    assert same(3) == 3\n",
    "tests/test_other.py": "def test_other():\n    assert True\n",
    "setup.py": "NAME = 'calc'\n",
    "conftest.py": "",
}
CALC_MENDED = {"calc/core.py": CALC["calc/core.py"].replace("x - 1", "x + 1").replace("KeyError", "TypeError")}
CALC_TESTS = {
    "tests/test_calc.py": """\
import pytest

from calc import same, shift


def test_same():
    assert same(3) == 3


def test_shift():
    assert shift(1) == 2


def test_refuses():
    with pytest.raises(TypeError):
        shift(None)
"""
}
CALC_TASK = suite_task(
    "example__suite-1",
    CALC,
    CALC_MENDED,
    CALC_TESTS,
    parser="parse_log_pytest",
    command="pytest -rA tests/test_calc.py",
    fail_to_pass=("tests/test_calc.py::test_shift", "tests/test_calc.py::test_refuses"),
    pass_to_pass=("tests/test_calc.py::test_same",),
    activate="set -o pipefail\nexport PYTHONPATH=/testbed",
    install="python setup.py develop",  # only for a patch that changes what is installed
    timeout_s=60.0,
)


@functools.cache
def _directory_of(tree: tuple[tuple[str, str], ...]) -> Path:
    """A directory with these files."""
    directory = Path(tempfile.mkdtemp(prefix="understudy-tree-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for name, text in tree:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def gate_of(patch: bytes, task: Task) -> GatedPatch:
    """The patch after the gate, for a task whose tree is given as files."""
    tree = task.source.files if isinstance(task.source, Files) else {}
    return gate(patch, task, _directory_of(tuple(tree.items())))


_ACTIVATE = "set -o pipefail\nsource /opt/miniconda3/bin/activate\nconda activate testbed"


def calc_instance(engine: Engine, number: int) -> Task:
    """calc_task as an instance of SWE-bench is: its tree in an image, its hidden test a patch."""
    task = calc_task(number)
    assert isinstance(task.source, Files)
    assert isinstance(task.checks, PytestChecks)
    name = f"example__calc-{number}"
    image = instance_image(engine, name, dict(task.source.files))
    visible, hidden = (files["test_calc.py"].splitlines() for files in (task.source.files, task.checks.files))
    removed, added = (
        "".join(f"{sign}{line}\n" for line in lines) for sign, lines in (("-", visible), ("+", hidden))
    )
    header = f"--- a/test_calc.py\n+++ b/test_calc.py\n@@ -1,{len(visible)} +1,{len(hidden)} @@\n"
    return Task(
        instance_id=name,
        repo=task.repo,
        instruction=task.instruction,
        source=ImageTree(image.base_commit),
        image=image.name,
        workdir="/testbed",
        checks=SuiteChecks(
            parser="parse_log_pytest",
            command="pytest -rA test_calc.py",
            fail_to_pass=task.checks.fail_to_pass,
            pass_to_pass=task.checks.pass_to_pass,
            files=("test_calc.py",),
            test_patch=f"diff --git a/test_calc.py b/test_calc.py\n{header}{removed}{added}",
            activate=_ACTIVATE,
        ),
        gold_patch=f"diff --git a/calc.py b/calc.py\n{task.gold_patch}",
    )
