"""The result type of all kinds of checks, and the wording of its reasons."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from understudy.checks.input_changes import InputChanges
from understudy.errors import ProcessKilled, SandboxError, SandboxLost
from understudy.sandbox.base import Completed, Sandbox
from understudy.types import Evidence, PytestChecks, SuiteChecks, TestOutcome, Verdict

T = TypeVar("T")

_LOG_CHARS = 32_000
_MAX_NAMES = 3


class CheckResult(Struct, frozen=True):
    """The verdict of a task's checks on a tree.

    `conflicts` counts, by test id, how often a deciding test both failed and passed. Only suites report this, and
    only validation uses it: as many conflicts as the gold patch has are allowed. Likewise validation allows the
    `events` (observations of the tested code's behaviour, see `understudy.checks.runtime_events`) and the
    `installed` items (see `understudy.checks.startup_files`; None if nothing was installed) of the gold patch.
    `killed` says that a program which a check script started got SIGKILL, and the script gave no reward.
    """

    verdict: Verdict
    conflicts: dict[str, int] = {}
    events: tuple[Evidence, ...] = ()
    installed: tuple[str, ...] | None = None
    killed: bool = False


class TwinTest(Struct, frozen=True):
    """A deciding test in its rewritten versions (see `twins.run`). `name` is its node id in them.
    `gold` maps each site (a rewritten assertion) to what was observed there with the gold patch, as JSON.
    """

    name: str
    gold: dict[int, str]


class OtherInputs(Struct, frozen=True):
    """Other inputs for the deciding tests, and what the gold patch answers (see `twins.other_inputs`).

    `tests` has the sites whose answers differ from those to the tests' own inputs, and those that expect an
    exception; `bits` is the binary logarithm of the number of guesses at the former in `fail_to_pass`. `refused`
    are the tests of `fail_to_pass` whose inputs the gold patch refuses by an exception, with their names in the
    version.
    """

    changes: InputChanges
    tests: dict[str, TwinTest]
    bits: float
    refused: dict[str, str] = {}


class GradingOptions(Struct, frozen=True):
    """How a task must be graded, as its validation found out."""

    as_root: bool = False
    """Programs of the task's image can only be used as root."""
    canaries: bool = True
    """The suite can run tests of ours (canaries) among its own."""
    conflicts: dict[str, int] = {}
    """How often deciding tests failed as well as passed with the gold patch."""
    twin_files: dict[str, str] = {}
    """The text of a suite's hidden test files, from which versions are written."""
    twins: dict[str, TwinTest] = {}
    """The deciding tests that have twins, by node id."""
    partial_twins: tuple[str, ...] = ()
    """Those of `twins` whose expectations the tested code can partly know."""
    twin_plain: tuple[int, ...] = ()
    """The numbers of sites that are evaluated in the tested process."""
    twin_uncut: tuple[str, ...] = ()
    """Files that need their unused values."""
    twin_named: tuple[str, ...] = ()
    """Files whose tests need their own names."""
    twin_apart: bool = False
    """Tests that the patch must fix run in other versions than the other tests."""
    twin_fixed: tuple[int, ...] = ()
    """The numbers of sites whose expectation is never changed."""
    twin_seed: int = 0
    """Decides what changed expectations are."""
    twin_bits: float = 0.0
    """The binary logarithm of the number of guesses at the expectations of `fail_to_pass` that the code does not
    meet without the gold patch.
    """
    twin_all_bits: float = 0.0
    """The same for all expectations of `fail_to_pass`."""
    twin_inputs: tuple[OtherInputs, ...] = ()
    """Other inputs with which a solution is run (see `twins.other_inputs`)."""
    sealed: bool = True
    """Hidden files must not change while the tests run."""
    usual_events: tuple[str, ...] | None = None
    """Keys of what the code does while the tests run with the gold patch; None if unknown (see
    `understudy.checks.runtime_events`).
    """
    usual_installed: tuple[str, ...] | None = None
    """What the gold patch's install adds; None if unknown (see `understudy.checks.startup_files`)."""
    watched: bool = True
    """The Pythons of a suite or script are watched."""
    walled: bool = True
    """A script's Pythons cannot write its reward."""
    one_word: bool = False
    """What a program prints is one operand of a script's `[` (see `understudy.checks.shell_tests`)."""


def failed_result(reason: str, log: str) -> CheckResult:
    """Return a result with reward 0 and no test outcomes."""
    return CheckResult(Verdict(reward=0.0, reason=reason, log=log_tail(log)))


def outcome_reason(
    checks: PytestChecks | SuiteChecks,
    not_fixed: Sequence[str],
    regressed: Sequence[str],
    tests: Mapping[str, TestOutcome],
) -> str:
    """Return why the deciding tests' outcomes do not solve the task; "" if they do.

    `not_fixed` are the `fail_to_pass` tests that do not pass, and `regressed` the `pass_to_pass` tests that do
    not.
    """
    if not_fixed:
        count = len(checks.fail_to_pass)
        return f"{len(not_fixed)} of {count} tests to fix still fail: {list_tests(not_fixed, tests)}"
    if regressed:
        count = len(checks.pass_to_pass)
        return f"{len(regressed)} of {count} tests that passed now fail: {list_tests(regressed, tests)}"
    return ""


def list_tests(ids: Sequence[str], tests: Mapping[str, TestOutcome]) -> str:
    """Return the first few ids with their outcomes, as text."""
    return ", ".join(f"{id} ({tests[id]})" for id in ids[:_MAX_NAMES]) + (", …" if len(ids) > _MAX_NAMES else "")


def log_tail(log: str) -> str:
    """Return the end of a log, as much as a verdict keeps."""
    return log[-_LOG_CHARS:]


def output_tail(completed: Completed) -> str:
    """Return the end of a command's output with errors last, as much as a verdict keeps."""
    output = completed.stdout + (b"\n" + completed.stderr if completed.stderr else b"")
    return log_tail(output[-4 * _LOG_CHARS :].decode(errors="replace"))


def check_not_killed(completed: Completed) -> None:
    """Raise ProcessKilled when a command of the checks was killed by SIGKILL.

    The tested code, the kernel or another process on this machine may have done that; a retry shows which.
    """
    if completed.exit_code == -signal.SIGKILL:
        raise ProcessKilled(
            f"the tests were killed by a signal (SIGKILL): {output_tail(completed)[-300:]}".rstrip(": ")
            + "; check that the machine has enough free memory, then run the same command again"
        )


def report_lines(raw: bytes, decode: Callable[[bytes], T]) -> Iterator[T]:
    """Yield the decoded lines of a report that was written in a sandbox; invalid lines are skipped.

    Such a line was cut off when its process died, or was written by the tested code.
    """
    for text in raw.splitlines():
        try:
            line = decode(text)
        except (ValueError, RecursionError):
            continue
        yield line


class UnusableFile(ValueError):
    """A file that the checks wrote is too large, a pipe, a directory or unreadable: the tested code's fault."""


async def read_written_file(sandbox: Sandbox, path: str, limit: int) -> bytes:
    """Return a file that the checks wrote, b"" if it is missing.

    Raises UnusableFile, and SandboxError when the sandbox is broken.
    """
    try:
        return await sandbox.read(path, limit=limit)
    except FileNotFoundError:
        return b""
    except SandboxLost:
        raise
    except SandboxError as error:
        # raises SandboxError if the sandbox, not the file, is the problem
        await sandbox.run(["true"], timeout_s=30, cwd="/")
        raise UnusableFile(str(error)) from error


async def read_result_file(sandbox: Sandbox, path: str, limit: int) -> bytes | None:
    """Return a file that the checks wrote: b"" if it is missing, None if it is unusable (see `read_written_file`).

    Raises SandboxError when the sandbox is broken.
    """
    try:
        return await read_written_file(sandbox, path, limit)
    except UnusableFile:
        return None
