"""The rewritten assertions of tests (see `twins`), which report what they observe."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

IMPORT = (
    "from understudy_sites import among as _among_, block as _block_, called as _called_, calls as _calls_, "
    "holds as _holds_, kind as _kind_, own as _own_, pair as _pair_, result as _result_, send as _send_"
)
"""The line by which a version's file imports what its sites call."""

Operation = Literal[
    "equal", "same", "count", "approx", "compare", "truth", "pair", "isinstance", "raises", "warns", "calls",
    "end", "result", "own",
]  # fmt: skip


class TwinSite(Struct, frozen=True):
    """An assertion of a test file, and what it expects of its observations (see `twins.judge.holds`)."""

    operation: Operation
    expected: str = ""
    """The source of a literal, if the operation needs one besides the gold patch's observation: a value to compare
    with (`compare`, by `operator`), tolerances (`approx`), names of classes (`isinstance`, `raises`, `warns`), or
    the constant that is changed in a changeable `pair`.
    """
    operator: str = ""
    want: bool = True
    """False if the operation must not hold."""
    withheld: bool = True
    """The expectation is neither in the tested process nor evaluated there."""
    changeable: bool = False
    """A version may have another expectation in the process than the true one."""
    changed: bool = False
    """This version has another expectation in the process than the true one."""
    subject: str = ""
    """The functions that made the observed value; "" if unknown."""
