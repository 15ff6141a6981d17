"""Calls as Claude Code makes them: from a script of a session, or from a recording of the real CLI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from understudy.types import Call, CallStatus, ErrorInfo, Usage

RECORDINGS = Path(__file__).parents[2].parent / "shared" / "claude-code-traffic"

Block = dict[str, Any]
Message = dict[str, Any]


def text(content: str) -> Block:
    return {"type": "text", "text": content}


def tool_use(id: str, name: str = "Bash", **arguments: Any) -> Block:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def tool_result(id: str, content: Any = "ok") -> Block:
    return {"type": "tool_result", "tool_use_id": id, "content": content}


def user(*blocks: Block) -> Message:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Block) -> Message:
    return {"role": "assistant", "content": list(blocks)}


def prompt_ids(
    messages: Sequence[Message], system: str = "S", sampled: dict[int, str] | None = None
) -> tuple[int, ...]:
    """One token a character: ChatML of the messages; `sampled` has the text of assistant messages by index."""
    turns = [f"<s>{system}</s>"]
    for index, message in enumerate(messages):
        bare = [{k: v for k, v in block.items() if k != "cache_control"} for block in message["content"]]
        turns.append(f"<{message['role']}>" + (sampled or {}).get(index, json.dumps(bare) + "</>"))
    return tuple(map(ord, "".join(turns) + "<assistant>"))


class Session:
    """Makes the calls of one attempt, numbered as they come."""

    def __init__(self, attempt_id: str = "a1") -> None:
        self.attempt_id = attempt_id
        self.calls: list[Call] = []

    def ask(
        self,
        messages: Sequence[Message],
        answer: Sequence[Block] | None,
        *,
        agent: str | None = None,
        session: str = "s1",
        system: str = "S",
        status: CallStatus = "ok",
        prompt: Sequence[int] | None = None,
        completion: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        policy: str | None = None,
        backend: str = "openai",
    ) -> Call:
        """A call that sent `messages` and was answered with `answer`; the last block carries `cache_control`."""
        *before, last = messages
        *blocks, final = last["content"]
        final = {**final, "cache_control": {"type": "ephemeral"}}
        sent = [*before, {**last, "content": [*blocks, final]}]
        body = {"model": "m", "system": system, "tools": [{"name": "Bash"}], "messages": sent, "stream": True}
        reply = {"id": f"msg_{len(self.calls)}", "type": "message", **assistant(*(answer or ()))}
        number = len(self.calls)
        call = Call(
            id=f"{self.attempt_id}-{number}",
            attempt_id=self.attempt_id,
            sequence=number,
            dialect="anthropic",
            requested_model="m",
            backend=backend,
            backend_model="understudy-embedded",
            request=json.dumps(body).encode(),
            response=json.dumps(reply).encode() if status == "ok" else b'{"type": "error"}',
            status=status,
            started_at=100.0 + number,
            ended_at=100.5 + number,
            session_id=session,
            agent_id=agent,
            policy_version=policy,
            prompt_token_ids=None if prompt is None else tuple(prompt),
            completion_token_ids=None if completion is None else tuple(completion),
            logprobs=None if logprobs is None else tuple(logprobs),
            finish_reason="stop" if status == "ok" else None,
            usage=Usage(prompt_tokens=len(prompt or ()), completion_tokens=len(completion or ())),
            error=None if status == "ok" else ErrorInfo("backend", "BackendError", "the model server is down"),
        )
        self.calls.append(call)
        return call


def as_chat(call: Call, messages: Sequence[dict[str, Any]], answer: str) -> Call:
    """A call as a client of chat completions makes it."""
    choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    return msgspec.structs.replace(
        call,
        dialect="openai-chat",
        request=json.dumps({"model": "m", "messages": list(messages)}).encode(),
        response=json.dumps({"choices": [choice]}).encode(),
    )


def recordings() -> list[str]:
    """The names of the recordings of the real CLI; none where they are not at hand."""
    return sorted(path.stem for path in RECORDINGS.glob("*.jsonl"))


def recorded(name: str) -> list[Call]:
    """The calls of a recording, as the gateway would have kept them."""
    blobs = json.loads((RECORDINGS / "_blobs.json").read_text())

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return whole(blobs[value["$blob"]]) if "$blob" in value else {k: whole(v) for k, v in value.items()}
        return [whole(item) for item in value] if isinstance(value, list) else value

    calls: list[Call] = []
    for line in (RECORDINGS / f"{name}.jsonl").read_text().splitlines():
        exchange = json.loads(line) if line.strip() else {"type": ""}
        request = exchange.get("request")
        if exchange["type"] != "exchange" or not request["path"].startswith("/v1/messages?"):
            continue
        headers = {key.lower(): value for key, value in request["headers"]}
        response = _message(exchange.get("response") or {})
        calls.append(
            Call(
                id=f"{name}-{exchange['seq']}",
                attempt_id=name,
                sequence=len(calls),
                dialect="anthropic",
                requested_model="m",
                backend="recorded",
                backend_model="m",
                request=json.dumps(whole(request["body"])).encode(),
                response=json.dumps(response).encode(),
                status="error" if response is None or response.get("type") == "error" else "ok",
                started_at=exchange["t_ms"] / 1000,
                ended_at=exchange["t_ms"] / 1000,
                session_id=headers.get("x-claude-code-session-id"),
                agent_id=headers.get("x-claude-code-agent-id"),
            )
        )
    return calls


def _message(response: dict[str, Any]) -> dict[str, Any] | None:
    """The message that a recorded answer amounts to, put together from its events; None when there is none."""
    body = response.get("body")
    if body is not None:
        return body if isinstance(body, dict) else None
    message: dict[str, Any] | None = None
    blocks: dict[int, Block] = {}
    arguments: dict[int, str] = {}
    for event in response.get("events") or []:
        if event.get("type") == "message_start":
            message = dict(event["message"])
        elif event.get("type") == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event.get("type") == "content_block_delta" and event["index"] in blocks:
            delta = dict(event["delta"])
            block = blocks[event["index"]]
            if delta.pop("type") == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            else:
                for field, value in delta.items():
                    block[field] = block.get(field, "") + value
    for index, source in arguments.items():
        try:
            blocks[index]["input"] = json.loads(source)
        except ValueError:
            blocks[index]["input"] = {"__unparsedToolInput": source}
    return None if message is None else {**message, "content": [blocks[index] for index in sorted(blocks)]}


def branching(attempt_id: str = "ignored") -> Session:
    """A subagent, a rewritten history, a compaction, a retry in vain, tokens that go on and that do not."""
    talk = Session(attempt_id)
    ask = user(text("Mend it."))
    task = tool_use("t1", name="Task", prompt="Look for the fault.")
    talk.ask([ask], [text("I ask."), task], prompt=[1, 2], completion=[3, 4], logprobs=[-0.5, -0.25], policy="v1")
    talk.ask([user(text("Look for the fault."))], [text("Line 3.")], agent="a1", prompt=[9], completion=[8])
    went = [ask, assistant(text("I ask."), task), user(tool_result("t1", "Line 3."))]
    talk.ask(went, None, status="error")
    talk.ask(went, [text("So I change it.")], prompt=[1, 2, 3, 4, 5], completion=[6], logprobs=[-1.0], policy="v2")
    more = [*went, assistant(text("So I change it.")), user(text("And the tests?"))]
    talk.ask(more, [text("They pass.")], prompt=[1, 2, 7, 4, 5, 6, 7], completion=[300_000], policy="v2")
    summing = user(text("Your task is to create a detailed summary of the conversation so far."))
    talk.ask([*more, assistant(text("They pass.")), summing], [text("<summary>All of it.</summary>")])
    on = user(text("This session is being continued from a previous conversation. All of it."))
    talk.ask([on], [text("I go on. " + "x" * 9_000)], prompt=[1], completion=[2])
    return talk
