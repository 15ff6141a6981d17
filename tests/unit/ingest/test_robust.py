"""Logs as hostile as a disk can hold them: every loss is counted, nothing hangs, and memory stays bounded."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.ingest.claude_code import records
from understudy.ingest.claude_code.log_format import ClaudeCodeFormat
from understudy.ingest.formats.registry import group_batches
from understudy.ingest.log_files import LogFile, log_file_at, walk_logs
from understudy.ingest.trace import Trace, expand

from support.claude_log import Log, by_message, of_bytes, outline, read, thinking

SHARED = Path(__file__).parents[4] / "shared" / "sessions-real"
MANY = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
ANSWER = "msg_0000000000000001"
NEXT = "msg_0000000000000002"


def everything(path: Path) -> tuple[list[Trace], Counter[str]]:
    """What can be read below a path; files that cannot be read on are counted as `broken`."""
    skipped: Counter[str] = Counter()
    traces: list[Trace] = []
    for batch in group_batches(walk_logs([path], skipped), skipped):
        for file in batch.files:
            try:
                traces += batch.format.read([file])
            except OSError:
                skipped["broken"] += 1
    return traces, skipped


def of(data: bytes) -> list[Trace]:
    traces = list(ClaudeCodeFormat().read([of_bytes("/p/s1.jsonl", data)]))
    for trace in traces:
        assert sum(1 for _ in expand(trace)) == len(trace.turns)
    return traces


def counted(traces: list[Trace]) -> Counter[str]:
    return sum((trace.losses for trace in traces), Counter[str]())


def talk(turns: int = 12) -> Log:
    log = Log()
    for number in range(turns):
        log.user(f"do {number}")
        log.assistant(f"msg_{number:016}", "so", (f"t{number}", "Read"))
        log.result(f"t{number}", "x" * number)
        log.aside("file-history-snapshot", snapshot={})
    return log


def answers(lines: list[bytes]) -> set[str]:
    ids: set[str] = set()
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("type") == "assistant" and not record.get("isApiErrorMessage"):
            message = record.get("message")
            if message and message.get("model") != "<synthetic>":
                ids.add(message.get("id") or record.get("requestId") or record["uuid"])
    return ids


# --- lines removed, repeated, in another order ------------------------------------------------------------


def accounted(lines: list[bytes]) -> None:
    """The lines of a file add up: to records, to those that stand there twice, and to those that are lost."""
    traces = of(b"".join(lines))
    losses = counted(traces)
    uuids = [record["uuid"] for line in lines if "uuid" in (record := parsed(line))]
    assert losses["repeated-uuid"] == len(uuids) - len(set(uuids))
    assert losses["bad-json"] == sum(parsed(line) == {} for line in lines)
    expected = answers(lines)
    got = {turn.message_id.partition("#")[0] for trace in traces for turn in trace.turns}
    assert got == expected


def parsed(line: bytes) -> dict[str, object]:
    try:
        return json.loads(line)
    except ValueError:
        return {}


@MANY
@given(seed=st.integers(0, 1 << 32))
def test_turns_and_losses_add_up_when_lines_are_removed_or_repeated(seed: int) -> None:
    dice = random.Random(seed)
    lines = [
        line for line in talk().data().splitlines(keepends=True) for _ in range(dice.choice((0, 1, 1, 1, 2, 3)))
    ]
    accounted(lines)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no recorded sessions beside the project")
def test_lines_of_real_sessions_removed_and_repeated_add_up() -> None:
    for path in sorted(SHARED.glob("*.jsonl")):
        lines = path.read_bytes().splitlines(keepends=True)
        for seed in range(3):
            dice = random.Random(f"{path.name} {seed}")
            some = [line for line in lines for _ in range(dice.choice((0, 1, 1, 1, 2)))]
            if not some:
                continue
            traces = of(b"".join(some))
            bad = sum(not parsed(line) for line in some)
            losses = counted(traces)
            assert losses["bad-json"] == bad or not bad
            turns = {turn.message_id.partition("#")[0] for trace in traces for turn in trace.turns}
            assert turns == answers(some)


@MANY
@given(seed=st.integers(0, 1 << 32))
def test_lines_in_any_order_give_the_same_states(seed: int) -> None:
    log = talk()
    before = {key: outline(state) for key, state in by_message(*read(log)).items()}
    random.Random(seed).shuffle(log.lines)
    after = {key: outline(state) for key, state in by_message(*read(log)).items()}
    assert after == before


# --- what stands in lines ---------------------------------------------------------------------------------


def test_a_very_deeply_nested_line_loses_only_itself() -> None:
    log = talk(2)
    deep = b'{"type":"user","uuid":"deep","parentUuid":null,"message":{"role":"user","content":' + b"[" * 200_000
    closed = deep + b"]" * 200_000 + b"}}"
    for bad in (deep, closed, b"[" * 1_000_000, b'{"a":' * 100_000):
        traces = of(log.data() + bad + b"\n")
        assert sum(len(trace.turns) for trace in traces) == 2
        assert sum(counted(traces).values()) == 1


def test_a_conversation_of_3000_turns_is_read_without_recursion_errors() -> None:
    log = Log()
    for number in range(3000):
        log.user("more")
        log.assistant(f"msg_{number:016}", "yes")
    (trace,) = read(log)
    assert len(trace.turns) == 3000
    log.lines.reverse()
    (trace,) = read(log)
    assert len(trace.turns) == 3000


def test_a_log_with_a_hundred_thousand_branches_is_read() -> None:
    log = Log()
    root = log.user("try")
    for number in range(100_000):
        log.assistant(f"msg_{number:016}", "one", parent=root)
    (trace,) = ClaudeCodeFormat().read([of_bytes("/p/s1.jsonl", log.data())])
    assert len(trace.turns) == 100_000 and not trace.losses
    assert sum(turn.branch == "active" for turn in trace.turns) == 1
    assert [len(state.messages) for _, state in zip(range(3), expand(trace), strict=False)] == [2, 2, 2]


def test_cycles_of_parents_are_broken_and_counted() -> None:
    log = Log()
    log.user("a", uuid="u1", parent="u3")
    log.assistant(ANSWER, "b", uuid="u2", parent="u1")
    log.user("c", uuid="u3", parent="u2")
    log.user("self", uuid="u4", parent="u4")
    log.assistant(NEXT, "d", uuid="u5", parent="u4")
    (trace,) = read(log)
    assert set(by_message(trace)) == {ANSWER, NEXT}
    assert trace.losses["circle"] == 2


def test_tiny_lines_nuls_and_other_encodings() -> None:
    good = talk(3).data()
    for bad in (b"\n" * 300_000, b" \t\n\r\n" * 50_000):
        traces = of(bad + good + bad)
        assert sum(len(trace.turns) for trace in traces) == 3 and not counted(traces)
    numbers = of(b"0\n" * 50_000 + good)
    assert sum(len(trace.turns) for trace in numbers) == 3 and counted(numbers) == {"not-an-object": 50_000}
    nuls = of(b"\0" * 100_000 + b"\n" + good)
    assert sum(len(trace.turns) for trace in nuls) == 3 and counted(nuls) == {"bad-json": 1}
    wide = counted(of(good.decode().encode("utf-16")))
    assert wide["bad-json"] >= good.count(b"\n")


def test_a_bad_line_is_counted_and_all_other_states_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    log = talk(40)
    whole = log.data().splitlines(keepends=True)
    expected = {key: outline(state) for key, state in by_message(*read(log)).items()}
    for piece in (64, 1000, 1 << 16):
        monkeypatch.setattr(records, "_READ_BYTES", piece)
        for at in (0, 1, len(whole) // 2, len(whole)):
            traces = of(b"".join([*whole[:at], b"{broken\n", *whole[at:]]))
            assert counted(traces) == {"bad-json": 1}
            assert {key: outline(state) for key, state in by_message(*traces).items()} == expected


def test_a_line_that_is_too_long_is_left_out_whatever_surrounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = talk(6).data().splitlines(keepends=True)
    long = b'{"type":"user","uuid":"long","x":"' + b"y" * 9000 + b'"}\n'
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 4000)
    for piece in (64, 512, 3000):
        monkeypatch.setattr(records, "_READ_BYTES", piece)
        for at in (0, 3, len(whole)):
            for end in (long, long[:-1] if at == len(whole) else long):
                traces = of(b"".join([*whole[:at], end, *whole[at:]]))
                assert sum(len(trace.turns) for trace in traces) == 6
                assert counted(traces)["line-too-long"] == 1


# --- what lies in a tree ----------------------------------------------------------------------------------


def test_a_directory_of_pipes_links_and_bad_archives_is_read_and_counted(tmp_path: Path) -> None:
    good = talk(3).data()
    (tmp_path / "good.jsonl").write_bytes(good)
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self.jsonl").symlink_to("self.jsonl")
    (tmp_path / "null.jsonl").symlink_to("/dev/zero")
    (tmp_path / "bytes\udcff.jsonl").write_bytes(b"\x80\x81" * 40)
    (tmp_path / "empty.jsonl").touch()
    with zipfile.ZipFile(tmp_path / "up.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../etc/s2.jsonl", good.replace(b'"s1', b'"s2'))
        archive.writestr("bomb.jsonl", b"\0" * 200_000_000)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(good + b"\0" * 100_000_000))
    traces, skipped = everything(tmp_path)
    expected = {
        "special_file": 1,
        "link": 3,
        "unknown_format": 1,
        "empty_file": 1,
        "oversized_member": 1,
        "broken": 1,
    }
    assert skipped == expected
    assert {Path(trace.source).name for trace in traces} >= {"good.jsonl", "s2.jsonl"}
    assert not list(tmp_path.parent.glob("etc"))


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_files_and_directories_without_read_permission_are_counted(tmp_path: Path) -> None:
    (tmp_path / "no").mkdir()
    (tmp_path / "no").chmod(0)
    (tmp_path / "no.jsonl").write_bytes(b"{}")
    (tmp_path / "no.jsonl").chmod(0)
    _, skipped = everything(tmp_path)
    assert skipped == {"unreadable_directory": 1, "unreadable_file": 1}


def test_opening_a_log_replaced_by_a_pipe_fails_without_blocking(tmp_path: Path) -> None:
    path = tmp_path / "s1.jsonl"
    path.write_bytes(talk(1).data())
    file = log_file_at(str(path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="no longer a regular file"):
        file.open()


def shrunk(path: Path) -> None:
    os.truncate(path, 1000)


def grown(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b'{"type":"user","uui')


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [shrunk, grown, gone])
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "s1.jsonl"
    path.write_bytes(talk(400).data())
    file = log_file_at(str(path))
    stream = file.open()
    pending = [stream]

    def once() -> object:
        return pending.pop() if pending else path.open("rb")

    assert stream.peek(1)[:1] == b"{"  # type: ignore[attr-defined]
    change(path)
    lines = records.read_log(LogFile(str(path), file.size, once))  # type: ignore[arg-type]
    assert lines.records
    assert sum(lines.losses.values()) <= 1


def test_memory_is_bounded_by_the_longest_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1 << 20)

    class Endless:
        left = 300

        def read(self, size: int) -> bytes:
            self.left -= 1
            return b"x" * (1 << 20) if self.left > 0 else b""

        def __enter__(self) -> Endless:
            return self

        def __exit__(self, *_: object) -> None:
            return None

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = records.read_log(LogFile("/p/s.jsonl", 300 << 20, Endless))  # type: ignore[arg-type]
    assert lines.losses == {"line-too-long": 1} and not lines.records
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_large_log_is_not_held_in_memory_but_for_what_states_need(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    log.user("Look at everything.")
    for at in range(20):
        log.assistant(f"msg_{at:016}", thinking(f"Thought {at}."), f"Step {at}.", (f"t{at}", "Task", {"n": at}))
        log.add("progress", data={"type": "hook_progress", "hookEvent": "PostToolUse", "shown": "y" * (1 << 18)})
        tool_result = {"agentId": f"a{at}"} if at == 3 else {"shown": "x" * (1 << 18)}
        log.result(f"t{at}", f"It says {at}.", toolUseResult=tool_result)
    agent = Log("s1", isSidechain=True, agentId="a3")
    agent.user("Explore.")
    agent.assistant("msg_00000000000000a3", "Explored.")
    others = {"agent-a3.jsonl": agent.data()}
    usual = read(log, **others)
    monkeypatch.setattr(records, "_CHUNK_BYTES", 0)
    large = read(log, **others)
    assert by_message(*large) == by_message(*usual)
    assert [trace.parent for trace in large] == [trace.parent for trace in usual]
    assert large[1].parent is not None and large[1].parent.tool_use_id == "t3"
    tracemalloc.start()
    try:
        lines = records.read_log(of_bytes("/p/s1.jsonl", log.data()))
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(lines.records) == 101
    assert allocated < 1 << 20  # of 10 MB
