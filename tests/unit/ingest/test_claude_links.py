"""Links between records that do not lead to what a response was given to, and what a resume makes of them."""

from __future__ import annotations

import pytest

from support.claude_log import Log, by_message, outline, read

BEFORE, BETWEEN, NEXT, LAST = (f"msg_01{letter * 20}" for letter in "abcd")
START = ["user: start", "assistant: Started. +t1", "t1: one"]
SUMMARY = "user: Summary: start"


def compacted_at_work(version: str = "2.1.87") -> Log:
    """A session compacted while the model worked; the next response was logged before the summary."""
    log = Log(version=version)
    log.user("start")
    log.assistant(BEFORE, "Started.", ("t1", "Bash"))
    result = log.result("t1", "one")
    log.system("compact_boundary", parent=None, uuid="bound", logicalParentUuid=result)
    log.assistant(BETWEEN, "Going on.", parent=result, uuid="between")
    log.user("Summary: start", parent="bound", isCompactSummary=True, isVisibleInTranscriptOnly=True)
    return log


def test_a_response_logged_before_the_summary_was_given_to_the_summary() -> None:
    log = compacted_at_work()
    log.user("more", parent="between")
    log.assistant(NEXT, "Done.")
    states = by_message(*read(log))
    assert outline(states[BETWEEN]) == [SUMMARY]
    assert outline(states[NEXT]) == [SUMMARY, "assistant: Going on.", "user: more"]
    assert {state.branch for state in states.values()} == {"active"}


def test_the_boundary_may_name_a_record_that_is_not_logged_as_the_one_before_it() -> None:
    log = compacted_at_work("2.1.94")
    log.lines[4]["logicalParentUuid"] = "a-reminder"
    assert log.lines[4]["subtype"] == "compact_boundary"
    assert outline(by_message(*read(log))[BETWEEN]) == [SUMMARY]


def test_attachments_linked_to_the_summary_were_sent_with_it() -> None:
    log = compacted_at_work("2.1.107")
    skills = [{"name": "demo", "path": "demo", "content": "Show it."}]
    log.attachment("invoked_skills", skills=skills)
    log.user("more", parent="between")
    log.assistant(NEXT, ("t2", "Bash"), ("t3", "Bash"))
    states = by_message(*read(log))
    (first,) = outline(states[BETWEEN])
    assert "Show it." in first and "Summary: start" in first
    assert outline(states[NEXT]) == [first, "assistant: Going on.", "user: more"]


def test_a_resume_of_such_a_session_sends_what_was_before_the_compaction_and_no_summary() -> None:
    log = compacted_at_work("2.1.107")
    log.user("more", parent="between")
    log.assistant(NEXT, "Done.")
    log.aside("last-prompt", lastPrompt="more")
    log.user("again")
    log.assistant(LAST, "Again.")
    states = by_message(*read(log))
    assert outline(states[NEXT])[0] == SUMMARY
    assert outline(states[LAST]) == [
        *START,
        "assistant: Going on.",
        "user: more",
        "assistant: Done.",
        "user: again",
    ]
    assert states[LAST].notes == ("resume_not_logged",)


def test_a_response_given_before_the_boundary_keeps_its_place() -> None:
    log = compacted_at_work()
    log.lines[5]["timestamp"] = log.lines[3]["timestamp"]  # an answer that only was written late
    assert log.lines[5]["uuid"] == "between"
    assert outline(by_message(*read(log))[BETWEEN]) == START


def test_a_prompt_behind_the_same_record_is_a_rewind_and_keeps_its_place() -> None:
    log = compacted_at_work()
    log.user("differently", parent=log.lines[3]["uuid"])
    log.assistant(NEXT, "Differently.")
    assert outline(by_message(*read(log))[NEXT]) == [*START, "user: differently"]


def test_a_boundary_without_a_summary_changes_no_link() -> None:
    log = compacted_at_work()
    del log.lines[6]
    assert outline(by_message(*read(log))[BETWEEN]) == START


@pytest.mark.parametrize(("pause", "kept"), [("04", True), ("40", False)])
def test_a_prompt_linked_to_another_sessions_log_is_where_a_later_resume_stops(pause: str, kept: bool) -> None:
    """The program joins records without a link only if hardly any time passed between them."""
    log = Log(version="2.1.107")
    log.user("start")
    log.assistant(BEFORE, "Started.")
    log.attachment("command_permissions", allowedTools=[])
    log.aside("last-prompt", lastPrompt="start")
    log.user("resumed", parent="in-another-log", timestamp=f"2026-11-21T10:00:{pause}.000Z")
    log.assistant(NEXT, "Resumed.")
    log.aside("last-prompt", lastPrompt="resumed")
    log.user("again")
    log.assistant(LAST, "Again.")
    states = by_message(*read(log))
    before = ["user: start", "assistant: Started."]
    assert outline(states[NEXT]) == [*before, "user: resumed"]
    assert outline(states[LAST]) == [
        *(before if kept else ()),
        "user: resumed",
        "assistant: Resumed.",
        "user: again",
    ]
    assert states[LAST].fidelity == "repaired"
