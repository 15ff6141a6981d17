"""Parallel calls that a resume without a trace in the log may have lost, and what shows that it did not."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from support.claude_log import Log, by_message, outline, read

CALLS, LOOKED, NEXT, LAST = (f"msg_01{letter * 20}" for letter in "abcd")
LOST = ("resume_not_logged",)
LONG = "x = 1\n" * 20_000


def usage(read: int, written: int, new: int = 3) -> dict[str, int]:
    return {"cache_read_input_tokens": read, "cache_creation_input_tokens": written, "input_tokens": new}


def worked(result: str = "one", version: str = "2.1.39") -> Log:
    """A session up to the answer to two parallel calls, whose results hang on different records."""
    log = Log(version=version)
    log.user("look", todos=[])
    first = log.assistant(CALLS, ("t1", "Bash"), usage=usage(0, 20_000))
    second = log.assistant(CALLS, ("t2", "Bash"), usage=usage(0, 20_000))
    log.result("t1", result, parent=first)
    log.result("t2", "two", parent=second)
    log.assistant(LOOKED, "Looked.", usage=usage(20_000, 10_000))
    return log


def notes(log: Log, message_id: str) -> tuple[str, ...]:
    return by_message(*read(log))[message_id].notes


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        (usage(30_000, 100), ()),  # the request behind the calls was read again from the cache
        (usage(20_000, 3_000), LOST),  # only what stands in front of them was
        (usage(0, 30_100), LOST),  # the cache had expired
        (usage(0, 0, 0), LOST),  # a server that reports nothing
        (None, LOST),
    ],
)
def test_calls_read_from_the_prompt_cache_count_as_not_lost(
    answered: dict[str, int] | None, expected: tuple[str, ...]
) -> None:
    log = worked()
    log.user("go on")
    log.assistant(NEXT, "Going on.", usage=answered)
    assert notes(log, NEXT) == expected


def test_any_prompt_can_be_noted_as_the_first_after_a_resume() -> None:
    log = worked()
    log.user("go on")
    log.assistant(NEXT, "Going on.", usage=usage(30_000, 100))
    log.user("and further")
    log.assistant(LAST, "Further.", usage=usage(20_000, 3_000))
    assert notes(log, NEXT) == ()
    assert notes(log, LAST) == LOST


@pytest.mark.parametrize(
    ("result", "prompt", "todos", "grown", "expected"),
    [
        (LONG, "go on", [], 100, ()),
        (LONG, "go on", [], -30_000, LOST),
        ("one", "go on", [], 100, LOST),
        (LONG, LONG, [], 100, LOST),  # the prompt may be as long as what was lost
        (LONG, "go on", None, 100, ()),
        (LONG[:30_000], "go on", None, 100, LOST),  # another run may have more tools
        (LONG[:30_000], "go on", [], 100, ()),
    ],
)
def test_the_growth_of_the_prompt_tokens_shows_whether_calls_were_lost(
    result: str, prompt: str, todos: list[str] | None, grown: int, expected: tuple[str, ...]
) -> None:
    log = worked(result)
    log.user(prompt, **({} if todos is None else {"todos": todos}))
    log.assistant(NEXT, "Going on.", usage=usage(0, 30_000 + grown))
    assert notes(log, NEXT) == expected


def test_a_request_that_was_stopped_may_have_filled_the_cache() -> None:
    log = worked()
    log.user("go on")
    log.user([{"type": "text", "text": "[Request interrupted by user]"}])
    log.user("go on, please")
    log.assistant(NEXT, "Going on.", usage=usage(30_000, 100))
    assert notes(log, NEXT) == LOST


def test_a_compaction_after_tool_calls_notes_no_unlogged_resume() -> None:
    log = worked()
    log.system("compact_boundary", parent=None)
    log.user("What was done: looked.", isCompactSummary=True)
    log.assistant(NEXT, "Going on.")
    assert "resume_not_logged" not in notes(log, NEXT)


def test_a_skills_text_after_its_call_does_not_count_as_a_prompt() -> None:
    log = worked()
    log.user([{"type": "text", "text": "Base directory for this skill"}], isMeta=True, sourceToolUseID="t2")
    log.assistant(NEXT, "Going on.", usage=usage(0, 30_100))
    assert notes(log, NEXT) == ()


def test_hooks_of_a_resumed_session_show_that_it_lost_calls() -> None:
    log = worked()
    log.add(
        "progress", data={"type": "hook_progress", "hookEvent": "SessionStart", "hookName": "SessionStart:resume"}
    )
    log.user("go on")
    log.assistant(NEXT, "Going on.", usage=usage(20_000, 3_000))
    state = by_message(*read(log))[NEXT]
    assert state.notes == ()
    assert outline(state) == ["user: look", "assistant: +t2", "t2: two", "assistant: Looked.", "user: go on"]


def test_a_synthetic_response_after_a_command_shows_a_resume() -> None:
    log = worked()
    log.user("<command-name>/exit</command-name>")
    log.assistant("5828ecc9", "No response requested.", model="<synthetic>")
    log.user("go on")
    log.assistant(NEXT, "Going on.", usage=usage(20_000, 3_000))
    state = by_message(*read(log))[NEXT]
    assert state.notes == ()
    assert "t1: one" not in outline(state) and "t2: two" in outline(state)


def calls_to_read(prompts: int) -> int:
    """How many functions are called to read a session with calls that each of its prompts may have lost."""
    log = worked()
    for number in range(prompts):
        log.user("go on", todos=[])
        log.assistant(f"msg_02{number:020}", "Going on.", usage=usage(20_000, 3_000))
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        read(log)
    finally:
        sys.setprofile(None)
    return calls


def test_a_session_with_lost_calls_is_read_in_linear_time() -> None:
    few, some, many = map(calls_to_read, (20, 120, 220))
    assert many - some < 1.2 * (some - few)
