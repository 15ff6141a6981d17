"""Each log format by a log of its public schema: what is read of it, and that no other format claims it."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.ingest.formats.registry import FORMATS, detect, format_named, group_batches
from understudy.ingest.log_files import LogFile, read_head, walk_logs
from understudy.ingest.trace import expand

from support.ingest import DATA, LOGS, golden, only, read

GOLDEN = Path(__file__).parents[2] / "data" / "ingest-golden"


@pytest.mark.parametrize("log", LOGS)
def test_the_traces_of_a_log_equal_its_golden_file(log: str) -> None:
    expected = GOLDEN / f"{log.replace('/', '_')}.json"
    traces = [golden(trace) for trace in read(DATA / log)]
    if os.environ.get("UNDERSTUDY_GOLDEN") == "write":
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(json.dumps(traces, indent=1, ensure_ascii=False) + "\n")
    assert traces == json.loads(expected.read_text())


@pytest.mark.parametrize(("log", "name"), LOGS.items())
def test_no_format_claims_the_log_of_another(log: str, name: str) -> None:
    for file in walk_logs([DATA / log], Counter()):
        beginning = read_head(file)
        detected = detect(file.path, beginning)
        assert detected is not None and detected.name == name
        # Claude Code's lines may be cut anywhere, so that it goes by little; it stands behind Gemini for that.
        others = [one for one in FORMATS if one.name not in (name, "claude-code")]
        assert not [one.name for one in others if one.detect(file.path, beginning)]


@pytest.mark.parametrize(("log", "name"), LOGS.items())
def test_a_format_is_detected_from_the_first_bytes_of_its_head(log: str, name: str) -> None:
    for file in walk_logs([DATA / log], Counter()):
        for size in (600, 4096):
            detected = detect(file.path, read_head(file)[:size])
            assert detected is not None and detected.name == name, (file.path, size)


def test_other_files_are_detected_as_no_format() -> None:
    others = {
        "notes.md": b"# Notes\n\n> a quotation\n\n- one\n",
        "main.py": b"import os\n\nprint(os.name)\n",
        "package.json": b'{"name": "x", "version": "1", "dependencies": {"a": "1"}}',
        "data.json": b'[{"a": 1}, {"a": 2}]',
        "numbers.json": b"[1, 2, 3]",
        "empty.jsonl": b"",
        "binary.bin": bytes(range(256)) * 16,
        "people.jsonl": b'{"id": 1, "name": "x", "timestamp": "2026"}\n',
        "coco.json": b'{"info": {"year": 2026}, "images": [], "annotations": []}',
        "openapi.json": b'{"openapi": "3.1.0", "info": {"title": "x"}, "paths": {}}',
    }
    for path, beginning in others.items():
        assert detect(path, beginning) is None, path


def test_a_format_is_found_by_its_name() -> None:
    assert format_named("codex").name == "codex"
    assert len({format.name for format in FORMATS}) == len(FORMATS)
    with pytest.raises(ConfigError, match=r"unknown log format 'klingon'; .*codex"):
        format_named("klingon")


def test_every_state_is_fit_for_a_chat_template() -> None:
    for log in LOGS:
        for trace in read(DATA / log):
            assert len({turn.message_id for turn in trace.turns}) == len(trace.turns)
            for state in expand(trace):
                assert state.messages[0]["role"] == "system"
                call_ids: set[str] = set()
                for message in state.messages:
                    call_ids.update(call["id"] for call in message.get("tool_calls", ()))
                    for call in message.get("tool_calls", ()):
                        assert isinstance(json.loads(call["function"]["arguments"]), dict)
                    if message["role"] == "tool":
                        assert message["tool_call_id"] in call_ids, (log, message)
                    assert "reasoning_content" not in message


def test_a_turn_keeps_its_id_when_the_log_grows(tmp_path: Path) -> None:
    for log in ("gemini.jsonl", "codex/sessions/2026/10/03/rollout-2026-10-03T09-00-00-019a-codex.jsonl"):
        whole = (DATA / log).read_bytes()
        path = tmp_path / Path(log).name
        earlier: list[str] = []
        for lines in range(4, whole.count(b"\n") + 1):
            path.write_bytes(b"\n".join(whole.split(b"\n")[:lines]) + b"\n")
            ids = [state.state_id for state in expand(read(path)[0])]
            assert ids[: len(earlier)] == earlier
            earlier = ids


def test_a_log_read_alone_is_not_detected(tmp_path: Path) -> None:
    path = tmp_path / "anything"
    path.write_bytes((DATA / "atif.json").read_bytes())
    (batch,) = group_batches([LogFile.on_disk(path)], Counter(), only=format_named("atif"))
    assert batch.format.name == "atif" and len(batch.files) == 1


def test_an_answer_that_qwen_code_asked_again_for_is_in_no_later_history(tmp_path: Path) -> None:
    """Its calls have no results, since nobody executed them."""

    def call(number: int) -> list[dict[str, object]]:
        return [{"functionCall": {"id": f"c{number}", "name": "run", "args": {"command": f"echo {number}"}}}]

    records: list[tuple[str, list[dict[str, object]]]] = [
        ("user", [{"text": "go"}]),
        ("assistant", call(1)),
        ("assistant", call(2)),
        ("tool_result", [{"functionResponse": {"id": "c2", "response": {"output": "2"}}}]),
        ("assistant", [{"text": "Done."}]),
    ]
    lines = [
        {"uuid": f"u{at}", "parentUuid": f"u{at - 1}" if at else None, "sessionId": "s", "type": kind}
        | {"provenance": kind, "message": {"parts": parts}}
        for at, (kind, parts) in enumerate(records)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _, states = only(path)
    roles = [[message["role"] for message in state.messages] for state in states]
    assert roles == [["user"], ["user"], ["user", "assistant", "tool"]]
    assert states[-1].messages[-1]["content"] == "2"


def test_qwen_code_sends_the_results_before_a_compression_that_ends_with_their_calls(tmp_path: Path) -> None:
    call = {"functionCall": {"id": "c1", "name": "run", "args": {"command": "echo 1"}}}
    history = [
        {"role": "user", "parts": [{"text": "A summary."}]},
        {"role": "model", "parts": [{"text": "I run it."}, call]},
    ]
    records: list[dict[str, object]] = [
        {"type": "user", "message": {"parts": [{"text": "go"}]}},
        {"type": "assistant", "message": {"parts": [{"text": "I run it."}, call]}},
        {
            "type": "tool_result",
            "message": {"parts": [{"functionResponse": {"id": "c1", "response": {"output": "1"}}}]},
        },
        {"type": "system", "subtype": "chat_compression", "systemPayload": {"compressedHistory": history}},
        {"type": "assistant", "message": {"parts": [{"text": "It printed 1."}]}},
        {"type": "user", "message": {"parts": [{"text": "And?"}]}},
        {"type": "assistant", "message": {"parts": [{"text": "Done."}]}},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text(
        "".join(
            json.dumps({"uuid": f"u{at}", "parentUuid": f"u{at - 1}" if at else None, "provenance": "p"} | record)
            + "\n"
            for at, record in enumerate(records)
        )
    )
    _, (_, after, later) = only(path)
    assert [(message["role"], message["content"]) for message in after.messages] == [
        ("user", "A summary."),
        ("assistant", "I run it."),
        ("tool", "1"),
    ]
    assert (after.fidelity, after.notes) == ("exact", ())
    # If this prompt resumed the session, the result was not sent; the log does not tell.
    assert later.messages[2]["content"] == "1" and later.notes == ("resume_not_logged",)


def test_a_prompt_before_which_qwen_code_compresses_follows_the_history(tmp_path: Path) -> None:
    history = [{"role": "user", "parts": [{"text": "A summary."}]}, {"role": "model", "parts": [{"text": "Yes."}]}]
    records: list[dict[str, object]] = [
        {"type": "user", "message": {"parts": [{"text": "go"}]}},
        {"type": "assistant", "message": {"parts": [{"text": "Gone."}]}},
        {"type": "user", "message": {"parts": [{"text": "And then?"}]}},
        {"type": "system", "subtype": "chat_compression", "systemPayload": {"compressedHistory": history}},
        {"type": "assistant", "message": {"parts": [{"text": "Done."}]}},
    ]
    path = tmp_path / "chat.jsonl"
    lines = [
        {"uuid": f"u{at}", "parentUuid": f"u{at - 1}" if at else None, "provenance": "p"} | record
        for at, record in enumerate(records)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    state = only(path)[1][-1]
    assert [message["content"] for message in state.messages] == ["A summary.", "Yes.", "And then?"]


def test_pi_sends_a_result_for_each_call_that_was_interrupted(tmp_path: Path) -> None:
    calls = [{"type": "toolCall", "id": f"c{at}", "name": "bash", "arguments": {}} for at in (1, 2)]
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": calls, "stopReason": "toolUse"},
        {"role": "toolResult", "toolCallId": "c1", "content": [{"type": "text", "text": "1"}]},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Done."}], "stopReason": "stop"},
    ]
    lines: list[dict[str, object]] = [{"type": "session", "id": "s", "timestamp": "2026", "cwd": "/work"}]
    lines += [
        {"type": "message", "id": f"m{at}", "parentId": f"m{at - 1}" if at else None, "message": message}
        for at, message in enumerate(messages)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    state = only(path)[1][-1]
    assert [message["content"] for message in state.messages if message["role"] != "system"] == [
        "go", None, "1", "No result provided", "And then?",
    ]  # fmt: skip
