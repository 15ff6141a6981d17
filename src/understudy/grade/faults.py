"""Whose fault it is when a patch cannot be graded: the infrastructure's, or the tested code's.

Tested code can take away the working directory, kill what it sees or exit like a missing program, and the
sandbox or the grader then raises an error. Such an error is the patch's own when it comes again in another fresh
sandbox and does not come without the patch; then the patch has reward 0. A sandbox that was killed or removed
from outside says nothing about the patch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from understudy.errors import GraderError, SandboxError, SandboxLost

T = TypeVar("T")

_ATTEMPTS = 3
_FAULTS_NEEDED = 2


class PatchFault(Exception):
    """Grading failed while, or after, code of a patch could run; the cause is the original error."""


@contextmanager
def with_untrusted_code() -> Generator[None]:
    """Turn errors that tested code can cause into PatchFault; SandboxLost passes unchanged."""
    try:
        yield
    except SandboxLost:
        raise
    except (SandboxError, GraderError) as error:
        raise PatchFault(str(error)) from error


async def attribute_faults(
    attempt: Callable[[], Awaitable[T]], control: Callable[[], Awaitable[object]]
) -> T | PatchFault:
    """Return the result of `attempt`, or the fault if the patch caused it.

    A failed attempt is repeated in a new sandbox. Two faults are the patch's if `control`, the same without the
    patch, does not fail. Raises SandboxError or GraderError when the infrastructure is at fault.
    """
    faults = 0
    error: Exception = SandboxError("internal error: the patch was not graded; please report it")
    for _ in range(_ATTEMPTS):
        try:
            return await attempt()
        except SandboxLost as lost:
            error = lost
        except PatchFault as fault:
            error = fault
            faults += 1
            if faults == _FAULTS_NEEDED:
                break
    if not isinstance(error, PatchFault):
        raise error
    if faults < _FAULTS_NEEDED:
        raise error.__cause__ or error
    try:
        await control()
    except PatchFault as control_fault:
        raise control_fault.__cause__ or control_fault from error
    return error
