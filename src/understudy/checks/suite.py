"""Runs a test suite by its own command, phase by phase, and judges its output.

Each phase is a separate command, so that no printed text can imitate the start or end of a phase, and no process
outlives its phase. The tested code can still print anything and end the process at any time, which canaries, the
exit code and contradictions in the log reveal.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.base import (
    CheckResult,
    GradingOptions,
    check_not_killed,
    failed_result,
    list_tests,
    log_tail,
    outcome_reason,
    output_tail,
    read_result_file,
)
from understudy.checks.canaries import (
    CANARIES_NOT_RUN,
    FAILED_CODE,
    Canaries,
    canary_problem,
    plant_canaries,
    suite_files,
)
from understudy.checks.log_parsers import (
    ERROR,
    FAILED,
    PARSERS,
    PASSED,
    SKIPPED,
    XFAIL,
    LoggedTest,
    ParsedLog,
    UnreadableLog,
    is_cut,
    parse_log,
)
from understudy.checks.runtime_events import SEPARATE_OUTPUT, Watch, read_processes, with_events
from understudy.checks.seal import HiddenFiles, list_tree, rewrite_hidden
from understudy.checks.startup_files import (
    PRINT_DIRECTORIES,
    StartupFiles,
    directories_of,
    installed_items,
    list_startup_files,
    with_installed,
)
from understudy.errors import GraderError, SandboxError
from understudy.sandbox.base import Completed, Sandbox
from understudy.types import Evidence, Integrity, SuiteChecks, Task, TestOutcome, Verdict, is_solved
from understudy.util.diffs import parse_diff

_OUTCOMES: dict[str, TestOutcome] = {PASSED: "passed", ERROR: "error", SKIPPED: "skipped", XFAIL: "xfailed"}
_SOLVES = frozenset({PASSED, XFAIL})
_KEEPS = _SOLVES | {SKIPPED}
_FAILS = frozenset({FAILED, ERROR})

# Files from which a package is built or installed: changes in them have no effect until it is installed again.
_INSTALLED = re.compile(
    r"(?:.*/)?(?:setup\.py|setup\.cfg|pyproject\.toml|MANIFEST\.in|CMakeLists\.txt|meson\.build|Cargo\.toml|"
    r"__init__\.py|requirements[^/]*\.txt|[^/]*\.(?:pyx|pxd|pxi|c|cc|cpp|cxx|h|hh|hpp|f|f90|rs))"
)
# Install commands after which the tree itself is imported. Lines with anything else in them do not match.
_EDITABLE = re.compile(
    r"\s*(?:\S*python[\d.]*\s+)?(?:-m\s+)?(?:\S*pip[\d.]*\s+install\s(?:[^;&|<>`$]*\s)?(?:-e|--editable)[\s=][^;&|<>`$]*|"
    r"setup\.py\s+(?:[^;&|<>`$]*\s)?develop\b[^;&|<>`$]*)"
)

_TEST_BYTES = 8 << 20
# What tested code printed may stand before a runner's line.
_MID_LINE_FAILURE = re.compile(r"(?<=[^\n])(?:FAILED|ERROR) (\S+)")
_NOT_LOADED = re.compile(r"^ERROR: (\S+) \(unittest\.loader\._FailedTest", re.MULTILINE)

# A sandbox has no network, so pip must not retry, nor look for a newer pip.
_WITHOUT_NETWORK = {"PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
# pip reads PIP_NO_BUILD_ISOLATION=false as --no-build-isolation: it builds with the installed packages, and
# downloads none.
_INSTALLED_PACKAGES_ONLY = {"PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_DEPS": "1"}


_ACTIVATION_S = 120.0
_SHELL_VARIABLES = frozenset(("", "_", "OLDPWD", "PS1", "PWD", "SHLVL"))
"""What a shell sets for itself; functions, which bash exports as variables, have names that no variable has."""
_LoggedTests = Mapping[str, LoggedTest | None]


class SuiteRun(Struct, frozen=True):
    """The result of a suite's command. `log` is all its output, with `\n` as line ends, unless `truncated`.

    `exit_code` is None after a timeout. `watched` is the finished command if it was watched, with the evidence in
    its stderr.
    """

    log: str
    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False
    watched: Completed | None = None


async def run_before_patch(sandbox: Sandbox, checks: SuiteChecks) -> None:
    """Run the commands that precede any patch; their exit codes are ignored. Raises GraderError on a timeout."""
    if checks.before.strip() and (await run_command(sandbox, checks, checks.before)).timed_out:
        raise GraderError(
            f"the commands of checks.before did not end within {checks.timeout_s:g} s; raise "
            "checks.timeout_s of the task, or shorten the commands"
        )


async def run_suite(
    sandbox: Sandbox,
    task: Task,
    patch: bytes,
    options: GradingOptions,
    files: HiddenFiles,
    is_intruder: Callable[[str], bool],
) -> CheckResult:
    """Install if the patch requires it, run the suite with canaries among its tests, and judge the output.

    The gated `patch` and the suite's test patch must have been applied in this sandbox. After an install, the
    hidden `files` are written again, and paths for which `is_intruder` returns True are removed. Raises
    GraderError, SandboxError.
    """
    checks = _suite_checks(task)
    installs = bool(checks.install.strip()) and needs_install(checks, patch)
    directories: tuple[str, ...] = ()
    before: StartupFiles = {}
    if installs:
        directories = directories_of((await run_command(sandbox, checks, PRINT_DIRECTORIES)).log)
        before = await list_startup_files(sandbox, directories)
    if installed := await install_suite(sandbox, checks, patch, files, is_intruder):
        return failed_result(f"the installation did not end in {checks.timeout_s:g} s", installed.log)
    added: tuple[str, ...] = ()
    if installs:
        added = await installed_items(sandbox, before, await list_startup_files(sandbox, directories))
    canaries = None
    if options.canaries:
        canaries = plant_canaries(checks, await _contents(sandbox, suite_files(checks)))
    if canaries is not None:
        await sandbox.write(canaries.path, canaries.text.encode())
    await sandbox.seal([path for path, content in files.items() if content is not None])
    paths = tuple(posixpath.join(sandbox.workdir, path) for path, content in files.items() if content is not None)
    watch = Watch(paths) if options.watched and paths else None
    run = await run_command(sandbox, checks, canaries.command if canaries else checks.command, watch=watch)
    if run.timed_out:  # checked first, because parsing the output may take long
        return failed_result(f"the tests did not end in {checks.timeout_s:g} s", run.log)
    result = await asyncio.to_thread(judge_suite, task, run, canaries, options.conflicts)
    if run.watched is not None:
        events = read_processes(run.watched, finished=is_solved(result.verdict.reward))
        result = with_events(result, events, options.usual_events)
    return with_installed(result, added, options.usual_installed) if installs else result


async def install_suite(
    sandbox: Sandbox,
    checks: SuiteChecks,
    patch: bytes,
    files: HiddenFiles,
    is_intruder: Callable[[str], bool],
) -> SuiteRun | None:
    """Install if the gated patch requires it, write the hidden `files` again and remove intruders.

    Returns the installation if it timed out, otherwise None. Raises GraderError, SandboxError.
    """
    if not checks.install.strip() or not needs_install(checks, patch):
        return None
    before = await list_tree(sandbox)
    installed = await _install(sandbox, checks)
    if installed.timed_out:
        return installed
    await rewrite_hidden(sandbox, files, before, is_intruder)
    return None


async def _contents(sandbox: Sandbox, files: Sequence[str]) -> list[bytes]:
    """Return the contents of those test files that exist in the tree."""
    return [
        await read_result_file(sandbox, posixpath.join(sandbox.workdir, file), _TEST_BYTES) or b""
        for file in files
    ]


def _suite_checks(task: Task) -> SuiteChecks:
    if not isinstance(task.checks, SuiteChecks):
        raise GraderError(
            f"task {task.instance_id}: internal error: expected checks of kind suite, got "
            f"{type(task.checks).__name__}; please report it"
        )
    return task.checks


async def _install(sandbox: Sandbox, checks: SuiteChecks) -> SuiteRun:
    """Run the suite's installation; if it fails, run it again with only the packages that are installed."""
    first = await run_command(sandbox, checks, checks.install, env=_WITHOUT_NETWORK)
    if first.timed_out or first.exit_code == 0:
        return first
    return await run_command(sandbox, checks, checks.install, env=_WITHOUT_NETWORK | _INSTALLED_PACKAGES_ONLY)


async def activated_environment(sandbox: Sandbox, checks: SuiteChecks) -> dict[str, str]:
    """Return the variables that `checks.activate` sets or changes, such as PATH and CONDA_PREFIX.

    Must run before any untrusted program. Raises SandboxError when the commands fail or time out.
    """
    if not checks.activate.strip():
        return {}
    environments: list[dict[str, str]] = []
    for commands in ("", checks.activate):
        script = f"exec 3>&1 >/dev/null\n{commands}\nenv -0 >&3"
        completed = await sandbox.run(["bash", "-c", script], timeout_s=_ACTIVATION_S, cwd=sandbox.workdir)
        if completed.exit_code != 0:
            ending = (
                f"did not end within {_ACTIVATION_S:g} s"
                if completed.timed_out
                else f"failed with exit code {completed.exit_code}"
            )
            raise SandboxError(
                f"the commands that activate the task's environment {ending}: {output_tail(completed)[-500:]}; "
                "correct checks.activate of the task"
            )
        pairs = (line.partition("=") for line in completed.stdout.decode(errors="surrogateescape").split("\0"))
        environments.append({name: value for name, _, value in pairs if name not in _SHELL_VARIABLES})
    before, after = environments
    return {name: value for name, value in after.items() if before.get(name) != value}


async def run_command(
    sandbox: Sandbox,
    checks: SuiteChecks,
    command: str,
    *,
    env: Mapping[str, str] | None = None,
    watch: Watch | None = None,
) -> SuiteRun:
    """Run one of the suite's commands in the workdir, as a phase of its own. Raises SandboxError.

    Its Pythons are watched if there is a `watch`. The output's line ends become `\n`.
    """
    script = f"exec 2>&1\n{checks.activate}\n{command}\n"
    if watch is not None:
        script = f"{SEPARATE_OUTPUT}{checks.activate}\n{watch.exports(sandbox)}{command}\n"
        env = {**(env or {}), **watch.env(sandbox)}
    completed = await sandbox.run(["bash", "-c", script], timeout_s=checks.timeout_s, cwd=sandbox.workdir, env=env)
    check_not_killed(completed)
    output = completed.stdout if watch else completed.stdout + completed.stderr
    log = output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return SuiteRun(
        log, completed.exit_code, completed.timed_out, completed.truncated, completed if watch else None
    )


def needs_install(checks: SuiteChecks, patch: bytes) -> bool:
    """Return whether a patch changes files that have no effect before the package is installed again."""
    steps = [line for line in checks.install.splitlines() if line.strip()]
    if checks.parser not in PARSERS or not all(map(_EDITABLE.fullmatch, steps)):
        return True
    paths = {path.decode(errors="replace") for file in parse_diff(patch) for path in file.paths}
    return any(_INSTALLED.fullmatch(path) for path in paths)


def judge_suite(
    task: Task, run: SuiteRun, canaries: Canaries | None, allowed: Mapping[str, int] | None = None
) -> CheckResult:
    """Judge a patch by its suite's run, as SWE-bench does, and whether the output can be trusted.

    `allowed` is how often test ids may fail in addition to passing, as counted with the gold patch: a name may
    stand for several tests, which is no forgery. Raises GraderError when there is no such parser.
    """
    checks = _suite_checks(task)
    ids = (*checks.fail_to_pass, *checks.pass_to_pass)
    instance = f"{task.instance_id} {task.meta.get('version', '')}"
    token = canaries.token if canaries else ""
    try:
        parsed = parse_log(checks.parser, run.log, ids, containing=token, instance=instance)
    except UnreadableLog as error:
        return failed_result(f"the output of the tests cannot be parsed: {error}", run.log)
    logged = {id: find_test(id, parsed.tests) for id in ids}
    tests: dict[str, TestOutcome] = {id: _outcome(test) for id, test in logged.items()}
    verdict = Verdict(reward=0.0, reason="", tests=tests, log=log_tail(run.log))
    cut_note = "the output was cut, because it exceeds the sandbox's limit; " if run.truncated else ""
    if reason := cut_note + _unsolved_reason(checks, parsed, logged, tests):
        return CheckResult(replace(verdict, reason=reason.removesuffix("; ")))
    mid_line = Counter(match[1] for match in _MID_LINE_FAILURE.finditer(run.log))
    failed = {
        id: sum(test.counts.get(status, 0) for status in _FAILS) + mid_line[id]
        for id, test in logged.items()
        if test
    }
    counts = {id: count for id, count in failed.items() if count}
    conflicts = {id: count for id, count in counts.items() if count > (allowed or {}).get(id, 0)}
    conflict_text = (
        f"{len(conflicts)} tests both passed and failed in the output: {', '.join(list(conflicts)[:3])}"
    )
    results = {id: test.counts for id, test in parsed.tests.items()}
    # By the log alone the task is solved. The rest checks whether the log can be trusted: each entry has the name
    # of a rule and the problem that it found. Add further checks here.
    problems = (
        ("conflict", conflict_text if conflicts else ""),
        ("unloaded", _unloaded_module_problem(run.log, [id for id in ids if logged[id]])),
        ("canary", canary_problem(canaries, results) if canaries else ""),
        ("exit-code", _exit_code_problem(run, parsed, canaries)),
    )
    for rule, problem in problems:
        if problem:
            # If only failures are logged, a suite that could not start looks like one without failures.
            honest = checks.only_failures_count and problem == CANARIES_NOT_RUN
            evidence = (Evidence(rule=rule, text=problem[:500]),)
            integrity = Integrity() if honest else Integrity("suspicious", problem, evidence)
            tests.update(dict.fromkeys(conflicts, "failed"))
            return CheckResult(replace(verdict, reason=problem, tests=tests, integrity=integrity), counts)
    canary_note = " (without canaries: the gold patch fails with them)"
    note = canary_note if checks.parser in PARSERS and not canaries else ""
    return CheckResult(replace(verdict, reward=1.0, reason=f"all {len(ids)} tests pass{note}"), counts)


def find_test(id: str, logged: Mapping[str, LoggedTest]) -> LoggedTest | None:
    """Return what the log has for an expected id.

    An id that is cut off inside its parameters matches every test that begins with it, if their results agree.
    """
    if id in logged or not is_cut(id):
        return logged.get(id)
    matches = [test for name, test in logged.items() if name.startswith(id)]
    return matches[0] if len({test.last in _SOLVES for test in matches}) == 1 else None


def _unsolved_reason(
    checks: SuiteChecks, parsed: ParsedLog, logged: _LoggedTests, tests: Mapping[str, TestOutcome]
) -> str:
    """Return why the patch does not solve the task, judged by the tests' log alone; "" if it does."""
    if not parsed.ran:
        return "no test came to its end"
    if checks.only_failures_count:
        wrong = [id for id in logged if (test := parsed.tests.get(id)) and test.last == FAILED]
        return f"{len(wrong)} of {len(logged)} tests fail: {list_tests(wrong, tests)}" if wrong else ""
    not_fixed = _not_in(_SOLVES, checks.fail_to_pass, logged)
    return outcome_reason(checks, not_fixed, _not_in(_KEEPS, checks.pass_to_pass, logged), tests)


def _unloaded_module_problem(log: str, ids: Collection[str]) -> str:
    """Return a problem if tests passed, by the output, in a module that unittest could not import;
    otherwise "".
    """
    modules = {match[1] for match in _NOT_LOADED.finditer(log)}
    for id in ids if modules else ():
        parts = id.partition("(")[2].rstrip(")").split(".")
        if any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1)):
            return f"{id} passed by the output, but its module could not be imported"
    return ""


def _exit_code_problem(run: SuiteRun, parsed: ParsedLog, canaries: Canaries | None) -> str:
    if canaries is not None and run.exit_code != FAILED_CODE:
        return f"the tests ended with exit code {run.exit_code}, expected {FAILED_CODE} because canaries fail"
    if canaries is None and run.exit_code != 0 and parsed.any_test and not parsed.failures:
        return f"the tests ended with exit code {run.exit_code}, but none failed by their output"
    return ""


def _not_in(statuses: Collection[str], ids: Collection[str], logged: _LoggedTests) -> list[str]:
    return [id for id in ids if (test := logged[id]) is None or test.last not in statuses]


def _outcome(test: LoggedTest | None) -> TestOutcome:
    return "missing" if test is None else _OUTCOMES.get(test.last, "failed")
