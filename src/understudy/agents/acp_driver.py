"""Drives an agent over the Agent Client Protocol in a sandbox. A script of its own, without other modules of ours.

Reads one JSON object from stdin: `argv` (the agent) and `prompt`. The agent gets one session, in a mode in which
it does not decide on permissions itself, one prompt, and every permission that it asks for. Each message that it
sends is a line of stdout; the last line is an object whose `type` is `result`, with the `stopReason`, or `error`,
with a `message`. Its other output on stdout goes to stderr, where its own stderr goes too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any, cast

VERSION = 1
AUTH_REQUIRED = -32000
METHOD_NOT_FOUND = -32601
LINE_LIMIT_BYTES = 256 << 20
OUTPUT_LIMIT_BYTES = 1 << 20
END_TIMEOUT_S = 5.0
ALLOW_OPTIONS = ("allow_always", "allow_once")
PREFERRED_MODES = ("bypasspermissions", "yolo", "fullaccess", "default")
"""Modes of sessions, the preferred one first, in lower case without separators.

In them everything is allowed, or the client is asked. In others an agent asks a model whether a tool call is safe
(Claude Code's and Qwen Code's `auto`), or refuses it.
"""


class AcpError(Exception):
    """An error response of the agent, or its end."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class AcpEnded(AcpError):
    """The agent's process ended before it responded."""


class AcpConnection:
    """A JSON-RPC connection with an agent, one object per line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._writer, self._reader = process.stdin, process.stdout
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._output_left = OUTPUT_LIMIT_BYTES
        self.method = "initialize"
        """What was requested last."""

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        """Send a request and return its result. Raises AcpError."""
        self.method = method
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._send({"id": number, "method": method, "params": params})
        return await future

    async def read(self) -> None:
        """Process the agent's messages until it closes its output; then all open requests fail."""
        while line := await self._reader.readline():
            try:
                message: Any = json.loads(line)
            except ValueError:
                self._print(line)  # other output of the agent, which is not a message
                continue
            if isinstance(message, dict):
                received = cast("dict[str, Any]", message)
                write_line({"type": "message", "message": received})
                await self._process_message(received)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(AcpEnded(f"it ended before it responded to {self.method}"))

    def _print(self, line: bytes) -> None:
        """Copy a line of the agent's output to stderr, as long as there is not too much of it."""
        content = line[: self._output_left]
        self._output_left -= len(content)
        sys.stderr.write(content.decode(errors="replace"))
        sys.stderr.flush()

    async def _process_message(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            future = self._waiting.pop(message.get("id", -1), None)
            if future is not None and not future.done():
                if error := message.get("error"):
                    details = json.dumps(error["data"]) if error.get("data") else ""
                    text = f"{error.get('message', 'error')} {details}".strip()
                    refusal = f"its response to {self.method} is an error: {text[:1000]}"
                    future.set_exception(AcpError(refusal, error.get("code", 0)))
                else:
                    future.set_result(message.get("result"))
        elif "id" in message:
            if message["method"] == "session/request_permission":
                await self._send(
                    {"id": message["id"], "result": {"outcome": permission_outcome(message["params"])}}
                )
            else:
                error = {"code": METHOD_NOT_FOUND, "message": f"{message['method']}: not offered by this client"}
                await self._send({"id": message["id"], "error": error})

    async def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        await self._writer.drain()


def preferred_mode(session: dict[str, Any]) -> str | None:
    """Return the id of the mode to be set in a new session; None if it has no such mode, or is in it."""
    modes: dict[str, Any] = session.get("modes") or {}
    names: list[str] = [mode["id"] for mode in modes.get("availableModes", ())]
    ids = {"".join(filter(str.isalnum, name)).lower(): name for name in names}
    chosen = next((ids[mode] for mode in PREFERRED_MODES if mode in ids), None)
    return None if chosen == modes.get("currentModeId") else chosen


def permission_outcome(params: dict[str, Any]) -> dict[str, Any]:
    """Return the response to a permission request: allowed permanently if that is offered, otherwise once."""
    options = {option.get("kind"): option["optionId"] for option in params.get("options", ())}
    chosen = next((options[kind] for kind in ALLOW_OPTIONS if kind in options), None)
    return {"outcome": "cancelled"} if chosen is None else {"outcome": "selected", "optionId": chosen}


async def converse(connection: AcpConnection, job: dict[str, Any]) -> str:
    """Open a session and send the prompt; return why the session stopped. Raises AcpError."""
    capabilities = {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False}
    client = {"name": "understudy", "version": "1"}
    opening = {"protocolVersion": VERSION, "clientCapabilities": capabilities, "clientInfo": client}
    agent = await connection.request("initialize", opening)
    if agent.get("protocolVersion") != VERSION:
        raise AcpError(
            f"the agent speaks version {agent.get('protocolVersion')} of the protocol, expected {VERSION}; "
            f"install an agent that supports version {VERSION} of the Agent Client Protocol"
        )
    session_params: dict[str, Any] = {"cwd": str(Path.cwd()), "mcpServers": []}
    try:
        session = await connection.request("session/new", session_params)
    except AcpError as error:
        if error.code != AUTH_REQUIRED:
            raise
        ids = [method["id"] for method in agent.get("authMethods", ())]
        by_key = next((id_ for id_ in ids if "key" in id_), None)
        if by_key is None:
            raise AcpError(
                f"the agent requires a login (it offers: {', '.join(ids) or 'none'}), expected an API key "
                "from the environment; use an agent or a setting that reads one"
            ) from error
        await connection.request("authenticate", {"methodId": by_key})
        session = await connection.request("session/new", session_params)
    if (mode := preferred_mode(session)) is not None:
        await connection.request("session/set_mode", {"sessionId": session["sessionId"], "modeId": mode})
    prompt = [{"type": "text", "text": job["prompt"]}]
    result = await connection.request("session/prompt", {"sessionId": session["sessionId"], "prompt": prompt})
    return str(result["stopReason"])


async def drive(job: dict[str, Any]) -> dict[str, Any]:
    """Run the agent; return the last line of the output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *job["argv"], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_LIMIT_BYTES
        )
    except OSError as error:
        return {
            "type": "error",
            "message": f"it could not be started: {error}; install {job['argv'][0]} in the task's image",
        }
    connection = AcpConnection(process)
    reading = asyncio.ensure_future(connection.read())
    try:
        return {"type": "result", "stopReason": await converse(connection, job)}
    except (AcpEnded, ConnectionError):
        exit_text = await exit_description(process)
        return {
            "type": "error",
            "message": f"it ended{exit_text} before it responded to {connection.method}; its log shows why",
        }
    except (AcpError, OSError) as error:
        return {"type": "error", "message": str(error)}
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        return {
            "type": "error",
            "message": f"invalid response to {connection.method}: {problem}; install an agent that supports "
            f"version {VERSION} of the Agent Client Protocol",
        }
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
        reading.cancel()


async def exit_description(process: asyncio.subprocess.Process) -> str:
    """Return how a process ended whose output has ended; "" if it is still running."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            code = await process.wait()
    except TimeoutError:
        return ""
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"


def write_line(value: dict[str, Any]) -> None:
    """Print a value as a line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Return the exit code."""
    end = asyncio.run(drive(json.load(sys.stdin)))
    write_line(end)
    return 0 if end["type"] == "result" else 1


if __name__ == "__main__":
    sys.exit(main())
