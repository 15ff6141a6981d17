"""Permanently denies a process and its children to write below some directories, by Landlock (Linux 5.19).

The process can also no longer reach unconfined processes: neither their memory nor, in /proc, their open files.
"""

from __future__ import annotations

import ctypes
import os
import stat

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system call numbers
_NO_NEW_PRIVILEGES = 38  # prctl option
_FILE_RIGHTS = 1 << 1 | 1 << 14  # write, truncate
# remove, make, and move between directories
_DIRECTORY_RIGHTS = _FILE_RIGHTS | sum(1 << bit for bit in range(4, 14))
_TRUNCATE_ABI = 3  # the first version of Landlock's interface that can deny truncating
_MIN_ABI = 2  # the first version that can deny moving files between directories


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def deny_writing_below(directories: set[str]) -> bool:
    """Deny this process writing below the directories from now on; return whether that succeeded.

    Creating files directly in the directories above them is denied too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < _MIN_ABI:
        return False
    handled = ctypes.c_uint64(_DIRECTORY_RIGHTS if version >= _TRUNCATE_ABI else _DIRECTORY_RIGHTS & ~(1 << 14))
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    denied = {os.path.realpath(path) for path in directories}
    parents = {path for directory in denied for path in _parents(directory)}
    try:
        for parent in parents:
            for name in os.listdir(parent):
                path = os.path.join(parent, name)
                if path not in denied and path not in parents and not _allow(libc, ruleset, path, handled.value):
                    return False
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            return False
        return libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _parents(path: str) -> set[str]:
    directories: set[str] = set()
    while path != "/":
        path = os.path.dirname(path)
        directories.add(path)
    return directories


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, handled: int) -> bool:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # removed since its directory was listed, for example a temporary file
        return True
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):  # skipped, because the link's target is allowed or denied by itself
            return True
        rule = _Rule(handled & (_DIRECTORY_RIGHTS if stat.S_ISDIR(mode) else _FILE_RIGHTS), descriptor)
        return libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0) == 0
    finally:
        os.close(descriptor)
