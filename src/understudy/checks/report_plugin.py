"""Runs pytest inside a sandbox and writes what it saw to a file: `report_plugin.py REPORT ROOT FILE...`.

This file is mounted into sandboxes and run there by the task's own Python, so it needs pytest and nothing of ours.
It writes JSON lines: `{"start": version}`, one `{"id", "when", "outcome", "message"}` for every phase of every
test or failed collection, and `{"end": exit code}`.

Run as a program, it reads two lines from stdin, the channel's token and the paths of the other hidden files as
JSON, and watches what happens in its process by an audit hook, which cannot be removed. What only somebody does
who works on the tests instead of passing them is written to a copy of stderr, which no code can take back: lines
of TOKEN RULE LINE PATH (see `runtime_events`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

NOT_STARTED = 97
"""Exit code when pytest itself cannot be imported."""

_MESSAGE_CHARS = 8000
_CAPTURED_BYTES = 1 << 20
_UNWATCHED_MODULES = frozenset(
    ("readline", "_xxsubinterpreters", "_interpreters", "_testcapi", "_testinternalcapi")
)
"""Modules that open files, or run code in other interpreters, without the watch being asked."""


class Reporter:
    """A pytest plugin that appends every test report to an open file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, **record: Any) -> None:
        """Append one JSON line, unbuffered, because the process may die at any moment."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def pytest_collection(self) -> None:
        """Drop modules that the watch cannot see into from pytest's imports, so that a new import of them
        is seen.
        """
        for module in _UNWATCHED_MODULES:
            sys.modules.pop(module, None)

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


class BoundedCapture:
    """A pytest plugin that truncates captured output of a test's phase before pytest reads it into memory.

    pytest captures to files, whose size the sandbox limits; but reading and decoding takes several times their
    size.
    """

    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        yield
        _cut_captured(item.config)

    pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call

    def pytest_make_collect_report(self, collector: Any) -> Iterator[None]:
        yield
        _cut_captured(collector.config)


def _cut_captured(config: Any) -> None:
    """Truncate the file of each captured stream. Other ways of capturing are left alone."""
    capture = getattr(config.pluginmanager.getplugin("capturemanager"), "_global_capturing", None)
    for stream in ("out", "err"):
        file = getattr(getattr(capture, stream, None), "tmpfile", None)
        try:
            if file is not None and os.fstat(file.fileno()).st_size > _CAPTURED_BYTES:
                os.ftruncate(file.fileno(), _CAPTURED_BYTES)
                # otherwise the next write would leave a hole in the file
                os.lseek(file.fileno(), _CAPTURED_BYTES, os.SEEK_SET)
        except (AttributeError, OSError, ValueError):
            continue


def _message(report: Any) -> str:
    """Return the failure as seen from the test's own file, without code of the program under test."""
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


def _watch(
    token: str, root: str, report: str, tests: tuple[str, ...], hidden: tuple[str, ...], library_paths: list[str]
) -> None:
    """Let the program in the directory beside this file watch this process until the caller raises the
    end event.
    """
    import _pytest
    import pluggy
    import pytest

    watch_directory = os.path.join(os.path.dirname(os.path.abspath(__file__)), "watch")  # noqa: PTH100, PTH118, PTH120
    sys.path.insert(0, watch_directory)
    import code_owners  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    import process_watch  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    sys.path.remove(watch_directory)
    for name in ("process_watch", "code_owners", "code_files", "audited_functions", "audit_events"):
        del sys.modules[name]
    modules: tuple[Any, ...] = (pytest, _pytest, pluggy)
    runner = tuple(str(os.path.dirname(module.__file__)) + "/" for module in modules)  # noqa: PTH120
    libraries = tuple(entry.rstrip("/") + "/" for entry in library_paths if os.path.isdir(entry))  # noqa: PTH112
    runner_paths = (*runner, os.path.abspath(__file__))  # noqa: PTH100
    caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    program = vars(process_watch)
    owners: Any = vars(code_owners)["CodeOwners"](runner_paths, runner[1], libraries)
    program["watch"](token, os.dup(2), root, tests, owners, other_files=hidden, report=report, caller_frame=caller)


def main(
    report: str,
    root: str,
    *files: str,
    plugins: Callable[[Reporter], list[Any]] = lambda _: [],
    report_of_process: Callable[[str], str] = lambda report: report,
    token: str = "",
    hidden: tuple[str, ...] = (),
) -> int:
    """Run pytest on `files` below `root`, with the reporter and `plugins` made for it; return its exit code.

    When pytest is imported, `report_of_process` is given `report` and returns the path to write to; it may fork.
    With a `token` the process is watched, if this Python has audit hooks (3.8); `hidden` are other hidden files.
    """
    # The tree is added to sys.path only after pytest is loaded, so that it cannot replace pytest.
    pythonpath = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    tree_entries = [entry for entry in sys.path if entry in pythonpath]
    sys.path[:] = [directory for directory in sys.path if directory not in pythonpath]
    gc.disable()
    try:
        import pytest
    except ImportError as error:
        print(f"pytest cannot be imported: {error}", file=sys.stderr)  # noqa: T201
        return NOT_STARTED
    # Modules imported so far stay until the end. pytest collects garbage several times at its end, and would scan
    # all of them each time, a quarter of the time of a small test suite.
    if hasattr(gc, "freeze"):
        gc.freeze()
    gc.enable()
    report = report_of_process(report)
    # Not the tree, which an editable install puts on sys.path: the code in it is what is tested.
    tree_prefix = os.path.realpath(root) + "/"
    libraries = [
        entry
        for entry in sys.path
        if entry.endswith("-packages") or not (os.path.realpath(entry) + "/").startswith(tree_prefix)
    ]
    sys.path[:0] = [root, *tree_entries]
    with open(report, "w", encoding="utf-8") as file:  # noqa: PTH123
        reporter = Reporter(file)
        reporter.write(start=pytest.__version__)
        options = ["-p", "no:cacheprovider", "--color=no", "--tb=long", "--continue-on-collection-errors"]
        innermost = pytest.hookimpl(hookwrapper=True, trylast=True)
        innermost(BoundedCapture.pytest_runtest_call)
        innermost(BoundedCapture.pytest_make_collect_report)
        registered = [reporter, BoundedCapture(), *plugins(reporter)]
        watched = token and hasattr(sys, "addaudithook")
        audit = sys.audit if watched else None
        if watched:
            _watch(token, root, report, files, hidden, libraries)
        del token  # the tested code can read the variables of this function
        code = pytest.main([*options, f"--rootdir={root}", f"--confcutdir={root}", *files], plugins=registered)
        reporter.write(end=int(code))
        if audit is not None:
            audit("understudy.tests_ended")
    return int(code)


if __name__ == "__main__":
    # The arguments are read in this order, and no name here keeps them: the tested code can read names of modules.
    read = sys.stdin.readline
    sys.exit(main(*sys.argv[1:], token=read().strip(), hidden=tuple(json.loads(read() or "[]"))))
