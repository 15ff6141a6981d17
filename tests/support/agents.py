"""Real agents in a local sandbox before a gateway and a scripted model, and what each of them calls its tools."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from understudy.agents.base import GATEWAY_SOCKET, AgentJob, AgentResult
from understudy.agents.install import agent_package, install
from understudy.agents.registry import make_agent
from understudy.agents.runtimes import interpreter
from understudy.errors import ConfigError
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.budget import Budget
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.http import RequestLimits
from understudy.sandbox.base import Mount, Sandboxes, SandboxSpec
from understudy.store import Store
from understudy.tasks.environment import TaskEnvironment
from understudy.types import Call, Finding

from fakes.attempts import start_attempts
from fakes.vllm import FakeVLLM, Say, Step
from support import require

AGENTS = ("codex", "gemini", "mini-swe-agent", "opencode", "pi", "qwen-code")
"""Those that run in all tests of real agents. OpenHands, whose start takes seconds, has tests of its own."""
FILE = "calc.py"
BEFORE, AFTER = "x = 1\n", "x = 2\n"

ToolCall = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Toolbox:
    """An agent's own tools: a shell command, reading a file, and changing `BEFORE` to `AFTER` in one."""

    shell: Callable[[str], ToolCall]
    read: Callable[[str], ToolCall]
    edit: Callable[[str], ToolCall]


def _bash(name: str) -> Callable[[str], ToolCall]:
    return lambda command: (name, {"command": command, "description": "run it"})


PATCH = f"*** Begin Patch\n*** Update File: {FILE}\n@@\n-{BEFORE}+{AFTER}*** End Patch"
TOOLBOXES: Mapping[str, Toolbox] = {
    "claude-code": Toolbox(
        shell=_bash("Bash"),
        read=lambda path: ("Read", {"file_path": path}),
        edit=lambda path: ("Edit", {"file_path": path, "old_string": "x = 1", "new_string": "x = 2"}),
    ),
    "codex": Toolbox(
        shell=lambda command: ("exec_command", {"cmd": command}),
        read=lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        edit=lambda path: ("apply_patch", {"input": PATCH}),
    ),
    "gemini": Toolbox(
        shell=lambda command: ("run_shell_command", {"command": command}),
        read=lambda path: ("read_file", {"file_path": path}),
        edit=lambda path: (
            "replace",
            {"file_path": path, "old_string": "x = 1", "new_string": "x = 2", "instruction": "Raise x."},
        ),
    ),
    "mini-swe-agent": Toolbox(
        shell=lambda command: ("bash", {"command": command}),
        read=lambda path: ("bash", {"command": f"cat {path}"}),
        edit=lambda path: ("bash", {"command": f"sed -i 's/x = 1/x = 2/' {path}"}),
    ),
    "opencode": Toolbox(
        shell=_bash("bash"),
        read=lambda path: ("read", {"filePath": path}),
        edit=lambda path: ("edit", {"filePath": path, "oldString": "x = 1", "newString": "x = 2"}),
    ),
    "openhands": Toolbox(
        shell=lambda command: ("terminal", {"command": command}),
        read=lambda path: ("file_editor", {"command": "view", "path": path}),
        edit=lambda path: (
            "file_editor",
            {"command": "str_replace", "path": path, "old_str": "x = 1", "new_str": "x = 2"},
        ),
    ),
    "pi": Toolbox(
        shell=lambda command: ("bash", {"command": command}),
        read=lambda path: ("read", {"path": path}),
        edit=lambda path: ("edit", {"path": path, "edits": [{"oldText": "x = 1", "newText": "x = 2"}]}),
    ),
    "qwen-code": Toolbox(
        shell=lambda command: ("run_shell_command", {"command": command, "is_background": False}),
        read=lambda path: ("read_file", {"file_path": path}),
        edit=lambda path: ("edit", {"file_path": path, "old_string": "x = 1", "new_string": "x = 2"}),
    ),
}  # fmt: skip


def require_agent(name: str) -> None:
    """Fetch an agent where it is missing; skip the test where that is impossible, which fails in CI.

    An agent whose Python is missing is skipped in CI too: its machine may have no newer one.
    """
    package = agent_package(name)
    try:
        interpreter(package.requires_python)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        install(name)
    except ConfigError as error:
        require([str(error)])


SUMMARY = "A title of the work, and all of its summary <state_snapshot>I mended it.</state_snapshot>"


class AgentModel(FakeVLLM):
    """Answers the script. Requests without tools, as for a title or a summary, are not part of it, and neither are
    those of Qwen Code for a summary with the tools, so that a server's cache of the conversation serves them.
    """

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("tools") and "produce the <state_snapshot> XML" not in json.dumps(body["messages"][-1]):
            return await super()._chat(request)
        return await self._say(request, body, Say(text=SUMMARY))


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one run of an agent did, and what the gateway and the model saw of it."""

    result: AgentResult
    calls: list[Call]
    seen: list[dict[str, Any]]
    file: str
    findings: list[Finding]

    @property
    def work(self) -> list[Call]:
        """The calls that offered tools."""
        return [call for call in self.calls if json.loads(call.request).get("tools")]

    def results(self) -> list[str]:
        """The tool results in the last request that the model saw."""
        return [
            json.dumps(message["content"]) for message in self.seen[-1]["messages"] if message["role"] == "tool"
        ]


class AgentRig:
    """Runs an agent in a sandbox with the file `FILE`."""

    def __init__(self, name: str, root: Path, sandboxes: Sandboxes, environment: TaskEnvironment) -> None:
        self.name, self.tools = name, TOOLBOXES[name.removeprefix("acp:").split()[0]]
        self._root, self._sandboxes, self._environment = root, sandboxes, environment
        self._tree = self._root / "tree"
        self._tree.mkdir()
        (self._tree / FILE).write_text(BEFORE)
        subprocess.run(["git", "init", "-q", self._tree], check=True)
        sandboxes.prepare_tree(self._tree)

    def call(self, id_: str, tool: ToolCall) -> tuple[str, str, str]:
        """A tool call for a script."""
        name, arguments = tool
        return id_, name, json.dumps(arguments)

    def done(self, text: str = "Done.") -> Say:
        """The answer that ends the work: mini-swe-agent has to be told by a command."""
        if self.name != "mini-swe-agent":
            return Say(text=text)
        return Say(
            text=text, tools=[self.call("end", self.tools.shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))]
        )

    async def run(
        self,
        *script: Step,
        timeout_s: float = 120.0,
        max_turns: int = 30,
        options: Mapping[str, str] | None = None,
        streaming: bool = False,
        instruction: str = f"Change {FILE}.",
    ) -> Ran:
        """Run the agent through a script of its model."""
        agent = make_agent(self.name, options or {})
        environment = self._environment
        with Store.open(self._root / "store") as store:
            (attempt,) = start_attempts(store)
            async with AgentModel(*script, max_model_len=1_000_000) as model:
                backend, keys = VLLMBackend(model.url, "fake"), Keys()
                limits = RequestLimits(headers_after_s=0.5, drain_s=1.0)
                gateway = Gateway(ModelRouter(backend), store.calls, keys, limits=limits, streaming=streaming)
                socket = self._root / "g.sock"
                await gateway.start_unix(socket)
                mounts = (*agent.mounts(), Mount(socket, GATEWAY_SOCKET), *environment.mounts)
                spec = SandboxSpec(
                    tree=self._tree, mounts=mounts, env=environment.env, path_prefixes=environment.path_prefixes
                )
                sandbox = await self._sandboxes.open(spec)
                budget = None if agent.limits_turns else Budget(calls=max_turns)
                try:
                    job = AgentJob(
                        instruction=instruction,
                        key=keys.issue(attempt, budget=budget),
                        model="big",
                        small_model="small",
                        max_turns=max_turns,
                        timeout_s=timeout_s,
                    )
                    result = await agent.run(sandbox, job)
                    file = (await sandbox.read(FILE)).decode()
                finally:
                    await sandbox.close()
                    await gateway.stop()
                    await backend.close()
                calls = list(store.calls.of_attempt(attempt))
        return Ran(result=result, calls=calls, seen=model.requests, file=file, findings=agent.check(result, calls))
