"""What is particular to each log format: branches, compactions, requests that were really sent."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from understudy.ingest.formats.base import repository
from understudy.ingest.trace import TraceParent, expand

from support.ingest import DATA, golden, only, read


def test_openhands_puts_the_calls_of_one_answer_together() -> None:
    trace, (first, second, last) = only(DATA / "openhands_v0.json")
    assert [call["id"] for call in first.student_action.tool_calls] == ["call_a", "call_b"]
    assert second.messages[-2]["content"].endswith(
        "[Current working directory: /workspace]\n[Python interpreter: /usr/bin/python]\n"
        "[Command finished with exit code 0]"
    )
    assert last.message_id == "chatcmpl-3" and last.source_family == "claude"
    assert trace.shape.tools and trace.version == "0.54.0"


def test_openhands_without_function_calls_is_repaired(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "go"}},
        {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls", "thought": "look"}},
        {"id": 2, "source": "agent", "cause": 1, "observation": "run", "content": "a.py", "extras": {}},
        {"id": 3, "source": "agent", "action": "finish", "args": {"thought": "done"}},
    ]
    (tmp_path / "log.json").write_text(json.dumps(events))
    _, (first, last) = only(tmp_path / "log.json")
    assert first.fidelity == "repaired" and first.notes == ("call_made_of_action",)
    assert json.loads(first.student_action.tool_calls[0]["function"]["arguments"]) == {"command": "ls"}
    assert last.messages[-1] == {"role": "tool", "content": "a.py", "tool_call_id": "event_1"}
    assert last.student_action.content == "done" and last.fidelity == "exact"


def test_openhands_v1_shows_a_summary_in_place_of_what_was_condensed() -> None:
    trace, states = only(DATA / "openhands_v1")
    assert [len(state.student_action.tool_calls) for state in states] == [2, 1, 1, 0]
    assert "Action rejected" not in str(states[2].messages)
    assert states[2].messages[-1]["content"][-1]["text"] == "The typo is in greet.py; the user wants sed."
    assert {state.branch for state in states} == {"active"}
    assert trace.project == "/work/greet"


def test_swe_agent_takes_the_request_that_was_sent() -> None:
    _, (first, second) = only(DATA / "sweagent.traj")
    assert (first.fidelity, second.fidelity) == ("exact", "ledger")
    assert second.messages[-1]["content"].startswith("Old environment output")
    assert first.student_action.thinking == "Look before the leap."
    assert (first.branch, second.branch) == ("active", "active")


def test_swe_agent_requests_share_their_history_in_memory(tmp_path: Path) -> None:
    turns = 40
    history: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    steps: list[dict[str, Any]] = []
    for n in range(turns):
        steps.append({"query": list(history), "response": f"r{n}", "action": f"a{n}", "observation": "o"})
        history.append({"role": "assistant", "content": f"r{n}", "action": f"a{n}"})
        history.append({"role": "user", "content": f"o{n}"})
    (tmp_path / "x.traj").write_text(json.dumps({"environment": "x", "trajectory": steps, "history": history}))
    trace, states = only(tmp_path / "x.traj")
    assert len(states) == turns and {state.fidelity for state in states} == {"ledger"}
    assert len(trace.nodes) <= 5 * turns
    assert [message["content"] for message in states[-1].messages[-2:]] == [f"r{turns - 2}", f"o{turns - 2}"]


def test_atif_leaves_out_steps_that_are_no_training_targets() -> None:
    trace, sub = read(DATA / "atif.json")
    assert [turn.message_id for turn in trace.turns] == ["step-4", "step-6"]
    assert [turn.model for turn in trace.turns] == ["claude-opus-4-5", "gemini-3-pro"]
    last = list(expand(trace))[-1]
    assert {"role": "user", "content": "formatted"} in last.messages
    assert sub.parent == TraceParent("sess-1", "c2", 1) and sub.turns[0].model == "glm-5"


@pytest.mark.parametrize("version", ["1.5", "1.6", "1.7", "1.8"])
def test_atif_of_every_version_is_read(tmp_path: Path, version: str) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "go"},
        {"step_id": 2, "source": "agent", "message": "gone", "reasoning_content": "hm"},
    ]
    log = {
        "schema_version": f"ATIF-v{version}",
        "session_id": "s",
        "agent": {"name": "a", "version": "1"},
        "steps": steps,
    }
    (tmp_path / "trajectory.json").write_text(json.dumps(log))
    trace, (state,) = only(tmp_path / "trajectory.json")
    assert not trace.losses and state.student_action.thinking == "hm"


def test_atif_written_by_the_atif_package_reads_back_unchanged(tmp_path: Path) -> None:
    atif: Any = pytest.importorskip("atif")
    written = atif.Trajectory.model_validate(json.loads((DATA / "atif.json").read_text()))
    (tmp_path / "atif.json").write_text(json.dumps(written.to_json_dict()))
    traces = [golden(trace) for trace in read(tmp_path / "atif.json")]
    assert traces == [golden(trace) for trace in read(DATA / "atif.json")]
    # The other way: what was read, written as ATIF, is valid and is read alike.
    trace = read(DATA / "atif.json")[0]
    state = list(expand(trace, system=None))[-1]
    steps: list[dict[str, Any]] = []
    for message in state.messages:
        if message["role"] == "tool":
            result = {"source_call_id": message["tool_call_id"], "content": message["content"]}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = {"assistant": "agent"}.get(message["role"], message["role"])
        content = message["content"] if isinstance(message["content"], str) else "(parts)"
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": content}
        if message.get("tool_calls"):
            step["tool_calls"] = [
                {
                    "tool_call_id": call["id"],
                    "function_name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                }
                for call in message["tool_calls"]
            ]
        steps.append(step)
    agent = {"name": "understudy", "version": "0"}
    again = atif.Trajectory.model_validate(
        {"schema_version": "ATIF-v1.8", "session_id": "x", "agent": agent, "steps": steps}
    )
    (tmp_path / "again.json").write_text(json.dumps(again.to_json_dict()))
    _, states = only(tmp_path / "again.json")
    made = [message for message in state.messages if message["role"] == "assistant"]
    assert [one.student_action.tool_calls for one in states] == [message.get("tool_calls", []) for message in made]


def test_codex_follows_rollback_and_compaction() -> None:
    trace, states = only(DATA / "codex")
    assert [state.branch for state in states] == ["active", "active", "active", "branch", "active"]
    assert "French" not in str(states[-1].messages)
    assert states[-1].messages[-1]["content"].endswith("Thanks. Anything else?")
    assert states[1].student_action.thinking_hidden and not states[0].student_action.thinking_hidden
    assert trace.losses == {"call_left_out:web_search_call": 1}


def test_codex_logs_without_envelopes_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "old", "timestamp": "2025-08-01T00:00:00Z", "instructions": None, "git": {}},
        {"record_type": "state"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c", "id": None},
        {"type": "function_call_output", "call_id": "c", "output": '{"output":""}'},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "gone"}]},
    ]
    path = tmp_path / "rollout-2025-08-01T00-00-00-old.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace, states = only(path)
    assert trace.session_id == "old" and not trace.losses
    assert [state.student_action.content for state in states] == [None, "gone"]


def test_codex_with_a_summary_that_is_enciphered_is_lossy(tmp_path: Path) -> None:
    lines = (
        (DATA / "codex/sessions/2026/10/03/rollout-2026-10-03T09-00-00-019a-codex.jsonl").read_text().splitlines()
    )
    rows = [json.loads(line) for line in lines]
    for row in rows:
        if row["type"] == "compacted":
            row["payload"]["replacement_history"].append({"type": "compaction", "encrypted_content": "gA"})
    path = tmp_path / "rollout.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace, states = only(path)
    assert [state.fidelity for state in states] == ["exact"] * 4 + ["lossy"]
    assert trace.losses["hidden_summary"] == 1


def test_codex_summaries_of_its_own_compactions_are_no_turns(tmp_path: Path) -> None:
    """Codex 0.169 logs the summary before the compaction, but not the request for it."""

    def item(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    summary = "Another model made a summary of its thinking:\nx is read."
    replacement = [item("user", "Change x."), item("user", summary)]
    call = {"type": "function_call", "name": "exec_command", "arguments": "{}", "call_id": "c"}
    rows: list[tuple[str, dict[str, Any]]] = [
        ("session_meta", {"id": "s"}),
        ("world_state", {"full": True, "state": {}}),
        ("response_item", item("user", "Change x.")),
        ("response_item", call),
        ("token_usage_record", {"usage": {"input_tokens": 990_000}}),
        ("response_item", {"type": "function_call_output", "call_id": "c", "output": "x = 1"}),
        ("response_item", item("assistant", "x is read.")),
        ("compacted", {"message": summary, "replacement_history": replacement}),
        ("response_item", item("assistant", "x is mended.")),
        # before the next prompt
        ("response_item", item("assistant", "x is read.")),
        ("compacted", {"message": summary, "replacement_history": replacement}),
        ("response_item", item("user", "Go on.")),
        ("response_item", item("assistant", "Done.")),
    ]
    path = tmp_path / "rollout-2026-11-27T00-00-00-s.jsonl"
    lines = [{"timestamp": "2026-11-27T00:00:00Z", "type": kind, "payload": payload} for kind, payload in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace, states = only(path)
    assert [state.student_action.content for state in states] == [None, "x is mended.", "Done."]
    assert [state.messages[-1]["content"] for state in states] == [
        "Change x.",
        f"Change x.\n\n{summary}",
        f"Change x.\n\n{summary}\n\nGo on.",
    ]
    assert {state.fidelity for state in states} == {"exact"}
    assert trace.losses == {"summary_left_out": 2}


def test_codex_compaction_by_reference_and_the_first_versions(tmp_path: Path) -> None:
    def line(kind: str, payload: dict[str, Any]) -> str:
        return json.dumps({"timestamp": "2026-11-01T00:00:00Z", "type": kind, "payload": payload}) + "\n"

    prompt = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "gone"}]}
    entries: list[dict[str, Any]] = [
        {"type": "reference", "item_id": "msg-1"},
        {"type": "reference", "item_id": "nowhere"},
        {"type": "inline", "item": {**prompt, "content": "a summary"}},
    ]
    path = tmp_path / "rollout.jsonl"
    path.write_text(
        line("session_meta", {"id": "s", "parent_thread_id": "above"})
        + line("response_item", {**prompt, "id": "msg-1"})
        + line("response_item", answer)
        + line("compacted", {"message": "", "replacement_history_entries": entries})
        + line("response_item", answer)
    )
    trace, (_, last) = only(path)
    assert last.messages == [{"role": "user", "content": "go\n\na summary"}]
    assert trace.parent == TraceParent("above") and trace.losses["lost_reference"] == 1
    oldest = {"session": {"id": "t", "timestamp": "2025-05-01"}, "items": [prompt, answer]}
    (tmp_path / "rollout-2025-05-01-t.json").write_text(json.dumps(oldest, indent=2))
    trace, (state,) = only(tmp_path / "rollout-2025-05-01-t.json")
    assert trace.session_id == "t" and state.student_action.content == "gone" and not trace.losses


def test_gemini_results_of_every_shape(tmp_path: Path) -> None:
    results: list[Any] = [
        [{"functionResponse": {"response": {"error": "no targets"}}}],
        {"stdout": "plain"},
        "text",
        [{"functionResponse": {"id": "c3", "response": {"output": "mine"}}}, {"functionResponse": {"id": "c9"}}],
        [
            {"functionResponse": {"id": "c4", "response": {"output": "an image"}}},
            {"inlineData": {"mimeType": "image/png", "data": "AA"}},
        ],
    ]
    calls = [{"id": f"c{n}", "name": "tool", "args": {}, "result": result} for n, result in enumerate(results)]
    messages = [
        {"type": "user", "content": "go"},
        {"type": "gemini", "content": "", "thoughts": ["a plain thought"], "toolCalls": calls},
        {"type": "gemini", "content": "gone", "model": "gemini-3-pro"},
    ]
    path = tmp_path / "session.json"
    path.write_text(json.dumps({"sessionId": "s", "startTime": "2026", "messages": messages}))
    trace, (first, last) = only(path)
    assert first.student_action.thinking == "a plain thought" and not trace.losses
    assert [message["content"] for message in last.messages if message["role"] == "tool"] == [
        "no targets",
        '{"stdout":"plain"}',
        "text",
        "mine",
        [
            {"type": "text", "text": "an image"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        ],
    ]


@pytest.mark.parametrize("name", ["session.json", "session.jsonl", "full.jsonl.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_gemini_session_is_read_whatever_its_file_is_called(
    tmp_path: Path, name: str, indent: int | None
) -> None:
    messages = [
        {"id": "a", "type": "user", "content": "go"},
        {"id": "b", "type": "gemini", "content": "gone", "model": "gemini-3-pro"},
    ]
    text = json.dumps(
        {"sessionId": "s", "projectHash": "f", "startTime": "2026", "messages": messages}, indent=indent
    )
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    trace, (state,) = only(tmp_path / name)
    assert (trace.session_id, state.student_action.content) == ("s", "gone") and not trace.losses


def test_gemini_rewinds_are_branches_and_compressed_messages_are_replaced() -> None:
    trace, states = only(DATA / "gemini.jsonl")
    assert [(state.message_id, state.branch) for state in states] == [
        ("m3", "active"),
        ("m4", "active"),
        ("m6", "branch"),
        ("m8", "active"),
        ("m10", "active"),
    ]
    assert states[1].messages[-1] == {"role": "tool", "content": "print('helo')", "tool_call_id": "read_file-1"}
    assert "French" not in str(states[3].messages)
    assert [message["content"] for message in states[-1].messages] == [
        "<state>greet.py was mended</state>",
        "Got it.",
        "And now?",
    ]
    assert not trace.losses


def test_a_gemini_subagents_parent_is_the_session_of_its_directory(tmp_path: Path) -> None:
    lines = (DATA / "gemini.jsonl").read_text().replace('"kind": "main"', '"kind": "subagent"')
    path = tmp_path / "chats" / "above-1" / "sub.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(lines)
    assert only(path)[0].parent == TraceParent("above-1")
    assert only(DATA / "gemini.jsonl")[0].parent is None


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        ("django__django-10914", "django/django"),
        ("scikit-learn__scikit-learn-1234", "scikit-learn/scikit-learn"),
        ("oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc", "oauthlib/oauthlib"),
        ("0b01001001__spectree-64", "0b01001001/spectree"),
        ("sdispater__pendulum.a1b2c3d4", "sdispater/pendulum"),
        ("my-task", None),
        (None, None),
    ],
)
def test_the_repository_of_an_instance(instance: str | None, expected: str | None) -> None:
    assert repository(instance) == expected


def test_gemini_checkpoint(tmp_path: Path) -> None:
    contents: list[dict[str, Any]] = [
        {"role": "user", "parts": [{"text": "go"}]},
        {
            "role": "model",
            "parts": [{"text": "hm", "thought": True}, {"functionCall": {"id": "f", "name": "ls", "args": {}}}],
        },
        {
            "role": "user",
            "parts": [{"functionResponse": {"id": "f", "name": "ls", "response": {"output": "a.py"}}}],
        },
        {"role": "model", "parts": [{"text": "There is a.py."}]},
    ]
    (tmp_path / "checkpoint-x.json").write_text(json.dumps(contents))
    _, (first, last) = only(tmp_path / "checkpoint-x.json")
    assert first.student_action.thinking == "hm" and first.student_action.tool_calls[0]["id"] == "f"
    assert last.messages[-1] == {"role": "tool", "content": "a.py", "tool_call_id": "f"}


def test_aider_chats_are_separate_traces_and_model_changes_are_followed() -> None:
    first, second = read(DATA / "aider/.aider.chat.history.md")
    assert [turn.model for turn in first.turns] == ["deepseek/deepseek-chat", "gpt-4o"]
    assert first.trace_id != second.trace_id
    assert {turn.fidelity for turn in (*first.turns, *second.turns)} == {"lossy"}
    assert next(expand(second, system=None)).messages == [{"role": "user", "content": "what is here?"}]


def test_states_of_terminal_text_are_lossy_and_keep_calls_and_thinking() -> None:
    trace, states = only(DATA / "claude_terminal.txt")
    assert {state.fidelity for state in states} == {"lossy"}
    calls = [call["function"] for state in states for call in state.student_action.tool_calls]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("Read", {"file_path": "greet.py"}),
        ("Bash", {"command": "python greet.py"}),
        ("Edit", {"file_path": "greet.py"}),
    ]
    assert states[3].student_action.thinking == "The edit is small."
    assert states[2].student_action.content == "One letter is missing:\n\n- the l"
    assert (trace.version, trace.project, states[0].source_family) == ("2.1.34", "/home/dev/greet", "claude")


def test_terminal_text_with_colours_wrapped_calls_and_words_in_brackets(tmp_path: Path) -> None:
    transcript = (
        "\x1b[1m❯\x1b[0m find it\n\n"
        '⏺ Search(pattern: "set(Timer|Time), ", path:\n      "src/main")\n  ⎿  Found 1 file (ctrl+r to expand)\n\n'
        '⏺ Nothing (so far)\n\n⏺ pathfinder - definition (MCP)(uri: "file:///a.py", line: 0)\n'
        '  ⎿  {\n       "x": 1\n     }\n\n'
        "❯ /cost\n  ⎿  Total cost: $0.10\n"
    )
    (tmp_path / "copied.txt").write_text(transcript)
    trace, states = only(tmp_path / "copied.txt")
    calls = [call["function"] for state in states for call in state.student_action.tool_calls]
    assert [call["name"] for call in calls] == ["Search", "mcp__pathfinder__definition"]
    assert json.loads(calls[0]["arguments"]) == {"pattern": "set(Timer|Time), ", "path": "src/main"}
    assert states[1].student_action.content == "Nothing (so far)"
    assert trace.losses == {"folded": 1, "command_left_out": 1, "result_without_call": 1}


def test_terminal_text_of_early_versions_has_its_calls(tmp_path: Path) -> None:
    """Their calls end in an ellipsis, name their arguments, and show below a subagent what it did."""
    (tmp_path / "a.txt").write_text(
        "> look around\n\n"
        '\u23fa Read(file_path: "TODO.md")\u2026\n\u00a0 \u00a0 \u23bf \u00a0 # To do\n\n'
        '\u23fa Bash(git add -A && git commit -m "x (y)")\u2026\n  \u23bf \u00a0 [main 1a2b3c4] x\n\n'
        "\u23fa Call(Check the environment)\u2026\n  \u23bf \u00a0 Bash(python --version)\u2026\n"
        "  \u23bf \u00a0 Done (1 tool use)\n\n"
        '\u23fa Web Search("how to")\n  \u23bf \u00a0 Did 1 search in 6s\n\n\u23fa Done.\n'
    )
    trace, states = only(tmp_path / "a.txt")
    calls = [call["function"] for state in states for call in state.student_action.tool_calls]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("Read", {"file_path": "TODO.md"}),
        ("Bash", {"command": 'git add -A && git commit -m "x (y)"'}),
        ("Call", {"shown": "Check the environment"}),
        ("WebSearch", {"query": "how to"}),
    ]
    results = [message["content"] for message in states[-1].messages if message["role"] == "tool"]
    assert results[2] == "Bash(python --version)\u2026\nDone (1 tool use)"
    assert not trace.losses


def test_terminal_text_has_its_directory_its_first_command_and_the_names_of_tools(tmp_path: Path) -> None:
    transcript = (
        "╭──────────────────────────────────╮\n│ ✻ Welcome to Claude Code!        │\n"
        "│   /help for help, /status for your current setup  │\n│   cwd: /Users/dev/algo   │\n"
        "╰──────────────────────────────────╯\n\n"
        "> /init is analyzing your codebase…\n\n"
        "⏺ I look around.\n\n⏺ Update Todos\n  ⎿  ☐ Look\n     ☐ Write\n\n⏺ List(.)\n  ⎿  Listed 24 paths\n\n"
        "> /cost\n  ⎿  Total cost: $0.10\n\n> /clear\n\n> /review\n  ⎿  /review is running…\n\n⏺ Reviewed.\n"
    )
    (tmp_path / "copied.txt").write_text(transcript)
    trace, states = only(tmp_path / "copied.txt")
    assert trace.project == "/Users/dev/algo"
    calls = [call["function"] for state in states for call in state.student_action.tool_calls]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("TodoWrite", {}),
        ("LS", {"path": "."}),
    ]
    prompts = [message["content"] for message in states[-1].messages if message["role"] == "user"]
    assert prompts == ["/init is analyzing your codebase…", "/review"]
    assert trace.losses["command_left_out"] == 2 and {state.fidelity for state in states} == {"lossy"}


def test_rows_of_parquet_are_read_like_lines(tmp_path: Path) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

    for log in ("nebius_openhands.jsonl", "swesmith.jsonl"):
        rows = [json.loads(line) for line in (DATA / log).read_text().splitlines()]
        for row in rows:
            if isinstance(row.get("messages"), list):
                row["messages"] = json.dumps(row["messages"])
            for message in row.get("trajectory", ()):
                for call in message.get("tool_calls") or ():
                    if isinstance(arguments := call["function"]["arguments"], dict):
                        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        path = tmp_path / log.replace("jsonl", "parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        traces, expected = read(path), read(DATA / log)
        assert [golden(trace) for trace in traces] == [golden(trace) for trace in expected]
    broken = tmp_path / "broken.parquet"
    broken.write_bytes((tmp_path / "swesmith.parquet").read_bytes()[:-40])
    assert [trace.losses for trace in read(broken)] == [{"bad_parquet": 1}]


def test_codex_forks_do_not_repeat_the_turns_of_the_original(tmp_path: Path) -> None:
    def line(at: str, kind: str, payload: dict[str, Any]) -> str:
        return json.dumps({"timestamp": f"2026-11-01T00:{at}Z", "type": kind, "payload": payload}) + "\n"

    def message_payload(role: str, text: str) -> dict[str, Any]:
        part = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": part, "text": text}]}

    path = tmp_path / "rollout-fork.jsonl"
    lines = [
        line("10:00.100", "session_meta", {"id": "child", "forked_from_id": "above"}),
        line("10:00.100", "session_meta", {"id": "above"}),
        line("10:00.102", "response_item", message_payload("user", "go")),
        line("10:00.103", "response_item", message_payload("assistant", "gone")),
        line("10:07.000", "response_item", message_payload("user", "go on")),
        line("10:09.000", "response_item", message_payload("assistant", "on")),
    ]
    path.write_text("".join(lines))
    trace, (state,) = only(path)
    assert trace.session_id == "child" and trace.losses == {"copied_turn": 1}
    assert [message["content"] for message in state.messages] == ["go", "gone", "go on"]
    assert state.student_action.content == "on" and state.branch == "active"
    # One that is no fork may answer as fast as it likes.
    path.write_text("".join([lines[0].replace("forked_from_id", "originator"), *lines[1:]]))
    assert len(only(path)[1]) == 2


def test_messages_of_the_openhands_sdk_are_not_those_of_mini_swe_agent(tmp_path: Path) -> None:
    """As `Message.model_dump_json` of its release 1.58 writes them."""

    def message(role: str, *texts: str, **more: Any) -> dict[str, Any]:
        parts = [{"cache_prompt": False, "type": "text", "text": text} for text in texts]
        fields = {"tool_calls": None, "tool_call_id": None, "name": None, "reasoning_content": None}
        return {
            "role": role,
            "content": parts,
            **fields,
            "thinking_blocks": [],
            "responses_reasoning_item": None,
        } | more

    call = {
        "id": "c1",
        "responses_item_id": None,
        "name": "terminal",
        "arguments": '{"command":"ls"}',
        "origin": "completion",
    }
    written = [
        message("system", "You are OpenHands."),
        message("user", "Which files?"),
        message("assistant", "I look.", tool_calls=[call], reasoning_content="Files are listed by ls."),
        message("tool", "a.py", tool_call_id="c1", name="terminal"),
        message("assistant", "One: a.py."),
    ]
    (tmp_path / "messages.json").write_text(json.dumps(written))
    trace, (first, last) = only(tmp_path / "messages.json")
    assert (trace.format, first.fidelity) == ("openhands-messages", "exact")
    assert first.student_action.thinking == "Files are listed by ls."
    assert first.student_action.tool_calls[0]["function"] == {"name": "terminal", "arguments": '{"command":"ls"}'}
    assert [message["role"] for message in last.messages] == ["system", "user", "assistant", "tool"]
    assert last.messages[-1] == {"role": "tool", "tool_call_id": "c1", "content": "a.py"}
