"""`understudy ingest --verify`: what is missing in states, or out of order, without knowing what was sent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from understudy.ingest.claude_code.log_format import ClaudeCodeFormat
from understudy.ingest.formats.registry import group_batches
from understudy.ingest.log_files import LogFile
from understudy.ingest.trace import Trace
from understudy.ingest.verify import CHECKS, VerifyReport, verify

from support import understudy
from support.claude_log import PROJECT, Log, of_bytes, thinking

ANSWER = "msg_0000000000000001"
NEXT = "msg_0000000000000002"


def checked(log: Log) -> VerifyReport:
    files = [of_bytes(f"{PROJECT}/{log.envelope['sessionId']}.jsonl", log.data())]
    return verify(group_batches(files, Counter()), lambda _: None)


def found(report: VerifyReport) -> dict[str, int]:
    assert set(report.counts) == set(CHECKS)
    return {check: count for check, count in report.counts.items() if count}


def conversation(thought: str = "Fine.") -> Log:
    log = Log(version="2.1.49")
    log.user("please add a test for the parser")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.result("t1", "it's done: all is well")
    log.assistant(NEXT, thinking(thought), "Done.")
    return log


def test_a_sound_log_has_no_findings() -> None:
    report = checked(conversation('The user said "Please add a test … for the parser".'))
    assert (report.files, report.conversations, report.states) == (1, 1, 2)
    assert found(report) == {}


def test_thoughts_that_quote_a_prompt_missing_from_the_state_are_findings() -> None:
    report = checked(conversation('The user asks me: "also update the changelog, please". I do.'))
    assert found(report) == {"unseen_citation": 1}
    assert report.findings[0].message_id == NEXT
    # What the user might say, and short or plain words, are no quotations of a prompt.
    for thought in (
        'The user might ask "why did you not do that?"',
        'The user said "yes"',
        'It says "whatever it is"',
    ):
        assert found(checked(conversation(thought))) == {}


def test_a_queued_prompt_missing_from_all_states_is_a_finding() -> None:
    log = conversation()
    log.aside("queue-operation", operation="enqueue", content="and the docs too")
    log.aside("queue-operation", operation="remove", timestamp="2026-11-21T10:00:30.000Z")
    assert found(checked(log)) == {}  # nothing was sent after it
    log.user("A summary.", isCompactSummary=True)
    log.lines[-1]["timestamp"] = "2026-11-21T10:00:31.000Z"
    log.assistant("msg_0000000000000003", "Going on.")
    log.lines[-1]["timestamp"] = "2026-11-21T10:00:32.000Z"
    assert found(checked(log)) == {"queued_prompt_missing": 1}


def test_results_without_calls_and_times_that_run_backwards() -> None:
    log = conversation()
    log.result("t9", "of no call")
    log.assistant("msg_0000000000000003", "Odd.")
    log.lines[-1]["timestamp"] = "2026-11-21T09:00:00.000Z"
    report = checked(log)
    assert found(report) == {"result_without_call": 1, "time_backwards": 1}
    assert {one.check for one in report.findings} == set(found(report))  # each is said where
    assert {one.trace_id for one in report.findings} == {log.envelope["sessionId"]}


def test_a_logged_response_without_a_state_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ClaudeCodeFormat.read

    def without_last(self: ClaudeCodeFormat, files: Sequence[LogFile]) -> Iterator[Trace]:
        for trace in whole(self, files):
            trace.turns.pop()
            yield trace

    monkeypatch.setattr(ClaudeCodeFormat, "read", without_last)
    report = checked(conversation())
    assert found(report) == {"message_missing": 1}
    assert report.findings[0].message_id == NEXT


def test_ingest_verify_reports_counts_and_exits_1_on_findings(tmp_path: Path) -> None:
    file = tmp_path / "s1.jsonl"
    file.write_bytes(conversation().data())
    sound = understudy("ingest", "--verify", str(file))
    assert sound.returncode == 0 and "2 states of 1 conversations in 1 files" in sound.stdout
    file.write_bytes(conversation('The user wrote "something else entirely"').data())
    bad = understudy("ingest", "--verify", str(file), "--json")
    assert bad.returncode == 1
    report = json.loads(bad.stdout)
    assert report["counts"]["unseen_citation"] == 1
    assert report["findings"] == [
        {"check": "unseen_citation", "source": str(file), "trace_id": "s1", "message_id": NEXT}
    ]
    assert "something else" not in bad.stdout + bad.stderr
    for option in (("--output", str(tmp_path / "x.jsonl")), ("--redact",)):
        refused = understudy("ingest", "--verify", str(file), *option)
        assert refused.returncode != 0 and "--verify only checks logs and writes nothing" in refused.stderr
    assert sorted(tmp_path.iterdir()) == [file]
