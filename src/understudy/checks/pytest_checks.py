"""Running a task's hidden checks inside an open sandbox and reading back what happened."""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from understudy.checks import report_plugin
from understudy.errors import ConfigError, GraderError, SandboxError
from understudy.sandbox.base import Completed, Mount, Sandbox
from understudy.types import PytestChecks, ScriptChecks, TestOutcome

PLUGIN_MOUNT = Mount(Path(report_plugin.__file__), "/opt/understudy/report_plugin.py")
"""Every sandbox in which `run_pytest` is called must have this mount; `sandbox_spec` adds it."""

REWARDS = "/tmp/understudy-rewards"
"""Where check scripts write their reward: the directory of `reward_file` is a link to it (`hidden_mounts`)."""

_REPORT_BYTES = 32 << 20
_REWARD_BYTES = 64 << 10
_LOG_CHARS = 32_000
_NOT_STARTED = frozenset({126, 127, report_plugin.NOT_STARTED})


class PytestReport(Struct):
    """What pytest did: outcome by node id, failures as seen from the test's file, and how the process ended.

    `exit_code` is None after a timeout. `finished` is true when pytest came to its own end and said so; without
    it a test that was still running is not in `outcomes`. `log` is the end of its output.
    """

    outcomes: dict[str, TestOutcome]
    messages: dict[str, str]
    exit_code: int | None
    timed_out: bool
    log: str
    finished: bool = True


class ScriptResult(Struct):
    """What a check script said: its reward, or None when it gave none that can be read, and its output's end."""

    reward: float | None
    exit_code: int | None
    timed_out: bool
    log: str
    complaint: str = ""


class _ReportLine(Struct):
    id: str = ""
    when: str = ""
    outcome: str = ""
    message: str = ""
    start: str | None = None
    end: int | None = None


class _TestPhases(Struct):
    """All that was reported of one test, by phase."""

    outcomes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    message: str = ""


def deciding_files(checks: PytestChecks) -> tuple[str, ...]:
    """The files to run, sorted: those of the node ids that decide, or all hidden ones when no id does."""
    ids = (*checks.fail_to_pass, *checks.pass_to_pass)
    return tuple(sorted({id.partition("::")[0] for id in ids} or checks.files))


async def run_pytest(sandbox: Sandbox, files: Sequence[str], *, timeout_s: float) -> PytestReport:
    """Run pytest over `files` (relative to the working directory) in one command.

    The tree's own plugins, cache and entry points are off; its configuration counts. Raises GraderError when
    pytest could not be started, SandboxError when the sandbox broke.
    """
    report = posixpath.join(sandbox.home, f".report-{secrets.token_hex(16)}.jsonl")
    driver = sandbox.locate(PLUGIN_MOUNT.target)
    paths = [posixpath.join(sandbox.workdir, file) for file in files]
    done = await sandbox.run(
        ["python", "-P", "-s", driver, report, sandbox.workdir, *paths],
        timeout_s=timeout_s,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=sandbox.workdir,
    )
    log = _log(done)
    if done.exit_code in _NOT_STARTED:
        # The tested code may exit like this too; but a pytest that can be loaded did start.
        probe = await sandbox.run(["python", "-P", "-s", "-c", "import pytest"], timeout_s=60, cwd="/")
        if probe.exit_code != 0:
            raise GraderError(f"pytest could not be started (exit code {done.exit_code}):\n{log[-2000:]}")
    raw = await _read_report(sandbox, report, _REPORT_BYTES)
    outcomes, messages, end = _outcomes(raw)
    finished = end is not None and end == done.exit_code
    return PytestReport(outcomes, messages, done.exit_code, done.timed_out, log, finished)


async def run_script(sandbox: Sandbox, checks: ScriptChecks, *, env: dict[str, str] | None = None) -> ScriptResult:
    """Run a check script in the working directory and read the reward it wrote.

    The hidden files are where the sandbox's mount for `checks.target` is. Raises SandboxError, or GraderError when
    the command does not exist, ConfigError when the sandbox shares its paths with this machine.
    """
    if sandbox.locate(checks.target) != checks.target:
        raise ConfigError(
            f"a check script writes to {checks.reward_file}, which without isolation is a file of this machine; "
            "run this task with --sandbox local"
        )
    await sandbox.run(["mkdir", "-p", REWARDS], timeout_s=30)
    located = sandbox.locate(checks.target)
    command = [
        located + word.removeprefix(checks.target) if word.startswith(checks.target + "/") else word
        for word in checks.command
    ]
    done = await sandbox.run(command, timeout_s=checks.timeout_s, env=env, cwd=sandbox.workdir)
    log = _log(done)
    if done.exit_code in (126, 127):
        raise GraderError(
            f"the check {checks.command} could not be started (exit code {done.exit_code}):\n{log[-2000:]}"
        )
    result = ScriptResult(None, done.exit_code, done.timed_out, log)
    if done.timed_out:
        return result
    text = await _read_report(sandbox, checks.reward_file, _REWARD_BYTES)
    beside = await _read_report(sandbox, posixpath.splitext(checks.reward_file)[0] + ".json", _REWARD_BYTES)
    try:
        if text.strip():
            result.reward = float(text)
        elif beside.strip():
            result.reward = float(msgspec.json.decode(beside, type=dict[str, float | int])["reward"])
        else:
            result.reward = 1.0 if done.exit_code == 0 else 0.0
    except (ValueError, KeyError, RecursionError) as error:
        result.complaint = f"the reward that the checks wrote is not a number: {error}"
    return result


async def _read_report(sandbox: Sandbox, path: str, limit: int) -> bytes:
    """A file the checks wrote; empty when there is none or it is unusable, which only the tested code causes."""
    try:
        return await sandbox.read(path, limit=limit)
    except FileNotFoundError:
        return b""
    except SandboxError:
        # Too large, a pipe or a directory: the tested code's doing. A broken sandbox fails here again.
        await sandbox.run(["true"], timeout_s=30)
        return b""


def _outcomes(raw: bytes) -> tuple[dict[str, TestOutcome], dict[str, str], int | None]:
    phases: dict[str, _TestPhases] = {}
    end: int | None = None
    decoder = msgspec.json.Decoder(_ReportLine)
    for text in raw.splitlines():
        try:
            line = decoder.decode(text)
        except (ValueError, RecursionError):
            continue  # a line cut by the death of the process, or written by the tested code
        if line.end is not None:
            end = line.end
        elif line.id:
            seen = phases.setdefault(line.id, _TestPhases())
            seen.outcomes.setdefault(line.when, set()).add(line.outcome)
            seen.message = seen.message or line.message
    outcomes: dict[str, TestOutcome] = {
        id: outcome for id, seen in phases.items() if (outcome := _outcome(seen.outcomes))
    }
    return outcomes, {id: seen.message for id, seen in phases.items() if seen.message}, end


_BY_CALL: dict[str, TestOutcome] = {
    "passed": "passed",
    "failed": "failed",
    "skipped": "skipped",
    "xfailed": "xfailed",
    "xpassed": "xpassed",
}


def _outcome(phases: dict[str, set[str]]) -> TestOutcome | None:
    """The outcome of one test from its phases; None when it never came to its end."""
    if "collect" in phases:
        return "error"
    if any(len(reported) > 1 for reported in phases.values()):
        return "failed"  # one phase with two results: somebody else wrote a line
    if "teardown" not in phases:
        return None
    setup, call, teardown = (next(iter(phases.get(phase, {""}))) for phase in ("setup", "call", "teardown"))
    if teardown != "passed" or setup == "failed":
        return "error"
    return _BY_CALL.get(call or setup, "error") if call or setup != "passed" else None


def _log(done: Completed) -> str:
    both = done.stdout + (b"\n" + done.stderr if done.stderr else b"")
    return both[-4 * _LOG_CHARS :].decode(errors="replace")[-_LOG_CHARS:]
