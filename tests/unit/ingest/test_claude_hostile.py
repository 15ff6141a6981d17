"""Claude Code logs that are cut, shuffled or garbled, and recorded sessions where they lie beside the project."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.ingest.claude_code import records
from understudy.ingest.claude_code.log_format import ClaudeCodeFormat
from understudy.ingest.log_files import LogFile
from understudy.ingest.trace import expand

from support import example_count
from support.claude_log import Log, by_message, of_bytes, read, thinking

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared"
MANY = settings(max_examples=example_count(60), deadline=None, suppress_health_check=list(HealthCheck))
ANSWER = "msg_0000000000000001"
NEXT = "msg_0000000000000002"


def whole() -> Log:
    """A log with a bit of everything."""
    log = Log(version="2.1.69")
    start = log.user("look")
    for number in range(4):
        first = log.assistant(f"msg_a{number:015}", thinking("hm"), "Two.", (f"t{number}a", "Read"))
        second = log.assistant(f"msg_a{number:015}", (f"t{number}b", "Read", {"path": "ü😀"}))
        log.result(f"t{number}a", "one", parent=first)
        log.result(f"t{number}b", [{"type": "text", "text": "two"}], parent=second)
        log.system("microcompact_boundary", microcompactMetadata={"compactedToolIds": [f"t{number}a"]})
    log.aside("last-prompt", lastPrompt="x")
    tail = log.assistant("msg_b000000000000001", "Done.", stop="max_tokens")
    log.assistant("msg_b000000000000002", "More.")
    log.system(
        "compact_boundary",
        parent=None,
        logicalParentUuid=tail,
        compactMetadata={"preservedSegment": {"headUuid": tail, "anchorUuid": "sum", "tailUuid": tail}},
    )
    log.user("Summary", uuid="sum", isCompactSummary=True, isVisibleInTranscriptOnly=True)
    log.attachment("queued_command", prompt=[{"type": "text", "text": "and"}, {"type": "image", "source": {}}])
    log.assistant("msg_c000000000000001", "Yes.")
    log.user("other way", parent=start)
    log.assistant("msg_c000000000000002", "Yes.", requestRef="r1")
    log.aside("api-request", id="r1", keep=0, tail=["x"])
    return log


def check(data: bytes, name: str = "s1.jsonl") -> Counter[str]:
    """Read a file; all that is in it can be expanded and written. Returns the losses."""
    losses: Counter[str] = Counter()
    for trace in ClaudeCodeFormat().read([of_bytes(f"/logs/p/{name}", data)]):
        losses += trace.losses
        states = list(expand(trace))
        assert len({state.message_id for state in states}) == len(states) == len(trace.turns)
        for state in states:
            msgspec.json.encode(state).decode()
            assert (state.fidelity == "repaired") == bool(state.notes)
    return losses


def mutilated(data: bytes, seed: int) -> bytes:
    dice = random.Random(seed)
    lines = data.splitlines(keepends=True)
    garbage = dice.randbytes(dice.randrange(1, 3000))
    at = dice.randrange(len(data) + 1)

    def spots() -> bytes:
        changed = bytearray(data)
        for _ in range(30):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        return bytes(changed)

    def retyped() -> bytes:
        old = dice.choice(
            [b'"type"', b'"text"', b'"uuid"', b'"parentUuid"', b"null", b'"message"', b'"tool_use"', b"true"]
        )
        new = dice.choice([b"1", b"[]", b'"x"', b'{"a":1}', b"null", b'"\\ud83d"', b'"id"', b"1e999"])
        return data.replace(old, new, dice.randrange(1, 20))

    ways: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: b"".join(dice.sample(lines, len(lines))),
        lambda: b"".join(dice.choices(lines, k=2 * len(lines))),
        lambda: data[:at] + garbage + data[at:],
        lambda: b"".join(line for line in lines if dice.random() < 0.8),
        lambda: b"".join(
            line[: dice.randrange(len(line))] + b"\n" if dice.random() < 0.2 else line for line in lines
        ),
        spots,
        retyped,
    ]
    return dice.choice(ways)()


@MANY
@given(seed=st.integers(0, 1 << 32), again=st.booleans())
def test_a_mutilated_log_never_stops_the_reader(seed: int, again: bool) -> None:
    data = mutilated(whole().data(), seed)
    check(mutilated(data, seed + 1) if again and data else data)


@MANY
@given(data=st.binary(max_size=400))
def test_garbage_never_stops_the_reader(data: bytes) -> None:
    lines = [line for line in data.split(b"\n") if line.strip()]
    assert sum(check(data).values()) >= min(len(lines), 1)


@MANY
@given(seed=st.integers(0, 1 << 32))
def test_the_order_of_lines_does_not_lose_turns(seed: int) -> None:
    log = whole()
    turns = by_message(*read(log)).keys()
    random.Random(seed).shuffle(log.lines)
    assert by_message(*read(log)).keys() == turns


def test_duplicated_lines_do_not_change_the_states() -> None:
    log = whole()
    before = by_message(*read(log))
    log.lines = [line for line in log.lines for _ in range(2)]
    (trace,) = read(log)
    assert by_message(trace) == before
    assert trace.losses["repeated-uuid"] == sum("uuid" in line for line in log.lines) // 2


def test_a_line_that_is_no_json_keeps_its_place() -> None:
    log = Log()
    log.user("hi")
    log.assistant(ANSWER, "hello")
    log.user("more")
    log.assistant(NEXT, "yes")
    lines = log.data().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"content":"more"', b'"content":mo')
    (trace,) = ClaudeCodeFormat().read([of_bytes("/p/s1.jsonl", b"".join(lines))])
    state = by_message(trace)[NEXT]
    assert trace.losses == {"bad-json": 1}
    assert (state.fidelity, state.notes) == ("repaired", ("unreadable-line",))
    assert [message["content"] for message in state.messages] == ["hi", "hello"]


def test_half_surrogates_and_bad_utf8_are_read() -> None:
    log = Log()
    log.user("HALF")
    log.assistant(ANSWER, "BYTES")
    data = log.data().replace(b"HALF", b"cut \\ud83d").replace(b"BYTES", b"b\xff")
    (trace,) = ClaudeCodeFormat().read([of_bytes("/p/s1.jsonl", b"\xef\xbb\xbf" + data)])
    state = by_message(trace)[ANSWER]
    assert (state.messages[0]["content"], state.student_action.content) == ("cut ?", "b\ufffd")
    assert trace.losses == {"bad-utf8": 1}


def test_fields_of_a_wrong_type_are_ignored_and_counted() -> None:
    log = Log()
    log.user("hi", isMeta="yes", isSidechain=0)
    log.assistant(ANSWER, "hello", {"type": 7}, 12)
    (trace,) = read(log)
    assert by_message(trace)[ANSWER].student_action.content == "hello"
    assert trace.losses == {"odd-field:isSidechain": 1, "odd-field:message": 2}


def test_unknown_record_types_keep_the_parent_chain_and_count_as_losses() -> None:
    log = Log()
    log.user("hi")
    log.add("brand-new", data={"x": 1})
    log.assistant(ANSWER, "hello")
    log.aside("brand-newer", x=1)
    (trace,) = read(log)
    state = by_message(trace)[ANSWER]
    assert [message["content"] for message in state.messages] == ["hi"] and state.fidelity == "exact"
    assert trace.losses == {"unknown-type:brand-new": 1, "unknown-type:brand-newer": 1}


def test_a_line_of_100_mb_and_one_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    log.user("x" * 100_000_000)
    log.assistant(ANSWER, "hello")
    data = log.data()
    (trace,) = ClaudeCodeFormat().read([of_bytes("/p/s1.jsonl", data)])
    assert len(by_message(trace)[ANSWER].messages[0]["content"]) == 100_000_000 and not trace.losses
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1 << 20)
    (trace,) = ClaudeCodeFormat().read([of_bytes("/p/s1.jsonl", data)])
    assert trace.losses["line-too-long"] == 1 and by_message(trace)[ANSWER].messages == []


# --- recorded sessions ------------------------------------------------------------------------------------


@cache
def real() -> tuple[Path, ...]:
    return tuple(sorted((SHARED / "sessions-real").glob("*.jsonl")))


@pytest.mark.skipif(not real(), reason="no recorded sessions beside the project")
def test_real_sessions_are_read_whole() -> None:
    turns = 0
    for path in real():
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        bad = sum(not is_json(line) for line in lines)
        traces = list(ClaudeCodeFormat().read([LogFile.on_disk(path)]))
        assert sum(trace.losses["bad-json"] for trace in traces) == bad
        turns += sum(len(trace.turns) for trace in traces)
        check(path.read_bytes(), path.name)
    assert turns > 400


@pytest.mark.skipif(not real(), reason="no recorded sessions beside the project")
@settings(parent=MANY, max_examples=40)
@given(which=st.integers(0, 1 << 16), seed=st.integers(0, 1 << 32))
def test_mutilated_real_sessions_never_stop_the_reader(which: int, seed: int) -> None:
    path = real()[which % len(real())]
    check(mutilated(path.read_bytes(), seed), path.name)


@pytest.mark.skipif(not (SHARED / "session-fidelity").is_dir(), reason="no recorded requests beside the project")
def test_the_fidelity_bench_rebuilds_at_least_97_percent_of_requests_exactly(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    command = [sys.executable, ROOT / "bench" / "fidelity.py", SHARED / "session-fidelity", "--json", target]
    subprocess.run(command, check=True, capture_output=True, env=os.environ)
    figures = json.loads(target.read_text())
    assert figures["exact"]["understudy"] >= 0.97
    assert figures["exact"]["understudy"] > max(
        figures["exact"]["plain file order"], figures["exact"]["plain parent walk"]
    )
    for version in figures["versions"].values():
        assert sum(version["misses"].values()) == version["turns"] - version["exact"]["understudy"]


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
