"""Unified diffs of text files that `git apply` takes byte for byte."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

_NO_NEWLINE = "\\ No newline at end of file\n"


def unified(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The diff that turns the files `old` into `new` (path → text); both have the same paths."""
    return "".join(_one(path, old[path], new[path]) for path in sorted(old) if old[path] != new[path])


def _one(path: str, old: str, new: str) -> str:
    lines = [f"diff --git a/{path} b/{path}\n"]
    for line in difflib.unified_diff(_lines(old), _lines(new), f"a/{path}", f"b/{path}"):
        lines.append(line if line.endswith("\n") else line + "\n" + _NO_NEWLINE)
    return "".join(lines)


def _lines(text: str) -> list[str]:
    # git knows one line end only; str.splitlines knows ten.
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines
