"""Taking tasks in: each is prepared and validated before anything runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from understudy.errors import TaskError, UnderstudyError
from understudy.grade.validate import validate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare
from understudy.types import Task


class Intake(Struct, frozen=True):
    """The tasks that may be used, in the order given, and the refused ones with the reason."""

    accepted: list[Task]
    refused: dict[str, str]


async def take_in(
    tasks: Sequence[Task],
    *,
    cache: Path,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    concurrency: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Intake:
    """Validate every task: its gold patch must score 1 and the empty patch 0.

    A verdict reached before is remembered in the cache. `progress` is told how many are done, of how many.
    Raises SandboxError or GraderError when validation itself cannot be carried out.
    """
    slots = asyncio.Semaphore(concurrency)
    reasons: dict[str, str] = {}
    done = 0

    async def one(task: Task) -> None:
        nonlocal done
        async with slots:
            try:
                prepared = await asyncio.to_thread(prepare, task, cache, sandboxes)
                await validate(prepared, sandboxes=sandboxes, environment=environment, cache=cache)
            except TaskError as error:
                reasons[task.instance_id] = str(error)
        done += 1
        progress(done, len(tasks))

    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(one(task))
    except* UnderstudyError as errors:
        raise errors.exceptions[0] from None
    return Intake([task for task in tasks if task.instance_id not in reasons], reasons)
