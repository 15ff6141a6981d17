"""Records the tools that versions of Claude Code offer, for `src/understudy/ingest/claude_code/tools.json.xz`.

    python scripts/record_claude_tools.py INSTALLED VERSION... [--output FILE] [--model NAME]

Each VERSION of the npm package `@anthropic-ai/claude-code` is installed under INSTALLED (it stays there), and run
in a network namespace of its own, with an empty home, against a server of ours that keeps the `tools` of each
request: as people use it in a terminal, in print mode, and in a terminal with all tools given at once or searched
for (ENABLE_TOOL_SEARCH). In each run the server answers the first request with a call of a subagent, so that a
subagent's tools are recorded too. Other versions in the output stay there. `xz -dc FILE` shows the table. Needs
Linux, npm and node; root, or user namespaces.

The table is `{"definitions": [tool...], "versions": {version: {mode: {"main" | "subagent": [index...]}}}}`, the
tools as they are in Anthropic's requests. In their texts DATE and MONTH stand where the program writes the day.
"""

# pyright: basic
from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent.parent / "src/understudy/ingest/claude_code/tools.json.xz"
PACKAGE = "@anthropic-ai/claude-code"
MODEL = "claude-sonnet-4-5-20250929"
PROMPT = "Please help with this project."
SUBAGENT = "Say hello, as a subagent of the recording."
MODES: dict[str, dict[str, str]] = {
    "terminal": {},
    "all": {"ENABLE_TOOL_SEARCH": "false"},
    "search": {"ENABLE_TOOL_SEARCH": "true"},
    "print": {},
}
"""How each version is run, and its environment; a reader takes the first list that has the most tools called."""
DATE, MONTH = "{{DATE}}", "{{MONTH}}"
_TIMEOUT_S = 60.0


class MessagesServer(ThreadingHTTPServer):
    """Answers the requests of the Messages API with what `answer` returns."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MessagesHandler)
        self.usage = {"input_tokens": 10, "output_tokens": 5}

    def message_id(self, body: dict[str, Any]) -> str:
        """The id of the answer to a request."""
        return f"msg_{hashlib.sha256(json.dumps(body).encode()).hexdigest()[:20]}"

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The content blocks that answer a request."""
        raise NotImplementedError


class Recorder(MessagesServer):
    """Keeps the tools of the main agent and of its subagent."""

    def __init__(self) -> None:
        super().__init__()
        self.tools: dict[str, list[dict[str, Any]]] = {}

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The content blocks that answer a request."""
        first, *later = body.get("messages") or [{}]
        tools = body.get("tools") or []
        names = {tool.get("name") for tool in tools}
        starter = next((name for name in ("Task", "Agent") if name in names), None)
        if SUBAGENT in json.dumps(first):
            self.tools.setdefault("subagent", tools)
        elif PROMPT in json.dumps([first, *later]) and names & {"Bash", "ToolSearch"}:  # not the program's own
            self.tools.setdefault("main", tools)
            if starter and "tool_result" not in json.dumps(later):
                call = {"description": "Say hello", "prompt": SUBAGENT, "subagent_type": "general-purpose"}
                return [{"type": "tool_use", "id": "toolu_recorded_1", "name": starter, "input": call}]
        return [{"type": "text", "text": "Hello."}]


class MessagesHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MessagesServer

    def do_HEAD(self) -> None:
        self._send(b"", "application/json")

    def do_GET(self) -> None:
        self._send(b"{}", "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if "count_tokens" in self.path:
            self._send(b'{"input_tokens": 10}', "application/json")
        elif "/v1/messages" not in self.path:
            self._send(b"{}", "application/json")
        else:
            self._message(self.server.answer(body), body)

    def _message(self, blocks: list[dict[str, Any]], body: dict[str, Any]) -> None:
        stop = "tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn"
        usage = self.server.usage
        message = {
            "id": self.server.message_id(body),
            "type": "message",
            "role": "assistant",
            "model": body.get("model"),
            "usage": usage,
        }
        if not body.get("stream"):
            self._send(
                json.dumps({**message, "content": blocks, "stop_reason": stop}).encode(), "application/json"
            )
            return
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
        ]
        for index, block in enumerate(blocks):
            if block["type"] == "text":
                start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                start = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events += [
                {"type": "content_block_start", "index": index, "content_block": start},
                {"type": "content_block_delta", "index": index, "delta": delta},
                {"type": "content_block_stop", "index": index},
            ]
        events += [
            {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": usage},
            {"type": "message_stop"},
        ]
        stream = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        self._send(stream.encode(), "text/event-stream")

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the program's requests are no news."""


def install(version: str, directory: Path) -> Path:
    """The program of a version, installed under `directory` where it is not there yet."""
    program = directory / version / "node_modules/.bin/claude"
    if not program.exists():
        (directory / version).mkdir(parents=True, exist_ok=True)
        command = [
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--silent",
            "--prefix",
            ".",
            f"{PACKAGE}@{version}",
        ]
        subprocess.run(command, cwd=directory / version, check=True)
    return program


def environment(home: Path, work: Path, version: str, server: MessagesServer) -> dict[str, str]:
    """The environment of a program in an empty home, where nothing is asked that a new user is asked."""
    settings = {
        "hasCompletedOnboarding": True,
        "lastOnboardingVersion": version,
        "theme": "dark",
        "bypassPermissionsModeAccepted": True,
        "hasTrustDialogHooksAccepted": True,
        "projects": {
            str(work): {
                "hasTrustDialogAccepted": True,
                "hasCompletedProjectOnboarding": True,
                "allowedTools": [],
            }
        },
    }
    for path in (home / ".claude.json", home / ".claude/.claude.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(settings))
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "IS_SANDBOX": "1",
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "ANTHROPIC_AUTH_TOKEN": "recording",
        "CLAUDE_CONFIG_DIR": str(home / ".claude"),
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def record(program: Path, version: str, model: str, mode: str) -> dict[str, list[dict[str, Any]]]:
    """The tools of the main agent ("main") and of a subagent ("subagent") in a mode."""
    server = Recorder()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="record-tools-", ignore_cleanup_errors=True) as home:
        work = Path(home, "work")
        work.mkdir()
        env = environment(Path(home), work, version, server) | MODES[mode]
        command = [str(program), "--model", model]
        if mode == "print":
            command += ["-p", PROMPT, "--output-format", "json"]
        _in_terminal(command, env, work, server, typed="" if mode == "print" else PROMPT)
    server.shutdown()
    return server.tools


def _in_terminal(command: list[str], env: dict[str, str], work: Path, server: Recorder, typed: str) -> None:
    """Run a program in a terminal until both lists of tools are there, it ends, or `_TIMEOUT_S` passed."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(work)
        os.execvpe(command[0], command, env)
    begun, seen, at, sent = time.monotonic(), b"", 0, 0.0
    try:
        while time.monotonic() - begun < _TIMEOUT_S and len(server.tools) < 2:
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    seen += os.read(terminal, 65536)
                except OSError:
                    break  # it ended
            # The text first, and the key in a moment of its own, or it would be taken for a pasted line.
            quiet = time.monotonic() - max(begun + 3, sent)
            if typed and not server.tools and quiet > 2:
                os.write(terminal, (typed.encode(), b"\r")[at % 2])
                at, sent = at + 1, time.monotonic()
        if "main" not in server.tools:
            print(re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", seen)[-1500:].decode(errors="replace"), file=sys.stderr)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


class Table:
    """The file of the table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.definitions: list[dict[str, Any]] = []
        self.versions: dict[str, Any] = {}
        if path.exists():
            stored = json.loads(lzma.decompress(path.read_bytes()))
            self.definitions, self.versions = stored["definitions"], stored["versions"]

    def put(self, version: str, recorded: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
        """Add what was recorded of a version, and write the file. A mode like another one is left out."""
        modes: dict[str, Any] = {}
        for mode, tools in recorded.items():
            lists = {who: [self._place(tool) for tool in some if _is_tool(tool)] for who, some in tools.items()}
            if lists not in modes.values():
                modes[mode] = lists
        self.versions[version] = modes
        in_order = sorted(self.versions, key=lambda each: tuple(map(int, each.split("."))))
        table = {"definitions": self.definitions, "versions": {each: self.versions[each] for each in in_order}}
        self.path.write_bytes(lzma.compress(json.dumps(table, ensure_ascii=False).encode(), preset=9))

    def _place(self, tool: dict[str, Any]) -> int:
        text = json.dumps({key: tool[key] for key in ("name", "description", "input_schema") if key in tool})
        now = datetime.now(UTC)
        text = text.replace(f"{now:%Y-%m-%d}", DATE).replace(f"{now:%B %Y}", MONTH)
        definition = json.loads(text)
        if definition not in self.definitions:
            self.definitions.append(definition)
        return self.definitions.index(definition)


def _is_tool(tool: dict[str, Any]) -> bool:
    """Whether it is a tool that a model can call; one stands for those that are yet to be searched for."""
    return tool.get("name") != "DeferredToolPlaceholder"


def main() -> None:
    """Record, in a namespace without a network, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("installed", type=Path)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.isolated:
        for version in options.versions:
            install(version, options.installed.resolve())
        inner = 'ip link set lo up && exec "$@"'
        again = [sys.executable, __file__, *sys.argv[1:], "--isolated"]
        sys.exit(
            subprocess.run(["unshare", "--net", "--map-root-user", "sh", "-c", inner, "sh", *again]).returncode
        )
    table = Table(options.output)
    for version in options.versions:
        program = options.installed.resolve() / version / "node_modules/.bin/claude"
        recorded = {mode: record(program, version, options.model, mode) for mode in MODES}
        if missing := [mode for mode, tools in recorded.items() if "main" not in tools]:
            sys.exit(
                f"{version}: no request with tools came in the modes {', '.join(missing)}; see its screen above"
            )
        table.put(version, recorded)
        print(
            version,
            {mode: {who: len(some) for who, some in by.items()} for mode, by in recorded.items()},
            flush=True,
        )


if __name__ == "__main__":
    main()
