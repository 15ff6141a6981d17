"""The relay's end on the sandbox's machine: multiplexes connections to its sockets over stdin and stdout.

    python3 relay_program.py SOCKET…

It needs only Python 3.8, and no network: the process that started it connects each connection to a socket of its
own (see `relay.py`). Both ends use this module's `Multiplexer`. After the line `GREETING`, frames follow in both
directions: type (1 byte), channel (4), length (4), content. Each channel may have `WINDOW` unacknowledged bytes in
flight; the receiver allows more by ALLOW frames. A frame that violates the protocol ends the whole stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

GREETING = b"understudy-relay 1\n"
HEAD = struct.Struct(">BII")
OPEN, DATA, END, RESET, ALLOW = range(5)
"""Opens a channel (content: a socket's number); carries bytes; ends them; resets; allows more bytes."""

NUMBER = struct.Struct(">I")
FRAME_BYTES = 32 << 10
WINDOW = 256 << 10
CHANNELS = 256
"""The most channels at a time."""


class RelayBroken(Exception):
    """The other end sent a frame that violates the protocol; the message describes the frame."""


class Channel:
    """One relayed connection. Received bytes are buffered here, at most `WINDOW`."""

    def __init__(self, number: int, owner: Multiplexer) -> None:
        self.number = number
        self._owner = owner
        self._incoming = bytearray()
        self._incoming_ended = False
        self._outgoing_ended = False
        self._broken = False
        self._unacknowledged = 0
        self._allowed = WINDOW
        self._changed = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether neither end sends any more."""
        return self._broken or (self._incoming_ended and self._outgoing_ended)

    # --- called by the multiplexer --------------------------------------------------------------------------

    def take(self, type_: int, content: bytes) -> None:
        """Process a received frame of this channel. Raises RelayBroken."""
        if type_ == DATA:
            if (
                self._incoming_ended
                or not content
                or len(self._incoming) + self._unacknowledged + len(content) > WINDOW
            ):
                raise RelayBroken(f"more data on channel {self.number} than the window of {WINDOW} bytes allows")
            self._incoming += content
        elif type_ == ALLOW:
            if len(content) != NUMBER.size or self._allowed + NUMBER.unpack(content)[0] > WINDOW:
                raise RelayBroken(
                    f"an invalid ALLOW frame on channel {self.number}, expected a number within the window "
                    f"of {WINDOW} bytes"
                )
            self._allowed += NUMBER.unpack(content)[0]
        elif content:
            raise RelayBroken(f"a frame of type {type_} with content, expected none")
        elif type_ == END:
            self._incoming_ended = True
        else:
            self._broken = True
        self._changed.set()

    def break_off(self) -> None:
        """Mark the channel as broken without telling the other end."""
        self._broken = True
        self._changed.set()

    # --- called by the users of the channel -----------------------------------------------------------------

    async def read(self) -> bytes:
        """Return the bytes that have arrived, waiting for at least one; b"" at the end. Raises
        ConnectionResetError.
        """
        if self._unacknowledged:
            allowed, self._unacknowledged = self._unacknowledged, 0
            if not self._incoming_ended:
                await self._owner.send(ALLOW, self.number, NUMBER.pack(allowed))
        await self._wait(lambda: bool(self._incoming) or self._incoming_ended)
        content = bytes(self._incoming)
        self._incoming.clear()
        self._unacknowledged = len(content)
        return content

    async def write(self, content: bytes) -> None:
        """Send bytes, as fast as the other end accepts them. Raises ConnectionResetError."""
        unsent = memoryview(content)
        while unsent:
            await self._wait(lambda: self._allowed > 0)
            count = min(len(unsent), self._allowed, FRAME_BYTES)
            self._allowed -= count
            await self._owner.send(DATA, self.number, bytes(unsent[:count]))
            unsent = unsent[count:]

    async def end(self) -> None:
        """Tell the other end that no more bytes follow."""
        if not (self._outgoing_ended or self._broken):
            self._outgoing_ended = True
            await self._owner.send(END, self.number)

    async def close(self) -> None:
        """Close the channel; it is reset if one direction has not ended."""
        if not self.over:
            await self._owner.send(RESET, self.number)
        self._broken = True
        self._owner.forget(self)

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._broken:
                raise ConnectionResetError("the other end closed the relayed connection")
            self._changed.clear()
            await self._changed.wait()
        if self._broken:
            raise ConnectionResetError("the other end closed the relayed connection")


TYPE_CHECKING = False
if TYPE_CHECKING:
    Accept = Callable[[Channel, int], Awaitable[None]]


class Multiplexer:
    """Channels over one pair of streams.

    `accept` is called with each channel that the other end opens, and the socket number that it asks for; without
    `accept` the other end may open none.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        accept: Accept | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._accept = accept
        self._channels: dict[int, Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._last = 0
        self._ended = False
        self.heard_at = time.monotonic()
        """When the last frame arrived, by `time.monotonic`."""

    async def open(self, number: int) -> Channel:
        """Open a channel to the other end's socket `number`. Raises ConnectionError."""
        if self._ended or len(self._channels) >= CHANNELS:
            raise ConnectionRefusedError(
                f"cannot open another connection: the relay has ended, or has {CHANNELS} connections, the "
                "maximum; close some"
            )
        self._last += 1
        channel = self._channels[self._last] = Channel(self._last, self)
        await self.send(OPEN, channel.number, NUMBER.pack(number))
        return channel

    async def send(self, type_: int, channel: int, content: bytes = b"") -> None:
        """Send one frame; waits while the other end does not read. Raises ConnectionError."""
        async with self._sending:
            self._writer.write(HEAD.pack(type_, channel, len(content)) + content)
            await self._writer.drain()

    def forget(self, channel: Channel) -> None:
        """Forget a channel that is no longer used here."""
        self._channels.pop(channel.number, None)

    async def run(self) -> None:
        """Read frames until the stream ends, then break all channels. Raises RelayBroken."""
        try:
            while True:
                try:
                    type_, number, size = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                    if type_ > ALLOW or size > FRAME_BYTES:
                        raise RelayBroken(
                            f"a frame of type {type_} with {size} bytes, expected a type up to {ALLOW} and "
                            f"{FRAME_BYTES} bytes at most"
                        )
                    content = await self._reader.readexactly(size)
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                self.heard_at = time.monotonic()
                if type_ == OPEN:
                    self._opened(number, content)
                elif number in self._channels:
                    self._channels[number].take(type_, content)
                elif not 0 < number <= self._last:  # frames of a channel that was closed here may still arrive
                    raise RelayBroken(f"a frame of channel {number}, expected an OPEN frame before it")
        finally:
            self._ended = True
            for channel in self._channels.values():
                channel.break_off()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _opened(self, number: int, content: bytes) -> None:
        if self._accept is None or number != self._last + 1 or len(content) != NUMBER.size:
            raise RelayBroken(
                f"an invalid OPEN frame for channel {number}, expected channel {self._last + 1}, and only "
                "where connections are accepted"
            )
        if len(self._channels) >= CHANNELS:
            raise RelayBroken(f"more than {CHANNELS} open channels, the maximum; close some connections")
        self._last = number
        channel = self._channels[number] = Channel(number, self)
        task = asyncio.ensure_future(self._serve(self._accept, channel, NUMBER.unpack(content)[0]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, accept: Accept, channel: Channel, number: int) -> None:
        try:
            await accept(channel, number)
        except OSError:
            pass  # an error of this one connection, which is reset
        finally:
            with contextlib.suppress(ConnectionError):
                await channel.close()


async def carry(channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes between a channel and a socket in both directions, until both have ended or one broke."""

    async def outward() -> None:
        while True:
            content = await reader.read(FRAME_BYTES)
            if not content:
                await channel.end()
                return
            await channel.write(content)

    async def inward() -> None:
        while True:
            content = await channel.read()
            if not content:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(content)
            await writer.drain()

    directions = [asyncio.ensure_future(outward()), asyncio.ensure_future(inward())]
    try:
        await asyncio.gather(*directions)
    except (ConnectionError, OSError):
        writer.transport.abort()
    finally:
        for direction in directions:
            direction.cancel()
        try:
            await asyncio.gather(*directions, return_exceptions=True)
            with contextlib.suppress(ConnectionError):
                await channel.close()
        finally:  # also where the relay ends, and cancels this, while the other end is being told
            writer.close()


async def listen(multiplexer: Multiplexer, sockets: Sequence[str]) -> None:
    """Listen on these socket paths, which must not exist yet. A connection to path n opens a channel with number
    n.
    """
    for number, path in enumerate(sockets):

        async def connected(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int = number
        ) -> None:
            try:
                channel = await multiplexer.open(number)
            except ConnectionError:
                writer.transport.abort()
                return
            await carry(channel, reader, writer)

        await asyncio.start_unix_server(connected, path)
        os.chmod(path, 0o666)  # noqa: PTH101 - who may reach it is decided by the directories above


async def stdio() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return streams of this process's stdin and stdout."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2 * FRAME_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


async def main(sockets: Sequence[str]) -> None:
    """Relay until stdin ends."""
    reader, writer = await stdio()
    multiplexer = Multiplexer(reader, writer)
    for path in sockets:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - left by a relay that was killed
    await listen(multiplexer, sockets)
    writer.write(GREETING)
    await writer.drain()
    await multiplexer.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
