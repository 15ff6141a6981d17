"""Claude Code's own options, formats and extensions: what they ask for reaches the model, what comes back fits."""

from __future__ import annotations

import base64
import json

import pytest

from fakes.turns import Turn, bash, say, tool
from support.cli import MODEL, WAYS, CliRun, Rig, red_square
from support.conformance import Behaviour, Check, play

# Thirty starts of the CLI, for options that few changes touch.
pytestmark = [pytest.mark.e2e, pytest.mark.services]

DONE = say("Done.")

MCP = """
import json, sys

SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}
TOOL = {"name": "lookup", "description": "d", "inputSchema": SCHEMA}

def answer(method, params):
    if method == "initialize":
        server = {"name": "demo", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [TOOL]}
    key = params["arguments"]["key"]
    return {"content": [{"type": "text", "text": "value of " + key}], "isError": key == "bad"}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = answer(asked["method"], asked.get("params"))
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
MCP_CONFIG = json.dumps({"mcpServers": {"demo": {"command": "python3", "args": ["mcp.py"]}}})


def hook(command: str, matcher: str = "") -> list[dict[str, object]]:
    return [{"matcher": matcher, "hooks": [{"type": "command", "command": command}]}]


CONTEXT = json.dumps({"hookSpecificOutput": {"hookEventName": "PostToolUse", "additionalContext": "POST CONTEXT"}})
HOOKS = {
    "SessionStart": hook("echo SESSION CONTEXT"),
    "PreToolUse": hook("echo no-bash >&2; exit 2", "Bash"),
    "PostToolUse": hook(f"echo '{CONTEXT}'", "Read"),
    "Stop": hook("test -e stopped || { touch stopped; echo not yet >&2; exit 2; }"),
}
SCHEMA = '{"type":"object","properties":{"answer":{"type":"integer"}},"required":["answer"]}'


def hooked(rig: Rig, run: CliRun) -> None:
    assert not (rig.work / "denied").exists()
    request = json.dumps(run.model_requests[-1])
    for hook_output in ("SESSION CONTEXT", "no-bash", "POST CONTEXT", "not yet"):
        assert hook_output in request


def structured(_: Rig, run: CliRun) -> None:
    assert run.result["structured_output"] == {"answer": 3}


def tools_offered(*names: str) -> Check:
    def check(_: Rig, run: CliRun) -> None:
        offered = [tool["function"]["name"] for tool in run.model_requests[0].get("tools", ())]
        assert sorted(offered) == sorted(names)

    return check


def holds(*texts: str) -> Check:
    """The last request to the model has these words in it."""

    def check(_: Rig, run: CliRun) -> None:
        request = json.dumps(run.model_requests[-1], ensure_ascii=False)
        for text in texts:
            assert text in request

    return check


def sent(**fields: object) -> Check:
    """What the CLI asked for."""

    def check(_: Rig, run: CliRun) -> None:
        assert {name: run.requests[0].get(name) for name in fields} == fields

    return check


def counted(rig: Rig, run: CliRun) -> None:
    """The model's server counted, and was asked for nothing else."""
    assert rig.model.counted
    assert run.calls == []


def searched_in_vain(_: Rig, run: CliRun) -> None:
    """The search within the search is refused once, and no model is asked to make results up."""
    assert run.statuses == ["ok", "error", "ok"]
    assert [node.role for node in run.nodes] == ["main", "auxiliary", "main"]
    assert "'web_search'" in run.tool_results()[0]
    assert "Unable to verify if domain example.com is safe" in run.tool_results()[1]


BEHAVIOURS = [
    Behaviour(name="json", format="json", script=[DONE], like="15_json"),
    Behaviour(
        name="structured output",
        format="json",
        script=[say("plain text, not structured"), say("", tool("StructuredOutput", answer=3))],
        flags=["--json-schema", SCHEMA],
        result='{"answer":3}',
        check=structured,
        like="12_json_schema",
    ),
    Behaviour(
        name="turns run out",
        script=[say("", bash("echo a"))] * 2,
        flags=["--max-turns", "2"],
        result="",
        code=1,
        like="13_max_turns",
    ),
    Behaviour(
        name="plan mode",
        script=[say("", tool("Write", file_path="x.txt", content="x")), DONE],
        flags=["--permission-mode", "plan"],
        permissions=True,
        check=holds("while in plan mode"),
    ),
    Behaviour(
        name="allowed tools",
        script=[say("", bash("echo ok"), tool("Write", file_path="x.txt", content="x")), DONE],
        flags=["--allowedTools", "Bash(echo *)"],
        permissions=True,
        check=holds("but you haven't granted it yet"),
        like="12_allowed",
    ),
    Behaviour(
        name="fewer tools",
        script=[say("", tool("Glob", pattern="*"), tool("Grep", pattern="x")), DONE],
        flags=["--tools", "Bash,Edit,Read,Write,Glob,Grep"],
        check=tools_offered("Bash", "Edit", "Read", "Write", "Glob", "Grep"),
        like="12_tools",
    ),
    Behaviour(name="no tools", script=[DONE], flags=["--tools", ""], check=tools_offered(), like="12_notools"),
    Behaviour(
        name="a longer system prompt",
        script=[DONE],
        flags=["--append-system-prompt", "OWL-MARK 🦉"],
        check=holds("OWL-MARK 🦉"),
    ),
    Behaviour(
        name="another system prompt",
        script=[DONE],
        flags=["--system-prompt", "You are a terse coder."],
        check=holds("You are a terse coder."),
        like="12_sysprompt",
    ),
    Behaviour(
        name="effort",
        script=[DONE],
        flags=["--effort", "low"],
        check=sent(output_config={"effort": "low"}, thinking={"type": "adaptive"}),
    ),
    Behaviour(
        name="thinking off",
        model="claude-sonnet-4-5",
        script=[DONE],
        env={"MAX_THINKING_TOKENS": "0"},
        check=(sent(thinking={"type": "disabled"}), holds('"enable_thinking": false')),
        like="22_thinking_off",
    ),
    Behaviour(
        name="thinking with a budget",
        model="claude-sonnet-4-5",
        script=[Turn(thinking="hm", text="Done.")],
        check=sent(thinking={"type": "enabled", "budget_tokens": 31_999}),
    ),
    Behaviour(
        name="a body, headers and metadata of one's own",
        script=[DONE],
        env={
            "CLAUDE_CODE_EXTRA_BODY": '{"temperature":0.7,"top_k":20}',
            "ANTHROPIC_CUSTOM_HEADERS": "x-rollout-id: r-1",
            "CLAUDE_CODE_EXTRA_METADATA": '{"rollout":"r-1"}',
        },
        check=holds('"temperature": 0.7', '"top_k": 20'),
        like="22_extra_body",
    ),
    Behaviour(name="bare", script=[say("", bash("echo bare")), DONE], flags=["--bare"], check=holds("bare")),
    Behaviour(
        name="tokens counted for /context",
        prompt="/context",
        result="## Context Usage",
        check=counted,
    ),
    Behaviour(
        name="CLAUDE.md and a command",
        prompt="/hello owl",
        script=[DONE],
        files={".claude/commands/hello.md": "Say hello to $ARGUMENTS.", "CLAUDE.md": "HOUSE-RULE"},
        check=holds("Say hello to owl.", "HOUSE-RULE"),
    ),
    Behaviour(
        name="skill",
        script=[say("", tool("Skill", skill="demo")), DONE],
        files={".claude/skills/demo/SKILL.md": "---\nname: demo\ndescription: a demo\n---\nDEMO-SKILL body"},
        check=holds("DEMO-SKILL body"),
        like="31_skill",
    ),
    Behaviour(
        name="hooks",
        script=[say("", bash("touch denied")), say("", tool("Read", file_path="a.txt")), say("early"), DONE],
        files={"a.txt": "hello"},
        flags=["--settings", json.dumps({"hooks": HOOKS})],
        check=hooked,
    ),
    Behaviour(
        name="MCP server",
        script=[say("", tool("mcp__demo__lookup", key="k")), say("", tool("mcp__demo__lookup", key="bad")), DONE],
        files={"mcp.py": MCP},
        flags=["--strict-mcp-config", "--mcp-config", MCP_CONFIG],
        check=holds("value of k", "value of bad"),
        like="09_mcp",
    ),
    Behaviour(
        name="web search and fetch",
        script=[
            say("", tool("WebSearch", query="x y z"), tool("WebFetch", url="https://example.com/a", prompt="p")),
            DONE,
        ],
        check=searched_in_vain,
        like="21_webfetch",
    ),
]


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)
async def test_an_option(rig: Rig, behaviour: Behaviour) -> None:
    await play(rig, behaviour)


async def test_plain_text(rig: Rig) -> None:
    rig.script(say("hello text"))
    assert (await rig.claude(format=None)).out == "hello text\n"


@pytest.mark.parametrize("rig", WAYS, indirect=True, ids=str)
async def test_partial_messages_say_what_the_whole_message_says(rig: Rig) -> None:
    turn = Turn(thinking="thinking here", text="hello partial", tools=[bash("echo a")])
    run = await play(
        rig,
        Behaviour(name="partial", script=[turn, DONE], flags=["--include-partial-messages"], like="15_partial"),
    )
    deltas = [e["event"]["delta"] for e in run.events if e["type"] == "stream_event" and "delta" in e["event"]]
    assert "".join(delta.get("text", "") for delta in deltas) == "hello partialDone."
    assert "".join(delta.get("thinking", "") for delta in deltas) == "thinking here"
    assert "".join(delta.get("partial_json", "") for delta in deltas) == turn.tools[0].arguments


async def test_an_image_from_the_user(rig: Rig) -> None:
    rig.script(DONE)
    data = base64.b64encode(red_square()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    process = await rig.start(None, "--input-format", "stream-json", stdin=True)
    await process.say([{"type": "text", "text": "what is this?"}, {"type": "image", "source": source}])
    run = await process.end()
    assert data in json.dumps(run.model_requests)


MORE = pytest.mark.services
NAMES = [
    ("high", "big"),
    ("org/Model-7B:latest", "big"),
    ("claude-sonnet-4-5[1m]", "big"),
    ("low", "small"),
    ("claude-haiku-4-5", "small"),
    *(pytest.param(name, "big", marks=MORE) for name in ("qwen3-coder", "gpt-4o", "opus")),
    pytest.param("haiku", "small", marks=MORE),
]


@pytest.mark.parametrize(("model", "served"), NAMES)
async def test_a_model_of_any_name(rig: Rig, model: str, served: str) -> None:
    run = await play(rig, Behaviour(name="name", model=model, script=[DONE]))
    assert [body["model"] for body in run.model_requests] == [served]
    assert run.calls[0].backend_model == served
    assert list(run.result["modelUsage"]) == [run.calls[0].requested_model] or model.endswith("]")


async def test_the_key_may_be_an_api_key(rig: Rig) -> None:
    rig.script(DONE)
    run = await rig.claude(env={"ANTHROPIC_API_KEY": rig.key, "ANTHROPIC_AUTH_TOKEN": ""})
    assert run.result["result"] == "Done."
    assert run.calls[0].requested_model == MODEL
