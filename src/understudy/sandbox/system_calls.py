"""The system calls that commands in a sandbox are denied, whatever kind of sandbox it is.

None of them is needed to build or test a program: they read and change other processes, reach this machine's
hypervisor past the private network, hold memory that no limit of a process counts, or show and decide which files
this machine holds in memory and which keys its kernel keeps for a user, where a sandbox could leave notes for
another that runs beside it or after it. The local sandbox makes a filter of its own of them, a container gets them
through its engine's profile.
"""

from __future__ import annotations

import errno

DENIED_CALLS = {
    "ptrace": errno.EPERM,
    "process_vm_readv": errno.EPERM,
    "process_vm_writev": errno.EPERM,
    "pidfd_getfd": errno.EPERM,
    # Programs fall back where the kernel does not have these.
    "io_uring_setup": errno.ENOSYS,
    "memfd_secret": errno.ENOSYS,
    "mincore": errno.ENOSYS,
    "preadv2": errno.ENOSYS,  # the C library makes a plain `preadv` of it
    "cachestat": errno.ENOSYS,
    "add_key": errno.ENOSYS,
    "request_key": errno.ENOSYS,
    "keyctl": errno.ENOSYS,
    "fadvise64": 0,  # advice, which succeeds without effect
}
"""What each call fails with, by its name; 0 where it succeeds without effect."""

DENIED_FAMILY = 40
"""AF_VSOCK: sockets of this family fail with EAFNOSUPPORT."""

MEMORY_CALLS = ("memfd_create", "shmget")
"""They make memory that no process has: ENOSYS where no control group counts the memory of a sandbox."""
