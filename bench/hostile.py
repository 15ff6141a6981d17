"""The memory of a gateway under connections that mean harm, and whether it still answers a good client.

    python bench/hostile.py [--connections N] [--seconds S] [--json FILE]

A gateway runs in a process of its own, on a TCP port and on a Unix socket as a sandbox has it, before a model that
answers 64 requests at once. Six kinds of hostile connections are opened in equal shares, half of them on each
listener, and kept at it: requests that are pipelined without reading the responses, heads that never end, heads of
many short headers, bodies that come slowly, with a valid key and without, and large responses that nobody reads.
Meanwhile a good client asks once a second. Printed are the peak of the gateway's resident memory and the good
client's times.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

TARGET_MB = 500.0
STARTING_S = 30.0


async def serve(directory: Path) -> None:
    """The gateway's process: prints its URL and two keys as JSON, then serves until its stdin ends."""
    from understudy.gateway.backends.base import Backend
    from understudy.gateway.fair_slots import FairSlots
    from understudy.gateway.keys import Keys
    from understudy.gateway.router import ModelRouter
    from understudy.gateway.server.app import Gateway
    from understudy.store import Store
    from understudy.types import Usage
    from understudy.wire.model import ChatRequest, Emit, Generation

    class Instant:
        """A Backend that answers each request with as many bytes as its last message asks for."""

        name, model, price = "openai", "instant", None

        async def generate(self, request: ChatRequest, emit: Emit | None = None) -> Generation:
            await asyncio.sleep(0.01)
            size = 512 << 10 if "large" in json.dumps(request.messages[-1]) else 20
            usage = Usage(prompt_tokens=10, completion_tokens=5)
            return Generation(model="instant", text="x" * size, finish_reason="stop", usage=usage)

        async def count_tokens(self, request: ChatRequest) -> int:
            return 10

        async def models(self) -> list[str]:
            return ["instant"]

        async def close(self) -> None:
            pass

    class Discard:
        """A CallSink that keeps nothing: the store's memory is not what is measured."""

        def append(self, call: Any) -> Any:
            from concurrent.futures import Future

            done: Future[None] = Future()
            done.set_result(None)
            return done

    assert Store  # the modules that a real gateway has loaded count
    model: Backend = Instant()
    keys = Keys()
    gateway = Gateway(ModelRouter(model, slots={"high": FairSlots(64, 1024)}), Discard(), keys)
    await gateway.start_unix(directory / "gateway.sock")
    url = await gateway.start_tcp("127.0.0.1", 0)
    print(json.dumps({"url": url, "good": keys.issue("good"), "bad": keys.issue("bad")}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await gateway.stop()


def _head(key: str, length: int) -> bytes:
    return (
        f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def _attacks(key: str) -> dict[str, tuple[bytes, bytes, float]]:
    """By name: what a connection sends first, what it sends again and again, and the pause in seconds between."""
    large = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "large"}]}
    body = json.dumps(large).encode()
    return {
        "pipelined": (b"", b"HEAD / HTTP/1.1\r\n\r\n" * 3000, 0.5),
        "half a head": (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 60_000, b"", 5.0),
        "many headers": (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 200, b"b:\r\n" * 20, 2.0),
        "slow body": (_head(key, 30 << 20) + b'{"model": "' + b"x" * 20_000, b"x" * 2000, 1.0),
        "slow body without a key": (_head("none", 30 << 20) + b"x" * 20_000, b"x" * 20_000, 1.0),
        "unread response": (_head(key, len(body)) + body, b"", 5.0),
    }


async def _attack(attack: tuple[bytes, bytes, float], address: Any, ends: Counter[str]) -> None:
    """One hostile connection, which is opened again whenever it is closed."""
    first, again, pause_s = attack
    loop = asyncio.get_running_loop()
    while True:
        sock = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
            ends["opened"] += 1
            for piece in itertools.chain([first], itertools.repeat(again)):
                if piece:
                    async with asyncio.timeout(30):
                        await loop.sock_sendall(sock, piece)
                await asyncio.sleep(pause_s)
        except (OSError, TimeoutError):
            ends["closed"] += 1
            await asyncio.sleep(1.0)
        finally:
            sock.close()


def _memory_mb(pid: int) -> tuple[float, float]:
    """The resident memory of a process, now and at its peak, in MB of 10^6 bytes."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, peak = (int(lines[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))
    return now, peak


async def attack(target: dict[str, Any], connections: int) -> None:
    """The attackers' process: hostile connections until its stdin ends; prints how many were opened and closed."""
    ends: Counter[str] = Counter()
    kinds = list(_attacks(target["bad"]).values())
    pairs = itertools.product(kinds, (tuple(target["tcp"]), target["unix"]))
    tasks = [
        asyncio.create_task(_attack(*pair, ends)) for pair in itertools.islice(itertools.cycle(pairs), connections)
    ]
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(ends), flush=True)
    for task in tasks:
        task.cancel()


@asynccontextmanager
async def _child(*arguments: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """This file in a process of its own, which ends when its stdin does."""
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments, stdin=-1, stdout=-1)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STARTING_S)
        except TimeoutError:
            process.kill()


async def measure(connections: int, seconds: float) -> dict[str, Any]:
    """The gateway's memory and the good client's times in milliseconds."""
    times: list[float] = []
    failed: list[str] = []
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as directory:
        async with _child("--serve", directory) as gateway:
            assert gateway.stdout is not None
            ready = json.loads(await asyncio.wait_for(gateway.stdout.readline(), STARTING_S))
            host, _, port = ready["url"].removeprefix("http://").partition(":")
            target = {"bad": ready["bad"], "tcp": (host, int(port)), "unix": f"{directory}/gateway.sock"}
            before, _ = _memory_mb(gateway.pid)
            async with _child("--attack", json.dumps(target), "--connections", str(connections)) as attackers:
                end = time.monotonic() + seconds
                async with aiohttp.ClientSession(headers={"x-api-key": ready["good"]}) as client:
                    while time.monotonic() < end:
                        began = time.monotonic()
                        try:
                            async with client.post(f"{ready['url']}/v1/messages", json=body) as response:
                                text = await response.text()
                                if response.status != 200:
                                    failed.append(f"{response.status} {text[:200]}")
                        except aiohttp.ClientError as error:
                            failed.append(repr(error))
                        times.append((time.monotonic() - began) * 1000)
                        await asyncio.sleep(1.0)
                now, peak = _memory_mb(gateway.pid)
                assert attackers.stdin is not None and attackers.stdout is not None
                attackers.stdin.close()
                ends = json.loads(await asyncio.wait_for(attackers.stdout.readline(), STARTING_S))
    return {
        "connections": connections,
        "memory_before_mb": round(before, 1),
        "memory_at_end_mb": round(now, 1),
        "memory_peak_mb": round(peak, 1),
        "good_requests": len(times),
        "good_failed": failed,
        "good_median_ms": round(statistics.median(times), 1),
        "good_worst_ms": round(max(times), 1),
        **ends,
    }


def main() -> None:
    """Measure, print, and fail when the memory or the good client suffered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.attack:
        return asyncio.run(attack(json.loads(options.attack), options.connections))
    if options.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as `understudy gateway serve` has it
            return runner.run(serve(options.serve))
    if options.connections > most - 200:
        raise SystemExit(f"bench: {options.connections} connections need more open files than {most} (ulimit -n)")
    figures = asyncio.run(measure(options.connections, options.seconds))
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["good_failed"] or figures["memory_peak_mb"] > TARGET_MB:
        raise SystemExit(f"bench: expected no failure of the good client and at most {TARGET_MB:g} MB")


if __name__ == "__main__":
    main()
