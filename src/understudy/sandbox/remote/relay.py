"""This machine's end of the relay: connects a remote sandbox's sockets to sockets of this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from understudy.errors import SandboxError
from understudy.sandbox.remote.relay_program import GREETING, Channel, Multiplexer, RelayBroken, carry

START_S = 60.0
_NOISE_BYTES = 300


class SocketRelay:
    """Connects channels to Unix sockets of this machine; a channel asks for a socket by its index in `sockets`.

    The other end is not trusted: it can reach these sockets and nothing else.
    """

    def __init__(self, sockets: Sequence[Path]) -> None:
        self._sockets = list(sockets)

    async def connect(self, channel: Channel, number: int) -> None:
        """Relay a channel to the socket that it asks for.

        For an unknown number it returns, upon which the channel is reset. Raises OSError.
        """
        if number < len(self._sockets):
            await carry(channel, *await _connect(self._sockets[number]))

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay until the stream ends. Raises SandboxError when the other end is no relay, or violates the
        protocol.
        """
        await read_greeting(reader)
        try:
            await Multiplexer(reader, writer, self.connect).run()
        except RelayBroken as error:
            raise SandboxError(
                f"the relay of a sandbox was closed, because the other machine sent {error}; install the "
                "same release of Understudy on both machines"
            ) from error


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a Unix socket through a descriptor of its directory, because the kernel limits socket paths to
    107 bytes.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


async def read_greeting(reader: asyncio.StreamReader, within_s: float = START_S) -> None:
    """Read the other end's first line. Raises SandboxError, with what came instead, if it is not GREETING."""
    try:
        async with asyncio.timeout(within_s):
            content = await reader.readexactly(len(GREETING))
    except asyncio.IncompleteReadError as error:
        content = error.partial
    except TimeoutError as error:
        raise SandboxError(
            f"the relay of a sandbox did not start within {within_s:g} s; check the other machine, then run "
            "the same command again"
        ) from error
    if content != GREETING:
        text = content[:_NOISE_BYTES].decode(errors="replace")
        raise SandboxError(
            f"expected the line {GREETING.decode().strip()!r} from the other machine's relay, got {text!r}; "
            "install the same release of Understudy on both machines"
        )
