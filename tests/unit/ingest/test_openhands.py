"""What the model is shown of the results of commands in OpenHands 1.x."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from support.ingest import only

_METADATA = {
    "exit_code": 1,
    "working_dir": "/workspace",
    "py_interpreter_path": "/usr/bin/python",
    "prefix": "",
    "suffix": "\n[The command completed with exit code 1.]",
}


def _shown(tmp_path: Path, observation: dict[str, Any]) -> str:
    """What the model is shown of the result of the one call of a conversation."""
    call = {"id": "c1", "name": "terminal", "arguments": '{"command": "cat a"}', "origin": "completion"}
    events: list[dict[str, Any]] = [
        {"kind": "MessageEvent", "llm_message": {"role": "user", "content": [{"type": "text", "text": "Look."}]}},
        {"kind": "ActionEvent", "tool_call_id": "c1", "tool_call": call, "llm_response_id": "r1", "thought": []},
        {"kind": "ObservationEvent", "tool_call_id": "c1", "observation": observation},
        {
            "kind": "MessageEvent",
            "llm_response_id": "r2",
            "llm_message": {"role": "assistant", "content": "Done."},
        },
    ]
    rows = [
        {"id": f"e{number}", "timestamp": "2026-11-28T20:00:00", "source": "agent", **event}
        for number, event in enumerate(events)
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, states = only(path)
    assert states[-1].fidelity == "exact"
    return states[-1].messages[-1]["content"]


def _terminal(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"kind": "TerminalObservation", "content": content, "is_error": False, "metadata": _METADATA, **more}


_END = (
    "\n[The command completed with exit code 1.]\n[Current working directory: /workspace]\n[Python interpreter: "
    "/usr/bin/python]\n[Command finished with exit code 1]"
)


def test_a_commands_result_ends_with_its_exit_code_and_directory(tmp_path: Path) -> None:
    assert _shown(tmp_path, _terminal("no such file")) == "no such file" + _END


def test_an_error_has_a_header_before_its_text(tmp_path: Path) -> None:
    header = "[An error occurred during execution.]\n"
    assert _shown(tmp_path, _terminal("killed", is_error=True)) == f"{header}\nkilled{_END}"
    edit = {"kind": "FileEditorObservation", "content": [{"type": "text", "text": "exists"}], "is_error": True}
    assert _shown(tmp_path, edit) == f"{header}\nexists"


def test_a_long_output_is_shown_in_part_and_its_file_is_named(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(4000))
    shown = _shown(tmp_path, _terminal(text, full_output_save_dir="/home/agent/observations"))
    digest = hashlib.sha256((text + _END).encode()).hexdigest()[:8]
    assert len(shown) == 30_000
    assert shown.startswith("line 0\n") and shown.endswith(_END)
    assert f"saved to /home/agent/observations/terminal_output_{digest}.txt - you can use" in shown
    head = shown.partition("<response clipped>")[0]
    assert text.startswith(head) and f"starts around line {len(head.splitlines()) + 1})" in shown
    assert "<response clipped><NOTE>Due to the max output limit, only part" in _shown(tmp_path, _terminal(text))
