"""The audit events that are looked at in a watched process (see `process_watch`)."""

from __future__ import annotations

CREATE_BUILTIN = "understudy.create_builtin"
EXIT = "understudy.exit"
FORK_EXEC = "understudy.fork_exec"
TESTS_ENDED = "understudy.tests_ended"
PROGRAM_ENDED = "understudy.program_ended"
"""Events of ours."""

_ACTIONS = """
    open os.link os.remove os.rename os.symlink os.truncate os.kill os.killpg object.__setattr__ object.__getattr__
    gc.get_objects gc.get_referents gc.get_referrers
    ctypes.PyObj_FromPtr ctypes.cdata ctypes.dlopen ctypes.dlsym ctypes.string_at
    sys.settrace sys.setprofile sys.monitoring.register_callback sys.addaudithook
    sys._current_frames sys._current_exceptions compile code.__new__ function.__new__ socket.__new__ import
    cpython.PyInterpreterState_New cpython.PyInterpreterState_Clear
"""
UNWATCHED_MODULES = frozenset(
    ("readline", "_xxsubinterpreters", "_interpreters", "_testcapi", "_testinternalcapi", "_posixsubprocess")
)
"""Modules that open files, start programs, or run code in other interpreters, without the hook being asked."""
WORKERS = frozenset((("multiprocessing.spawn", "spawn_main"), ("multiprocessing.forkserver", "main")))
"""The names in the programs with which multiprocessing starts Pythons."""
STARTS = frozenset(("os.system", "os.exec", "os.posix_spawn", FORK_EXEC))
"""The events of starting a program."""
WATCHED = frozenset(_ACTIONS.split()) | {TESTS_ENDED, PROGRAM_ENDED, CREATE_BUILTIN, EXIT} | STARTS
"""The audit events that are looked at; all others, as most imports and opened files, cost one look-up."""
