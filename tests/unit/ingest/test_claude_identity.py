"""Claude Code's logs: a conversation is what its records say, wherever and under whatever name its file lies."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from understudy.ingest import trace_store
from understudy.ingest.formats.registry import group_batches
from understudy.ingest.log_files import LogFile
from understudy.ingest.trace import Trace, expand, state_id
from understudy.store import Store
from understudy.store.sqlite import FILE

from support.claude_log import Log, of_bytes, read

ANSWERS = [f"msg_000000000000000{number}" for number in range(4)]


def session(name: str, answers: list[str], **envelope: str) -> Log:
    log = Log(name, **envelope)
    for answer in answers:
        log.user(f"prompt for {answer}")
        log.assistant(answer, f"answer {answer}")
    return log


def collected(files: dict[str, bytes]) -> list[Trace]:
    """The traces in files at these paths, read in the batches that an ingest reads them in."""
    logs = [of_bytes(path, data) for path, data in files.items()]
    return [trace for batch in group_batches(logs, counter()) for trace in batch.format.read(batch.files)]


def counter() -> Counter[str]:
    return Counter[str]()


def turns(traces: list[Trace]) -> dict[str, list[str]]:
    return {trace.trace_id: [turn.message_id for turn in trace.turns] for trace in traces}


def test_files_of_the_same_name_are_told_apart_by_their_session_ids() -> None:
    files = {
        "/logs/a/full.jsonl": session("s-one", ANSWERS[:2]).data(),
        "/logs/b/full.jsonl": session("s-two", ANSWERS[2:]).data(),
    }
    assert turns(collected(files)) == {"s-one": ANSWERS[:2], "s-two": ANSWERS[2:]}


def test_copies_of_a_growing_log_are_one_conversation() -> None:
    whole = session("s-one", ANSWERS)
    part = b"".join(whole.data().splitlines(keepends=True)[:4])
    files = {"/logs/a/full.jsonl": part, "/logs/b/full.jsonl": whole.data(), "/logs/b/s-one.jsonl": part}
    (trace,) = collected(files)
    assert turns([trace]) == {"s-one": ANSWERS}
    assert [len(state.messages) for state in expand(trace, system=None)] == [1, 3, 5, 7]


def test_parts_of_a_session_in_several_files_are_joined_in_order_of_time() -> None:
    lines = session("s-one", ANSWERS).data().splitlines(keepends=True)
    parts = {"3": lines[5:], "1": lines[:2], "2": lines[2:5]}
    (trace,) = collected({f"/logs/{name}/full.jsonl": b"".join(part) for name, part in parts.items()})
    assert turns([trace]) == {"s-one": ANSWERS}
    assert [len(state.messages) for state in expand(trace, system=None)] == [1, 3, 5, 7]


def test_a_fork_that_lies_elsewhere_does_not_repeat_turns() -> None:
    original = session("s-one", ANSWERS[:2])
    fork = session("s-one", ANSWERS[:3])
    for line in fork.lines:
        line.update(sessionId="s-fork", forkedFrom={"sessionId": "s-one", "messageUuid": line["uuid"]})
    answers = turns(collected({"/a/full.jsonl": original.data(), "/b/full.jsonl": fork.data()}))
    assert sorted(answer for own in answers.values() for answer in own) == ANSWERS[:3]
    assert answers["s-fork"][-1] == ANSWERS[2]


def test_a_file_with_records_of_two_sessions_belongs_to_the_last_session_id() -> None:
    """2.1.69 copied the records of the session that it resumed, with their session id."""
    log = session("s-one", ANSWERS[:3])
    for line in log.lines[4:]:
        line["sessionId"] = "s-two"
    assert list(turns(collected({"/logs/renamed.jsonl": log.data()}))) == ["s-two"]
    assert list(turns(collected({"/logs/s-one.jsonl": log.data()}))) == ["s-one"]


def test_a_file_without_session_ids_is_named_after_itself() -> None:
    log = session("s-one", ANSWERS[:1])
    for line in log.lines:
        del line["sessionId"]
    assert list(turns(collected({"/logs/mine.jsonl": log.data()}))) == ["mine"]


def test_a_conversation_stored_under_its_file_name_is_not_stored_twice(tmp_path: Path) -> None:
    log = session("s-one", ANSWERS[:2])
    (named,) = read(log)
    named.trace_id = named.session_id = "full"
    with Store.open(tmp_path / "store") as store:
        trace_store.store_trace(store.sessions, named).result()
        ask(tmp_path / "store", state_id("full", ANSWERS[0]))
        (now,) = collected({"/logs/a/full.jsonl": log.data()})
        for expected in ((2, 0, 0), (0, 0, 2)):
            changes = trace_store.store_trace(store.sessions, now).result()
            assert (changes.new, changes.changed, changes.same) == expected
        traces = list(trace_store.traces(store))
        assert turns(traces) == {"s-one": ANSWERS[:2]}
        states = [state.state_id for state in expand(traces[0])]
        assert states == [state_id("s-one", answer) for answer in ANSWERS[:2]]
    with closing(sqlite3.connect(tmp_path / "store" / FILE)) as raw:
        assert raw.execute("SELECT state_id FROM asks").fetchall() == [(states[0],)]


def ask(store: Path, state: str) -> None:
    """Store what a teacher was asked about a state."""
    with closing(sqlite3.connect(store / FILE)) as raw:
        raw.execute("INSERT INTO replays VALUES ('r', x'7b7d', 1.0)")
        columns = "id, replay_id, state_id, kind, teacher, model, number, status, asked_at"
        raw.execute(
            f"INSERT INTO asks ({columns}) VALUES ('a', 'r', ?, 'teacher', 't', 'm', 0, 'asked', 1.0)", (state,)
        )
        raw.commit()


def test_the_batch_of_a_session_is_read_whole() -> None:
    log = session("s-one", ANSWERS[:1])
    files = [of_bytes(path, log.data()) for path in ("/a/full.jsonl", "/b/full.jsonl", "/c/other.jsonl")]
    lone = of_bytes("/d/full.jsonl", session("s-two", ANSWERS[1:]).data())
    batches = group_batches([files[0], lone, *files[1:]], counter())
    assert [sorted(file.path for file in batch.files) for batch in batches] == [
        [file.path for file in files],
        [lone.path],
    ]


def test_a_file_that_joins_two_batches_puts_them_together() -> None:
    one, two = session("s-one", ANSWERS[:1]), session("s-two", ANSWERS[1:2])
    both = session("s-one", ANSWERS[:1]).data() + two.data()
    logs: list[LogFile] = [
        of_bytes("/a/full.jsonl", one.data()),
        of_bytes("/b/full.jsonl", two.data()),
        of_bytes("/c/full.jsonl", both),
    ]
    (batch,) = group_batches(logs, counter())
    assert len(batch.files) == 3
