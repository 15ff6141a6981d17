"""Runs a task's checks of whatever kind. This is the only place to extend for a new kind of check."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from understudy.checks.base import CheckResult, GradingOptions
from understudy.checks.canaries import canary_problem, pytest_canaries
from understudy.checks.pytest_checks import deciding_files, judge_pytest, other_files, run_pytest
from understudy.checks.runtime_events import opened_unseen, with_events
from understudy.checks.script import run_script
from understudy.checks.seal import HiddenFiles, changed_files, read_hidden, with_unchanged
from understudy.checks.suite import run_suite
from understudy.checks.twins.run import VersionRun, WrittenVersion, run_versions
from understudy.checks.twins.script import run_script_version
from understudy.checks.twins.suite import run_suite_version
from understudy.checks.twins.test_ids import DecidingTests
from understudy.sandbox.base import Sandbox
from understudy.types import Evidence, Integrity, PytestChecks, ScriptChecks, SuiteChecks, Task, is_solved


async def run_checks(
    sandbox: Sandbox,
    task: Task,
    patch: bytes,
    options: GradingOptions,
    *,
    hidden: Path | None = None,
    is_intruder: Callable[[str], bool] = lambda path: False,
) -> CheckResult:
    """Run the task's checks in a sandbox where the gated `patch` was applied, and judge them; sets `checks_s`.

    `hidden` is the directory of a script check's files on this machine. `is_intruder` returns whether a path that
    an install created must be removed before the tests run. Raises TaskError when the task's test patch cannot be
    read, GraderError or SandboxError when there is no verdict.
    """
    started = time.monotonic()
    files: HiddenFiles = await read_hidden(sandbox, task) if options.sealed else {}
    match task.checks:
        case PytestChecks() as checks:
            result = await _run_pytest(sandbox, checks, options, files)
        case ScriptChecks() as checks:
            result = await run_script(sandbox, checks, options, hidden)
        case SuiteChecks():
            result = await run_suite(sandbox, task, patch, options, files, is_intruder)
    result = await with_unchanged(sandbox, files, result)
    return replace(result, verdict=replace(result.verdict, checks_s=time.monotonic() - started))


async def run_task_versions(
    sandbox: Sandbox,
    task: Task,
    patch: bytes,
    versions: Sequence[WrittenVersion],
    tests: DecidingTests,
    is_intruder: Callable[[str], bool],
    *,
    sealed: bool,
    later_s: float = 0.0,
) -> list[VersionRun]:
    """Run versions of a task's hidden files in a sandbox where the gated `patch` was applied; returns the runs of
    the first ones, at least of one.

    No code of the patch may have run there before. With `sealed`, the files of a single version are read-only
    during the run, and compared afterwards, like the originals. With `later_s`, none but the first may take longer
    than that. Raises GraderError, SandboxError.
    """
    first = versions[0]
    match task.checks:
        case PytestChecks() as checks if len(versions) > 1:
            return await run_versions(sandbox, checks, versions, timeout_s=checks.timeout_s, later_s=later_s)
        case PytestChecks() as checks:
            files: HiddenFiles = await read_hidden(sandbox, task) if sealed else {}
            await sandbox.seal(sorted(files))
            (run,) = await run_versions(sandbox, checks, versions, timeout_s=checks.timeout_s)
            return [replace(run, changed_files=tuple(await changed_files(sandbox, files)))]
        case SuiteChecks() as checks:
            run = run_suite_version(sandbox, task, checks, patch, first, tests, is_intruder, sealed=sealed)
            return [await run]
        case ScriptChecks() as checks:
            return [await run_script_version(sandbox, checks, first)]


async def _run_pytest(
    sandbox: Sandbox, checks: PytestChecks, options: GradingOptions, files: HiddenFiles
) -> CheckResult:
    """Run the deciding files with canaries beside the first of them, and judge the report."""
    run_files = deciding_files(checks)
    canaries = None
    if options.canaries and run_files:
        canaries = pytest_canaries(
            run_files[0], [text.encode() for name, text in checks.files.items() if name in run_files]
        )
        await sandbox.write(posixpath.join(sandbox.workdir, canaries.path), canaries.text.encode())
        run_files = (*run_files, canaries.path)
    await sandbox.seal(sorted(files))
    hidden = other_files(checks)
    await sandbox.count_opens((*deciding_files(checks), *hidden))
    report = await run_pytest(sandbox, run_files, timeout_s=checks.timeout_s, hidden=hidden)
    events = (*report.events, *opened_unseen(sandbox.opens() or {}, report.opened))
    result = with_events(judge_pytest(checks, report), events, options.usual_events)
    results = {id: (outcome.upper(),) for id, outcome in report.outcomes.items()}
    problem = canary_problem(canaries, results) if canaries else ""
    if not problem or not is_solved(result.verdict.reward):
        return result
    integrity = Integrity("suspicious", problem, (Evidence(rule="canary", text=problem),))
    return replace(result, verdict=replace(result.verdict, reward=0.0, reason=problem, integrity=integrity))
