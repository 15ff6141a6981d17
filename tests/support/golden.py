"""Expected outputs kept in files, compared piece by piece, and rewritten only when that is asked for.

The files under tests/data/v0_1/expected were written by the code of commit c785012. A test that fails here says
that the code now gives something else than that code gave. To rewrite them deliberately, where that is intended:

    UNDERSTUDY_WRITE_GOLDEN=1 .venv/bin/python -m pytest -p no:xdist \\
        tests/contract/test_wire_golden.py tests/contract/test_opens_v0_1.py

and then read `git diff tests/data/v0_1/expected` before it is committed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "v0_1"
EXPECTED = DATA / "expected"
VARIABLE = "UNDERSTUDY_WRITE_GOLDEN"

_STREAMED_WORDING = re.compile(r'("message": ?)"(?:[^"\\]|\\.)*"')

_loaded: dict[Path, dict[str, Any]] = {}


def check(file: str, name: str, value: Any) -> None:
    """Compare a value, which JSON can hold, with the one of this name in an expected file.

    The order of an object's keys counts: it is the order in which they are sent or written.
    """
    path = EXPECTED / f"{file}.json"
    expected = _read(path)
    if os.environ.get(VARIABLE) == "1":
        expected[name] = value
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_lines(expected))
        return
    relative = path.relative_to(Path(__file__).parents[2])
    again = f"to rewrite it deliberately, run the test with {VARIABLE}=1 and read `git diff {relative}`"
    assert name in expected, f"{relative} has no expected value for {name!r}; {again}"
    before, now = _text(expected[name]), _text(value)
    if before != now:
        lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "expected", "now", lineterm="", n=4)
        difference = "\n".join(line[:600] for line in list(lines)[:80])
        raise AssertionError(f"{name!r} is not what {relative} says:\n{difference}\n{again}")


def _read(path: Path) -> dict[str, Any]:
    if path not in _loaded:
        _loaded[path] = json.loads(path.read_text()) if path.exists() else {}
    return _loaded[path]


def _lines(cases: dict[str, Any]) -> str:
    """A file of cases, each of them a line."""
    dumped = (
        f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        for name, value in cases.items()
    )
    return "{\n" + ",\n".join(dumped) + "\n}\n"


def _text(value: Any) -> str:
    return json.dumps(_without_wording(value), ensure_ascii=False, indent=1)


def _without_wording(value: Any, in_error: bool = False) -> Any:
    """The same value with `...` as the message of every error: type and code are a format, wording is not.

    Errors are objects, or lines of an event stream that speak of an error.
    """
    match value:
        case dict():
            return {
                key: "..."
                if in_error and key == "message" and isinstance(inner, str)
                else _without_wording(inner, key == "error" or value.get("type") == "error")
                for key, inner in value.items()
            }
        case list():
            return [_without_wording(inner, in_error) for inner in value]
        case str() if '"error"' in value:
            return "\n".join(
                _STREAMED_WORDING.sub(r'\1"..."', line) if '"error"' in line else line
                for line in value.split("\n")
            )
        case _:
            return value
