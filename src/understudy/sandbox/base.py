"""The sandbox protocol. A sandbox is opened on a read-only tree, runs commands, and is gone when closed.

Every write lands in a private layer that dies with the sandbox. No command outlives its `run`: when it returns,
every process it started, daemons too, is dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from msgspec import Struct, field

from understudy import adapters
from understudy.errors import ConfigError


class Mount(Struct, frozen=True):
    """A file, directory or socket of the host, seen at `target` in the sandbox; read-only but for sockets.

    A `private` mount is seen only by runs that ask for it with `reveal=True`: it is how a pristine git
    directory or hidden tests stay out of the agent's reach while the sandbox lives.
    """

    source: Path
    target: str
    private: bool = False


class Limits(Struct, frozen=True):
    """What a sandbox may use. `disk_bytes` bounds all it writes; the wall-clock limit is `run`'s own."""

    memory_bytes: int = 4 << 30
    processes: int = 512
    disk_bytes: int = 2 << 30
    output_bytes: int = 32 << 20


class SandboxSpec(Struct, frozen=True):
    """What to open: `tree` (never changed) is seen writable at `workdir`; `env` is all the environment there is.

    `path_prefixes` are directories put before the system's in PATH.
    """

    tree: Path
    workdir: str = "/workspace"
    mounts: tuple[Mount, ...] = ()
    env: dict[str, str] = field(default_factory=dict[str, str])
    path_prefixes: tuple[str, ...] = ()
    limits: Limits = Limits()


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


class Sandbox(Protocol):
    """An open sandbox."""

    @property
    def workdir(self) -> str:
        """The working directory as commands inside see it."""
        ...

    @property
    def home(self) -> str:
        """A writable home directory, as commands inside see it; empty at open."""
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

    async def reset(self) -> None:
        """Drop everything written since open, in the tree, the home and /tmp."""
        ...

    async def close(self) -> None:
        """Kill what runs and drop everything. Never raises; may be called twice."""
        ...


class Sandboxes(Protocol):
    """A kind of sandbox: opens them, and says whether this machine can."""

    name: ClassVar[str]

    def problems(self) -> list[str]:
        """Why this kind cannot work here, each with what to do about it; empty when it can."""
        ...

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Open a sandbox. Raises SandboxError."""
        ...

    def prepare_tree(self, tree: Path) -> None:
        """Give a freshly made tree the ownership that sandboxes of this kind need. Called once per tree."""
        ...


def usable(name: str) -> Sandboxes:
    """The kind of sandbox called `name`. Raises ConfigError when there is none, or when it cannot work here."""
    kind: Sandboxes = adapters.load("sandboxes", name)()
    if problems := kind.problems():
        raise ConfigError("\n".join(problems))
    return kind
