"""Makes each Python that the tests' command starts watch itself: see `process_watch`, and `runtime_events.Watch`.

Python imports this file when it starts, from the directory that is first in PYTHONPATH. Pythons before 3.8 have no
audit hooks and go on unwatched, so any of them must be able to read this file. A process that cannot report says
nothing: the grader sees that. The environment's own module of this name is imported afterwards.
"""

# No annotations, which older Pythons do not read.
# pyright: basic, reportMissingImports=false, reportUnusedImport=false

import os
import sys

_CHANNEL = 8
"""The descriptor that evidence is written to: each process hands it on to those that it starts."""


def _hand_on():
    """Let `subprocess`, which closes all other descriptors in its children, keep the channel open there."""
    import _posixsubprocess

    def fork_exec(arguments, executables, close, keep, *more):
        return begin(arguments, executables, close, tuple(sorted({*keep, _CHANNEL})), *more)

    begin = _posixsubprocess.fork_exec
    _posixsubprocess.fork_exec = fork_exec


def _begin():
    if os.readlink("/proc/self/fd/%d" % _CHANNEL) != os.environ["UNDERSTUDY_WATCH_PIPE"]:
        return
    _hand_on()
    root, walled, count, *paths = os.environ["UNDERSTUDY_WATCH"].split("\n")
    rewards, tests = tuple(paths[: int(count)]), tuple(paths[int(count) :])
    if rewards and walled:
        import landlock

        walled = landlock.withhold({os.path.dirname(path) for path in rewards})
        del sys.modules["landlock"]
    import process_watch

    del sys.modules["process_watch"]
    process_watch.watch_interpreter(_CHANNEL, root, tests, rewards, walled=bool(walled))


def _main():
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        if sys.version_info >= (3, 8) and "UNDERSTUDY_WATCH_PIPE" in os.environ:
            _begin()
    except Exception:  # noqa: BLE001, S110 - nobody could be told: the process's output is that of the tests
        pass
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


_main()
