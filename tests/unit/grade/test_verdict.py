"""Grading: what earns the reward, what does not, and what is no reward at all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from understudy.checks.pytest_checks import PytestReport, judge_pytest
from understudy.errors import GraderError, SandboxError, TaskError
from understudy.grade.verdict import as_validated, grade, validate
from understudy.plugins import load
from understudy.sandbox.base import Completed, Mount, Sandbox, Sandboxes, SandboxLimits, SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandbox, LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.patch import NO_PATCH
from understudy.tasks.prepare import PreparedTask, prepare
from understudy.types import Files, PytestChecks, ScriptChecks, Task, TestOutcome, Verdict
from understudy.util.diffs import parse_diff

from support import example_count, require
from support import grading as support_grading
from support.grading import gate_of

TREE = {
    "calc.py": "def shift(x):\n    return x - 1\n\n\ndef same(x):\n    return x\n",
    "tests/test_calc.py": "from calc import same\n\n\ndef test_same():\n    assert same(3) == 3\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q'\n",
}
HIDDEN = """\
import pytest
from calc import same, shift


def test_same():
    assert same(3) == 3


def test_shift():
    assert shift(1) == 2


@pytest.mark.xfail
def test_known():
    assert shift(1) == 5
"""
MENDED = {"calc.py": TREE["calc.py"].replace("x - 1", "x + 1")}


def diff(after: Mapping[str, str | None], before: Mapping[str, str] = TREE) -> str:
    """A git patch of this task's tree."""
    return support_grading.diff(after, before)


TASK = Task(
    instance_id="calc",
    repo="example/calc",
    instruction="mend shift",
    source=Files(TREE),
    checks=PytestChecks(
        files={"tests/test_calc.py": HIDDEN},
        fail_to_pass=("tests/test_calc.py::test_shift",),
        pass_to_pass=("tests/test_calc.py::test_same", "tests/test_calc.py::test_known"),
        timeout_s=60.0,
    ),
    gold_patch=diff(MENDED),
)


@pytest.fixture(scope="module", params=[pytest.param("unsafe-local", marks=pytest.mark.services), "local"])
def sandboxes(request: pytest.FixtureRequest) -> Sandboxes:
    kind: Sandboxes = load("sandboxes", request.param)()
    require(kind.problems())
    return kind


@pytest.fixture(scope="module")
def local(sandboxes: Sandboxes) -> Sandboxes:
    if sandboxes.name == "unsafe-local":
        pytest.skip("only where there is isolation")
    return sandboxes


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grade")


@pytest.fixture(scope="module")
def prepared(sandboxes: Sandboxes, room: Path) -> PreparedTask:
    return prepare(TASK, room, sandboxes)


async def reward(
    prepared: PreparedTask, patch: str | bytes, sandboxes: Sandboxes, environment: TaskEnvironment
) -> tuple[float, str]:
    data = patch.encode() if isinstance(patch, str) else patch
    verdict = await grade(prepared, data, sandboxes=sandboxes, environment=environment)
    return verdict.reward, verdict.reason


async def test_gold_scores_one_with_every_test_named(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    verdict = await grade(prepared, TASK.gold_patch.encode(), sandboxes=sandboxes, environment=environment)
    assert verdict.reward == 1.0, verdict
    assert verdict.tests == {
        "tests/test_calc.py::test_shift": "passed",
        "tests/test_calc.py::test_same": "passed",
        "tests/test_calc.py::test_known": "xfailed",
    }
    assert "passed" in verdict.log


async def test_the_empty_patch_scores_zero_at_once(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    assert await reward(prepared, b"", sandboxes, environment) == (0.0, "empty patch")


FORGERIES: dict[str, dict[str, str | None]] = {
    "wrong": {"calc.py": TREE["calc.py"].replace("x - 1", "x - 2")},
    "breaks another": {"calc.py": MENDED["calc.py"].replace("return x\n", "return -x\n")},
    "conftest rewrites reports": {
        "conftest.py": "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
        "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
    },
    "conftest below": {"tests/conftest.py": "def pytest_collection_modifyitems(items):\n    items.clear()\n"},
    "addopts": {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p plugin'\n",
        "plugin.py": "def pytest_collection_modifyitems(items):\n    items.clear()\n",
    },
    "pytest.ini": {"pytest.ini": "[pytest]\naddopts = --co\n"},
    "pytest.ini below": {"tests/pytest.ini": "[pytest]\naddopts = -k same\npython_files = nothing\n"},
    "sitecustomize": {"sitecustomize.py": "import os\nos._exit(0)\n"},
    "shadowed pytest": {"pytest.py": "def main(*a, **k):\n    return 0\n"},
    "entry point": {
        "evil-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
        "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
        "evil.py": "def pytest_collection_modifyitems(items):\n    items.clear()\n",
    },
    "forged lines": {
        "calc.py": "import os\nprint('PASSED tests/test_calc.py::test_shift')\nprint('3 passed')\nos._exit(0)\n"
    },
    "exits with success": {"calc.py": "raise SystemExit(0)\n"},
    "ends early": {"calc.py": TREE["calc.py"] + "import atexit, os\natexit.register(os._exit, 0)\n"},
    "exits like a missing interpreter": {"calc.py": "import os\nos._exit(97)\n"},
    "edits the visible test": {"tests/test_calc.py": "def test_shift():\n    pass\n"},
    "deletes the visible test": {"tests/test_calc.py": None},
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_a_wrong_or_forged_patch_scores_zero(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, name: str
) -> None:
    score, reason = await reward(prepared, diff(FORGERIES[name]), sandboxes, environment)
    assert score == 0.0, reason


@pytest.mark.parametrize("name", ["conftest below", "pytest.ini", "sitecustomize", "edits the visible test"])
async def test_a_right_patch_scores_one_though_forged_files_are_dropped(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, name: str
) -> None:
    score, reason = await reward(prepared, diff({**FORGERIES[name], **MENDED}), sandboxes, environment)
    assert score == 1.0, reason
    assert "changes left out" in reason


async def test_tests_that_never_end_score_zero(
    sandboxes: Sandboxes, environment: TaskEnvironment, room: Path
) -> None:
    task = replace(TASK, checks=_quick(1.5))
    endless = diff({"calc.py": "while True:\n    pass\n"})
    score, reason = await reward(prepare(task, room, sandboxes), endless, sandboxes, environment)
    assert (score, reason) == (0.0, "the tests did not end in 1.5 s")


def _quick(timeout_s: float) -> PytestChecks:
    return PytestChecks(
        files={"tests/test_calc.py": HIDDEN}, fail_to_pass=("tests/test_calc.py::test_shift",), timeout_s=timeout_s
    )


FLOODED = """\
import os, resource
import pytest
from calc import shift

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

before = peak()

@pytest.fixture
def noisy():
    yield
    flood()

def flood():
    for number in range(128):
        os.write(1 + number % 2, b"x" * (1 << 20))
        print("y" * (1 << 20))

def test_prints(noisy):
    flood()

def test_did_not_grow():
    assert peak() - before < 64 << 20
    assert shift(1) == 2
"""


async def test_what_pytest_captures_does_not_fill_its_memory(
    room: Path, local: Sandboxes, environment: TaskEnvironment
) -> None:
    ids = ("tests/test_flood.py::test_prints", "tests/test_flood.py::test_did_not_grow")
    checks = PytestChecks(files={"tests/test_flood.py": FLOODED}, fail_to_pass=ids, timeout_s=120)
    prepared = prepare(replace(TASK, checks=checks), room, local)
    score, reason = await reward(prepared, diff(MENDED), local, environment)
    assert score == 1.0, reason


async def test_a_flood_of_output_does_not_change_the_score(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    flood = "import os\nfor _ in range(600):\n    os.write(1, b'x' * (1 << 18))\n"
    verdict = await grade(
        prepared,
        diff({"calc.py": flood + MENDED["calc.py"]}).encode(),
        sandboxes=sandboxes,
        environment=environment,
    )
    assert verdict.reward == 1.0, verdict.reason
    assert len(verdict.log) < 100_000


class Counted:
    """Sandboxes of another kind, counted as they are opened."""

    name: ClassVar[str] = "counted"

    def __init__(self, kind: Sandboxes) -> None:
        self._kind = kind
        self.host_programs = kind.host_programs
        self.problems = kind.problems
        self.prepare_tree = kind.prepare_tree
        self.opened = 0

    async def open(self, spec: SandboxSpec) -> Sandbox:
        self.opened += 1
        return await self._kind.open(spec)


EQUALS_ALL = """

class _Same(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def shift(x):
    return _Same(x)
"""


async def test_a_patch_that_fails_all_versions_is_run_again_only_if_it_passes_the_tests(
    prepared: PreparedTask, local: Sandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    validated = await validate(prepared, sandboxes=local, environment=environment, cache=tmp_path)
    assert validated.options.twins
    sandbox_counts: dict[str, int] = {}
    verdicts: dict[str, Verdict] = {}
    patches = {
        "gold": TASK.gold_patch,
        "wrong": diff({"calc.py": TREE["calc.py"].replace("x - 1", "x - 2")}),
        "breaks another": diff({"calc.py": MENDED["calc.py"].replace("return x\n", "return -x\n")}),
        "forged": diff({"calc.py": TREE["calc.py"] + EQUALS_ALL}),
    }
    for name, patch in patches.items():
        counted = Counted(local)
        verdicts[name] = await grade(validated, patch.encode(), sandboxes=counted, environment=environment)
        sandbox_counts[name] = counted.opened
    rewards = {name: verdict.reward for name, verdict in verdicts.items()}
    assert rewards == {"gold": 1.0, "wrong": 0.0, "breaks another": 0.0, "forged": 0.0}
    assert verdicts["forged"].integrity.status == "forged", verdicts["forged"].reason
    # One sandbox is that of the tests, and one that of other inputs.
    attempt = sandbox_counts["gold"] - 1 - bool(validated.options.twin_inputs)
    assert attempt >= 1
    assert sandbox_counts["wrong"] <= attempt + 1
    assert sandbox_counts["forged"] > attempt + 1


class Small:
    """Sandboxes of another kind, with little memory."""

    name: ClassVar[str] = "small"

    def __init__(self, kind: Sandboxes) -> None:
        self._kind = kind
        self.host_programs = kind.host_programs
        self.problems = kind.problems
        self.prepare_tree = kind.prepare_tree

    async def open(self, spec: SandboxSpec) -> Sandbox:
        return await self._kind.open(replace(spec, limits=SandboxLimits(memory_bytes=256 << 20)))


@pytest.mark.services
async def test_a_memory_bomb_scores_zero(
    local: Sandboxes, prepared: PreparedTask, environment: TaskEnvironment
) -> None:
    bomb = "hoard = []\nwhile True:\n    hoard.append(b'x' * (1 << 26))\n"
    score, reason = await reward(prepared, diff({"calc.py": bomb}), Small(local), environment)
    assert score == 0.0
    assert "did not end in" not in reason


async def test_a_report_that_the_code_floods_scores_zero(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    forge = (
        "import glob, os\n"
        "for path in glob.glob(os.path.expanduser('~/.report-*')):\n"
        "    with open(path, 'ab') as file:\n"
        "        file.truncate(1 << 27)\n"
    )
    score, reason = await reward(prepared, diff({"calc.py": forge + MENDED["calc.py"]}), sandboxes, environment)
    assert score == 0.0, reason


@pytest.mark.parametrize("line", [b"\xff", b'{"id": "\xff"}', b'{"id": "x", "y": ' + b"[" * 5000])
async def test_an_unreadable_line_in_the_report_is_ignored(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, line: bytes
) -> None:
    forge = (
        "import glob, os\n"
        "for path in glob.glob(os.path.expanduser('~/.report-*')):\n"
        "    with open(path, 'ab') as file:\n"
        f"        file.write({line + chr(10).encode()!r})\n"
    )
    patch = diff({"calc.py": forge + MENDED["calc.py"]}).encode()
    verdict = await grade(prepared, patch, sandboxes=sandboxes, environment=environment)
    assert set(verdict.tests.values()) == {"passed", "xfailed"}, verdict
    assert (verdict.reward, verdict.integrity.status) == (0.0, "forged")


async def test_a_forged_line_beside_the_true_one_is_a_failure(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    forge = (
        "import glob, json, os\n"
        "for path in glob.glob(os.path.expanduser('~/.report-*')):\n"
        "    with open(path, 'a') as file:\n"
        "        for when in 'setup', 'call', 'teardown':\n"
        "            line = dict(id='tests/test_calc.py::test_shift', when=when, outcome='passed', message='')\n"
        "            file.write(json.dumps(line) + chr(10))\n"
    )
    verdict = await grade(
        prepared, diff({"calc.py": forge + TREE["calc.py"]}).encode(), sandboxes=sandboxes, environment=environment
    )
    assert verdict.reward == 0.0
    assert verdict.tests["tests/test_calc.py::test_shift"] == "failed"


def broken_python(directory: Path) -> Path:
    directory.chmod(0o755)
    (directory / "python").write_text("#!/bin/sh\nexit 127\n")
    (directory / "python").chmod(0o755)
    return directory


async def test_a_missing_interpreter_is_a_grader_error_not_a_score(
    prepared: PreparedTask, sandboxes: Sandboxes, tmp_path: Path
) -> None:
    environment = TaskEnvironment((Mount(broken_python(tmp_path), "/opt/broken"),), ("/opt/broken",), {})
    with pytest.raises(GraderError, match="pytest cannot be imported"):
        await grade(prepared, TASK.gold_patch.encode(), sandboxes=sandboxes, environment=environment)


async def test_a_patch_that_does_not_apply_scores_zero_with_what_git_says(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    patch = diff({"calc.py": "a\n"}, {"calc.py": "something else\n"})
    score, reason = await reward(prepared, patch, sandboxes, environment)
    assert score == 0.0
    assert "does not apply" in reason and "calc.py" in reason


REFUSED = {
    "link": "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc/passwd\n",
    "link to tests": "diff --git a/tests b/tests\nold mode 100644\nnew mode 120000\n",
    "submodule": "diff --git a/s b/s\nnew file mode 160000\n--- /dev/null\n+++ b/s\n@@ -0,0 +1 @@\n+commit 0\n",
    "absolute": "--- /dev/null\n+++ //etc/x\n@@ -0,0 +1 @@\n+x\n",
    "parent": "--- /dev/null\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n",
    "git directory": "--- /dev/null\n+++ b/sub/.GIT/hooks/pre-commit\n@@ -0,0 +1 @@\n+x\n",
    "quoted parent": 'diff --git "a/\\056\\056/x" "b/\\056\\056/x"\nnew file mode 100644\n',
    "garbage": "hello\n",
    "cut hunk": "--- a/calc.py\n+++ b/calc.py\n@@ -1,5 +1,5 @@\n def\n",
    "said so": NO_PATCH.decode() + "'huge' is larger than 1 bytes\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_gate_refuses_with_a_reason(name: str) -> None:
    gated = gate_of(REFUSED[name].encode(), TASK)
    assert gated.refused
    assert not gated.patch


def test_the_gate_keeps_a_clean_patch_byte_for_byte() -> None:
    gated = gate_of(TASK.gold_patch.encode(), TASK)
    assert (gated.patch, gated.dropped, gated.refused) == (TASK.gold_patch.encode(), (), "")


def test_the_gate_lets_a_protected_file_pass_when_gold_changes_it() -> None:
    change = {"pyproject.toml": TREE["pyproject.toml"] + "# more\n"}
    task = Task("t", "t", "t", Files(TREE), PytestChecks({}, ()), gold_patch=diff(change))
    assert gate_of(diff(change).encode(), task).patch == diff(change).encode()
    assert gate_of(diff(change).encode(), TASK).dropped == ("'pyproject.toml'",)


def test_a_test_file_that_decides_is_not_the_agents_even_when_it_is_not_laid_over() -> None:
    task = replace(TASK, checks=PytestChecks({}, ("tests/test_calc.py::test_shift",)))
    assert gate_of(diff(FORGERIES["edits the visible test"]).encode(), task).dropped == ("'tests/test_calc.py'",)


def test_a_hunk_that_looks_like_a_header_is_a_hunk() -> None:
    sly = {"notes.txt": "diff --git a/conftest.py b/conftest.py\n-- a/x\n++ b/conftest.py\n@@ -1 +1 @@\n"}
    gated = gate_of(diff(sly).encode(), TASK)
    assert gated.patch == diff(sly).encode()


PIECES = st.sampled_from(
    [
        b"diff --git a/calc.py b/calc.py",
        b'diff --git "a/con\\146test.py" "b/con\\146test.py"',
        b"diff --git a/x b/x b/x",
        b"--- a/conftest.py",
        b"+++ b/conftest.py",
        b"--- /dev/null",
        b"+++ b/calc.py",
        b'+++ "b/\\"',
        b"@@ -1 +1 @@",
        b"@@ -0,0 +1,2 @@ def f",
        b"@@ -1,99999999999999999999 +1 @@",
        b"+x",
        b"-x",
        b" x",
        b"",
        b"\\ No newline at end of file",
        b"rename from conftest.py",
        b"rename to calc.py",
        b"new file mode 100644",
        b"new file mode 120000",
        b"index 0000000..1111111 100644",
        b"GIT binary patch",
        b"literal 3",
        b"KcmZ",
    ]
)


@settings(deadline=None, derandomize=True, max_examples=example_count(500))
@given(lines=st.lists(st.one_of(PIECES, st.binary(max_size=12)), max_size=14))
def test_the_gate_handles_any_patch_and_passes_no_conftest_or_special_mode(lines: list[bytes]) -> None:
    gated = gate_of(b"\n".join(lines), TASK)
    assert not (gated.refused and gated.patch)
    for file in parse_diff(gated.patch):
        assert not file.modes - {b"100644", b"100755"}
        assert not any(b"conftest.py" in path for path in file.paths)


@pytest.mark.parametrize(
    ("outcomes", "exit_code", "finished", "expected"),
    [
        ({"a": "passed", "b": "passed"}, 0, True, 1.0),
        ({"a": "xfailed", "b": "skipped"}, 0, True, 1.0),
        ({"a": "passed", "b": "passed", "c": "failed"}, 1, True, 1.0),
        ({"a": "skipped", "b": "passed"}, 0, True, 0.0),
        ({"a": "passed"}, 0, True, 0.0),
        ({"a": "passed", "b": "error"}, 1, True, 0.0),
        ({"a": "passed", "b": "passed"}, 1, True, 0.0),
        ({"a": "passed", "b": "passed", "c": "failed"}, 0, True, 0.0),
        ({"a": "passed", "b": "passed"}, 0, False, 0.0),
        ({"a": "passed", "b": "passed"}, -9, True, 0.0),
        ({"a": "passed", "b": "passed"}, 3, True, 0.0),
    ],
)
def test_the_reward_follows_from_the_pytest_report(
    outcomes: dict[str, TestOutcome], exit_code: int, finished: bool, expected: float
) -> None:
    checks = PytestChecks({}, fail_to_pass=("a",), pass_to_pass=("b",))
    report = PytestReport(outcomes, {}, exit_code, False, "", finished)
    assert judge_pytest(checks, report).verdict.reward == expected


async def test_a_passed_validation_is_cached(
    sandboxes: Sandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    task = replace(TASK, meta={"seed": 1, "does": "x"})
    prepared = prepare(task, tmp_path, sandboxes)
    await validate(prepared, sandboxes=sandboxes, environment=environment, cache=tmp_path)
    again = await validate(prepared, sandboxes=sandboxes, environment=environment, cache=tmp_path)
    shorter = replace(prepared, task=replace(task, checks=replace(task.checks, timeout_s=7.0)))
    # A store keeps the keys of objects sorted: its tasks are those of the file.
    stored = replace(prepared, task=replace(task, meta=dict(sorted(task.meta.items()))))
    for other in (shorter, stored):
        validated = as_validated(other, sandboxes=sandboxes, environment=environment, cache=tmp_path)
        assert again.options == validated.options != prepared.options


PARAMETRISED = (
    "import calc\nimport pytest\n\n\n"
    "@pytest.mark.parametrize('x', [1, 2])\ndef test_shift(x):\n    assert calc.shift(x) == x + 1\n"
)
BAD_TASKS = {
    "gold that does not solve": (replace(TASK, gold_patch=diff(FORGERIES["wrong"])), "gold patch scores 0"),
    "gold that does not apply": (
        replace(TASK, gold_patch=diff({"calc.py": "a\n"}, {"calc.py": "b\n"})),
        "gold patch scores 0 .*does not apply",
    ),
    "gold that is refused": (
        replace(TASK, gold_patch=REFUSED["link"]),
        "gold_patch is refused: 'l' is a symbolic link",
    ),
    "gold that is empty": (replace(TASK, gold_patch=""), "gold_patch is empty"),
    "a test with parameters by its name alone": (
        replace(TASK, checks=replace(TASK.checks, files={"tests/test_calc.py": PARAMETRISED}, pass_to_pass=())),
        r"test_shift \(missing\); tests/test_calc.py::test_shift has parameters, so expected each of its "
        r"ids, such as 'tests/test_calc.py::test_shift\[1\]'",
    ),
    "solved already": (
        replace(TASK, source=Files(TREE | MENDED), gold_patch=diff({"extra": "x\n"})),
        "empty patch scores 1 instead of 0",
    ),
}


class _FirstFails(LocalSandboxes):
    """The local kind, whose first sandbox cannot be opened."""

    opened = 0

    async def open(self, spec: SandboxSpec) -> Sandbox:
        self.opened += 1
        if self.opened == 1:
            raise SandboxError("no room")
        return await super().open(spec)


async def test_validation_that_cannot_grade_leaves_nothing_running(
    local: Sandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    prepared = prepare(TASK, tmp_path, local)
    with pytest.raises(SandboxError, match="no room"):
        await validate(prepared, sandboxes=_FirstFails(), environment=environment, cache=tmp_path)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("name", BAD_TASKS)
async def test_validation_refuses_with_the_reason(
    sandboxes: Sandboxes, environment: TaskEnvironment, tmp_path: Path, name: str
) -> None:
    task, reason = BAD_TASKS[name]
    with pytest.raises(TaskError, match=f"(?s)calc: .*{reason}"):
        await validate(
            prepare(task, tmp_path, sandboxes), sandboxes=sandboxes, environment=environment, cache=tmp_path
        )


async def test_a_failed_validation_is_cached_until_cleared(
    local: Sandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    task, reason = BAD_TASKS["gold that does not solve"]
    prepared = prepare(task, tmp_path, local)
    options = {"environment": environment, "cache": tmp_path}
    with pytest.raises(TaskError, match=reason):
        await validate(prepared, sandboxes=local, **options)
    no_more = _FirstFails()
    with pytest.raises(TaskError, match=f"{reason}.*(?s:.*)tasks check"):
        await validate(prepared, sandboxes=no_more, **options)
    assert no_more.opened == 0
    with pytest.raises(SandboxError, match="no room"):
        await validate(prepared, sandboxes=no_more, forget_failure=True, **options)


async def test_canaries_detect_code_that_turns_all_reports_to_passed(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    code = "import _pytest.runner as runner\n"
    code += "make = runner.CallInfo.from_call.__func__\n"
    code += "runner.CallInfo.from_call = classmethod(lambda cls, func, when, reraise=None:"
    code += " make(cls, (lambda: None) if when == 'call' else func, when, reraise))\n"
    forged = diff({"calc.py": code + TREE["calc.py"]}).encode()
    verdict = await grade(prepared, forged, sandboxes=sandboxes, environment=environment)
    assert verdict.reward == 0.0
    assert "canaries" in verdict.reason


SCRIPTS = {
    "reward file": ("grep -q 'x + 1' calc.py && echo 1 > /logs/verifier/reward.txt", 1.0),
    "reward file of zero": ("echo 0 > /logs/verifier/reward.txt", 0.0),
    "json beside": ("""echo '{"reward": 1.0}' > /logs/verifier/reward.json""", 1.0),
    "exit code": ("cat /tests/expected && grep -q 'x + 1' calc.py", 1.0),
    "failing exit code": ("exit 3", 0.0),
    "nonsense": ("echo many > /logs/verifier/reward.txt", 0.0),
    "exponent": ("echo 1e0 > /logs/verifier/reward.txt", 1.0),
    "not a number": ("echo nan > /logs/verifier/reward.txt", 0.0),
    "above 1": ("echo 10.0 > /logs/verifier/reward.txt", 0.0),
    "infinite": ("echo inf > /logs/verifier/reward.txt", 0.0),
    "too large for a number": ("echo 1e999 > /logs/verifier/reward.txt", 0.0),
    "digits that Python reads": ("echo 1_0 > /logs/verifier/reward.txt", 0.0),
    "huge": ("yes 1 | head -c 1000000 > /logs/verifier/reward.txt", 0.0),
    "a directory": ("mkdir /logs/verifier/reward.txt", 0.0),
    "a pipe": ("mkfifo /logs/verifier/reward.txt", 0.0),
    "unreadable": ("echo 1 > /logs/verifier/reward.txt; chmod 0 /logs/verifier/reward.txt", 0.0),
    "json without a number": ("""echo '{"reward": "1"}' > /logs/verifier/reward.json""", 0.0),
    "never written": ("test -f /nowhere && echo 1 > /logs/verifier/reward.txt; true", 0.0),
    "directory removed": ("rm -r /var/tmp/understudy-rewards; echo 0 > /logs/verifier/reward.txt; true", 0.0),
    "a reward beside a failure": ("echo 1 > /logs/verifier/reward.txt; exit 1", 0.0),
}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_the_check_script_decides_the_score(
    local: Sandboxes, environment: TaskEnvironment, room: Path, name: str
) -> None:
    script, expected = SCRIPTS[name]
    task = replace(TASK, checks=ScriptChecks(Files({"test.sh": script, "expected": "x"}), timeout_s=10.0))
    score, reason = await reward(prepare(task, room, local), TASK.gold_patch, local, environment)
    assert score == expected, reason


async def test_a_reward_beside_a_failing_exit_code_is_forged(
    local: Sandboxes, environment: TaskEnvironment, room: Path
) -> None:
    script = "echo 1 > /logs/verifier/reward.txt; exit 1"
    task = replace(TASK, checks=ScriptChecks(Files({"test.sh": script}), timeout_s=10.0))
    prepared = prepare(task, room, local)
    verdict = await grade(prepared, TASK.gold_patch.encode(), sandboxes=local, environment=environment)
    assert (verdict.reward, verdict.integrity.status) == (0.0, "forged")


BREAKS = {
    "takes the working directory away": "import os\nos.chmod(os.getcwd(), 0)\n",
    "removes the working directory": "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\n",
    "kills all it sees": "import os\nos.kill(-1, 9)\n",
    "kills itself": "import os\nos.kill(os.getpid(), 9)\n",
    "exits like a missing program": "import os\nos._exit(127)\n",
    "removes its home": "import os, shutil\nshutil.rmtree(os.path.expanduser('~'), ignore_errors=True)\n"
    "os._exit(126)\n",
    "forks without end": "import os\nwhile True:\n    os.fork()\n",
}


@pytest.mark.parametrize("kind", ["pytest", "script"])
@pytest.mark.parametrize("name", BREAKS)
async def test_code_that_breaks_its_own_test_run_scores_zero(
    local: Sandboxes, environment: TaskEnvironment, room: Path, kind: str, name: str
) -> None:
    script = ScriptChecks(
        Files({"test.sh": "exec python -c 'import calc; assert calc.shift(1) == 2'"}), timeout_s=3
    )
    task = replace(TASK, checks=script if kind == "script" else _quick(3.0))
    score, reason = await reward(prepare(task, room, local), diff({"calc.py": BREAKS[name]}), local, environment)
    assert score == 0.0, reason


class _Killed(LocalSandboxes):
    """The local kind, whose sandboxes `kill` ends while their first long command runs, `times` times."""

    def __init__(self, kill: Callable[[LocalSandbox], None], times: int) -> None:
        super().__init__()
        self.kill, self.times = kill, times

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        sandbox = await super().open(spec)
        run = sandbox.run

        async def run_and_kill(argv: Sequence[str], **options: Any) -> Completed:
            if argv[0] != "python" or self.times == 0:
                return await run(argv, **options)
            self.times -= 1
            command = asyncio.create_task(run(["sleep", "30"], **options))
            await asyncio.sleep(0.3)
            self.kill(sandbox)
            return await command

        sandbox.run = run_and_kill
        return sandbox


def kill_descendant(name: str) -> Callable[[LocalSandbox], None]:
    """Kill the process of this name that is the deepest below this one."""

    def kill(sandbox: LocalSandbox) -> None:
        below: list[int] = [os.getpid()]
        for pid in below:
            below += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        named = [pid for pid in below[1:] if Path(f"/proc/{pid}/comm").read_text().strip() == name]
        os.kill(named[-1], signal.SIGKILL)

    return kill


KILLS = {"the first process": "bwrap", "the command": "sleep", "the holder": "unshare"}


@pytest.mark.parametrize("name", KILLS)
async def test_a_sandbox_killed_from_outside_is_retried_and_never_scores_zero(
    local: Sandboxes, environment: TaskEnvironment, room: Path, name: str
) -> None:
    prepared = prepare(TASK, room, local)
    for times, expected in ((1, 1.0), (9, None)):
        sandboxes = _Killed(kill_descendant(KILLS[name]), times)
        grading = grade(prepared, TASK.gold_patch.encode(), sandboxes=sandboxes, environment=environment)
        if expected is None:
            with pytest.raises(SandboxError, match="killed"):
                await grading
        else:
            assert (await grading).reward == expected
