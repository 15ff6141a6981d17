"""Suites: what is run and when, how a patch is laid upon the tree, and what intake finds out about a task."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.checks import canaries as birds
from understudy.checks.canaries import plant_canaries
from understudy.checks.suite import SuiteRun, activated_environment, judge_suite, needs_install
from understudy.errors import GraderError, SandboxError, TaskError
from understudy.grade.verdict import as_validated, grade, validate
from understudy.sandbox.base import IsolatedSandbox, Sandboxes, SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandbox, LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare
from understudy.types import SuiteChecks, Task, Verdict

from support.grading import CALC, CALC_MENDED, CALC_TASK, CALC_TESTS, diff, gate_of

CORE = CALC["calc/core.py"]
CHECKS = CALC_TASK.checks
assert isinstance(CHECKS, SuiteChecks)


@pytest.fixture
def graded(sandboxes: Sandboxes, environment: TaskEnvironment, tmp_path: Path):
    async def run(patch: str | bytes, task: Task = CALC_TASK) -> Verdict:
        data = patch.encode() if isinstance(patch, str) else patch
        prepared = await asyncio.to_thread(prepare, task, tmp_path, sandboxes)
        return await grade(prepared, data, sandboxes=sandboxes, environment=environment)

    return run


@pytest.fixture
def taken_in(sandboxes: Sandboxes, environment: TaskEnvironment, tmp_path: Path):
    async def run(task: Task):
        prepared = await asyncio.to_thread(prepare, task, tmp_path, sandboxes)
        way = await validate(prepared, sandboxes=sandboxes, environment=environment, cache=tmp_path)
        assert as_validated(prepared, sandboxes=sandboxes, environment=environment, cache=tmp_path) == way
        return way

    return run


def with_tree(more: Mapping[str, str], **checks: object) -> Task:
    """The task on a tree with more files, its gold patch made for it."""
    tree = {**CALC, **more}
    return replace(
        CALC_TASK,
        source=type(CALC_TASK.source)(tree),  # type: ignore[call-arg]
        gold_patch=diff({"calc/core.py": CALC_MENDED["calc/core.py"]}, tree),
        checks=replace(CHECKS, **checks),
    )


# --- what is run, and when


async def test_the_agents_environment_has_only_variables_that_activation_sets(
    sandboxes: Sandboxes, tmp_path: Path
):
    (tmp_path / "tree").mkdir()
    conda = (
        "echo noise; conda() { export PATH=/env/bin:$PATH CONDA_PREFIX=/env NOTE=$'two\nlines'; }; conda activate"
    )
    sandbox = await sandboxes.open(SandboxSpec(tmp_path / "tree", env={"PATH": "/usr/bin:/bin", "KEPT": "1"}))
    try:
        variables = await activated_environment(sandbox, replace(CHECKS, activate=conda))
        assert variables == {"PATH": "/env/bin:/usr/bin:/bin", "CONDA_PREFIX": "/env", "NOTE": "two\nlines"}
        assert await activated_environment(sandbox, replace(CHECKS, activate="")) == {}
        with pytest.raises(SandboxError, match="activate the task's environment failed with exit code 3"):
            await activated_environment(sandbox, replace(CHECKS, activate="exit 3"))
    finally:
        await sandbox.close()


async def test_phases_run_in_their_order_and_nothing_crosses_but_files(graded) -> None:
    note = "echo {} >>/tmp/order; env | grep -c LEFT >>/tmp/order; export LEFT=1; sleep 300 &"
    checks = replace(
        CHECKS,
        before=note.format("before") + "\ngrep -c KeyError calc/core.py >>/tmp/order",
        install=note.format("install") + "\ngrep -c KeyError calc/core.py >>/tmp/order; true",
        command="cat /tmp/order; pgrep sleep; pytest -rA tests/test_calc.py",
    )
    verdict = await graded(CALC_TASK.gold_patch, replace(CALC_TASK, checks=checks))
    assert verdict.reward == 1.0, verdict
    assert verdict.log.startswith("before\n0\n1\ninstall\n0\n0\n===")
    markers = ["echo before", "here the patch", "echo install", "printf %s", "pgrep sleep; pytest -rA"]
    positions = [next(n for n, each in enumerate(verdict.commands) if marker in each) for marker in markers]
    assert positions == sorted(positions), "each phase as it ran, with the canaries between"


@pytest.mark.parametrize(
    ("install", "path", "expected"),
    [
        ("python -m pip install -e .", "calc/core.py", False),
        ("pip install -v --no-build-isolation -e .[test]", "docs/x.rst", False),
        ("python setup.py develop", "calc/core.py", False),
        ("python -m pip install -e .", "setup.py", True),
        ("python -m pip install -e .", "pyproject.toml", True),
        ("python -m pip install -e .", "calc/fast.pyx", True),
        ("python -m pip install -e .", "src/x/y.cpp", True),
        ("python -m pip install -e .", "calc/new/__init__.py", True),
        ("python -m pip install .", "calc/core.py", True),
        ("pip install -e . && make", "calc/core.py", True),
        ("pip install -e .\nmake", "calc/core.py", True),
    ],
)
def test_a_patch_needs_an_install_only_if_it_changes_what_is_built(
    install: str, path: str, expected: bool
) -> None:
    patch = diff({path: "x\n"}, {}).encode()
    assert needs_install(replace(CHECKS, install=install), patch) is expected
    assert needs_install(replace(CHECKS, install=install, parser="parse_log_gotest"), patch)


async def test_an_install_is_retried_without_build_isolation(graded) -> None:
    install = 'echo "$PIP_NO_BUILD_ISOLATION" >>/tmp/tries; test "$PIP_NO_BUILD_ISOLATION" = false'
    command = f"cat /tmp/tries; {CHECKS.command}"
    task = replace(CALC_TASK, checks=replace(CHECKS, install=install, command=command))
    verdict = await graded(CALC_TASK.gold_patch, task)
    assert verdict.reward == 1.0
    assert verdict.log.startswith("\nfalse\n")


async def test_an_installation_that_times_out_scores_zero(graded) -> None:
    task = replace(CALC_TASK, checks=replace(CHECKS, install="sleep 60", timeout_s=1.0))
    verdict = await graded(task.gold_patch, task)
    assert (verdict.reward, verdict.reason) == (0.0, "the installation did not end in 1 s")


async def test_a_failure_of_commands_before_the_patch_is_a_grader_error(graded) -> None:
    task = replace(CALC_TASK, checks=replace(CHECKS, before="sleep 60", timeout_s=1.0))
    with pytest.raises(GraderError, match=r"commands of checks\.before"):
        await graded(task.gold_patch, task)


# --- laying the patch upon the tree


MENDED = diff(CALC_MENDED, CALC)
DRIFTED = MENDED.replace(' """What it does."""\n \n', ' """What it did."""\n \n')
CRLF = {"calc/dos.py": "a = 1\r\nb = 2\r\n"}
WAYS = {
    "as it is": MENDED,
    "with prose before it": "From: me\nSubject: mend it\n\n" + MENDED,
    "with other context, by patch": DRIFTED,
    "without the last newline": MENDED.rstrip("\n"),
    "as git mail has it": MENDED + "-- \n2.40.0\n",
}


@pytest.mark.parametrize("way", WAYS)
async def test_patches_are_applied_in_every_way_the_harness_tries(graded, way: str) -> None:
    verdict = await graded(WAYS[way])
    assert (verdict.reward, verdict.applied) == (1.0, True), verdict


async def test_a_patch_whose_changes_are_already_in_the_tree_counts_as_applied(graded) -> None:
    patch = diff({"calc/note.txt": "new\n"}, {"calc/note.txt": "old\n"})
    task = with_tree({"calc/note.txt": "new\n"})
    verdict = await graded(patch, task)
    assert verdict.applied
    assert "still fail" in verdict.reason


async def test_a_patch_whose_context_changed_is_applied_by_a_merge(graded) -> None:
    """What stands around the change is another text by now, but the file that the patch was made for is known."""
    base = "".join(f"line {n}\n" for n in range(40))
    moved = base.replace("line 10\n", "line ten\n")
    task = with_tree({"calc/text.txt": base}, before="sed -i 's/line 12/line twelve/' calc/text.txt")
    patch = diff({"calc/text.txt": moved}, {"calc/text.txt": base}) + MENDED
    verdict = await graded(patch, task)
    assert verdict.reward == 1.0, verdict


@pytest.mark.parametrize("attributes", ["* text=auto eol=crlf\n", "*.py text eol=lf\n", "* text=auto\n"])
async def test_line_endings_are_kept_as_bytes_despite_gitattributes(graded, attributes: str) -> None:
    task = with_tree({**CRLF, ".gitattributes": attributes})
    patch = diff({"calc/dos.py": "a = 1\r\nb = 3\r\n"}, CRLF) + MENDED
    verdict = await graded(patch, task)
    assert verdict.reward == 1.0, verdict


async def test_a_patch_that_does_not_apply_scores_zero_and_names_the_file(graded) -> None:
    patch = diff({"calc/core.py": "x\n"}, {"calc/core.py": "".join(f"other {n}\n" for n in range(9))})
    verdict = await graded(patch)
    assert (verdict.reward, verdict.applied) == (0.0, False)
    assert "does not apply" in verdict.reason and "calc/core.py" in verdict.reason


async def test_a_test_patch_that_does_not_apply_is_a_task_error(graded) -> None:
    broken = diff({"tests/test_calc.py": "x\n"}, {"tests/test_calc.py": "nothing like it\n"})
    task = replace(CALC_TASK, checks=replace(CHECKS, test_patch=broken))
    with pytest.raises(TaskError, match=r"checks\.test_patch does not apply"):
        await graded(task.gold_patch, task)


async def test_a_file_that_the_test_patch_makes_may_be_there_before(graded) -> None:
    tests = {"tests/test_new.py": CALC_TESTS["tests/test_calc.py"]}
    ids = tuple(id.replace("test_calc", "test_new") for id in CHECKS.fail_to_pass)
    task = with_tree(
        {"tests/test_new.py": "old\n"},
        files=tuple(tests),
        test_patch=diff(tests, {}),
        fail_to_pass=ids,
        pass_to_pass=(),
        command="pytest -rA tests/test_new.py",
    )
    assert (await graded(task.gold_patch, task)).reward == 1.0


# --- the gate


@pytest.mark.parametrize(
    ("path", "dropped"),
    [
        ("tests/test_calc.py", True),
        ("./tests/run.sh", True),
        ("tests/other/run.sh", True),
        ("other/run.sh", True),  # a scratch file: new, and nothing names it
        ("calc/run.sh", False),
        ("bin/test", True),
        ("pytest.py", True),
        ("_pytest/x.py", True),
        ("tests/unittest.py", True),
        ("calc/pytest.py", False),
        ("tests/test_mine.py", True),
        ("tests/helper.py", True),
        ("tests/data/expected.txt", True),
        ("calc/tests/helper.py", False),
        ("calc/test_core.py", True),
        ("calc/testing.py", False),
        ("calc/core.cpython-311-x86_64-linux-gnu.so", True),
    ],
)
def test_the_gate_drops_test_files_and_files_that_the_grading_commands_run(path: str, dropped: bool) -> None:
    task = replace(
        CALC_TASK, checks=replace(CHECKS, install="sh ./tests/run.sh", command="bin/test -x tests/test_calc.py")
    )
    patch = diff({path.removeprefix("./"): "x\n"}, {}).encode()
    assert bool(gate_of(patch, task).dropped) is dropped


# --- canaries


@pytest.mark.parametrize(
    ("parser", "file", "command", "name"),
    [
        ("parse_log_pytest", "tests/test_a.py", "pytest -rA tests/test_a.py", "tests/test_X.py"),
        ("parse_log_pytest", "t/a_test.py", "pytest t/a_test.py", "t/X_test.py"),
        ("parse_log_pytest", "t/a_test.py", "pytest t/b.py t/a_test.py::x -q", "t/X_test.py"),
        ("parse_log_pytest", "t/test_a.py", "cd t && pytest test_a.py", "test_X.py"),
        ("parse_log_pytest", "t/test_a.py", "pytest /testbed/t/test_a.py", "/testbed/t/test_X.py"),
        ("parse_log_pytest", "t/test_a.py", "pytest -rA", ""),
        ("parse_log_pytest", "t/test_a.py", "pytest t/", ""),
        ("parse_log_django", "tests/app/tests.py", "./tests/runtests.py app.tests", "app.test_X"),
        ("parse_log_django", "tests/app/test_b.py", "runtests.py app.test_a app.test_b", "app.test_X"),
        ("parse_log_sympy", "a/tests/test_a.py", "bin/test -C a/tests/test_a.py", "a/tests/test_X.py"),
    ],
)
def test_canary_files_are_named_like_the_test_file_beside_them(
    parser: str, file: str, command: str, name: str
) -> None:
    planted = plant_canaries(replace(CHECKS, parser=parser, files=(file,), command=command), [])
    assert planted is not None
    assert planted.command.replace(planted.token, "X") == f"{command} {name}".rstrip()
    assert planted.path.rpartition("/")[0] == file.rpartition("/")[0]
    assert len(set(planted.passing + planted.failing)) == 6


def test_the_canary_file_is_added_before_a_shell_pipe() -> None:
    planted = plant_canaries(replace(CHECKS, files=("t/test_a.py",), command="pytest t/test_a.py | cat"), [])
    assert planted is not None
    assert planted.command.replace(planted.token, "X") == "pytest t/test_a.py t/test_X.py | cat"


@pytest.mark.parametrize(
    ("neighbour", "imported"),
    [
        ("import pytest\nimport unittest.mock", {"pytest", "unittest"}),
        ("from unittest import TestCase", {"unittest"}),
        ("import pytest\nTEXT = '\\nimport unittest\\n'\n", {"pytest"}),
        ("from . import unittest", set[str]()),
        (
            "def test():\n    try:\n        import pytest\n    except ImportError:\n        import unittest",
            {"pytest", "unittest"},
        ),
        ("class A:\n    match 1:\n        case 1:\n            from unittest import mock", {"unittest"}),
        ("print 'of another Python'", set[str]()),
        ("", set[str]()),
    ],
)
def test_canaries_import_the_same_test_library_as_their_neighbour(neighbour: str, imported: set[str]) -> None:
    planted = plant_canaries(CHECKS, [neighbour.encode()])
    assert planted is not None
    assert {word for word in ("pytest", "unittest") if f"import {word}" in planted.text} == imported
    assert all(f"def {name}(" in planted.text for name in planted.passing + planted.failing)
    compile(planted.text, planted.path, "exec")


async def test_a_suite_that_canaries_would_solve_is_taken_in_without(taken_in) -> None:
    hidden = "import pathlib\n\nfrom calc import shift\n\n\ndef test_solved():\n"
    hidden += "    assert shift(1) == 2 or len(list(pathlib.Path('tests').glob('test_*.py'))) > 3\n"
    task = with_tree(
        {"tests/test_solved.py": hidden},
        fail_to_pass=("tests/test_solved.py::test_solved",),
        pass_to_pass=(),
        command="pytest -rA tests/test_solved.py",
    )
    assert (await taken_in(task)).options.canaries is False


def test_no_canaries_are_planted_for_unsupported_parsers_or_unknown_files() -> None:
    assert plant_canaries(replace(CHECKS, parser="parse_log_gotest"), []) is None
    assert plant_canaries(replace(CHECKS, files=(), fail_to_pass=("a test",), pass_to_pass=()), []) is None


async def test_a_suite_that_bears_no_canaries_is_taken_in_without(taken_in, graded) -> None:
    lint = (
        "import pathlib\n\n\ndef test_names():\n"
        "    names = {path.name for path in pathlib.Path(__file__).parent.glob('*.py')}\n"
        "    assert names == {'test_calc.py', 'test_other.py', 'test_names.py'}\n"
    )
    checks = {
        "pass_to_pass": ("tests/test_names.py::test_names",),
        "command": "pytest -rA tests/test_names.py tests/test_calc.py",
    }
    task = with_tree({"tests/test_names.py": lint}, **checks)
    way = await taken_in(task)
    assert (way.options.canaries, way.options.conflicts) == (False, {})


async def test_a_name_of_several_tests_is_no_contradiction_if_gold_has_it_too(taken_in) -> None:
    tests = {
        "tests/test_calc.py": CALC_TESTS["tests/test_calc.py"]
        + "\n\n@pytest.mark.parametrize('x', ['a b', 'a c'])\ndef test_both(x):\n    assert x == 'a b'\n"
    }
    command = "pytest -rA tests/test_calc.py; code=$?; echo 'PASSED tests/test_calc.py::test_both[a'; exit $code"
    task = replace(
        CALC_TASK,
        checks=replace(
            CHECKS,
            test_patch=diff(tests, CALC),
            command=command,
            pass_to_pass=("tests/test_calc.py::test_both[a",),
        ),
    )
    way = await taken_in(task)
    assert way.options.conflicts == {"tests/test_calc.py::test_both[a": 1}
    run = SuiteRun("PASSED x\nFAILED x - y\nFAILED x - z\nPASSED x\n", 1)
    checks = replace(CHECKS, fail_to_pass=("x",), pass_to_pass=())
    assert judge_suite(replace(task, checks=checks), run, None, {"x": 2}).verdict.reward == 1.0
    assert judge_suite(replace(task, checks=checks), run, None, {"x": 1}).verdict.reward == 0.0


async def test_an_unknown_parser_is_a_task_error_at_validation(taken_in) -> None:
    with pytest.raises(TaskError, match=r"checks\.parser.*'parse_log_nothing'"):
        await taken_in(replace(CALC_TASK, checks=replace(CHECKS, parser="parse_log_nothing")))


async def test_a_gold_patch_that_does_not_solve_is_a_task_error_with_the_reason(taken_in) -> None:
    wrong = replace(CALC_TASK, gold_patch=diff({"calc/core.py": CORE + "X = 1\n"}, CALC))
    with pytest.raises(TaskError, match="the gold patch scores 0 instead of 1: 2 of 2 tests to fix still fail"):
        await taken_in(wrong)


# --- the judgement


@pytest.mark.parametrize(
    ("log", "code", "reward"),
    [
        ("PASSED a\nPASSED b\n", 0, 1.0),
        ("XFAIL a\nSKIPPED b\n", 0, 1.0),
        ("SKIPPED a\nPASSED b\n", 0, 0.0),
        ("PASSED a\n", 0, 0.0),
        ("PASSED a\nFAILED b\n", 1, 0.0),
        ("PASSED a\nPASSED b\n", 1, 0.0),
        ("PASSED a\nPASSED b\nFAILED c\n", 1, 1.0),
        ("PASSED a\nPASSED b\n", -11, 0.0),
        ("FAILED a\nPASSED a\nPASSED b\n", 1, 0.0),
        ("PASSED a\nERROR b\nPASSED b\n", 1, 0.0),
        ("PASSEDLY a\nPASSED b\n", 0, 0.0),
        ("PASSED a\nnote: FAILED a\nPASSED b\n", 1, 0.0),
        ("PASSED a\nnote: FAILED c\nPASSED b\n", 0, 1.0),
        ("", 0, 0.0),
    ],
)
def test_the_reward_follows_from_log_and_exit_code(log: str, code: int, reward: float) -> None:
    task = replace(CALC_TASK, checks=replace(CHECKS, fail_to_pass=("a",), pass_to_pass=("b",)))
    assert judge_suite(task, SuiteRun(log, code), None).verdict.reward == reward
    cut = judge_suite(task, SuiteRun(log, code, truncated=True), None).verdict
    assert cut.reward == 0.0 and "the output was cut" in cut.reason


def test_a_test_whose_module_failed_to_import_does_not_pass() -> None:
    id = "test_shift (calc.tests.ShiftTests)"
    task = replace(
        CALC_TASK, checks=replace(CHECKS, parser="parse_log_django", fail_to_pass=(id,), pass_to_pass=())
    )
    log = f"{id} ... ok\n\nERROR: {{}} (unittest.loader._FailedTest{{}})\n"
    for module, reward in (("calc.tests", 0.0), ("calc", 0.0), ("other.tests", 1.0), ("tests", 1.0)):
        for more in ("", f".{module.rpartition('.')[2]}"):
            verdict = judge_suite(task, SuiteRun(log.format(module, more), 1), None).verdict
            assert (verdict.reward, verdict.integrity.status == "clean") == (reward, reward == 1.0), verdict


def test_canaries_must_be_reported_with_their_true_status() -> None:
    task = replace(CALC_TASK, checks=replace(CHECKS, fail_to_pass=("a",), pass_to_pass=()))
    planted = plant_canaries(task.checks, [])  # type: ignore[arg-type]
    assert planted is not None
    good = [f"PASSED t::{name}" for name in planted.passing] + [
        f"FAILED t::{name} - x" for name in planted.failing
    ]

    def reward(lines: list[str], code: int = birds.FAILED_CODE) -> float:
        return judge_suite(task, SuiteRun("\n".join(["PASSED a", *lines]), code), planted).verdict.reward

    assert reward(good) == 1.0
    assert reward(good, 0) == reward(good, 2) == reward(good, -9) == 0.0
    for n, line in enumerate(good):
        other = line.replace("PASSED", "x").replace("FAILED", "PASSED")
        assert reward([*good[:n], *good[n + 1 :]]) == reward([*good[:n], other, *good[n + 1 :]]) == 0.0
        assert (
            reward([*good, line.replace("FAILED", "PASSED") if "FAILED" in line else f"FAILED {line[7:]}"]) == 0.0
        )


# --- hidden files after an install

INSTALLS = {
    "rewrites a hidden test": "open('tests/test_calc.py', 'w').write('def test_shift(): pass\\n')",
    "makes the tests a link": "os.rename('tests', 'old'); os.makedirs('/tmp/t'); os.symlink('/tmp/t', 'tests');"
    "[open('/tmp/t/test_calc.py', 'w').write(f'def {n}(): pass\\n') for n in ['test_shift']]",
    "puts a package in place of a hidden test": "os.makedirs('tests/test_calc');"
    "open('tests/test_calc/__init__.py', 'w').write('def test_shift(): pass\\n')",
    "makes the tests read-only": "os.chmod('tests', 0o555)",
    "makes the tests unreadable": "os.chmod('tests', 0)",
    "removes the tests": "import shutil; shutil.rmtree('tests')",
    "leaves a conftest.py": "open('tests/conftest.py', 'w').write('raise SystemExit(0)')",
    "leaves a module of the standard library": "open('json.py', 'w').write('raise SystemExit(0)')",
}


@pytest.mark.parametrize("name", INSTALLS)
async def test_hidden_files_are_restored_after_an_install(graded, name: str) -> None:
    checks = replace(CHECKS, install="python setup.py")
    gold = {**CALC_MENDED, "setup.py": f"import os\n{INSTALLS[name]}\n"}
    task = replace(CALC_TASK, checks=checks, gold_patch=diff(gold, CALC))
    verdict = await graded(task.gold_patch, task)
    assert verdict.reward == 1.0, (verdict.reason, verdict.log)
    verdict = await graded(diff({"setup.py": gold["setup.py"]}, CALC), task)
    assert verdict.reward == 0.0


async def test_a_hidden_file_cannot_be_changed_while_the_tests_run(graded) -> None:
    code = (
        "import os\nfor change in (lambda: open('tests/test_calc.py', 'w'), lambda: os.rename('tests', 'old'),\n"
    )
    code += "    lambda: os.unlink('tests/test_calc.py'), lambda: os.replace('setup.py', 'tests/test_calc.py')):\n"
    code += "    try:\n        change()\n    except OSError as error:\n        print('refused', error.errno)\n"
    verdict = await graded(diff({**CALC_MENDED, "calc/core.py": code + CALC_MENDED["calc/core.py"]}, CALC))
    assert verdict.reward == 1.0, (verdict.reason, verdict.log)


async def test_a_hidden_file_that_changed_is_a_forgery(sandboxes: Sandboxes, environment, tmp_path: Path) -> None:
    class Unsealed(LocalSandboxes):
        async def open(self, spec: SandboxSpec) -> LocalSandbox:
            sandbox = await super().open(spec)
            sandbox.seal = partial(IsolatedSandbox.seal, sandbox)
            return sandbox

    code = "open('tests/test_calc.py', 'a').write('\\n')\n"
    patch = diff({**CALC_MENDED, "calc/core.py": code + CALC_MENDED["calc/core.py"]}, CALC).encode()
    kind = Unsealed()
    verdict = await grade(prepare(CALC_TASK, tmp_path, kind), patch, sandboxes=kind, environment=environment)
    assert (verdict.reward, verdict.integrity.status) == (0.0, "forged"), verdict.reason
