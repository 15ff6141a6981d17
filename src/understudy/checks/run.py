"""The one place where a task's checks are run, whatever kind they are. A new kind of check is added here."""

from __future__ import annotations

import asyncio
import math
import posixpath
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from understudy.checks.base import (
    CheckResult,
    GradingOptions,
    check_not_killed,
    failed_result,
    output_tail,
    read_result_file,
)
from understudy.checks.canaries import canary_problem, pytest_canaries
from understudy.checks.pytest_checks import deciding_files, judge_pytest, run_pytest
from understudy.checks.runtime_events import with_events
from understudy.checks.seal import HiddenFiles, changed_files, read_hidden, with_unchanged
from understudy.checks.suite import run_suite
from understudy.checks.twin_ids import DecidingTests
from understudy.checks.twin_run import VersionRun, WrittenVersion, run_version
from understudy.checks.twin_suite import run_suite_version
from understudy.errors import ConfigError, GraderError
from understudy.sandbox.base import Sandbox
from understudy.types import Evidence, Integrity, PytestChecks, ScriptChecks, SuiteChecks, Task, Verdict, is_solved

REWARDS = "/tmp/understudy-rewards"
"""Where check scripts write their reward: the directory of `reward_file` is a link to it (`hidden_mounts`)."""

_REWARD_BYTES = 64 << 10
_SCRIPT_BYTES = 1 << 20
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


async def run_checks(
    sandbox: Sandbox,
    task: Task,
    patch: bytes,
    options: GradingOptions,
    *,
    hidden: Path | None = None,
    is_intruder: Callable[[str], bool] = lambda path: False,
) -> CheckResult:
    """Run the task's checks in a sandbox where the gated `patch` was applied, and judge; `checks_s` is measured.

    `hidden` is the directory of a script check's files on this machine. `is_intruder` says of a path that an
    install made whether it must be removed before the tests run. Raises TaskError when the task's test patch
    cannot be read.
    Raises GraderError or SandboxError when there is no verdict.
    """
    started = time.monotonic()
    files: HiddenFiles = await read_hidden(sandbox, task) if options.sealed else {}
    match task.checks:
        case PytestChecks() as checks:
            result = await _run_pytest(sandbox, checks, options, files)
        case ScriptChecks() as checks:
            result = await _run_script(sandbox, checks, hidden)
        case SuiteChecks():
            result = await run_suite(sandbox, task, patch, options, files, is_intruder)
    result = await with_unchanged(sandbox, files, result)
    return replace(result, verdict=replace(result.verdict, checks_s=time.monotonic() - started))


async def run_task_version(
    sandbox: Sandbox,
    task: Task,
    patch: bytes,
    version: WrittenVersion,
    tests: DecidingTests,
    is_intruder: Callable[[str], bool],
    *,
    sealed: bool,
) -> VersionRun:
    """Run a version of a task's hidden files in a sandbox where the gated `patch` was applied.

    No code of the patch may have run there. `sealed`: the files are read-only while they run, and compared
    afterwards, as the originals are. Raises GraderError, SandboxError.
    """
    match task.checks:
        case PytestChecks() as checks:
            files: HiddenFiles = await read_hidden(sandbox, task) if sealed else {}
            await sandbox.seal(sorted(files))
            run = await run_version(sandbox, checks, version, timeout_s=checks.timeout_s)
            return replace(run, changed_files=tuple(await changed_files(sandbox, files)))
        case SuiteChecks() as checks:
            return await run_suite_version(
                sandbox, task, checks, patch, version, tests, is_intruder, sealed=sealed
            )
        case ScriptChecks():
            raise GraderError(f"task {task.instance_id}: check scripts have no versions")


async def _run_pytest(
    sandbox: Sandbox, checks: PytestChecks, options: GradingOptions, files: HiddenFiles
) -> CheckResult:
    """Run the deciding files with canaries beside the first of them, and judge what was reported."""
    run = deciding_files(checks)
    canaries = None
    if options.canaries and run:
        canaries = pytest_canaries(run[0], [text.encode() for name, text in checks.files.items() if name in run])
        await sandbox.write(posixpath.join(sandbox.workdir, canaries.path), canaries.text.encode())
        run = (*run, canaries.path)
    await sandbox.seal(sorted(files))
    report = await run_pytest(sandbox, run, timeout_s=checks.timeout_s)
    result = with_events(judge_pytest(checks, report), report.events, options.usual_events)
    results = {id: (outcome.upper(),) for id, outcome in report.outcomes.items()}
    problem = canary_problem(canaries, results) if canaries else ""
    if not problem or not is_solved(result.verdict.reward):
        return result
    integrity = Integrity("suspicious", problem, (Evidence(rule="canary", text=problem),))
    return replace(result, verdict=replace(result.verdict, reward=0.0, reason=problem, integrity=integrity))


async def _run_script(sandbox: Sandbox, checks: ScriptChecks, hidden: Path | None) -> CheckResult:
    """Run a check script in the working directory: a reward of 1 or more solves the task, anything less does not.

    The reward is the number in `reward_file`, or in a `.json` beside it. Where there is neither, it is by the exit
    code if no hidden file names them, else 0: the tested code can keep a script from writing its reward. A file
    that is there and holds no number is a reward of 0. A reward of 1 or more from a script that exits
    with another code than 0 was not written by it: `forged`. The hidden files are where the sandbox's mount for
    `checks.target` is. Raises SandboxError, or GraderError when the command does not exist, ConfigError when the
    sandbox shares its paths with this machine.
    """
    if sandbox.locate(checks.target) != checks.target:
        raise ConfigError(
            f"a check script writes to {checks.reward_file}, which is a file of this machine without isolation; "
            "run this task with --sandbox local"
        )
    await sandbox.run(["mkdir", "-p", REWARDS], timeout_s=30)
    done = await sandbox.run(checks.command, timeout_s=checks.timeout_s, cwd=sandbox.workdir)
    check_not_killed(done)
    log = output_tail(done)
    if done.exit_code in (126, 127):
        raise GraderError(f"the check {checks.command} did not start (exit code {done.exit_code}):\n{log[-2000:]}")
    if done.timed_out:
        return failed_result(f"the checks did not end in {checks.timeout_s:g} s", log)
    try:
        written = await _written_reward(sandbox, checks.reward_file)
    except ValueError as error:
        return failed_result(f"the reward that the checks wrote is invalid, expected a number: {error}", log)
    if written is None and await asyncio.to_thread(_names_reward, checks, hidden):
        return failed_result(f"the checks wrote no reward to {checks.reward_file}, which their files name", log)
    reward = float(done.exit_code == 0) if written is None else written
    if is_solved(reward) and done.exit_code != 0:
        reason = f"a reward of {reward:g} was written, but the checks ended with exit code {done.exit_code}"
        integrity = Integrity("forged", reason, (Evidence(rule="script-reward", text=reason),))
        return CheckResult(Verdict(reward=0.0, reason=reason, log=log, integrity=integrity))
    solved = 1.0 if is_solved(reward) else 0.0
    return CheckResult(Verdict(reward=solved, reason=f"the checks gave {reward:g}", log=log))


def _names_reward(checks: ScriptChecks, hidden: Path | None) -> bool:
    """Whether a hidden file names the file for the reward, so that it is expected to be written."""
    name = posixpath.splitext(posixpath.basename(checks.reward_file))
    names = (f"{name[0]}{name[1]}".encode(), f"{name[0]}.json".encode())
    files = [path for path in hidden.rglob("*") if path.is_file()] if hidden else []
    texts = (path.read_bytes() for path in files if path.stat().st_size <= _SCRIPT_BYTES)
    return any(name in text for text in texts for name in names)


async def _written_reward(sandbox: Sandbox, path: str) -> float | None:
    """The reward in a script's file, or in the `.json` beside it; None when there is neither.

    Raises ValueError when what is there is no regular file of at most `_REWARD_BYTES` bytes with a number in it.
    """
    beside = posixpath.splitext(path)[0] + ".json"
    for name in (path, beside):
        content = await read_result_file(sandbox, name, _REWARD_BYTES)
        if content is None:
            raise ValueError(f"{name} is no regular file that can be read, of at most {_REWARD_BYTES} bytes")
        text = content.decode(errors="replace").strip()
        if not text:
            continue
        if name == beside:
            try:
                text = str(msgspec.json.decode(content, type=dict[str, float | int])["reward"])
            except (ValueError, KeyError, RecursionError) as error:
                raise ValueError(f"{name}: {error}") from error
        if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
            raise ValueError(f"{name} holds {text[:40]!r}")
        return float(text)
    return None
