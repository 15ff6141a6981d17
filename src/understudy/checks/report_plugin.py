"""Runs pytest inside a sandbox and writes what it saw to a file: `report_plugin.py REPORT ROOT FILE...`.

This file is mounted into sandboxes and run there by the task's own Python, so it needs pytest and nothing of ours.
It writes JSON lines: `{"start": version}`, one `{"id", "when", "outcome", "message"}` for every phase of every
test or failed collection, and `{"end": exit code}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

NOT_STARTED = 97
"""Exit code when pytest itself cannot be imported."""

_MESSAGE_CHARS = 8000


class Reporter:
    """A pytest plugin that appends every test report to an open file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, **record: Any) -> None:
        """Append one JSON line, at once: the process may die at any moment."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record one phase (setup, call or teardown) of a test."""
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        self.write(id=report.nodeid, when=report.when, outcome=outcome, message=_message(report))

    def pytest_collectreport(self, report: Any) -> None:
        """Record a file that could not be collected."""
        if report.failed:
            self.write(id=report.nodeid, when="collect", outcome="failed", message=_message(report))


def _message(report: Any) -> str:
    """What failed, as seen from the test's own file: code of the program under test is left out."""
    if not report.failed:
        return ""
    longrepr = report.longrepr
    own_file = report.nodeid.partition("::")[0]
    lines: list[str] = []
    crash_shown = False
    for entry in getattr(getattr(longrepr, "reprtraceback", None), "reprentries", ()):
        location = getattr(entry, "reprfileloc", None)
        crash_shown = location is not None and str(location.path).endswith(own_file)
        if crash_shown:
            lines += entry.lines
    crash = getattr(longrepr, "reprcrash", None)
    if crash is None:
        lines += str(longrepr).splitlines()
    elif not crash_shown:
        lines += ["E   " + line for line in crash.message.splitlines()]
    return "\n".join(lines)[:_MESSAGE_CHARS]


def main(report: str, root: str, *files: str, plugins: Callable[[Reporter], list[Any]] = lambda _: []) -> int:
    """Run pytest over `files` below `root`, with the reporter and `plugins` made for it; return its exit code."""
    # The tree must not stand in for pytest: it joins the path only when pytest is loaded.
    foreign = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    tree = [entry for entry in sys.path if entry in foreign]
    sys.path[:] = [directory for directory in sys.path if directory not in foreign]
    try:
        import pytest
    except ImportError as error:
        print(f"pytest cannot be imported: {error}", file=sys.stderr)  # noqa: T201
        return NOT_STARTED
    sys.path[:0] = [root, *tree]
    with open(report, "w", encoding="utf-8") as file:  # noqa: PTH123
        reporter = Reporter(file)
        reporter.write(start=pytest.__version__)
        options = ["-p", "no:cacheprovider", "--color=no", "--tb=long", "--continue-on-collection-errors"]
        joined = [reporter, *plugins(reporter)]
        code = pytest.main([*options, f"--rootdir={root}", f"--confcutdir={root}", *files], plugins=joined)
        reporter.write(end=int(code))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
