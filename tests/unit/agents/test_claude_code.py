"""How an agent's end is judged, and what the shell agent gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.agents.base import GATEWAY_SOCKET, AgentJob, ShellAgent
from understudy.agents.claude_code import (
    ClaudeCode,
    _events,
    _outcome_of,
    _require_mcp_servers,
    _require_tools,
    session_logs,
)
from understudy.errors import AgentError, ConfigError
from understudy.sandbox.base import Completed, Mount, SandboxSpec
from understudy.sandbox.unsafe import UnsafeSandboxes


def ended(*events: object, code: int | None = 0, stderr: bytes = b"", timed_out: bool = False) -> Completed:
    stdout = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    return Completed(code, stdout, stderr, 1.0, timed_out=timed_out)


RESULT = {"type": "result", "subtype": "success", "is_error": False, "result": "done"}


@pytest.mark.parametrize(
    ("completed", "outcome", "expected_text"),
    [
        (ended({"type": "system"}, RESULT), "completed", ""),
        (ended({**RESULT, "subtype": "error_max_turns", "is_error": True}, code=1), "max_turns", ""),
        (ended({**RESULT, "is_error": True, "result": "API Error: 529"}, code=1), "crashed", "API Error: 529"),
        (ended({**RESULT, "subtype": "error_during_execution", "errors": ["boom"]}), "crashed", "done"),
        (ended({"type": "system"}, code=-9, stderr=b"Killed"), "crashed", "exit code -9 and no result: Killed"),
        (ended(code=1), "crashed", "nothing on stderr"),
        (ended(RESULT, code=None, timed_out=True), "timeout", "stopped after 1 s"),
        (ended(["not", "an", "event"], RESULT, 7), "completed", ""),
        (
            Completed(0, b'{"type": "result", "result": "\xff"}\n{"type": "x", "y": ' + b"[" * 5000, b"", 1.0),
            "crashed",
            "",
        ),
    ],
)
def test_how_claude_code_ended(completed: Completed, outcome: str, expected_text: str):
    actual, message = _outcome_of(completed, [*_events(completed.stdout)])
    assert actual == outcome
    assert expected_text in message


SESSION = "605d56aa-b833-4041-a132-722493eea45b"


@pytest.mark.parametrize(
    ("ruin", "session_id"),
    [
        ("rm -r projects", SESSION),
        ("rm -r projects; echo x > projects", SESSION),
        ("rm projects/tree/*.jsonl", SESSION),
        ("rm projects/tree/*.jsonl; mkfifo projects/tree/$0.jsonl", SESSION),
        ("true", "../tree"),
        ("true", ""),
    ],
)
async def test_an_agent_that_ruins_its_log_loses_only_that(tmp_path: Path, ruin: str, session_id: str):
    (tmp_path / "tree").mkdir()
    sandbox = await UnsafeSandboxes().open(SandboxSpec(tmp_path / "tree"))
    try:
        await sandbox.write(f"projects/tree/{SESSION}.jsonl", b"1\n")
        await sandbox.run(["sh", "-c", ruin, SESSION], timeout_s=5)
        assert await session_logs(sandbox, f"{sandbox.workdir}/projects", session_id) == {}
    finally:
        await sandbox.close()


async def test_the_logs_of_subagents_are_kept_by_any_name(tmp_path: Path):
    (tmp_path / "tree").mkdir()
    sandbox = await UnsafeSandboxes().open(SandboxSpec(tmp_path / "tree"))
    try:
        await sandbox.write("projects/other/x.jsonl", b"other\n")
        await sandbox.write(f"projects/tree/{SESSION}.jsonl", b"2\n")
        subagent = f"mkdir projects/tree/{SESSION} && echo 1 > projects/tree/{SESSION}/caf$(printf '\\351')"
        await sandbox.run(["sh", "-c", subagent], timeout_s=5)
        logs = await session_logs(sandbox, f"{sandbox.workdir}/projects", SESSION)
        assert logs == {f"session/{SESSION}.jsonl": b"2\n", f"session/{SESSION}/caf?": b"1\n"}
    finally:
        await sandbox.close()


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        ({"mcp_config": '{"servers": {}}'}, "missing required field `mcpServers`"),
        ({"mcp_config": '{"mcpServers": {"web": {"url": "http://host"}}}'}, "missing required field `command`"),
        (
            {"settings": '{"permissions": {"deny": "Bash"}}'},
            "Expected `array`, got `str` - at `$.permissions.deny`",
        ),
    ],
)
def test_what_claude_code_would_leave_out_is_refused(options: dict[str, str], expected_text: str):
    with pytest.raises(ConfigError) as error:
        ClaudeCode(**options)
    assert expected_text in str(error.value)


def test_an_mcp_server_that_did_not_start_is_named_with_its_last_words():
    events = ended({"type": "system", "mcp_servers": [{"name": x, "status": x} for x in ("connected", "failed")]})
    log = b'1 [DEBUG] MCP server "failed": Starting\n2 [ERROR] MCP server "failed" Connection failed: gone\n'
    with pytest.raises(AgentError, match=r'start: failed; .*says: MCP server "failed" Connection failed: gone$'):
        _require_mcp_servers(_events(events.stdout), log)


def test_tools_that_were_asked_for_and_are_not_offered_are_an_error():
    """Claude Code ignores them: some are offered in other modes only, others were in earlier versions."""
    asked = ("Read", "Agent", "MultiEdit")
    events = list(_events(ended({"type": "system", "subtype": "init", "tools": ["Task", "Read", "Edit"]}).stdout))
    with pytest.raises(AgentError, match=r"does not offer MultiEdit in this mode; it offers Agent, Edit, Read: "):
        _require_tools(events, asked)
    _require_tools(events, asked[:2])
    _require_tools([], asked)


async def test_the_shell_agent_gets_the_instruction_the_key_and_the_socket(tmp_path: Path):
    (tmp_path / "tree").mkdir()
    socket = tmp_path / "gateway.sock"
    socket.touch()
    spec = SandboxSpec(tmp_path / "tree", mounts=(Mount(socket, GATEWAY_SOCKET),))
    sandbox = await UnsafeSandboxes().open(spec)
    try:
        names = "$UNDERSTUDY_API_KEY $UNDERSTUDY_MODEL $UNDERSTUDY_GATEWAY_SOCKET $CONDA_PREFIX"
        command = f'cat > said; echo "{names}"; exit $CODE'
        named = {"instruction": "-n mend\n", "key": "sk-1", "model": "m", "small_model": "s"}
        job = AgentJob(**named, max_turns=3, timeout_s=10, env={"CONDA_PREFIX": "/env"})
        result = await ShellAgent(command.replace("$CODE", "0")).run(sandbox, job)
        assert (result.outcome, result.exit_code) == ("completed", 0)
        assert result.logs["stdout.txt"].decode().split() == ["sk-1", "m", sandbox.locate(GATEWAY_SOCKET), "/env"]
        assert await sandbox.read("said") == b"-n mend\n"
        result = await ShellAgent(command.replace("$CODE", "5")).run(sandbox, job)
        assert (result.outcome, result.exit_code) == ("crashed", 5)
        assert "exit code 5" in result.message
    finally:
        await sandbox.close()


def test_a_shell_agent_without_a_command_says_so():
    with pytest.raises(ConfigError, match="--agent-command"):
        ShellAgent().mounts()
