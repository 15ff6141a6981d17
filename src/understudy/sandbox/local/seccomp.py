"""The denied system calls (`understudy.sandbox.system_calls`) as a seccomp filter for bubblewrap's `--seccomp`."""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache

from understudy.sandbox.system_calls import DENIED_CALLS, DENIED_FAMILY, MEMORY_CALLS

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF opcodes: load word, two jumps, return
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (little-endian)
_ALLOW, _DENY = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_X32 = 0x40000000  # system calls of the x32 ABI, which would bypass the filter

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS = {
    "x86_64": {
        "ptrace": 101,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "socket": 41,
        "memfd_create": 319,
        "shmget": 29,
        "mincore": 27,
        "preadv2": 327,
        "fadvise64": 221,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
    },
    "aarch64": {
        "ptrace": 117,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "socket": 198,
        "memfd_create": 279,
        "shmget": 194,
        "mincore": 232,
        "preadv2": 286,
        "fadvise64": 223,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
    },
}
_SHARED = {"io_uring_setup": 425, "pidfd_getfd": 438, "memfd_secret": 447, "cachestat": 451}
"""System calls whose numbers are the same on both architectures."""


def is_supported() -> bool:
    """Return whether there is a filter for this machine's processor."""
    return platform.machine() in _ARCHITECTURES


def seccomp_filter(*, memory_files: bool) -> bytes:
    """Return the filter for this machine, as an array of `struct sock_filter`. Requires `is_supported`.

    `DENIED_CALLS` says what each denied call returns. Without `memory_files`, `MEMORY_CALLS` fail with ENOSYS too.
    System calls of other architectures fail with ENOSYS, and AF_VSOCK sockets with EAFNOSUPPORT.
    """
    return _filter_of(platform.machine(), memory_files)


@cache  # every command in a sandbox needs one
def _filter_of(machine: str, memory_files: bool) -> bytes:
    numbers = _NUMBERS[machine] | _SHARED
    denied = DENIED_CALLS if memory_files else DENIED_CALLS | dict.fromkeys(MEMORY_CALLS, errno.ENOSYS)
    answers = {numbers[name]: answer for name, answer in denied.items()}
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _instruction(_RETURN, _DENY | errno.ENOSYS),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _DENY | errno.ENOSYS)]
    for number, answer in answers.items():
        program += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _DENY | answer)]
    program += [
        _instruction(_EQUAL, numbers["socket"], 0, 3),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_EQUAL, DENIED_FAMILY, 0, 1),
        _instruction(_RETURN, _DENY | errno.EAFNOSUPPORT),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
