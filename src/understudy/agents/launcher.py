"""Starts an agent in a sandbox and connects it to the gateway's Unix socket. A self-contained script.

Most agents cannot use Unix sockets, so connections to a port of the loopback interface are forwarded to the
socket, byte by byte, while the agent runs; sandboxes have no other network.

Reads one JSON object from stdin: `socket` (its path), `argv`, `env` (added to the environment), `files` (text by
path, written first) and `stdin` (the agent's). `{gateway}` in these texts is replaced by the address, such as
http://127.0.0.1:40001. The agent's output and exit code are passed on; the code is 128 plus the number of a
signal.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any


async def launch(job: dict[str, Any]) -> int:
    """Run the job and return the exit code."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_unix_connection(job["socket"])
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))
        except asyncio.CancelledError:
            pass  # the agent has ended; raised, it would be printed after the agent's own last words
        finally:
            writer.close()
            there_writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    gateway = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def filled(text: str) -> str:
        return text.replace("{gateway}", gateway)

    for path, text in job["files"].items():
        write(Path(path), filled(text))
    process = await asyncio.create_subprocess_exec(
        *map(filled, job["argv"]),
        env={**os.environ, **{name: filled(value) for name, value in job["env"].items()}},
        stdin=asyncio.subprocess.PIPE,
    )
    await process.communicate(job["stdin"].encode(errors="replace"))
    code = process.returncode or 0
    return code if code >= 0 else 128 - code


def write(path: Path, text: str) -> None:
    """Write a file with its parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward everything until its end, and then the end itself."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()  # one side has closed its connection


def main() -> int:
    """Return the exit code."""
    try:
        code = asyncio.run(launch(json.load(sys.stdin)))
    except OSError as error:
        sys.stderr.write(f"understudy: the agent could not be started: {error}\n")
        code = 127
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    # Not by sys.exit: connections that are still open must not hold the process.
    result = main()
    sys.stderr.flush()
    os._exit(result)
