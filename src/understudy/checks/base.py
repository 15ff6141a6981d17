"""What every kind of check returns, and how its reasons are worded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from understudy.errors import SandboxError
from understudy.sandbox.base import Completed, Sandbox
from understudy.types import PytestChecks, SuiteChecks, TestOutcome, Verdict

_LOG_CHARS = 32_000
_SHOWN = 3


class CheckResult(Struct, frozen=True):
    """The verdict of a task's checks, as they found the tree.

    `conflicts` counts by test id how often a deciding test failed that also passed. Only suites report them, and
    only validation asks: it allows as many as the gold patch has.
    """

    verdict: Verdict
    conflicts: dict[str, int] = {}


class GradingOptions(Struct, frozen=True):
    """How a task has to be graded, as its validation found out.

    `as_root`: its image's programs can only be used as root. `canaries`: its suite bears tests of ours among its
    own. `conflicts`: how often deciding tests failed beside passing with the gold patch. `twins`: by deciding
    test, the sites of its twins that tell right from wrong (see `understudy.checks.twin_run`); `partial_twins`:
    those tests of which they do not tell all; `twin_seeds`: with which changes they did.
    """

    as_root: bool = False
    canaries: bool = True
    conflicts: dict[str, int] = {}
    twins: dict[str, tuple[int, ...]] = {}
    partial_twins: tuple[str, ...] = ()
    twin_seeds: tuple[int, ...] = ()


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
    return ", ".join(f"{id} ({tests[id]})" for id in ids[:_SHOWN]) + (", …" if len(ids) > _SHOWN else "")


def log_tail(log: str) -> str:
    """The end of a log, as much of it as a verdict keeps."""
    return log[-_LOG_CHARS:]


def output_tail(done: Completed) -> str:
    """The end of a command's output, errors last, as much of it as a verdict keeps."""
    both = done.stdout + (b"\n" + done.stderr if done.stderr else b"")
    return log_tail(both[-4 * _LOG_CHARS :].decode(errors="replace"))


async def read_result_file(sandbox: Sandbox, path: str, limit: int) -> bytes:
    """A file that the checks wrote; empty when it is missing or unusable, which only the tested code causes."""
    try:
        return await sandbox.read(path, limit=limit)
    except FileNotFoundError:
        return b""
    except SandboxError:
        # Too large, a pipe or a directory: the tested code did that. A broken sandbox fails in this command too.
        await sandbox.run(["true"], timeout_s=30)
        return b""
