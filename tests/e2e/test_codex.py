"""The real Codex CLI before the gateway and a scripted model: it works unchanged, by its own tools.

Skipped where it is not. To have it:
npm install --ignore-scripts --prefix ~/.cache/understudy/codex/0.169.0 @openai/codex@0.169.0
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from understudy.config import cache_dir
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.http import RequestLimits
from understudy.store import Store
from understudy.types import Call

from fakes.attempts import start_attempts
from fakes.vllm import FakeVLLM, Refuse, Say, Step

pytestmark = pytest.mark.e2e

VERSION = "0.169.0"
TIMEOUT_S = 60.0
CONFIG = """
model_provider = "understudy"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.understudy]
name = "Understudy"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "UNDERSTUDY_KEY"
stream_max_retries = 2
request_max_retries = 1
stream_idle_timeout_ms = {idle_ms}
"""


@dataclass(kw_only=True)
class Ran:
    """What one run of Codex did, and what the gateway and the model saw of it."""

    code: int
    events: list[dict[str, Any]]
    calls: list[Call]
    requests: list[dict[str, Any]]
    work: Path

    @property
    def said(self) -> list[str]:
        """What the agent told the user."""
        items = [event["item"] for event in self.events if event["type"] == "item.completed"]
        return [item["text"] for item in items if item["type"] == "agent_message"]


@pytest.fixture
def codex() -> Path:
    binaries = list(
        (cache_dir() / "codex" / VERSION).glob("node_modules/@openai/codex-linux-*/vendor/*/bin/codex")
    )
    if not binaries:
        pytest.skip(f"Codex {VERSION} is not there; see the head of this file")
    return binaries[0]


class Bench:
    """Runs Codex in a directory of its own."""

    def __init__(self, codex: Path, root: Path) -> None:
        self._codex, self._root = codex, root
        self._work, self._home = root / "work", root / "home"
        for directory in (self._work, self._home):
            directory.mkdir()
        (self._work / "calc.py").write_text("x = 1\n")
        subprocess.run(["git", "init", "-q", self._work], check=True)

    async def run(
        self,
        *script: Step,
        model: str = "qwen3-coder",
        max_model_len: int = 1_000_000,
        idle_ms: int = 2000,
        **options: Any,
    ) -> Ran:
        with Store.open(self._root / "store") as store:
            (attempt,) = start_attempts(store, count=1)
            async with FakeVLLM(*script, max_model_len=max_model_len) as server:
                backend, keys = VLLMBackend(server.url, "fake"), Keys()
                gateway = Gateway(ModelRouter(backend), store.calls, keys, **options)
                url = await gateway.start_tcp("127.0.0.1", 0)
                (self._home / "config.toml").write_text(CONFIG.format(url=url, idle_ms=idle_ms))
                code, out = await self._codex_exec(model, keys.issue(attempt))
                await gateway.stop()
                await backend.close()
                calls = list(store.calls.of_attempt(attempt))
        events = [json.loads(line) for line in out.splitlines()]
        return Ran(code=code, events=events, calls=calls, requests=server.requests, work=self._work)

    async def _codex_exec(self, model: str, key: str) -> tuple[int, str]:
        nowhere = "http://127.0.0.1:9"
        environment = {
            "HOME": str(self._home),
            "CODEX_HOME": str(self._home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "UNDERSTUDY_KEY": key,
            # It may talk to nobody but the gateway.
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1",
        }
        command = [self._codex, "exec", "--json", "-m", model, "--dangerously-bypass-approvals-and-sandbox", "go"]
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self._work,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return process.returncode, out.decode()


@pytest.fixture
def bench(codex: Path, tmp_path: Path) -> Bench:
    return Bench(codex, tmp_path)


class Hold(asyncio.Event):
    """Holds an answer back for so long, counted from the request and not from the start of the agent."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def wait(self) -> Literal[True]:
        asyncio.get_running_loop().call_later(self._seconds, self.set)
        return await super().wait()


def shell(id_: str, command: str) -> tuple[str, str, str]:
    return id_, "exec_command", json.dumps({"cmd": command})


@pytest.mark.parametrize("streaming", [False, True], ids=["atomic", "streaming"])
async def test_a_turn_with_parallel_tools_and_thinking(bench: Bench, streaming: bool) -> None:
    run = await bench.run(
        Say(reasoning="look", text="Looking.", tools=[shell("a", "cat calc.py"), shell("b", "echo two")]),
        Say(reasoning="mend", tools=[shell("a", "echo 'x = 2' > calc.py")]),
        Say(text="Done."),
        streaming=streaming,
    )
    assert (run.code, run.said) == (0, ["Looking.", "Done."])
    assert (run.work / "calc.py").read_text() == "x = 2\n"
    assert [(call.dialect, call.status) for call in run.calls] == [("openai-responses", "ok")] * 3
    assert len({call.session_id for call in run.calls}) == 1 and run.calls[0].session_id
    assert {call.agent_id for call in run.calls} == {None}
    # Each conversation begins with all of the one before, and has what was sampled as it was sampled.
    for shorter, longer in zip(run.requests, run.requests[1:], strict=False):
        assert longer["messages"][: len(shorter["messages"])] == shorter["messages"]
        assert longer["tools"] == shorter["tools"]
    answers = [message for message in run.requests[-1]["messages"] if message["role"] == "assistant"]
    assert [message["reasoning"] for message in answers] == ["look", "mend"]
    assert [call["function"]["arguments"] for call in answers[0]["tool_calls"]] == [
        json.dumps({"cmd": "cat calc.py"}),
        json.dumps({"cmd": "echo two"}),
    ]


@pytest.mark.parametrize("streaming", [False, True], ids=["atomic", "streaming"])
async def test_apply_patch_which_is_a_custom_tool(bench: Bench, streaming: bool) -> None:
    patch = "*** Begin Patch\n*** Update File: calc.py\n@@\n-x = {}\n+x = {}\n*** End Patch"
    raw = json.dumps({"input": patch.format(1, 2)}, indent=1)
    run = await bench.run(
        Say(tools=[("p", "apply_patch", raw)]),
        Say(tools=[("q", "apply_patch", patch.format(2, 3))]),
        Say(text="Done."),
        model="gpt-5.5",
        streaming=streaming,
    )
    assert (run.code, run.said) == (0, ["Done."])
    assert (run.work / "calc.py").read_text() == "x = 3\n"
    sent = [message for message in run.requests[-1]["messages"] if message["role"] == "assistant"]
    assert sent[0]["tool_calls"][0]["function"]["arguments"] == raw


async def test_a_subagent_is_a_branch(bench: Bench) -> None:
    spawn = ("s", "multi_agent_v1__spawn_agent", json.dumps({"message": "say hi"}))
    hold = asyncio.Event()  # Codex ends with its own answer, whether or not its subagent has asked by then
    asyncio.get_running_loop().call_later(3.0, hold.set)
    run = await bench.run(Say(text="Spawning.", tools=[spawn]), Say(text="Done.", hold=hold))
    assert run.code == 0
    assert len({call.session_id for call in run.calls}) == 1
    assert len({call.agent_id for call in run.calls}) == 2


async def test_it_waits_while_pings_come(bench: Bench) -> None:
    """The answer comes after Codex's idle timeout, which no pause of a busy machine between two pings reaches."""
    idle_s = 10.0
    hold = Hold(1.2 * idle_s)
    run = await bench.run(
        Say(text="Late.", hold=hold),
        limits=RequestLimits(headers_after_s=0.2, ping_every_s=0.2),
        idle_ms=round(1000 * idle_s),
    )
    assert (run.code, run.said, len(run.calls)) == (0, ["Late."], 1)


async def test_without_pings_it_gives_up_after_its_idle_timeout(bench: Bench) -> None:
    """The control of the test above: the timeout holds for a stream in which nothing comes."""
    silent = RequestLimits(headers_after_s=0.2, ping_every_s=60.0)
    run = await bench.run(Say(text="Late.", hold=Hold(60.0)), Say(text="Again."), limits=silent, idle_ms=1000)
    assert (run.code, run.said) == (0, ["Again."])
    assert len(run.calls) == 2


async def test_a_passing_fault_is_waited_out_and_a_full_context_is_final(bench: Bench) -> None:
    full = "This model's maximum context length is 10 tokens. However, your request has 20 input tokens."
    busy = Refuse(status=503, headers={"retry-after": "0"})
    run = await bench.run(busy, Refuse(status=429), Refuse(status=400, message=full), max_model_len=10)
    assert run.code == 1
    assert [call.status for call in run.calls] == ["error"] * 3
    assert "context window" in run.events[-1]["error"]["message"]


async def test_an_answer_that_broke_off_is_no_answer(bench: Bench) -> None:
    run = await bench.run(
        Say(text="Half of", finish="abort"),
        Say(text="Whole."),
        limits=RequestLimits(headers_after_s=0.0),
        streaming=True,
    )
    assert (run.code, run.said) == (0, ["Whole."])
    assert [call.status for call in run.calls] == ["error", "ok"]


async def test_an_answer_that_was_cut_is_no_success(bench: Bench) -> None:
    run = await bench.run(Say(text="Half of", finish="length"))
    assert run.code == 1
    assert [(call.status, call.finish_reason) for call in run.calls] == [("ok", "length")]
    assert "max_output_tokens" in run.events[-1]["error"]["message"]
