"""The system calls that commands are denied in all kinds of sandboxes.

Building and testing programs needs none of them. They read or change other processes, reach this machine's
hypervisor around the private network, allocate memory that no limit of a process counts, or let a sandbox leave a
message for another one: by which files are in the page cache, or by the keys that the kernel keeps for a user. The
local sandbox makes a filter of its own of them; a container gets them through its engine's seccomp profile.
"""

from __future__ import annotations

import errno

DENIED_CALLS = {
    "ptrace": errno.EPERM,
    "process_vm_readv": errno.EPERM,
    "process_vm_writev": errno.EPERM,
    "pidfd_getfd": errno.EPERM,
    # ENOSYS makes programs fall back as they do on kernels without these calls.
    "io_uring_setup": errno.ENOSYS,
    "memfd_secret": errno.ENOSYS,
    "mincore": errno.ENOSYS,
    "preadv2": errno.ENOSYS,  # the C library falls back to `preadv`
    "cachestat": errno.ENOSYS,
    "add_key": errno.ENOSYS,
    "request_key": errno.ENOSYS,
    "keyctl": errno.ENOSYS,
    "fadvise64": 0,  # only advice, so it can succeed without doing anything
}
"""The error of each call by name; 0 for one that succeeds without effect."""

DENIED_FAMILY = 40
"""AF_VSOCK: sockets of this family fail with EAFNOSUPPORT."""

MEMORY_CALLS = ("memfd_create", "shmget")
"""They allocate memory that belongs to no process. ENOSYS where no control group counts a sandbox's memory."""
