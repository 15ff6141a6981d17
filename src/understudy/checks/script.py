"""Check scripts: runs one, watched, and reads the reward that it wrote.

A script runs as the same user as the code that it tests. So the Pythons that it starts, and their children, are
prevented from writing the reward, if the gold patch's run has shown that the script works with that.
"""

from __future__ import annotations

import asyncio
import math
import posixpath
import re
import shlex
from pathlib import Path

import msgspec
from msgspec.structs import replace

from understudy.checks.base import (
    CheckResult,
    GradingOptions,
    UnusableFile,
    check_not_killed,
    failed_result,
    output_tail,
    read_written_file,
)
from understudy.checks.runtime_events import SEPARATE_OUTPUT, Watch, count_programs, read_processes, with_events
from understudy.checks.startup_files import (
    PRINT_DIRECTORIES,
    StartupFiles,
    directories_of,
    installed_items,
    list_startup_files,
    with_installed,
)
from understudy.errors import ConfigError, GraderError
from understudy.sandbox.base import Completed, Sandbox, below
from understudy.types import Evidence, Integrity, ScriptChecks, Verdict, is_solved

REWARDS = "/var/tmp/understudy-rewards"
"""Where check scripts write their reward: the directory of `reward_file` is a link to it (`hidden_mounts`).

Not in /tmp: processes that cannot write it can make nothing in the directory that it is in either
(`watch/landlock.py`)."""

_REWARD_BYTES = 64 << 10
_SCRIPT_BYTES = 1 << 20
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

_KILLED = re.compile(rb"^(?:.*: line [0-9]+: +[0-9]+ )?Killed\b", re.MULTILINE)
"""What bash, and other shells by the word alone, write about a program that got SIGKILL."""


async def run_script(
    sandbox: Sandbox, checks: ScriptChecks, options: GradingOptions, hidden: Path | None
) -> CheckResult:
    """Run a check script in the working directory. A reward of 1 or more solves the task, a smaller one does not.

    The reward is the number in `reward_file`, or in a `.json` beside it. If neither exists and no hidden file
    mentions them, the exit code decides; if one mentions them, the reward is 0, because the tested code can
    prevent a script from writing it. A file without a number is a reward of 0. A reward of 1 or more counts as
    `forged` if the script's exit code is not 0. The hidden files are at the sandbox's mount for `checks.target`.
    Raises SandboxError, GraderError when the command does not exist, and ConfigError when the sandbox does not
    isolate the reward file from this machine.
    """
    if sandbox.locate(checks.target) != checks.target:
        raise ConfigError(
            f"a check script writes to {checks.reward_file}, which an unisolated sandbox would write on this "
            "machine itself; run this task with --sandbox local or docker"
        )
    await sandbox.run(["mkdir", "-p", REWARDS], timeout_s=30)
    watch = _watch(sandbox, checks, options, hidden)
    argv, env = checks.command, None
    directories: tuple[str, ...] = ()
    before: StartupFiles = {}
    if watch is not None:
        directories_result = await sandbox.run(["/bin/sh", "-c", PRINT_DIRECTORIES], timeout_s=30, cwd="/")
        directories = directories_of(directories_result.stdout.decode(errors="replace"))
        before = await list_startup_files(sandbox, directories)
        script = f'{SEPARATE_OUTPUT}{watch.exports(sandbox)}exec "$@"\n'
        argv, env = ("/bin/sh", "-c", script, "sh", *argv), watch.env(sandbox)
    completed = await sandbox.run(argv, timeout_s=checks.timeout_s, cwd=sandbox.workdir, env=env)
    result = await _judge_script(sandbox, checks, hidden, replace(completed, stderr=b"") if watch else completed)
    if watch is None:
        return result
    solved = is_solved(result.verdict.reward)
    events = read_processes(completed, finished=solved)
    if solved:  # a script may end at the first thing that fails
        events = (*events, count_programs(completed))
    result = with_events(result, events, options.usual_events)
    # Code that the tested program leaves there would run in the script's later Pythons, before the wall and the
    # watch.
    after = await list_startup_files(sandbox, directories) if solved else before
    added = await installed_items(sandbox, before, after)
    if options.usual_installed is None:  # a script may install what it needs, such as pytest
        return replace(result, installed=added)
    return with_installed(result, added, options.usual_installed)


def _watch(sandbox: Sandbox, checks: ScriptChecks, options: GradingOptions, hidden: Path | None) -> Watch | None:
    if not options.watched or hidden is None:
        return None
    files = [path for path in sorted(hidden.rglob("*")) if path.is_file()]
    names = {path: posixpath.join(checks.target, *path.relative_to(hidden).parts) for path in files}
    json_reward = posixpath.splitext(checks.reward_file)[0] + ".json"
    is_separate = not any(below(checks.reward_file, area) for area in (sandbox.workdir, "/tmp"))
    return Watch(
        tests=tuple(name for path, name in names.items() if path.suffix == ".py"),
        other_files=tuple(name for path, name in names.items() if path.suffix != ".py"),
        rewards=(checks.reward_file, json_reward),
        walled=options.walled and is_separate,
    )


async def _judge_script(
    sandbox: Sandbox, checks: ScriptChecks, hidden: Path | None, completed: Completed
) -> CheckResult:
    check_not_killed(completed)
    log = output_tail(completed)
    if completed.exit_code in (126, 127):
        raise GraderError(
            f"the check `{shlex.join(checks.command)}` ended with exit code {completed.exit_code} (127: a command "
            "is missing, 126: it is not executable); install the program that the output names in the task's "
            f"environment, or make it executable:\n{log[-2000:]}"
        )
    if completed.timed_out:
        return failed_result(f"the checks did not end in {checks.timeout_s:g} s", log)
    try:
        written_reward = await _written_reward(sandbox, checks.reward_file)
    except ValueError as error:
        return failed_result(
            f"invalid reward: {error}; if the gold patch gets this too, correct the check script", log
        )
    if written_reward is None and await asyncio.to_thread(_mentions_reward, checks, hidden):
        return failed_result(f"the checks wrote no reward to {checks.reward_file}, which their files name", log)
    reward = float(completed.exit_code == 0) if written_reward is None else written_reward
    if is_solved(reward) and completed.exit_code != 0:
        reason = f"a reward of {reward:g} was written, but the checks ended with exit code {completed.exit_code}"
        integrity = Integrity("forged", reason, (Evidence(rule="script-reward", text=reason),))
        return CheckResult(Verdict(reward=0.0, reason=reason, log=log, integrity=integrity))
    solved = 1.0 if is_solved(reward) else 0.0
    killed = not solved and _KILLED.search(completed.stdout + b"\n" + completed.stderr) is not None
    return CheckResult(Verdict(reward=solved, reason=f"the checks gave {reward:g}", log=log), killed=killed)


def _mentions_reward(checks: ScriptChecks, hidden: Path | None) -> bool:
    """Return whether a hidden file mentions the reward's file, so that the script is expected to write it."""
    name = posixpath.splitext(posixpath.basename(checks.reward_file))
    names = (f"{name[0]}{name[1]}".encode(), f"{name[0]}.json".encode())
    files = [path for path in hidden.rglob("*") if path.is_file()] if hidden else []
    texts = (path.read_bytes() for path in files if path.stat().st_size <= _SCRIPT_BYTES)
    return any(name in text for text in texts for name in names)


async def _written_reward(sandbox: Sandbox, path: str) -> float | None:
    """Return the reward in a script's file, or in the `.json` beside it; None if neither exists.

    Raises ValueError if the file is not a regular one of at most `_REWARD_BYTES` bytes with a number up to 1.
    """
    json_path = posixpath.splitext(path)[0] + ".json"
    for name in (path, json_path):
        try:
            content = await read_written_file(sandbox, name, _REWARD_BYTES)
        except UnusableFile as error:
            raise ValueError(
                f"{name}: {error}; expected a readable regular file of at most {_REWARD_BYTES} bytes"
            ) from error
        text = content.decode(errors="replace").strip()
        if not text:
            continue
        if name == json_path:
            try:
                text = str(msgspec.json.decode(content, type=dict[str, float | int])["reward"])
            except (ValueError, KeyError, RecursionError) as error:
                raise ValueError(
                    f'{name}: expected an object with a number as "reward", got {text[:40]!r}'
                ) from error
        if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
            raise ValueError(f"{name}: expected a finite number, got {text[:40]!r}")
        if float(text) > 1:  # what tested code prints may stand before the script's own digits: 1 and 0.0 are 10
            raise ValueError(f"{name}: expected at most 1, the reward of a solved task, got {text[:40]!r}")
        return float(text)
    return None
