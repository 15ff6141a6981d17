"""Running a test suite by its own command, a phase at a time, and judging what it printed.

Each phase is a command of its own whose whole output is taken, so no text in it can be mistaken for where a phase
begins or ends; and no process outlives its phase. The tested code can still print what it likes, and end the
process when it likes: the canaries, the exit code and contradictions are what tells on it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.canaries import FAILED_CODE, NONE_SEEN, Canaries, canary_problem, plant_canaries
from understudy.checks.log_parsers import (
    ERROR,
    FAILED,
    PARSERS,
    PASSED,
    SKIPPED,
    XFAIL,
    LoggedTest,
    ParsedLog,
    is_cut,
    parse_log,
)
from understudy.checks.swebench_parsers import UnreadableLog
from understudy.errors import GraderError
from understudy.sandbox.base import Sandbox
from understudy.types import Evidence, Integrity, SuiteChecks, Task, TestOutcome, Verdict
from understudy.util.diffs import parse_diff

_LOG_CHARS = 32_000
_OUTCOMES: dict[str, TestOutcome] = {
    PASSED: "passed",
    FAILED: "failed",
    ERROR: "error",
    SKIPPED: "skipped",
    XFAIL: "xfailed",
}
_SOLVES = frozenset({PASSED, XFAIL})
_KEEPS = _SOLVES | {SKIPPED}
_FAILS = frozenset({FAILED, ERROR})

# What a package is built or installed from: a change of it is not seen before it is installed again.
_INSTALLED = re.compile(
    r"(?:.*/)?(?:setup\.py|setup\.cfg|pyproject\.toml|MANIFEST\.in|CMakeLists\.txt|meson\.build|Cargo\.toml|"
    r"__init__\.py|requirements[^/]*\.txt|[^/]*\.(?:pyx|pxd|pxi|c|cc|cpp|cxx|h|hh|hpp|f|f90|rs))"
)
# Commands after which the tree itself is what is imported; anything else on the line, and it does more.
_EDITABLE = re.compile(
    r"\s*(?:\S*python[\d.]*\s+)?(?:-m\s+)?(?:\S*pip[\d.]*\s+install\s(?:[^;&|<>`$]*\s)?(?:-e|--editable)[\s=][^;&|<>`$]*|"
    r"setup\.py\s+(?:[^;&|<>`$]*\s)?develop\b[^;&|<>`$]*)"
)

_NOT_LOADED = re.compile(r"^ERROR: (\S+) \(unittest\.loader\._FailedTest", re.MULTILINE)

# A sandbox has no network: pip need not try again, nor look for a newer pip.
_WITHOUT_NETWORK = {"PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
# pip fetches what it builds with unless it is told to build with what is installed.
_AS_IT_STANDS = {"PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_DEPS": "1"}


class SuiteRun(Struct, frozen=True):
    """What a suite's command did. `log` is all it printed, with line ends as `\\n`, unless it was `truncated`.

    `exit_code` is None after a timeout.
    """

    log: str
    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False


async def run_before_patch(sandbox: Sandbox, checks: SuiteChecks) -> None:
    """Run what comes before any patch. Its exit code does not count. Raises GraderError when it does not end."""
    if checks.before.strip() and (await run_command(sandbox, checks, checks.before)).timed_out:
        raise GraderError(f"what runs before the patch did not end in {checks.timeout_s:g} s")


class Judged(Struct, frozen=True):
    """A verdict; and how often expected tests failed that also passed, by id."""

    verdict: Verdict
    conflicts: dict[str, int] = {}


async def run_suite(
    sandbox: Sandbox, task: Task, patch: bytes, *, with_canaries: bool, allowed_conflicts: Mapping[str, int]
) -> Judged:
    """Install what the patch makes necessary, run the suite with canaries in it, and judge.

    The patch, gated, was applied in this sandbox before, and so was the test patch. Raises GraderError,
    SandboxError.
    """
    checks = task.checks
    if not isinstance(checks, SuiteChecks):
        raise GraderError(f"task {task.instance_id}: its checks are no suite")
    if checks.install.strip() and needs_install(checks, patch):
        installed = await _install(sandbox, checks)
        if installed.timed_out:
            return _failed(f"the installation did not end in {checks.timeout_s:g} s", installed.log)
    canaries = plant_canaries(checks) if with_canaries else None
    if canaries is not None:
        await sandbox.write(canaries.path, canaries.text.encode())
    run = await run_command(sandbox, checks, canaries.command if canaries else checks.command)
    if run.timed_out:  # before all else, for reading it may take long
        return _failed(f"the tests did not end in {checks.timeout_s:g} s", run.log)
    return await asyncio.to_thread(judge_suite, task, run, canaries, allowed_conflicts)


async def _install(sandbox: Sandbox, checks: SuiteChecks) -> SuiteRun:
    """Install as the suite says, and where that fails with nothing but what is there already."""
    first = await run_command(sandbox, checks, checks.install, env=_WITHOUT_NETWORK)
    if first.timed_out or first.exit_code == 0:
        return first
    return await run_command(sandbox, checks, checks.install, env=_WITHOUT_NETWORK | _AS_IT_STANDS)


async def run_command(
    sandbox: Sandbox, checks: SuiteChecks, command: str, *, env: Mapping[str, str] | None = None
) -> SuiteRun:
    """Run one of the suite's commands in the workdir, as a phase of its own. Raises SandboxError.

    Line ends are made one kind, as by everybody who reads a log as a text file.
    """
    script = f"exec 2>&1\n{checks.activate}\n{command}\n"
    done = await sandbox.run(["bash", "-c", script], timeout_s=checks.timeout_s, cwd=sandbox.workdir, env=env)
    log = (done.stdout + done.stderr).decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return SuiteRun(log, done.exit_code, done.timed_out, done.truncated)


def needs_install(checks: SuiteChecks, patch: bytes) -> bool:
    """Whether a patch changes what only an installation brings about."""
    steps = [line for line in checks.install.splitlines() if line.strip()]
    if checks.parser not in PARSERS or not all(map(_EDITABLE.fullmatch, steps)):
        return True
    paths = {path.decode(errors="replace") for file in parse_diff(patch) for path in file.paths}
    return any(_INSTALLED.fullmatch(path) for path in paths)


def judge_suite(
    task: Task, run: SuiteRun, canaries: Canaries | None, allowed: Mapping[str, int] | None = None
) -> Judged:
    """What a suite's run says of a patch, in the way of SWE-bench, and whether it can be believed.

    `allowed` tells for test ids that failed beside passing with the gold patch how often they did: a name that
    stands for several tests is no forgery. Raises GraderError when there is no such parser.
    """
    checks = task.checks
    if not isinstance(checks, SuiteChecks):
        raise GraderError(f"task {task.instance_id}: its checks are no suite")
    ids = (*checks.fail_to_pass, *checks.pass_to_pass)
    instance = f"{task.instance_id} {task.meta.get('version', '')}"
    try:
        reading = parse_log(
            checks.parser, run.log, ids, containing=canaries.token if canaries else "", instance=instance
        )
    except UnreadableLog as error:
        return _failed(f"the output of the tests cannot be read: {error}", run.log)
    seen = {id: find_test(id, reading.tests) for id in ids}
    tests: dict[str, TestOutcome] = {id: _outcome(test) for id, test in seen.items()}
    verdict = Verdict(reward=0.0, reason="", tests=tests, log=_end(run.log))
    cut = "the output was cut, for it is larger than what is taken; " if run.truncated else ""
    if reason := cut + _says(checks, reading, seen):
        return Judged(replace(verdict, reason=reason.removesuffix("; ")))
    counts = {id: count for id, test in seen.items() if test and (count := _failures(test))}
    conflicts = {id: count for id, count in counts.items() if count > (allowed or {}).get(id, 0)}
    # All is well by the log; what follows is whether it tells the truth.
    for rule, found in (
        ("conflict", _contradiction(conflicts) or _unloaded(run.log, [id for id in ids if seen[id]])),
        ("canary", canary_problem(canaries, reading) if canaries else ""),
        ("exit-code", _disagreement(run, reading, canaries)),
    ):
        if found:
            # With these rules a suite that could not begin looks like one without failures.
            honest = checks.only_failures_count and found == NONE_SEEN
            evidence = (Evidence(rule=rule, text=found[:500]),)
            integrity = Integrity() if honest else Integrity("suspicious", found, evidence)
            tests.update(dict.fromkeys(conflicts, "failed"))
            return Judged(replace(verdict, reason=found, tests=tests, integrity=integrity), counts)
    note = (
        "" if canaries or checks.parser not in PARSERS else " (without canaries: the gold patch fails with them)"
    )
    return Judged(replace(verdict, reward=1.0, reason=f"all {len(ids)} tests pass{note}"), counts)


def find_test(id: str, found: Mapping[str, LoggedTest]) -> LoggedTest | None:
    """What was seen of an expected id; for one that was cut inside its parameters, what all with it agree on."""
    if id in found or not is_cut(id):
        return found.get(id)
    same = [seen for name, seen in found.items() if name.startswith(id)]
    return same[0] if len({seen.last in _SOLVES for seen in same}) == 1 else None


def _says(checks: SuiteChecks, reading: ParsedLog, seen: Mapping[str, LoggedTest | None]) -> str:
    """Why the patch is not resolved by the log alone; empty when it is."""
    if not reading.ran:
        return "no test came to its end"
    if checks.only_failures_count:
        wrong = [id for id in seen if (test := reading.tests.get(id)) and test.last == FAILED]
        return f"{len(wrong)} of {len(seen)} tests fail: {_some(wrong, seen)}" if wrong else ""
    wrong = _not_in(_SOLVES, checks.fail_to_pass, seen)
    if wrong:
        return f"{len(wrong)} of {len(checks.fail_to_pass)} tests to mend still fail: {_some(wrong, seen)}"
    broken = _not_in(_KEEPS, checks.pass_to_pass, seen)
    if broken:
        return f"{len(broken)} of {len(checks.pass_to_pass)} tests that passed now fail: {_some(broken, seen)}"
    return ""


def _contradiction(conflicts: Collection[str]) -> str:
    some = ", ".join(list(conflicts)[:3])
    return f"{len(conflicts)} tests are said to have passed and failed: {some}" if conflicts else ""


def _unloaded(log: str, ids: Collection[str]) -> str:
    """What is wrong when tests are said to have passed whose module unittest could not import."""
    modules = {match[1] for match in _NOT_LOADED.finditer(log)}
    for id in ids if modules else ():
        parts = id.partition("(")[2].rstrip(")").split(".")
        if any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1)):
            return f"{id} is said to have passed, but what it is in could not be imported"
    return ""


def _disagreement(run: SuiteRun, reading: ParsedLog, canaries: Canaries | None) -> str:
    if canaries is not None and run.exit_code != FAILED_CODE:
        return f"the tests ended with exit code {run.exit_code}, where canaries fail it is {FAILED_CODE}"
    if canaries is None and run.exit_code != 0 and reading.any_test and not reading.failures:
        return f"the tests ended with exit code {run.exit_code}, but none is said to have failed"
    return ""


def _failures(seen: LoggedTest) -> int:
    return sum(seen.counts.get(status, 0) for status in _FAILS)


def _not_in(statuses: Collection[str], ids: Collection[str], seen: Mapping[str, LoggedTest | None]) -> list[str]:
    return [id for id in ids if (test := seen[id]) is None or test.last not in statuses]


def _outcome(seen: LoggedTest | None) -> TestOutcome:
    return "missing" if seen is None else _OUTCOMES.get(seen.last, "failed")


def _some(ids: list[str], seen: Mapping[str, LoggedTest | None]) -> str:
    shown = ", ".join(f"{id} ({_outcome(seen[id])})" for id in ids[:3])
    return shown + (", …" if len(ids) > 3 else "")


def _end(log: str) -> str:
    return log[-_LOG_CHARS:]


def _failed(reason: str, log: str) -> Judged:
    return Judged(Verdict(reward=0.0, reason=reason, log=_end(log)))
