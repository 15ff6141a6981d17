"""Watches what the code under test does in the process of its tests, by an audit hook that nothing can remove.

This file is mounted into sandboxes and run there by the task's own Python, from 3.8 on. What only somebody does
who works on the tests instead of passing them is written to a descriptor of a pipe, from which no code can take
it back: lines of PREFIX NUMBER CODE RULE LINE PATH (see `understudy.checks.runtime_events`).
"""

from __future__ import annotations

import _imp
import _thread
import atexit
import itertools
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from understudy.checks.watch import audit_events, audited_functions, code_files
    from understudy.checks.watch.code_owners import CodeOwners
else:
    import audit_events
    import audited_functions
    import code_files

_MAX_EVENTS = 200
_AF_VSOCK = 40


def watch(
    prefix: str,
    channel: int,
    root: str,
    tests: tuple[str, ...],
    owners: CodeOwners,
    *,
    other_files: tuple[str, ...] = (),
    report: str = "",
    rewards: tuple[str, ...] = (),
    walled: bool = False,
    serves: bool = False,
    caller_frame: Any = None,
) -> None:
    """Write evidence to the descriptor `channel` from now on.

    The first line says "start", the SHA-256 of a secret, and the ids of this process and its parent; the last line
    has the secret after "end": where the watch is of one call, when its `caller_frame` raises the event
    `TESTS_ENDED`, else when the interpreter ends. The lines are numbered and have an authentication code by that
    secret, so that one that was taken out of the pipe is missed. `tests` are the hidden files that run,
    `other_files` the other hidden ones, `report` is the file of outcomes, which must be open already, `rewards`
    the paths that a check script may write its reward to; `walled` says that this process cannot; `serves` that it
    is a server of multiprocessing, from which others are forked.

    Whose code does something is decided by the innermost frame that is not of the test runner or the standard
    library. Where all frames are theirs, it is the runner's only in the thread that runs the tests, and for what
    the runner does by itself: anything else was started by the tested code. A frame is what its file's name says
    only if its code is what that file compiles to.
    """
    # The tested code can replace anything in modules and builtins, so the hook uses only what is bound here. Only
    # the interpreter's list of hooks refers to the hook, because who holds one of its functions could change all
    # others.
    runner, pytest_directory = owners.runner, owners.pytest_directory
    libraries, from_tree = owners.libraries, owners.from_tree
    digest, secret = audited_functions.find_sha256(), os.urandom(16).hex()
    write, stat, fstat, getpid = os.write, os.stat, os.fstat, os.getpid
    open_file, close_file = os.open, os.close
    getframe, thread_id = sys._getframe, _thread.get_ident  # pyright: ignore[reportPrivateUsage]
    string, byte_string, integer, truth, kind_of, function, size = str, bytes, int, bool, type, type(watch), len
    watched, most_events, machine_family = audit_events.WATCHED, _MAX_EVENTS, _AF_VSOCK
    without_limit = ("end", "opened", "hidden-read")  # of each at most as many as there are hidden files
    unwatched_modules = audit_events.UNWATCHED_MODULES | {"_imp", "posix"}
    tests_ended, create_event = audit_events.TESTS_ENDED, audit_events.CREATE_BUILTIN
    program_ended, exit_event, leave = audit_events.PROGRAM_ENDED, audit_events.EXIT, os._exit
    own_globals, frame_type, address = globals(), type(getframe()), id
    failures, os_error, value_error = (TypeError, ValueError, OSError, EOFError), OSError, ValueError
    import_error, any_error, isinstance_of = ImportError, Exception, isinstance
    namespace: Any = type(sys.implementation)
    create_builtin: Callable[[Any], Any] = _imp.create_builtin
    pid, first_thread, by_frame = os.getpid(), thread_id(), caller_frame is not None
    is_finalizing, basename_of, next_number = sys.is_finalizing, string.rpartition, itertools.count().__next__
    watch_directory = os.path.dirname(os.path.abspath(__file__)) + "/"
    standard = os.path.dirname(os.__file__) + "/"
    installed_in = ("/usr/", "/lib", sys.prefix + "/", sys.base_prefix + "/", os.path.realpath(standard) + "/")
    started_at, readlink, kernel = time.time(), os.readlink, ("[vdso]", "[vsyscall]", "[uprobes]")
    loaded_before: set[str] = set()
    reading_files = ("assertion/", "_code/", "pathlib.py", "warnings.py", "doctest.py")
    pytest_readers = tuple(pytest_directory + name for name in reading_files) if pytest_directory else ()
    linecache_file = standard + "linecache.py"
    displaying_files = (standard + "traceback.py", standard + "warnings.py")
    unittest, importers = standard + "unittest/", ("<frozen importlib.", standard + "importlib/")
    compilers = (*importers, standard + "ast.py")
    packages = tuple(standard + name for name in ("site-packages/", "dist-packages/"))
    test_files = frozenset((*tests, *other_files)) | {os.path.realpath(path) for path in (*tests, *other_files)}
    base = root.rstrip("/") + "/"
    starts, fork_event, workers = audit_events.STARTS, audit_events.FORK_EXEC, audit_events.WORKERS
    start_program = audited_functions.replace_fork_exec()
    programs_of = audited_functions.program_namer(installed_in, base)
    content_of = code_files.content_reader()
    is_genuine, comparing, codes_of_comparing = code_files.genuineness_check(standard, content_of)

    def identity(path: Any) -> Any:
        status = stat(path)
        return status.st_dev, status.st_ino

    def channel_identity() -> Any:
        status = fstat(channel)
        return status.st_dev, status.st_ino

    report_identity, first_identity = identity(report) if report else None, channel_identity()
    reward_names = frozenset(os.path.basename(path) for path in rewards)
    reward_directories = {os.path.dirname(path) for path in rewards}
    reward_identities = frozenset(identity(path) for path in reward_directories if os.path.isdir(path))
    hidden = {identity(path): os.path.relpath(path, root) for path in tests if os.path.exists(path)}
    other_hidden = {identity(path): os.path.relpath(path, root) for path in other_files if os.path.exists(path)}
    hidden_directories = audited_functions.directories_above((*tests, *other_files), root)
    find_hidden = audited_functions.hidden_finder(frozenset(hidden) | frozenset(other_hidden))
    opened = dict.fromkeys((*hidden, *other_hidden), 0)
    processes = stat("/proc").st_dev if os.path.isdir("/proc/self") else None
    writing = os.O_WRONLY | os.O_RDWR
    sent: set[str] = set()
    denied: dict[int, Exception] = {}
    lost = installed = started = False
    program: Any = None if by_frame else vars(sys.modules["__main__"])  # later its frame, finally None
    returns = compile("", "", "exec").co_code[-2]

    def send(rule: str, path: str = "-", line: int = 0) -> None:
        nonlocal lost
        key = rule + " " + path
        if key in sent or (size(sent) > most_events and rule not in without_limit):
            return
        sent.add(key)
        text, number_and_code = (rule + " " + string(line) + " " + path).encode("unicode_escape"), "- -"
        if getpid() == pid:  # a forked child writes with the same prefix, but without number and code
            number = string(next_number())
            number_and_code = number + " " + digest((secret + " " + number + " ").encode() + text).hexdigest()[:32]
        try:
            if channel_identity() == first_identity:
                write(channel, b"\n" + (prefix + " " + number_and_code + " ").encode() + text + b"\n")
            else:  # another file has this descriptor's number by now, and must not get evidence written into it
                lost = True
        except os_error:
            lost = True

    def owner(name: str) -> str:
        leads_out = "/../" in name  # a path that begins with the directory but leaves it
        if name.startswith((watch_directory, *runner)) and not leads_out:
            return "runner"
        if name in test_files:
            return "test"
        if leads_out:
            return "tested"
        if name.startswith("<frozen ") or (name.startswith(standard) and not name.startswith(packages)):
            return "standard"
        return "library" if name.startswith(libraries) and not name.startswith(from_tree) else "tested"

    def starts_worker(frame: Any) -> bool:
        """Return whether a frame is that of a program with which multiprocessing starts a Python.

        It always ends by `sys.exit`, and imports the tests in which the worker's function is.
        """
        return frame.f_back is None and frame.f_code.co_names in workers

    def responsible(frame: Any, compares: bool) -> Any:
        last = None
        while frame is not None:
            code = frame.f_code
            code_owner = owner(code.co_filename)
            if compares and code_owner in ("runner", "standard", "library") and not is_genuine(code):
                code_owner = "tested"
            if code_owner not in ("runner", "standard") and not starts_worker(frame):
                return code_owner, frame
            last = frame
            frame = frame.f_back
        by_runner = last is first_frame if by_frame else last is not None and thread_id() == first_thread
        return ("runner" if by_runner else "thread"), None

    def send_location(rule: str, frame: Any, before: str = "") -> None:
        if frame is None:
            send(rule, before + "-")
            return
        name = frame.f_code.co_filename
        send(rule, before + (name[size(base) :] if name.startswith(base) else name), frame.f_lineno or 0)

    def report_event(
        rule: str, frame: Any, *, spared: tuple[str, ...] = ("library",), compares: bool = True
    ) -> None:
        code_owner, caller = responsible(frame, compares)
        if code_owner not in spared:
            send_location(rule, caller or frame)

    def shows_lines(frame: Any) -> bool:
        past_linecache = False
        while frame is not None and owner(frame.f_code.co_filename) == "standard" and is_genuine(frame.f_code):
            name = frame.f_code.co_filename
            if past_linecache and name != linecache_file:
                return name in displaying_files
            past_linecache = past_linecache or name == linecache_file
            frame = frame.f_back
        return False

    def is_imported(frame: Any, others: bool = False) -> bool:
        """Return whether an import causes it; or, with `others`, a module of the standard library while it is
        imported.
        """
        while frame is not None and owner(frame.f_code.co_filename) == "standard" and is_genuine(frame.f_code):
            imports = frame.f_code.co_filename.startswith(importers)
            if imports and frame.f_code.co_name == "exec_module":
                return True
            if not imports and not others:
                return False
            frame = frame.f_back
        return False

    def runner_reads(frame: Any) -> bool:
        while frame is not None and owner(frame.f_code.co_filename) == "standard" and is_genuine(frame.f_code):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename == pytest_directory + "fixtures.py":
            # pytest reads the source to show where a missing fixture was requested.
            return frame.f_code.co_name == "formatrepr" and is_genuine(frame.f_code)
        # Other functions of this file call what they are given, such as fixtures' finalizers and plugins' hooks.
        return (
            frame is not None and frame.f_code.co_filename.startswith(pytest_readers) and is_genuine(frame.f_code)
        )

    def check_reward(name: str, frame: Any) -> None:
        directory, _, last = basename_of(name, "/")
        try:
            inside = last in reward_names and identity(directory or ".") in reward_identities
            if inside or identity(name) in reward_identities:
                report_event("reward-written", frame, spared=("test",))
        except os_error:
            return

    def check_hidden_file(name: str, frame: Any) -> None:
        """Report a hidden file, or a directory of such files, that the tested code reads or makes a link to."""
        last, caller = frame, frame
        while caller is not None and owner(caller.f_code.co_filename) not in ("test", "tested"):
            last, caller = caller, caller.f_back
        if caller is None:
            in_test_thread = last is first_frame if by_frame else thread_id() == first_thread
            if not in_test_thread or not (shows_lines(frame) or runner_reads(frame) or is_imported(frame)):
                send("hidden-read", name)
        elif owner(caller.f_code.co_filename) == "tested":
            send("hidden-read", name, caller.f_lineno or 0)

    def check_link(event: str, target: Any, link: Any, frame: Any) -> None:
        if kind_of(target) is byte_string:
            target = target.decode("utf-8", "surrogateescape")
        name = string.__str__(target)
        if event == "os.symlink" and name[:1] != "/" and kind_of(link) is string:
            name = basename_of(link, "/")[0] + "/" + name if "/" in link else name
        try:
            file_identity = identity(name)
        except os_error:
            return
        if file_identity in hidden or file_identity in other_hidden or file_identity in hidden_directories:
            path = hidden.get(file_identity) or other_hidden.get(file_identity)
            check_hidden_file(path or hidden_directories[file_identity], frame)

    def check_path(event: str, path: Any, opened_to_write: bool, frame: Any, by_number: bool = False) -> None:
        if kind_of(path) is byte_string:
            path = path.decode("utf-8", "surrogateescape")
        name = string.__str__(path)
        if reward_names and opened_to_write:
            check_reward(name, frame)
        try:
            file_identity = identity(name)
        except os_error:
            file_identity = "", ""
        if event == "open" and by_number and name[:1] != "/":
            file_identity = find_hidden(name) or file_identity
        if file_identity == report_identity:
            send("report-written" if opened_to_write else "report-read")
        elif event == "open" and file_identity in hidden:
            send("tests")
            if getpid() == pid:
                opened[file_identity] += 1
            # A traceback or a warning shows the test's line that made the call.
            if not shows_lines(frame) and not runner_reads(frame):
                imported = not by_frame and is_imported(frame)
                report_event("tests-read", frame, spared=("library", "runner", "test") if imported else ())
        elif event == "open" and file_identity in other_hidden:
            if getpid() == pid:
                opened[file_identity] += 1
            check_hidden_file(other_hidden[file_identity], frame)
        elif event == "open" and file_identity[0] == processes and (name.endswith("/mem") or name[:6] != "/proc/"):
            report_event("memory-used", frame)

    def is_old(path: str) -> bool:
        """Return whether a file is as it was when this process began."""
        try:
            return stat(path).st_ctime < started_at
        except os_error:  # also of a file that was removed after it was loaded
            return False

    def is_installed(path: str) -> bool:
        """Return whether a file of compiled code, by its real path, was there before and is not the tree's."""
        if path in loaded_before or path in kernel:
            return True
        in_packages = path.startswith(installed_in) or owner(path) == "library"
        return in_packages and not path.startswith(base) and is_old(path)

    def check_library(path: Any, frame: Any) -> None:
        # Compiled code can do anything in this process, also to the hook, so it is reported before it is loaded.
        if kind_of(path) is not byte_string and not isinstance_of(path, string):
            report_event("native-code", frame, spared=())  # its path may be another one each time
            return
        try:
            descriptor = open_file(string.__str__(path) if isinstance_of(path, string) else path, 0)
            name = readlink("/proc/self/fd/" + string(descriptor))
            close_file(descriptor)
        except os_error:
            return  # it cannot be loaded either
        if name.startswith(base) and is_old(name):
            send("native-code", name[size(base) :])
        elif not is_installed(name):  # the name of what was just built may be a random one
            report_event("native-code", frame, spared=())

    def check_memory(report_changes: bool) -> None:
        """Report executable memory that is not what the file of an installed library holds."""
        path = ""
        try:
            # The kernel takes much longer to write what was changed, which only the end needs.
            lines_of = content_of("/proc/self/smaps" if report_changes else "/proc/self/maps").split(b"\n")
        except os_error:
            lines_of = [b"0-0 x 0 0 0 unreadable"]
        for line in lines_of:
            fields = line.split(None, 5)
            if fields and fields[0][-1:] != b":":
                path = fields[-1].decode("utf-8", "surrogateescape") if size(fields) > 5 else "[no file]"
                path = path if b"x" in fields[1] else ""
                if not report_changes:
                    loaded_before.add(path)
                elif path and not is_installed(path):
                    made = "executable memory" if path.startswith(("/dev/", "/memfd:", "[")) else "a new library"
                    send("native-code", path[size(base) :] if path.startswith(base) and is_old(path) else made)
            # Changed pages are no longer the file's. "Dirty" are also those of a file that was just written.
            elif path and report_changes and fields[:1] == [b"Anonymous:"] and fields[1] != b"0":
                send("native-code", "executable memory")

    def check_kill(target: str, frame: Any) -> None:
        # Which process a test ends is no evidence, but explains why that process does not come to its end.
        code_owner, caller = responsible(frame, True)
        if code_owner in ("test", "runner", "library"):
            send("killed", target)
        else:
            send_location("killed", caller, target + " ")

    def check_start(programs: frozenset[str], frame: Any) -> None:
        # A test is no excuse for what it starts: an operator in it may be any function, such as `subprocess.run`.
        last, starter = None, frame
        while starter is not None and owner(starter.f_code.co_filename) != "tested":
            last, starter = starter, starter.f_back
        in_other_thread = last is not first_frame if by_frame else thread_id() != first_thread
        for program in programs:
            if starter is None:
                send("program-started", program + (" another thread" if in_other_thread else " -"))
            else:
                send_location("program-started", starter, program + " ")

    def check_code(holder: Any, attribute: str, frame: Any) -> None:
        # Honest cases: tested code inspects a function that a test passed to it; a library inspects its caller's
        # frame. Tested code that inspects a test function itself is reported.
        if attribute == "__code__" and kind_of(holder) is function:
            code = holder.__code__
        elif attribute == "f_code" and kind_of(holder) is frame_type:
            if frame is not None and owner(frame.f_code.co_filename) != "tested":
                return
            code = holder.f_code
        else:
            return
        if code.co_name[:4] == "test" and owner(code.co_filename) == "test":
            # This happens too often to compare files each time, because pytest inspects all tests.
            report_event("tests-read", frame, spared=("library", "test", "runner"), compares=False)

    def check_import(module: Any, path: Any, frame: Any) -> None:
        names = {string.__str__(module)}
        if path is not None:
            check_library(path, frame)
            # A shared library is initialized by the last part of the module's name.
            names = {
                string.__str__(module).rpartition(".")[2],
                string.__str__(path).rpartition("/")[2].partition(".")[0],
            }
        if unwatched_modules.isdisjoint(names):
            return
        importer = frame
        while importer is not None and importer.f_code.co_filename.startswith((*importers, watch_directory)):
            importer = importer.f_back
        direct = "nobody" if importer is None else owner(importer.f_code.co_filename)
        if (direct, responsible(frame, True)[0]) in (("standard", "tested"), ("runner", "runner")):
            # cmd, pdb and pytest work without readline, so its import by them fails without a report.
            denied[thread_id()] = import_error(
                "this module is not there for the standard library while tests are watched"
            )
            return
        report_event("watch-evaded", frame)

    def create_module(name: Any, modules: list[Any], frame: Any) -> None:
        if kind_of(name) is not string or kind_of(modules) is not list_type:
            return
        check_import(name, None, frame)
        if thread_id() not in denied:
            try:
                modules.append(create_builtin(namespace(name=name)))
            except any_error as error:
                denied[thread_id()] = import_error(string(error))

    def check_new_code(name: Any, frame: Any) -> None:
        nonlocal started
        if not started and not by_frame and frame is None:
            started = True  # the program itself, with which the interpreter begins
            return
        # Imports compile libraries under their own names; only an explicit compilation gives code a false name.
        if kind_of(name) is not string or owner(name) not in ("runner", "test", "standard"):
            return
        file = "" if frame is None else frame.f_code.co_filename
        direct = owner(file) if file else "nobody"
        if direct == "tested":
            send_location("code-disguised", frame)
        elif direct != "nobody" and (direct != "standard" or file.startswith(compilers)):
            return
        elif not is_imported(frame, True):  # for example asyncio, which marks its functions as coroutines
            report_event("code-disguised", frame)

    def find_program(frame: Any) -> None:
        nonlocal program
        names, main_frame = program, None
        while frame is not None:
            main_frame = frame if frame.f_globals is names and frame.f_code.co_name == "<module>" else main_frame
            frame = frame.f_back
        program = main_frame or names

    def end_program() -> None:
        """Report where the program was left, if not at its end: `sys.exit()` in tested code skips other checks."""
        nonlocal program
        frame, program = program, None
        if kind_of(frame) is not frame_type or starts_worker(frame):
            return
        if frame.f_code.co_code[frame.f_lasti] != returns:
            name = frame.f_code.co_filename
            if name[:1] == "<" or owner(name) == "test":  # runners catch what tests raise
                send("program-left", name + "@" + string(frame.f_lasti), frame.f_lineno or 0)

    def handle_event(event: str, args: Any, frame: Any) -> None:
        if event == program_ended:
            end_program()
        elif event == exit_event:
            if getpid() == pid:
                report_event("program-left", frame)
            leave(args[0])
        elif event in starts:
            check_start(programs_of(event, args), frame)
            if event == fork_event and kind_of(args[1]) is list_type:
                args[1].append(start_program)
        elif event == "open":
            path, mode, flags = args
            if kind_of(path) is not integer and kind_of(flags) is integer:
                writes = kind_of(mode) is string and mode != "r"
                check_path(event, path, writes or truth(flags & writing), frame, mode is None)
        elif event in ("os.kill", "os.killpg"):
            if args[1] and getpid() == pid:
                check_kill(string(args[0]).lstrip("-"), frame)
        elif event.startswith("os."):
            if event in ("os.symlink", "os.link"):
                check_link(event, args[0], args[1], frame)
            for path_argument in args[:2]:
                if kind_of(path_argument) is not integer:
                    check_path(event, path_argument, True, frame)
        elif event == "object.__setattr__":
            if kind_of(args[1]) is not string or args[1] != "__code__":
                return
            if address(args[2]) in own_codes:
                report_event("watch-evaded", frame)
            elif kind_of(args[0]) is function:
                name = args[0].__code__.co_filename
                code_owner = owner(name)
                if code_owner == "runner" or name.startswith(unittest):
                    # A test file's name is no excuse, because other code can have it. What tests really do is
                    # known from the gold run.
                    report_event("runner-replaced", frame, spared=("library", "runner"))
                elif code_owner == "test":
                    report_event("test-replaced", frame, spared=("library", "runner"))
        elif event == "object.__getattr__":
            if kind_of(args[1]) is string:
                check_code(args[0], args[1], frame)
        elif event == "import":
            check_import(args[0], args[1], frame)
        elif event == "ctypes.dlopen":
            if args[0] is not None and (kind_of(args[0]) not in (string, byte_string) or "/" in string(args[0])):
                check_library(args[0], frame)
        elif event == "function.__new__":
            if address(args[0]) in own_codes:
                report_event("watch-evaded", frame)
        elif event in ("cpython.PyInterpreterState_New", "sys.addaudithook"):
            if installed:
                report_event("watch-evaded", frame)
        elif event in ("compile", "code.__new__"):
            check_new_code(args[1], frame)
        elif event == "socket.__new__":
            if kind_of(args[1]) is integer and args[1] == machine_family:
                report_event("machine-socket", frame)
        elif event.startswith(("gc.", "sys._")):
            report_event("objects-searched", frame)
        elif event.startswith("sys."):
            report_event("trace-set", frame)
        else:  # also a function of any library that is loaded: memcpy and read write to any address, dlopen loads
            report_event("memory-used", frame)

    def hook(event: str, args: Any) -> None:
        if event not in watched:
            return
        try:
            frame = getframe(1)
        except value_error:  # a thread that runs no Python code
            frame = None
        try:
            if event == tests_ended:
                if by_frame and frame is caller_frame and not lost and getpid() == pid:
                    check_memory(True)
                    for file_identity, count in opened.items():
                        send("opened", hidden.get(file_identity) or other_hidden[file_identity], count)
                    send("end", secret)
                return
            if event == "cpython.PyInterpreterState_Clear":
                last = frame is None and is_finalizing() and thread_id() == first_thread
                if last:
                    end_program()
                if not by_frame and last and not lost and getpid() == pid:
                    check_memory(True)
                    send("end", secret)
                return
            if event == create_event:
                create_module(args[0], args[1], frame)
                return
            looks_at_frame = event == "object.__getattr__" and kind_of(args[0]) is frame_type
            if looks_at_frame and args[0].f_globals is own_globals:
                # Looking at the hook's own frame is no evidence. Checking it would raise the same event again.
                return
            if frame is not None and address(frame.f_code) in own_codes:
                return  # the hook itself caused the event
            if kind_of(program) is mapping and thread_id() == first_thread:
                find_program(frame)
            handle_event(event, args, frame)
        except failures:  # no real event has such arguments, but tested code may raise events of its own
            return
        # for example at the recursion limit; an action that cannot be examined is refused
        except any_error as error:
            denied[thread_id()] = error.with_traceback(None)

    def refuse(event: str, args: Any) -> None:
        error = refused(thread(), None)
        if error is not None:
            raise error

    # An error that leaves a hook exposes its frame and everything in it, so `refuse` uses nothing of the hook.
    refused, thread = denied.pop, thread_id
    first_frame = caller_frame
    while first_frame is not None and first_frame.f_back is not None:
        first_frame = first_frame.f_back
    list_type, mapping = list, dict
    # Compared by identity: code that only equals the hook's, or runs with its globals, is not the hook.
    hook_functions: tuple[Any, ...] = (*comparing, content_of, is_genuine, responsible, send_location)
    hook_functions += (report_event, shows_lines, runner_reads, is_imported, check_reward, check_hidden_file)
    hook_functions += (check_link, find_hidden, check_code, check_import, check_kill, check_start, programs_of)
    hook_functions += (starts_worker, check_new_code, create_module, find_program, end_program, handle_event, hook)
    own_codes = {id(hook_function.__code__): hook_function.__code__ for hook_function in hook_functions}
    own_codes.update((id(code), code) for code in codes_of_comparing)
    send("start", " ".join((digest(secret.encode()).hexdigest(), str(pid), str(os.getppid()), str(int(serves)))))
    if rewards and not walled:
        send("reward-open")
    check_memory(False)
    _imp.create_builtin = audited_functions.create_audited
    os._exit = vars(sys.modules["posix"])["_exit"] = audited_functions.exit_audited
    atexit.register(sys.audit, program_ended)  # the program's frame must not be kept longer
    sys.addaudithook(hook)
    sys.addaudithook(refuse)
    installed = True
