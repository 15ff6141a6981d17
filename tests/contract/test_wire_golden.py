"""What goes over the wire, byte for byte, as the code of commit c785012 sent it.

Real gateways, started by the command line, stand between this test as the client and a model server that says what
the case tells it to. The cases are in tests/data/v0_1/wire:

- requests/DIALECT.json: request bodies by name; the expected files have what the model server was sent for each,
  or the error that the client got;
- answers.json: answers of the model server, whole and as the chunks of a stream; the expected files have what a
  client of each dialect gets, streamed and not, from a gateway that streams and from one that does not;
- relay.json: requests and answers that pass through a gateway whose provider speaks Anthropic's API.

A body is the JSON value to send or, where it is a string, those very characters. For how to rewrite the expected
files see tests/support/golden.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.golden import DATA, check
from support.wire import Wire, serving, settled

WIRE = DATA / "wire"

PATHS = {
    "anthropic": "/v1/messages",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "gemini": "/v1beta/models/gemini-x:generateContent",
}
GEMINI_STREAM = "/v1beta/models/gemini-x:streamGenerateContent?alt=sse"

RELAYED_HEADERS = ("anthropic-version", "anthropic-beta", "content-type", "accept", "x-app", "x-api-key", "cookie")
"""Headers that a provider may be sent."""


def load(name: str) -> dict[str, Any]:
    """The cases of a file."""
    return json.loads((WIRE / name).read_text())


REQUESTS = {dialect: load(f"requests/{dialect}.json") for dialect in PATHS}
ANSWERS = load("answers.json")
RELAYED = load("relay.json")
ECHOES = load("echoes.json")


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """Gateways before one model server, by what each of them is."""
    model = ["--backend-model-high", "fake", "--base-url"]
    provider = ["--backend-model-high", "ours", "--base-url", "URL"]
    servers = {
        "vllm": ["vllm", *model, "URL/v1", "--atomic"],
        "vllm-streaming": ["vllm", *model, "URL/v1", "--streaming"],
        "openai": ["openai", *model, "URL/v1", "--atomic"],
        "relay": ["anthropic", *provider, "--atomic"],
        "relay-streaming": ["anthropic", *provider, "--streaming"],
    }
    with serving(tmp_path_factory.mktemp("gateways"), servers) as wire:
        yield wire


def as_stream(dialect: str, request: dict[str, Any], streamed: bool) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request that asks for a stream, or for a whole response."""
    if dialect == "gemini":
        return GEMINI_STREAM if streamed else PATHS[dialect], request
    return PATHS[dialect], request | {"stream": streamed}


# --- the cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gateway", ["vllm", "openai"])
@pytest.mark.parametrize(("dialect", "name"), [(dialect, name) for dialect in PATHS for name in REQUESTS[dialect]])
def test_what_the_model_is_sent(wire: Wire, gateway: str, dialect: str, name: str) -> None:
    wire.provider.answer = ANSWERS["text"]
    reply, _ = wire.ask(gateway, PATHS[dialect], REQUESTS[dialect][name])
    sent = (
        {"upstream": wire.upstream()}
        if reply["status"] == 200
        else {"refused": reply, "upstream": wire.upstream()}
    )
    check(f"wire/sent-{gateway}-{dialect}", name, sent)


@pytest.mark.parametrize("gateway", ["vllm", "vllm-streaming"])
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_client_gets(wire: Wire, gateway: str, dialect: str, name: str) -> None:
    wire.provider.answer = ANSWERS[name]
    request = ECHOES[dialect]["request"]
    responses: dict[str, Any] = {}
    # What is not streamed does not depend on whether the gateway streams.
    forms = (
        {"streamed": True}
        if gateway == "vllm-streaming" and name != "text"
        else {"whole": False, "streamed": True}
    )
    for form, streamed in forms.items():
        responses[form], _ = wire.ask(gateway, *as_stream(dialect, request, streamed))
        if name == "text":
            responses[f"upstream of {form}"] = wire.upstream()
    check(f"wire/got-{gateway}-{dialect}", name, responses)


@pytest.mark.parametrize("dialect", PATHS)
def test_what_the_client_gets_of_options_that_change_the_answer(wire: Wire, dialect: str) -> None:
    for name in ("text", "without usage"):
        wire.provider.answer = ANSWERS[name]
        for option, more in ECHOES[dialect]["options"].items():
            for gateway in ("vllm", "vllm-streaming", "openai"):
                reply, _ = wire.ask(gateway, PATHS[dialect], ECHOES[dialect]["request"] | more)
                check(f"wire/options-{dialect}", f"{option}: {name}, {gateway}", reply)


@pytest.mark.parametrize("dialect", PATHS)
def test_a_tool_call_that_comes_back_rewritten_is_sent_as_it_was_sampled(wire: Wire, dialect: str) -> None:
    """The agent sends its tool call back with other spacing, another order of keys, or other values."""
    wire.provider.answer = ANSWERS["tool call odd spacing"]
    _, raw = wire.ask("vllm", PATHS[dialect], ECHOES[dialect]["request"])
    called = re.search(rb"call_a_n\d+", raw)
    assert called
    wire.provider.answer = ANSWERS["text"]
    for name, body in ECHOES[dialect]["echoes"].items():
        echo = json.loads(json.dumps(body).replace("@CALL@", called[0].decode()))
        wire.ask("vllm", PATHS[dialect], echo)
        check(f"wire/echoes-{dialect}", name, wire.upstream())


def test_other_paths_and_wrong_keys(wire: Wire) -> None:
    count = {"model": "claude-x", "messages": [{"role": "user", "content": "hi"}]}
    for gateway in ("vllm", "openai"):
        requests: dict[str, tuple[str, str, Any, dict[str, str]]] = {
            "models, for Anthropic's clients": ("GET", "/v1/models", "", {"anthropic_version": "2023-06-01"}),
            "models, for OpenAI's clients": ("GET", "/v1/models", "", {}),
            "count_tokens": ("POST", "/v1/messages/count_tokens", count, {}),
            "models, for Gemini's clients": ("GET", "/v1beta/models", "", {}),
            "countTokens": (
                "POST",
                "/v1beta/models/gemini-x:countTokens",
                {"contents": [{"parts": [{"text": "hi"}]}]},
                {},
            ),
            "no such path": ("POST", "/v1/nothing", "{}", {}),
            "no such path for Gemini's clients": ("POST", "/v1beta/models/gemini-x:embedContent", "{}", {}),
            "no such path for Anthropic's clients": ("GET", "/v1/files", "", {"anthropic_version": "2023-06-01"}),
        }
        for dialect, path in PATHS.items():
            wrong = {"authorization": "Bearer sk-wrong"}
            requests[f"wrong key, {dialect}"] = ("POST", path, ECHOES[dialect]["request"], wrong)
            requests[f"GET, {dialect}"] = ("GET", path, "", {})
        for name, (method, path, body, headers) in requests.items():
            reply, _ = wire.ask(gateway, path, body, method=method, **headers)
            check("wire/paths", f"{name}, {gateway}", reply)


@pytest.mark.parametrize("gateway", ["relay", "relay-streaming"])
@pytest.mark.parametrize("name", RELAYED)
def test_a_relay_passes_on_the_bytes(wire: Wire, gateway: str, name: str) -> None:
    case = wire.provider.answer = RELAYED[name]
    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "a,b", "x_app": "cli", "cookie": "c"}
    _, raw = wire.ask(gateway, "/v1/messages?beta=true", case["request"], **headers)
    # The same again for its status and headers: `ask` shows JSON by its value, here the bytes count.
    sent = [
        {
            "path": path,
            "headers": {name: sent[name] for name in RELAYED_HEADERS if name in sent},
            "body": body.decode(),
        }
        for path, sent, body in wire.provider.requests
    ]
    reply, again = wire.ask(gateway, "/v1/messages?beta=true", case["request"], **headers)
    assert settled(again.decode()) == settled(raw.decode())
    if case["status"] == 200 and reply["status"] == 200 and gateway == "relay" and name != "error in the stream":
        assert raw.decode() == case["body"]
    check(f"wire/{gateway}", name, {"sent": sent, "got": reply | {"body": settled(raw.decode()).split("\n")}})
