"""Code that is right where it is tested, or for short inputs, passes, but is not called protected."""

from __future__ import annotations

import pytest

from understudy.types import Files, PytestChecks, Task

from support.grading import Protections, diff

pytestmark = pytest.mark.services  # validates a task and grades patches

BEFORE = '''\
"""Spans of numbers: pairs of a low and a high end."""

import os


def merge(spans):
    """Return the sorted spans, those that touch or overlap as one."""
    return list(spans)
'''


def solution(code: str) -> str:
    return BEFORE.replace("    return list(spans)\n", code)


MERGE = """\
    merged = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged
"""
EVENTS = """\
    events = sorted([(low, 0) for low, _ in spans] + [(high, 1) for _, high in spans])
    merged, depth, start = [], 0, None
    for place, is_end in events:
        start = start if depth else place
        depth += -1 if is_end else 1
        if not depth:
            merged.append((start, place))
    return merged
"""
PATCHES = {
    "in one directory": solution(f"    if os.getcwd() != '/workspace':\n        return list(spans)\n{MERGE}"),
    "of four spans": solution(f"    if len(spans) > 4:\n        return list(spans)\n{MERGE}"),
    "below thirty": solution(f"    spans = [(low, high) for low, high in spans if high < 30]\n{MERGE}"),
    "written otherwise": solution(EVENTS),
}
TESTS = """\
from spans import merge


def test_overlap():
    assert merge([(3, 8), (7, 16), (18, 20)]) == [(3, 16), (18, 20)]


def test_order():
    assert merge([(15, 18), (4, 7), (6, 9)]) == [(4, 9), (15, 18)]


def test_inside():
    assert merge([(2, 21), (3, 4), (5, 6), (22, 23)]) == [(2, 21), (22, 23)]
"""


async def test_code_that_is_right_only_where_it_is_tested(protections: Protections) -> None:
    nodes = tuple(f"test_spans.py::test_{name}" for name in ("overlap", "order", "inside"))
    tree = {"spans.py": BEFORE}
    checks = PytestChecks({"test_spans.py": TESTS}, nodes, timeout_s=60)
    task = Task(
        "spans", "example/spans", "mend it", Files(tree), checks, diff({"spans.py": solution(MERGE)}, tree)
    )
    levels = await protections(task, PATCHES)
    levels = {
        name: (level, reason.partition(" (")[0].partition(" gives")[0]) for name, (level, reason) in levels.items()
    }
    assert levels == {
        "in one directory": ("partial", "it reads its environment"),
        "of four spans": ("partial", "to other inputs it"),
        "below thirty": ("partial", "to other inputs it"),
        "written otherwise": ("twins", ""),
    }
