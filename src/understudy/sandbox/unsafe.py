"""The `unsafe-local` kind of sandbox: a copy of the tree in a temporary directory, and plain processes.

WARNING: this isolates nothing. Commands run as the user who runs Understudy, and can reach the network, the home
directory and every file of the machine. Only wall-clock and output limits are enforced, and a process that leaves
its process group outlives its run. It exists for machines without namespaces, and for trusted tasks and agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar

from understudy.errors import SandboxError
from understudy.sandbox.base import Completed, Sandbox, Sandboxes, SandboxSpec, below, mount_number
from understudy.sandbox.process import read_regular, run_process, run_to_completion
from understudy.util.files import write_remedy

SYSTEM_PATH = os.defpath.lstrip(":")

_SOCKET_NAME_BYTES = 107


class UnsafeSandbox(Sandbox):
    """A directory with `tree`, `home` and `tmp` in it. Files written elsewhere on the machine are not removed."""

    def __init__(self, spec: SandboxSpec, root: Path) -> None:
        self._spec = spec
        self._root = root
        self._closed = False

    @property
    def workdir(self) -> str:
        """The copy of the tree."""
        return str(self._root / "tree")

    @property
    def home(self) -> str:
        """An empty directory beside the tree."""
        return str(self._root / "home")

    def locate(self, target: str) -> str:
        """Return the source of the mount with this `target`, because nothing is mounted here.

        For a long path a short link to it is returned, because the kernel limits socket paths to 107 bytes.
        """
        number = mount_number(self._spec, target)
        source = self._spec.mounts[number].source
        if len(os.fsencode(source)) <= _SOCKET_NAME_BYTES:
            return str(source)
        link = self._root / f"mount-{number}"
        if not link.is_symlink():
            link.symlink_to(source)
        return str(link)

    def _host(self, path: str) -> str:
        """Return this machine's path for a path of the spec: the workdir and mount targets are translated."""
        bases = [(mount.target, str(mount.source)) for mount in self._spec.mounts]
        bases.append((self._spec.workdir, self.workdir))
        for base, target in sorted(bases, key=lambda pair: len(pair[0]), reverse=True):
            if below(path, base):
                return str(Path(target, PurePosixPath(path).relative_to(base)))
        return path

    def _own(self, path: str) -> Path:
        """Return this machine's path for `path`. Raises SandboxError unless it is in this sandbox's directory."""
        host_path = Path(self._host(str(PurePosixPath(self.workdir, path))))
        if not host_path.resolve().is_relative_to(self._root.resolve()):
            raise SandboxError(
                f"{path}: unsafe-local only writes below its own directory {self._root}; give a path below it"
            )
        return host_path

    def _env(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        prefixes = [self._host(prefix) for prefix in self._spec.path_prefixes]
        return {
            "PATH": os.pathsep.join([*prefixes, "/usr/local/bin", SYSTEM_PATH]),
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "USER": "agent",
            "TMPDIR": str(self._root / "tmp"),
            **self._spec.env,
            **(extra or {}),
        }

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
        """Run a plain process in its own process group. `reveal` makes no difference: nothing is hidden."""
        if self._closed:
            raise SandboxError(f"cannot run {argv[0]!r}: this sandbox is closed; open a new one")
        environment = self._env(env)
        where = self._host(str(PurePosixPath(self.workdir, cwd or "")))
        program = str(Path(where, argv[0])) if "/" in argv[0] else shutil.which(argv[0], path=environment["PATH"])
        if program is None:
            raise SandboxError(
                f"cannot run {argv[0]!r}: no such program; expected it in {environment['PATH']}: install it on "
                "this machine, or correct the command"
            )
        try:
            return await run_to_completion(
                lambda cancelled: run_process(
                    [program, *argv[1:]],
                    cancelled,
                    timeout_s=timeout_s,
                    output_bytes=self._spec.limits.output_bytes,
                    stdin=stdin,
                    env=environment,
                    cwd=where,
                )
            )
        except (OSError, ValueError) as error:
            raise SandboxError(
                f"cannot run {argv[0]!r} in {where}: {error}; expected an executable program and an existing "
                "directory: correct the command, or create the directory first"
            ) from error

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """Return the content of a regular file anywhere on the machine; links are followed."""
        host_path = self._host(str(PurePosixPath(self.workdir, path)))
        try:
            descriptor = os.open(host_path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SandboxError(
                f"cannot read {path}: {error.strerror}; expected a file that this user can read: make it readable "
                "(chmod), or give another path"
            ) from error
        return await asyncio.to_thread(read_regular, descriptor, path, limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file in the sandbox's directory. Raises SandboxError for a path outside."""
        host_path = self._own(path)
        try:
            host_path.parent.mkdir(parents=True, exist_ok=True)
            host_path.write_bytes(data)
            host_path.chmod(mode)
        except OSError as error:
            raise SandboxError(
                f"cannot write {path}: {error.strerror}; "
                f"{write_remedy(error, f'check the permissions of {host_path.parent}, or give another path')}"
            ) from error

    async def reset(self) -> None:
        """Copy the tree afresh and empty home and tmp."""
        await asyncio.to_thread(_fill, self._root, self._spec.tree)

    async def close(self) -> None:
        """Remove the directory."""
        self._closed = True
        await asyncio.to_thread(_remove, self._root)


def _remove(path: Path) -> None:
    """Remove a tree, even if a command made its directories read-only."""
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            Path(folder).chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


class _CopyFailed(Exception):
    """A file that could not be copied. Not an OSError, which `shutil.copytree` would collect as text."""

    def __init__(self, source: str, error: OSError) -> None:
        super().__init__(str(error))
        self.source = source
        self.error = error


def _copy_file(source: str, target: str) -> str:
    try:
        return shutil.copy2(source, target)
    except OSError as error:
        raise _CopyFailed(source, error) from error


def _fill(root: Path, tree: Path) -> None:
    """Copy the tree, and make home and tmp, empty. Raises SandboxError if this fails."""
    try:
        for name in ("tree", "home", "tmp"):
            _remove(root / name)
        shutil.copytree(tree, root / "tree", symlinks=True, copy_function=_copy_file)
        (root / "home").mkdir()
        (root / "tmp").mkdir()
    except _CopyFailed as failure:
        raise _copy_error(failure.source, failure.error, tree, root) from failure.error
    except OSError as error:
        raise _copy_error(error.filename or str(tree), error, tree, root) from error


def _copy_error(source: str, error: OSError, tree: Path, root: Path) -> SandboxError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"free some space in {root.parent}, or set TMPDIR to another directory"
    else:
        remedy = f"make all files of the tree readable (chmod -R u+r {tree})"
    return SandboxError(f"cannot copy {source} to {root}: {error.strerror or error}; {remedy}")


class UnsafeSandboxes(Sandboxes):
    """Opens directories in place of sandboxes; see the warning of this module."""

    name: ClassVar[str] = "unsafe-local"

    async def open(self, spec: SandboxSpec) -> UnsafeSandbox:
        """Copy the spec's tree to a temporary directory. Raises SandboxError when that fails."""
        root = Path(tempfile.mkdtemp(prefix="understudy-unsafe-"))
        filling = asyncio.ensure_future(asyncio.to_thread(_fill, root, spec.tree))
        try:
            await asyncio.shield(filling)
        except BaseException:
            await asyncio.wait({filling})  # a thread cannot be cancelled
            _remove(root)
            raise
        return UnsafeSandbox(spec, root)
