"""The process that is a sandbox: while it lives the mounts are there, when it dies the kernel frees everything.

It is bubblewrap with a namespace of processes and one of mounts, waiting for the end of its stdin, which is ours. So
it ends with us, however we end; and the end of its first process kills every run inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from understudy.errors import SandboxError
from understudy.sandbox import cgroup
from understudy.sandbox.process import kill_group
from understudy.sandbox.view import BOX

START_S = 60.0
"""How long making the mounts may take on a machine under load, in seconds."""

END_S = 5.0
CHAIN_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
"""Environment of our own helpers; never the spec's, for some of them run with our rights."""


class _Watch(asyncio.SubprocessProtocol):
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


class Holder:
    """A started holder.

    `target` is a process in its namespaces, as this machine counts; `box` and `proc` are descriptors of the root
    that commands see and of the holder's own /proc; `group` bounds the memory of what runs inside.
    """

    def __init__(
        self, transport: asyncio.SubprocessTransport, watch: _Watch, pid: int, group: Path | None
    ) -> None:
        self.group = group
        self._transport = transport
        self._watch = watch
        self._pidfd = os.pidfd_open(pid)
        self._closing: asyncio.Task[None] | None = None
        inside = Path(f"/proc/{_traceable(pid)}")
        self.target = int(inside.name)
        self.box = os.open(inside / f"root{BOX}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.proc = os.open(inside / "root/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

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
        for descriptor in (self._pidfd, self.box, self.proc):
            os.close(descriptor)
        if self.group is not None:
            cgroup.remove(self.group)


def _traceable(init: int) -> int:
    """The shell in the holder: its memory belongs to the inner user namespace, so we may look into it."""
    return int(Path(f"/proc/{init}/task/{init}/children").read_text().split()[0])


async def _end(transport: asyncio.SubprocessTransport, watch: _Watch) -> None:
    """Close stdin, which ends a holder in any state, and wait for it."""
    if (pipe := transport.get_pipe_transport(0)) is not None:
        pipe.close()
    try:
        await asyncio.wait_for(watch.ended.wait(), END_S)
    except TimeoutError:
        kill_group(transport.get_pid())
        await watch.ended.wait()
    transport.close()


async def start(command: Callable[[int], Sequence[str]], group: Path | None) -> Holder:
    """Start a holder and wait until its mounts are made. `command` gets the descriptor for bubblewrap's status.
    `group` goes when the holder goes.

    Raises SandboxError with what the helpers said. When cancelled, nothing stays behind.
    """
    wrap = [] if group is None else ["/bin/sh", "-c", cgroup.OUTLIVE, "hold", str(group)]
    status, status_end = os.pipe()
    try:
        transport, watch = await asyncio.get_running_loop().subprocess_exec(
            _Watch,
            *wrap,
            *command(status_end),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(status_end,),
            env=CHAIN_ENV,
            start_new_session=True,
        )
    except OSError as error:
        os.close(status)
        raise SandboxError(
            f"cannot start a sandbox: {error}; `understudy doctor` shows what is missing"
        ) from error
    finally:
        os.close(status_end)
    try:
        async with asyncio.timeout(START_S):
            await watch.answered.wait()
        if not watch.ready:
            said = watch.output[2].decode(errors="replace").strip()
            raise SandboxError(f"cannot make the mounts of a sandbox: {said or 'the helper ended without a word'}")
        return Holder(transport, watch, json.loads(os.read(status, 4096).splitlines()[0])["child-pid"], group)
    except TimeoutError as error:
        await _end(transport, watch)
        raise SandboxError(f"cannot open a sandbox: its mounts were not made within {START_S:g} s") from error
    except BaseException:
        await asyncio.shield(_end(transport, watch))
        raise
    finally:
        os.close(status)
