"""A child process leaves nothing open, also when what is to kill it fails."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from pathlib import Path

import pytest

from understudy.errors import SandboxError
from understudy.sandbox.base import SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.sandbox.process import run_process, run_to_completion

from support import until


def has_died(pid: int) -> bool:
    """Whether a process is gone, or has ended and waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_a_kill_that_fails_leaves_no_process_and_no_open_pipe() -> None:
    killed: list[int] = []

    def fail(leader: int) -> None:
        killed.append(leader)
        raise OSError("its sandbox is closed")

    settings = {"timeout_s": 0.01, "output_bytes": 1, "stdin": b"", "env": {"PATH": "/usr/bin:/bin"}}
    run = partial(run_process, ["sleep", "60"], kill=fail, **settings)
    with pytest.raises(OSError, match="its sandbox is closed"):
        await run_to_completion(run)
    await until(lambda: has_died(killed[0]))
    gc.collect()  # a transport that is still open would warn here, and a warning fails the test


@pytest.mark.usefixtures("isolation")
async def test_a_command_whose_sandbox_was_closed_is_killed_without_its_proc(tmp_path: Path) -> None:
    sandbox = await LocalSandboxes().open(SandboxSpec(tree=tmp_path))
    running = asyncio.create_task(sandbox.run(["sh", "-c", "echo begun > started; sleep 60"], timeout_s=30))
    while True:
        try:
            await sandbox.read("started")
            break
        except FileNotFoundError:
            await asyncio.sleep(0.01)
    await sandbox.close()
    with pytest.raises(SandboxError):
        await running
    gc.collect()
