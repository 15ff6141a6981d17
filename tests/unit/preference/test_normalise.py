"""What makes two tool calls the same, in one form: spelling, defaults, paths, and hostile input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.ingest.trace import TurnAction, tool_call
from understudy.preference.normalise import (
    MAX_ARGUMENT_CHARACTERS,
    TOOLS,
    WorkingDirectory,
    canonical_command,
    canonical_path,
    has_unreadable_call,
    normalise_call,
    normalise_calls,
    normalise_named_call,
)

from support import example_count

HOME = WorkingDirectory("/home/me/project")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return tool_call("c1", name, arguments)


SAME = {
    "the order of keys": (
        call("Edit", file_path="a", old_string="x", new_string="y"),
        call("Edit", new_string="y", old_string="x", file_path="a"),
    ),
    "a whole number": (call("Read", file_path="a", limit=10), call("Read", file_path="a", limit=10.0)),
    "defaults": (call("Read", file_path="a"), call("Read", file_path="a", offset=1, limit=2000)),
    "nothing for nothing": (
        call("Grep", pattern="x"),
        call("Grep", pattern="x", path=None, output_mode="files_with_matches"),
    ),
    "what the CLI adds": (
        call("Edit", file_path="a", old_string="x", new_string="y"),
        call("Edit", file_path="a", old_string="x", new_string="y", replace_all=False),
    ),
    "prose for people": (
        call("Bash", command="ls"),
        call("Bash", command="ls", description="List files", timeout=5000),
    ),
    "a path in the project": (
        call("Read", file_path="/home/me/project/src/a.py"),
        call("Read", file_path="src/a.py"),
    ),
    "a dot and a slash": (call("LS", path="./src/"), call("LS", path="src")),
    "where it is anyway": (call("Glob", pattern="*.py", path="/home/me/project"), call("Glob", pattern="*.py")),
    "out and in again": (call("Read", file_path="../project/a.py"), call("Read", file_path="a.py")),
    "space in a command": (call("Bash", command="ls   -la  "), call("Bash", command="ls -la")),
    "going where it is": (
        call("Bash", command="cd /home/me/project && pytest -q"),
        call("Bash", command="pytest -q"),
    ),
    "quotes": (call("Bash", command="grep 'foo' \"a.py\""), call("Bash", command="grep foo a.py")),
    "a comment": (call("Bash", command="# run them\npytest"), call("Bash", command="pytest")),
    "a line break": (call("Bash", command="a\nb\n"), call("Bash", command="a; b")),
    "paths in a command": (call("Bash", command="cat /home/me/project/a.py"), call("Bash", command="cat a.py")),
    "one tool, two agents": (call("Bash", command="ls"), call("execute_bash", command="ls")),
    "a command as words": (call("shell", command=["bash", "-lc", "ls -l"]), call("Bash", command="ls -l")),
    "space at line ends": (
        call("Write", file_path="a", content="x  \ny\n"),
        call("Write", file_path="a", content="x\r\ny"),
    ),
    "another name": (call("Task", prompt="p", description="d"), call("Agent", prompt="p")),
    "a list of one edit": (
        call("MultiEdit", file_path="a", edits=[{"old_string": "x", "new_string": "y"}]),
        call("Edit", file_path="a", old_string="x", new_string="y"),
    ),
    "no arguments": (
        {"function": {"name": "CronList", "arguments": ""}},
        {"function": {"name": "CronList", "arguments": "{}"}},
    ),
}

OTHER = {
    "another file": (call("Read", file_path="a"), call("Read", file_path="b")),
    "another part": (call("Read", file_path="a", offset=50), call("Read", file_path="a")),
    "true and one": (call("X", a=True), call("X", a=1)),
    "a number and its text": (call("X", a="1"), call("X", a=1)),
    "indentation": (
        call("Edit", file_path="a", old_string="x", new_string=" y"),
        call("Edit", file_path="a", old_string="x", new_string="y"),
    ),
    "all of them": (
        call("Edit", file_path="a", old_string="x", new_string="y", replace_all=True),
        call("Edit", file_path="a", old_string="x", new_string="y"),
    ),
    "quotes that matter": (call("Bash", command="ls '*.py'"), call("Bash", command="ls *.py")),
    "a number before a file": (call("Bash", command="echo 2 >f"), call("Bash", command="echo 2>f")),
    "both and either": (call("Bash", command="a && b"), call("Bash", command="a || b")),
    "what a document says": (call("Bash", command="cat <<E\na  b\nE"), call("Bash", command="cat <<E\na b\nE")),
    "going elsewhere": (call("Bash", command="cd /etc && ls"), call("Bash", command="ls")),
    "in the background": (call("Bash", command="a", run_in_background=True), call("Bash", command="a")),
    "a word in quotes": (call("Bash", command='git commit -m "a b"'), call("Bash", command="git commit -m a b")),
    "another tool": (call("Read", file_path="a"), call("NotebookRead", notebook_path="a")),
    "a broken call": (
        call("X", __unparsedToolInput={"raw": "{", "len": 1}),
        call("X", __unparsedToolInput={"raw": "[", "len": 1}),
    ),
    "no JSON": ({"function": {"name": "X", "arguments": "{"}}, {"function": {"name": "X", "arguments": "{}"}}),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_in_substance(name: str):
    one, other = SAME[name]
    assert normalise_call(one, HOME) == normalise_call(other, HOME)
    assert normalise_call(one, HOME).readable


@pytest.mark.parametrize("name", OTHER)
def test_not_the_same_in_substance(name: str):
    one, other = OTHER[name]
    assert normalise_call(one, HOME).key != normalise_call(other, HOME).key


def test_a_broken_call_is_unreadable_as_the_agent_keeps_it():
    stored = call("X", __unparsedToolInput={"raw": '{"a', "len": 3})
    assert has_unreadable_call(TurnAction(tool_calls=[stored]))
    assert normalise_call(stored) == normalise_call({"function": {"name": "X", "arguments": '{"a'}})


def test_windows_paths():
    home = WorkingDirectory("C:\\work\\project")
    assert normalise_call(call("Read", file_path="C:\\work\\project\\a\\b.py"), home) == normalise_call(
        call("Read", file_path="a/b.py"), home
    )


def test_calls_are_a_set_in_which_reading_twice_is_reading_once():
    read, run = call("Read", file_path="a"), call("Bash", command="date >> log")
    assert normalise_calls(TurnAction(tool_calls=[read, run])) == normalise_calls(
        TurnAction(tool_calls=[run, read, read])
    )
    assert normalise_calls(TurnAction(tool_calls=[run])) != normalise_calls(TurnAction(tool_calls=[run, run]))


def test_notes_count_only_alone():
    todo, run = call("TodoWrite", todos=[{"content": "a", "status": "pending"}]), call("Bash", command="ls")
    assert normalise_calls(TurnAction(tool_calls=[todo, run])) == normalise_calls(TurnAction(tool_calls=[run]))
    assert normalise_calls(TurnAction(tool_calls=[todo])) != ()


def test_arguments_that_cannot_be_read_are_told():
    for arguments in (
        "{",
        "[]",
        "1",
        '"x"',
        "{" * 5000,
        '{"a": ' * 2000 + "1" + "}" * 2000,
        "x" * (MAX_ARGUMENT_CHARACTERS + 1),
    ):
        action = TurnAction(
            tool_calls=[{"id": "c", "type": "function", "function": {"name": "X", "arguments": arguments}}]
        )
        assert has_unreadable_call(action), arguments[:20]
    assert not has_unreadable_call(TurnAction(tool_calls=[call("X", a=1)]))


def test_a_long_command_costs_no_more_than_its_length():
    for piece in ("$(", "'", '"', "\\", "<<", "(", "a ", "#", '"$(', "`", "${", "\r", "cd / && "):
        canonical_command(piece * (60_000 // len(piece)), "/")
    nested = "".join('"$(' for _ in range(10_000))
    assert canonical_command(nested) == nested


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PIECES = (
    "'",
    '"',
    "$(",
    ")",
    "`",
    "{",
    "${",
    "}",
    "a",
    "cd",
    "/p",
    " ",
    "\n",
    "\\",
    "<<",
    "EOF",
    ">",
    "&&",
    ";",
    "2",
    "#",
    "\u00a0",
    "\r",
    "|",
    "x=1",
    "*",
    "-",
    "/",
    "$'",
    "!",
    "do",
    "..",
    "é",
    "\x00",
)
commands = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
names = st.sampled_from([*TOOLS, "Unknown", "execute_bash", "Task"]) | st.text(max_size=10)
keys = st.sampled_from(
    [
        "command",
        "file_path",
        "path",
        "old_string",
        "new_string",
        "content",
        "limit",
        "offset",
        "edits",
        "todos",
        "-C",
    ]
)
arguments = st.dictionaries(keys | st.text(max_size=6), json_values | commands, max_size=5)
places = st.sampled_from([None, "/p", "/p/", "/", "C:\\p", "p", ""]).map(WorkingDirectory)


@given(names, arguments, places)
@settings(max_examples=example_count(150))
def test_the_one_form_is_its_own(name: str, given_arguments: dict[str, Any], place: WorkingDirectory):
    once = normalise_named_call(name, given_arguments, place)
    again = normalise_named_call(once.name, once.arguments, place)
    assert again.name == once.name
    assert again.key == once.key


@given(commands, st.sampled_from([None, "/p", "/"]))
@settings(max_examples=example_count(200))
def test_the_one_spelling_is_its_own(command: str, cwd: str | None):
    once = canonical_command(command, cwd)
    assert canonical_command(once, cwd) == once


@given(st.text(st.sampled_from("ab./~C:\\ "), max_size=14), st.sampled_from([None, "/a", "/", "C:\\a", "/a/b/"]))
@settings(max_examples=example_count(300))
def test_the_one_path_is_its_own(given_path: str, cwd: str | None):
    once = canonical_path(given_path, cwd)
    assert canonical_path(once, cwd) == once


@given(json_values, json_values)
def test_nothing_in_a_call_raises(function: Any, extra: Any):
    normalise_call({"function": function}, HOME)
    normalise_call({"function": {"name": extra, "arguments": function}}, HOME)
    normalise_call({"function": {"name": "Bash", "arguments": repr(function)}}, HOME)


@given(names, arguments)
def test_text_and_value_are_one(name: str, given_arguments: dict[str, Any]):
    try:
        text = json.dumps(given_arguments, allow_nan=False)
    except ValueError:
        return
    clean = json.loads(text)
    if normalise_named_call(name, text).readable:
        assert normalise_named_call(name, text) == normalise_named_call(name, clean)
