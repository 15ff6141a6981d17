"""The sandbox protocol. A sandbox is opened on a read-only tree, runs commands, and is deleted when closed.

All writes go to a private layer that is deleted with the sandbox. No process outlives the `run` that started it:
when `run` returns, daemons are dead too.
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
    """A file, directory or socket of the host, mounted at `target` in the sandbox; read-only, except that sockets
    can be used.

    A `private` mount is visible only to runs with `reveal=True`: this keeps a pristine git directory or hidden
    tests out of the agent's reach. For sandboxes on another machine, the source of a `remote` mount is a path of
    that machine.
    """

    source: Path
    target: str
    private: bool = False
    remote: bool = False


class HostEnvironment(Struct, frozen=True):
    """What a remote machine provides for running tasks: mounts, directories for PATH, environment variables."""

    mounts: tuple[Mount, ...]
    path_prefixes: tuple[str, ...]
    env: dict[str, str]


class SandboxLimits(Struct, frozen=True):
    """Limits of a sandbox: memory, number of processes, bytes written, and the output of each command.

    The time limit is an argument of `run`. How the kinds of sandboxes enforce the others:

    - local: `disk_bytes` is the size of the one tmpfs that all writes go to, with at most one file per 8 KiB. A
      tmpfs is memory too, so a control group limits the sum of `memory_bytes` and `disk_bytes`. Where no control
      group can be made, each process may have `memory_bytes` of data, and system calls that create memory outside
      any process fail. The kernel counts `processes`.
    - docker: the engine enforces `memory_bytes` and `processes`. No single file can be larger than `disk_bytes`.
      The sum is limited by the engine's storage if that has quotas, otherwise it is measured every few seconds,
      and a command that wrote more is killed.
    - unsafe-local: only `output_bytes`, at which every kind truncates the output.
    """

    memory_bytes: int = 4 << 30
    processes: int = 512
    disk_bytes: int = 2 << 30
    output_bytes: int = 32 << 20


class SandboxSpec(Struct, frozen=True):
    """What to open: `tree`, which is never changed, appears writable at `workdir`; `env` is the whole environment.

    `path_prefixes` are put before the system's directories in PATH. `image` is the container image, for kinds that
    use one; with `tree_in_image` the image itself holds the tree, of which `tree` is a copy, and its repository is
    cut to the history of its current commit. `as_root` is for images whose programs only root can use; otherwise
    commands run as an ordinary user.
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
    """A finished command. `exit_code` is negative for a signal, and None after a timeout.

    `stdout` and `stderr` are truncated at the spec's `output_bytes`; then `truncated` is true.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    duration_s: float
    timed_out: bool = False
    truncated: bool = False


class ChangedFile(Struct, frozen=True):
    """The current state of a file or link. `mode` is git's (100644, 100755, 120000); a link's `data` is its
    target.
    """

    mode: str
    data: bytes


class TreeChanges(Struct, frozen=True):
    """The differences between the workdir now and when it was opened, by path relative to the workdir.

    To apply them: delete everything at and below the paths in `deleted` (b"" means the whole tree), make the
    `directories`, then write the `files`. Content of `.git` directories is left out, and special files count as
    absent. No program in the sandbox took part in reading. If `refused` is not empty, it is the reason why the
    changes cannot be read, and the other fields are empty.
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
        """The working directory inside the sandbox."""
        ...

    @property
    def home(self) -> str:
        """A writable home directory inside the sandbox; empty when the sandbox opens."""
        ...

    def locate(self, target: str) -> str:
        """Return the path inside the sandbox of the mount that was declared with this `target`."""
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
        """Run a command to its end, or kill it with all its processes after `timeout_s` seconds.

        Seconds in which its processes waited for a processor of a busy machine are not counted, up to several
        times the limit (`understudy.sandbox.time_limit`).
        `env` is added to the spec's. Raises SandboxError when the command could not be run at all. Cancelling the
        awaiting task kills the command.
        """
        ...

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """Return the content of a regular file inside. Raises FileNotFoundError, or SandboxError above `limit`
        bytes.

        The file is opened within the sandbox's root, so a link cannot lead out of it.
        """
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file inside, with its parent directories, owned by the sandbox's user."""
        ...

    async def seal(self, paths: Sequence[str]) -> None:
        """Make these files of the workdir (paths relative to it) read-only for all later runs, until a reset.

        Commands can then not change, rename or remove them or a directory above them. Kinds that cannot do this
        leave the files as they are. Raises SandboxError.
        """
        return None

    async def count_opens(self, paths: Sequence[str]) -> None:
        """Count from now on how often these files of the workdir (paths relative to it) are opened, until a reset.

        Kinds that cannot do this do nothing.
        """
        return None

    def opens(self) -> dict[str, int] | None:
        """Return how often the files of `count_opens` were opened, by their paths; None if that is not known."""
        return None

    async def read_changes(self, *, file_limit: int, ignored: IgnoreFilter) -> TreeChanges | None:
        """Return what changed, read from outside; None if this kind can trust a revealed run to read the changes.

        Kills everything inside first. `ignored` is called in a thread with changed paths, and returns those to
        leave out; if one of the others is larger than `file_limit` bytes, all changes are refused. Needed for
        container images, in which the agent may have replaced every program, so that none of them can be trusted
        to report the changes.
        """
        return None

    async def reset(self) -> None:
        """Drop everything written since open: in the tree, the home directory and /tmp."""
        ...

    async def close(self) -> None:
        """Kill all processes and drop everything. Never raises; may be called twice."""
        ...


class Sandboxes(Protocol):
    """A kind of sandbox: opens sandboxes, and checks whether this machine can.

    The default implementations fit a kind that shows this machine's programs and uses no container images.
    """

    name: ClassVar[str]
    opened_as: str = ""
    """The value of `--sandbox` that this was opened by; see `sandbox_option`."""
    host_programs: ClassVar[bool] = True
    """Whether commands see this machine's programs; if not, those of an image."""

    def host_environment(self) -> HostEnvironment | None:
        """Return what a remote machine provides for tasks; None for kinds on this machine and for images.

        Raises SandboxError, ConfigError.
        """
        return None

    def problems(self) -> list[str]:
        """Return the reasons why this kind cannot work here, each with a remedy; empty if it can.

        Raises SandboxError if a remote machine cannot be reached.
        """
        return []

    def warnings(self) -> list[str]:
        """Return the limits that this kind cannot enforce on this machine, each with a remedy."""
        return []

    def export_tree(self, image: str, path: str, base_commit: str, into: Path) -> None:
        """Create the directory `into` with the content of `path` in an image, without its `.git`; fetches the
        image.

        Raises TaskError when the image or the path does not exist, or its repository is not at `base_commit`;
        ConfigError for kinds that run no images.
        """
        raise _no_images(f"the tree at {path} in the container image {image}")

    def image_id(self, image: str, *, fetch: bool) -> str:
        """Return the id of the image with this name; "" if it is not on this machine and `fetch` is false.

        Raises TaskError when it cannot be fetched; kinds that run no images return "".
        """
        return ""

    def build_image(self, context: Path, name: str, *, timeout_s: float) -> None:
        """Build the image `name` from the Dockerfile in the directory `context`, unless there is one with that
        name.

        Raises TaskError when it cannot be built; ConfigError for kinds that run no images.
        """
        raise _no_images(f"building an image of {context}")

    def workdir_of(self, image: str) -> str:
        """Return an image's working directory, "" if it sets none; fetches the image.

        Raises TaskError when there is no such image; ConfigError for kinds that run no images.
        """
        raise _no_images(f"the container image {image}")

    def expect(self, spec: SandboxSpec) -> None:
        """Announce that a sandbox with this spec will probably be opened soon, so that the kind can prepare it."""

    async def aclose(self) -> None:
        """Drop sandboxes that were prepared but not opened. Never raises; the kind can be used again
        afterwards.
        """

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
    """An open remote sandbox: its labels, and when it was opened and will end (seconds since 1970)."""

    id: str
    labels: dict[str, str]
    opened: float
    deadline: float


class RemoteSandboxes(Sandboxes, ABC):
    """A kind whose sandboxes are on other machines. Each has labels (see `labelled`), and ends at its deadline."""

    @abstractmethod
    async def sandboxes(self) -> list[OpenSandbox]:
        """Return all sandboxes that are open there, whoever opened them, the oldest first. Raises SandboxError."""

    @abstractmethod
    async def reap(self, ids: Sequence[str]) -> list[str]:
        """End these sandboxes, and those past their deadline; return the ids of the ended ones. Raises
        SandboxError.
        """


class IsolatedSandbox:
    """Methods shared by sandboxes in which the workdir and the mounts have the paths of the spec."""

    _spec: SandboxSpec

    @property
    def workdir(self) -> str:
        """The spec's workdir."""
        return self._spec.workdir

    def locate(self, target: str) -> str:
        """Return the target itself. Raises SandboxError when no mount was declared there."""
        return self._spec.mounts[mount_number(self._spec, target)].target

    async def seal(self, paths: Sequence[str]) -> None:
        """Leave the files as they are: see `Sandbox.seal`."""

    async def count_opens(self, paths: Sequence[str]) -> None:
        """Do nothing: see `Sandbox.count_opens`."""

    def opens(self) -> dict[str, int] | None:
        """Return None: see `Sandbox.opens`."""
        return None

    def _absolute(self, path: str) -> str:
        check_no_nul("use the path", path)
        return posixpath.normpath(posixpath.join(self.workdir, path))


_labels: ContextVar[Mapping[str, str]] = ContextVar("labels", default=MappingProxyType({}))


@contextmanager
def labelled(**labels: str) -> Generator[None]:
    """Give these labels to all sandboxes that are opened inside the block, if their kind has labels."""
    token = _labels.set({**_labels.get(), **labels})
    try:
        yield
    finally:
        _labels.reset(token)


def sandbox_labels() -> dict[str, str]:
    """Return the labels for a sandbox that is opened now (see `labelled`)."""
    return dict(_labels.get())


def open_kind(name: str, options: Mapping[str, Any] | None = None) -> Sandboxes:
    """Return the kind of sandbox called `name`, constructed with `options`, without checking that it can work
    here.

    From then on until this process ends, nothing in the cache directory is removed, because sandboxes mount files
    of it. `name` is a kind, or KIND:TARGET?OPTION=VALUE&… Raises ConfigError for an unknown kind, or
    options that it does not have.
    """
    share_lock(cache_dir() / CACHE_LOCK)
    address, _, query = name.partition("?")
    kind_name, _, target = address.partition(":")
    named = ({"target": target} if target else {}) | dict(parse_qsl(query, keep_blank_values=True))
    adapter = plugins.load("sandboxes", kind_name)
    if named and (unknown := set(named) - set(inspect.signature(adapter).parameters)):
        # What is not given as text, such as a callback, is no option of --sandbox.
        options_of_kind = [name for name in inspect.signature(adapter).parameters if name != "progress"]
        raise ConfigError(
            f"--sandbox {name}: {kind_name} sandboxes have no options {', '.join(sorted(unknown))}; "
            f"give some of {', '.join(options_of_kind) or 'none'}"
        )
    kind = adapter(**named, **(options or {}))
    kind.opened_as = name
    return kind


def sandbox_option(sandboxes: Sandboxes) -> str:
    """Return the value of `--sandbox` by which another process opens the same: kind, machine and options."""
    return sandboxes.opened_as or sandboxes.name


def load_sandboxes(name: str, options: Mapping[str, Any] | None = None) -> Sandboxes:
    """Return the kind of sandbox called `name` (see `open_kind`).

    Raises ConfigError for an unknown kind, or one that cannot work here; SandboxError if a remote machine cannot
    be reached.
    """
    kind = open_kind(name, options)
    if problems := kind.problems():
        raise ConfigError("\n".join(problems))
    return kind


def mount_number(spec: SandboxSpec, target: str) -> int:
    """Return the index of the mount declared at `target`. Raises SandboxError if there is none."""
    targets = [mount.target for mount in spec.mounts]
    if target not in targets:
        raise SandboxError(
            f"no mount has the target {target!r}; declare it in the mounts of the SandboxSpec, or use one of its "
            f"targets: {', '.join(targets) or 'none'}"
        )
    return targets.index(target)


def check_no_nul(what: str, first: str, *more: str) -> None:
    """Raise SandboxError, "cannot `what` `first`: …", when a string contains a NUL byte, where C would end it."""
    if any("\0" in text for text in (first, *more)):
        raise SandboxError(
            f"cannot {what} {first[:200]!r}: an argument, a path or the environment contains a NUL byte, expected "
            "none; remove it"
        )


def missing_tree(tree: Path) -> SandboxError:
    """Return the error for a prepared tree that is not on this machine."""
    return SandboxError(
        f"cannot open a sandbox on {tree}: no such directory, expected the task's prepared tree; it was removed "
        "from the cache: run the same command again, which prepares it anew"
    )


def below(path: str, base: str) -> bool:
    """Return whether `path` is `base` or below it."""
    return PurePosixPath(path).is_relative_to(base)


def check_spec(
    spec: SandboxSpec, *, writable: Sequence[str], taken: Sequence[str], needs_tree: bool = True
) -> None:
    """Raise SandboxError for an invalid spec.

    `writable` are directories other than the workdir that commands may write to; `taken` are paths that must not
    be in the workdir. With `needs_tree`, the tree must exist on this machine.
    """
    if needs_tree and not spec.tree.is_dir():
        raise missing_tree(spec.tree)
    if not _normal(spec.workdir) or any(below(area, spec.workdir) for area in taken):
        raise SandboxError(
            f'cannot use {spec.workdir!r} as workdir: expected an absolute path without ".." that does not end '
            f'with "/", and that neither is nor contains any of: {", ".join(taken)}; correct it in the task'
        )
    for mount in spec.mounts:
        _check_mount(mount, spec, writable)


def _normal(path: str) -> bool:
    return path.startswith("/") and path == posixpath.normpath(path) and path != "/" and "\0" not in path


def _check_mount(mount: Mount, spec: SandboxSpec, writable: Sequence[str]) -> None:
    if not _normal(mount.target) or below(spec.workdir, mount.target):
        raise SandboxError(
            f"cannot mount {mount.source} at {mount.target!r}: expected an absolute path that is "
            f"neither the workdir {spec.workdir} nor above it; mount it elsewhere"
        )
    if not mount.source.exists():
        raise SandboxError(
            f"cannot mount {mount.source} at {mount.target}: no such file or directory on this machine; create "
            "it, or correct the mount's source"
        )
    if mount.private and any(below(mount.target, area) for area in writable):
        raise SandboxError(
            f"cannot mount {mount.source} at {mount.target} as private: commands may write there, so they could "
            "tamper with it; choose a target outside of the home and /tmp"
        )
    if mount.private and below(mount.target, spec.workdir):
        raise SandboxError(
            f"cannot use {spec.workdir!r} as workdir: commands may write there, and it contains {mount.target}, "
            "which they must not change; set workdir in the task to another directory, such as /workspace"
        )
