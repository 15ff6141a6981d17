"""What every kind of check returns, and how its reasons are worded."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from understudy.errors import SandboxError, SandboxLost
from understudy.sandbox.base import Completed, Sandbox
from understudy.types import Evidence, PytestChecks, SuiteChecks, TestOutcome, Verdict

T = TypeVar("T")

_LOG_CHARS = 32_000
_MOST_NAMES = 3


class CheckResult(Struct, frozen=True):
    """The verdict of a task's checks, as they found the tree.

    `conflicts` counts by test id how often a deciding test failed that also passed. Only suites report them, and
    only validation asks: it allows as many as the gold patch has. `events` is what was seen of the tested code
    (see `understudy.checks.runtime_events`), and validation allows those of the gold patch; so it does with
    `installed` (see `understudy.checks.startup_files`), which is None where nothing was installed.
    """

    verdict: Verdict
    conflicts: dict[str, int] = {}
    events: tuple[Evidence, ...] = ()
    installed: tuple[str, ...] | None = None


class TwinTest(Struct, frozen=True):
    """A deciding test in versions of it (see `understudy.checks.twin_run`).

    `name` is its node id there. `gold` has, by site, what was observed with the gold patch, as JSON.
    """

    name: str
    gold: dict[int, str]


class GradingOptions(Struct, frozen=True):
    """How a task has to be graded, as its validation found out.

    `as_root`: its image's programs can only be used as root. `canaries`: its suite bears tests of ours among its
    own. `conflicts`: how often deciding tests failed beside passing with the gold patch. `sealed`: hidden files
    must not change while the tests run. `usual_events`: what the code does while the tests run with the gold
    patch, None before that is known (see `understudy.checks.runtime_events`); `usual_installed`: what its install
    adds, likewise (see `understudy.checks.startup_files`). `watched`: the Pythons of a suite or script are
    watched; `walled`: those of a script cannot write its reward. `twins`: the deciding tests that
    have twins, by node id; `partial_twins`: those whose expectations are partly known to the tested code;
    `twin_plain`: sites that are evaluated in the process; `twin_uncut`: files that need their unused values;
    `twin_named`: files whose tests need their own names; `twin_fixed`: sites whose expectation is never changed;
    `twin_apart`: tests that must be mended and the others run in versions of their own;
    `twin_files`: the text of a suite's hidden test files of which versions are written; `twin_seed`: decides what
    changed expectations are; `twin_bits`: the binary logarithm of how many guesses at the expectations of
    `fail_to_pass` there are.
    """

    as_root: bool = False
    canaries: bool = True
    conflicts: dict[str, int] = {}
    twin_files: dict[str, str] = {}
    twins: dict[str, TwinTest] = {}
    partial_twins: tuple[str, ...] = ()
    twin_plain: tuple[int, ...] = ()
    twin_uncut: tuple[str, ...] = ()
    twin_named: tuple[str, ...] = ()
    twin_apart: bool = False
    twin_fixed: tuple[int, ...] = ()
    twin_seed: int = 0
    twin_bits: float = 0.0
    sealed: bool = True
    usual_events: tuple[str, ...] | None = None
    usual_installed: tuple[str, ...] | None = None
    watched: bool = True
    walled: bool = True


def failed_result(reason: str, log: str) -> CheckResult:
    """A result with reward 0 and no test outcomes."""
    return CheckResult(Verdict(reward=0.0, reason=reason, log=log_tail(log)))


def outcome_reason(
    checks: PytestChecks | SuiteChecks,
    not_fixed: Sequence[str],
    regressed: Sequence[str],
    tests: Mapping[str, TestOutcome],
) -> str:
    """Why the deciding tests' outcomes do not solve the task; empty when they do.

    `not_fixed` and `regressed` are those of `fail_to_pass` and `pass_to_pass` that did not end as they must.
    """
    if not_fixed:
        count = len(checks.fail_to_pass)
        return f"{len(not_fixed)} of {count} tests to fix still fail: {list_tests(not_fixed, tests)}"
    if regressed:
        count = len(checks.pass_to_pass)
        return f"{len(regressed)} of {count} tests that passed now fail: {list_tests(regressed, tests)}"
    return ""


def list_tests(ids: Sequence[str], tests: Mapping[str, TestOutcome]) -> str:
    """The first few ids with their outcomes."""
    return ", ".join(f"{id} ({tests[id]})" for id in ids[:_MOST_NAMES]) + (", …" if len(ids) > _MOST_NAMES else "")


def log_tail(log: str) -> str:
    """The end of a log, as much of it as a verdict keeps."""
    return log[-_LOG_CHARS:]


def output_tail(done: Completed) -> str:
    """The end of a command's output, errors last, as much of it as a verdict keeps."""
    both = done.stdout + (b"\n" + done.stderr if done.stderr else b"")
    return log_tail(both[-4 * _LOG_CHARS :].decode(errors="replace"))


def check_not_killed(done: Completed) -> None:
    """Raise SandboxError when a command of the checks was ended by SIGKILL, by whomever.

    The tested code can do that, as can the kernel or somebody on this machine. Whose fault it is, another run
    shows.
    """
    if done.exit_code == -signal.SIGKILL:
        raise SandboxError(f"the tests were killed by a signal (SIGKILL): {output_tail(done)[-300:]}".rstrip(": "))


def report_lines(raw: bytes, decode: Callable[[bytes], T]) -> Iterator[T]:
    """The lines of a report that was written in a sandbox, decoded; those that cannot be are left out.

    Such a line was cut by the death of the process that wrote it, or was written by the tested code.
    """
    for text in raw.splitlines():
        try:
            line = decode(text)
        except (ValueError, RecursionError):
            continue
        yield line


async def read_result_file(sandbox: Sandbox, path: str, limit: int) -> bytes | None:
    """A file that the checks wrote: empty when it is missing, None when it is unusable.

    Too large, a pipe, a directory or unreadable: only the tested code causes that. Raises SandboxError when the
    sandbox is broken.
    """
    try:
        return await sandbox.read(path, limit=limit)
    except FileNotFoundError:
        return b""
    except SandboxLost:
        raise
    except SandboxError:
        await sandbox.run(["true"], timeout_s=30, cwd="/")  # fails too where not the file is the problem
        return None
