"""The logs of a session of Claude Code, taken out of a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy.agents.claude_code import session_logs
from understudy.sandbox.base import Completed, SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandbox, LocalSandboxes

PROJECTS = "/home/agent/.claude/projects"
SESSION = "01234567-89ab-cdef-0123-456789abcdef"


class CountingSandbox(LocalSandbox):
    """A sandbox that counts its runs."""

    runs = 0

    async def run(self, *arguments: Any, **options: Any) -> Completed:
        self.runs += 1
        return await super().run(*arguments, **options)


@pytest.mark.usefixtures("isolation")
async def test_the_logs_of_a_session_and_of_its_subagents_are_returned(tmp_path: Path) -> None:
    kind, spec = LocalSandboxes(), SandboxSpec(tree=tmp_path, workdir="/work_1/my.tree")
    sandbox = CountingSandbox(spec, kind, await kind.hold(spec))
    try:
        assert await session_logs(sandbox, PROJECTS, "no session") == {}
        assert await session_logs(sandbox, PROJECTS, SESSION) == {}
        elsewhere = f"{PROJECTS}/-elsewhere/{SESSION}.jsonl"
        await sandbox.write(elsewhere, b"moved\n")
        assert await session_logs(sandbox, PROJECTS, SESSION) == {f"session/{SESSION}.jsonl": b"moved\n"}
        sandbox.runs = 0
        directory = f"{PROJECTS}/-work-1-my-tree"
        await sandbox.write(f"{directory}/{SESSION}.jsonl", b"main\n")
        assert await session_logs(sandbox, PROJECTS, SESSION) == {f"session/{SESSION}.jsonl": b"main\n"}
        assert sandbox.runs == 0  # a process would take longer than all else that is done for a log
        await sandbox.run(["rm", "-r", f"{PROJECTS}/-elsewhere"], timeout_s=60)
        await sandbox.write(f"{directory}/{SESSION}/subagents/agent-1.jsonl", b"sub\n")
        assert await session_logs(sandbox, PROJECTS, SESSION) == {
            f"session/{SESSION}.jsonl": b"main\n",
            f"session/{SESSION}/subagents/agent-1.jsonl": b"sub\n",
        }
    finally:
        await sandbox.close()
