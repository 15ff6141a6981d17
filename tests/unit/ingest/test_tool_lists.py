"""The tools that states and exports have: of the log, of the agent's version, or inferred from calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from understudy.ingest.claude_code.tool_table import claude_tools
from understudy.ingest.tool_lists import ToolList, completed, names_of, tool_list
from understudy.ingest.trace import RequestShape, expand

from support.claude_log import Log, read


def call(call_id: str, arguments: str, name: str = "Bash") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def names(offered: ToolList) -> set[str]:
    return names_of(offered.tools or ())


def test_tools_are_inferred_from_calls():
    messages = [
        {"role": "assistant", "tool_calls": [call("a", '{"command": "ls", "n": 1}'), call("b", "no json")]},
        {"role": "assistant", "tool_calls": [call("c", '{"command": "x", "n": [1], "all": true}')]},
        {"role": "assistant", "tool_calls": [{"id": "d", "function": {"name": None}}, {"id": "e"}]},
        {"role": "assistant", "tool_calls": [{"id": "f", "function": "Bash"}]},
    ]
    offered = tool_list(messages)
    (tool,) = offered.tools or ()
    assert tool["function"] == {
        "name": "Bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "n": {}, "all": {"type": "boolean"}},
            "required": ["command", "n"],
            "additionalProperties": True,
        },
    }
    assert (offered.source, offered.version, offered.inferred) == ("inferred", None, ("Bash",))


def test_a_call_refused_as_an_unknown_tool_adds_no_inferred_tool():
    refused = "<tool_use_error>Error: No such tool available: Fly</tool_use_error>"
    messages = [
        {"role": "assistant", "tool_calls": [call("a", "{}", "Fly"), call("b", "{}", "mcp__db__query")]},
        {"role": "tool", "tool_call_id": "a", "content": refused},
        {"role": "tool", "tool_call_id": "b", "content": "rows"},
    ]
    assert tool_list(messages).inferred == ("mcp__db__query",)
    assert tool_list(messages[:0]) == ToolList()


@pytest.mark.parametrize(
    ("version", "recorded", "starter"),
    [
        ("1.0.60", "1.0.69", "Task"),
        ("2.0.77", "2.0.76", "Task"),
        ("2.1.64", "2.1.63", "Agent"),
        ("9.9.9", None, "Agent"),
    ],
)
def test_the_tools_of_claude_code_are_those_of_the_nearest_recorded_version(version, recorded, starter):
    tools = claude_tools(version, ["Bash"])
    assert tools is not None
    assert recorded in (None, tools.version)
    called = {tool["function"]["name"]: tool["function"] for tool in tools.tools}
    assert {starter, "Bash", "Edit", "Read", "Write"} <= called.keys()
    assert called["Bash"]["parameters"]["properties"]["command"]["type"] == "string"
    assert all(tool["function"]["description"] for tool in tools.tools)


def test_an_invalid_version_has_no_recorded_tools():
    assert claude_tools("unknown", ["Bash"]) is None
    assert tool_list([], version="unknown") == ToolList()


def test_of_a_versions_lists_the_one_with_the_called_tools_is_taken():
    def has(called: list[str]) -> set[str]:
        tools = claude_tools("2.1.63", called)
        assert tools is not None
        return names_of(tools.tools)

    terminal, printed = has(["TaskCreate"]), has(["TodoWrite"])
    assert "TaskCreate" in terminal and "TodoWrite" not in terminal
    assert "TodoWrite" in printed and "TaskCreate" not in printed
    assert {"MultiEdit", "LS"} <= has(["MultiEdit", "LS"]), (
        "tools of other versions that were called are there too"
    )
    subagent = claude_tools("2.1.63", ["Bash"], subagent=True)
    assert subagent is not None and "Agent" not in names_of(subagent.tools)


def test_the_date_in_a_tool_description_is_that_of_the_session():
    def search(date: str | None) -> str:
        tools = claude_tools("2.0.76", [], date=date)
        assert tools is not None
        return next(each for each in tools.tools if each["function"]["name"] == "WebSearch")["function"][
            "description"
        ]

    assert "2025-12-31" in search("2025-12-31T10:00:00Z")
    assert "{{" not in search(None) + search('9999-99-99", "x": "')


def test_a_session_of_claude_code_has_its_versions_tools_and_those_of_mcp_servers():
    log = Log(version="2.1.150")
    log.user("go")
    log.assistant("m1", ("t1", "Bash", {"command": "ls"}))
    log.result("t1", "a.py")
    log.assistant("m2", ("t2", "mcp__db__query", {"sql": "x", "n": 1}))
    log.result("t2", "rows")
    log.assistant("m3", "Done.")
    (trace,) = read(log)
    first, *others = expand(trace)
    assert (first.tools_source, first.tools_version, first.tools_inferred) == (
        "inferred",
        "2.1.150",
        ("mcp__db__query",),
    )
    assert all(other.tools == first.tools for other in others)
    inferred = next(tool for tool in first.tools or () if tool["function"]["name"] == "mcp__db__query")
    assert inferred["function"]["parameters"]["properties"] == {"sql": {"type": "string"}, "n": {"type": "number"}}
    assert {"Bash", "Read", "Edit"} <= names_of(first.tools or ())


def test_tools_of_the_log_are_left_as_they_are():
    log = Log()
    log.user("go")
    log.assistant("m1", ("t1", "Bash"))
    (trace,) = read(log)
    logged = [{"type": "function", "function": {"name": "Other", "parameters": {}}}]
    trace.shape = RequestShape(None, logged)
    (state,) = expand(trace)
    assert (state.tools, state.tools_source, state.tools_version) == (logged, "logged", None)
    assert completed(ToolList.of(state), [{"tool_calls": [call("x", "{}", "More")]}]).tools == logged


def test_a_tool_list_is_completed_with_called_tools_that_it_lacks():
    offered = tool_list([{"role": "assistant", "tool_calls": [call("a", "{}")]}])
    more = completed(offered, [{"tool_calls": [call("b", json.dumps({"x": 1}), "More")]}])
    assert (names(more), more.source, more.inferred) == ({"Bash", "More"}, "inferred", ("Bash", "More"))
    assert completed(offered, [{"tool_calls": [call("b", "{}")]}]) is offered
