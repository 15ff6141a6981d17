"""Logs that are cut, shuffled, or made by somebody who means harm: never a crash, and each loss is counted."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.ingest import log_reader
from understudy.ingest.formats.registry import FORMATS, format_named, group_batches
from understudy.ingest.log_files import LogFile, walk_logs
from understudy.ingest.trace import Trace, expand

DATA = Path(__file__).parents[2] / "data" / "ingest"
ALL = group_batches(walk_logs([DATA], Counter()), Counter())
LOGS = {
    f"{batch.format.name}:{Path(batch.key).name}": (
        batch.format.name,
        {file.path: Path(file.path).read_bytes() for file in batch.files},
    )
    for batch in ALL
}
MANY = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def of_bytes(path: str, data: bytes) -> LogFile:
    return LogFile(path, len(data), lambda: BytesIO(data))


def read(name: str, files: dict[str, bytes]) -> list[Trace]:
    """What a format makes of the files; all of it is expanded and can be written."""
    traces = list(format_named(name).read([of_bytes(path, data) for path, data in files.items()]))
    for trace in traces:
        assert all(isinstance(kind, str) and count > 0 for kind, count in trace.losses.items())
        states = list(expand(trace))
        assert len(states) == len(trace.turns) == len({state.state_id for state in states})
        for state in states:
            msgspec.json.encode(state).decode()
            for message in state.messages:
                assert message["role"] in ("system", "user", "assistant", "tool")
                assert isinstance(message["content"], str | list | None)
    return traces


def mutilated(data: bytes, seed: int) -> bytes:
    """The data after one of the things that happen to files."""
    dice = random.Random(seed)
    lines = data.splitlines(keepends=True)
    at, other = sorted((dice.randrange(len(data) + 1), dice.randrange(len(data) + 1)))
    garbage = dice.randbytes(dice.randrange(1, 400))
    ways: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[at:],
        lambda: data[:at] + data[other:],
        lambda: data[:at] + garbage + data[at:],
        lambda: b"".join(dice.sample(lines, len(lines))),
        lambda: b"".join(lines[::-1]),
        lambda: b"".join(line for line in lines for _ in range(2)),
        lambda: b"".join(dice.sample(lines, len(lines) // 2)),
        lambda: data.replace(b"\n", b"\r\n"),
        lambda: data.replace(b'"', b"'"),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode().encode("utf-16"),
        lambda: garbage,
        lambda: b"",
    ]
    return dice.choice(ways)()


@pytest.mark.parametrize("log", LOGS)
@MANY
@given(seed=st.integers(0, 2**32))
def test_a_mutilated_log_is_read_as_far_as_it_can_be(log: str, seed: int) -> None:
    name, files = LOGS[log]
    read(name, {path: mutilated(data, seed + at) for at, (path, data) in enumerate(files.items())})


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["message", "assistant", "user", "tool_use", "tool_result", "text", "image", "reasoning", "m3"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place in a JSON value that holds another: what it is in, and under which key."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    for key, below in inside:
        yield value, key
        yield from places(below)


def parsed(data: bytes) -> tuple[list[Any], Callable[[list[Any]], bytes]] | None:
    """The values of a file and how they are written again, None where it is no JSON."""
    try:
        return [json.loads(data)], lambda values: json.dumps(values[0]).encode()
    except ValueError:
        pass
    try:
        values = [json.loads(line) for line in data.splitlines()]
    except ValueError:
        return None
    return values, lambda values: b"".join(json.dumps(value).encode() + b"\n" for value in values)


@pytest.mark.parametrize("log", [log for log, (_, files) in LOGS.items() if parsed(next(iter(files.values())))])
def test_a_value_of_a_wrong_type_in_any_field_does_not_stop_the_reader(log: str) -> None:
    name, files = LOGS[log]
    for path, content in files.items():
        parts = parsed(content)
        assert parts is not None
        values, write = parts
        for holder, key in list(places(values)):
            original = holder[key]
            for odd in (["x"], {"a": ["b"]}, 7):
                holder[key] = odd
                read(name, {**files, path: write(values)})
            holder[key] = original


@pytest.mark.parametrize("name", [format.name for format in FORMATS if format.name != "claude-code"])
@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=400) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_crash_no_reader_and_no_detection(name: str, data: bytes) -> None:
    for path in ("x.jsonl", "x.json", "x/events/0.json", "x/events/event-00000-a.json", "x"):
        read(name, {path: data})
        format_named(name).detect(path, data)


LINES = {
    log: [path for path in files if path.endswith(".jsonl")]
    for log, (_, files) in LOGS.items()
    if next(iter(files)).endswith(".jsonl")
}


@pytest.mark.parametrize("log", LINES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 9))
def test_each_line_that_is_no_json_is_counted_and_nothing_else_is_lost(log: str, seed: int, count: int) -> None:
    name, files = LOGS[log]
    dice = random.Random(seed)
    path = dice.choice(LINES[log])
    data = files[path]
    lines = data.splitlines()
    for _ in range(count):
        broken = dice.choice(
            [b'{"a": 1', b"\x00\xff\x00", b"<<<<<<< HEAD", b'{"type":}', data[:30].replace(b"\n", b"")]
        )
        lines.insert(dice.randrange(len(lines) + 1), broken)
    whole, damaged = read(name, files), read(name, {**files, path: b"\n".join(lines)})
    losses = sum((trace.losses for trace in damaged), Counter[str]())
    assert losses["bad-json" if name == "claude-code" else "bad_json"] == count
    assert sum(len(trace.turns) for trace in damaged) == sum(len(trace.turns) for trace in whole)


@pytest.mark.parametrize("log", [log for log in LOGS if log.endswith((".json", ".traj"))])
@settings(max_examples=12, deadline=None)
@given(part=st.floats(0.01, 0.98))
def test_a_truncated_document_counts_as_a_loss(log: str, part: float) -> None:
    name, files = LOGS[log]
    ((path, data),) = files.items()
    traces = read(name, {path: data[: int(len(data) * part)]})
    assert sum(sum(trace.losses.values()) for trace in traces) >= 1


def test_a_line_that_is_too_long_is_skipped_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "MAX_LINE_BYTES", 3_000_000)
    long = b'{"type":"response_item","payload":"' + b"x" * 9_000_000 + b'"}'
    data = b'{"a":1}\n' + long + b'\n{"b":2}\n' + long
    losses: Counter[str] = Counter()
    assert list(log_reader.read_lines(of_bytes("x", data), losses)) == [b'{"a":1}', b'{"b":2}']
    assert losses == {"long_line": 2}


def test_a_document_that_is_too_large_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "MAX_DOCUMENT_BYTES", 1_000_000)
    data = b"[" + b"1," * 600_000 + b"1]"
    (trace,) = read("atif", {"x.json": data})
    assert trace.losses["large_document"] == 1 and not trace.turns


@settings(deadline=None)
@given(
    rows=st.lists(st.binary(max_size=30).filter(lambda row: b"\n" not in row), max_size=20),
    chunk=st.integers(1, 40),
)
def test_lines_are_those_of_the_file_however_it_comes(rows: Sequence[bytes], chunk: int) -> None:
    class Slow(BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            return super().read1(chunk)

    data = b"\n".join(rows)
    losses: Counter[str] = Counter()
    lines = list(log_reader.read_lines(LogFile("x", len(data), lambda: Slow(data)), losses))
    assert lines == [row for row in rows if row.strip()] and not losses


def test_a_stream_that_breaks_off_loses_only_what_comes_after() -> None:
    class Broken(BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            chunk = super().read1(10)
            if not chunk:
                raise OSError("cut")
            return chunk

    losses: Counter[str] = Counter()
    lines = list(log_reader.read_lines(LogFile("x", 9, lambda: Broken(b"one\ntwo\nthree and more")), losses))
    assert lines[:2] == [b"one", b"two"] and losses == {"unreadable_rest": 1}


def test_halves_of_surrogates_and_bad_bytes_are_replaced_and_counted() -> None:
    losses: Counter[str] = Counter()
    assert log_reader.parse_json(rb'{"a": "x\ud800y"}', losses) == {"a": "x?y"}
    assert log_reader.parse_json(b'{"a": "\xff"}', losses) == {"a": "\ufffd"}
    assert losses == {"bad_text": 2}
    assert log_reader.parse_json(b"[" * 100_000, losses) is None
    assert log_reader.parse_json(b'{"a":' * 5_000 + b"1" + b"}" * 5_000, losses) is None
    assert losses["bad_json"] == 2


@settings(deadline=None)
@given(value=VALUES, cut=st.integers(0, 200))
def test_any_truncated_json_can_be_outlined(value: Any, cut: int) -> None:
    data = json.dumps(value).encode()
    outline = log_reader.outline(data[:cut])
    assert outline.kind in ("", "{", "[")
    if isinstance(value, dict) and cut >= len(data):
        assert set(outline.keys) == {json.dumps(key)[1:-1] for key in value}


def test_thousands_of_compactions_do_not_exhaust_memory() -> None:
    message = {"type": "message", "role": "user", "content": "x"}
    rows: list[dict[str, Any]] = []
    for _ in range(3000):
        rows.append({"type": "response_item", "payload": message})
        rows.append({"type": "compacted", "payload": {"message": "s"}})
    rows.append({"type": "response_item", "payload": {**message, "role": "assistant"}})
    (trace,) = read("codex", {"x.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in rows)})
    assert len(trace.nodes) < 100_000 and trace.losses["compaction_left_out"] > 0
    assert trace.turns[-1].fidelity == "lossy"

    def message_of(n: int, *parts: dict[str, Any]) -> dict[str, Any]:
        return {"info": {"id": f"m{n}", "role": "user", "sessionID": "s"}, "parts": list(parts)}

    # Compactions of OpenCode that keep all messages, without a summary behind which these would stand.
    messages = [message_of(n, {"type": "text", "text": "x"}) for n in range(2000)]
    messages += [message_of(n, {"type": "compaction", "tail_start_id": "m0"}) for n in range(2000, 4000)]
    session = {"info": {"id": "s", "directory": "/w"}, "messages": messages}
    (trace,) = read("opencode", {"x.json": json.dumps(session).encode()})
    assert trace.losses["compaction_left_out"] > 1900

    def event(n: int, **more: Any) -> dict[str, Any]:
        return {"id": f"e{n}", "timestamp": "t", "source": "user", **more}

    events = [event(n, kind="MessageEvent", llm_message={"role": "user", "content": "x"}) for n in range(2000)]
    events += [event(n, kind="Condensation", summary="s", summary_offset=0) for n in range(2000)]
    (trace,) = read("openhands-v1", {"x.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in events)})
    assert len(trace.nodes) < 100_000 and trace.losses["compaction_left_out"] > 0
