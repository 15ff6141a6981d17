"""Runs pytest in a sandbox and records the lines that each test file reaches: `reach_plugin.py OUT ROOT CODE
FILE...`.

This file is copied into sandboxes and run there by the task's own Python, so it needs pytest and nothing of ours.
It writes JSON: for each test file the CPU seconds and the lines by module; the key "" is for what runs while tests
are collected.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any


class Reach:
    """A pytest plugin that traces the lines of the files below `code`."""

    def __init__(self, root: str, code: str) -> None:
        self._root = root
        self._code = os.path.join(root, code) + os.sep  # noqa: PTH118
        self._missing: dict[CodeType, set[int]] = {}
        self._file = ""
        self._since = time.process_time()
        self.lines: dict[str, dict[str, set[int]]] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Set the trace function again for each test, because tests may end tracing, and each file is measured
        separately.
        """
        self.turn(nodeid.partition("::")[0])

    def turn(self, file: str) -> None:
        """Assign lines to `file` from now on."""
        if file != self._file:
            self._missing.clear()
        now = time.process_time()
        self.seconds[self._file] = self.seconds.get(self._file, 0.0) + now - self._since
        self._since, self._file = now, file
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """The trace function for calls: returns a line tracer for code that has lines not seen yet."""
        code = frame.f_code
        if not code.co_filename.startswith(self._code):
            return None
        missing = self._missing.get(code)
        if missing is None:
            missing = self._missing[code] = {line for _, _, line in code.co_lines() if line}
        if not missing:
            return None
        self._see(code, code.co_firstlineno)
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._see(frame.f_code, frame.f_lineno)
        return self._trace_line

    def _see(self, code: CodeType, line: int) -> None:
        self._missing.get(code, set[int]()).discard(line)
        module = os.path.relpath(code.co_filename, self._root)
        self.lines.setdefault(self._file, {}).setdefault(module, set()).add(line)


def main(out: str, root: str, code: str, *files: str) -> int:
    """Run pytest on `files`; return its exit code."""
    import pytest

    sys.path.insert(0, root)
    reach = Reach(root, code)
    reach.turn("")
    options = ["-p", "no:cacheprovider", "-q", "--tb=no", f"--rootdir={root}", f"--confcutdir={root}"]
    exit_code = int(pytest.main([*options, *files], plugins=[reach]))
    reach.turn("")
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    result = {
        file: {
            "seconds": seconds,
            "lines": {module: sorted(lines) for module, lines in reach.lines.get(file, {}).items()},
        }
        for file, seconds in reach.seconds.items()
    }
    with open(out, "w", encoding="utf-8") as stream:  # noqa: PTH123
        json.dump(result, stream)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
