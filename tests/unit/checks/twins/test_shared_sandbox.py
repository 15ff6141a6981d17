"""Versions that run one after the other in one sandbox: each must find it as if it were the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.checks.twins.run import VersionRun, WrittenVersion, run_versions
from understudy.errors import ProcessKilled
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare, sandbox_spec
from understudy.types import Files, PytestChecks, Task

pytestmark = pytest.mark.usefixtures("isolation")

NAME = "test_it.py"
TASK = Task("shared", "r", "i", Files({"calc.py": "calls = []\n"}), PytestChecks({}, ("t",)), "")
PURE = "import calc\ndef test_NUMBER():\n    calc.calls.append(1)\n    assert calc.calls == [1]\n"


async def runs_of(
    *sources: str, cache: Path, sandboxes: LocalSandboxes, environment: TaskEnvironment, timeout_s: float = 60.0
) -> list[VersionRun]:
    """What runs of these versions of a test file; NUMBER stands in each for its place."""
    versions = [
        WrittenVersion({NAME: text.replace("NUMBER", str(number))}, {}) for number, text in enumerate(sources)
    ]
    sandbox = await sandboxes.open(sandbox_spec(prepare(TASK, cache, sandboxes), environment))
    try:
        await sandbox.write(f"{sandbox.workdir}/{NAME}", versions[0].files[NAME].encode())
        await sandbox.write(f"{sandbox.workdir}/patched.txt", b"0")
        checks = PytestChecks(versions[0].files, (f"{NAME}::test_0",))
        return await run_versions(sandbox, checks, versions, timeout_s=timeout_s)
    finally:
        await sandbox.close()


async def test_versions_that_leave_nothing_share_a_sandbox_and_no_state(
    tmp_path: Path, sandboxes: LocalSandboxes, environment: TaskEnvironment
) -> None:
    broken = "def test_NUMBER():\n    import os\n    os._exit(7)\n"
    runs = await runs_of(PURE, broken, PURE, cache=tmp_path, sandboxes=sandboxes, environment=environment)
    assert [run.outcomes for run in runs] == [{f"{NAME}::test_0": "passed"}, {}, {f"{NAME}::test_2": "passed"}]
    assert [run.exit_code for run in runs] == [0, 7, 0]
    (alone,) = await runs_of(PURE, cache=tmp_path, sandboxes=sandboxes, environment=environment)
    assert alone.outcomes == {f"{NAME}::test_0": "passed"}


@pytest.mark.parametrize(
    "statement",
    [
        "open('left', 'w')",
        "open('/tmp/left', 'w')",
        "open('calc.py', 'a').write('# more')",
        "open('patched.txt', 'r+').write('1')",
        "(os.unlink('calc.py'))",
        "os.chmod('.', 0o500)",
        "subprocess.Popen(['sleep', '60'], start_new_session=True)",
    ],
    ids=["file", "temporary file", "change", "change of the same size", "removal", "mode", "process"],
)
async def test_no_version_runs_where_another_left_something(
    statement: str, tmp_path: Path, sandboxes: LocalSandboxes, environment: TaskEnvironment
) -> None:
    leaving = f"import os, subprocess\ndef test_NUMBER():\n    {statement}\n"
    runs = await runs_of(PURE, leaving, PURE, cache=tmp_path, sandboxes=sandboxes, environment=environment)
    assert [run.outcomes for run in runs] == [
        {f"{NAME}::test_0": "passed"},
        {f"{NAME}::test_1": "passed"},
    ]


KILLED = "import os\ndef test_NUMBER():\n    os.kill(os.getpid(), 9)\n"
ENDLESS = "import time\ndef test_NUMBER():\n    time.sleep(600)\n"


async def test_only_the_first_version_shows_that_it_was_killed_or_did_not_end(
    tmp_path: Path, sandboxes: LocalSandboxes, environment: TaskEnvironment
) -> None:
    for second in (KILLED, ENDLESS):
        (run,) = await runs_of(
            PURE, second, cache=tmp_path, sandboxes=sandboxes, environment=environment, timeout_s=2.0
        )
        assert (run.outcomes, run.timed_out) == ({f"{NAME}::test_0": "passed"}, False), second
    (run,) = await runs_of(
        ENDLESS, PURE, cache=tmp_path, sandboxes=sandboxes, environment=environment, timeout_s=2.0
    )
    assert run.timed_out
    with pytest.raises(ProcessKilled):
        await runs_of(KILLED, PURE, cache=tmp_path, sandboxes=sandboxes, environment=environment)
