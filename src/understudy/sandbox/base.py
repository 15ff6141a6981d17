"""The sandbox protocol. A sandbox is opened on a read-only tree, runs commands, and is gone when closed.

Every write lands in a private layer that dies with the sandbox. No command outlives its `run`: when it returns,
every process it started, daemons too, is dead.
"""

from __future__ import annotations

import inspect
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar, Protocol
from urllib.parse import parse_qsl

from msgspec import Struct, field

from understudy import plugins
from understudy.config import CACHE_LOCK, cache_dir
from understudy.errors import ConfigError, SandboxError
from understudy.util.files import share_lock


class Mount(Struct, frozen=True):
    """A file, directory or socket of the host, seen at `target` in the sandbox; read-only but for sockets.

    A `private` mount is seen only by runs that ask for it with `reveal=True`: it is how a pristine git
    directory or hidden tests stay out of the agent's reach while the sandbox lives. The source of a `remote` one
    is a path of the machine that the sandbox is on, where that is another one.
    """

    source: Path
    target: str
    private: bool = False
    remote: bool = False


class HostEnvironment(Struct, frozen=True):
    """What the machine of remote sandboxes offers to run tasks with: mounts, directories in PATH, variables."""

    mounts: tuple[Mount, ...]
    path_prefixes: tuple[str, ...]
    env: dict[str, str]


class SandboxLimits(Struct, frozen=True):
    """What a sandbox may use: memory, processes at a time, all that it writes, and the output of each command.

    The wall-clock limit is `run`'s own. What enforces the others:

    - local: `disk_bytes` is the size of the one tmpfs that all writes go to, with one file for every 8 KiB. That
      is memory too, so a control group bounds the sum of `memory_bytes` and `disk_bytes`; where no such group can
      be made, each process gets `memory_bytes` of data, and calls that make memory which no process has fail.
      `processes` are counted by the kernel.
    - docker: the engine bounds `memory_bytes` and `processes`. No single file is larger than `disk_bytes`; the sum
      is bounded by the engine's storage where that has quotas, else it is measured every few seconds and a command
      that wrote more is killed.
    - unsafe-local: nothing but `output_bytes`, which every kind cuts off.
    """

    memory_bytes: int = 4 << 30
    processes: int = 512
    disk_bytes: int = 2 << 30
    output_bytes: int = 32 << 20


class SandboxSpec(Struct, frozen=True):
    """What to open: `tree` (never changed) is seen writable at `workdir`; `env` is all the environment there is.

    `path_prefixes` are directories put before the system's in PATH. `image` names the programs for kinds that run
    container images; `tree_in_image` says that the image itself holds the tree, which `tree` is then a copy of:
    its repository keeps the history up to its present commit and nothing later. `as_root` is for images whose
    programs only root can use; without it commands run as an ordinary user.
    """

    tree: Path
    image: str = ""
    tree_in_image: bool = False
    as_root: bool = False
    workdir: str = "/workspace"
    mounts: tuple[Mount, ...] = ()
    env: dict[str, str] = field(default_factory=dict[str, str])
    path_prefixes: tuple[str, ...] = ()
    limits: SandboxLimits = SandboxLimits()


class Completed(Struct, frozen=True):
    """A finished command. `exit_code` is negative for a signal; on a timeout it is None.

    `stdout` and `stderr` are cut at the spec's `output_bytes`, then `truncated` is true.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    duration_s: float
    timed_out: bool = False
    truncated: bool = False


class ChangedFile(Struct, frozen=True):
    """A file or link as it is now. `mode` is git's (100644, 100755, 120000); a link's `data` is where it leads."""

    mode: str
    data: bytes


class TreeChanges(Struct, frozen=True):
    """What differs below the workdir from what was there at open, by path relative to it.

    All that lay at or below a path of `deleted` is gone (all there was, for the path b""), and what lay at one of
    `directories` is a directory now; then come the `files`. What is in a directory `.git` is left out, special
    files count as absent, and nothing was read by a program of the sandbox. Where `refused` is not empty, it says
    why the changes cannot be taken, and nothing else is told.
    """

    files: dict[bytes, ChangedFile]
    deleted: frozenset[bytes] = frozenset()
    directories: frozenset[bytes] = frozenset()
    refused: str = ""


IgnoreFilter = Callable[[Sequence[bytes]], Set[bytes]]


class Sandbox(Protocol):
    """An open sandbox."""

    @property
    def workdir(self) -> str:
        """The working directory as commands inside see it."""
        ...

    @property
    def home(self) -> str:
        """A writable home directory as commands inside see it; empty when the sandbox opens."""
        ...

    def locate(self, target: str) -> str:
        """The path at which commands see a mount declared with this `target`."""
        ...

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
        """Run a command to its end, or kill it and all it started after `timeout_s` seconds.

        `env` is added to the spec's. Raises SandboxError when the command could not be run at all.
        Cancelling the awaiting task kills the command.
        """
        ...

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """The content of a regular file inside. Raises FileNotFoundError, or SandboxError above `limit` bytes.

        The file is opened inside the sandbox, so a link cannot lead out of it.
        """
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file inside, with its parent directories, owned by the sandbox's user."""
        ...

    async def seal(self, paths: Sequence[str]) -> None:
        """Show these files of the workdir (relative to it) read-only to all later runs, until a reset.

        Neither they nor a directory above them can then be changed, renamed or removed by a command. Kinds that
        cannot do that leave the files as they are. Raises SandboxError.
        """
        return None

    async def read_changes(self, *, file_limit: int, ignored: IgnoreFilter) -> TreeChanges | None:
        """What changed, read from outside; None where a revealed run can be trusted to tell.

        `ignored` is asked, in a thread, which of the paths that changed do not matter; a file that does and is
        larger than `file_limit` bytes refuses the whole. All that runs inside is killed. In a sandbox made of a
        container image every program is the agent's to replace, so none is asked there.
        """
        return None

    async def reset(self) -> None:
        """Drop everything written since open, in the tree, the home and /tmp."""
        ...

    async def close(self) -> None:
        """Kill what runs and drop everything. Never raises; may be called twice."""
        ...


class Sandboxes(Protocol):
    """A kind of sandbox: opens them, and says whether this machine can.

    What is not overridden is that of a kind whose sandboxes show this machine's programs, and run no images.
    """

    name: ClassVar[str]
    host_programs: ClassVar[bool] = True
    """Whether commands see this machine's programs, else those of an image."""

    def host_environment(self) -> HostEnvironment | None:
        """What another machine offers to run tasks with; None where it is this machine that does, or an image.

        Raises SandboxError, ConfigError.
        """
        return None

    def problems(self) -> list[str]:
        """Why this kind cannot work here, each with what to do about it; empty when it can."""
        return []

    def warnings(self) -> list[str]:
        """What this kind does not enforce here although it works, each with what to do about it."""
        return []

    def export_tree(self, image: str, path: str, base_commit: str, into: Path) -> None:
        """Make the new directory `into` with what an image holds at `path`, without its `.git`; fetches the image.

        Raises TaskError when the image or the path is not there, or its repository is not at `base_commit`;
        ConfigError for kinds that run no images.
        """
        raise _no_images(f"the tree at {path} in the container image {image}")

    def image_id(self, image: str, *, fetch: bool) -> str:
        """Identify the image that has this name now; "" when it is not on this machine and `fetch` is false.

        Raises TaskError when it cannot be fetched; kinds that run no images return "".
        """
        return ""

    def build_image(self, context: Path, name: str, *, timeout_s: float) -> None:
        """Make the image `name` of the Dockerfile in the directory `context`, unless there is one of that name.

        Raises TaskError when it cannot be built; ConfigError for kinds that run no images.
        """
        raise _no_images(f"building an image of {context}")

    def workdir_of(self, image: str) -> str:
        """The directory that an image's programs start in, "" when it names none; fetches the image.

        Raises TaskError when there is no such image; ConfigError for kinds that run no images.
        """
        raise _no_images(f"the container image {image}")

    def expect(self, spec: SandboxSpec) -> None:
        """Announce that a sandbox on this spec is likely to be opened soon; a kind may prepare it in advance."""

    async def aclose(self) -> None:
        """Drop what was prepared and not opened. Never raises; the kind can be used again afterwards."""

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Open a sandbox. Raises SandboxError."""
        ...

    def prepare_tree(self, tree: Path) -> None:
        """Give a new tree the ownership that sandboxes of this kind need. Called once for each tree."""


def _no_images(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: unsupported by sandboxes that use this machine's own programs; use --sandbox docker"
    )


class OpenSandbox(Struct, frozen=True, kw_only=True):
    """A remote sandbox that is open: since when, till when (seconds since 1970), and for what."""

    id: str
    labels: dict[str, str]
    opened: float
    deadline: float


class RemoteSandboxes(Sandboxes, ABC):
    """A kind whose sandboxes are on other machines. Each ends at its deadline, and bears labels: `labelled`."""

    @abstractmethod
    async def sandboxes(self) -> list[OpenSandbox]:
        """Those that are open there, whoever opened them, the oldest first. Raises SandboxError."""

    @abstractmethod
    async def reap(self, ids: Sequence[str]) -> list[str]:
        """End these, and those past their deadline; returns the ids of those ended. Raises SandboxError."""


class IsolatedSandbox:
    """Methods shared by sandboxes in which the workdir and the mounts lie where the spec says."""

    _spec: SandboxSpec

    @property
    def workdir(self) -> str:
        """The spec's workdir."""
        return self._spec.workdir

    def locate(self, target: str) -> str:
        """The target itself. Raises SandboxError when no mount was declared there."""
        return self._spec.mounts[mount_number(self._spec, target)].target

    async def seal(self, paths: Sequence[str]) -> None:
        """Leave the files as they are: see `Sandbox.seal`."""

    def _absolute(self, path: str) -> str:
        check_no_nul("use the path", path)
        return posixpath.normpath(posixpath.join(self.workdir, path))


_labels: ContextVar[Mapping[str, str]] = ContextVar("labels", default=MappingProxyType({}))


@contextmanager
def labelled(**labels: str) -> Generator[None]:
    """Sandboxes that are opened inside bear these labels, where their kind has labels."""
    token = _labels.set({**_labels.get(), **labels})
    try:
        yield
    finally:
        _labels.reset(token)


def sandbox_labels() -> dict[str, str]:
    """The labels of a sandbox that is opened now (see `labelled`)."""
    return dict(_labels.get())


def open_kind(name: str, options: Mapping[str, Any] | None = None) -> Sandboxes:
    """The kind of sandbox that `name` names, constructed with `options`; whether it can work here is not asked.

    From then on nothing in the cache, where mounts of sandboxes are, is removed until this process ends.

    `name` is that of the kind alone, or KIND:TARGET?OPTION=VALUE&…, whose target and options are added. Raises
    ConfigError when there is none, or when it takes no such options.
    """
    share_lock(cache_dir() / CACHE_LOCK)
    kind_name, _, rest = name.partition(":")
    target, _, query = rest.partition("?")
    named = ({"target": target} if target else {}) | dict(parse_qsl(query, keep_blank_values=True))
    adapter = plugins.load("sandboxes", kind_name)
    if named and (unknown := set(named) - set(inspect.signature(adapter).parameters)):
        raise ConfigError(f"--sandbox {name}: {kind_name} sandboxes have no options {', '.join(sorted(unknown))}")
    return adapter(**named, **(options or {}))


def load_sandboxes(name: str, options: Mapping[str, Any] | None = None) -> Sandboxes:
    """The kind of sandbox that `name` names (see `open_kind`).

    Raises ConfigError when there is none, or when it cannot work here.
    """
    kind = open_kind(name, options)
    if problems := kind.problems():
        raise ConfigError("\n".join(problems))
    return kind


def mount_number(spec: SandboxSpec, target: str) -> int:
    """The position of the mount declared at `target`. Raises SandboxError when there is none."""
    targets = [mount.target for mount in spec.mounts]
    if target not in targets:
        raise SandboxError(f"no mount has the target {target!r}; declared: {targets}")
    return targets.index(target)


def check_no_nul(what: str, first: str, *more: str) -> None:
    """Raise SandboxError, "cannot `what` `first`: …", when a string has a NUL byte: it ends there for C."""
    if any("\0" in text for text in (first, *more)):
        raise SandboxError(f"cannot {what} {first!r}: an argument, a path or the environment contains a NUL byte")


def below(path: str, base: str) -> bool:
    """Whether `path` is `base` or lies under it."""
    return PurePosixPath(path).is_relative_to(base)


def check_spec(
    spec: SandboxSpec, *, writable: Sequence[str], taken: Sequence[str], needs_tree: bool = True
) -> None:
    """Raise SandboxError for an invalid spec.

    `writable` are the directories besides the workdir that commands may write to; `taken` those that the workdir
    must not hold. `needs_tree`: the tree is taken from this machine.
    """
    if needs_tree and not spec.tree.is_dir():
        raise SandboxError(
            f"cannot open a sandbox on {spec.tree}: it is not a directory; expected a prepared tree"
        )
    if not _normal(spec.workdir) or any(below(area, spec.workdir) for area in taken):
        raise SandboxError(
            f'cannot use {spec.workdir!r} as workdir: expected an absolute path, without ".." and "/" at its end, '
            f"that is neither equal to nor a parent of: {', '.join(taken)}"
        )
    for mount in spec.mounts:
        _check_mount(mount, spec, writable)


def _normal(path: str) -> bool:
    return path.startswith("/") and path == posixpath.normpath(path) and path != "/" and "\0" not in path


def _check_mount(mount: Mount, spec: SandboxSpec, writable: Sequence[str]) -> None:
    if not _normal(mount.target) or below(spec.workdir, mount.target):
        raise SandboxError(
            f"cannot mount {mount.source} at {mount.target!r}: expected an absolute path "
            "that does not hide the workdir"
        )
    if not mount.source.exists():
        raise SandboxError(
            f"cannot mount {mount.source} at {mount.target}: the file does not exist on this machine"
        )
    if mount.private and any(below(mount.target, area) for area in (spec.workdir, *writable)):
        raise SandboxError(
            f"cannot mount {mount.source} at {mount.target} as private: commands may write there, so they could "
            "tamper with it; choose a target outside of the workdir, the home and /tmp"
        )
