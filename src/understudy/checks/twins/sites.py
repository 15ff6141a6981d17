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
    """An assertion of a test file, and what it expects of its observations (see `twins.judge.holds`).

    `expected` is the source of a literal, if the operation needs one besides the gold patch's observation: a value
    to compare with (`compare`, by `operator`), tolerances (`approx`), names of classes (`isinstance`, `raises`,
    `warns`), or the constant that is changed in a changeable `pair`. `want` is false if the operation must not
    hold. `withheld` says that the expectation is neither in the process nor evaluated there. `changed` is true if
    this version has another expectation in the process than the true one. `subject` names the functions that made
    the observed value; "" if unknown.
    """

    operation: Operation
    expected: str = ""
    operator: str = ""
    want: bool = True
    withheld: bool = True
    changeable: bool = False
    changed: bool = False
    subject: str = ""
