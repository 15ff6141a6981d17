"""Fixtures for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from understudy.tasks.records import dump

from support import calc_task, require

# The same examples each time, and no verdict by the clock: a busy machine is not a bug.
settings.register_profile("understudy", deadline=None, derandomize=True)
settings.load_profile("understudy")


@pytest.fixture
def claude_code() -> Path:
    """The real CLI's binary; the test is skipped where it has not been fetched."""
    from understudy.agents.claude_code import ClaudeCode
    from understudy.agents.claude_install import binary_path

    require(ClaudeCode().problems())
    return binary_path()


@pytest.fixture
def isolation() -> None:
    """The local sandbox works here; the test is skipped where it cannot."""
    from understudy.sandbox.local import LocalSandboxes

    require(LocalSandboxes().problems())


@pytest.fixture
def calc_tasks(tmp_path: Path) -> Path:
    """A JSONL file of four small tasks."""
    path = tmp_path / "tasks.jsonl"
    dump([calc_task(number) for number in range(4)], path)
    return path
