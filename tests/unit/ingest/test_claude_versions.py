"""Claude Code's logs: what versions sent that their records do not say, or say otherwise."""

from __future__ import annotations

from support.claude_log import Log, by_message, outline, read

ANSWER = "msg_0000000000000001"
NEXT = "msg_0000000000000002"
LAST = "msg_0000000000000003"


def test_calls_that_were_killed_are_left_out_when_the_session_goes_on() -> None:
    """2.1.117 sent of a broken turn what had a result."""
    log = Log()
    log.user("look")
    first = log.assistant(ANSWER, "Looking.", ("t1", "Read"))
    log.assistant(ANSWER, ("t2", "Bash"))
    log.result("t1", "one", parent=first)
    log.user("go on")
    log.assistant(NEXT, "Going.")
    found = by_message(*read(log))
    assert outline(found[NEXT])[1:] == ["assistant: Looking. +t1", "t1: one", "user: go on"]
    assert (found[NEXT].fidelity, found[NEXT].notes) == ("repaired", ("missing-result",))
    assert [call["id"] for call in found[ANSWER].student_action.tool_calls] == ["t1", "t2"]


def test_a_queued_prompt_of_which_only_the_queue_is_logged() -> None:
    """2.1.9 sent it behind the answer that it waited for, and did not know of it later."""
    log = Log(version="2.1.9")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.aside("queue-operation", operation="enqueue", content="and that?")
    log.aside("queue-operation", operation="enqueue", content="<task-notification>done</task-notification>")
    log.result("t1", "one")
    log.aside("queue-operation", operation="remove")
    log.assistant(NEXT, "Looked.")
    log.assistant(LAST, "That too.")
    log.user("thanks")
    log.assistant("msg_0000000000000004", "Welcome.")
    found = by_message(*read(log))
    assert outline(found[NEXT])[-1] == "t1: one"
    assert outline(found[LAST])[-2:] == ["assistant: Looked.", "user: and that?"]
    later = outline(found["msg_0000000000000004"])
    assert later[-1] == "user: thanks" and not any("and that?" in line for line in later)


def test_the_queue_tells_when_the_program_was_started_again() -> None:
    """Versions without `last-prompt` records lose parallel calls at a resume too."""
    started = [("dequeue", None)], [("enqueue", "go on"), ("dequeue", None)]
    streamed = [("enqueue", None), ("dequeue", None)]
    for operations in (*started, streamed):
        log = Log(version="2.1.9")
        log.user("look")
        first = log.assistant(ANSWER, ("t1", "Read"))
        second = log.assistant(ANSWER, ("t2", "Read"))
        log.result("t1", "one", parent=first)
        log.result("t2", "two", parent=second)
        log.assistant(NEXT, "Done.")
        for operation, content in operations:
            log.aside("queue-operation", operation=operation, **({"content": content} if content else {}))
        log.user("go on")
        log.assistant(LAST, "Going.")
        expected = "assistant: +t1 +t2" if operations is streamed else "assistant: +t2"
        assert outline(by_message(*read(log))[LAST])[1] == expected


def test_errors_were_sent_as_answers_once() -> None:
    sent = {
        "1.0.128": ["user: hi", "assistant: API Error", "user: again"],
        "2.1.150": ["user: hi\n\nagain"],
    }
    for version, lines in sent.items():
        log = Log(version=version)
        log.user("hi")
        log.assistant("e1", "API Error", model="<synthetic>", isApiErrorMessage=True)
        log.user("again")
        log.assistant(ANSWER, "hello")
        found = by_message(*read(log))
        assert found.keys() == {ANSWER} and outline(found[ANSWER]) == lines


def test_after_an_error_of_too_long_an_answer_another_sentence_continues_it() -> None:
    log = Log(version="2.1.9")
    log.user("write")
    log.assistant(ANSWER, "It was a dark and")
    error = "API Error: Claude's response exceeded the 32000 output token maximum."
    log.assistant("e1", error, model="<synthetic>", isApiErrorMessage=True)
    log.assistant(NEXT, "stormy night")
    state = by_message(*read(log))[NEXT]
    assert outline(state)[-1].startswith("user: Your response was cut off because")
    assert state.notes == ("continuation-not-logged",)


def test_the_first_versions_sent_the_first_answer_twice_in_print_mode() -> None:
    for prompts in (1, 2):
        log = Log(version="1.0.38")
        log.user("look")
        log.assistant(ANSWER, ("t1", "Read"))
        log.result("t1", "one")
        log.assistant(NEXT, "Done.")
        if prompts == 2:
            log.user("thanks")
        found = by_message(*read(log))
        assert len(outline(found[NEXT])) == (5 if prompts == 1 else 3)


def test_what_a_hook_said_to_a_prompt_is_sent() -> None:
    log = Log(version="1.0.102")
    log.user("hi")
    log.user("<user-prompt-submit-hook>be kind</user-prompt-submit-hook>", isVisibleInTranscriptOnly=True)
    log.user("shown only", isVisibleInTranscriptOnly=True)
    log.assistant(ANSWER, "hello")
    (line,) = outline(by_message(*read(log))[ANSWER])
    assert "be kind" in line and "shown only" not in line


def test_a_call_of_a_tool_that_is_not_there_is_not_rewritten() -> None:
    log = Log(version="2.1.260")
    log.user("plan")
    log.assistant(ANSWER, ("t1", "ExitPlanMode", {"plan": "# Plan"}))
    missing = "<tool_use_error>Error: No such tool available: ExitPlanMode.</tool_use_error>"
    log.user([{"type": "tool_result", "tool_use_id": "t1", "content": missing, "is_error": True}])
    log.assistant(NEXT, "Planned.")
    call = by_message(*read(log))[NEXT].messages[1]["tool_calls"][0]
    assert call["function"]["arguments"] == '{"plan":"# Plan"}'
