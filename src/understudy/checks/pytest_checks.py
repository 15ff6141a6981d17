"""Checks that are pytest files: runs them with a reporter plugin of ours, and judges the report."""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from understudy.checks import report_plugin
from understudy.checks.base import (
    CheckResult,
    check_not_killed,
    outcome_reason,
    output_tail,
    read_result_file,
    report_lines,
)
from understudy.checks.runtime_events import read_watch
from understudy.errors import GraderError
from understudy.sandbox.base import Mount, Sandbox
from understudy.types import KEEPS, SOLVES, Evidence, PytestChecks, TestOutcome, Verdict

PLUGIN_MOUNT = Mount(Path(report_plugin.__file__), "/opt/understudy/report_plugin.py")
"""Every sandbox in which `run_pytest` is called must have this mount; `sandbox_spec` adds it."""

_REPORT_BYTES = 32 << 20
_NOT_STARTED = frozenset({126, 127, report_plugin.NOT_STARTED})


class PytestReport(Struct):
    """The result of a pytest run: outcomes by node id, failure messages as seen from the test's file, and how the
    process ended.

    `exit_code` is None after a timeout. `finished` is true when pytest reported its own end; otherwise a test that
    was still running is not in `outcomes`. `log` is the end of its output, `events` what was observed of the
    tested code (see `understudy.checks.runtime_events`). `opened` is how often pytest's process itself opened each
    file that was run.
    """

    outcomes: dict[str, TestOutcome]
    messages: dict[str, str]
    exit_code: int | None
    timed_out: bool
    log: str
    finished: bool = True
    events: tuple[Evidence, ...] = ()
    opened: dict[str, int] = {}


class _ReportLine(Struct):
    id: str = ""
    when: str = ""
    outcome: str = ""
    message: str = ""
    start: str | None = None
    end: int | None = None


class _TestPhases(Struct):
    """Everything that was reported about one test, by phase (setup, call, teardown)."""

    outcomes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    message: str = ""


def deciding_files(checks: PytestChecks) -> tuple[str, ...]:
    """Return the files to run, sorted: those of the deciding node ids, or all hidden ones if there are no such
    ids.
    """
    ids = (*checks.fail_to_pass, *checks.pass_to_pass)
    return tuple(sorted({id.partition("::")[0] for id in ids} or checks.files))


async def run_pytest(
    sandbox: Sandbox, files: Sequence[str], *, timeout_s: float, hidden: Sequence[str] = ()
) -> PytestReport:
    """Run pytest on `files` (relative to the working directory) in one command; `hidden` are other hidden files.

    The tree's plugins, cache and entry points are disabled; its configuration is used. Raises GraderError when
    pytest could not be started, SandboxError when the sandbox broke.
    """
    report = posixpath.join(sandbox.home, f".report-{secrets.token_hex(16)}.jsonl")
    driver = sandbox.locate(PLUGIN_MOUNT.target)
    paths = [posixpath.join(sandbox.workdir, file) for file in files]
    other_paths = msgspec.json.encode([posixpath.join(sandbox.workdir, name) for name in hidden])
    token = f"understudy-event-{secrets.token_hex(16)}"
    completed = await sandbox.run(
        ["python", "-P", "-s", driver, report, sandbox.workdir, *paths],
        timeout_s=timeout_s,
        stdin=b"\n".join((token.encode(), other_paths, b"")),
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=sandbox.workdir,
    )
    check_not_killed(completed)
    raw = await read_result_file(sandbox, report, _REPORT_BYTES) or b""
    outcomes, messages, end = parse_outcomes(raw)
    finished = end is not None and end == completed.exit_code
    watch_report = read_watch(completed.stderr, token, finished=finished)
    log = output_tail(replace(completed, stderr=watch_report.stderr))
    if completed.exit_code in _NOT_STARTED:
        # The tested code may exit with these codes too. pytest was not started only if it cannot be imported.
        probe = await sandbox.run(["python", "-P", "-s", "-c", "import pytest"], timeout_s=60, cwd="/")
        if probe.exit_code != 0:
            raise GraderError(
                "pytest cannot be imported by `python` in the task's environment (exit code "
                f"{completed.exit_code}); install it there, or correct what its output says:\n{log[-2000:]}"
            )
    return PytestReport(
        outcomes,
        messages,
        completed.exit_code,
        completed.timed_out,
        log,
        finished,
        watch_report.events,
        watch_report.opens,
    )


def parse_outcomes(raw: bytes) -> tuple[dict[str, TestOutcome], dict[str, str], int | None]:
    phases: dict[str, _TestPhases] = {}
    end: int | None = None
    for line in report_lines(raw, msgspec.json.Decoder(_ReportLine).decode):
        if line.end is not None:
            end = line.end
        elif line.id:
            reported = phases.setdefault(line.id, _TestPhases())
            reported.outcomes.setdefault(line.when, set()).add(line.outcome)
            reported.message = reported.message or line.message
    outcomes: dict[str, TestOutcome] = {
        id: outcome for id, test_phases in phases.items() if (outcome := _outcome(test_phases.outcomes))
    }
    return outcomes, {id: test_phases.message for id, test_phases in phases.items() if test_phases.message}, end


_CALL_OUTCOMES = frozenset({"passed", "failed", "skipped", "xfailed", "xpassed"})


def _outcome(phases: dict[str, set[str]]) -> TestOutcome | None:
    """Return a test's outcome from its phases; None if it did not come to its end."""
    if "collect" in phases:
        return "error"
    if any(len(reported) > 1 for reported in phases.values()):
        return "failed"  # two results for one phase: the tested code wrote one of the lines
    if "teardown" not in phases:
        return None
    setup, call, teardown = (next(iter(phases.get(phase, {""}))) for phase in ("setup", "call", "teardown"))
    if teardown != "passed" or setup == "failed":
        return "error"
    if not call and setup == "passed":
        return None
    return cast("TestOutcome", call or setup) if (call or setup) in _CALL_OUTCOMES else "error"


def other_files(checks: PytestChecks) -> tuple[str, ...]:
    """Return the hidden files that are not run: data, and modules that the tests import."""
    deciding = {posixpath.normpath(name) for name in deciding_files(checks)}
    return tuple(sorted({posixpath.normpath(name) for name in checks.files} - deciding))


def _parameters_hint(tests: Mapping[str, TestOutcome], outcomes: Mapping[str, TestOutcome]) -> str:
    """Return what to do about a missing test that ran under ids with parameters; "" if there is none."""
    for id, outcome in tests.items():
        parametrised = next((node_id for node_id in outcomes if node_id.startswith(f"{id}[")), "")
        if outcome == "missing" and parametrised:
            return f"; {id} has parameters, so expected each of its ids, such as {parametrised[:200]!r}"
    return ""


def judge_pytest(checks: PytestChecks, report: PytestReport) -> CheckResult:
    """Judge a pytest report; the verdict's `tests` are the outcomes of the deciding ids.

    The tested code can write to the report's file too, so the exit code has to agree with it.
    """
    ids = (*checks.fail_to_pass, *checks.pass_to_pass)
    tests: dict[str, TestOutcome] = {id: report.outcomes.get(id, "missing") for id in ids}
    not_fixed = [id for id in checks.fail_to_pass if tests[id] not in SOLVES]
    regressed = [id for id in checks.pass_to_pass if tests[id] not in KEEPS]
    failures = any(outcome in ("failed", "error") for outcome in report.outcomes.values())
    if report.timed_out:
        reason = f"the tests did not end in {checks.timeout_s:g} s"
    elif reason := outcome_reason(checks, not_fixed, regressed, tests):
        reason += _parameters_hint(tests, report.outcomes)
    elif not report.finished or report.exit_code not in (0, 1):
        reason = f"pytest did not come to its end (exit code {report.exit_code})"
    elif (report.exit_code == 1) != failures:
        reason = f"pytest's exit code {report.exit_code} and the outcomes it reported do not agree"
    reward = 0.0 if reason else 1.0
    reason = reason or f"all {len(ids)} tests pass"
    return CheckResult(Verdict(reward=reward, reason=reason, tests=tests, log=report.log))
