"""The process that is a sandbox: while it lives the mounts are there, when it dies the kernel frees everything.

It is bubblewrap in a process namespace, waiting for the end of its stdin, which is ours. So it ends with us,
however we end; and its end kills every run inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path

from understudy.errors import SandboxError
from understudy.sandbox.local import cgroups
from understudy.sandbox.local.mounts import BOX, SYSTEM_PATH
from understudy.sandbox.process import kill_group, seal_descriptors

START_S = 60.0
"""How long making the mounts may take on a machine under load, in seconds."""

END_S = 5.0
CHAIN_ENV = {"PATH": SYSTEM_PATH, "LC_ALL": "C"}
"""Environment of our own helpers; never the spec's, for some of them run with our rights."""


class _HolderProtocol(asyncio.SubprocessProtocol):
    def __init__(self) -> None:
        self.output = {1: bytearray(), 2: bytearray()}
        self.answered = asyncio.Event()
        self.ended = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output[fd] += data
        if self.ready:
            self.answered.set()

    @property
    def ready(self) -> bool:
        return self.output[1].endswith(b"ready\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self.answered.set()


class MountHolder:
    """A started holder.

    `target` is a process in its namespaces, as this machine counts; `box` and `proc` are descriptors of the root
    that commands see and of the holder's own /proc; `group` bounds the memory of what runs inside.
    """

    def __init__(
        self, transport: asyncio.SubprocessTransport, watch: _HolderProtocol, group: Path | None, depth: int
    ) -> None:
        self.group = group
        self._transport = transport
        self._watch = watch
        self._closing: asyncio.Task[None] | None = None
        first = transport.get_pid()
        for _ in range(depth):
            first = _child(first)
        # The memory of the shell belongs to the inner user namespace, so we may look into it without being root.
        self.target = _child(first)
        with contextlib.ExitStack() as opened:
            self._pidfd = os.pidfd_open(first)
            opened.callback(os.close, self._pidfd)
            self.box = os.open(f"/proc/{self.target}/root{BOX}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, self.box)
            self.proc = os.open(f"/proc/{self.target}/root/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, self.proc)
            self._opened = opened.pop_all()

    @property
    def alive(self) -> bool:
        """Whether the sandbox is still there."""
        if self._closing is not None:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    async def close(self) -> None:
        """Kill everything inside and wait until it is gone; may be called twice, also at once."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        await _end(self._transport, self._watch)
        self._opened.close()
        if self.group is not None:
            cgroups.remove(self.group)


def _child(pid: int) -> int:
    """The only child of a process. Raises SandboxError when it has none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not children:
        raise SandboxError("the sandbox was killed as soon as it was open; retry, and check the machine's memory")
    return int(children[0])


async def _end(transport: asyncio.SubprocessTransport, watch: _HolderProtocol) -> None:
    """Close stdin, which ends a holder in any state, and wait for it."""
    if (pipe := transport.get_pipe_transport(0)) is not None:
        pipe.close()
    try:
        await asyncio.wait_for(watch.ended.wait(), END_S)
    except TimeoutError:
        kill_group(transport.get_pid())
        await watch.ended.wait()
    transport.close()


async def start_holder(command: Sequence[str], groups: Path | None, memory_bytes: int) -> MountHolder:
    """Start a holder and wait until its mounts are made.

    In `groups`, where it is given, a control group is made that bounds memory, and goes when the holder goes.
    Raises SandboxError with what the helpers said. When cancelled, nothing stays behind.
    """
    group = None if groups is None else cgroups.reserve(groups)
    wrap = [] if group is None else ["/bin/sh", "-c", cgroups.OUTLIVE, "hold", str(group)]
    seal_descriptors()
    try:
        transport, watch = await asyncio.get_running_loop().subprocess_exec(
            _HolderProtocol, *wrap, *command, stdin=asyncio.subprocess.PIPE, env=CHAIN_ENV, start_new_session=True
        )
    except OSError as error:
        raise SandboxError(f"cannot start a sandbox: {error}; see `understudy doctor`") from error
    try:
        if group is not None:
            cgroups.create(group, memory_bytes)
        async with asyncio.timeout(START_S):
            await watch.answered.wait()
        if not watch.ready:
            message = watch.output[2].decode(errors="replace").strip() or "a helper program ended without output"
            raise SandboxError(f"cannot make the mounts of a sandbox: {message}; see `understudy doctor`")
        return MountHolder(transport, watch, group, depth=1 if group is None else 2)
    except BaseException as error:
        await asyncio.shield(_end(transport, watch))
        if group is not None:
            cgroups.remove(group)
        if isinstance(error, TimeoutError):
            raise SandboxError(f"cannot open a sandbox: its mounts were not made within {START_S:g} s") from error
        raise
