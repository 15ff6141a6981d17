"""Runs a version of test files inside a sandbox: `twin_driver.py REPORTER REPORT ROOT FILE...`.

This file is mounted into sandboxes and run there by the task's own Python, so it needs pytest and nothing of ours
but REPORTER, the path of `report_plugin.py`, and `twin_encoding.py` beside it. To the report's lines it adds
`{"node", "site", "saw"}` for everything that a version (see `twins`) observes while a test runs. `saw` is
`[kind, ...]`, in which values are written by `encode`. Expected values are not known here: code that forges an
observation has to know them itself. An exception that ends a test is reported as `{"node", "stopped"}`, with the
names of its classes.

Further versions of the files are run after FILE..., each in a process of its own. They are on stdin as JSON: a
limit of seconds for each (0: none), and the texts of each by path. The reports are REPORT.0, REPORT.1 and so on,
and REPORT has the exit codes of those that ran.

In suites with their own command the version's files load this module (see `twins.suite`), and `record` and
`running` take the place of pytest's reporter. Their Pythons may be as old as 3.6.
"""

import atexit
import gc
import hashlib
import importlib.util
import itertools
import json
import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from understudy.checks.twins import twin_encoding as _encoding
else:

    def _load_beside(name):
        path = os.path.realpath(__file__).rpartition("/")[0] + "/" + name + ".py"
        spec = importlib.util.spec_from_file_location("understudy_" + name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    _encoding = _load_beside("twin_encoding")

encode, has_own_code = _encoding.encode, _encoding.has_own_code

_MAX_RESULTS = 100  # maximum number of results of a comparison outside of assertions, in one test
_MAX_COMPARED = 500  # maximum number of values within a compared value
_MAX_REPORTS = 1_000  # maximum number for one site in one test; of later ones only a digest is sent

_ABSTRACT = frozenset({"collections.abc", "contextlib", "importlib.abc", "io", "numbers", "os", "typing"})

_OPERATORS: "dict[str, Callable[[Any, Any], Any]]" = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
    "is": operator.is_,
    "count": lambda left, right: _same_elements(list(left), list(right)),
    "approx": lambda left, right: True,
}


def _same_elements(left: "list[Any]", right: "list[Any]") -> bool:
    for value in left:
        if value not in right:
            return False
        right.remove(value)
    return not right


_PLAIN = frozenset({int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset, type(None)})
_write: Any = None
_node = ""


def _reporting() -> "tuple[Callable[..., None], Callable[[], None], Callable[[int], int]]":
    """Return functions that report an observation, report the ending test's later ones, and count a site's.

    Counters and limit are variables here: tested code would find a module's. Later observations are reported as a
    count and a sum of digests, independent of order.
    """
    counts, unsent, limit = cast("dict[tuple[str, int], int]", {}), cast("dict[int, list[int]]", {}), _MAX_REPORTS

    def report(site: int, *saw: Any) -> None:
        counts[_node, site] = counts.get((_node, site), 0) + 1
        if counts[_node, site] <= limit:
            return _write(node=_node, site=site, saw=list(saw))
        content = _coarse(saw[1]) if saw[0] == "value" else saw
        digest = hashlib.sha256(json.dumps(content).encode()).digest()
        digests = unsent.setdefault(site, [0, 0])
        digests[0] += 1
        digests[1] = (digests[1] + int.from_bytes(digest[:8], "big")) % (1 << 64)

    def report_rest() -> None:
        for site, (count, total) in sorted(unsent.items()):
            _write(node=_node, site=site, saw=["rest", count, hex(total)])
        unsent.clear()

    return report, report_rest, lambda site: counts.get((_node, site), 0)


_report, _report_rest, _count = _reporting()


def _coarse(encoded: Any) -> Any:
    """Return a coarser form of an encoded value, mostly the same for values that the judge treats as equal."""
    if isinstance(encoded, dict):
        fields = cast("dict[str, Any]", encoded)
        return {name: _coarse(fields[name]) for name in sorted(fields)}
    if not isinstance(encoded, list) or not encoded:
        return cast("Any", encoded)
    parts = cast("list[Any]", encoded)
    kind = parts[0]
    if kind in ("b", "i"):
        return str(int(parts[1], 16) if kind == "i" else parts[1])
    if kind == "f":
        number = float.fromhex(parts[1])
        if number - number == 0 and abs(number - round(number)) <= 1e-9 * abs(number):
            return str(round(number))
        return f"{number:.6g}"
    if kind in ("a", "o"):
        return _coarse(parts[1])
    if kind in ("l", "t"):
        return ["l", _coarse(parts[1])]
    if kind in ("e", "d"):
        return [kind, sorted(map(_coarse, parts[1]), key=json.dumps)]
    return [_coarse(part) for part in parts]


def send(site: int, value: Any, second: "int | None" = None) -> None:
    """Report an observed value for the assertion `site`, and for `second` if it compares the same value."""
    encoded = encode(value)
    _report(site, "value", encoded)
    if second is not None:
        _report(second, "value", encoded)


def among(site: int, container: Any) -> None:
    """Report the value that the assertion `site` looks for something in."""
    _report(site, "value", encode(_items(container)))


_last_iterator: "list[Any]" = []


def _items(container: Any) -> Any:
    """Return the items of an iterator, also when it was read before; any other container itself."""
    kind = cast("Any", type(container))
    if not hasattr(kind, "__next__") or hasattr(kind, "__contains__"):
        return container
    if not _last_iterator or _last_iterator[0] is not container:
        _last_iterator[:] = (
            container,
            list(itertools.islice(cast("Iterator[Any]", container), _encoding.MAX_NODES + 1)),
        )
    return _last_iterator[1]


def own(site: int, value: Any, method: str = "") -> Any:
    """Return an operand, and report it if what an operator or `method` makes of it is decided by a class that may
    be the tested code's.
    """
    if type(value) not in _PLAIN and _write is not None and not _count(site) and has_own_code(value, method):
        _report(site, "own")
    return value


def holds(site: int, result: Any, second: "int | None" = None) -> None:
    """Report whether a condition is true."""
    saw = int(bool(result))
    _report(site, "truth", saw)
    if second is not None:
        _report(second, "truth", saw)


def pair(site: int, name: str, left: Any, right: Any) -> None:
    """Report two values and whether a comparison of them is true."""
    right = _items(right) if name in ("in", "not in") else right
    saw = _OPERATORS[name](left, right)
    saw = saw.all() if hasattr(saw, "all") and not isinstance(saw, bool) else saw
    _report(site, "pair", encode(left), encode(right), int(bool(saw)))


def result(site: int, name: str, left: Any, right: Any) -> Any:
    """Return the result of a comparison. The first ones of a test are reported, if they are truth values."""
    saw = _OPERATORS[name](left, right)
    if (saw is True or saw is False) and _count(site) < _MAX_RESULTS and _write is not None:
        _report(site, "result", encode(left, _MAX_COMPARED), encode(right, _MAX_COMPARED), int(saw))
    return saw


def kind(site: int, value: Any) -> None:
    """Report the names of a value's classes, and of those that it only claims to be of.

    Claims are what the tested code can say of any object: `__class__`, and being registered for its own abstract
    classes. The standard library's abstract classes are kinds of their own, because builtin types are registered.
    """
    names = {base.__name__ for base in type(value).__mro__}
    claims: set[str] = set()
    stands_for = getattr(value, "__class__", None)
    if isinstance(stands_for, type):
        claims.update(base.__name__ for base in stands_for.__mro__)
    for abstract in _abstract_classes(value):
        (names if _is_standard(abstract) else claims).add(abstract.__name__)
    _report(site, "kind", sorted(names), sorted(claims - names))


def _is_standard(kind: type) -> bool:
    """Return whether an abstract class belongs to the standard library, regardless of its `__module__`."""
    return kind.__module__ in _ABSTRACT and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def _abstract_classes(value: Any) -> "Iterator[type]":
    visited: set[type] = {object}
    pending: list[type] = [object]
    while pending:
        for subclass in type.__subclasses__(pending.pop()):
            if subclass in visited:
                continue
            visited.add(subclass)
            pending.append(subclass)
            try:
                if type(subclass).__name__ == "ABCMeta" and isinstance(value, subclass):
                    yield subclass
            except Exception:  # noqa: BLE001, S112  # the tested code's own
                continue


def calls(site: int, mock: Any) -> None:
    """Report the calls of a mock, each as its positional and its named arguments.

    For a mock with a signature the arguments are bound to it first, so that naming an argument makes no
    difference.
    """
    # An autospecced mock is a function, with the real mock in an attribute.
    bind = getattr(mock.mock if type(mock).__name__ == "function" else mock, "_call_matcher", None)
    mock_calls: list[Any] = []
    for call in mock.call_args_list:
        bound: Any = bind(call) if callable(bind) else call
        arguments, named = tuple(call if isinstance(bound, Exception) else bound)[-2:]
        mock_calls.append(
            [[encode(value) for value in arguments], {name: encode(value) for name, value in named.items()}]
        )
    _report(site, "calls", mock_calls)


def called(site: int, assertion: "Callable[..., Any]", *arguments: Any, **named: Any) -> None:
    """Report whether an assertion of a mock holds."""
    try:
        assertion(*arguments, **named)
    except AssertionError:
        _report(site, "truth", 0)
    else:
        _report(site, "truth", 1)


class block:  # lower case, because tests use it like a function
    """A context manager that reports which exception or warnings occurred inside, and suppresses them."""

    def __init__(self, site: int, context: Any, expects: str) -> None:
        self._site = site
        self._context = context
        self._expects = expects
        self._entered: Any = None

    def __enter__(self) -> Any:
        self._entered = self._context.__enter__()
        return self._entered

    def __exit__(self, *details: Any) -> bool:
        kind, error = details[0], details[1]
        if self._expects == "raises":
            names = [] if kind is None else [base.__name__ for base in kind.__mro__]
            _report(self._site, "kind", names, "" if error is None else _text(error))
            if kind is None:
                return False  # nothing was raised inside, so there is nothing to suppress; the test continues
            self._context.__exit__(*details)
            return True
        held = 1
        try:
            passed = bool(self._context.__exit__(*details))
        except BaseException:  # noqa: BLE001  # what pytest raises when nothing was raised is no Exception
            held, passed = 0, kind is not None
        if self._expects == "plain":
            _report(self._site, "truth", int(held and (kind is None or passed)))
            return True
        caught = cast(
            "Any", getattr(self._entered, "list", None) or getattr(self._entered, "warnings", None) or []
        )
        warnings = [[[base.__name__ for base in entry.category.__mro__], str(entry.message)] for entry in caught]
        _report(self._site, "warnings", warnings)
        return passed


def stopped(kind: "type[BaseException]") -> None:
    """Report which exception ended a test."""
    if _write is not None:
        _write(node=_node, stopped=[base.__name__ for base in kind.__mro__])


def _text(error: BaseException) -> str:
    try:
        notes = getattr(error, "__notes__", ())  # pytest's `match` is also searched in an exception's notes
        return "\n".join([str(error), *map(str, notes)])[: _encoding.MAX_TEXT]
    except Exception:  # noqa: BLE001  # the tested code's own
        return ""


def record(path: str) -> None:
    """Write observations to a file from now on.

    What this needs is bound now, because tests may replace functions in the modules that it uses.
    """
    global _write
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    atexit.register(_report_rest)
    dumps, write_bytes = json.dumps, os.write

    def write(**line: Any) -> None:
        write_bytes(descriptor, (dumps(line) + "\n").encode())

    _write = write


def program(file: str) -> None:
    """Report that a version's file begins: what its process observes outside of tests counts as the file's own."""
    global _node
    _report_rest()
    _node = file + "::"
    _write(test=_node, passed=True)


class running:  # lower case, because tests use it like a function
    """A context manager around a test: reports which test runs, and whether it came to its end.

    For a method, `owner` is the object that it is called on, whose class is a part of the test's name.
    """

    def __init__(self, file: str, name: str, owner: Any = None) -> None:
        if owner is not None:
            kind: Any = owner if isinstance(owner, type) else type(owner)
            name = kind.__qualname__.replace(".", "::") + "::" + name
        self._name = file + "::" + name
        self._outer = ""

    def __enter__(self) -> None:
        global _node
        _report_rest()
        self._outer, _node = _node, self._name

    def __exit__(self, *details: Any) -> None:
        global _node
        _report_rest()
        if details[0] is not None:
            stopped(details[0])
        _node = self._outer
        _write(test=self._name, passed=details[0] is None)


class NodeTracker:
    """A pytest plugin that knows which test is running, and reports what ends it early."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the test that starts."""
        global _node
        _node = nodeid

    def pytest_runtest_makereport(self, call: Any) -> None:
        """Report the exception that ended the test itself, not its fixtures. The report is made by others."""
        if call.when == "call" and call.excinfo is not None:
            stopped(call.excinfo.type)

    def pytest_runtest_logfinish(self) -> None:
        """Report the remaining observations of the ending test."""
        _report_rest()


def _fork_for_each(later: "list[dict[str, str]]", later_s: float, report: str, root: str) -> str:
    """Return the path of a version's report in a process of its own, for each version: first FILE..., then those
    of `later`, which have their files' texts by path and may take `later_s` seconds each.

    Importing pytest takes much longer than most tests, so it is done once, here. A version only runs if none
    before it left anything in the sandbox: then all is for it as if it ran there alone. The exit codes are
    negative for a signal.
    """
    from _pytest.config import default_plugins

    for name in default_plugins:
        importlib.import_module("_pytest." + name)
    gc.freeze()  # what the processes collect is then their own, and the memory stays shared
    codes: list[int] = []
    with open(report, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write("[]")
    for number, texts in enumerate([{}, *later]):
        for path, text in texts.items():
            with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
                file.write(text)
        before = _SandboxState(report, root)
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            return f"{report}.{number}"
        if number and later_s:
            signal.signal(signal.SIGALRM, _killer(process))
            signal.setitimer(signal.ITIMER_REAL, later_s)
        _, status = os.waitpid(process, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if number and code < 0:
            break  # it may be the fault of the sandbox, which only the first one shows
        codes.append(code)
        with open(report, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(codes, file)
        if code < 0 or not before.is_untouched(f"{report}.{number}"):
            break
    os._exit(0)


def _exit_without_teardown(code: int) -> None:
    """End a forked process as `sys.exit` does, but leave the memory that it shares with others to the kernel."""
    cast("Any", threading)._shutdown()  # waits for threads, as the interpreter does first
    cast("Any", atexit)._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S112  # the tested code's own
            continue
    os._exit(code)


def _killer(process: int) -> "Callable[[int, Any], None]":
    """Return a handler of a signal that kills a process."""
    return lambda number, frame: os.kill(process, signal.SIGKILL)


class _SandboxState:
    """What was in the sandbox when a version started: all files but `codes_file` in the file systems of this file
    and of the tree `root`, and how much of the sandbox's memory was free.
    """

    def __init__(self, codes_file: str, root: str) -> None:
        self._codes_file = codes_file
        self._devices = {os.stat(codes_file).st_dev, os.stat(root).st_dev}  # noqa: PTH116
        self._space, self._files = os.statvfs(codes_file), _files_on(self._devices)

    def is_untouched(self, report: str) -> bool:
        """Return whether nothing is left of a version but its report: no file, changed file, memory of a file that
        has no name, or process.
        """
        try:
            report_size = os.stat(report).st_blocks * 512  # noqa: PTH116
            space, files = os.statvfs(report), _files_on(self._devices)
            del files[report]
        except (OSError, KeyError):
            return False
        files[self._codes_file] = self._files[self._codes_file]
        processes = {name for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208
        return (
            self._space.f_ffree - space.f_ffree == 1
            and self._space.f_bfree - space.f_bfree == report_size // space.f_frsize
            and files == self._files
            and processes <= {"1", str(os.getpid())}
        )


def _files_on(devices: "set[int]") -> "dict[str, tuple[int, int]]":
    """Return the inode of each file and directory of these file systems, with the time of a file's last change
    (ctime), which no program can set, and the mode of a directory.
    """
    files: dict[str, tuple[int, int]] = {}
    pending = ["/"]
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except PermissionError:  # no tested code can have changed anything there, but by the mode
            continue
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if not entry.is_dir(follow_symlinks=False):
                files[entry.path] = (status.st_ino, status.st_ctime_ns)
            elif status.st_dev in devices:
                files[entry.path] = (status.st_ino, status.st_mode)
                pending.append(entry.path)
    return files


def main(reporter_path: str, report_path: str, root: str, *files: str) -> int:
    """Run the files; return pytest's exit code."""
    spec = importlib.util.spec_from_file_location("understudy_report_plugin", reporter_path)
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)

    def start(reporter: Any) -> "list[Any]":
        global _write
        _write = reporter.write
        return [NodeTracker()]

    def report_of_process(report: str) -> str:
        return _fork_for_each(later, later_s, report, root) if later else report

    later_s, later = json.loads(sys.stdin.read() or "[0, []]")
    sys.modules["understudy_sites"] = sys.modules[__name__]
    code = int(plugin.main(report_path, root, *files, plugins=start, report_of_process=report_of_process))
    if later:
        _exit_without_teardown(code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
