"""One attempt: open a sandbox, let the agent work, take the patch, grade it, store the end in one step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from understudy.agents.base import GATEWAY_SOCKET, Agent, AgentJob, AgentResult
from understudy.errors import AgentError, BackendError, GatewayError, UnderstudyError
from understudy.gateway.keys import Keys
from understudy.grade.patch import extract_patch
from understudy.grade.verdict import grade
from understudy.run.config import RunConfig
from understudy.sandbox.base import Mount, Sandboxes
from understudy.store.store import Store
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, prepare, sandbox_spec
from understudy.types import Attempt, Rollout, Verdict


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """What every attempt of a run works with."""

    config: RunConfig
    store: Store
    keys: Keys
    agent: Agent
    sandboxes: Sandboxes
    environment: TaskEnvironment
    cache: Path
    gateway_socket: Path


@dataclass
class Stopwatch:
    """Seconds spent in each part of an attempt, by name."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Add the time spent inside to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


async def execute(bench: Workbench, rollout: Rollout, attempt: Attempt) -> Verdict:
    """Carry out one attempt that the store has just started, and store how it ended.

    Returns the verdict. Raises an UnderstudyError for an infrastructure failure, with the attempt left for the
    caller to close; nothing of the sandbox is left in either case.
    """
    watch = Stopwatch()
    task = bench.store.task(rollout.run_id, rollout.task_id)
    with watch.part("prepare_s"):
        prepared = await asyncio.to_thread(prepare, task, bench.cache, bench.sandboxes)
    result, patch = await _work(bench, rollout, attempt, prepared, watch)
    with watch.part("grade_s"):
        verdict = await grade(prepared, patch, sandboxes=bench.sandboxes, environment=bench.environment)
    await asyncio.wrap_future(
        bench.store.finish_attempt(
            attempt.id,
            "timeout" if result.outcome == "timeout" else "succeeded",
            "succeeded",
            patch=patch,
            verdict=verdict,
            logs=result.logs,
            timings=watch.seconds,
        )
    )
    return verdict


async def _work(
    bench: Workbench, rollout: Rollout, attempt: Attempt, prepared: PreparedTask, watch: Stopwatch
) -> tuple[AgentResult, bytes]:
    """Let the agent work in a fresh sandbox; returns how it ended and its patch."""
    config = bench.config
    mounts = (*bench.agent.mounts(), Mount(bench.gateway_socket, GATEWAY_SOCKET))
    with watch.part("open_s"):
        sandbox = await bench.sandboxes.open(sandbox_spec(prepared, bench.environment, mounts=mounts))
    try:
        seed = config.sampling_seed(rollout.task_id, rollout.sample_index)
        job = AgentJob(
            instruction=prepared.task.instruction,
            key=bench.keys.issue(attempt.id, sampling={"seed": seed}),
            model=config.model,
            max_turns=config.max_turns,
            timeout_s=min(config.timeout_s, prepared.task.meta.get("agent_timeout_s", config.timeout_s)),
        )
        await asyncio.wrap_future(bench.store.begin_running(attempt.id))
        with watch.part("agent_s"):
            result = await bench.agent.run(sandbox, job)
        bench.keys.revoke(attempt.id)
        if result.outcome == "crashed":
            raise _crash(bench.store, attempt, result)
        with watch.part("patch_s"):
            patch = await extract_patch(sandbox)
    finally:
        bench.keys.revoke(attempt.id)
        with watch.part("close_s"):
            await sandbox.close()
    return result, patch


_BOUNDARIES: dict[str, type[UnderstudyError]] = {"backend": BackendError, "gateway": GatewayError}


def _crash(store: Store, attempt: Attempt, result: AgentResult) -> UnderstudyError:
    """The error behind a crashed agent: what its last call met, when that call failed, else the crash itself.

    A call that was abandoned is what a crash leaves behind, not what it came from.
    """
    calls = [call for call in store.calls(attempt.id) if call.status != "abandoned"]
    last = calls[-1] if calls else None
    if last is not None and last.error is not None and last.error.boundary in _BOUNDARIES:
        return _BOUNDARIES[last.error.boundary](f"{last.error.message} (the agent then said: {result.message})")
    return AgentError(result.message)
