"""Taking tasks in: each is prepared and validated before anything runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from understudy.errors import GraderError, SandboxError, TaskError, UnderstudyError
from understudy.grade.verdict import validate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare
from understudy.types import Task


class ValidatedTasks(Struct, frozen=True):
    """The tasks that may be used, in the order given, and the refused ones with the reason."""

    accepted: list[Task]
    refused: dict[str, str]


async def validate_tasks(
    tasks: Sequence[Task],
    *,
    cache: Path,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    concurrency: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ValidatedTasks:
    """Validate every task: its gold patch must score 1 and the empty patch 0.

    A verdict reached before is remembered in the cache. `progress` is told how many are done, of how many. A task
    that twice cannot be validated for reasons of its sandbox or its checks is refused like one that fails: what
    one task asks for must not end the others. Raises what else goes wrong.
    """
    slots = asyncio.Semaphore(concurrency)
    refused: dict[str, str] = {}
    done = 0

    async def refusal_of(task: Task) -> UnderstudyError | None:
        """Why a task cannot be used; None when it can."""
        try:
            prepared = await asyncio.to_thread(prepare, task, cache, sandboxes)
            await validate(prepared, sandboxes=sandboxes, environment=environment, cache=cache)
        except (TaskError, SandboxError, GraderError) as error:
            return error
        return None

    async def validate_one(task: Task) -> None:
        nonlocal done
        async with slots:
            refusal = await refusal_of(task)
            if refusal is not None and not isinstance(refusal, TaskError):
                refusal = await refusal_of(task)
            if refusal is not None:
                refused[task.instance_id] = str(refusal)
        done += 1
        progress(done, len(tasks))

    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(validate_one(task))
    except* UnderstudyError as errors:
        raise errors.exceptions[0] from None
    return ValidatedTasks([task for task in tasks if task.instance_id not in refused], refused)
