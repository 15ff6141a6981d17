"""A lock of gradings: on one machine, only one grading runs the same hidden tests at a time.

Sandboxes that run at the same time share a kernel, and so can always send each other messages: by locks on files
that both see, but also by locks on what is no file (the `eventfd`s of all processes have one inode), or by limits
that are counted for a user. No mount closes all of these ways. So a patch that reads hidden tests must not run
beside another one that is graded by them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from understudy.checks.canaries import suite_files
from understudy.checks.pytest_checks import deciding_files
from understudy.types import PytestChecks, SuiteChecks, Task
from understudy.util.files import lock_now, open_lock

_MIN_WAIT_S, _MAX_WAIT_S = 0.01, 0.2


@asynccontextmanager
async def grading_lock(task: Task, cache: Path) -> AsyncGenerator[None]:
    """Hold the locks of a task's hidden tests: waits until no other grading with one of these tests runs.

    The locks are files in `cache`, which the kernel releases when this process ends. Raises ConfigError when they
    cannot be made.
    """
    with ExitStack() as locks:
        # In one order for all, so that no two wait for each other.
        for name in sorted(_lock_names(task)):
            descriptor = open_lock(cache / "gradings" / name)
            locks.callback(os.close, descriptor)
            wait_s = _MIN_WAIT_S
            # Polled, because a thread that waits for a lock could not be cancelled.
            while not lock_now(descriptor):
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _MAX_WAIT_S)
        yield


def _lock_names(task: Task) -> set[str]:
    """Return a name for each hidden file that decides; two tasks have one in common if they share such a file.

    They are short, so that the cache has 65,536 of these empty files at most, and long enough that other tasks
    seldom wait by chance.
    """
    checks = task.checks
    if isinstance(checks, PytestChecks):
        shared = [checks.files[name] for name in deciding_files(checks) if name in checks.files]
    elif isinstance(checks, SuiteChecks):
        shared = [f"{task.repo} {name}" for name in suite_files(checks)]
    else:
        shared = []
    return {hashlib.sha256(text.encode(errors="replace")).hexdigest()[:4] for text in (task.instance_id, *shared)}
