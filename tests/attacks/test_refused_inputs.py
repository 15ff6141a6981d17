"""Code that accepts whatever has the form of the right inputs passes, but is not called protected."""

from __future__ import annotations

import pytest

from understudy.types import Files, PytestChecks, Task

from support.grading import Protections, diff

pytestmark = pytest.mark.services  # each validates a task and grades patches

BEFORE = '''\
class InvalidAccount(ValueError):
    """Its message is the number."""


def account(number):
    """The number in reversed groups of four digits. Raises InvalidAccount unless its remainder by 97 is 1."""
    digits = number
    groups = [digits[first : first + 4] for first in range(0, len(digits), 4)]
    return ".".join(reversed(groups))
'''


def reading(lines: str) -> str:
    """The module with other code that reads the digits and checks them."""
    return BEFORE.replace("    digits = number\n", lines)


GOLD = reading("""\
    digits = number.replace("-", "")
    if not digits.isdigit() or int(digits) % 97 != 1:
        raise InvalidAccount(number)
""")
PATCHES = {
    "accepts whatever has separators": reading("""\
    digits = number.replace("-", "")
    if digits == number:
        raise InvalidAccount(number)
"""),
    "written otherwise": reading("""\
    digits = "".join(each for each in number if each != "-")
    remainder = 0
    for each in digits:
        if each not in "0123456789":
            raise ValueError("not a digit: " + each) from None
        remainder = (10 * remainder + int(each)) % 97
    if remainder != 1:
        raise InvalidAccount(number)
"""),
}
VALID = tuple(str(each + (98 - each % 97) % 97) for each in (40127553, 51938246, 70264815, 83375129, 96411362))
INVALID = tuple(str(int(each) + 1) for each in VALID)
RIGHT = tuple((f"{each[:4]}-{each[4:]}", f"{each[4:]}.{each[:4]}") for each in VALID)
TESTS = f"""\
import pytest

from core import InvalidAccount, account


@pytest.mark.parametrize(("number", "expected"), {RIGHT!r})
def test_account(number, expected):
    assert account(number) == expected


@pytest.mark.parametrize("number", {INVALID!r})
def test_refuses(number):
    with pytest.raises(InvalidAccount):
        account(number)
"""


async def test_refusing_other_inputs_is_an_answer(protections: Protections) -> None:
    nodes = [f"test_core.py::test_refuses[{each}]" for each in INVALID]
    nodes += [f"test_core.py::test_account[{number}-{expected}]" for number, expected in RIGHT]
    checks = PytestChecks({"test_core.py": TESTS}, tuple(nodes), timeout_s=60)
    tree = {"core.py": BEFORE}
    task = Task("core", "example/core", "mend it", Files(tree), checks, diff({"core.py": GOLD}, tree))
    levels = await protections(task, PATCHES)
    assert levels == {
        "accepts whatever has separators": (
            "partial",
            "to other inputs it gives 0% of the answers of the gold patch in test_core.py::test_account",
        ),
        "written otherwise": ("twins", ""),
    }
