"""From a patch to a verdict: the gate, a fresh sandbox, the patch and the hidden files, the checks, the audit."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from understudy.checks.base import CheckResult
from understudy.checks.run import run_checks
from understudy.checks.suite import run_before_patch
from understudy.grade.apply import apply_patch
from understudy.grade.audit import audit
from understudy.grade.gate import GatedPatch, gate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, hidden_mounts, sandbox_spec
from understudy.types import SuiteChecks, Verdict


async def grade(
    prepared: PreparedTask, patch: bytes, *, sandboxes: Sandboxes, environment: TaskEnvironment
) -> Verdict:
    """Grade a patch in a fresh sandbox. A patch of which nothing passes the gate gets 0 without running.

    The audit's findings are in the verdict's `integrity`; the reward is what the checks say. Raises GraderError
    or SandboxError when the patch could not be graded: that is never a reward.
    """
    gated = gate(patch, prepared.task)
    if gated.refused:
        verdict = Verdict(reward=0.0, reason=f"patch refused: {gated.refused}", applied=False)
    elif not gated.patch:
        dropped = ", ".join(gated.dropped[:5])
        reason = f"only files that do not count: {dropped}" if dropped else "empty patch"
        verdict = Verdict(reward=0.0, reason=reason)
    else:
        verdict = (await evaluate(prepared, gated, sandboxes=sandboxes, environment=environment)).verdict
    integrity = await asyncio.to_thread(audit, patch, prepared.task, gated, verdict)
    return replace(verdict, integrity=integrity)


async def evaluate(
    prepared: PreparedTask, gated: GatedPatch, *, sandboxes: Sandboxes, environment: TaskEnvironment
) -> CheckResult:
    """Apply a gated patch, which may be empty, in a fresh sandbox and run the checks.

    Raises GraderError or SandboxError when that failed, TaskError when the task's own test patch does not apply.
    """
    checks = prepared.task.checks
    sandbox = await sandboxes.open(sandbox_spec(prepared, environment, mounts=hidden_mounts(prepared)))
    try:
        if isinstance(checks, SuiteChecks):
            await run_before_patch(sandbox, checks)
        if problem := await apply_patch(sandbox, prepared, gated.patch, host_programs=sandboxes.host_programs):
            return CheckResult(Verdict(reward=0.0, reason=problem, applied=False))
        result = await run_checks(
            sandbox,
            prepared.task,
            gated.patch,
            with_canaries=prepared.canaries,
            allowed_conflicts=prepared.conflicts,
        )
    finally:
        await sandbox.close()
    if not gated.dropped:
        return result
    note = f"(changes left out: {', '.join(gated.dropped[:5])})"
    return replace(result, verdict=replace(result.verdict, reason=f"{result.verdict.reason} {note}"))
