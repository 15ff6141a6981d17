"""One attempt: opens a sandbox, lets the agent work, takes the patch, grades it, and stores the result in one
step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
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
from understudy.run.store_reads import read_stored
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
    """What every attempt of a run needs."""

    config: RunConfig
    store: Store
    keys: Keys
    agent: Agent
    sandboxes: Sandboxes
    environment: TaskEnvironment
    cache: Path
    gateway_socket: Path
    tasks: Mapping[str, Task] = field(default_factory=dict[str, Task])
    """Tasks that need not be read from the store, by id."""
    verdicts: RunVerdicts = field(default_factory=RunVerdicts)

    async def task_of(self, rollout: Rollout) -> Task:
        """Return the task of a rollout. Raises StoreError if it cannot be read."""
        task = self.tasks.get(rollout.task_id)
        return task or await read_stored(self.store.runs.task, rollout.run_id, rollout.task_id)


@dataclass
class Stopwatch:
    """Measures the seconds spent in each part of an attempt, by name."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Add the time spent in the `with` block to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


async def prepare_rollout(context: RunContext, rollout: Rollout) -> None:
    """Prepare a rollout's source tree before its turn comes, and its sandbox if the kind supports that.

    Raises an UnderstudyError if it cannot be prepared.
    """
    prepared = await _prepare_task(context, await context.task_of(rollout))
    context.sandboxes.expect(_agent_spec(context, prepared))


async def _prepare_task(context: RunContext, task: Task) -> PreparedTask:
    """Return a task with its tree prepared, and with the grading options that validation found."""
    prepared = await asyncio.to_thread(prepare, task, context.cache, context.sandboxes)
    return as_validated(
        prepared, sandboxes=context.sandboxes, environment=context.environment, cache=context.cache
    )


async def execute_attempt(
    context: RunContext, rollout: Rollout, attempt: Attempt, final: bool, release_slot: Callable[[], None]
) -> Verdict:
    """Carry out an attempt that the store has just started, and store how it ended. Returns the verdict.

    Calls `release_slot` when the agent is done and its sandbox is gone. Raises an UnderstudyError for an
    infrastructure failure; the caller then has to close the attempt. Nothing of the sandbox is left in either
    case. In the `final` attempt, an agent that got answers from the model is graded even if it crashed: otherwise
    a model could crash its own agent to avoid failing.
    """
    stopwatch = Stopwatch()
    task = await context.task_of(rollout)
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


_MAX_LOG_BYTES = 1 << 20

_ATTEMPT_STATUSES: dict[AgentOutcome, AttemptStatus] = {
    "completed": "succeeded",
    "max_turns": "succeeded",
    "timeout": "timeout",
    "crashed": "failed",
}


@dataclass(frozen=True)
class _AgentWork:
    """The result of an agent: how it ended, its patch, a fault if it is graded despite one, and findings."""

    status: AttemptStatus
    patch: bytes
    logs: dict[str, bytes]
    error: ErrorInfo | None
    findings: list[Finding]


def _agent_spec(context: RunContext, prepared: PreparedTask) -> SandboxSpec:
    """Return the sandbox specification for an agent: the task's, with the agent's programs and the gateway's
    socket.
    """
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
    """Let the agent work in a new sandbox, and take its patch."""
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
        if session is not None and session.store_error is not None:
            raise GatewayError(
                "the agent's latest call could not be stored, so the attempt is incomplete: "
                f"{session.store_error}; check the store's disk or server, then run the same command again"
            )
        calls = (
            await read_stored(_finished_calls, context.store, attempt)
            if result.outcome == "crashed" or (session is not None and session.unanswered)
            else []
        )
        limit_finding = _context_overflow(calls) or _answer_limit(calls)
        error = None if limit_finding else _error_of_agent(context.agent, calls, result, session)
        if error and not (final and isinstance(error, AgentError) and error.had_answers):
            # Of an agent that floods its output the end is enough, since each attempt is stored.
            error.logs = {name: content[-_MAX_LOG_BYTES:] for name, content in result.logs.items()}
            raise error
        with stopwatch.part("patch_s"):
            patch = await extract_patch(sandbox, prepared.git)
    finally:
        context.keys.revoke(attempt.id)
        with stopwatch.part("close_s"):
            await sandbox.close()
    with stopwatch.part("check_s"):
        findings = await read_stored(_collect_findings, context, attempt, result, session)
    status = _ATTEMPT_STATUSES[result.outcome]
    if limit_finding:
        status = "succeeded"
        findings.insert(0, limit_finding)
    return _AgentWork(status, patch, result.logs, info_of(error) if error else None, findings)


def _collect_findings(
    context: RunContext, attempt: Attempt, result: AgentResult, session: GatewaySession | None
) -> list[Finding]:
    """Return findings about the agent's work: an exhausted budget, or a log that differs from its calls."""
    findings = context.agent.check(result, context.store.calls.of_attempt(attempt.id))
    if session is not None and session.budget_message is not None:
        findings.insert(0, Finding(kind="budget", message=session.budget_message))
    return findings


def _context_overflow(calls: Sequence[Call]) -> Finding | None:
    """Return a note that the model filled its context, if an agent crashed after these calls because of that; else
    None.

    It is an ordinary end, like reaching the turn limit, because it depends on how much was said. If it were
    retried as a fault, training would only see the rollouts that happen to be short.
    """
    if not any(call.status == "ok" for call in calls):
        return None
    error = calls[-1].error
    if error is None or error.boundary != "backend":
        return None
    # A provider's error in the agent's own dialect is passed on unchanged, and recognised only by its words.
    if error.type != ContextOverflow.__name__ and not is_overflow(error.message):
        return None
    return Finding(kind="context", message=error.message, call_id=calls[-1].id)


def _answer_limit(calls: Sequence[Call]) -> Finding | None:
    """Return a note that the last answer was cut at its maximum length, if an agent crashed after it; else None.

    Claude Code asks a model three times to continue and then ends with an error. That is the model's failure,
    which another attempt would only repeat.
    """
    if not calls or calls[-1].status != "ok" or calls[-1].finish_reason != "length":
        return None
    message = "the last answer reached the maximum number of tokens, and the agent gave up"
    return Finding(kind="answer limit", message=message, call_id=calls[-1].id)


def _finished_calls(store: Store, attempt: Attempt) -> list[Call]:
    """Return an attempt's calls in order, without abandoned ones, which are results of a crash and not its
    cause.
    """
    return [call for call in store.calls.of_attempt(attempt.id) if call.status != "abandoned"]


_ERRORS_BY_BOUNDARY: dict[str, type[UnderstudyError]] = {"backend": BackendError, "gateway": GatewayError}


def _budget(context: RunContext) -> Budget | None:
    """Return the budget of an attempt, including the turn limit for agents that do not count turns themselves."""
    config = context.config
    if context.agent.limits_turns:
        return config.gateway.budget
    budget = config.gateway.budget or Budget()
    return structs.replace(budget, calls=min(budget.calls or config.max_turns, config.max_turns))


def _error_of_agent(
    agent: Agent, calls: Sequence[Call], result: AgentResult, session: GatewaySession | None
) -> UnderstudyError | None:
    """Return the fault that an agent's end shows, or None if it is an ordinary end.

    For a crash, it is the error of the last call if that failed, else the crash itself. Any other end is the
    backend's fault if it never answered. An agent that never called the model (because it hung, needs a login, or
    ended silently) has not worked on the task.
    """
    if agent.needs_model and session is not None and not session.calls_started and result.outcome != "crashed":
        log_tail = next(
            (tail for log in result.logs.values() if (tail := log.decode(errors="replace").strip())), ""
        )
        how = "stopped" if result.outcome == "timeout" else f"ended with exit code {result.exit_code}"
        return AgentError(
            f"{agent.name} {how} without a single model call, expected at least one; check its command and "
            f"settings, and that it needs no login. Its log, which `understudy view` shows, ends: "
            f"{log_tail[-500:] or '(it is empty)'}"
        )
    if result.outcome != "crashed" and session is not None and session.unanswered:
        if result.outcome == "timeout":
            return BackendError(
                f"the model answered no request within the agent's time limit ({result.message}), expected at "
                "least one response; check the load of the model server, or raise --timeout"
            )
        # An agent may end in an ordinary way after errors only, for example because they used up its turns.
        errors = [call.error.message for call in calls if call.error is not None]
        return BackendError(
            f"the model answered none of the agent's {session.calls_started} requests, expected at least one "
            f"response; check the model server; the last error was: {errors[-1] if errors else 'not stored'}"
        )
    if result.outcome != "crashed":
        return None
    last_call = calls[-1] if calls else None
    if last_call is not None and last_call.error is not None and last_call.error.boundary in _ERRORS_BY_BOUNDARY:
        return _ERRORS_BY_BOUNDARY[last_call.error.boundary](
            f"{last_call.error.message} (then the agent ended: {result.message})"
        )
    return AgentError(
        f"{result.message}; for more, read the attempt's logs, which `understudy view` shows",
        had_answers=any(call.status == "ok" for call in calls),
    )
