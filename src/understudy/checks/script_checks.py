"""Checks that are a script, which runs in the tree and gives a reward: in a file, or by its exit code."""

from __future__ import annotations

import posixpath

import msgspec
from msgspec import Struct

from understudy.checks.base import CheckResult, failed_result, output_tail, read_result_file
from understudy.errors import ConfigError, GraderError
from understudy.sandbox.base import Sandbox
from understudy.types import ScriptChecks, Verdict, is_solved

REWARDS = "/tmp/understudy-rewards"
"""Where check scripts write their reward: the directory of `reward_file` is a link to it (`hidden_mounts`)."""

_REWARD_BYTES = 64 << 10


class ScriptResult(Struct):
    """How a check script ended: its reward (None when it is invalid, see `complaint`) and its output's end."""

    reward: float | None
    exit_code: int | None
    timed_out: bool
    log: str
    complaint: str = ""


async def run_script(sandbox: Sandbox, checks: ScriptChecks, *, env: dict[str, str] | None = None) -> ScriptResult:
    """Run a check script in the working directory and read the reward it wrote.

    The hidden files are where the sandbox's mount for `checks.target` is. Raises SandboxError, or GraderError when
    the command does not exist, ConfigError when the sandbox shares its paths with this machine.
    """
    if sandbox.locate(checks.target) != checks.target:
        raise ConfigError(
            f"a check script writes to {checks.reward_file}, which is a file of this machine without isolation; "
            "run this task with --sandbox local"
        )
    await sandbox.run(["mkdir", "-p", REWARDS], timeout_s=30)
    located = sandbox.locate(checks.target)
    command = [
        located + word.removeprefix(checks.target) if word.startswith(checks.target + "/") else word
        for word in checks.command
    ]
    done = await sandbox.run(command, timeout_s=checks.timeout_s, env=env, cwd=sandbox.workdir)
    log = output_tail(done)
    if done.exit_code in (126, 127):
        raise GraderError(
            f"the check {checks.command} could not be started (exit code {done.exit_code}):\n{log[-2000:]}"
        )
    result = ScriptResult(None, done.exit_code, done.timed_out, log)
    if done.timed_out:
        return result
    text = await read_result_file(sandbox, checks.reward_file, _REWARD_BYTES)
    beside = await read_result_file(sandbox, posixpath.splitext(checks.reward_file)[0] + ".json", _REWARD_BYTES)
    try:
        if text.strip():
            result.reward = float(text)
        elif beside.strip():
            result.reward = float(msgspec.json.decode(beside, type=dict[str, float | int])["reward"])
        else:
            result.reward = 1.0 if done.exit_code == 0 else 0.0
    except (ValueError, KeyError, RecursionError) as error:
        result.complaint = f"the reward that the checks wrote is invalid, expected a number: {error}"
    return result


def judge_script(checks: ScriptChecks, result: ScriptResult) -> CheckResult:
    """Judge a script's result: a reward of 1 or more solves the task, anything less does not."""
    if result.timed_out:
        return failed_result(f"the checks did not end in {checks.timeout_s:g} s", result.log)
    if result.reward is None:
        return failed_result(result.complaint, result.log)
    reward = 1.0 if is_solved(result.reward) else 0.0
    return CheckResult(Verdict(reward=reward, reason=f"the checks gave {result.reward:g}", log=result.log))
