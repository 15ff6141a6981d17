"""The `local` kind of sandbox: overlayfs and bubblewrap. Nothing of it is left when this process ends, in whatever
way.

The tree is the lower layer of an overlay. The upper layer is on a tmpfs, as are home and /tmp, so all writes are
limited in size and vanish with the mounts. Commands run as an unprivileged user; they see the system's programs
read-only, only their own processes, and a network with nothing but a loopback interface, in which connections to
other machines time out.

Memory is limited for all processes together where control groups can be made, otherwise for each process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import posixpath
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace

from understudy.config import SANDBOX_UID
from understudy.errors import SandboxError, SandboxLost
from understudy.sandbox import network
from understudy.sandbox.base import (
    Completed,
    IsolatedSandbox,
    Sandbox,
    Sandboxes,
    SandboxSpec,
    below,
    check_no_nul,
)
from understudy.sandbox.local import files, mounts
from understudy.sandbox.local.holder import (
    HELPER_ENV,
    RUN_IN_GROUP,
    START_TIMEOUT_S,
    MountHolder,
    find_group_parent,
    start_holder,
)
from understudy.sandbox.local.opened_files import OpenedFiles
from understudy.sandbox.local.seccomp import is_supported, seccomp_filter
from understudy.sandbox.process import exit_code_of_shell, kill_group, run_process, run_to_completion

TOOLS = {
    "bwrap": "bubblewrap",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "prlimit": "util-linux",
}
"""The programs needed, and the Debian packages they are in."""

USER_NAMESPACE_SWITCHES = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}
"""Kernel settings, the value that forbids user namespaces, and the command that allows them."""


class _SandboxRun:
    """The descriptors and the result of one run. bubblewrap writes its first process's pid and the exit code to
    `status`.
    """

    def __init__(self, proc: int, options: Sequence[str], filter: bytes) -> None:
        # A copy, because the sandbox may be closed meanwhile, and the descriptor's number be reused for another
        # sandbox.
        self._proc = os.dup(proc)
        self.status = os.memfd_create("status")
        self.options = _memory_file(os.fsencode("\0".join([*options, ""])))
        self.filter = _memory_file(filter)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that bubblewrap inherits; it passes none of them on to the command."""
        return self.status, self.options, self.filter

    def close(self) -> None:
        for descriptor in (self._proc, *self.descriptors):
            os.close(descriptor)

    def reported(self, key: str) -> int | None:
        """Return the value that bubblewrap has written for `key`, None if it has not yet."""
        for line in os.pread(self.status, 1 << 16, 0).splitlines(keepends=True):
            if line.endswith(b"\n") and key in (record := json.loads(line)):
                return record[key]
        return None

    def kill(self, leader: int) -> None:
        """Kill the first process of the run's pid namespace, and with it all others.

        Before bubblewrap has reported it, the command has not started, and killing the process group is enough.
        """
        first = self.reported("child-pid")
        if first is None:
            kill_group(leader)
            return
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            handle = os.open(str(first), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    async def gone(self) -> None:
        """Wait until only the first process is left, which is bubblewrap, and from which all others descend."""
        first = self.reported("child-pid")
        # Polled, because the kernel reports the end of a process only to its parent.
        while first is not None and self._has_children(first):  # noqa: ASYNC110
            await asyncio.sleep(0.0005)

    def _has_children(self, pid: int) -> bool:
        try:
            children = os.open(f"{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return False
        try:
            return os.read(children, 1) != b""
        except ProcessLookupError:
            return False
        finally:
            os.close(children)


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("content")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class LocalSandbox(IsolatedSandbox, Sandbox):
    """An open sandbox: its holder process, and how to enter its namespaces."""

    def __init__(self, spec: SandboxSpec, kind: LocalSandboxes, holder: MountHolder) -> None:
        self._spec = spec
        self._kind = kind
        self._holder = holder
        self._closed = False
        self._sealed: tuple[str, ...] = ()
        self._opened: OpenedFiles | None = None

    @property
    def home(self) -> str:
        """The home directory, on the size-limited tmpfs."""
        return mounts.HOME

    def _root(self) -> int:
        """Return a descriptor of the root that commands see. Raises SandboxLost when the sandbox is gone."""
        if not self._holder.alive:
            raise SandboxLost("the sandbox is closed or was killed; open a new one")
        return self._holder.box

    def _check_program(self, program: str, *, path: str, cwd: str, reveal: bool) -> None:
        """Raise SandboxError unless the program exists and is executable."""
        directories = [cwd] if "/" in program else path.split(":")
        for directory in directories:
            candidate = posixpath.join(directory, program)
            if reveal and any(m.private and below(candidate, m.target) for m in self._spec.mounts):
                return
            mode = files.file_mode(self._root(), candidate)
            if mode is not None and stat.S_ISREG(mode) and mode & 0o111:
                return
        raise SandboxError(
            f"cannot run {program!r}: no such program in the sandbox; expected it in {', '.join(directories)}: "
            "install it on this machine, or correct the command"
        )

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        reveal: bool = False,
    ) -> Completed:
        """Run a command. An exit code of 128 + n, a shell's notation for signal n, is returned as -n."""
        workdir = self._absolute(cwd or "")
        environment = mounts.environment(self._spec, env)
        check_no_nul("run", *argv, *environment, *environment.values())
        self._check_program(argv[0], path=environment["PATH"], cwd=workdir, reveal=reveal)
        if reveal:
            self._make_private_targets()
        options = mounts.command_arguments(self._spec, environment, self._sealed, cwd=workdir, reveal=reveal)
        # Only a control group counts memory files; without one they are denied, because no limit of a process
        # covers them.
        filter = seccomp_filter(memory_files=self._holder.group is not None)
        run = _SandboxRun(self._holder.proc, options, filter)
        command = [*self._kind.enter(self._holder, self._spec, run), *argv]
        completed, code = await run_to_completion(
            lambda cancelled: self._watch(run, command, cancelled, timeout_s, stdin)
        )
        if completed.timed_out:
            return completed
        if not self._holder.alive or (code is None and (completed.exit_code or 0) < 0):
            raise SandboxLost(
                f"{argv[0]!r} did not finish: the sandbox was closed or killed while it ran; check this machine's "
                "free memory (dmesg names killed processes), then run the same command again"
            )
        if code is None:
            message = completed.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(
                f"cannot run {argv[0]!r} in {workdir}: {message or 'it could not be started'}; check the path, "
                "and this machine with `understudy doctor`"
            )
        return replace(completed, exit_code=exit_code_of_shell(code))

    async def _watch(
        self, run: _SandboxRun, command: list[str], cancelled: asyncio.Event, timeout_s: float, stdin: bytes
    ) -> tuple[Completed, int | None]:
        """Run the helper programs that run a command; return their result and the command's exit code.

        The code is None when the helpers failed before the command started.
        """
        try:
            completed = await run_process(
                command,
                cancelled,
                timeout_s=timeout_s,
                output_bytes=self._spec.limits.output_bytes,
                stdin=stdin,
                env=HELPER_ENV,
                pass_fds=run.descriptors,
                kill=run.kill,
            )
            await run.gone()
            return completed, run.reported("exit-code")
        except OSError as error:
            # raises SandboxLost when the sandbox was closed while the command started, which is no fault of the
            # machine
            self._root()
            raise SandboxError(
                f"cannot start {command[0]}, which runs commands in the sandbox: {error}; if the argument list is "
                "too long, shorten the command's arguments, otherwise check this machine with `understudy doctor`"
            ) from error
        finally:
            run.close()

    def _make_private_targets(self) -> None:
        """Create the mount points of private mounts. Done only when a run reveals them, because even the names are
        hidden.
        """
        for mount in self._spec.mounts:
            if mount.private:
                files.make_mount_point(self._root(), mount.target, directory=mount.source.is_dir())

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """Return the content of a regular file. Links, pipes and devices cannot lead out of the sandbox."""
        return await asyncio.to_thread(files.read, self._root(), self._absolute(path), limit, self._kind.user)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file. A missing top-level directory is created, writable for commands too."""
        absolute = self._absolute(path)
        top = absolute.split("/")[1]
        if absolute.count("/") > 1 and files.file_mode(self._root(), f"/{top}") is None:
            await asyncio.to_thread(
                files.make_directory, self._root(), f"{mounts.MADE_DIRECTORIES}/{top}", self._kind.user
            )
            with contextlib.suppress(FileExistsError):
                os.symlink(f"{mounts.MADE_DIRECTORIES.lstrip('/')}/{top}", top, dir_fd=self._root())
        await asyncio.to_thread(files.write, self._root(), absolute, data, mode, self._kind.user)

    async def seal(self, paths: Sequence[str]) -> None:
        """Make the files read-only in later runs, by mounting them on themselves, and the directories above them
        too.
        """
        self._sealed = tuple(self._absolute(path) for path in paths)

    async def count_opens(self, paths: Sequence[str]) -> None:
        """Count from outside: nothing inside takes part. Without as many inotify watches, nothing is counted."""
        self._stop_counting()
        with contextlib.suppress(OSError):
            self._opened = OpenedFiles(self._root(), [self._absolute(path) for path in paths])

    def opens(self) -> dict[str, int] | None:
        """See Sandbox."""
        counts = None if self._opened is None else self._opened.counts()
        return None if counts is None else {posixpath.relpath(path, self.workdir): n for path, n in counts.items()}

    def _stop_counting(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    async def reset(self) -> None:
        """Replace the holder by a new one; the old one dies with everything that was written."""
        self._root()
        self._sealed = ()
        self._stop_counting()
        closing = asyncio.create_task(self._holder.close())
        try:
            self._holder = await self._kind.hold(self._spec)
        finally:
            await closing
        if self._closed:
            await self._holder.close()

    async def close(self) -> None:
        """Kill everything inside; the kernel frees the rest."""
        self._closed = True
        self._stop_counting()
        await self._holder.close()


def _may_become(user: int) -> bool:
    """Return whether this process is root and its user namespace contains `user`, so that it can switch to it.

    Root in a namespace with fewer users has no more rights than an ordinary user.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(first) <= user < int(first) + int(count) for first, _, count in ranges)


class LocalSandboxes(Sandboxes):
    """The `local` kind of sandbox. As root, commands get a user id of their own; otherwise a user namespace is
    used.
    """

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        self.user = SANDBOX_UID if _may_become(SANDBOX_UID) else None
        self._groups: list[Path | None] = []

    def problems(self) -> list[str]:
        """Return the reasons why local sandboxes cannot work here, found by opening one if the programs exist."""
        if sys.platform != "linux":
            return [f"local sandboxes need Linux, this is {sys.platform}; run in a Linux machine or container"]
        if not is_supported():
            return [
                f"local sandboxes have no filter of system calls for {platform.machine()}, expected x86_64 or "
                "aarch64; use --sandbox docker"
            ]
        missing = [
            f"`{tool}` is missing; install it, on Debian and Ubuntu with: apt-get install {package}"
            for tool, package in TOOLS.items()
            if shutil.which(tool, path=HELPER_ENV["PATH"]) is None
        ]
        if missing:
            return missing
        try:
            # In a thread, because the caller may be inside an event loop.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(asyncio.run, self._try()).result()
        except SandboxError as error:
            return [f"{error}; {hint}" for hint in self._hints()]
        return []

    def warnings(self) -> list[str]:
        """See Sandboxes. Without control groups, memory is limited for each process, but not for a sandbox."""
        if find_group_parent() is not None:
            return []
        return [
            "memory is bounded for each process alone, not for a sandbox, as no control group can be made here; "
            "run as root, in a container with --privileged, or under: systemd-run --user --scope -p Delegate=yes"
        ]

    def _hints(self) -> list[str]:
        if self.user is not None:
            return [
                "in a container, start it as an ordinary user with --security-opt seccomp=unconfined "
                "--security-opt systempaths=unconfined, or as root with --cap-add SYS_ADMIN --cap-add NET_ADMIN "
                "--security-opt seccomp=unconfined"
            ]
        hints = [
            f"user namespaces are switched off by {switch}; as root: {command}"
            for switch, (forbidding, command) in USER_NAMESPACE_SWITCHES.items()
            if Path(switch).exists() and Path(switch).read_text().strip() == forbidding
        ]
        return hints or [
            "run as root, or on Linux 5.11 or newer with user namespaces allowed; in a container, start it with "
            "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
        ]

    async def _try(self) -> None:
        with tempfile.TemporaryDirectory() as tree:
            sandbox = await self.open(SandboxSpec(tree=Path(tree)))
            try:
                await sandbox.run(["true"], timeout_s=10)
            finally:
                await sandbox.close()

    async def hold(self, spec: SandboxSpec) -> MountHolder:
        """Start a holder for `spec`. Raises SandboxError."""
        if not self._groups:
            self._groups.append(find_group_parent())
        # Written files are in memory too, and the control group charges them to the sandbox, so both limits are
        # added.
        memory_bytes = spec.limits.memory_bytes + spec.limits.disk_bytes
        holder = await start_holder(
            mounts.holder_command(spec, rootless=self.user is None), self._groups[0], memory_bytes
        )
        try:
            await asyncio.to_thread(self._cut_off, holder)
            self._furnish(holder, spec)
        except BaseException:
            await holder.close()
            raise
        return holder

    def _cut_off(self, holder: MountHolder) -> None:
        """Make connections to other machines time out."""
        try:
            if self.user is not None:
                network.drop_packets(f"/proc/{holder.target}/ns/net")
                return
            # In a process of its own, because only a single-threaded process can enter a user namespace.
            enter = ["nsenter", "--target", str(holder.target), "--user", "--preserve-credentials", "--net", "--"]
            command = [*enter, sys.executable, "-I", network.__file__]
            subprocess.run(command, check=True, capture_output=True, timeout=START_TIMEOUT_S, env=HELPER_ENV)
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or b""  # what the program said, if it ended
            problem = output.decode(errors="replace").strip()[-500:] or error
            raise SandboxError(
                f"cannot set up the network of a sandbox: {problem}; check this machine with `understudy doctor`"
            ) from error

    def _furnish(self, holder: MountHolder, spec: SandboxSpec) -> None:
        """Give the sandbox's user its writable directories, and write the generated files of /etc."""
        try:
            if self.user is not None:
                for area in (*mounts.AREAS, spec.workdir):
                    os.chown(area.lstrip("/"), self.user, self.user, dir_fd=holder.box, follow_symlinks=False)
        except OSError as error:
            raise SandboxError(
                f"cannot change the owner of a sandbox's files to user {self.user}: {error}; check this "
                "machine with `understudy doctor`"
            ) from error
        files.write_first(holder.box, {f"etc/{name}": content for name, content in mounts.etc().items()})

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """Open a sandbox. Raises SandboxError when the spec or this machine does not allow it."""
        mounts.check(spec)
        return LocalSandbox(spec, self, await self.hold(spec))

    def enter(self, holder: MountHolder, spec: SandboxSpec, run: _SandboxRun) -> list[str]:
        """Return the helper commands that bring a command into a sandbox; each one executes the next."""
        chain = ["/bin/sh", "-c", RUN_IN_GROUP, "join", str(holder.group)] if holder.group else []
        chain += ["nsenter", "--target", str(holder.target), "--mount", "--pid", "--net"]
        if self.user is None:
            chain += ["--user", "--preserve-credentials"]
        else:
            chain += ["--setuid", str(self.user), "--setgid", str(self.user)]
        chain += ["--", "bwrap", "--seccomp", str(run.filter), "--json-status-fd", str(run.status)]
        chain += ["--args", str(run.options), "--"]
        return [*chain, *mounts.limits(spec.limits, data_bytes=None if holder.group else spec.limits.memory_bytes)]

    def prepare_tree(self, tree: Path) -> None:
        """Make the sandboxes' user the owner of the tree if this process is root; links are not followed."""
        if self.user is None:
            return
        os.chown(tree, self.user, self.user, follow_symlinks=False)
        for folder, directories, names in os.walk(tree):
            for name in (*directories, *names):
                os.chown(Path(folder, name), self.user, self.user, follow_symlinks=False)
