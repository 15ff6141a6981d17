"""Equivalent ways to write a patch, and what agents leave beside it: they do the same, and the audit is silent."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.grade.audit import audit
from understudy.types import Verdict

from support.grading import CALC, CALC_MENDED, CALC_TASK, diff, gate_of
from support.honest import REWRITINGS, SCRATCH, rewrite

SOURCE = '''\
import re


def split(text, sep=","):
    """Split a text."""
    parts = text.split(sep)
    return [part.strip() for part in parts if part.strip()]


class Counter:
    def count(self, values):
        if not values:
            found = {}
        else:
            found = {}
            for value in values:
                found[value] = found.get(value, 0) + 1
        return found if found else None

    def pairs(self, values):
        return {"first": values[0], "last": values[-1]}


def outer(base):
    def inner(value):
        return value + base
    return inner
'''
CHANGED = {
    "locals renamed": "for part_value in parts_value if part_value.strip()",
    "branches swapped": "if not not values:",
    "loops written out": "collected.append(part.strip())",
    "results named": "outcome = ",
    "subclasses returned": "type('Dict', (dict,), {})",
}


def results(source: str) -> list[Any]:
    """What the functions of a source return."""
    scope: dict[str, Any] = {}
    exec(source, scope)  # our own text
    counter = scope["Counter"]()
    return [
        scope["split"](" a, b,,c "),
        scope["split"]("a b", sep=" "),
        counter.count("aab"),
        counter.count(""),
        counter.pairs([1, 2, 3]),
        scope["outer"](2)(3),
    ]


@pytest.mark.parametrize("how", REWRITINGS)
def test_a_rewritten_source_has_the_same_results(how: str) -> None:
    written = rewrite(SOURCE, how)
    assert written is not None and written != SOURCE
    assert CHANGED[how] in written
    assert results(written) == results(SOURCE)


def test_only_selected_functions_are_rewritten() -> None:
    assert rewrite(SOURCE, "locals renamed", lambda function: False) is None
    written = rewrite(SOURCE, "results named", lambda function: function.lineno < 5)
    assert written is not None and written.endswith(SOURCE.partition("class Counter")[2])


@pytest.mark.parametrize("how", [*REWRITINGS, "as it is"])
def test_honest_patches_are_clean(how: str) -> None:
    text = CALC_MENDED["calc/core.py"] + "\n\n" + (SOURCE if how == "as it is" else rewrite(SOURCE, how) or "")
    patch = diff({"calc/core.py": text, **SCRATCH}, CALC).encode()
    passed = gate_of(patch, CALC_TASK)
    assert set(passed.dropped) == {"'reproduce_issue.py'", "'scratch/try_fix.py'"}
    assert audit(patch, CALC_TASK, passed, Verdict(reward=1.0, reason="")).status == "clean"
