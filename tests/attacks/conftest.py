"""Where the attacks are graded: local sandboxes, with the Python environment of tasks."""

from __future__ import annotations

import pytest

from understudy.config import cache_dir
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import TaskEnvironment, python_environment

from support import require


@pytest.fixture(scope="module")
def environment() -> TaskEnvironment:
    return python_environment(cache_dir())


@pytest.fixture(scope="module")
def sandboxes() -> LocalSandboxes:
    sandboxes = LocalSandboxes()
    require(sandboxes.problems())
    return sandboxes
