"""Makes each Python that the tests' command starts watch itself: see `process_watch`, and `runtime_events.Watch`.

Python imports this file at its start, from the first directory in PYTHONPATH. Pythons before 3.8 have no audit
hooks and run unwatched, so any of them must be able to parse this file. A process that cannot report sends
nothing, which the grader notices. The environment's own module of this name is imported afterwards.
"""

# No annotations, because older Pythons cannot parse them.
# pyright: basic, reportMissingImports=false, reportUnusedImport=false

import os
import sys

_CHANNEL = 8
"""The descriptor that evidence is written to: each process hands it on to those that it starts."""


def _pass_on_channel():
    """Make `subprocess`, which closes other descriptors in its children, keep the channel open there.

    A program may have closed the channel, or opened another file with its number; then its children get neither.
    """
    import _posixsubprocess

    def identity(fstat=os.fstat):
        try:
            status = fstat(_CHANNEL)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def fork_exec(arguments, executables, close, keep, *others):
        if identity() == channel:
            keep = tuple(sorted(set(keep) | {_CHANNEL}))
        return original(arguments, executables, close, keep, *others)

    channel = identity()

    original = _posixsubprocess.fork_exec
    _posixsubprocess.fork_exec = fork_exec


def _start_watch():
    if os.readlink("/proc/self/fd/%d" % _CHANNEL) != os.environ["UNDERSTUDY_WATCH_PIPE"]:
        return
    _pass_on_channel()
    fields = os.environ["UNDERSTUDY_WATCH"].split("\n")
    root, walled, tests_begin = fields[0], fields[1], 4 + int(fields[2])
    others_begin = tests_begin + int(fields[3])
    rewards, tests = tuple(fields[4:tests_begin]), tuple(fields[tests_begin:others_begin])
    if rewards and walled:
        walled = _deny_rewards({os.path.dirname(path) for path in rewards})
    import code_owners
    import process_watch

    for name in ("process_watch", "code_owners", "code_files", "audited_functions", "audit_events"):
        del sys.modules[name]
    process_watch.watch(
        os.urandom(8).hex(),
        _CHANNEL,
        root,
        tests,
        code_owners.owners_in(root),
        other_files=tuple(fields[others_begin:]),
        rewards=rewards,
        walled=bool(walled),
        serves=_is_fork_server(),
    )


def _is_fork_server():
    """Return whether multiprocessing forks its workers from this process, which outlives the one it serves."""
    with open("/proc/self/cmdline", "rb") as file:
        return b"\0-c\0from multiprocessing.forkserver import main; main(" in file.read()


def _deny_rewards(directories):
    """Deny this process writing below the directories, and return whether that worked; without it the process is
    still watched.
    """
    try:
        import landlock

        return landlock.deny_writing_below(directories)
    except (ImportError, OSError):  # for example in a Python that was built without ctypes
        return False
    finally:
        sys.modules.pop("landlock", None)


def _main():
    watch_directory = os.path.dirname(os.path.abspath(__file__))
    try:
        if sys.version_info >= (3, 8) and "UNDERSTUDY_WATCH_PIPE" in os.environ:
            _start_watch()
    except Exception:  # noqa: BLE001, S110 - nobody could be told: the process's output is that of the tests
        pass
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != watch_directory]
    this_module = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
    finally:
        if this_module is not None:
            sys.modules.setdefault("sitecustomize", this_module)


_main()
