"""Interrupting a command in a sandbox: what runs gets the signal, what is started later does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from understudy.run.interruptible_sandbox import InterruptibleSandbox
from understudy.sandbox.base import SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandboxes

from support import require

PROGRAM = "/program"


async def test_only_the_running_command_is_interrupted(tmp_path: Path) -> None:
    sandboxes = LocalSandboxes()
    require(sandboxes.problems())
    sandboxes.prepare_tree(tmp_path)
    sandbox = InterruptibleSandbox(await sandboxes.open(SandboxSpec(tree=tmp_path)), PROGRAM)
    try:
        script = "trap 'echo interrupted; exit 7' INT; touch ready; while :; do sleep 0.05; done"
        waits = ["sh", "-c", script, PROGRAM]
        running = asyncio.create_task(sandbox.run(waits, timeout_s=60))
        while (await sandbox.run(["test", "-e", "ready"], timeout_s=60)).exit_code:  # noqa: ASYNC110 - in a sandbox
            await asyncio.sleep(0.02)
        await sandbox.interrupt()
        interrupted = await running
        assert (interrupted.exit_code, interrupted.stdout) == (7, b"interrupted\n")
        # As `tar` does, which collects the agent's logs after it ended.
        later = await sandbox.run(["sh", "-c", "sleep 0.5; echo complete", PROGRAM], timeout_s=60)
        assert (later.exit_code, later.stdout) == (0, b"complete\n")
    finally:
        await sandbox.close()
