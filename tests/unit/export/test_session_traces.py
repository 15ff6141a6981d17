"""Session traces of the Hugging Face Hub: written, and read back as the same conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.formats import session_traces
from understudy.ingest.trace import TraceState, expand
from understudy.redact.redactor import Redactor
from understudy.store import Store

from support.export import put_rollouts, put_sessions, session
from support.ingest import only

# The example that the Hub's documentation gives of the format.
EXAMPLE = """
{"type":"session","harness":"my-agent","id":"abc123","name":"what time is it"}
{"type":"message","message":{"role":"user","content":"what time is it?"}}
{"type":"message","message":{"role":"assistant","content":"","toolCalls":[{"id":"t1","function":{"name":"get_time","arguments":"{}"}}]}}
{"type":"message","message":{"role":"tool","toolCallId":"t1","content":"2026-07-01T15:00:00Z"}}
{"type":"message","message":{"role":"assistant","content":"it is 15:00 UTC"}}
""".lstrip()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def export(directory: Path, output: Path, **selection: Any) -> list[list[dict[str, Any]]]:
    """The lines of each file that the rows of the export name."""
    with Store.open(directory, create=False) as store:
        selected = ExportSelection(test_share=0.0, **selection)
        session_traces.export(Corpus(store, selected, Redactor(bytes(32))), output)
    return [lines(output / row["file"]) for row in lines(output / "train.jsonl")]


def context(state: TraceState) -> str:
    """What the model saw, as one text; the format has no word for content that is none."""
    messages = [{**message, "content": message["content"] or ""} for message in state.messages]
    return json.dumps(messages, sort_keys=True)


def test_the_documented_example_is_read(tmp_path: Path):
    (tmp_path / "trace.jsonl").write_text(EXAMPLE)
    trace, (first, second) = only(tmp_path / "trace.jsonl")
    assert (trace.format, trace.session_id, trace.agent, dict(trace.losses)) == (
        *("session-traces", "abc123", "my-agent"),
        {},
    )
    assert [call["function"]["name"] for call in first.student_action.tool_calls] == ["get_time"]
    assert second.student_action.content == "it is 15:00 UTC"
    assert second.messages[-1]["content"] == "2026-07-01T15:00:00Z"


def test_an_exported_session_reads_back_to_the_same_states(tmp_path: Path):
    put_sessions(tmp_path / "store", [session("one")])
    newest, other = export(tmp_path / "store", tmp_path / "out")
    header, *messages = newest
    assert (header["type"], header["harness"], header["name"]) == ("session", "chat", "Mend one.")
    assert {message["type"] for message in messages} == {"message"}
    assert {message["message"]["role"] for message in messages} == {"system", "user", "assistant", "tool"}
    assert other[-1]["message"]["content"] == "Done ✓."
    before = {context(state): state for state in expand(session("one"))}
    states = [state for file in (tmp_path / "out").glob("trace-*") for state in only(file)[1]]
    after = {context(state): state for state in states}
    assert set(before) == set(after)
    for key, state in before.items():
        assert (state.student_action.content or "") == (after[key].student_action.content or "")
        assert state.student_action.thinking == after[key].student_action.thinking
        assert state.student_action.tool_calls == after[key].student_action.tool_calls
        assert state.tools == after[key].tools


def test_rollout_headers_have_the_reward_and_the_task(tmp_path: Path):
    put_rollouts(tmp_path / "store")
    traces = export(tmp_path / "store", tmp_path / "out", origins=("rollouts",), solved_only=False)
    assert traces
    for header, *messages in traces:
        assert header["reward"] in (0.0, 1.0) and header["task"]
        assert all(isinstance(message["message"]["timestamp"], int) for message in messages[-1:])
    assert len({header["id"] for header, *_ in traces}) == len(traces)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trace-" in card.partition("# ")[0]


def test_a_header_may_have_any_other_keys_and_a_result_may_be_an_error(tmp_path: Path):
    header = '"type":"session","timestamp":"2026-07-01T15:00:00Z","cwd":"/srv/app",'
    result = '"toolCallId":"t1","isError":true,'
    (tmp_path / "trace.jsonl").write_text(
        EXAMPLE.replace('"type":"session",', header).replace('"toolCallId":"t1",', result)
    )
    trace, states = only(tmp_path / "trace.jsonl")
    assert (trace.format, dict(trace.losses), len(states)) == ("session-traces", {}, 2)
    assert [node.body["role"] for node in trace.nodes if node.body.get("is_error")] == ["tool"]


@pytest.mark.parametrize("damage", ["", '{"type":"message"}', '{"type":"message","message":7}', "[]", "{"])
def test_damaged_lines_are_counted(tmp_path: Path, damage: str):
    (tmp_path / "trace.jsonl").write_text(EXAMPLE + damage + "\n" + '{"type":"other"}\n')
    trace, states = only(tmp_path / "trace.jsonl")
    assert len(states) == 2
    assert trace.losses["unknown_record"] >= 1
