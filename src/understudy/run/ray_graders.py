"""Patches graded by Ray actors: each has sandboxes of its own machine, and returns verdicts."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from understudy import errors
from understudy.config import cache_dir
from understudy.errors import GraderError, UnderstudyError
from understudy.grade.batch import Grading, PatchGrader
from understudy.grade.predictions import PredictedPatch
from understudy.run.ray_cluster import RayOptions, connected
from understudy.sandbox.base import load_sandboxes
from understudy.tasks.environment import environment_for
from understudy.types import ErrorInfo, Task, Verdict, info_of
from understudy.util.garbage import collect_garbage_rarely
from understudy.util.processes import raise_file_limit
from understudy.util.text import visible_line

_RETRIES = 2
"""How often Ray repeats a grading whose actor died with its node."""

_PLACEMENT_TIMEOUT_S, _STOP_TIMEOUT_S = 20.0, 15.0


class _GradingRequest(Struct, frozen=True):
    """What an actor is sent: a task and a patch for it. For a run's patch (`is_run`), it validates the task."""

    task: Task
    patch: PredictedPatch
    is_run: bool = False


class _GradingReply(Struct, frozen=True):
    """What an actor returns: a verdict, or the error that there is none for."""

    verdict: Verdict | None = None
    error: ErrorInfo | None = None


class RayGrader:
    """The code that runs in an actor. Requests and replies are bytes, whose types both sides know."""

    def __init__(self, sandbox: str, validate_failures: bool) -> None:
        self._sandbox = sandbox
        self._validate_failures = validate_failures
        self._grader: PatchGrader | None = None
        self._opening = asyncio.Lock()

    async def grade(self, request: bytes) -> bytes:
        """Return the reply to a request."""
        content = msgspec.msgpack.decode(request, type=_GradingRequest)
        try:
            grader = await self._opened()
            if content.is_run:
                verdict = await grader.grade_validated(content.task, content.patch.data)
            else:
                verdict = await (await grader.prepare(content.task, content.patch))()
            reply = _GradingReply(verdict=verdict)
        except UnderstudyError as error:
            reply = _GradingReply(error=info_of(error))
        return msgspec.msgpack.encode(reply)

    async def _opened(self) -> PatchGrader:
        async with self._opening:
            if self._grader is None:
                raise_file_limit()
                collect_garbage_rarely()
                try:
                    sandboxes = await asyncio.to_thread(load_sandboxes, self._sandbox)
                    environment = await asyncio.to_thread(environment_for, sandboxes, cache_dir())
                except UnderstudyError as error:
                    raise type(error)(f"on the Ray node {socket.gethostname()}: {error}") from error
                self._grader = PatchGrader(
                    sandboxes=sandboxes,
                    environment=environment,
                    cache=cache_dir(),
                    validate_failures=self._validate_failures,
                )
        return self._grader

    async def close(self) -> None:
        """Drop sandboxes that were prepared but not used."""
        if self._grader is not None:
            await self._grader.sandboxes.aclose()


class RayGraders:
    """The actors of one command. `capacity` is how many patches they grade at a time, all together."""

    def __init__(self, ray: Any, actors: list[Any], capacity: int) -> None:
        self.capacity = capacity
        self._ray = ray
        self._actors = itertools.cycle(actors)

    async def prepare(self, task: Task, patch: PredictedPatch) -> Grading:
        """Return the grading by the next actor. See PatchGrader."""
        return partial(self._grade, _GradingRequest(task, patch))

    async def grade_validated(self, task: Task, patch: bytes) -> Verdict:
        """Grade by the next actor. See PatchGrader."""
        return await self._grade(_GradingRequest(task, PredictedPatch.of(patch), is_run=True))

    async def _grade(self, request: _GradingRequest) -> Verdict:
        actor = next(self._actors)
        content = msgspec.msgpack.encode(request)
        try:
            output: bytes = await asyncio.wrap_future(actor.grade.remote(content).future())
        except self._ray.exceptions.RayError as error:
            lost = isinstance(error, self._ray.exceptions.RayActorError)
            problem = f"Ray lost the actors that graded its patch, {_RETRIES + 1} times" if lost else "Ray failed"
            raise GraderError(
                f"task {request.task.instance_id}: {problem}: {visible_line(str(error))}; check the cluster's "
                "nodes (ray status), then run the same command again"
            ) from error
        reply = msgspec.msgpack.decode(output, type=_GradingReply)
        if reply.verdict is None:
            assert reply.error is not None
            raise getattr(errors, reply.error.type, GraderError)(reply.error.message)
        return reply.verdict


@asynccontextmanager
async def ray_graders(
    options: RayOptions, sandbox: str, *, validate_failures: bool, report: Callable[[str], None]
) -> AsyncGenerator[RayGraders]:
    """Yield actors on a Ray cluster that grade in a kind of sandbox. They are stopped at the end.

    If Ray places none of them for a while, that is reported.

    Raises ConfigError if the cluster cannot be reached, or its nodes have another release of Understudy.
    """
    async with connected(options) as (ray, number):
        kind = ray.remote(RayGrader).options(
            num_cpus=options.cpus,
            max_restarts=-1,
            max_task_retries=_RETRIES,
            max_concurrency=options.ray_capacity,
            scheduling_strategy="SPREAD",
        )
        actors = [kind.remote(sandbox, validate_failures) for _ in range(number)]
        try:
            ready = [asyncio.wrap_future(actor.__ray_ready__.remote().future()) for actor in actors]
            placed, _ = await asyncio.wait(
                ready, timeout=_PLACEMENT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not placed:
                report(
                    f"Ray has started no actor yet: {number} of them ask for {options.cpus:g} CPUs each; "
                    "--ray-cpus says how many one needs"
                )
            yield RayGraders(ray, actors, number * options.ray_capacity)
            await asyncio.wait(
                [asyncio.wrap_future(actor.close.remote().future()) for actor in actors], timeout=_STOP_TIMEOUT_S
            )
        finally:
            for actor in actors:
                ray.kill(actor)
