"""The one place where a task's checks are run, whatever kind they are. A new kind of check is added here."""

from __future__ import annotations

import posixpath
import time

import msgspec
from msgspec.structs import replace

from understudy.checks.base import CheckResult, GradingOptions, failed_result, output_tail, read_result_file
from understudy.checks.pytest_checks import deciding_files, judge_pytest, run_pytest
from understudy.checks.suite import run_suite
from understudy.errors import ConfigError, GraderError
from understudy.sandbox.base import Sandbox
from understudy.types import PytestChecks, ScriptChecks, SuiteChecks, Task, Verdict, is_solved

REWARDS = "/tmp/understudy-rewards"
"""Where check scripts write their reward: the directory of `reward_file` is a link to it (`hidden_mounts`)."""

_REWARD_BYTES = 64 << 10


async def run_checks(sandbox: Sandbox, task: Task, patch: bytes, options: GradingOptions) -> CheckResult:
    """Run the task's checks in a sandbox where the gated `patch` was applied, and judge; `checks_s` is measured.

    Raises GraderError or SandboxError when there is no verdict.
    """
    started = time.monotonic()
    match task.checks:
        case PytestChecks() as checks:
            report = await run_pytest(sandbox, deciding_files(checks), timeout_s=checks.timeout_s)
            result = judge_pytest(checks, report)
        case ScriptChecks() as checks:
            result = await _run_script(sandbox, checks)
        case SuiteChecks():
            result = await run_suite(sandbox, task, patch, options)
    return replace(result, verdict=replace(result.verdict, checks_s=time.monotonic() - started))


async def _run_script(sandbox: Sandbox, checks: ScriptChecks) -> CheckResult:
    """Run a check script in the working directory: a reward of 1 or more solves the task, anything less does not.

    The reward is the number in `reward_file`, or in a `.json` beside it, else it is by the exit code. The hidden
    files are where the sandbox's mount for `checks.target` is. Raises SandboxError, or GraderError when the
    command does not exist, ConfigError when the sandbox shares its paths with this machine.
    """
    if sandbox.locate(checks.target) != checks.target:
        raise ConfigError(
            f"a check script writes to {checks.reward_file}, which is a file of this machine without isolation; "
            "run this task with --sandbox local"
        )
    await sandbox.run(["mkdir", "-p", REWARDS], timeout_s=30)
    done = await sandbox.run(checks.command, timeout_s=checks.timeout_s, cwd=sandbox.workdir)
    log = output_tail(done)
    if done.exit_code in (126, 127):
        raise GraderError(f"the check {checks.command} did not start (exit code {done.exit_code}):\n{log[-2000:]}")
    if done.timed_out:
        return failed_result(f"the checks did not end in {checks.timeout_s:g} s", log)
    text = await read_result_file(sandbox, checks.reward_file, _REWARD_BYTES)
    beside = await read_result_file(sandbox, posixpath.splitext(checks.reward_file)[0] + ".json", _REWARD_BYTES)
    try:
        if text.strip():
            reward = float(text)
        elif beside.strip():
            reward = float(msgspec.json.decode(beside, type=dict[str, float | int])["reward"])
        else:
            reward = 1.0 if done.exit_code == 0 else 0.0
    except (ValueError, KeyError, RecursionError) as error:
        return failed_result(f"the reward that the checks wrote is invalid, expected a number: {error}", log)
    solved = 1.0 if is_solved(reward) else 0.0
    return CheckResult(Verdict(reward=solved, reason=f"the checks gave {reward:g}", log=log))
