"""The filter of system calls in a local sandbox, with the real calls."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import subprocess
from pathlib import Path

import msgspec
import pytest

from understudy.sandbox.base import SandboxSpec
from understudy.sandbox.docker.seccomp import security_options
from understudy.sandbox.local import seccomp
from understudy.sandbox.local.holder import find_group_parent
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.sandbox.system_calls import DENIED_CALLS

from support import require

NUMBERS = seccomp._NUMBERS.get(platform.machine(), {}) | seccomp._SHARED  # pyright: ignore[reportPrivateUsage]
ASK = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
answers = []
for number, *arguments in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    answers.append([result, ctypes.get_errno()])
print(json.dumps(answers))
"""


def answers(tree: Path, calls: list[list[int]]) -> list[list[int]]:
    """What system calls (number and arguments) return in a sandbox, each with its errno."""
    sandboxes = LocalSandboxes()
    require(sandboxes.problems())

    async def ask() -> bytes:
        sandbox = await sandboxes.open(SandboxSpec(tree=tree))
        try:
            command = ["/usr/bin/python3", "-c", ASK, msgspec.json.encode(calls).decode()]
            done = await sandbox.run(command, timeout_s=30)
        finally:
            await sandbox.close()
        assert done.exit_code == 0, done.stderr
        return done.stdout

    return msgspec.json.decode(asyncio.run(ask()))


def test_calls_into_other_processes_and_past_the_network_are_denied(tmp_path: Path) -> None:
    calls = {
        "ptrace": ([0, 0, 0, 0], errno.EPERM),  # PTRACE_TRACEME
        "process_vm_readv": ([1, 0, 0, 0, 0, 0], errno.EPERM),
        "process_vm_writev": ([1, 0, 0, 0, 0, 0], errno.EPERM),
        "pidfd_getfd": ([-1, 0, 0], errno.EPERM),
        "socket": ([40, 1, 0], errno.EAFNOSUPPORT),  # AF_VSOCK, SOCK_STREAM
        "io_uring_setup": ([1, 0], errno.ENOSYS),
        "memfd_secret": ([0], errno.ENOSYS),
    }
    results = answers(tmp_path, [[NUMBERS[name], *arguments] for name, (arguments, _) in calls.items()])
    assert results == [[-1, error] for _, error in calls.values()]


def test_which_files_are_in_memory_cannot_be_asked_or_decided(tmp_path: Path) -> None:
    calls = {
        "mincore": ([0, 4096, 0], -1, errno.ENOSYS),
        "preadv2": ([-1, 0, 0, 0, 0, 8], -1, errno.ENOSYS),  # RWF_NOWAIT
        "cachestat": ([-1, 0, 0, 0], -1, errno.ENOSYS),
        "fadvise64": ([-1, 0, 0, 4], 0, 0),  # POSIX_FADV_DONTNEED, of a file that is not open
    }
    results = answers(tmp_path, [[NUMBERS[name], *arguments] for name, (arguments, _, _) in calls.items()])
    assert results == [[result, error] for _, result, error in calls.values()]


def test_keys_that_the_kernel_keeps_for_a_user_are_no_place_for_notes(tmp_path: Path) -> None:
    # Each would work: a key in the user's keyring, asking for one, and the id of that keyring.
    names = ("add_key", "request_key", "keyctl")
    results = answers(tmp_path, [[NUMBERS[name], 0, -4, 0, 0, -4] for name in names])
    assert results == [[-1, errno.ENOSYS]] * 3


def test_other_sockets_work(tmp_path: Path) -> None:
    (inet, _), (unix, _) = answers(tmp_path, [[NUMBERS["socket"], 2, 1, 0], [NUMBERS["socket"], 1, 1, 0]])
    assert inet >= 0
    assert unix >= 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is an interface of x86-64")
def test_the_second_interface_leads_nowhere(tmp_path: Path) -> None:
    assert answers(tmp_path, [[0x40000000 + 521, 0, 0, 0, 0]]) == [[-1, errno.ENOSYS]]  # x32's ptrace


def test_files_in_memory_are_denied_only_where_no_control_group_counts_them(tmp_path: Path) -> None:
    name = int.from_bytes(b"x\0", "little")  # any address will do: the filter answers before it is read
    ((result, error),) = answers(tmp_path, [[NUMBERS["memfd_create"], name, 0]])
    assert result == -1
    assert error == (errno.ENOSYS if find_group_parent() is None else errno.EFAULT)


def test_memory_that_no_process_has_is_denied_where_nothing_counts_it() -> None:
    require(LocalSandboxes().problems())
    calls = [[NUMBERS["shmget"], 0, 4096, 0o600], [NUMBERS["memfd_create"], 0, 0]]
    for memory_files, expected in ((False, [errno.ENOSYS, errno.ENOSYS]), (True, [0, errno.EFAULT])):
        program = os.memfd_create("filter")
        os.write(program, seccomp.seccomp_filter(memory_files=memory_files))
        os.lseek(program, 0, os.SEEK_SET)
        command = ["bwrap", "--dev-bind", "/", "/", "--unshare-ipc", "--seccomp", str(program), "/usr/bin/python3"]
        command += ["-c", ASK, msgspec.json.encode(calls).decode()]
        done = subprocess.run(command, pass_fds=[program], capture_output=True, check=True, timeout=60)
        os.close(program)
        assert [code for _, code in msgspec.json.decode(done.stdout)] == expected


def test_what_is_not_bounded_without_control_groups_is_said() -> None:
    warnings = LocalSandboxes().warnings()
    assert bool(warnings) == (find_group_parent() is None)
    assert all("memory is bounded for each process alone" in warning for warning in warnings)


def test_an_unknown_processor_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    (problem,) = LocalSandboxes().problems()
    assert "riscv64" in problem
    assert "--sandbox docker" in problem
    with pytest.raises(KeyError):
        seccomp.seccomp_filter(memory_files=True)


def test_an_engine_that_takes_no_profile_applies_its_own() -> None:
    docker = {"Components": [{"Name": "Engine"}]}
    podman = {"Components": [{"Name": "Podman Engine"}]}
    filtering = {"SecurityOptions": ["name=seccomp,profile=default"]}
    plain, profile = security_options(filtering, docker)
    assert plain == "no-new-privileges"
    assert security_options(filtering, podman) == security_options({"SecurityOptions": []}, docker) == [plain]
    rules = msgspec.json.decode(profile.removeprefix("seccomp="))["syscalls"]
    for name, code in DENIED_CALLS.items():
        assert [rule.get("errnoRet") for rule in rules if name in rule["names"]] == [code], name
