"""The relay of remote sandboxes over real pipes: what its sockets carry, how much it holds, what it refuses."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from understudy.errors import SandboxError
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.sandbox.remote import relay_program
from understudy.sandbox.remote.relay import SocketRelay
from understudy.sandbox.remote.relay_program import (
    ALLOW,
    CHANNELS,
    DATA,
    END,
    FRAME_BYTES,
    HEAD,
    OPEN,
    WINDOW,
    Channel,
    Multiplexer,
    carry,
)
from understudy.store import Store

from fakes.attempts import start_attempts
from fakes.vllm import FakeVLLM
from support import CLIENT, close_pipes, kills

PROGRAM = Path(relay_program.__file__)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def is_listening(path: Path) -> bool:
    """Whether a socket accepts connections; its file is there a moment earlier."""
    every = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return any(socket[3] == "00010000" and socket[7:] == [str(path)] for socket in every)


@asynccontextmanager
async def relayed(
    directory: Path, *targets: Path, python: str = sys.executable
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.Task[None], list[Path]]]:
    """The relay's program in a process of its own, its sockets carried to `targets`."""
    sockets = [directory / f"inside-{number}" for number in range(len(targets))]
    process = await asyncio.create_subprocess_exec(
        python,
        "-I",
        str(PROGRAM),
        *map(str, sockets),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    task = asyncio.create_task(SocketRelay(targets).run(process.stdout, process.stdin))
    try:
        while not all(map(is_listening, sockets)) and process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield process, task, sockets
    finally:
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await asyncio.wait([task])
        close_pipes(process)


@asynccontextmanager
async def listening(path: Path, handler: Handler) -> AsyncIterator[Path]:
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def handle() -> None:
            try:
                with contextlib.suppress(ConnectionError):
                    await handler(reader, writer)
            finally:
                writer.close()

        tasks.add(asyncio.create_task(handle()))

    server = await asyncio.start_unix_server(accept, path)
    try:
        yield path
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write(b" end")


async def exchange(path: Path, data: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    try:
        return await reader.read(-1)
    finally:
        await sending
        writer.close()


async def test_many_connections_at_once_each_get_their_own_bytes(tmp_path: Path) -> None:
    async def other(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"the other socket")

    contents = [os.urandom(size) for size in (0, 1, FRAME_BYTES, 3 * WINDOW + 17, *[100_000] * 20)]
    async with (
        listening(tmp_path / "echo", echo) as one,
        listening(tmp_path / "other", other) as two,
        relayed(tmp_path, one, two) as (_, _, (first, second)),
    ):
        answers = await asyncio.gather(*(exchange(first, content) for content in contents))
        assert answers == [content + b" end" for content in contents]
        assert await exchange(second, b"") == b"the other socket"


async def test_a_connection_that_is_closing_when_the_relay_ends_is_closed(tmp_path: Path) -> None:
    """The relay ends while a channel waits to tell the other end, which does not read, that it is closed."""
    closed = asyncio.Event()

    class Blocked(Channel):
        async def close(self) -> None:
            waiting.set()
            await asyncio.Event().wait()

    async def hold(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        closed.set()

    waiting = asyncio.Event()
    async with listening(tmp_path / "hold", hold) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        multiplexer = Multiplexer(reader, writer)
        channel = Blocked(1, multiplexer)
        task = asyncio.create_task(carry(channel, reader, writer))
        await asyncio.sleep(0)
        task.cancel()
        await waiting.wait()
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(10):
            await closed.wait()


async def test_who_does_not_read_holds_up_nobody_else_and_is_sent_no_more_than_its_window(tmp_path: Path) -> None:
    sent = 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while True:
            writer.write(b"x" * 10_000)
            await writer.drain()
            sent += 10_000

    async with (
        listening(tmp_path / "flood", flood) as one,
        listening(tmp_path / "echo", echo) as two,
        relayed(tmp_path, one, two) as (_, _, (first, second)),
    ):
        # A socket pair's own buffers come on top, at either end.
        reader, writer = await asyncio.open_unix_connection(first, limit=1000)
        before = -1
        while before < sent:
            before = sent
            assert await exchange(second, b"hello") == b"hello end"
            await asyncio.sleep(0.2)
        assert sent < WINDOW + (4 << 20)
        assert await reader.read(10) == b"x" * 10
        writer.close()
        assert await exchange(second, b"hello") == b"hello end"


async def test_a_socket_where_nobody_listens_ends_the_connection_alone(tmp_path: Path) -> None:
    async with (
        listening(tmp_path / "echo", echo) as one,
        relayed(tmp_path, one, tmp_path / "nobody") as (_, task, (first, second)),
    ):
        with contextlib.suppress(ConnectionError):
            assert await exchange(second, b"") == b""
        assert await exchange(first, b"still here") == b"still here end"
        assert not task.done()


async def test_with_the_relay_all_connections_end(tmp_path: Path) -> None:
    async with listening(tmp_path / "echo", echo) as one, relayed(tmp_path, one) as (process, task, (first,)):
        reader, writer = await asyncio.open_unix_connection(first)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        process.kill()
        await asyncio.wait_for(task, 20)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


def frame(type_: int, channel: int, content: bytes = b"") -> bytes:
    return HEAD.pack(type_, channel, len(content)) + content


FIRST = frame(OPEN, 1, struct.pack(">I", 0))
HOSTILE = {
    "an unknown type": frame(9, 1),
    "a frame that is too long": HEAD.pack(DATA, 1, FRAME_BYTES + 1),
    "a length of 4 GiB": HEAD.pack(DATA, 1, 2**32 - 1),
    "a channel that is not open": frame(DATA, 7, b"x"),
    "a channel out of order": frame(OPEN, 2, struct.pack(">I", 0)),
    "a channel twice": FIRST + FIRST,
    "too many channels": b"".join(frame(OPEN, n, struct.pack(">I", 0)) for n in range(1, CHANNELS + 2)),
    "more than the window": FIRST + frame(DATA, 1, b"x" * FRAME_BYTES) * (WINDOW // FRAME_BYTES + 1),
    "an allowance that nobody needs": FIRST + frame(ALLOW, 1, struct.pack(">I", 1)),
    "an allowance of another size": FIRST + frame(ALLOW, 1, b"x"),
    "data after the end": FIRST + frame(END, 1) + frame(DATA, 1, b"x"),
    "an end with content": FIRST + frame(END, 1, b"x"),
    "no data": FIRST + frame(DATA, 1),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_hostile_frames_end_the_relay(what: str, tmp_path: Path) -> None:
    async def stuck(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with listening(tmp_path / "target", stuck) as target:
        nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "wb")
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, nowhere)
        reader.feed_data(relay_program.GREETING + HOSTILE[what])
        with pytest.raises(SandboxError, match="the relay of a sandbox was closed"):
            await asyncio.wait_for(
                SocketRelay([target]).run(reader, asyncio.StreamWriter(transport, protocol, None, loop)), 20
            )
        transport.abort()


async def test_what_is_no_relay_is_refused(tmp_path: Path) -> None:
    for content in (b"Welcome to the machine!\n" * 10, b"understudy-relay 2\n", b""):
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        with pytest.raises(SandboxError, match="expected the line"):
            await SocketRelay([]).run(reader, None)  # type: ignore[arg-type]


def test_the_program_needs_no_package() -> None:
    module = ast.parse(PROGRAM.read_text())
    names = {alias.name for node in ast.walk(module) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.fixture
def python_3_8() -> str:
    python = shutil.which("python3.8") or ""
    if not python or subprocess.run([python, "-V"], capture_output=True, check=False).returncode:
        pytest.skip("there is no python3.8 here")
    return python


@pytest.mark.services
async def test_the_program_runs_on_python_3_8(tmp_path: Path, python_3_8: str) -> None:
    async with (
        listening(tmp_path / "echo", echo) as one,
        relayed(tmp_path, one, python=python_3_8) as (_, _, (first,)),
    ):
        assert await exchange(first, b"x" * 500_000) == b"x" * 500_000 + b" end"


async def test_killed_at_random_moments_nothing_that_was_answered_is_lost(tmp_path: Path) -> None:
    moments, times, answers_file = random.Random(7), kills(8), tmp_path / "seen"
    with Store.open(tmp_path / "store") as store:
        (attempt,) = start_attempts(store)
        async with FakeVLLM() as model, contextlib.AsyncExitStack() as stack:
            models = ModelRouter(VLLMBackend(model.url, "fake"))
            stack.push_async_callback(models.close)
            keys = Keys()
            gateway = Gateway(models, store.calls, keys)
            target = tmp_path / "gateway.sock"
            await gateway.start_unix(target)
            stack.push_async_callback(gateway.stop)
            environment = {"UNDERSTUDY_API_KEY": keys.issue(attempt), "PATH": os.environ["PATH"]}
            for number in range(times):
                home = tmp_path / f"sandbox-{number}"
                home.mkdir()
                async with relayed(home, target) as (process, _, (socket,)):
                    agent = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-c", CLIENT, "1000", str(answers_file)),
                        env=environment | {"UNDERSTUDY_GATEWAY_SOCKET": str(socket)},
                        stdin=asyncio.subprocess.DEVNULL,
                        stderr=asyncio.subprocess.DEVNULL,
                    )
                    before = len(answers_file.read_text()) if answers_file.exists() else 0
                    while not (answers_file.exists() and len(answers_file.read_text()) > before):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.2 * moments.random())
                    process.kill()
                    assert await asyncio.wait_for(agent.wait(), 60) != 0
                    close_pipes(agent)
        answered = answers_file.read_text().split()
        stored = [call.response for call in store.calls.of_attempt(attempt) if call.status == "ok"]
        assert len(answered) >= times and len(answered) == len(set(answered))
        assert all(any(id_.encode() in (response or b"") for response in stored) for id_ in answered)
