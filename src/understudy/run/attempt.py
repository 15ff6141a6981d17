"""One attempt: open a sandbox, let the agent work, take the patch, grade it, store the end in one step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from understudy.agents.base import GATEWAY_SOCKET, Agent, AgentJob, AgentOutcome, AgentResult
from understudy.checks.suite import activated_environment
from understudy.errors import AgentError, BackendError, GatewayError, UnderstudyError
from understudy.gateway.backends.fields import is_overflow
from understudy.gateway.budget import Budget
from understudy.gateway.keys import Keys
from understudy.gateway.session import GatewaySession
from understudy.grade.verdict import as_validated
from understudy.run.config import RunConfig
from understudy.run.verdicts import RunVerdicts
from understudy.sandbox.base import Mount, Sandboxes, SandboxSpec, labelled
from understudy.store import Store
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.patch import extract_patch
from understudy.tasks.prepare import PreparedTask, prepare, sandbox_spec
from understudy.types import (
    Attempt,
    AttemptStatus,
    Call,
    ErrorInfo,
    Finding,
    Rollout,
    SuiteChecks,
    Task,
    Verdict,
    info_of,
)
from understudy.wire.errors import ContextOverflow


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What every attempt of a run works with."""

    config: RunConfig
    store: Store
    keys: Keys
    agent: Agent
    sandboxes: Sandboxes
    environment: TaskEnvironment
    cache: Path
    gateway_socket: Path
    verdicts: RunVerdicts = field(default_factory=RunVerdicts)


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


async def prepare_rollout(context: RunContext, rollout: Rollout) -> None:
    """Prepare a rollout's tree, and have its sandbox made ready where the kind can, before its turn comes.

    Raises an UnderstudyError when it cannot be prepared.
    """
    prepared = await _prepare_task(context, context.store.runs.task(rollout.run_id, rollout.task_id))
    context.sandboxes.expect(_agent_spec(context, prepared))


async def _prepare_task(context: RunContext, task: Task) -> PreparedTask:
    """A task with its tree made, as validation found that it has to be graded."""
    prepared = await asyncio.to_thread(prepare, task, context.cache, context.sandboxes)
    return as_validated(
        prepared, sandboxes=context.sandboxes, environment=context.environment, cache=context.cache
    )


async def execute_attempt(
    context: RunContext, rollout: Rollout, attempt: Attempt, final: bool, release_slot: Callable[[], None]
) -> Verdict:
    """Carry out one attempt that the store has just started, and store how it ended.

    Calls `release_slot` when the agent is done and its sandbox gone.

    Returns the verdict. Raises an UnderstudyError for an infrastructure failure, with the attempt left for the
    caller to close; nothing of the sandbox is left in either case. In the `final` attempt, an agent that the model
    had answered is graded even when it crashed: else a model could kill its own agent rather than fail.
    """
    stopwatch = Stopwatch()
    task = context.store.runs.task(rollout.run_id, rollout.task_id)
    with stopwatch.part("prepare_s"):
        prepared = await _prepare_task(context, task)
    with labelled(run=rollout.run_id, attempt=attempt.id):
        result = await _run_agent(context, rollout, attempt, prepared, stopwatch, final)
    release_slot()
    with labelled(run=rollout.run_id, attempt=attempt.id), stopwatch.part("grade_s"):
        verdict = await context.verdicts.grade(
            prepared, result.patch, attempt.id, sandboxes=context.sandboxes, environment=context.environment
        )
    await asyncio.wrap_future(
        context.store.runs.finish_attempt(
            attempt.id,
            result.status,
            "succeeded",
            patch=result.patch,
            verdict=verdict,
            logs=result.logs,
            error=result.error,
            timings=stopwatch.seconds,
            findings=result.findings,
        )
    )
    return verdict


_ATTEMPT_STATUSES: dict[AgentOutcome, AttemptStatus] = {
    "completed": "succeeded",
    "max_turns": "succeeded",
    "timeout": "timeout",
    "crashed": "failed",
}


@dataclass(frozen=True)
class _AgentWork:
    """What an agent left: how it ended, its patch, a fault when it is graded in spite of one, what is of note."""

    status: AttemptStatus
    patch: bytes
    logs: dict[str, bytes]
    error: ErrorInfo | None
    findings: list[Finding]


def _agent_spec(context: RunContext, prepared: PreparedTask) -> SandboxSpec:
    """The sandbox that an agent works in: the task's, with the agent's programs and the gateway's socket."""
    mounts = (*context.agent.mounts(), Mount(context.gateway_socket, GATEWAY_SOCKET))
    return sandbox_spec(prepared, context.environment, mounts=mounts)


async def _run_agent(
    context: RunContext,
    rollout: Rollout,
    attempt: Attempt,
    prepared: PreparedTask,
    stopwatch: Stopwatch,
    final: bool,
) -> _AgentWork:
    """Let the agent work in a fresh sandbox, and take its patch."""
    config = context.config
    with stopwatch.part("open_s"):
        sandbox = await context.sandboxes.open(_agent_spec(context, prepared))
    try:
        seed = config.sampling_seed(rollout.task_id, rollout.sample_index)
        checks = prepared.task.checks
        job = AgentJob(
            env=await activated_environment(sandbox, checks) if isinstance(checks, SuiteChecks) else {},
            instruction=prepared.task.instruction,
            key=context.keys.issue(attempt.id, sampling={"seed": seed} | config.sampling, budget=_budget(context)),
            model=config.model,
            small_model=config.small_model,
            max_turns=config.max_turns,
            timeout_s=min(config.timeout_s, prepared.task.meta.get("agent_timeout_s", config.timeout_s)),
        )
        await asyncio.wrap_future(context.store.runs.mark_running(attempt.id))
        with stopwatch.part("agent_s"):
            result = await context.agent.run(sandbox, job)
        session = context.keys.revoke(attempt.id)
        calls = (
            await asyncio.to_thread(_finished_calls, context.store, attempt) if result.outcome == "crashed" else []
        )
        context_finding = _context_overflow(calls)
        error = None if context_finding else _error_of_agent(context.agent, calls, result, session)
        if error and not (final and isinstance(error, AgentError) and error.had_answers):
            raise error
        with stopwatch.part("patch_s"):
            patch = await extract_patch(sandbox, prepared.git)
    finally:
        context.keys.revoke(attempt.id)
        with stopwatch.part("close_s"):
            await sandbox.close()
    with stopwatch.part("check_s"):
        findings = await asyncio.to_thread(_collect_findings, context, attempt, result, session)
    status = _ATTEMPT_STATUSES[result.outcome]
    if context_finding:
        status = "succeeded"
        findings.insert(0, context_finding)
    return _AgentWork(status, patch, result.logs, info_of(error) if error else None, findings)


def _collect_findings(
    context: RunContext, attempt: Attempt, result: AgentResult, session: GatewaySession | None
) -> list[Finding]:
    """What is of note about how the agent worked: a budget used up, a log that differs from its calls."""
    findings = context.agent.check(result, context.store.calls.of_attempt(attempt.id))
    if session is not None and session.budget_message is not None:
        findings.insert(0, Finding(kind="budget", message=session.budget_message))
    return findings


def _context_overflow(calls: Sequence[Call]) -> Finding | None:
    """That a model which had answered has filled its context, where an agent crashed after these calls.

    It is how much was said that did it, as it is with turns: an ordinary end. Were it a fault and tried again,
    only those rollouts would be learned from that happen to be short.
    """
    if not any(call.status == "ok" for call in calls):
        return None
    error = calls[-1].error
    if error is None or error.boundary != "backend":
        return None
    # A provider's refusal in the agent's own dialect is passed on as it is, and known by its words alone.
    if error.type != ContextOverflow.__name__ and not is_overflow(error.message):
        return None
    return Finding(kind="context", message=error.message, call_id=calls[-1].id)


def _finished_calls(store: Store, attempt: Attempt) -> list[Call]:
    """An attempt's calls, in order. One that was abandoned is what a crash leaves, not what it came from."""
    return [call for call in store.calls.of_attempt(attempt.id) if call.status != "abandoned"]


_BOUNDARIES: dict[str, type[UnderstudyError]] = {"backend": BackendError, "gateway": GatewayError}


def _budget(context: RunContext) -> Budget | None:
    """The budget of an attempt, with the turns of an agent that does not count them itself."""
    config = context.config
    if context.agent.limits_turns:
        return config.gateway.budget
    budget = config.gateway.budget or Budget()
    return structs.replace(budget, calls=min(budget.calls or config.max_turns, config.max_turns))


def _error_of_agent(
    agent: Agent, calls: Sequence[Call], result: AgentResult, session: GatewaySession | None
) -> UnderstudyError | None:
    """The fault that an agent's end tells of, or None when it is an ordinary one.

    For a crash it is what the last of the calls met, when that call failed, else the crash itself. A time-out is
    the backend's when it never once answered. An agent that never asked the model, as it hung, wants a login or
    has ended without a word, has not worked on the task.
    """
    if agent.needs_model and session is not None and not session.calls_started and result.outcome != "crashed":
        log_tail = next(
            (tail for log in result.logs.values() if (tail := log.decode(errors="replace").strip())), ""
        )
        how = "stopped" if result.outcome == "timeout" else f"ended with exit code {result.exit_code}"
        return AgentError(
            f"{agent.name} {how} without a single model call: {log_tail[-500:] or 'it printed nothing'}"
        )
    if result.outcome == "timeout" and session is not None and session.unanswered:
        return BackendError(f"the model answered no request within the agent's time limit ({result.message})")
    if result.outcome != "crashed":
        return None
    last = calls[-1] if calls else None
    if last is not None and last.error is not None and last.error.boundary in _BOUNDARIES:
        return _BOUNDARIES[last.error.boundary](f"{last.error.message} (the agent then said: {result.message})")
    return AgentError(result.message, had_answers=any(call.status == "ok" for call in calls))
