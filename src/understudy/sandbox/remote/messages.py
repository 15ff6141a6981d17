"""The messages between this machine and a worker on another one, over one channel of the relay.

The worker responds to each request, in any order. Both ends must be the same release of Understudy.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import Struct, field

from understudy.errors import SandboxError
from understudy.sandbox.base import SandboxLimits
from understudy.sandbox.remote.relay_program import Channel

CONTROL = 1 << 31
"""The number of the channel for messages; lower ones are sockets."""

TREE = "tree-"
"""The prefix of trees' digests. Trees are cached apart, because the sandboxes' user must own them."""

MESSAGE_BYTES = 160 << 20
PING_S, LEASE_S = 20.0, 120.0
"""The seconds between pings, and how long a worker waits for any request before it ends."""


class RemoteMount(Struct, frozen=True):
    """A mount at `target`: content by its digest, a relayed socket by its number, or a `path` of the worker's
    machine.
    """

    target: str
    digest: str = ""
    socket: int | None = None
    path: str = ""
    private: bool = False


class RemoteEnvironment(Struct, frozen=True):
    """What a machine provides for running tasks: mounts, directories for PATH, environment variables."""

    mounts: tuple[RemoteMount, ...] = ()
    path_prefixes: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict[str, str])


class HelloRequest(Struct, frozen=True, tag=True):
    """Ask what the worker's machine is like. `version` is the caller's release."""

    version: str


class HelloReply(Struct, frozen=True):
    """The problems and warnings of local sandboxes on the worker's machine, and its environment for tasks."""

    problems: list[str]
    warnings: list[str]
    environment: RemoteEnvironment


class MissingRequest(Struct, frozen=True, tag=True):
    """Ask which of these contents the machine lacks. The response is a list of digests."""

    digests: list[str]


class UploadRequest(Struct, frozen=True, tag=True):
    """A piece of a content's tar; after the `last` one it is unpacked."""

    digest: str
    piece: bytes
    last: bool


class OpenRequest(Struct, frozen=True, tag=True, kw_only=True):
    """Open the worker's only sandbox. `tree` is the digest of a content."""

    tree: str
    workdir: str
    mounts: list[RemoteMount]
    env: dict[str, str]
    path_prefixes: list[str]
    limits: SandboxLimits
    labels: dict[str, str]
    deadline_s: float


class OpenReply(Struct, frozen=True):
    """The id of the opened sandbox, and its home directory."""

    id: str
    home: str


class RunRequest(Struct, frozen=True, tag=True, kw_only=True):
    """See Sandbox.run."""

    argv: list[str]
    timeout_s: float
    stdin: bytes
    env: dict[str, str] | None
    cwd: str | None
    reveal: bool


class ReadRequest(Struct, frozen=True, tag=True):
    """See Sandbox.read."""

    path: str
    limit: int


class WriteRequest(Struct, frozen=True, tag=True):
    """See Sandbox.write."""

    path: str
    data: bytes
    mode: int


class SealRequest(Struct, frozen=True, tag=True):
    """See Sandbox.seal."""

    paths: list[str]


class ResetRequest(Struct, frozen=True, tag=True):
    """See Sandbox.reset."""


class PingRequest(Struct, frozen=True, tag=True):
    """Shows that the caller is still there."""


class CancelRequest(Struct, frozen=True, tag=True):
    """Cancel an earlier request, which is still responded to."""

    number: int


class ListRequest(Struct, frozen=True, tag=True):
    """Ask for the sandboxes that are open on the machine."""


class ReapRequest(Struct, frozen=True, tag=True):
    """End sandboxes of the machine, by their ids."""

    ids: list[str]


Request = (
    HelloRequest | MissingRequest | UploadRequest | OpenRequest | RunRequest | ReadRequest | WriteRequest
    | SealRequest | ResetRequest | PingRequest | CancelRequest | ListRequest | ReapRequest
)  # fmt: skip


class NumberedRequest(Struct, frozen=True, array_like=True):
    """A request with a number that is unique in its connection."""

    number: int
    request: Request


class NumberedReply(Struct, frozen=True, array_like=True):
    """The response to the request with that number. If `error` is the name of an error, `result` is its
    message.
    """

    number: int
    error: str
    result: Any


class MessageStream:
    """Messages over a channel, each preceded by its length."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rest = bytearray()
        self._sending = asyncio.Lock()

    async def send(self, message: Struct) -> None:
        """Send a message. Raises ConnectionResetError; SandboxError for one that is too long."""
        content = msgspec.msgpack.encode(message)
        if len(content) > MESSAGE_BYTES:
            raise SandboxError(
                f"a message of {len(content) >> 20} MiB is too long, expected at most {MESSAGE_BYTES >> 20} MiB "
                "in one message to or from a remote sandbox; make the file or the command's input or output "
                "smaller, or pass it in parts"
            )
        async with self._sending:
            await self._channel.write(len(content).to_bytes(4, "big") + content)

    async def receive(self) -> bytes | None:
        """Return the next message, None at the end of the stream. Raises ConnectionResetError, SandboxError."""
        head = await self._take(4)
        if head is None:
            return None
        size = int.from_bytes(head, "big")
        if size > MESSAGE_BYTES:
            raise SandboxError(
                f"invalid message of {size} bytes, expected {MESSAGE_BYTES} at most; install the same "
                "release of Understudy on both machines"
            )
        return await self._take(size)

    async def _take(self, count: int) -> bytes | None:
        while len(self._rest) < count:
            content = await self._channel.read()
            if not content:
                return None
            self._rest += content
        taken = bytes(memoryview(self._rest)[:count])
        del self._rest[:count]
        return taken
