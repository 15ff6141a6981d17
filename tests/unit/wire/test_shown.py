"""What exports of rollouts and states of session logs say that a model was shown is what the gateway showed it.

For every block of every dialect.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from understudy.gateway.session import GatewaySession
from understudy.ingest.formats.base import LogFormat
from understudy.ingest.formats.cline import ClineFormat
from understudy.ingest.formats.gemini import GeminiFormat
from understudy.ingest.formats.session_traces import SessionTracesFormat
from understudy.ingest.trace import expand
from understudy.replay.requests import shown_messages as shown_to_teacher
from understudy.types import Call
from understudy.wire.dialect import Branch
from understudy.wire.dialects import DIALECTS
from understudy.wire.stored import read_request, shown_messages

from support.claude_log import Log, by_message, of_bytes, read

Item = dict[str, Any]
PNG = {"type": "base64", "media_type": "image/png", "data": "AA=="}
URL = "data:image/png;base64,AA=="
BROKEN = {"__unparsedToolInput": {"raw": '{"command": "ls', "len": 15}}


def anthropic(*messages: Item, **fields: Any) -> Item:
    return {"model": "m", "max_tokens": 10, "messages": list(messages)} | fields


def user(*blocks: Item | str) -> Item:
    return {"role": "user", "content": [text(b) if isinstance(b, str) else b for b in blocks]}


def assistant(*blocks: Item | str) -> Item:
    return user(*blocks) | {"role": "assistant"}


def text(value: str) -> Item:
    return {"type": "text", "text": value}


def use(id_: str = "t1", input_: Any = None, name: str = "Bash") -> Item:
    return {"type": "tool_use", "id": id_, "name": name, "input": {"command": "ls"} if input_ is None else input_}


def result(content: Any, id_: str = "t1", **fields: Any) -> Item:
    return {"type": "tool_result", "tool_use_id": id_, "content": content} | fields


def answered(*content: Item | str, **fields: Any) -> Item:
    """A conversation in which a tool gave this."""
    blocks = [text(c) if isinstance(c, str) else c for c in content]
    return anthropic(user("go"), assistant(use()), user(result(blocks, **fields)))


IMAGE: Item = {"type": "image", "source": PNG}
SEARCH_RESULT: Item = {
    "type": "search_result",
    "title": "T",
    "source": "https://a.test",
    "content": [text("first"), text("second")],
}
DOCUMENTS: dict[str, Item] = {
    "text": {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    },
    "blocks": {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}},
    "string": {"type": "document", "source": {"type": "content", "content": "words"}},
    "pdf": {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="},
    },
    "url": {"type": "document", "source": {"type": "url", "url": "https://a.test/b.pdf"}},
    "file": {"type": "document", "source": {"type": "file", "file_id": "f"}},
}
SERVED_RESULTS: dict[str, Item] = {
    "web search": {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [
            {"type": "web_search_result", "title": "T", "url": "https://a.test", "encrypted_content": "x"},
            {"type": "web_search_result", "title": "U", "url": "https://b.test", "page_age": None},
        ],
    },
    "web search error": {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"},
    },
    "web fetch": {
        "type": "web_fetch_tool_result",
        "tool_use_id": "s1",
        "content": {"type": "web_fetch_result", "url": "https://a.test", "content": DOCUMENTS["text"]},
    },
    "code": {
        "type": "code_execution_tool_result",
        "tool_use_id": "s1",
        "content": {
            "type": "code_execution_result",
            "stdout": "1\n",
            "stderr": "e",
            "return_code": 0,
            "content": [],
        },
    },
    "bash": {
        "type": "bash_code_execution_tool_result",
        "tool_use_id": "s1",
        "content": {"type": "bash_code_execution_result", "stdout": "1", "stderr": "", "return_code": 0},
    },
    "mcp": {"type": "mcp_tool_result", "tool_use_id": "s1", "is_error": False, "content": [text("m")]},
    "unknown": {"type": "tool_search_tool_result", "tool_use_id": "s1", "content": []},
}
REDACTED: Item = {"type": "redacted_thinking", "data": "x"}
SEARCH: Item = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}
TOOL: Item = {"name": "Bash", "description": "Runs.", "input_schema": {"type": "object", "properties": {}}}

ANTHROPIC: dict[str, Item] = {
    "text": anthropic(user("go")),
    "string": anthropic({"role": "user", "content": "go"}),
    "several texts": anthropic(user("a", "b", "")),
    "system": anthropic(user("go"), system="Be brief."),
    "system blocks": anthropic(
        user("go"), system=[text("x-anthropic-billing-header: a=1"), text("Be brief."), text("Be kind.")]
    ),
    "empty system": anthropic(user("go"), system=""),
    "system among messages": anthropic(
        user("go"), assistant("yes"), {"role": "system", "content": "Now hurry."}, user("on"), system="S"
    ),
    "system before messages": anthropic(
        {"role": "system", "content": [text("A"), text("B")]}, user("go"), system="S"
    ),
    "system blocks among messages": anthropic(
        user("go"),
        {"role": "system", "content": [text("A"), IMAGE, {"type": "tool_removal", "tool": {"name": "x"}}]},
        assistant("yes"),
    ),
    "nothing in a system message": anthropic(user("go"), {"role": "system", "content": []}, assistant("yes")),
    "thinking": anthropic(
        user("go"), assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, "yes"), user("on")
    ),
    "several thoughts": anthropic(
        user("go"),
        assistant({"type": "thinking", "thinking": "a"}, "x", {"type": "thinking", "thinking": "b"}, "y"),
        user("on"),
    ),
    "redacted thinking": anthropic(user("go"), assistant({"type": "redacted_thinking", "data": "x"}, "yes")),
    "only redacted thinking": anthropic(
        user("go"), assistant({"type": "redacted_thinking", "data": "x"}), user("on")
    ),
    "empty answer": anthropic(user("go"), assistant(), user("on")),
    "empty string answer": anthropic(user("go"), {"role": "assistant", "content": ""}, user("on")),
    "empty user": anthropic(user("go"), assistant("yes"), user(), assistant("yes")),
    "tool use": anthropic(
        user("go"), assistant("first", use(), use("t2", {"b": [1.0, None]})), user(result("ok"))
    ),
    "text after tool use": anthropic(
        user("go"), assistant("a", use(), "b"), user(result("ok"), "and", result("x"))
    ),
    "broken call": anthropic(user("go"), assistant(use(input_=BROKEN)), user(result("no", is_error=True))),
    "input that is no object": anthropic(user("go"), assistant(use(input_=[1])), user(result("no"))),
    "result": answered("ok"),
    "result string": anthropic(user("go"), assistant(use()), user(result("ok"))),
    "result without content": anthropic(
        user("go"), assistant(use()), user({"type": "tool_result", "tool_use_id": "t1"})
    ),
    "result of several texts": answered("a", "b"),
    "error": answered("bad", is_error=True),
    "error as a string": anthropic(user("go"), assistant(use()), user(result("bad", is_error=True))),
    "error of several texts": answered("a", "b", is_error=True),
    "empty error": answered(is_error=True),
    "error without content": anthropic(
        user("go"), assistant(use()), user({"type": "tool_result", "tool_use_id": "t1", "is_error": True})
    ),
    "error with an image": answered(IMAGE, "b", is_error=True),
    "error with a document": answered(DOCUMENTS["text"], is_error=True),
    "error and what the user says": anthropic(
        user("go"), assistant(use()), user(result([IMAGE], is_error=True), "look")
    ),
    "result with an image": answered("a", IMAGE, "b"),
    "only an image": answered(IMAGE),
    "image and what the user says": anthropic(
        user("go"), assistant(use()), user(result([IMAGE]), "look", IMAGE), user("more")
    ),
    "images before a system message": anthropic(
        user("go"), assistant(use()), user(result([IMAGE])), {"role": "system", "content": "S"}, user("more")
    ),
    "images of several results": anthropic(
        user("go"),
        assistant(use("a"), use("b")),
        user(result([IMAGE], "b"), result([text("1"), IMAGE], "a"), "then"),
    ),
    "results in another order": anthropic(
        user("go"), assistant(use("a"), use("b")), user(result("2", "b"), result("1", "a"), result("3", "c"))
    ),
    "results over several messages": anthropic(
        user("go"), assistant(use("a"), use("b")), user("note", result("2", "b")), user(result("1", "a"), "end")
    ),
    "result of no call": anthropic(user(result("lost", "zz"), "go")),
    "image": anthropic(user("look", IMAGE)),
    "image by url": anthropic(user({"type": "image", "source": {"type": "url", "url": "https://a.test/b.png"}})),
    "image by file": anthropic(user({"type": "image", "source": {"type": "file", "file_id": "f"}})),
    **{f"document: {name}": anthropic(user("read", block)) for name, block in DOCUMENTS.items()},
    **{f"result with a document: {name}": answered(block) for name, block in DOCUMENTS.items()},
    "search result": anthropic(user(SEARCH_RESULT)),
    "result with search results": answered(SEARCH_RESULT, SEARCH_RESULT),
    "tool reference": answered({"type": "tool_reference", "tool_name": "mcp__x"}),
    "tool addition": anthropic(
        user("go", {"type": "tool_addition", "tool": {"name": "n", "definition": TOOL | {"name": "New"}}}),
        tools=[TOOL],
    ),
    "tool removal": anthropic(user("go", {"type": "tool_removal", "tool": {"name": "Bash"}})),
    "container upload": anthropic(user({"type": "container_upload", "file_id": "f"})),
    "server tool use": anthropic(
        user("go"),
        assistant(
            "a", {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}, "b"
        ),
    ),
    "mcp tool use": anthropic(
        user("go"), assistant({"type": "mcp_tool_use", "id": "s1", "name": "x", "server_name": "s", "input": {}})
    ),
    **{
        f"server result: {name}": anthropic(user("go"), assistant("a", block, "b"), user("on"))
        for name, block in SERVED_RESULTS.items()
    },
    "compaction": anthropic(user("go"), assistant({"type": "compaction", "content": "so far"}, "b"), user("on")),
    "tools": anthropic(user("go"), tools=[TOOL, TOOL | {"name": "Two"}]),
    "tool without a description": anthropic(
        user("go"), tools=[{"name": "x", "input_schema": {"type": "object"}, "cache_control": {}}]
    ),
    "deferred tools": anthropic(user("go"), tools=[TOOL, TOOL | {"name": "DeferredToolPlaceholder"}]),
    "no tools": anthropic(user("go"), tools=[]),
}


def call(id_: str = "t1", arguments: str = '{"command":"ls"}') -> Item:
    return {"id": id_, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def chat(*messages: Item, **fields: Any) -> Item:
    return {"model": "m", "messages": list(messages)} | fields


def said(content: Any, role: str = "user", **fields: Any) -> Item:
    return {"role": role, "content": content} | fields


def tool(content: Any, id_: str = "t1") -> Item:
    return {"role": "tool", "tool_call_id": id_, "content": content}


PICTURE: Item = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
FUNCTION: Item = {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": {}}}
GO = said("go")
GO_CHAT = GO

CHAT: dict[str, Item] = {
    "text": chat(GO),
    "parts": chat(said([text("a"), text("b")])),
    "system": chat(said("S", "system"), said([text("D"), text("E")], "developer"), GO),
    "empty system": chat(said("", "system"), GO),
    "system among messages": chat(said("S", "system"), GO, said("yes", "assistant"), said("T", "system"), GO),
    "empty user": chat(said(""), said(None)),
    "reasoning": chat(GO, said("yes", "assistant", reasoning_content="hm"), GO),
    "reasoning by its other name": chat(GO, said("yes", "assistant", reasoning="hm"), GO),
    "refusal": chat(GO, said(None, "assistant", refusal="I will not."), GO),
    "refusal part": chat(GO, said([{"type": "refusal", "refusal": "I will not."}], "assistant"), GO),
    "image": chat(said([text("look"), PICTURE])),
    "image as a string": chat(said([{"type": "image_url", "image_url": URL}])),
    "image of an assistant": chat(GO, said([text("a"), PICTURE], "assistant"), GO),
    "empty answer": chat(GO, said(None, "assistant"), GO, said("", "assistant"), GO, said([], "assistant")),
    "calls": chat(GO, said(None, "assistant", tool_calls=[call(), call("t2")]), tool("1"), tool("2", "t2")),
    "calls with text": chat(GO, said("first", "assistant", tool_calls=[call()]), tool([text("a"), text("b")])),
    "call without arguments": chat(GO, said(None, "assistant", tool_calls=[call(arguments="")]), tool("1")),
    "broken call": chat(GO, said(None, "assistant", tool_calls=[call(arguments='{"command": "l')]), tool("no")),
    "arguments that are no object": chat(
        GO, said(None, "assistant", tool_calls=[call(arguments="[1]")]), tool("no")
    ),
    "results in another order": chat(
        GO, said(None, "assistant", tool_calls=[call("a"), call("b")]), tool("2", "b"), tool("1", "a"), said("on")
    ),
    "result without content": chat(GO, said(None, "assistant", tool_calls=[call()]), tool(None), tool("")),
    "result with an image": chat(GO, said(None, "assistant", tool_calls=[call()]), tool([text("a"), PICTURE]), GO),
    "tools": chat(GO, tools=[FUNCTION]),
    "strict tool": chat(GO, tools=[{"type": "function", "function": {"name": "x", "strict": True}}]),
    "allowed tools": chat(
        GO,
        tools=[FUNCTION, {"type": "function", "function": {"name": "x"}}],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
        },
    ),
}


def responses(*items: Item, **fields: Any) -> Item:
    return {"model": "m", "input": list(items)} | fields


def message(content: Any, role: str = "user") -> Item:
    return {"type": "message", "role": role, "content": content}


def called(id_: str = "t1", arguments: str = '{"command":"ls"}', **fields: Any) -> Item:
    return {"type": "function_call", "call_id": id_, "name": "shell", "arguments": arguments} | fields


def custom(input_: str, id_: str = "t1") -> Item:
    return {"type": "custom_tool_call", "call_id": id_, "name": "apply_patch", "input": input_}


def output(content: Any, id_: str = "t1", kind: str = "function_call_output") -> Item:
    return {"type": kind, "call_id": id_, "output": content}


START = message("go")
SAID = message([{"type": "output_text", "text": "yes"}], "assistant")
THOUGHT: Item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}

RESPONSES: dict[str, Item] = {
    "string": {"model": "m", "input": "go"},
    "text": responses(message([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])),
    "instructions": responses(message("D", "developer"), START, instructions="I"),
    "empty instructions": responses(START, instructions=""),
    "developer among messages": responses(START, SAID, message("D", "developer"), START),
    "empty user": responses(message(""), SAID),
    "answer": responses(START, SAID, message("on")),
    "two answers": responses(START, SAID, SAID, message("on")),
    "empty answer": responses(START, message("", "assistant"), START),
    "reasoning": responses(START, THOUGHT, SAID, message("on")),
    "summary": responses(START, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, SAID),
    "encrypted reasoning": responses(START, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, SAID),
    "only reasoning": responses(START, THOUGHT, message("on")),
    "reasoning of two answers": responses(START, THOUGHT, SAID, THOUGHT, called(), output("1")),
    "refusal": responses(START, message([{"type": "refusal", "refusal": "I will not."}], "assistant"), START),
    "image": responses(message([{"type": "input_image", "image_url": URL, "detail": "low"}])),
    "calls": responses(START, THOUGHT, SAID, called(), called("t2"), output("2", "t2"), output("1")),
    "calls of two answers": responses(START, called(), THOUGHT, called("t2"), output("2", "t2"), output("1")),
    "text after calls": responses(START, called(), SAID, output("1")),
    "call of a namespace": responses(START, called(namespace="mcp__"), output("1")),
    "broken call": responses(START, called(arguments='{"command": "l'), output("no")),
    "call without arguments": responses(START, called(arguments=""), output("1")),
    "custom call": responses(START, custom("*** Begin"), output("ok", kind="custom_tool_call_output")),
    "output parts": responses(START, called(), output([{"type": "input_text", "text": "a"}])),
    "output with an image": responses(
        START,
        called(),
        output([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL}]),
        SAID,
    ),
    "empty output": responses(START, called(), output(""), output([])),
    "web search": responses(START, {"type": "web_search_call", "id": "w", "status": "completed"}, SAID),
    "additional tools": responses(
        START, {"type": "additional_tools", "tools": [{"type": "function", "name": "late"}]}, SAID
    ),
    "tools": responses(
        START,
        tools=[
            {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
            {"type": "custom", "name": "apply_patch", "description": "Patches."},
            {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
            {"type": "namespace", "name": "mcp__x__", "tools": [{"type": "function", "name": "y"}]},
            {"type": "web_search"},
        ],
    ),
    "allowed tools": responses(
        START,
        tools=[{"type": "function", "name": "a"}, {"type": "function", "name": "b"}],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]},
    ),
}


def contents(*parts: Item | list[Item], **fields: Any) -> Item:
    """Contents in turn the user's and the model's."""
    roles = ("user", "model")
    sent = [each if isinstance(each, list) else [each] for each in parts]
    return {"contents": [{"role": roles[n % 2], "parts": each} for n, each in enumerate(sent)]} | fields


GO: Item = {"text": "go"}
RUN: Item = {"functionCall": {"name": "run", "args": {"a": 1}}}
RAN: Item = {"functionResponse": {"name": "run", "response": {"output": "ok"}}}
INLINE: Item = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}

GEMINI: dict[str, Item] = {
    "text": contents(GO),
    "without a role": {"contents": [{"parts": [GO]}]},
    "several texts": contents([GO, {"text": ""}, GO]),
    "instruction": contents(GO, systemInstruction={"parts": [{"text": "A"}, {"text": "B"}]}),
    "no parts": contents([], [], GO),
    "thought": contents(GO, [{"text": "hm", "thought": True}, {"text": "yes"}], GO),
    "pieces of a text": contents(GO, [{"text": "y"}, {"text": "es"}, {"thoughtSignature": "c2ln"}], GO),
    "text after a call": contents(GO, [{"text": "a"}, RUN, {"text": "b"}], RAN),
    "calls": contents(GO, [RUN, {"functionCall": {"name": "see", "id": "x"}}], [RAN, RAN, GO]),
    "result of no call": contents(RAN),
    "error": contents(GO, RUN, {"functionResponse": {"name": "run", "response": {"error": "bad"}}}),
    "result with an image": contents(GO, RUN, {"functionResponse": RAN["functionResponse"] | {"parts": [INLINE]}}),
    "image": contents([GO, INLINE]),
    "image beside a result": contents(GO, RUN, [RAN, INLINE, GO]),
    "tools": contents(
        GO,
        tools=[
            {"functionDeclarations": [{"name": "run", "parameters": {"type": "OBJECT"}}]},
            {"googleSearch": {}},
        ],
    ),
    "allowed tools": contents(
        GO,
        tools=[{"functionDeclarations": [{"name": "a"}, {"name": "b"}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["b"]}},
    ),
}

CASES = [
    pytest.param(dialect, body, id=f"{dialect}: {name}")
    for dialect, bodies in {
        "anthropic": ANTHROPIC,
        "openai-chat": CHAT,
        "openai-responses": RESPONSES,
        "gemini": GEMINI,
    }.items()
    for name, body in bodies.items()
]


def stored(dialect: str, request: object, response: object = None) -> Call:
    return Call(
        id="c1",
        attempt_id="a1",
        sequence=0,
        dialect=dialect,
        requested_model="m",
        backend="openai",
        backend_model="m",
        request=msgspec.json.encode(request),
        response=json.dumps(response).encode(),
        status="ok",
        started_at=0.0,
        ended_at=1.0,
    )


@pytest.mark.parametrize(("dialect", "body"), CASES)
def test_exported_messages_equal_those_the_gateway_sent_to_the_model(dialect: str, body: Item):
    session, target = GatewaySession("a1", {}), DIALECTS[dialect].target("m")
    request = DIALECTS[dialect].parse(msgspec.json.encode(body), session, Branch("s", None), target).chat
    conversation = read_request(stored(dialect, body))
    assert shown_messages(conversation) == [_exported(message) for message in request.messages]
    assert conversation.tools == request.tools


def _exported(message: Item) -> Item:
    """A message of the gateway under the names that exports have."""
    return {"reasoning_content" if key == "reasoning" else key: value for key, value in message.items()}


# --- session logs ---------------------------------------------------------------------------------------

ORDER = "a state has exactly one result for each call, before the user's texts"
EMPTY = "a state leaves out what is empty"
SYSTEM = "the logs of Claude Code hold no system messages"
NOT_LOGGED = {
    "several texts": EMPTY,
    "system among messages": SYSTEM,
    "system before messages": SYSTEM,
    "system blocks among messages": SYSTEM,
    "images before a system message": SYSTEM,
    "nothing in a system message": SYSTEM,
    "only redacted thinking": EMPTY,
    "empty answer": EMPTY,
    "empty string answer": EMPTY,
    "empty user": EMPTY,
    "tool use": ORDER,
    "text after tool use": ORDER,
    "results in another order": ORDER,
    "results over several messages": ORDER,
    "result of no call": ORDER,
    "input that is no object": "teachers are sent an object",
}
LAST = "msg_9999999999999999"


@pytest.mark.parametrize("name", [name for name in ANTHROPIC if name not in NOT_LOGGED])
def test_states_of_claude_code_have_what_the_gateway_shows(name: str) -> None:
    messages = ending_with_the_user(ANTHROPIC[name]["messages"])
    log = Log()
    for number, message in enumerate(messages):
        if message["role"] == "user":
            log.user(message["content"])
        else:
            content = message["content"]
            log.assistant(f"msg_{number:016d}", *([content] if isinstance(content, str) else content))
    log.assistant(LAST, "end")
    state = by_message(*read(log))[LAST]
    assert _levelled(shown_to_teacher(state.messages)) == _levelled(_shown("anthropic", messages))


def ending_with_the_user(messages: list[Item]) -> list[Item]:
    return messages if messages[-1]["role"] == "user" else [*messages, user("more")]


def _shown(dialect: str, messages: list[Item], field: str = "messages") -> list[Item]:
    return shown_messages(read_request(stored(dialect, {"model": "m", "max_tokens": 10, field: messages})))


def _levelled(messages: list[Item]) -> list[Item]:
    """The messages without the system prompt and thinking, with JSON without spaces; a user's are one message."""
    level: list[Item] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "user" and level and level[-1]["role"] == "user":
            level[-1]["content"] += _parts(content)
        elif role != "system":
            calls = [(c["id"], c["function"]["name"], _compact(c)) for c in message.get("tool_calls", ())]
            shown = content if role != "user" else _parts(content)
            level.append({"role": role, "content": shown, "id": message.get("tool_call_id"), "calls": calls})
    return level


def _compact(call: Item) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(call["function"]["arguments"]))


def _parts(content: Any) -> list[Item]:
    """The lines of the texts, and the images by their address, in their order."""
    level: list[Item] = []
    for part in [text(content)] if isinstance(content, str) else content:
        if "text" in part:
            level += [text(line) for line in part["text"].split("\n") if line]
        else:
            level.append({"image": part["image_url"]["url"]})
    return level


def state_after(log_format: LogFormat, path: str, data: bytes) -> list[Item]:
    """What a teacher is shown of the last state of a log."""
    (trace,) = log_format.read([of_bytes(path, data)])
    return shown_to_teacher(list(expand(trace, system=None))[-1].messages)


CLINES = [
    name
    for name in ("text", "string", "tool use", "error", "error of several texts", "empty error", "image")
    if name not in NOT_LOGGED
]


@pytest.mark.parametrize("name", CLINES)
def test_states_of_cline_have_what_the_gateway_shows(name: str) -> None:
    messages = ANTHROPIC[name]["messages"]
    data = json.dumps([*messages, assistant("end")]).encode()
    shown = state_after(ClineFormat(), "/tasks/17/api_conversation_history.json", data)
    assert _levelled(shown) == _levelled(_shown("anthropic", messages))


@pytest.mark.parametrize(
    "name", ["text", "parts", "refusal", "refusal part", "image", "broken call", "result with an image"]
)
def test_states_of_chat_messages_have_what_the_gateway_shows(name: str) -> None:
    messages = CHAT[name]["messages"]
    header = {"type": "session", "harness": "demo", "id": "s1"}
    lines = [header, *({"type": "message", "message": each} for each in [*messages, said("end", "assistant")])]
    for line in lines[1:]:
        sent = line["message"]
        line["message"] = {
            {"tool_calls": "toolCalls", "tool_call_id": "toolCallId"}.get(k, k): sent[k] for k in sent
        }
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    shown = state_after(SessionTracesFormat(), "/traces/s1.jsonl", data)
    assert _levelled(shown) == _levelled(_shown("openai-chat", messages))


def test_a_failed_result_in_a_chat_log_has_no_mark() -> None:
    """The API of chat completions has none, so no model was shown it; that it failed is known from the log."""
    lines: list[Item] = [
        {"type": "session", "harness": "demo", "id": "s1"},
        {"type": "message", "message": GO_CHAT},
        {"type": "message", "message": said(None, "assistant", toolCalls=[call()])},
        {"type": "message", "message": {"role": "tool", "toolCallId": "t1", "content": "bad", "isError": True}},
        {"type": "message", "message": said("end", "assistant")},
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    assert state_after(SessionTracesFormat(), "/traces/s1.jsonl", data)[-1]["content"] == "bad"


@pytest.mark.parametrize("response", [{"output": "ok"}, {"error": "bad"}, {"a": 1}])
def test_states_of_gemini_have_what_the_gateway_shows(response: Item) -> None:
    result_part = {"functionResponse": {"id": "x", "name": "run", "response": response}}
    run = {"functionCall": {"id": "x", "name": "run", "args": {"a": 1}}}
    sent = contents(GO, run, result_part)["contents"]
    called_tool = {
        "id": "x",
        "name": "run",
        "args": {"a": 1},
        "result": [result_part],
        "status": "error" if "error" in response else "success",
    }
    records = [
        {"id": "1", "type": "user", "content": "go"},
        {"id": "2", "type": "gemini", "content": "", "toolCalls": [called_tool], "model": "m"},
        {"id": "3", "type": "gemini", "content": "end", "model": "m"},
    ]
    data = json.dumps({"sessionId": "s", "projectHash": "p", "messages": records}).encode()
    shown = state_after(GeminiFormat(), "/chats/session-1.json", data)
    assert _levelled(shown) == _levelled(_shown("gemini", sent, "contents"))
