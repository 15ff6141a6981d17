"""The terse policy: the oracle's work in few words, for a small model to imitate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.policies import CASES, diff, oracle, read, work, write


@pytest.mark.parametrize("context", ["-U3", "-U0"])
@pytest.mark.parametrize("case", CASES)
def test_the_terse_policy_makes_exactly_the_gold_change(case: str, context: str, tmp_path: Path) -> None:
    before, after, _ = CASES[case]
    write(tmp_path, before)
    _, messages = work(oracle(diff(before, after, context), "terse"), tmp_path)
    assert read(tmp_path) == after
    assert messages[-1]["content"] == "Done."


def test_the_terse_policy_reads_the_file_and_makes_minimal_edits(tmp_path: Path) -> None:
    text = "def f(a):\n    return a + 1\n\n\ndef g(a):\n    return a + 1\n\n\ndef h(b):\n    return b\n"
    new = text.replace("return b\n", "return b * 2\n").replace(
        "g(a):\n    return a + 1", "g(a):\n    return a - 1"
    )
    write(tmp_path, {"m.py": text.encode()})
    policy = oracle(diff({"m.py": text.encode()}, {"m.py": new.encode()}, "-U1"), "terse")
    _, messages = work(policy, tmp_path, tools=("Read", "Edit"))
    calls = [json.loads(call["function"]["arguments"]) for one in messages for call in one.get("tool_calls") or ()]
    path = str(tmp_path / "m.py")
    assert calls == [
        {"file_path": path},
        {
            "file_path": path,
            "old_string": "def g(a):\n    return a + 1\n",
            "new_string": "def g(a):\n    return a - 1\n",
        },
        {"file_path": path},
        {"file_path": path, "old_string": "return b", "new_string": "return b * 2"},
    ]
    contents = [message["content"] for message in messages if message["role"] == "assistant"]
    assert contents == ["", "def g(a):", "", "def h(b):", "Done."]
    assert (tmp_path / "m.py").read_text() == new


@pytest.mark.parametrize("case", ["a newline at the end that comes", "a newline at the end that goes"])
def test_a_change_impossible_with_line_edits_is_reported_as_not_made(case: str, tmp_path: Path) -> None:
    before, after, _ = CASES[case]
    write(tmp_path, before)
    tools, messages = work(oracle(diff(before, after), "terse"), tmp_path, tools=("Read", "Edit"))
    assert tools.names == [] and read(tmp_path) == before
    assert messages[-1]["content"] == "I could not make the change with the tools I have."


def test_an_unreadable_file_is_reported_as_no_change_made(tmp_path: Path) -> None:
    policy = oracle(diff({"a.py": b"a\nb\n"}, {"a.py": b"a\nc\n"}), "terse")
    tools, messages = work(policy, tmp_path, tools=("Read", "Edit"))
    assert tools.names == ["Read"]
    assert messages[-1]["content"] == "I could not make the change with the tools I have."
