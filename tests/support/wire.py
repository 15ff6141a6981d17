"""Gateways started by the command line, and a model server on loopback that says what it is told to.

All that the tests of pinned bytes know of how a gateway is started is `start_gateway`.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support import warm, warm_socket

TOLD_HEADERS = ("content-type", "retry-after", "x-should-retry", "request-id", "cache-control")
"""The headers of an answer that agents go by."""

# --- the gateway's command line -------------------------------------------------------------------------------

MODEL = "fake"


@dataclass
class Gateway:
    """A gateway that runs in a process of its own, and the key that it made when it started first."""

    host: str
    key: str
    process: subprocess.Popen[str]


def start_gateway(directory: Path, arguments: Sequence[str]) -> Gateway:
    """Start a gateway on this directory with these arguments of `understudy gateway serve`."""
    process = subprocess.Popen(
        [*warm.COMMAND, "gateway", "serve", *arguments, "--dir", directory, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(directory.parent),
            "OPENAI_API_KEY": "k",
            "ANTHROPIC_API_KEY": "k",
            warm.SOCKET: warm_socket(),
        },
    )
    return _until_it_listens(process)


def _until_it_listens(process: subprocess.Popen[str]) -> Gateway:
    output = ""
    assert process.stderr is not None
    for line in process.stderr:
        output += line
        if match := re.search(r"listening at http://(\S+);", line):
            key = re.search(r"key: (\S+)", output)
            return Gateway(match[1], key[1] if key else "", process)
    raise AssertionError(f"the gateway did not start: {output}")


# --- the model's server ---------------------------------------------------------------------------------------


@dataclass
class Provider:
    """A server of a model. It gives `answer` to every request, and keeps the requests in `requests`.

    The ids of its tool calls are made different each time, as a gateway gives no two calls of a session the same
    id: `call_a` becomes `call_a_n7`, which `settled` undoes.
    """

    answer: dict[str, Any] = field(default_factory=dict[str, Any])
    requests: list[tuple[str, dict[str, str], bytes]] = field(
        default_factory=list[tuple[str, dict[str, str], bytes]]
    )
    url: str = ""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def reply(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to a POST."""
        if path == "/tokenize":
            return _json(200, {"count": 42, "max_model_len": 1000, "tokens": list(range(42))})
        self.requests.append((path, headers, body))
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
    """The gateways, by name, before one model server. A gateway starts when it is first asked for."""

    provider: Provider
    directory: Path
    arguments: Mapping[str, Sequence[str]]
    gateways: dict[str, Gateway] = field(default_factory=dict[str, Gateway])

    def gateway(self, name: str) -> Gateway:
        """The gateway of this name."""
        if name not in self.gateways:
            self.gateways[name] = start_gateway(self.directory / name, self.arguments[name])
        return self.gateways[name]

    def ask(
        self, gateway: str, path: str, body: Any, *, method: str = "POST", **headers: str
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request; the answer as it is kept in the expected files, and its bytes."""
        to = self.gateway(gateway)
        connection = http.client.HTTPConnection(to.host, timeout=30)
        sent = {"authorization": f"Bearer {to.key}", "content-type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body.encode() if isinstance(body, str) else json.dumps(body, ensure_ascii=False).encode()
        self.provider.requests.clear()
        connection.request(method, path, data if method == "POST" else None, sent)
        response = connection.getresponse()
        raw = response.read()
        connection.close()
        reported = {name: value for name in TOLD_HEADERS if (value := response.headers.get(name)) is not None}
        return {"status": response.status, **reported, "body": readable(raw)}, raw

    def upstream(self) -> list[Any]:
        """What the model's server was sent for the last request: the body of each try."""
        return [readable(body) for _, _, body in self.provider.requests]


def settled(text: str) -> str:
    """A text without what is random in it or says the time: ids are numbered in the order in which they come."""
    numbers: dict[str, str] = {}
    text = re.sub(r"(call_[a-z])_n\d+", r"\1", text)
    text = re.sub(
        r"(?<=[a-z]_|l-)[0-9a-f]{24}|(?<=[: \\]\")[0-9a-f]{24}(?=\\?\")",
        lambda id_: numbers.setdefault(id_[0], f"<id {len(numbers) + 1}>"),
        text,
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


@contextmanager
def serving(directory: Path, servers: Mapping[str, Sequence[str]]) -> Iterator[Wire]:
    """Gateways with these arguments, in which URL stands for the address of the model server."""
    provider = Provider()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"provider": provider}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    placed = {name: [part.replace("URL", url) for part in parts] for name, parts in servers.items()}
    wire = Wire(provider, directory, placed)
    try:
        yield wire
    finally:
        for gateway in wire.gateways.values():
            gateway.process.terminate()
        for gateway in wire.gateways.values():
            gateway.process.communicate(timeout=30)
        server.shutdown()
        server.server_close()
