"""A small instance as SWE-bench has them: a classic row, and the files of its image."""

from __future__ import annotations

from typing import Any

from support.grading import diff

SOURCE = "def shift(x):\n    return x - 1\n\n\ndef same(x):\n    return x\n"
TEST = "from calc import same\n\n\ndef test_same():\n    assert same(3) == 3\n"
ID = "pallets__flask-1"
FILES = {"calc.py": SOURCE, "tests/test_calc.py": TEST, "tests/__init__.py": ""}
"""What the image has at the base commit."""


def classic(base_commit: str) -> dict[str, Any]:
    """A row with the 13 fields that swebench 5 cannot read."""
    mended = SOURCE.replace("x - 1", "x + 1")
    hidden = TEST.replace("same", "same, shift", 1) + "\n\ndef test_shift():\n    assert shift(1) == 2\n"
    return {
        "repo": "pallets/flask",
        "instance_id": ID,
        "base_commit": base_commit,
        "patch": diff({"calc.py": mended}, FILES),
        "test_patch": diff({"tests/test_calc.py": hidden}, FILES),
        "problem_statement": "shift(1) must be 2.",
        "hints_text": "",
        "created_at": "2020-01-01T00:00:00Z",
        "version": "2.3",
        "FAIL_TO_PASS": '["tests/test_calc.py::test_shift"]',
        "PASS_TO_PASS": '["tests/test_calc.py::test_same"]',
        "environment_setup_commit": base_commit,
        "difficulty": "<15 min fix",
    }
