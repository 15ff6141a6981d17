"""Run a task's checks, whatever kind they are. A new kind of check is added here."""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec.structs import replace

from understudy.checks.base import CheckResult
from understudy.checks.pytest_checks import deciding_files, judge_pytest, run_pytest
from understudy.checks.script_checks import judge_script, run_script
from understudy.checks.suite import run_suite
from understudy.sandbox.base import Sandbox
from understudy.types import PytestChecks, ScriptChecks, SuiteChecks, Task


async def run_checks(
    sandbox: Sandbox, task: Task, patch: bytes, *, with_canaries: bool, allowed_conflicts: Mapping[str, int]
) -> CheckResult:
    """Run the task's checks in a sandbox where the gated `patch` was applied, and judge; `checks_s` is measured.

    `with_canaries` and `allowed_conflicts` are for suites: whether tests of ours run among theirs, and how often
    a test id may fail besides passing. Raises GraderError or SandboxError when there is no verdict.
    """
    started = time.monotonic()
    match task.checks:
        case PytestChecks() as checks:
            report = await run_pytest(sandbox, deciding_files(checks), timeout_s=checks.timeout_s)
            result = judge_pytest(checks, report)
        case ScriptChecks() as checks:
            result = judge_script(checks, await run_script(sandbox, checks))
        case SuiteChecks():
            result = await run_suite(
                sandbox, task, patch, with_canaries=with_canaries, allowed_conflicts=allowed_conflicts
            )
    return replace(result, verdict=replace(result.verdict, checks_s=time.monotonic() - started))
