"""What an export says that a model was shown is what the gateway showed it, for every block of every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from understudy.gateway.session import GatewaySession
from understudy.types import Call
from understudy.wire.dialect import Branch
from understudy.wire.dialects import DIALECTS
from understudy.wire.stored import read_request, shown_messages

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
        request=json.dumps(request).encode(),
        response=json.dumps(response).encode(),
        status="ok",
        started_at=0.0,
        ended_at=1.0,
    )


@pytest.mark.parametrize(("dialect", "body"), CASES)
def test_exported_messages_equal_those_the_gateway_sent_to_the_model(dialect: str, body: Item):
    session, target = GatewaySession("a1", {}), DIALECTS[dialect].target("m")
    request = DIALECTS[dialect].parse(json.dumps(body).encode(), session, Branch("s", None), target).chat
    conversation = read_request(stored(dialect, body))
    assert shown_messages(conversation) == [_exported(message) for message in request.messages]
    assert conversation.tools == request.tools


def _exported(message: Item) -> Item:
    """A message of the gateway under the names that exports have."""
    return {"reasoning_content" if key == "reasoning" else key: value for key, value in message.items()}
