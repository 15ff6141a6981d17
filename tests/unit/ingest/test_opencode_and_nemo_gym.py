"""Exports of OpenCode and rollouts of NeMo Gym."""

from __future__ import annotations

import json
import shutil
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from understudy.ingest.trace import TraceParent, expand

from support.ingest import only, read


def user(text: str, **info: Any) -> dict[str, Any]:
    return {
        "info": {"id": f"msg_{text}", "sessionID": "ses_1", "role": "user", **info},
        "parts": [{"type": "text", "text": text}],
    }


def assistant(number: int, *parts: dict[str, Any], **info: Any) -> dict[str, Any]:
    head = {"id": f"msg_a{number}", "sessionID": "ses_1", "role": "assistant", "modelID": "claude-sonnet-4-5"}
    return {"info": head | {"time": {"created": 1_760_000_000_000}, **info}, "parts": list(parts)}


def tool(number: int, name: str, **state: Any) -> dict[str, Any]:
    return {"type": "tool", "callID": f"toolu_{number}", "tool": name, "state": {"input": {"a": number}} | state}


SESSION = {
    "info": {
        "id": "ses_1",
        "projectID": "p",
        "directory": "/home/dev/app",
        "version": "1.1.34",
        "parentID": "ses_0",
    },
    "messages": [
        user("fix it"),
        assistant(
            1,
            {"type": "step-start"},
            {"type": "reasoning", "text": "I look first."},
            {"type": "text", "text": "Looking."},
            tool(1, "read", status="completed", output="a = 1"),
            tool(2, "bash", status="error", error="exit 1"),
            {"type": "step-finish", "reason": "tool-calls"},
            {"type": "step-start"},
            tool(3, "read", status="completed", output="long ago", time={"compacted": 5}),
            tool(4, "bash", status="running"),
            finish="stop",
        ),
        user("and now?"),
        assistant(2, {"type": "text", "text": "Done."}, finish="stop"),
    ],
}


def store(root: Path, session: dict[str, Any]) -> None:
    """Write a session as OpenCode stores it: a file for each session, message and part."""

    def put(key: str, value: dict[str, Any]) -> None:
        path = root / "storage" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2))

    info = session["info"]
    put(f"session/{info['projectID']}/{info['id']}.json", info)
    for at, message in enumerate(session["messages"]):
        own = f"msg_{at:04d}"
        put(f"message/{info['id']}/{own}.json", message["info"] | {"id": own, "sessionID": info["id"]})
        for number, part in enumerate(message["parts"]):
            ids = {"id": f"prt_{number:04d}", "messageID": own, "sessionID": info["id"]}
            put(f"part/{own}/prt_{number:04d}.json", part | ids)


def test_sessions_in_opencodes_storage_are_read_as_their_exports_are(tmp_path: Path) -> None:
    (tmp_path / "session.json").write_text(json.dumps(SESSION))
    _, exported = only(tmp_path / "session.json")
    other = SESSION | {"info": SESSION["info"] | {"id": "ses_2"}}
    store(tmp_path / "data/opencode", SESSION)
    trace, states = only(tmp_path / "data/opencode")
    assert (trace.session_id, trace.project, trace.version) == ("ses_1", "/home/dev/app", "1.1.34")
    assert [(state.messages, state.student_action) for state in states] == [
        (state.messages, state.student_action) for state in exported
    ]
    store(tmp_path / "two/opencode", other)
    assert only(tmp_path / "two/opencode")[0].session_id == "ses_2"


def put_database(directory: Path, *sessions: dict[str, Any]) -> sqlite3.Connection:
    """Write sessions as later versions of OpenCode do; the connection has the newest ones in the `-wal` file."""
    directory.mkdir(parents=True)
    database = sqlite3.connect(directory / "opencode.db", isolation_level=None)
    database.executescript(
        "PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = 0;"
        "CREATE TABLE session (id TEXT, parent_id TEXT, directory TEXT, version TEXT, time_created INT);"
        "CREATE TABLE message (id TEXT PRIMARY KEY, session_id TEXT, data TEXT);"
        "CREATE TABLE part (id TEXT PRIMARY KEY, message_id TEXT, session_id TEXT, data TEXT)"
    )
    for session in sessions:
        info = session["info"]
        row = (info["id"], info["parentID"], info["directory"], info["version"], 1)
        database.execute("INSERT INTO session VALUES (?, ?, ?, ?, ?)", row)
        for at, message in enumerate(session["messages"]):
            own = f"msg_{info['id']}_{at:04d}"
            database.execute(
                "INSERT INTO message VALUES (?, ?, ?)", (own, info["id"], json.dumps(message["info"]))
            )
            for number, part in enumerate(message["parts"]):
                row = (f"prt_{own}_{number:04d}", own, info["id"], json.dumps(part))
                database.execute("INSERT INTO part VALUES (?, ?, ?, ?)", row)
    return database


@pytest.mark.parametrize("how", ["open", "closed", "copied while open", "in an archive"])
def test_sessions_in_opencodes_database_are_read_as_their_exports_are(tmp_path: Path, how: str) -> None:
    (tmp_path / "session.json").write_text(json.dumps(SESSION))
    _, exported = only(tmp_path / "session.json")
    other = SESSION | {"info": SESSION["info"] | {"id": "ses_2"}}
    source = tmp_path / "data"
    with closing(put_database(source, SESSION, other)) as database:
        if how == "copied while open":
            source = tmp_path / "copy"
            source.mkdir()
            for name in ("opencode.db", "opencode.db-wal"):
                shutil.copyfile(tmp_path / "data" / name, source / name)
        if how == "in an archive":
            source = tmp_path / "logs.zip"
            with zipfile.ZipFile(source, "w") as archive:
                for name in ("opencode.db", "opencode.db-wal"):
                    archive.write(tmp_path / "data" / name, f"backup/{name}")
        if how == "closed":
            database.close()
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        first, second = read(source)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    assert (first.session_id, first.project, first.version) == ("ses_1", "/home/dev/app", "1.1.34")
    assert (second.session_id, second.parent) == ("ses_2", TraceParent("ses_0"))
    for trace in (first, second):
        assert [(state.messages, state.student_action) for state in expand(trace, system=None)] == [
            (state.messages, state.student_action) for state in exported
        ]


def test_a_damaged_row_of_opencodes_database_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    with closing(put_database(tmp_path / "data", SESSION)) as database:
        database.execute("UPDATE part SET data = '{\"type\":' WHERE id LIKE '%0001_0002'")
        database.execute("UPDATE message SET data = 7 WHERE id LIKE '%0003'")
        database.execute("INSERT INTO part VALUES ('p', 'msg_none', 'ses_1', '{}')")
    (trace,) = read(tmp_path / "data")
    assert len(trace.turns) == 2
    assert trace.losses == {
        "bad_json": 1,
        "not_an_object": 1,
        "part_without_message": 1,
        "result_missing": 1,
        "unknown_part:None": 1,
        "unknown_role": 1,
    }


@pytest.mark.parametrize("schema", ["", "CREATE VIEW message AS SELECT 1; CREATE TABLE session (id)"])
def test_a_database_of_another_program_is_not_read(tmp_path: Path, schema: str) -> None:
    with closing(sqlite3.connect(tmp_path / "opencode.db")) as database:
        database.executescript("CREATE TABLE part (id);" + schema)
    with pytest.raises(OSError, match="expected the tables session, message and part"):
        read(tmp_path)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
def test_each_step_of_an_opencode_message_is_a_response(tmp_path: Path, as_list: bool, indent: int | None) -> None:
    (tmp_path / "session.json").write_text(json.dumps(SESSION["messages"] if as_list else SESSION, indent=indent))
    trace, (first, second, last) = only(tmp_path / "session.json")
    assert (trace.format, trace.session_id) == ("opencode", "ses_1")
    if not as_list:
        assert (trace.project, trace.version, trace.parent) == ("/home/dev/app", "1.1.34", TraceParent("ses_0"))
    assert first.student_action.thinking == "I look first." and first.student_action.content == "Looking."
    assert [call["function"]["name"] for call in first.student_action.tool_calls] == ["read", "bash"]
    assert first.messages == [{"role": "user", "content": "fix it"}]
    assert second.messages[-2:] == [
        {"role": "tool", "content": "a = 1", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "exit 1", "tool_call_id": "toolu_2"},
    ]
    contents = [message["content"] for message in last.messages if message["role"] == "tool"]
    assert contents[2:] == ["[Old tool result content cleared]", "[Tool execution was interrupted]"]
    assert (last.source_family, last.fidelity, last.student_action.content) == ("claude", "exact", "Done.")
    assert trace.losses == {"result_missing": 1}


def test_opencode_continues_from_a_compaction_summary_and_notes_unlogged_reminders(tmp_path: Path) -> None:
    compaction = {"info": {"id": "c", "role": "user", "sessionID": "ses_1"}, "parts": [{"type": "compaction"}]}
    messages = [
        user("one"),
        assistant(1, {"type": "text", "text": "first"}, finish="tool-calls"),
        user("queued"),
        assistant(2, {"type": "text", "text": "second"}, finish="stop"),
        compaction,
        assistant(3, {"type": "text", "text": "We did one."}, summary=True, finish="stop"),
        user("two"),
        assistant(4, {"type": "text", "text": "third"}, finish="stop"),
    ]
    (tmp_path / "x.json").write_text(json.dumps({**SESSION, "messages": messages}))
    trace, states = only(tmp_path / "x.json")
    assert [state.student_action.content for state in states] == ["first", "second", "third"]
    assert [message["content"] for message in states[-1].messages] == [
        "What did we do so far?",
        "We did one.",
        "two",
    ]
    assert [state.fidelity for state in states] == ["exact", "repaired", "repaired"]
    assert states[1].notes == ("reminders_not_logged",) and {state.branch for state in states} == {"active"}
    assert trace.losses == {"summary_left_out": 1}


def test_opencode_keeps_the_last_messages_behind_a_compaction_summary(tmp_path: Path) -> None:
    def compaction(start: str) -> dict[str, Any]:
        part = {"type": "compaction", "auto": True, "tail_start_id": start}
        return {"info": {"id": f"c_{start}", "role": "user", "sessionID": "ses_1"}, "parts": [part]}

    summary = {"type": "text", "text": "We did one."}
    messages = [
        user("one"),
        assistant(1, tool(1, "bash", status="completed", output="1"), finish="tool-calls"),
        assistant(2, {"type": "text", "text": "first"}, finish="stop"),
        compaction("msg_a2"),
        assistant(3, summary, summary=True, finish="stop"),
        user("two"),
        assistant(4, {"type": "text", "text": "second"}, tool(2, "bash", status="completed", output="2")),
        compaction("msg_two"),
        assistant(5, summary, summary=True, finish="stop"),
        user("three"),
        assistant(6, {"type": "text", "text": "third"}, finish="stop"),
    ]
    (tmp_path / "x.json").write_text(json.dumps({**SESSION, "messages": messages}))
    _, states = only(tmp_path / "x.json")
    assert [state.student_action.content for state in states] == [None, "first", "second", "third"]
    asked = "What did we do so far?"
    assert [message["content"] for message in states[2].messages] == [asked, "We did one.\n\nfirst", "two"]
    assert [message["content"] for message in states[3].messages] == [
        asked, "We did one.", "two", "second", "2", "three",
    ]  # fmt: skip


PYTHON = {"type": "function", "name": "python", "parameters": {"type": "object"}, "strict": True}


def rollout(number: int, **row: Any) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I try."}]}
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hard."}]},
        message,
        {"type": "function_call", "call_id": "call_1", "name": "python", "arguments": '{"code": "1"}'},
        {"type": "function_call", "call_id": "call_2", "name": "python", "arguments": '{"code": "2"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "1"},
        {"type": "function_call_output", "call_id": "call_2", "output": "2"},
        {**message, "content": [{"type": "output_text", "text": "It is 9."}]},
    ]
    params = {
        "input": [{"role": "system", "content": "Be exact."}, {"role": "user", "content": f"task {number}"}],
        "tools": [PYTHON],
    }
    response = {"id": f"resp_{number:032x}", "object": "response", "model": "gpt-4.1", "output": output}
    return {"responses_create_params": params, "response": response, "reward": 0.5, "task_id": "t"} | row


def test_a_rollout_of_nemo_gym_has_its_turns_tools_and_reward(tmp_path: Path) -> None:
    rows = [rollout(1), {**rollout(2), "response": None}, rollout(3)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other = read(tmp_path / "rollouts.jsonl")
    assert one.session_id == f"resp_{1:032x}" != other.session_id and other.losses == {"no_response": 1}
    for row in rows[::2]:
        row["response"]["id"] = "x"
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len({trace.session_id for trace in read(tmp_path / "same.jsonl")}) == 2, "an id that is none"
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]))
    trace, (first, last) = only(tmp_path / "one.jsonl")
    assert trace.format == "nemo-gym" and trace.outcome is not None and not trace.losses
    assert (trace.outcome.reward, trace.outcome.task) == (0.5, "t")
    assert trace.shape.system == "Be exact." and first.tools_source == "logged"
    assert trace.shape.tools == [
        {"type": "function", "function": {name: PYTHON[name] for name in ("name", "parameters", "strict")}}
    ]
    assert (first.student_action.content, first.student_action.thinking) == ("I try.", "Hard.")
    assert [call["id"] for call in first.student_action.tool_calls] == ["call_1", "call_2"]
    assert [message["content"] for message in last.messages if message["role"] == "tool"] == ["1", "2"]
    assert (last.student_action.content, last.source_family) == ("It is 9.", "gpt")


def test_samples_of_a_task_whose_agent_names_them_after_it_are_rollouts_of_their_own(tmp_path: Path) -> None:
    rows = [rollout(1), rollout(3)]
    for number, row in enumerate(rows):
        row["response"]["id"] = "anyswe-astropy__astropy-12907"
        row["response"]["output"][0]["summary"] = [{"type": "summary_text", "text": f"Attempt {number}."}]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other = read(tmp_path / "rollouts.jsonl")
    assert one.trace_id != other.trace_id
    assert one.former_ids == ("nemo-gym:anyswe-astropy__astropy-12907",)


def test_a_nemo_gym_rollout_without_its_prompt_is_noted_as_repaired(tmp_path: Path) -> None:
    row = rollout(1)
    row["responses_create_params"]["input"] = []
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    _, states = only(tmp_path / "one.jsonl")
    assert {(state.fidelity, state.notes) for state in states} == {("repaired", ("prompt_not_logged",))}


def test_of_transitions_that_repeat_the_earlier_ones_the_last_is_the_rollout(tmp_path: Path) -> None:
    row = rollout(1)
    whole = [{"role": "user", "type": "message", "content": "What is 3 * 3?"}, *row["response"]["output"]]
    row["responses_create_params"]["input"] = []
    row["response"]["tools"] = row["responses_create_params"].pop("tools")
    row["response"]["output"] = [whole[:-1], whole]
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    trace, states = only(tmp_path / "one.jsonl")
    assert [state.fidelity for state in states] == ["exact", "exact"] and not trace.losses
    assert states[0].messages[-1] == {"role": "user", "content": "What is 3 * 3?"}
    assert states[-1].student_action.content == "It is 9." and states[-1].tools_source == "logged"
    row["response"]["output"] = [whole[1:], whole]
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    assert only(tmp_path / "one.jsonl")[0].losses == {"transition_left_out": 1}
