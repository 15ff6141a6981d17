"""Claude Code's logs: what versions sent that their records do not say, or say otherwise."""

from __future__ import annotations

import json

import pytest

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
    states = by_message(*read(log))
    assert outline(states[NEXT])[1:] == ["assistant: Looking. +t1", "t1: one", "user: go on"]
    assert (states[NEXT].fidelity, states[NEXT].notes) == ("repaired", ("missing-result",))
    assert [call["id"] for call in states[ANSWER].student_action.tool_calls] == ["t1", "t2"]


QUEUED_2_1_9 = (
    "<system-reminder>\nThe user sent the following message:\nand that?\n\n"
    "Please address this message and continue with your tasks.\n</system-reminder>"
)


def test_a_queued_prompt_of_which_only_the_queue_is_logged() -> None:
    """2.0.64 and 2.1.9 sent it in the result, and once more behind the response; then that copy was forgotten."""
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
    states = by_message(*read(log))
    assert outline(states[NEXT])[-1] == f"t1: one\n\n{QUEUED_2_1_9}"
    assert outline(states[LAST])[-2:] == ["assistant: Looked.", "user: and that?"]
    later = outline(states["msg_0000000000000004"])
    assert later[2] == f"t1: one\n\n{QUEUED_2_1_9}"
    assert later[-2:] == ["assistant: Looked.\n\nThat too.", "user: thanks"]


def test_a_queued_prompt_logged_before_the_result_it_followed_comes_after_it() -> None:
    """Operations on the queue are written at once, records a moment later: 2.1.49 had both orders."""
    log = Log(version="2.1.49")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"), ("t2", "Bash"))
    log.aside("queue-operation", operation="enqueue", content="first")
    log.aside("queue-operation", operation="enqueue", content="second")
    log.result("t1", "one")
    log.aside("queue-operation", operation="remove", timestamp="2026-11-21T10:00:07.500Z")
    log.aside("queue-operation", operation="remove", timestamp="2026-11-21T10:00:07.500Z")
    log.result("t2", "two")
    log.assistant(NEXT, ("t3", "Bash"))
    log.result("t3", "three")
    log.assistant(LAST, "Done.")
    states = by_message(*read(log))
    assert outline(states[ANSWER]) == ["user: look"]
    one, two = outline(states[NEXT])[2:]
    assert one == "t1: one"
    first, second = (
        f"<system-reminder>\nThe user sent a new message while you were working:\n{prompt}\n\nIMPORTANT: After "
        "completing your current task, you MUST address the user's message above. Do not ignore it.\n"
        "</system-reminder>"
        for prompt in ("first", "second")
    )
    assert two == f"t2: two\n\n{first}\n\n{second}"
    assert outline(states[LAST])[2:4] == [one, two]


def test_a_queued_prompt_is_not_in_the_context_of_a_response_that_began_before() -> None:
    log = Log(version="2.1.49")
    log.user("look")
    log.aside("queue-operation", operation="enqueue", content="and that?")
    log.aside("queue-operation", operation="remove", timestamp="2026-11-21T10:00:04.500Z")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.result("t1", "one")
    log.assistant(NEXT, "Both.")
    states = by_message(*read(log))
    assert outline(states[ANSWER]) == ["user: look"]
    assert "and that?" in outline(states[NEXT])[-1]


def test_a_queued_prompt_that_is_logged_as_a_message_is_sent_once() -> None:
    log = Log(version="2.1.150")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.aside("queue-operation", operation="enqueue", content="and that?")
    log.result("t1", "one")
    log.attachment("queued_command", prompt="and that?", commandMode="prompt")
    log.aside("queue-operation", operation="remove")
    log.assistant(NEXT, "Both.")
    states = by_message(*read(log))
    assert "\n".join(outline(states[NEXT])).count("and that?") == 1


def test_a_resumed_session_does_not_know_of_queued_prompts_that_were_not_logged() -> None:
    log = Log(version="2.1.49")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.aside("queue-operation", operation="enqueue", content="and that?")
    log.result("t1", "one")
    log.aside("queue-operation", operation="remove")
    log.assistant(NEXT, "Both.")
    log.aside("queue-operation", operation="enqueue", content="go on")
    log.aside("queue-operation", operation="dequeue")
    log.user("go on")
    log.assistant(LAST, "Going.")
    states = by_message(*read(log))
    assert "and that?" in outline(states[NEXT])[-1]
    assert outline(states[LAST])[2] == "t1: one"


def test_the_continue_prompt_is_left_out_after_the_next_user_prompt() -> None:
    """2.1.49 and 2.1.250 sent it only while they worked on the prompt whose response was cut off."""
    log = Log(version="2.1.250")
    log.user("look")
    log.assistant(ANSWER, "Cut", stop="max_tokens")
    log.assistant(NEXT, "and continued.")
    log.user("thanks")
    log.assistant(LAST, "Welcome.")
    states = by_message(*read(log))
    assert outline(states[NEXT])[-1].startswith("user: Output token limit hit.")
    assert (states[NEXT].fidelity, states[NEXT].notes) == ("repaired", ("continuation-not-logged",))
    assert outline(states[LAST]) == ["user: look", "assistant: Cut\n\nand continued.", "user: thanks"]
    assert states[LAST].fidelity == "exact"


@pytest.mark.parametrize(
    ("queued", "dequeued"), [("<task-notification>\nb1\n</task-notification>", 6.01), ("and that?", 7.8)]
)
def test_a_prompt_from_the_queue_is_not_taken_for_a_restart(queued: str, dequeued: float) -> None:
    """A notification is taken at once, and what the user typed after a while: the calls before are not lost.

    So in 2.1.49 and 2.1.37, which wrote the response that had come meanwhile behind both operations.
    """
    log = Log(version="2.1.49")
    log.user("look")
    first = log.assistant(ANSWER, ("t1", "Read"))
    second = log.assistant(ANSWER, ("t2", "Read"))
    log.result("t1", "one", parent=first)
    log.result("t2", "two", parent=second)
    log.assistant(NEXT, "Done.")
    log.aside("queue-operation", operation="enqueue", content=queued, timestamp="2026-11-21T10:00:06.000Z")
    log.aside("queue-operation", operation="dequeue", timestamp=f"2026-11-21T10:00:0{dequeued:.3f}Z")
    log.user(queued)
    log.assistant(LAST, "Good.")
    states = by_message(*read(log))
    assert outline(states[LAST])[1:4] == ["assistant: +t1 +t2", "t1: one", "t2: two"]


def test_queue_operations_show_a_restart_of_the_program() -> None:
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


def test_api_errors_were_sent_as_assistant_messages_by_early_versions() -> None:
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
        states = by_message(*read(log))
        assert states.keys() == {ANSWER} and outline(states[ANSWER]) == lines


def test_after_an_output_limit_error_another_continue_prompt_is_sent() -> None:
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
        states = by_message(*read(log))
        assert len(outline(states[NEXT])) == (5 if prompts == 1 else 3)


def test_prompt_hook_output_is_sent_though_marked_as_visible_in_the_transcript_only() -> None:
    log = Log(version="1.0.102")
    log.user("hi")
    log.user("<user-prompt-submit-hook>be kind</user-prompt-submit-hook>", isVisibleInTranscriptOnly=True)
    log.user("shown only", isVisibleInTranscriptOnly=True)
    log.assistant(ANSWER, "hello")
    (line,) = outline(by_message(*read(log))[ANSWER])
    assert "be kind" in line and "shown only" not in line


def test_a_call_of_an_unavailable_tool_is_sent_back_as_logged() -> None:
    log = Log(version="2.1.260")
    log.user("plan")
    log.assistant(ANSWER, ("t1", "ExitPlanMode", {"plan": "# Plan"}))
    missing = "<tool_use_error>Error: No such tool available: ExitPlanMode.</tool_use_error>"
    log.user([{"type": "tool_result", "tool_use_id": "t1", "content": missing, "is_error": True}])
    log.assistant(NEXT, "Planned.")
    call = by_message(*read(log))[NEXT].messages[1]["tool_calls"][0]
    assert call["function"]["arguments"] == '{"plan":"# Plan"}'


@pytest.mark.parametrize(
    ("version", "notes"), [("2.1.9", ()), ("2.1.17", ("version_not_recorded",)), ("2.1.49", ())]
)
def test_a_rule_that_changed_between_two_recorded_versions_is_not_exact_between_them(
    version: str, notes: tuple[str, ...]
) -> None:
    """What stands around a queued prompt changed after 2.1.9 and before 2.1.25; at which version is a guess."""
    log = Log(version=version)
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.aside("queue-operation", operation="enqueue", content="and that?")
    log.result("t1", "one")
    log.aside("queue-operation", operation="remove")
    log.assistant(NEXT, "Looked.")
    states = by_message(*read(log))
    assert (states[ANSWER].notes, states[NEXT].notes) == ((), notes)


def test_a_version_newer_than_all_recorded_ones_is_exact_only_where_no_rule_was_applied() -> None:
    log = Log(version="9.0.0")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.result("t1", "one")
    log.attachment("queued_command", prompt="and the docs", commandMode="prompt")
    log.assistant(NEXT, "Looked.")
    states = by_message(*read(log))
    assert (states[ANSWER].notes, states[NEXT].notes) == ((), ("version_not_recorded",))


@pytest.mark.parametrize(("version", "notes"), [("2.1.58", ("resume_not_logged",)), ("2.1.117", ())])
def test_parallel_calls_before_a_prompt_may_have_been_lost_by_a_resume(
    version: str, notes: tuple[str, ...]
) -> None:
    """2.1.58 sent only the last of the calls behind `/resume`, of which its log has no trace."""
    log = Log(version=version)
    log.user("look")
    first = log.assistant(ANSWER, ("t1", "Bash"))
    second = log.assistant(ANSWER, ("t2", "Bash"))
    log.result("t1", "one", parent=first)
    log.result("t2", "two", parent=second)
    log.assistant(NEXT, "Looked.")
    log.user("go on")
    log.assistant(LAST, ("t3", "Bash"))
    states = by_message(*read(log))
    assert (states[NEXT].notes, states[LAST].notes) == ((), notes)


def test_a_resume_from_a_result_leaves_out_what_was_sent_behind_a_later_result() -> None:
    """2.1.212 resumed from the first result: the reminder hangs on the second, and was not sent again."""
    log = Log(version="2.1.212")
    log.user("look")
    first = log.assistant(ANSWER, ("t1", "Bash"))
    second = log.assistant(ANSWER, ("t2", "Bash"))
    one = log.result("t1", "one", parent=first)
    log.result("t2", "two", parent=second)
    log.attachment("total_tokens_reminder", text="9 left")
    log.assistant(NEXT, "Looked.")
    log.user("Continue from where you left off.", parent=one, isMeta=True)
    log.assistant(LAST, "Going on.")
    states = by_message(*read(log))
    assert "9 left" in outline(states[NEXT])[-1]
    assert outline(states[LAST])[2:] == ["t1: one", "t2: two", "user: Continue from where you left off."]


@pytest.mark.parametrize(
    ("version", "is_sent"), [("2.1.39", False), ("2.1.62", False), ("2.1.63", True), ("2.1.150", True)]
)
@pytest.mark.parametrize("begins", [True, False])
def test_a_command_that_only_shows_a_dialog_is_sent_by_newer_versions(
    version: str, is_sent: bool, begins: bool
) -> None:
    log = Log(version=version)
    if not begins:
        log.user("hi")
        log.assistant(ANSWER, "hello")
    log.system("local_command", content="<command-name>/resume</command-name>")
    log.system("local_command", content="<local-command-stdout>Resume cancelled</local-command-stdout>")
    log.user("go on")
    log.user("<command-name>/cost</command-name>")  # every version sends what is a user's record
    log.assistant(NEXT, "yes")
    state = by_message(*read(log))[NEXT]
    dialog = (
        "<command-name>/resume</command-name>\n\n<local-command-stdout>Resume cancelled</local-command-stdout>"
    )
    prompt = "\n\n".join([dialog] * is_sent + ["go on", "<command-name>/cost</command-name>"])
    assert outline(state)[-1] == f"user: {prompt}"


@pytest.mark.parametrize(
    ("version", "sent"),
    [
        ("2.1.19", "Please address this message and continue"),
        ("2.1.20", "you MUST address the user's message above"),
        ("2.1.204", "you MUST address the user's message above"),
        ("2.1.205", "This is how Claude Code surfaces messages"),
    ],
)
def test_the_text_around_a_queued_prompt_is_that_of_the_versions_program(version: str, sent: str) -> None:
    log = Log(version=version)
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.result("t1", "one")
    log.attachment("queued_command", prompt="and that?", commandMode="prompt")
    log.assistant(NEXT, "Looked.")
    assert sent in outline(by_message(*read(log))[NEXT])[-1]


@pytest.mark.parametrize(
    ("version", "sent"),
    [
        ("2.0.51", {"plan": "Do it."}),
        ("2.0.54", {}),
        ("2.1.69", {"plan": "Do it."}),
        ("2.1.70", {}),
        ("2.1.87", {}),
    ],
)
def test_some_versions_send_a_plan_back_with_its_call(version: str, sent: dict[str, str]) -> None:
    log = Log(version=version)
    log.user("plan")
    log.assistant(ANSWER, ("t1", "ExitPlanMode", {"plan": "Do it."}))
    log.result("t1", "Approved.")
    log.assistant(NEXT, "Done.")
    messages = by_message(*read(log))[NEXT].messages
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    assert [json.loads(call) for call in calls] == [sent]
