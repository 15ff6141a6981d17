"""The driver of the Agent Client Protocol before scripted agents, and how agents are named on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.agents import acp_driver
from understudy.agents.acp import AcpAgent
from understudy.agents.registry import make_agent
from understudy.errors import ConfigError

AGENT = """
import json, sys

def send(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

print("a banner that is no message", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    method, id_ = asked.get("method"), asked.get("id")
    if method is None:
        send({"method": "session/update", "params": {"answer": asked}})
        continue
    %s
"""
ORDINARY = """
    if method == "initialize":
        send({"id": id_, "result": {"protocolVersion": 1, "authMethods": [{"id": "x-api-key"}]}})
    elif method == "session/new":
        send({"id": id_, "result": {"sessionId": asked["params"]["cwd"]}})
    else:
        send({"method": "session/update", "params": {"prompt": asked["params"]["prompt"]}})
        send({"id": 7, "method": "session/request_permission", "params": {"options": [
            {"optionId": "no", "kind": "reject_once"}, {"optionId": "yes", "kind": "allow_once"}]}})
        send({"id": 8, "method": "fs/read_text_file", "params": {}})
        for _ in range(2):
            send({"method": "session/update", "params": {"answer": json.loads(sys.stdin.readline())}})
        send({"id": id_, "result": {"stopReason": "end_turn"}})
"""
MODES = """
    if method == "initialize":
        send({"id": id_, "result": {"protocolVersion": 1}})
    elif method == "session/new":
        modes = {"currentModeId": %r, "availableModes": [{"id": mode} for mode in %r]}
        send({"id": id_, "result": {"sessionId": "s", "modes": modes}})
        chosen = "unchanged"
    elif method == "session/set_mode":
        chosen = asked["params"]["modeId"]
        send({"id": id_, "result": {}})
    else:
        send({"id": id_, "result": {"stopReason": chosen}})
"""
LOGIN = """
    if method == "initialize":
        send({"id": id_, "result": {"protocolVersion": 1, "authMethods": [{"id": "browser"}%s]}})
    elif method == "authenticate":
        login = asked["params"]["methodId"]
        send({"id": id_, "result": {}})
    elif method == "session/new" and "login" not in globals():
        send({"id": id_, "error": {"code": -32000, "message": "login"}})
    elif method == "session/new":
        send({"id": id_, "result": {"sessionId": "s"}})
    else:
        send({"id": id_, "result": {"stopReason": login}})
"""


def driven(behaviour: str, directory: Path, prompt: str = "Mend it.") -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the lines of the driver of an agent with this behaviour."""
    script = AGENT % behaviour.strip()
    driver_input = {"argv": [sys.executable, "-I", "-S", "-c", script], "prompt": prompt}
    command = [sys.executable, "-I", "-S", acp_driver.__file__]
    done = subprocess.run(
        command, input=json.dumps(driver_input).encode(), stdout=subprocess.PIPE, cwd=directory, check=False
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_session_with_a_prompt_and_permissions(tmp_path: Path) -> None:
    code, lines = driven(ORDINARY, tmp_path, prompt="Mend\n'it'.")
    assert (code, lines[-1]) == (0, {"type": "result", "stopReason": "end_turn"})
    messages = [line["message"] for line in lines[:-1]]
    sessions = [message["result"]["sessionId"] for message in messages if "sessionId" in message.get("result", {})]
    assert sessions == [str(tmp_path)]
    updates = [message["params"] for message in messages if message.get("method") == "session/update"]
    assert updates[0] == {"prompt": [{"type": "text", "text": "Mend\n'it'."}]}
    permission, refused = (update["answer"] for update in updates[1:])
    assert permission["result"] == {"outcome": {"outcome": "selected", "optionId": "yes"}}
    assert refused["error"]["code"] == acp_driver.METHOD_NOT_FOUND


def test_a_login_by_key_is_made_and_any_other_is_an_error(tmp_path: Path) -> None:
    code, lines = driven(LOGIN % ', {"id": "some-api-key"}', tmp_path)
    assert (code, lines[-1]) == (0, {"type": "result", "stopReason": "some-api-key"})
    code, lines = driven(LOGIN % "", tmp_path)
    assert code == 1
    assert lines[-1]["type"] == "error"
    assert "the agent requires a login (it offers: browser), expected an API key" in lines[-1]["message"]


@pytest.mark.parametrize(
    ("current", "modes", "chosen"),
    [
        ("auto", ["default", "plan", "auto", "bypassPermissions"], "bypassPermissions"),
        ("auto", ["default", "acceptEdits", "auto"], "default"),
        ("default", ["plan", "default", "yolo"], "yolo"),
        ("read-only", ["read-only", "auto", "full-access"], "full-access"),
        ("yolo", ["default", "yolo"], "unchanged"),
        ("code", ["ask", "code"], "unchanged"),
    ],
)
def test_the_session_asks_no_model_for_permission(
    current: str, modes: list[str], chosen: str, tmp_path: Path
) -> None:
    code, lines = driven(MODES % (current, modes), tmp_path)
    assert (code, lines[-1]) == (0, {"type": "result", "stopReason": chosen})


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("sys.exit(3)", "it ended with exit code 3 before it responded to initialize"),
        ("import os; os.kill(os.getpid(), 9)", "it ended by signal 9 before it responded to initialize"),
        ('send({"id": id_, "result": {"protocolVersion": 2}})', "version 2 of the protocol, expected 1"),
        ('send({"id": id_, "error": {"code": 1, "message": "no", "data": {"why": "x"}}})', 'no {"why": "x"}'),
        ('send({"id": id_, "result": []})', "invalid response to initialize: 'list' object"),
        ('send({"id": id_, "result": {"protocolVersion": 1}})', "response to session/new: 'sessionId' is missing"),
    ],
)
def test_an_agent_that_does_not_keep_the_protocol_is_an_error(
    tmp_path: Path, behaviour: str, message: str
) -> None:
    code, lines = driven(behaviour, tmp_path)
    assert (code, lines[-1]["type"]) == (1, "error")
    assert message in lines[-1]["message"]


def test_what_an_agent_prints_beside_its_messages_goes_to_stderr(tmp_path: Path) -> None:
    script = "print('Please log in: run `x login`'); print('x' * 3_000_000); print('the end')"
    driver_input = json.dumps({"argv": [sys.executable, "-c", script], "prompt": "x"}).encode()
    command = [sys.executable, acp_driver.__file__]
    done = subprocess.run(command, input=driver_input, capture_output=True, cwd=tmp_path, check=False)
    assert json.loads(done.stdout)["message"] == (
        "it ended with exit code 0 before it responded to initialize; its log shows why"
    )
    assert (
        done.stderr.startswith(b"Please log in: run `x login`\n")
        and len(done.stderr) == acp_driver.OUTPUT_LIMIT_BYTES
    )


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    driver_input = json.dumps({"argv": ["/no/such/program"], "prompt": "x"}).encode()
    done = subprocess.run(
        [sys.executable, acp_driver.__file__],
        input=driver_input,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert "could not be started" in json.loads(done.stdout)["message"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("acp", {}, "a command is missing"),
        ("acp:", {}, "a command is missing"),
        ("acp:'x", {}, "quotation"),
        ("acp:x", {"tools": "read"}, "--tools: unsupported"),
        ("acp:x", {"system_prompt": "x"}, "--system-prompt: unsupported"),
        ("acp:claude-code --acp", {}, "does not speak the Agent Client Protocol; use --agent claude-code"),
        (
            "acp:gemini@1.0 --acp",
            {},
            "no version can be given, .* try another version with: understudy agents try",
        ),
        ("codex:x", {}, "only acp takes a command"),
        ("moon", {}, "unknown agent 'moon'; give one of: acp:COMMAND, claude-code, codex"),
    ],
)
def test_what_cannot_be_driven_is_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_agent(name, options)


def test_an_agent_is_named_by_its_command() -> None:
    assert isinstance(make_agent("acp:my-agent --acp", {}), AcpAgent)
