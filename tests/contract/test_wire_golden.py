"""What goes over the wire, byte for byte, as the code of commit c785012 sent it.

Real gateways, started by the command line, stand between this test as the client and a model server that says what
the case tells it to. The cases are in tests/data/v0_1/wire:

- requests/DIALECT.json: request bodies by name; the expected files have what the model server was sent for each, or
  the error that the client got;
- answers.json: answers of the model server, whole and as the chunks of a stream; the expected files have what a
  client of each dialect gets, streamed and not, from a gateway that streams and from one that does not;
- relay.json: requests and answers that pass through a gateway whose provider speaks Anthropic's API.

A body is the JSON value to send or, where it is a string, those very characters. For how to rewrite the expected files
see support_golden.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support import UNDERSTUDY
from support_golden import DATA, check

WIRE = DATA / "wire"

PATHS = {
    "anthropic": "/v1/messages",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
}

TOLD_HEADERS = ("content-type", "retry-after", "x-should-retry", "request-id", "cache-control")
"""The headers of an answer that agents go by."""

RELAYED_HEADERS = ("anthropic-version", "anthropic-beta", "content-type", "accept", "x-app", "x-api-key", "cookie")
"""Headers that a provider may be sent."""


def load(name: str) -> dict[str, Any]:
    """The cases of a file."""
    return json.loads((WIRE / name).read_text())


REQUESTS = {dialect: load(f"requests/{dialect}.json") for dialect in PATHS}
ANSWERS = load("answers.json")
RELAYED = load("relay.json")
ECHOES = load("echoes.json")


# --- the gateway's command line: all that this test knows of how a gateway is started ------------------------------

MODEL = "fake"


@dataclass
class Gateway:
    """A gateway that runs in a process of its own, and a key for it."""

    host: str
    key: str
    process: subprocess.Popen[str]


def start_gateways(directory: Path, servers: dict[str, list[str]]) -> dict[str, Gateway]:
    """Start a gateway for each name with these arguments of `understudy gateway serve`."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(directory),
        "OPENAI_API_KEY": "k",
        "ANTHROPIC_API_KEY": "k",
    }
    begun = {
        name: subprocess.Popen(
            [UNDERSTUDY, "gateway", "serve", *arguments, "--dir", directory / name, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name, arguments in servers.items()
    }
    return {name: _until_it_listens(process) for name, process in begun.items()}


def _until_it_listens(process: subprocess.Popen[str]) -> Gateway:
    said = ""
    assert process.stderr is not None
    for line in process.stderr:
        said += line
        if told := re.search(r"listening at http://(\S+);", line):
            key = re.search(r"key: (\S+)", said)
            assert key, said
            return Gateway(told[1], key[1], process)
    raise AssertionError(f"the gateway did not start: {said}")


# --- the model's server ---------------------------------------------------------------------------------------


@dataclass
class Provider:
    """A server of a model. It gives `answer` to every request, and keeps the requests in `seen`.

    The ids of its tool calls are made different each time, as a gateway gives no two calls of a session the same id:
    `call_a` becomes `call_a_n7`, which `settled` undoes.
    """

    answer: dict[str, Any] = field(default_factory=dict[str, Any])
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list[tuple[str, dict[str, str], bytes]])
    url: str = ""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def reply(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to a POST."""
        if path == "/tokenize":
            return _json(200, {"count": 42, "max_model_len": 1000, "tokens": list(range(42))})
        self.seen.append((path, headers, body))
        answer = self.answer
        if "body" in answer:
            return (
                answer["status"],
                {"content-type": answer["type"], **answer.get("headers", {})},
                answer["body"].encode(),
            )
        number = next(self.numbers)
        if json.loads(body).get("stream") and "stream" in answer:
            events = b"".join(b"data: %b\n\n" % _unique(chunk, number) for chunk in answer["stream"])
            return 200, {"content-type": "text/event-stream"}, events
        headers = {"content-type": "application/json", **answer.get("headers", {})}
        return answer["status"], headers, _unique(answer["whole"], number)


def _json(status: int, value: Any) -> tuple[int, dict[str, str], bytes]:
    return status, {"content-type": "application/json"}, json.dumps(value).encode()


def _unique(value: Any, number: int) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r'"(call_[a-z])"', rf'"\1_n{number}"', text).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer in one piece, at once: else each one waits 40 ms for an acknowledgement.
    wbufsize = 1 << 20
    disable_nagle_algorithm = True
    provider: Provider

    def do_GET(self) -> None:
        self._send(*_json(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._send(*self.provider.reply(self.path, headers, body))

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


# --- a client ---------------------------------------------------------------------------------------------------


@dataclass
class Wire:
    """The gateways, by name, before one model server."""

    provider: Provider
    gateways: dict[str, Gateway]

    def ask(
        self, gateway: str, path: str, body: Any, *, method: str = "POST", **headers: str
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request; the answer as it is kept in the expected files, and its bytes."""
        to = self.gateways[gateway]
        connection = http.client.HTTPConnection(to.host, timeout=30)
        sent = {"authorization": f"Bearer {to.key}", "content-type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body.encode() if isinstance(body, str) else json.dumps(body, ensure_ascii=False).encode()
        self.provider.seen.clear()
        connection.request(method, path, data if method == "POST" else None, sent)
        response = connection.getresponse()
        raw = response.read()
        connection.close()
        told = {name: value for name in TOLD_HEADERS if (value := response.headers.get(name)) is not None}
        return {"status": response.status, **told, "body": readable(raw)}, raw

    def upstream(self) -> list[Any]:
        """What the model's server was sent for the last request: the body of each try."""
        return [readable(body) for _, _, body in self.provider.seen]


def settled(text: str) -> str:
    """A text without what is random in it or says the time: ids are numbered in the order in which they come."""
    numbers: dict[str, str] = {}
    text = re.sub(r"(call_[a-z])_n\d+", r"\1", text)
    text = re.sub(
        r"(?<=[a-z]_|l-)[0-9a-f]{24}", lambda id_: numbers.setdefault(id_[0], f"<id {len(numbers) + 1}>"), text
    )
    text = re.sub(r'"(created|created_at)":1\d{9}', r'"\1":0', text)
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text)


def readable(data: bytes) -> Any:
    """Bytes in a form that stands for them exactly: a stream as its events, JSON as its value, else the text.

    JSON is shown as its value only where that value, written without spaces, is the very same bytes.
    """
    text = settled(data.decode())
    if text.startswith(("event:", "data:", ":")):
        return text.split("\n\n")
    try:
        value = json.loads(text)
    except ValueError:
        return text
    same = json.dumps(value, ensure_ascii=False, separators=(",", ":")) == text
    return value if same and isinstance(value, dict) else text


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    provider = Provider()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"provider": provider}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    model = ["--backend-model-high", MODEL, "--base-url"]
    servers = {
        "vllm": ["vllm", *model, f"{url}/v1", "--atomic"],
        "vllm-streaming": ["vllm", *model, f"{url}/v1", "--streaming"],
        "openai": ["openai", *model, f"{url}/v1", "--atomic"],
        "relay": ["anthropic", "--backend-model-high", "ours", "--base-url", url, "--atomic"],
        "relay-streaming": ["anthropic", "--backend-model-high", "ours", "--base-url", url, "--streaming"],
    }
    gateways = start_gateways(tmp_path_factory.mktemp("gateways"), servers)
    try:
        yield Wire(provider, gateways)
    finally:
        for gateway in gateways.values():
            gateway.process.terminate()
        for gateway in gateways.values():
            gateway.process.communicate(timeout=30)
        server.shutdown()
        server.server_close()


# --- the cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gateway", ["vllm", "openai"])
@pytest.mark.parametrize(("dialect", "name"), [(dialect, name) for dialect in PATHS for name in REQUESTS[dialect]])
def test_what_the_model_is_sent(wire: Wire, gateway: str, dialect: str, name: str) -> None:
    wire.provider.answer = ANSWERS["text"]
    reply, _ = wire.ask(gateway, PATHS[dialect], REQUESTS[dialect][name])
    kept = (
        {"upstream": wire.upstream()}
        if reply["status"] == 200
        else {"refused": reply, "upstream": wire.upstream()}
    )
    check(f"wire/sent-{gateway}-{dialect}", name, kept)


@pytest.mark.parametrize("gateway", ["vllm", "vllm-streaming"])
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_client_gets(wire: Wire, gateway: str, dialect: str, name: str) -> None:
    wire.provider.answer = ANSWERS[name]
    request = ECHOES[dialect]["request"]
    kept: dict[str, Any] = {}
    # What is not streamed does not depend on whether the gateway streams.
    forms = (
        {"streamed": True}
        if gateway == "vllm-streaming" and name != "text"
        else {"whole": False, "streamed": True}
    )
    for form, streamed in forms.items():
        kept[form], _ = wire.ask(gateway, PATHS[dialect], request | {"stream": streamed})
        if name == "text":
            kept[f"upstream of {form}"] = wire.upstream()
    check(f"wire/got-{gateway}-{dialect}", name, kept)


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
        asked: dict[str, tuple[str, str, Any, dict[str, str]]] = {
            "models, for Anthropic's clients": ("GET", "/v1/models", "", {"anthropic_version": "2023-06-01"}),
            "models, for OpenAI's clients": ("GET", "/v1/models", "", {}),
            "count_tokens": ("POST", "/v1/messages/count_tokens", count, {}),
            "no such path": ("POST", "/v1/nothing", "{}", {}),
            "no such path for Anthropic's clients": ("GET", "/v1/files", "", {"anthropic_version": "2023-06-01"}),
        }
        for dialect, path in PATHS.items():
            wrong = {"authorization": "Bearer sk-wrong"}
            asked[f"wrong key, {dialect}"] = ("POST", path, ECHOES[dialect]["request"], wrong)
            asked[f"GET, {dialect}"] = ("GET", path, "", {})
        for name, (method, path, body, headers) in asked.items():
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
        for path, sent, body in wire.provider.seen
    ]
    reply, again = wire.ask(gateway, "/v1/messages?beta=true", case["request"], **headers)
    assert settled(again.decode()) == settled(raw.decode())
    if case["status"] == 200 and reply["status"] == 200 and gateway == "relay" and name != "error in the stream":
        assert raw.decode() == case["body"]
    check(f"wire/{gateway}", name, {"sent": sent, "got": reply | {"body": settled(raw.decode()).split("\n")}})
