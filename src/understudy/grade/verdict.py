"""From a patch to a verdict: the gate, a fresh sandbox, the patch, the hidden files, the tests."""

from __future__ import annotations

import asyncio
import time

from msgspec.structs import replace

from understudy.checks.pytest_checks import PytestReport, deciding_files, run_pytest, run_script
from understudy.checks.suite import Judged, run_before_patch, run_suite
from understudy.grade.apply import apply_patch
from understudy.grade.audit import audit
from understudy.grade.patch import GatedPatch, gate
from understudy.sandbox.base import Sandbox, Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, hidden_mounts, sandbox_spec
from understudy.types import KEEPS, SOLVES, PytestChecks, ScriptChecks, SuiteChecks, TestOutcome, Verdict


async def grade(
    prepared: PreparedTask, patch: bytes, *, sandboxes: Sandboxes, environment: TaskEnvironment
) -> Verdict:
    """Judge a patch in a fresh sandbox. A patch that changes nothing that counts gets 0 without running.

    What the audit of the patch finds is in the verdict's `integrity`; the reward is what the checks say. Raises
    GraderError or SandboxError when it could not be judged: that is never a reward.
    """
    gated = gate(patch, prepared.task)
    if gated.refused:
        verdict = Verdict(reward=0.0, reason=f"patch refused: {gated.refused}", applied=False)
    elif not gated.patch:
        dropped = ", ".join(gated.dropped[:5])
        reason = f"only files that do not count: {dropped}" if dropped else "empty patch"
        verdict = Verdict(reward=0.0, reason=reason)
    else:
        verdict = await evaluate(prepared, gated, sandboxes=sandboxes, environment=environment)
    found = await asyncio.to_thread(audit, patch, prepared.task, gated, verdict)
    return replace(verdict, integrity=found)


async def evaluate(
    prepared: PreparedTask, gated: GatedPatch, *, sandboxes: Sandboxes, environment: TaskEnvironment
) -> Verdict:
    """Apply a gated patch, be it empty, in a fresh sandbox and run the checks.

    Raises GraderError or SandboxError when that could not be done, TaskError when the task's own test patch does
    not apply.
    """
    judged = await evaluate_fully(prepared, gated, sandboxes=sandboxes, environment=environment)
    return judged.verdict


async def evaluate_fully(
    prepared: PreparedTask, gated: GatedPatch, *, sandboxes: Sandboxes, environment: TaskEnvironment
) -> Judged:
    """`evaluate`, with what validation needs to know of a suite."""
    checks = prepared.task.checks
    sandbox = await sandboxes.open(sandbox_spec(prepared, environment, mounts=hidden_mounts(prepared)))
    try:
        if isinstance(checks, SuiteChecks):
            await run_before_patch(sandbox, checks)
        if complaint := await apply_patch(sandbox, prepared, gated.patch, host_programs=sandboxes.host_programs):
            return Judged(Verdict(reward=0.0, reason=complaint, applied=False))
        started = time.monotonic()
        match checks:
            case PytestChecks():
                report = await run_pytest(sandbox, deciding_files(checks), timeout_s=checks.timeout_s)
                judged = Judged(judge(checks, report))
            case ScriptChecks():
                judged = Judged(await _script(sandbox, checks))
            case SuiteChecks():
                judged = await run_suite(
                    sandbox,
                    prepared.task,
                    gated.patch,
                    with_canaries=prepared.canaries,
                    allowed_conflicts=prepared.conflicts,
                )
        verdict = replace(judged.verdict, checks_s=time.monotonic() - started)
    finally:
        await sandbox.close()
    if gated.dropped:
        note = f"(changes left out: {', '.join(gated.dropped[:5])})"
        verdict = replace(verdict, reason=f"{verdict.reason} {note}")
    return replace(judged, verdict=verdict)


def judge(checks: PytestChecks, report: PytestReport) -> Verdict:
    """What a pytest report says of a patch; `tests` are the outcomes of the ids that decide."""
    ids = (*checks.fail_to_pass, *checks.pass_to_pass)
    tests: dict[str, TestOutcome] = {id: report.outcomes.get(id, "missing") for id in ids}
    wrong = [id for id in checks.fail_to_pass if tests[id] not in SOLVES]
    broken = [id for id in checks.pass_to_pass if tests[id] not in KEEPS]
    failures = any(outcome in ("failed", "error") for outcome in report.outcomes.values())
    if report.timed_out:
        reason = f"the tests did not end in {checks.timeout_s:g} s"
    elif wrong:
        reason = f"{len(wrong)} of {len(checks.fail_to_pass)} tests to mend still fail: {_some(wrong, tests)}"
    elif broken:
        reason = f"{len(broken)} of {len(checks.pass_to_pass)} tests that passed now fail: {_some(broken, tests)}"
    elif not report.finished or report.exit_code not in (0, 1):
        reason = f"pytest did not come to its end (exit code {report.exit_code})"
    elif (report.exit_code == 1) != failures:
        reason = f"pytest's exit code {report.exit_code} and the outcomes it reported do not agree"
    else:
        return Verdict(reward=1.0, reason=f"all {len(ids)} tests pass", tests=tests, log=report.log)
    return Verdict(reward=0.0, reason=reason, tests=tests, log=report.log)


async def _script(sandbox: Sandbox, checks: ScriptChecks) -> Verdict:
    result = await run_script(sandbox, checks)
    if result.timed_out:
        return Verdict(reward=0.0, reason=f"the checks did not end in {checks.timeout_s:g} s", log=result.log)
    if result.reward is None:
        return Verdict(reward=0.0, reason=result.complaint, log=result.log)
    reward = 1.0 if result.reward >= 1.0 else 0.0
    return Verdict(reward=reward, reason=f"the checks gave {result.reward:g}", log=result.log)


def _some(ids: list[str], tests: dict[str, TestOutcome]) -> str:
    shown = ", ".join(f"{id} ({tests[id]})" for id in ids[:3])
    return shown + (", …" if len(ids) > 3 else "")
