"""Parsers of test suites' output: which tests there were, and how each ended.

A parser yields (test id, status) pairs in the order of the log; for an id that comes several times, the last
status counts. Statuses are SWE-bench's: PASSED, FAILED, ERROR, SKIPPED, XFAIL. Logs are hostile input, so each of
our parsers takes time linear in the log.

Parsers have the names of those in the `swebench` package, where each repository has its own.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct, field

from understudy.errors import GraderError, TaskError

Parser = Callable[[str], Iterator[tuple[str, str]]]
"""From a log to its (test id, status) pairs. Of several for one id the last counts."""

PASSED, FAILED, ERROR, SKIPPED, XFAIL = "PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"
STATUSES = (FAILED, PASSED, SKIPPED, ERROR, XFAIL)


def lines(log: str) -> Iterator[str]:
    """Yield the lines of a log one at a time, because a list of them could take a hundred times the log's
    memory.
    """
    start = 0
    while (end := log.find("\n", start)) >= 0:
        yield log[start:end]
        start = end + 1
    yield log[start:]


# --- pytest --------------------------------------------------------------------------------------------

_SKIP_COUNT = re.compile(r"\[\d+\]\n?\Z")
_COLOUR = re.compile(r"\[\d+m")
_CONTROLS = dict.fromkeys(range(1, 32))


def pytest_summary(log: str) -> Iterator[tuple[str, str]]:
    """Parse `STATUS id` lines, where an id ends at the first space."""
    for line in lines(log):
        if line.startswith(STATUSES):
            fields = (line.replace(" - ", " ") if line.startswith(FAILED) else line).split(None, 2)
            if len(fields) >= 2 and not _counts_skips(fields):
                yield fields[1], fields[0]


def pytest_matplotlib(log: str) -> Iterator[tuple[str, str]]:
    """As `pytest_summary`, with mouse buttons as numbers, because their names depend on the version of Python."""
    yield from pytest_summary(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def pytest_options(log: str) -> Iterator[tuple[str, str]]:
    """As `pytest_summary`, with parameters that are absolute paths cut to their last part, because paths differ by
    machine.
    """
    yield from ((_without_path(id), status) for id, status in pytest_summary(log))


def pytest_verbose(log: str) -> Iterator[tuple[str, str]]:
    """Parse `STATUS id` and `id STATUS` lines, without colours and control characters; ids may have spaces."""
    for raw in lines(log):
        line = _COLOUR.sub("", raw).translate(_CONTROLS)
        if line.startswith(STATUSES):
            if line.startswith(FAILED):
                line = line.partition(" - ")[0]
            fields = line.split()
            if len(fields) >= 2 and not _counts_skips(fields):
                yield " ".join(fields[1:]), fields[0]
        elif line.endswith(STATUSES):
            fields = line.split()
            if len(fields) >= 2:
                yield " ".join(fields[:-1]), fields[-1]


def pytest_seaborn(log: str) -> Iterator[tuple[str, str]]:
    """Parse `FAILED id`, `PASSED id` and `id PASSED …` lines; others are ignored."""
    for line in lines(log):
        fields = line.split(None, 2)
        if len(fields) < 2:
            continue
        if line.startswith(FAILED):
            yield fields[1], FAILED
        elif f" {PASSED} " in line:
            if fields[1] == PASSED:
                yield fields[0], PASSED
        elif line.startswith(PASSED):
            yield fields[1], PASSED


def _counts_skips(fields: list[str]) -> bool:
    """Return whether the line is `SKIPPED [3] file:line: reason`, which names no test."""
    return fields[0] == SKIPPED and _SKIP_COUNT.match(fields[1]) is not None


def _without_path(id: str) -> str:
    start, end = id.find("["), id.rfind("]")
    if start < 0 or end < start:
        return id
    option = id[start + 1 : end]
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rpartition("/")[2]
    return f"{id[:start]}[{option}]"


# --- Django and SymPy ----------------------------------------------------------------------------------

_OK = (" ... ok", " ... OK", " ...  OK")
_VERSION_TEST = "--version is equivalent to version"  # a test whose name is cut off by what it prints
_MIGRATION = "Applying sites.0002_alter_domain_unique...test_no_migrations"
_ENDS = {" ... FAIL": FAILED, " ... ERROR": ERROR}
_HEADINGS = {"FAIL:": FAILED, "ERROR:": ERROR}

# Tests whose `ok` is on a line of its own, because something was printed in between.
_TESTING = re.compile(r"^(.*?)\s\.\.\.\sTesting against Django installed in ", re.MULTILINE)
_SILENCED = re.compile(r" silenced\)\.\nok$", re.MULTILINE)
_SERVER_ERROR = re.compile(r"^(.*?)\s\.\.\.\sInternal Server Error: /", re.MULTILINE)
_CHECKED = re.compile(r"^(.*?)\s\.\.\.\sSystem check identified no issues \(0 silenced\)\nok$", re.MULTILINE)


def django(log: str) -> Iterator[tuple[str, str]]:
    """Parse unittest's verbose lines, `id ... ok`, and the headings of failures."""
    latest: str | None = None
    for raw in lines(log):
        line = raw.strip()
        if _VERSION_TEST in line:
            yield _VERSION_TEST, PASSED
        if " ... " in line:
            latest = line.partition(" ... ")[0]
        for suffix in _OK:
            if line.endswith(suffix):
                if line.startswith(_MIGRATION):
                    line = line.split("...", 1)[-1].strip()
                yield line.rsplit(suffix, 1)[0], PASSED
                break
        if " ... skipped" in line:
            yield line.partition(" ... skipped")[0], SKIPPED
        for suffix, status in _ENDS.items():
            if line.endswith(suffix):
                yield line.partition(suffix)[0], status
        for heading, status in _HEADINGS.items():
            if line.startswith(heading) and len(fields := line.split(None, 2)) > 1:
                yield fields[1], status
        if line.startswith("ok") and latest is not None:
            yield latest, PASSED
    yield from ((id, PASSED) for id in _ids_with_late_ok(log))


def _ids_with_late_ok(log: str) -> Iterator[str]:
    """Yield the ids whose `ok` came on a later line. Such an `ok` counts for the first of several open
    tests only.
    """
    position = 0
    while (opening := _TESTING.search(log, position)) and (end := _SILENCED.search(log, opening.end())):
        yield opening[1]
        position = end.end()
    position = 0
    while opening := _SERVER_ERROR.search(log, position):
        end = log.find("\n", opening.end())
        if end < 0:
            break
        if log[end - 1] == "/" and end > opening.end() and _is_line(log, end + 1, "ok"):
            yield opening[1]
            position = end + 3
        else:
            position = log.find("\n", opening.start()) + 1
    for match in _CHECKED.finditer(log):
        yield match[1]


def _is_line(log: str, start: int, text: str) -> bool:
    return log.startswith(text, start) and log[start + len(text) : start + len(text) + 1] in ("", "\n")


def sympy(log: str) -> Iterator[tuple[str, str]]:
    """Parse `test_name ok` lines of `bin/test --verbose`, and headings of failures, `___
    file.py:test_name ___`.
    """
    for line in lines(log):
        first, last = line.find(" "), line.rfind(" ")
        middle = line.rfind(".py:", first + 1, last)
        if 0 <= first < middle:
            yield f"{line[first + 1 : middle]}.py:{line[middle + 4 : last]}", FAILED
    for raw in lines(log):
        line = raw.strip()
        if line.startswith("test_"):
            for suffix, status in ((" E", ERROR), (" F", FAILED), (" ok", PASSED)):
                if line.endswith(suffix):
                    yield line.split(None, 1)[0], status


# --- the parsers of the `swebench` package, for other languages -----------------------------------------

# They run in a process of their own with limits on time and memory, because logs are hostile input. Importing the
# package's harness would load a container client and more that no parser needs, so the process avoids that.

_PARSER_TIMEOUT_S = 120
_MEMORY_BYTES = 4 << 30

_PROGRAM = r"""
import json, resource, sys, types
directory, action, memory, name, instance = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
sys.path.append(directory)
for package in "swebench", "swebench.harness":
    module = types.ModuleType(package)
    module.__path__ = [directory + "/" + package.replace(".", "/")]
    sys.modules[package] = module
from swebench.harness.grading import SUITE_RAN
from swebench.harness.log_parsers import PARSER_REGISTRY
if action == "names":
    reply = {"names": sorted(PARSER_REGISTRY)}
else:
    log = sys.stdin.buffer.read().decode()
    row = types.SimpleNamespace(instance_id=instance, version=instance.rpartition(" ")[2])
    row.instance_id = instance.rpartition(" ")[0]
    statuses = {str(id): str(status) for id, status in PARSER_REGISTRY[name](log, row).items()}
    reply = {"statuses": statuses, "ran": bool(SUITE_RAN.search(log))}
sys.stdout.write(json.dumps(reply))
"""


class UnreadableLog(Exception):
    """A working parser failed on this log. That is the fault of the tested code, which wrote the log."""


class _ParserReply(Struct):
    names: list[str] = []
    statuses: dict[str, str] = {}
    ran: bool = False


def swebench_directory() -> Path | None:
    """Return the directory of the `swebench` package; None if it is not installed."""
    spec = importlib.util.find_spec("swebench")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


@functools.cache
def swebench_parsers() -> frozenset[str]:
    """Return the names of the package's parsers. Raises GraderError when it has none that can be called."""
    return frozenset(_run_swebench("names", "", "", b"").names)


def _parse_by_swebench(name: str, log: str, instance: str) -> tuple[dict[str, str], bool]:
    """Return the status of each test id, and whether there are other signs that tests ran.

    `instance` is the instance's id and version, separated by a space, because some parsers depend on them. Raises
    UnreadableLog when the parser fails on this log or takes too long, GraderError when it cannot be called at all.
    """
    if name not in swebench_parsers():
        raise GraderError(
            f"the swebench package in {swebench_directory()} has no parser {name!r}; expected version "
            "5; install it: pip install -U 'understudy[swebench]'"
        )
    try:
        reply = _run_swebench("parse", name, instance, log.encode(errors="replace"))
    except GraderError as error:
        raise UnreadableLog(str(error)) from error
    return reply.statuses, reply.ran


_ACTIONS = {"names": "list its parsers", "parse": "read the output of the tests by {!r}"}
"""What the package does for each action, for an error."""


def _run_swebench(action: str, name: str, instance: str, log: bytes) -> _ParserReply:
    directory = swebench_directory()
    if directory is None:
        raise GraderError("the swebench package is not installed; install it: pip install 'understudy[swebench]'")
    argv = [sys.executable, "-I", "-c", _PROGRAM, str(directory), action, str(_MEMORY_BYTES), name, instance]
    try:
        completed = subprocess.run(
            argv, input=log, capture_output=True, timeout=_PARSER_TIMEOUT_S, check=False, env={}
        )
    except subprocess.TimeoutExpired as error:
        raise GraderError(
            f"the swebench package did not {_ACTIONS[action].format(name)} within {_PARSER_TIMEOUT_S} s; if the "
            "machine is busy, grade again later with fewer at a time (--jobs of `understudy grade`, --concurrency "
            "of `understudy run`)"
        ) from error
    if completed.returncode:
        message = completed.stderr.decode(errors="replace").strip()[-1000:]
        raise GraderError(
            f"the swebench package in {directory} did not {_ACTIONS[action].format(name)}; expected version 5: "
            f"install it with pip install -U 'understudy[swebench]'. It printed: {message}"
        )
    return msgspec.json.decode(completed.stdout, type=_ParserReply)


# --- by name -------------------------------------------------------------------------------------------

_REPOSITORIES: dict[Parser, tuple[str, ...]] = {
    pytest_summary: ("pytest", "astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"),
    pytest_options: ("pytest_options", "pydicom", "requests", "pylint"),
    pytest_verbose: ("pytest_v2", "astropy", "scikit", "sphinx"),
    pytest_seaborn: ("seaborn",),
    pytest_matplotlib: ("matplotlib",),
    django: ("django",),
    sympy: ("sympy",),
}
PARSERS = {f"parse_log_{name}": parser for parser, names in _REPOSITORIES.items() for name in names}
"""Our own parsers. What is not here is read by the `swebench` package, where that is installed."""


class LoggedTest(Struct):
    """How often each status was logged for a test id, and the last status, which is the one that counts in
    SWE-bench.
    """

    last: str = ""
    counts: dict[str, int] = field(default_factory=dict[str, int])


class ParsedLog(Struct):
    """What a log says about the wanted tests.

    `tests` has only these, and those whose ids contain the canaries' token: a log may name more tests than fit in
    memory, so nothing is kept of the others, not even their number. `any_test` says that any test was found,
    `failures` that a test failed, and `ran` that there is a sign that tests ran at all.
    """

    tests: dict[str, LoggedTest] = field(default_factory=dict[str, LoggedTest])
    any_test: bool = False
    failures: bool = False
    ran: bool = False


def check_parser(name: str, where: str) -> None:
    """Raise TaskError, naming `where`, unless there is a parser with this name."""
    if name in PARSERS:
        return
    if swebench_directory() is None:
        raise TaskError(
            f"{where}: checks.parser {name!r} is not one of Understudy's own ({', '.join(sorted(PARSERS))}); give "
            "one of these, or install the swebench package, which may have it: pip install 'understudy[swebench]'"
        )
    if name not in (names := swebench_parsers()):
        raise TaskError(f"{where}: checks.parser: unknown parser {name!r}; give one of {', '.join(sorted(names))}")


def parse_log(
    name: str, log: str, test_ids: Collection[str], *, containing: str = "", instance: str = ""
) -> ParsedLog:
    """Read a log with the parser `name`, which `check_parser` must have accepted.

    Kept are the `wanted` ids, ids that begin with a wanted id that was cut off inside its parameters (as some of
    SWE-bench's are), and ids with the text `containing` if that is given. So memory is bounded by what is wanted,
    not by the log. Raises UnreadableLog when a parser of the `swebench` package fails on this log, GraderError
    when there is no such package.
    """
    if name in PARSERS:
        return _collect(PARSERS[name](log), frozenset(test_ids), containing)
    statuses, ran = _parse_by_swebench(name, log, instance)
    parsed = _collect(statuses.items(), frozenset(test_ids), containing)
    parsed.ran = parsed.ran or ran
    return parsed


def is_cut(id: str) -> bool:
    """Return whether an expected id is cut off inside its parameters."""
    return id.count("[") > id.count("]")


def _collect(pairs: Iterable[tuple[str, str]], test_ids: frozenset[str], containing: str) -> ParsedLog:
    parsed = ParsedLog()
    cut = tuple(id for id in test_ids if is_cut(id))
    for id, status in pairs:
        parsed.any_test = parsed.ran = True
        parsed.failures = parsed.failures or status in (FAILED, ERROR)
        if id in test_ids or (cut and id.startswith(cut)) or (containing and containing in id):
            test = parsed.tests.setdefault(id, LoggedTest())
            test.last = status
            test.counts[status] = test.counts.get(status, 0) + 1
    return parsed
