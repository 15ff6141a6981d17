"""What an agent may do to its sandbox, and what it may not inherit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from understudy.plugins import load
from understudy.sandbox.base import Sandboxes, SandboxSpec
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.patch import NO_PATCH, extract_patch
from understudy.tasks.prepare import prepare, sandbox_spec
from understudy.types import Files, PytestChecks, Task

from support import require


@pytest.fixture(scope="module")
def sandboxes() -> Sandboxes:
    kind: Sandboxes = load("sandboxes", "local")()
    require(kind.problems())
    return kind


def test_inherited_descriptors_stay_outside(sandboxes: Sandboxes, tmp_path: Path) -> None:
    """Under uvloop, which the command line uses: by itself it leaves inheritable descriptors to children."""
    import asyncio

    import uvloop

    (tmp_path / "tree").mkdir()
    (tmp_path / "secret").write_text("SECRET")
    leak = os.open(tmp_path / "secret", os.O_RDONLY)
    os.set_inheritable(leak, True)

    async def look() -> bytes:
        sandbox = await sandboxes.open(SandboxSpec(tree=tmp_path / "tree"))
        try:
            done = await sandbox.run(["sh", "-c", f"cat /proc/self/fd/{leak}"], timeout_s=10)
        finally:
            await sandbox.close()
        return done.stdout

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(look()) == b""
    finally:
        os.close(leak)


async def test_the_patch_is_taken_when_the_agent_closed_its_scratch_places(
    sandboxes: Sandboxes, tmp_path: Path
) -> None:
    task = Task(
        instance_id="closed-1",
        repo="r",
        instruction="i",
        source=Files({"a.py": "x = 1\n"}),
        gold_patch="",
        checks=PytestChecks(files={}, fail_to_pass=("t.py::t",)),
    )
    prepared = prepare(task, tmp_path, sandboxes)
    sandbox = await sandboxes.open(sandbox_spec(prepared, TaskEnvironment()))
    try:
        await sandbox.run(["sh", "-c", "echo x = 2 > a.py; chmod 000 /tmp /dev/shm"], timeout_s=10)
        patch = await extract_patch(sandbox, prepared.git)
    finally:
        await sandbox.close()
    assert b"+x = 2" in patch and not patch.startswith(NO_PATCH)


async def test_devices_keep_no_notes_for_other_sandboxes(sandboxes: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    sandbox = await sandboxes.open(SandboxSpec(tree=tmp_path / "tree"))
    script = (
        "for name in full null random tty urandom zero; do touch -c /dev/$name && echo changed $name; done\n"
        "echo gone >/dev/null && head -c 4 /dev/urandom | wc -c"
    )
    try:
        done = await sandbox.run(["sh", "-c", script], timeout_s=10)
    finally:
        await sandbox.close()
    assert (done.stdout, done.stderr.count(b"Read-only file system")) == (b"4\n", 6), done
