"""Runs pytest inside a sandbox and writes what it saw to a file: `report_plugin.py REPORT ROOT FILE...`.

This file is mounted into sandboxes and run there by the task's own Python, so it needs pytest and nothing of ours.
It writes JSON lines: `{"start": version}`, one `{"id", "when", "outcome", "message"}` for every phase of every
test or failed collection, and `{"end": exit code}`.

Run as a program, it reads a line from stdin, the channel's token, and watches what happens in its process by an
audit hook, which cannot be removed. What only somebody does who works on the tests instead of passing them is
written to a copy of stderr, which no code can take back: lines of TOKEN RULE LINE PATH (see `runtime_events`).
"""

from __future__ import annotations

import _imp
import _thread
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

NOT_STARTED = 97
"""Exit code when pytest itself cannot be imported."""

_MESSAGE_CHARS = 8000
_CAPTURED_BYTES = 1 << 20
_MOST_EVENTS = 200
_AF_VSOCK = 40
_UNSEEN = frozenset(("readline", "_xxsubinterpreters", "_interpreters", "_testcapi", "_testinternalcapi"))
"""Modules that open files, or run code in other interpreters, without the hook being asked."""
_TESTS_ENDED = "understudy.tests_ended"
_CREATE_BUILTIN = "understudy.create_builtin"
"""Events of ours: the hook does what they ask for, so that no reference leads from here to the hook."""
_WATCHED = frozenset(
    (
        "open",
        "os.link",
        "os.remove",
        "os.rename",
        "os.truncate",
        "object.__setattr__",
        "gc.get_objects",
        "gc.get_referents",
        "gc.get_referrers",
        "ctypes.PyObj_FromPtr",
        "ctypes.cdata",
        "ctypes.dlsym",
        "ctypes.string_at",
        "sys.settrace",
        "sys.setprofile",
        "sys.monitoring.register_callback",
        "sys.addaudithook",
        "sys._current_frames",
        "sys._current_exceptions",
        "compile",
        "code.__new__",
        "function.__new__",
        "socket.__new__",
        "object.__getattr__",
        "cpython.PyInterpreterState_New",
        "import",
        _TESTS_ENDED,
        _CREATE_BUILTIN,
    )
)
"""The audit events that are looked at; all others, as most imports and opened files, cost one look-up."""


class Reporter:
    """A pytest plugin that appends every test report to an open file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, **record: Any) -> None:
        """Append one JSON line, at once: the process may die at any moment."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def pytest_collection(self) -> None:
        """Forget what pytest imported of the modules that the watch cannot see into: a new import is seen."""
        for module in _UNSEEN:
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
    """A pytest plugin that cuts what was captured in a phase of a test before pytest reads all of it into memory.

    What pytest captures lies in files, which the sandbox bounds; read and decoded, it takes some times as much.
    """

    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        yield
        _cut_captured(item.config)

    pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call

    def pytest_make_collect_report(self, collector: Any) -> Iterator[None]:
        yield
        _cut_captured(collector.config)


def _cut_captured(config: Any) -> None:
    """Leave the first bytes of each captured stream. Other ways to capture than by files are left alone."""
    capture = getattr(config.pluginmanager.getplugin("capturemanager"), "_global_capturing", None)
    for stream in ("out", "err"):
        file = getattr(getattr(capture, stream, None), "tmpfile", None)
        try:
            if file is not None and os.fstat(file.fileno()).st_size > _CAPTURED_BYTES:
                os.ftruncate(file.fileno(), _CAPTURED_BYTES)
                os.lseek(file.fileno(), _CAPTURED_BYTES, os.SEEK_SET)  # else the next write leaves a hole
        except (AttributeError, OSError, ValueError):
            continue


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


def watch(token: str, root: str, report: str, tests: tuple[str, ...], library_paths: list[str]) -> None:
    """Write evidence to a copy of stderr from now on; the caller raises the event `_TESTS_ENDED` when it is done.

    `report` is the file of outcomes, which must be open already. Whose code does something is decided by the
    innermost frame that is not pytest's or of the standard library. Where all frames are theirs, it is pytest's
    only in the thread that runs the tests, and for what pytest does by itself: anything else was started by the
    tested code. A frame is what its file's name says only if its code is what that file compiles to.
    """
    import _pytest
    import pluggy
    import pytest

    # The tested code can replace what modules and builtins hold, so the hook uses only what is bound here. Nothing
    # but the interpreter's list of hooks refers to the hook: who holds one of its functions can change all others.
    write, stat, fstat, getpid = os.write, os.stat, os.fstat, os.getpid
    open_file, read_file, close_file, compile_text = os.open, os.read, os.close, compile
    getframe, thread_id = sys._getframe, _thread.get_ident  # pyright: ignore[reportPrivateUsage]
    string, octets, integer, truth, kind_of, function, size = str, bytes, int, bool, type, type(_message), len
    watched, most_events, machine_family, unseen = _WATCHED, _MOST_EVENTS, _AF_VSOCK, _UNSEEN | {"_imp"}
    tests_ended, create_event = _TESTS_ENDED, _CREATE_BUILTIN
    own_globals, frame_type, code_type, address = globals(), type(getframe()), type(_message.__code__), id
    failures, os_error, value_error = (TypeError, ValueError, OSError), OSError, ValueError
    import_error, any_error = ImportError, Exception
    namespace: Any = type(sys.implementation)
    create_builtin: Callable[[Any], Any] = _imp.create_builtin
    channel, pid, caller_frame = os.dup(2), os.getpid(), getframe(1)
    here = os.path.abspath(__file__)  # noqa: PTH100
    standard = os.path.dirname(os.__file__) + "/"  # noqa: PTH120
    modules: tuple[Any, ...] = (pytest, _pytest, pluggy)
    runner = tuple(str(os.path.dirname(each.__file__)) + "/" for each in modules)  # noqa: PTH120
    reading_files = ("assertion/", "_code/", "pathlib.py", "warnings.py", "doctest.py")
    readers = tuple(runner[1] + name for name in reading_files)
    lines, showing = standard + "linecache.py", (standard + "traceback.py", standard + "warnings.py")
    unittest, importers = standard + "unittest/", ("<frozen importlib.", standard + "importlib/")
    compilers = (*importers, standard + "ast.py")
    packages = tuple(standard + name for name in ("site-packages/", "dist-packages/"))
    libraries = tuple(entry.rstrip("/") + "/" for entry in library_paths if os.path.isdir(entry))  # noqa: PTH112
    test_files = frozenset(tests) | {os.path.realpath(path) for path in tests}
    base = root.rstrip("/") + "/"
    # Without its sources, or where they were compiled in another way, the standard library cannot be compared.
    comparable = os.path.isfile(lines) and not sys.flags.optimize  # noqa: PTH113
    compiled: dict[str, set[Any]] = {}

    def identity(path: Any) -> Any:
        status = stat(path)
        return status.st_dev, status.st_ino

    def channel_identity() -> Any:
        status = fstat(channel)
        return status.st_dev, status.st_ino

    report_identity, first_identity = identity(report), channel_identity()
    hidden = frozenset(identity(path) for path in tests if os.path.exists(path))  # noqa: PTH110
    processes = stat("/proc").st_dev if os.path.isdir("/proc/self") else None  # noqa: PTH112
    writing = os.O_WRONLY | os.O_RDWR
    sent: set[str] = set()
    denied: dict[int, Exception] = {}
    lost = installed = False

    def send(rule: str, path: str = "-", line: int = 0) -> None:
        nonlocal lost
        key = rule + " " + path
        if key in sent or size(sent) > most_events:
            return
        sent.add(key)
        text = token + " " + rule + " " + string(line) + " " + path
        try:
            if channel_identity() != first_identity:
                lost = True
            write(channel, b"\n" + text.encode("unicode_escape") + b"\n")
        except os_error:
            lost = True

    def owner(name: str) -> str:
        if name == here or name.startswith(runner):
            return "runner"
        if name in test_files:
            return "test"
        if name.startswith("<frozen ") or (name.startswith(standard) and not name.startswith(packages)):
            return "standard"
        return "library" if name.startswith(libraries) else "tested"

    def content_of(path: str) -> bytes:
        descriptor, content = open_file(path, 0), b""
        while True:
            part = read_file(descriptor, 1 << 20)
            if not part:
                break
            content += part
        close_file(descriptor)
        return content

    def compile_file(name: str) -> set[Any]:
        """All code of a file, by what identifies it; nothing where there is no such file."""
        paths = (name,)
        if name.startswith("<frozen "):
            module = standard + name[8:-1].replace(".", "/")
            paths = (module + ".py", module + "/__init__.py")
        bodies: set[Any] = set()
        for path in paths:
            try:
                rest: list[Any] = [compile_text(content_of(path), path, "exec", 0, True)]
            except (os_error, value_error, SyntaxError):
                continue
            while rest:
                code = rest.pop()
                bodies.add((code.co_name, code.co_firstlineno, code.co_code))
                rest += [each for each in code.co_consts if kind_of(each) is code_type]
        return bodies

    def is_genuine(code: Any) -> bool:
        name = code.co_filename
        if not comparable:
            return True
        if name not in compiled:
            compiled[name] = compile_file(name)
        return (code.co_name, code.co_firstlineno, code.co_code) in compiled[name]

    def responsible(frame: Any, compares: bool) -> Any:
        last = None
        while frame is not None:
            code = frame.f_code
            whose = owner(code.co_filename)
            if compares and whose in ("runner", "standard", "library") and not is_genuine(code):
                whose = "tested"
            if whose not in ("runner", "standard"):
                return whose, frame
            last = frame
            frame = frame.f_back
        return ("runner" if last is first_frame else "thread"), None

    def send_of(rule: str, frame: Any) -> None:
        if frame is None:
            send(rule)
            return
        name = frame.f_code.co_filename
        send(rule, name[size(base) :] if name.startswith(base) else name, frame.f_lineno or 0)

    def accuse(rule: str, frame: Any, *, spared: tuple[str, ...] = ("library",), compares: bool = True) -> None:
        whose, caller = responsible(frame, compares)
        if whose not in spared:
            send_of(rule, caller or frame)

    def shows_lines(frame: Any) -> bool:
        by_lines = False
        while frame is not None and owner(frame.f_code.co_filename) == "standard" and is_genuine(frame.f_code):
            name = frame.f_code.co_filename
            if by_lines and name != lines:
                return name in showing
            by_lines = by_lines or name == lines
            frame = frame.f_back
        return False

    def runner_reads(frame: Any) -> bool:
        while frame is not None and owner(frame.f_code.co_filename) == "standard" and is_genuine(frame.f_code):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename == runner[1] + "fixtures.py":
            # It shows where a fixture was asked for that there is not.
            return frame.f_code.co_name == "formatrepr" and is_genuine(frame.f_code)
        # Its other functions call what they are handed, as fixtures' finalizers and hooks of plugins.
        return frame is not None and frame.f_code.co_filename.startswith(readers) and is_genuine(frame.f_code)

    def look_at_path(event: str, path: Any, opened_to_write: bool, frame: Any) -> None:
        if kind_of(path) is octets:
            path = path.decode("utf-8", "surrogateescape")
        name = string.__str__(path)
        try:
            which = identity(name)
        except os_error:
            return
        if which == report_identity:
            send("report-written" if opened_to_write else "report-read")
        elif event == "open" and which in hidden:
            # A traceback or a warning shows the line of the test that called.
            if not shows_lines(frame) and not runner_reads(frame):
                accuse("tests-read", frame, spared=())
        elif event == "open" and which[0] == processes and (name.endswith("/mem") or name[:6] != "/proc/"):
            accuse("memory-used", frame)

    def look_at_code(holder: Any, attribute: str, frame: Any) -> None:
        # Tested code may look at functions that tests give it, and libraries at who calls, but not at tests.
        if attribute == "__code__" and kind_of(holder) is function:
            code = holder.__code__
        elif attribute == "f_code" and kind_of(holder) is frame_type:
            if frame is not None and owner(frame.f_code.co_filename) != "tested":
                return
            code = holder.f_code
        else:
            return
        if code.co_name[:4] == "test" and owner(code.co_filename) == "test":
            # Too often for comparing files: pytest looks at all tests.
            accuse("tests-read", frame, spared=("library", "test", "runner"), compares=False)

    def look_at_import(module: Any, path: Any, frame: Any) -> None:
        names = {string.__str__(module)}
        if path is not None:  # a shared library, which is started by the last part of the module's name
            names = {
                string.__str__(module).rpartition(".")[2],
                string.__str__(path).rpartition("/")[2].partition(".")[0],
            }
        if unseen.isdisjoint(names):
            return
        importer = frame
        while importer is not None and importer.f_code.co_filename.startswith((*importers, here)):
            importer = importer.f_back
        direct = "nobody" if importer is None else owner(importer.f_code.co_filename)
        if (direct, responsible(frame, True)[0]) in (("standard", "tested"), ("runner", "runner")):
            # Using cmd or pdb is honest, but gives nobody the module: they, as pytest, do without where it lacks.
            denied[thread_id()] = import_error(
                "this module is not there for the standard library while tests are watched"
            )
            return
        accuse("watch-evaded", frame)

    def create_module(name: Any, made: list[Any], frame: Any) -> None:
        if kind_of(name) is not string or kind_of(made) is not list_type:
            return
        look_at_import(name, None, frame)
        if thread_id() not in denied:
            try:
                made.append(create_builtin(namespace(name=name)))
            except any_error as error:
                denied[thread_id()] = import_error(string(error))

    def look_at_new_code(name: Any, frame: Any) -> None:
        # Imports compile libraries under their own names: only who does it himself gives code a false name.
        if kind_of(name) is not string or owner(name) not in ("runner", "test", "standard"):
            return
        file = "" if frame is None else frame.f_code.co_filename
        direct = owner(file) if file else "nobody"
        if direct == "tested":
            send_of("code-disguised", frame)
        elif direct == "nobody" or (direct == "standard" and not file.startswith(compilers)):
            accuse("code-disguised", frame)

    def look(event: str, args: Any, frame: Any) -> None:
        if event == "open":
            path, mode, flags = args
            if kind_of(path) is not integer and kind_of(flags) is integer:
                writes = kind_of(mode) is string and mode != "r"
                look_at_path(event, path, writes or truth(flags & writing), frame)
        elif event.startswith("os."):
            for each in args[:2]:
                if kind_of(each) is not integer:
                    look_at_path(event, each, True, frame)
        elif event == "object.__setattr__":
            if kind_of(args[1]) is not string or args[1] != "__code__":
                return
            if address(args[2]) in own_codes:
                accuse("watch-evaded", frame)
            elif kind_of(args[0]) is function:
                name = args[0].__code__.co_filename
                whose = owner(name)
                if whose == "runner" or name.startswith(unittest):
                    # A test file's name does not spare: other code can bear it. What tests do, gold's run shows.
                    accuse("runner-replaced", frame, spared=("library", "runner"))
                elif whose == "test":
                    accuse("test-replaced", frame, spared=("library", "runner"))
        elif event == "object.__getattr__":
            if kind_of(args[1]) is string:
                look_at_code(args[0], args[1], frame)
        elif event == "import":
            look_at_import(args[0], args[1], frame)
        elif event == "function.__new__":
            if address(args[0]) in own_codes:
                accuse("watch-evaded", frame)
        elif event in ("cpython.PyInterpreterState_New", "sys.addaudithook"):
            if installed:
                accuse("watch-evaded", frame)
        elif event in ("compile", "code.__new__"):
            look_at_new_code(args[1], frame)
        elif event == "socket.__new__":
            if kind_of(args[1]) is integer and args[1] == machine_family:
                accuse("machine-socket", frame)
        elif event.startswith(("gc.", "sys._")):
            accuse("objects-searched", frame)
        elif event.startswith("sys."):
            accuse("trace-set", frame)
        elif event != "ctypes.dlsym" or (kind_of(args[1]) is string and args[1].startswith(("Py", "_Py"))):
            accuse("memory-used", frame)

    def hook(event: str, args: Any) -> None:
        if event not in watched:
            return
        try:
            frame = getframe(1)
        except value_error:  # a thread that runs no Python code
            frame = None
        try:
            if event == tests_ended:
                if frame is caller_frame and not lost and getpid() == pid:
                    send("end")
                return
            if event == create_event:
                create_module(args[0], args[1], frame)
                return
            looks_at_frame = event == "object.__getattr__" and kind_of(args[0]) is frame_type
            if looks_at_frame and args[0].f_globals is own_globals:
                return  # no test's frame, whoever looks at it: here ends the asking for the code that asks
            if frame is not None and address(frame.f_code) in own_codes:
                return  # the hook itself causes it
            look(event, args, frame)
        except failures:  # arguments that no real event has: the tested code may raise events of its own
            return
        except any_error as error:  # as at the limit of recursion: what cannot be looked at is not done
            denied[thread_id()] = error.with_traceback(None)

    def refuse(event: str, args: Any) -> None:
        error = refused(thread(), None)
        if error is not None:
            raise error

    # An error that leaves a hook shows its frame, and so all that it uses: `refuse` uses nothing of the hook's.
    refused, thread = denied.pop, thread_id
    first_frame = caller_frame
    while first_frame.f_back is not None:
        first_frame = first_frame.f_back
    list_type = list
    # By identity: code that only equals the hook's, or runs with its globals, is not the hook.
    reading: tuple[Any, ...] = (compile_file, content_of, is_genuine, responsible, send_of, accuse, shows_lines)
    reading += (runner_reads, look_at_code, look_at_import, look_at_new_code, create_module, look, hook)
    own_codes = {id(each.__code__): each.__code__ for each in reading}
    own_codes.update((id(each), each) for each in compile_file.__code__.co_consts if kind_of(each) is code_type)
    send("start")
    _imp.create_builtin = _create_builtin
    sys.addaudithook(hook)
    sys.addaudithook(refuse)
    installed = True


def _create_builtin(spec: Any) -> Any:
    """`_imp.create_builtin`, which raises no event, in a process that is watched: the hook makes the module."""
    made: list[Any] = []
    sys.audit(_CREATE_BUILTIN, spec.name, made)
    return made[0]


def main(
    report: str,
    root: str,
    *files: str,
    plugins: Callable[[Reporter], list[Any]] = lambda _: [],
    token: str = "",
) -> int:
    """Run pytest over `files` below `root`, with the reporter and `plugins` made for it; return its exit code.

    With a `token` the process is watched, where Python has audit hooks (3.8).
    """
    # The tree must not stand in for pytest: it joins the path only when pytest is loaded.
    foreign = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    tree = [entry for entry in sys.path if entry in foreign]
    sys.path[:] = [directory for directory in sys.path if directory not in foreign]
    try:
        import pytest
    except ImportError as error:
        print(f"pytest cannot be imported: {error}", file=sys.stderr)  # noqa: T201
        return NOT_STARTED
    # Not the tree, which an editable install puts on the path: what is in it is tested.
    inside = os.path.realpath(root) + "/"
    libraries = [
        entry
        for entry in sys.path
        if entry.endswith("-packages") or not (os.path.realpath(entry) + "/").startswith(inside)
    ]
    sys.path[:0] = [root, *tree]
    with open(report, "w", encoding="utf-8") as file:  # noqa: PTH123
        reporter = Reporter(file)
        reporter.write(start=pytest.__version__)
        options = ["-p", "no:cacheprovider", "--color=no", "--tb=long", "--continue-on-collection-errors"]
        innermost = pytest.hookimpl(hookwrapper=True, trylast=True)
        innermost(BoundedCapture.pytest_runtest_call)
        innermost(BoundedCapture.pytest_make_collect_report)
        joined = [reporter, BoundedCapture(), *plugins(reporter)]
        watched = token and hasattr(sys, "addaudithook")
        audit = sys.audit if watched else None
        if watched:
            watch(token, root, report, files, libraries)
        del token  # what this function holds, the tested code can read
        code = pytest.main([*options, f"--rootdir={root}", f"--confcutdir={root}", *files], plugins=joined)
        reporter.write(end=int(code))
        if audit is not None:
            audit(_TESTS_ENDED)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:], token=sys.stdin.readline().strip()))
