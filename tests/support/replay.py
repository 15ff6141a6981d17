"""A store with sessions to ask about, and teachers on loopback that answer by a rule."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from understudy.ingest import trace_store
from understudy.ingest.trace import PlainRenderer, RequestShape, Trace, TraceNode, TraceTurn
from understudy.replay.plan import ReplaySettings
from understudy.replay.replay import Replay
from understudy.replay.teachers import Teachers, read_teachers
from understudy.store import Store

from fakes.openai import OpenAIModel
from fakes.turns import ChatModel, MessagesModel, Script, Step, tool
from fakes.turns import Turn as Said

Rule = Callable[[dict[str, Any]], Step]

BASH = {
    "type": "function",
    "function": {
        "name": "Bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def session(
    name: str,
    *,
    turns: int = 1,
    model: str | None = "claude-opus-4-5",
    tools: list[dict[str, Any]] | None = None,
    role: str = "main",
    text: str = "",
) -> Trace:
    """A session in which the user asks once, and each turn calls Bash and gets its result."""
    nodes = [TraceNode(-1, {"role": "user", "content": f"task {name}: {text or 'look around'}"})]
    made: list[TraceTurn] = []
    for number in range(turns):
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "Bash", "arguments": json.dumps({"command": f"ls {number}"})},
        }
        context = len(nodes) - 1
        nodes.append(TraceNode(context, {"role": "assistant", "content": None, "tool_calls": [call]}))
        action = len(nodes) - 1
        result = {"role": "tool", "tool_call_id": f"call_{number}", "content": f"result {number} of {name}"}
        nodes.append(TraceNode(action, result))
        made.append(TraceTurn(message_id=f"{name}-{number}", context=context, action=(action,), model=model))
    return Trace(
        trace_id=name,
        session_id=name,
        format="claude-code",
        source=f"/logs/{name}.jsonl",
        renderer=PlainRenderer(),
        nodes=nodes,
        turns=made,
        project="/home/someone/project",
        role=role,
        shape=RequestShape(None, [BASH] if tools is None else tools or None),
    )


def fill(directory: Path, *traces: Trace) -> Path:
    """A store with these sessions."""
    with Store.open(directory) as store:
        for trace in traces:
            trace_store.store_trace(store.sessions, trace).result()
    return directory


class Rules(Script):
    """Answers by a rule instead of a list."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule

    def next(self, body: dict[str, Any]) -> Step:
        return self.rule(body)


def _always(_: dict[str, Any]) -> Step:
    return Said(text="I look.", tools=[tool("Bash", command="ls -la")])


class OpenAITeacher(OpenAIModel):
    """A teacher as OpenAI's API."""

    def __init__(self, rule: Rule = _always) -> None:
        super().__init__()
        self.play = Rules(rule)


class VLLMTeacher(ChatModel):
    """A teacher that vLLM serves."""

    def __init__(self, rule: Rule = _always) -> None:
        super().__init__()
        self.play = Rules(rule)


class AnthropicTeacher(MessagesModel):
    """A teacher as Anthropic's API."""

    def __init__(self, rule: Rule = _always) -> None:
        super().__init__()
        self.play = Rules(rule)

    def _message(self, body: dict[str, Any], turn: Said) -> dict[str, Any]:
        message = super()._message(body, turn)
        for block in message["content"]:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["input"])
        return message


Teacher = OpenAITeacher | VLLMTeacher | AnthropicTeacher


def table(name: str, server: Teacher, **fields: Any) -> str:
    """The table of a teacher in the file."""
    kinds = ((OpenAITeacher, "openai"), (VLLMTeacher, "vllm"), (AnthropicTeacher, "anthropic"))
    backend = next(backend for kind, backend in kinds if isinstance(server, kind))
    head = "[judge]" if name == "judge" else f"[teachers.{name}]"
    values = {"backend": backend, "base_url": server.url, "model": "fake"} | fields
    return "\n".join([head, *(f"{key} = {_toml(value)}" for key, value in values.items())]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


def teachers_of(directory: Path, *tables: str) -> Path:
    """The file of some teachers."""
    file = directory / "teachers.toml"
    file.write_text("\n".join(tables))
    return file


def work_on(store: Store, teachers: Path | Teachers, **options: Any) -> Replay:
    """A replay of all that is in a store, as it stands there."""
    read = read_teachers(teachers) if isinstance(teachers, Path) else teachers
    chosen = ReplaySettings(redacted=False, **options)
    return Replay(store, read, chosen)


async def until_seen(server: Teacher, count: int) -> None:
    """Wait until so many requests have come."""
    async with asyncio.timeout(60):
        while len(server.requests) < count:  # noqa: ASYNC110 - what is waited for happens behind a socket
            await asyncio.sleep(0.01)


def asked_about(server: Teacher) -> list[str]:
    """What each request to a teacher was about: the last thing said in it."""
    return [asked_about_text(body) for body in server.requests]


def asked_about_text(body: dict[str, Any]) -> str:
    """The last thing said in a request."""
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else json.dumps(content)


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a command: a home of its own, where the key of redaction is made."""
    return {**os.environ, "HOME": str(home), "XDG_DATA_HOME": str(home / "data"), **more}


def rule(*steps: Step) -> Any:
    """A teacher's rule: these steps one after the other, the last one again and again."""
    remaining = list(steps)

    def next_step(_: dict[str, Any]) -> Step:
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    return next_step


GOOD = Said(tools=[tool("Bash", command="ls")])
CHEAP = {"input": 1.0, "output": 2.0}
