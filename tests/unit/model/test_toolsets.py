"""How scripted policies call the tools of each agent, and read their results."""

from __future__ import annotations

import json

import pytest

from understudy.model.protocol import ModelTool, ModelToolFunction
from understudy.model.scripted.changes import Edit
from understudy.model.scripted.toolsets import Toolset, toolset_of

OFFERED = {
    "claude": ("Bash", "Read", "Edit", "Write", "Task"),
    "codex": ("exec_command", "write_stdin", "apply_patch", "view_image"),
    "gemini": ("glob", "read_file", "replace", "run_shell_command", "write_file"),
    "mini": ("bash",),
    "opencode": ("bash", "edit", "glob", "grep", "read", "task", "write"),
    "openhands": ("terminal", "file_editor", "task_tracker", "finish", "think"),
    "pi": ("read", "bash", "edit", "write"),
    "qwen": ("agent", "edit", "glob", "read_file", "run_shell_command", "write_file"),
}
RESULTS = {
    "claude": "     7\ta = 1\n     8\t\n",
    "codex": "Chunk ID: e5\nWall time: 0 s\nProcess exited with code 0\nOutput:\n     7\ta = 1\n     8\t\n",
    "gemini": "\nIMPORTANT: The file content has been truncated.\nStatus: Showing lines 7-8 of 9 total lines.\n"
    "Action: To read more, …\n\n--- FILE CONTENT (truncated) ---\na = 1\n",
    "mini": json.dumps({"returncode": 0, "output": "     7\ta = 1\n     8\t\n"}),
    "opencode": "<path>/w/f</path>\n<type>file</type>\n<content>\n7: a = 1\n8: \n\n(End of file)\n</content>",
    "openhands": "Here's the result of running `cat -n` on /w/f:\n     7\ta = 1\n     8\t\n",
    "pi": "a = 1\n\n\n[47 more lines in file. Use offset=9 to continue.]",
    "qwen": "Showing lines 7-8 of 9 total lines.\n\n---\n\na = 1\n\n",
}
FAILED = {
    "claude": ("Error: no", "<tool_use_error>no"),
    "codex": (
        "apply_patch verification failed: no",
        "Chunk ID: e\nWall time: 1\nProcess exited with code 1\nOutput:\n",
    ),
    "gemini": (
        "Error: Failed to edit, Expected 1 occurrence but found 2 for old_string in file: /w/f.",
        "<untrusted_context>\nOutput: error: no\nExit Code: 128\nProcess Group PGID: 20\n</untrusted_context>",
    ),
    "mini": (json.dumps({"returncode": 1, "output": ""}), "no JSON"),
    "opencode": ("Could not find oldString in the file.", "error: patch failed: f:1"),
    "openhands": (
        "[An error occurred during execution.]\n\nNo replacement was performed, `a` did not appear in /w/f.",
        "Error validating tool 'terminal': 1 validation error for TerminalAction",
        "Tool 'nope' not found. Available: ['terminal']",
        "error: no\n[Current working directory: /workspace]\n[Command finished with exit code 128]",
    ),
    "pi": (
        "Found 2 occurrences of the text in /w/f. The text must be unique.",
        "ENOENT: no such file or directory, access '/w/f'",
        "error: no\n\n\nCommand exited with code 128",
    ),
    "qwen": ("Failed to edit, 0 occurrences found", "Command: false\nDirectory: x\nExit Code: 1\n"),
}
EDIT = Edit("f", 7, ((" ", "a = 1\n"), ("-", "b\n"), ("+", "c\n")))


def tools(agent: str) -> Toolset:
    path = {"opencode": "filePath", "pi": "path"}.get(agent, "file_path")
    parameters = {"type": "object", "properties": {path: {"type": "string"}}}
    functions = (ModelToolFunction(name=name, parameters=parameters) for name in OFFERED[agent])
    return toolset_of(ModelTool(function=function) for function in functions)


@pytest.mark.parametrize("agent", OFFERED)
def test_file_lines_and_failures_are_parsed_from_each_agent_s_tool_results(agent: str) -> None:
    toolset = tools(agent)
    assert toolset.can_edit and toolset.has_shell
    assert toolset.lines_read(RESULTS[agent], 7) == {7: "a = 1", 8: ""}
    assert not toolset.failed(RESULTS[agent])
    assert all(map(toolset.failed, FAILED[agent]))


@pytest.mark.parametrize("agent", OFFERED)
def test_calls_use_only_offered_tools(agent: str) -> None:
    toolset = tools(agent)
    calls = [
        toolset.run("true", "try"),
        toolset.read("/w/f", 7, 2),
        toolset.edit("/w/f", EDIT, "a = 1\nb", "a = 1\nc"),
        *toolset.finish(),
        *([toolset.write("/w/new", "x\n")] if toolset.can_write() else []),
    ]
    assert {call.name for call in calls} <= set(OFFERED[agent])
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    assert bool(toolset.finish()) == (agent == "mini")


def test_codex_patches_include_the_unchanged_lines_as_context() -> None:
    (patch,) = json.loads(tools("codex").edit("/w/f", EDIT, "a\nb\nc", "a\nB\nc").arguments).values()
    lines = "*** Begin Patch", "*** Update File: /w/f", "@@", " a", "-b", "+B", " c", "*** End Patch"
    assert patch == "\n".join(lines)
    (patch,) = json.loads(tools("codex").edit("/w/f", EDIT, "a\na", "a\na\na").arguments).values()
    assert patch.count("\n+a") == 1 and patch.count("\n a") == 2


def test_qwen_reads_use_zero_based_offsets() -> None:
    assert json.loads(tools("qwen").read("/w/f", 7, 2).arguments) == {"file_path": "/w/f", "offset": 6, "limit": 2}
    assert tools("qwen").lines_read("x = 1\n", 1) == {1: "x = 1"}


@pytest.mark.parametrize(
    ("agent", "result"),
    [
        ("gemini", "Error: Failed to edit, Expected 1 occurrence but found 2 for old_string in file: /w/f."),
        ("opencode", "Found multiple matches for oldString."),
        ("openhands", "[An error]\n\nNo replacement was performed. Multiple occurrences of old_str `a` in lines"),
        ("pi", "Found 2 occurrences of the text in /w/f. The text must be unique."),
        ("qwen", "Failed to edit, found 2 occurrences"),
    ],
)
def test_an_ambiguous_edit_is_recognised_from_the_tool_result(agent: str, result: str) -> None:
    assert tools(agent).ambiguous(result)
    assert not tools(agent).ambiguous("Error: Could not find an exact match")


def test_gemini_reads_are_given_first_and_last_lines() -> None:
    read = json.loads(tools("gemini").read("/w/f", 7, 2).arguments)
    assert read == {"file_path": "/w/f", "start_line": 7, "end_line": 8}
