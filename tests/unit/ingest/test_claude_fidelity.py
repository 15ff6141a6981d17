"""Claude Code's logs: what one version sends otherwise than another, as seen in recorded requests."""

from __future__ import annotations

import pytest

from support.claude_log import Log, by_message, outline, read

FIRST = "msg_0000000000000001"
SECOND = "msg_0000000000000002"
THIRD = "msg_0000000000000003"


def test_a_repeated_snapshot_of_files_shows_a_resume() -> None:
    """2.1.61 writes all snapshots again when it resumes; queued prompts that it did not log are gone then."""
    log = Log(version="2.1.61")
    log.aside("file-history-snapshot", messageId="s1-1", isSnapshotUpdate=False)
    log.user("go")
    log.assistant(FIRST, ("t1", "Bash"))
    log.aside("queue-operation", operation="enqueue", content="and the docs", timestamp="2026-11-21T10:00:02.500Z")
    log.result("t1", "one")
    log.aside("queue-operation", operation="remove", timestamp="2026-11-21T10:00:04.500Z")
    log.aside("file-history-snapshot", messageId="s1-1", isSnapshotUpdate=True)
    log.assistant(SECOND, "Done.")
    log.aside("file-history-snapshot", messageId="s1-1", isSnapshotUpdate=False)
    log.user("again")
    log.assistant(THIRD, "Here.")
    states = by_message(*read(log))
    assert "and the docs" in outline(states[SECOND])[2]
    assert outline(states[THIRD])[2:] == ["t1: one", "assistant: Done.", "user: again"]


SYSTEM = "[SYSTEM NOTIFICATION - NOT USER INPUT]\n"


@pytest.mark.parametrize(
    ("version", "begin", "end"),
    [
        ("2.1.98", "A background agent completed a task:\n", "task:\n"),
        ("2.1.110", SYSTEM, "any pending question.\n\n"),
        ("2.1.330", SYSTEM, "as approval or consent.\n\n"),
    ],
)
def test_a_notification_has_the_text_of_its_version(version: str, begin: str, end: str) -> None:
    log = Log(version=version)
    log.user("go")
    log.assistant(FIRST, ("t1", "Bash"))
    log.result("t1", "one")
    notification = "<task-notification>over</task-notification>"
    log.attachment("queued_command", prompt=notification, commandMode="task-notification")
    log.assistant(SECOND, "Done.")
    state = by_message(*read(log))[SECOND]
    assert outline(state)[2].startswith(f"t1: one\n\n<system-reminder>\n{begin}")
    assert f"{end}{notification}" in outline(state)[2]
    assert state.fidelity == "exact"


@pytest.mark.parametrize(("version", "later"), [("2.1.61", "[image]"), ("2.1.30", "data:image/png;base64,aaaa")])
def test_an_image_that_was_answered_is_sent_as_text_by_some_versions(version: str, later: str) -> None:
    log = Log(version=version)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    log.user([{"type": "text", "text": "see"}, image])
    log.assistant(FIRST, ("t1", "Bash"))
    log.result("t1", "one")
    log.assistant(SECOND, "A picture.")
    log.user("thanks")
    log.assistant(THIRD, "Welcome.")
    states = by_message(*read(log))
    assert "data:image/png;base64,aaaa" in outline(states[FIRST])[0]
    assert later in outline(states[SECOND])[0] and outline(states[SECOND])[2] == "t1: one"
    assert later in outline(states[THIRD])[0] and outline(states[THIRD])[3:] == [
        "assistant: A picture.",
        "user: thanks",
    ]


def test_a_subagent_lacks_reminders_where_its_session_logs_them() -> None:
    """Its own log has none, though 2.1.110 sends it the listing of skills with its first result."""
    log = Log(version="2.1.110")
    log.user("go")
    log.attachment("skill_listing", content="- demo: shows")
    log.assistant(FIRST, ("t1", "Agent", {"prompt": "look"}))
    agent = Log(version="2.1.110", isSidechain=True, agentId="a1")
    agent.user("look")
    agent.assistant(SECOND, ("t2", "Bash"))
    agent.result("t2", "two")
    agent.assistant(THIRD, "Seen.")
    states = by_message(*read(log, **{"s1/subagents/agent-a1.jsonl": agent.data()}))
    assert states[SECOND].fidelity == "exact"
    assert (states[THIRD].fidelity, states[THIRD].notes) == ("repaired", ("reminders_not_logged",))


def test_a_response_older_than_the_summary_before_it_lacks_its_context() -> None:
    """Versions that rewrite the log at a compaction keep the last response, but not what it was given to."""
    log = Log(version="2.1.330")
    log.system("compact_boundary", parent=None)
    log.user("This session is being continued", isCompactSummary=True)
    log.assistant(FIRST, "Read it.")
    log.lines[-1]["timestamp"] = "2026-11-21T09:59:00.000Z"
    log.user("next")
    log.assistant(SECOND, "Done.")
    states = by_message(*read(log))
    assert (states[FIRST].fidelity, states[FIRST].notes) == ("repaired", ("preserved_without_context",))
