"""The real Claude Code CLI, in a network namespace of its own, before a gateway and a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from understudy.agents.claude_code import RUNTIME_SETTINGS
from understudy.gateway.backends.anthropic import AnthropicRelay
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.budget import Budget
from understudy.gateway.keys import Keys
from understudy.gateway.router import LOW, ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.http import RequestLimits
from understudy.store import Store
from understudy.trajectory.tree import Node, Trajectory, build
from understudy.types import Call

from fakes.attempts import start_attempts
from fakes.turns import Scripted, Step, Wire, scripted
from support import close_pipes, until

TIMEOUT_S = 60.0
MODEL = "qwen3-coder"
SESSION = "11111111-2222-4333-8444-555555555555"

Event = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """Which wire the model is behind, and whether the gateway streams."""

    wire: Wire = "chat"
    streaming: bool = False

    def __str__(self) -> str:
        return f"{self.wire}-{'streaming' if self.streaming else 'atomic'}"


ATOMIC = Way()
CHAT_WAYS = [ATOMIC, Way("chat", streaming=True)]
WAYS = [
    ATOMIC,
    Way("messages", streaming=True),
    # Each wire and each way of answering has come by now: the other two pairs are for `make test-services`.
    pytest.param(Way("chat", streaming=True), marks=pytest.mark.services),
    pytest.param(Way("messages"), marks=pytest.mark.services),
]


def in_ways(cases: Sequence[Any], ways: Sequence[Any], *also: str) -> list[Any]:
    """Each case in each way, as parameters `case` and `rig`: a CLI that starts costs a second.

    `make test` has every case in the first way, unless there is but one, and those whose names are in `also`.
    """
    pairs = [
        (case, getattr(way, "values", (way,))[0], getattr(way, "marks", ())) for case in cases for way in ways
    ]
    return [
        pytest.param(
            case,
            way,
            marks=marks if (len(ways) > 1 and way == ways[0]) or str(case) in also else pytest.mark.services,
            id=f"{case}-{way}",
        )
        for case, way, marks in pairs
    ]


@dataclass(kw_only=True)
class CliRun:
    """What one process of the CLI printed, its calls, and the requests that the model received meanwhile."""

    code: int
    out: str
    events: list[Event]
    nodes: list[Node]
    model_requests: list[Event]

    @property
    def calls(self) -> list[Call]:
        """The calls of the session, in their order."""
        return [node.call for node in self.nodes]

    @property
    def results(self) -> list[Event]:
        """The result of each turn of the user's."""
        return [event for event in self.events if event["type"] == "result"]

    @property
    def result(self) -> Event:
        """The last result."""
        assert self.results, self.out
        return self.results[-1]

    @property
    def statuses(self) -> list[str]:
        """How each call ended, in the order of the ends."""
        return [call.status for call in self.calls]

    @property
    def retries(self) -> list[int]:
        """The status for which the CLI tried again, once for each time."""
        return [event["error_status"] for event in self.events if event.get("subtype") == "api_retry"]

    @property
    def requests(self) -> list[Event]:
        """The bodies that the CLI sent."""
        return [json.loads(call.request) for call in self.calls]

    def tool_results(self) -> list[str]:
        """The tool results in the last request that came to the model, as JSON, in the order of their calls."""
        messages = self.model_requests[-1]["messages"]
        calls = [call["id"] for message in messages for call in _calls(message)]
        results = [(r.get("tool_call_id") or r["tool_use_id"], r) for m in messages for r in _results(m)]
        ordered = sorted(results, key=lambda result: calls.index(result[0]))
        return [json.dumps(result, ensure_ascii=False) for _, result in ordered]

    def answers(self) -> dict[str, list[Event]]:
        """The content blocks of each answer of the model that the CLI took up, by the id of the message."""
        blocks: dict[str, list[Event]] = {}
        for event in self.events:
            if event["type"] == "assistant" and event["message"]["model"] != "<synthetic>":
                blocks.setdefault(event["message"]["id"], []).extend(event["message"]["content"])
        return blocks


def _calls(message: Event) -> list[Event]:
    """The tool calls of a message of either wire."""
    return [*message.get("tool_calls", ()), *_blocks(message, "tool_use")]


def _results(message: Event) -> list[Event]:
    """The tool results in a message of either wire."""
    return [message] if message["role"] == "tool" else _blocks(message, "tool_result")


def _blocks(message: Event, kind: str) -> list[Event]:
    content: str | list[Event] = message["content"]
    return [] if isinstance(content, str) else [block for block in content if block["type"] == kind]


class Process:
    """A running CLI."""

    def __init__(self, rig: Rig, process: asyncio.subprocess.Process) -> None:
        self._rig = rig
        self._process = process
        self._calls_before, self._requests_before = len(rig.calls()), len(rig.model.requests)
        self._out: list[bytes] = []

    async def say(self, text: str | Sequence[Event]) -> Event:
        """Send a user's message to a session with `--input-format stream-json`; returns the result of its turn."""
        assert self._process.stdin is not None
        message = {"type": "user", "message": {"role": "user", "content": text}}
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        while True:
            line = await self._line()
            if line["type"] == "result":
                return line

    async def event(self, subtype: str) -> Event:
        """Wait for an event of a kind."""
        while (line := await self._line()).get("subtype") != subtype:
            pass
        return line

    async def requests_received(self, count: int = 1) -> None:
        """Wait until the model has received `count` requests since this process started."""
        await until(lambda: len(self._rig.model.requests) >= self._requests_before + count, TIMEOUT_S)

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    async def end(self) -> CliRun:
        """Wait for the end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        out, err = await asyncio.wait_for(self._process.communicate(), TIMEOUT_S)
        whole = (b"".join(self._out) + out).decode()
        events = [json.loads(line) for line in whole.splitlines() if line.startswith('{"type":')]
        assert whole or self._process.returncode == 0, err.decode()
        sessions = {event["session_id"] for event in events if "session_id" in event}
        nodes = [
            node
            for node in self._rig.tree().nodes[self._calls_before :]
            if not sessions or node.call.session_id in sessions
        ]
        assert self._process.returncode is not None
        run = CliRun(
            code=self._process.returncode,
            out=whole,
            events=events,
            nodes=nodes,
            model_requests=self._rig.model.requests[self._requests_before :],
        )
        _check_calls_match_output(run)
        return run

    async def kill(self) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        close_pipes(self._process)

    async def _line(self) -> Event:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), TIMEOUT_S)
        assert line, "the CLI ended in the middle of a turn"
        self._out.append(line)
        return json.loads(line)


def models(model: Scripted) -> ModelRouter:
    """A high and a low model, both played by the same server."""
    kinds = {"chat": VLLMBackend, "messages": AnthropicRelay}
    big, small = (kinds[model.wire](model.url, name) for name in ("big", "small"))
    return ModelRouter(big, small, names={"claude-haiku-4-5": LOW, "claude-haiku-4-5-20251001": LOW})


def red_square() -> bytes:
    """A PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)
    pixels = zlib.compress(2 * (b"\0" + 2 * b"\xff\0\0"))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def without_network() -> list[str]:
    """The command that starts another one in a network namespace of its own."""
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]


def environment(home: Path, socket: Path, key: str) -> dict[str, str]:
    """All that the CLI has of an environment: a home, and a way to the gateway."""
    return {
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home / ".claude"),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "SHELL": "/bin/bash",
        **RUNTIME_SETTINGS,
        "IS_SANDBOX": "1",
        "ANTHROPIC_UNIX_SOCKET": str(socket),
        "ANTHROPIC_BASE_URL": "http://localhost",
        "ANTHROPIC_AUTH_TOKEN": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


class Rig:
    """A gateway on a Unix socket between the CLI and a scripted model; one home and one directory for all runs.

    `parts` are further arguments of the gateway.
    """

    def __init__(
        self, root: Path, claude: Path, way: Way = ATOMIC, *, budget: Budget | None = None, **parts: Any
    ) -> None:
        self.root, self.work, self.home = root, root / "work", root / "home"
        self.way = way
        self._claude = claude
        self._budget = budget
        self._parts = {"streaming": way.streaming, "limits": RequestLimits(drain_s=1.0)} | parts
        self._processes: list[Process] = []

    async def __aenter__(self) -> Self:
        self.work.mkdir()
        self.home.mkdir()
        self.model: Scripted = scripted(self.way.wire)
        await self.model.__aenter__()
        self._store = Store.open(self.root / "store").__enter__()
        (self.attempt,) = start_attempts(self._store)
        self.keys = Keys()
        self.key = self.keys.issue(self.attempt, budget=self._budget)
        self._models = models(self.model)
        self.gateway = Gateway(self._models, self._store.calls, self.keys, **self._parts)
        await self.gateway.start_unix(self.root / "g.sock")
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            await process.kill()
        await self.gateway.stop()
        await self._models.close()
        self._store.__exit__(None, None, None)
        await self.model.__aexit__(None, None, None)

    def script(self, *steps: Step, **lanes: Sequence[Step]) -> None:
        """What the model says from now on; a lane answers those conversations whose first message has its name."""
        self.model.play.steps[:] = steps
        self.model.play.lanes.update({lane: list(turns) for lane, turns in lanes.items()})

    def write(self, files: Mapping[str, str | bytes]) -> None:
        """Put files into the directory that the CLI works in."""
        for name, content in files.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def tree(self) -> Trajectory:
        """The tree of all calls there are."""
        return build(self.calls())

    async def settled(self, count: int) -> list[str]:
        """Wait until so many calls are kept; returns how they ended."""
        await until(lambda: len(self.calls()) >= count, TIMEOUT_S)
        return [call.status for call in self.calls()]

    def calls(self) -> list[Call]:
        """All calls there are."""
        return list(self._store.calls.of_attempt(self.attempt))

    async def start(
        self,
        prompt: str | None,
        *flags: str,
        model: str | None = MODEL,
        format: str | None = "stream-json",
        permissions: bool = False,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
        stdin: bool = False,
        through: Sequence[str] = (),
    ) -> Process:
        """Start the CLI. With `permissions` it asks for them, which nobody will give.

        `through` is a command that starts it in its turn.
        """
        formats = {"stream-json": ["--output-format", "stream-json", "--verbose"], None: []}
        command = [
            *([prompt] if prompt is not None else []),
            *(["--model", model] if model else []),
            *formats.get(format, ["--output-format", str(format)]),
            *([] if permissions else ["--dangerously-skip-permissions"]),
            *flags,
        ]
        started = await asyncio.create_subprocess_exec(
            *without_network(),
            *through,
            str(self._claude),
            "-p",
            *command,
            env=environment(self.home, self.root / "g.sock", key or self.key) | dict(env or {}),
            cwd=self.work,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 26,
            start_new_session=True,
        )
        process = Process(self, started)
        self._processes.append(process)
        return process

    async def claude(self, prompt: str | None = "go", *flags: str, **more: Any) -> CliRun:
        """Run the CLI to its end; see `start`."""
        return await (await self.start(prompt, *flags, **more)).end()


# --- what holds of every run ---------------------------------------------------------------------------


def _check_calls_match_output(run: CliRun) -> None:
    """Each answer that the CLI shows is stored whole as one call; each stored answer is shown, or was retried."""
    calls = {_message(call)["id"]: call for call in run.calls if call.status == "ok" or _ends_the_budget(call)}
    answers = run.answers()
    for id_, blocks in answers.items():
        assert id_ in calls, f"the CLI took up {id_}, which is no call"
        whole = _text_and_calls(_message(calls[id_])["content"])
        received = _text_and_calls(blocks)
        # Of a subagent's answers not all is shown.
        same = received == whole if calls[id_].agent_id is None else set(received) <= set(whole)
        assert same, f"{id_} is not what was kept: {received}, {whole}"
    if answers:
        untaken = [
            node.call.id
            for node in run.nodes
            if node.role == "main" and node.call.status == "ok" and not node.superseded
            and _text_and_calls(_message(node.call)["content"]) and _message(node.call)["id"] not in answers
        ]  # fmt: skip
        assert not untaken, f"answers that the CLI never took up: {untaken}"
    for result in run.results:
        texts = [
            block["text"] for call in calls.values() for block in _message(call)["content"] if "text" in block
        ]
        if calls and not result["is_error"] and result["result"] and "structured_output" not in result:
            assert result["result"] in texts, "a success that no whole answer stands behind"


def _ends_the_budget(call: Call) -> bool:
    """Whether the gateway itself had the last word."""
    return call.error is not None and call.error.type == "BudgetExceeded"


def _message(call: Call) -> Event:
    return json.loads(call.response)


def _text_and_calls(blocks: Sequence[Event]) -> list[Any]:
    """Text and tool calls, without the blank text that the CLI drops."""
    return [
        block.get("text") or (block["id"], block["name"])
        for block in blocks
        if block["type"] == "tool_use" or block.get("text", "").strip()
    ]
