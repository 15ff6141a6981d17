"""Claude Code's logs: what the model was sent at each turn, whatever the version wrote and lost."""

from __future__ import annotations

import msgspec

from understudy.ingest.claude_code.render import CLEARED_RESULT
from understudy.ingest.claude_code.versions import CONTINUE_PROMPT
from understudy.ingest.trace import SYSTEM_PROMPT, expand

from support.claude_log import Log, by_message, outline, read, thinking

ANSWER = "msg_0000000000000001"
NEXT = "msg_0000000000000002"
LAST = "msg_0000000000000003"


def test_log_lines_of_one_response_are_merged_into_one_turn() -> None:
    log = Log()
    log.user("look")
    log.assistant(ANSWER, thinking("first I look"), "Looking.", ("t1", "Bash", {"command": "ls"}))
    log.result("t1", [{"type": "text", "text": "a.py"}, {"type": "text", "text": "b.py"}])
    log.assistant(NEXT, thinking(""), "Two files.")
    (trace,) = read(log)
    first, second = expand(trace)
    assert first.messages == [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "look"}]
    assert (first.student_action.content, first.student_action.thinking) == ("Looking.", "first I look")
    assert first.student_action.tool_calls == second.messages[2]["tool_calls"]
    assert first.student_action.tool_calls[0]["function"] == {"name": "Bash", "arguments": '{"command":"ls"}'}
    # The history has no thinking; a result keeps the parts that it had.
    assert (
        second.messages[2]["content"] == "Looking."
        and "thinking" not in msgspec.json.encode(second.messages).decode()
    )
    assert [part["text"] for part in second.messages[3]["content"]] == ["a.py", "b.py"]
    assert second.student_action.thinking_hidden and not first.student_action.thinking_hidden
    assert [turn.branch for turn in trace.turns] == ["active", "active"]
    assert (first.source_model, first.source_family, first.fidelity) == ("claude-opus-4-5", "claude", "exact")
    assert (trace.session_id, trace.project, trace.version) == ("s1", "/home/dev/proj", "2.1.150")
    assert not trace.losses


def test_results_attached_to_other_lines_of_a_response_are_in_the_context() -> None:
    log = Log()
    log.user("look")
    first = log.assistant(ANSWER, "Two at once.", ("t1", "Read"))
    second = log.assistant(ANSWER, ("t2", "Read"))
    log.result("t1", "one", parent=first)
    log.result("t2", "two", parent=second)
    log.assistant(NEXT, "Done.")
    (trace,) = read(log)
    assert outline(by_message(trace)[NEXT]) == [
        "user: look",
        "assistant: Two at once. +t1 +t2",
        "t1: one",
        "t2: two",
    ]


def test_a_result_logged_after_the_next_response_is_in_its_context() -> None:
    log = Log()
    log.user("look")
    first = log.assistant(ANSWER, ("t1", "Read"))
    second = log.assistant(ANSWER, ("t2", "Read"))
    log.result("t2", "two", parent=second)
    log.assistant(NEXT, "Done.")
    log.result("t1", "one", parent=first)
    (trace,) = read(log)
    state = by_message(trace)[NEXT]
    assert outline(state)[2:] == ["t2: two", "t1: one"] and state.fidelity == "exact"


def test_progress_records_and_later_calls_between_results_do_not_break_the_chain() -> None:
    """2.1.9 wrote progress into the chain, and answers that went on while a tool ran."""
    log = Log(version="2.1.9")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.add("progress", data={"type": "bash_progress"})
    log.result("t1", "one")
    log.assistant(ANSWER, ("t2", "Bash"))
    log.result("t2", "two")
    log.add("progress", data={})
    log.assistant(NEXT, "Done.")
    (trace,) = read(log)
    assert [turn.message_id for turn in trace.turns] == [ANSWER, NEXT]
    assert outline(by_message(trace)[NEXT]) == ["user: look", "assistant: +t1 +t2", "t1: one", "t2: two"]


def test_turns_of_an_abandoned_branch_are_kept() -> None:
    log = Log()
    start = log.user("start")
    abandoned = log.assistant(ANSWER, "first try")
    log.user("no", parent=abandoned)
    log.assistant(NEXT, "sorry")
    log.user("start otherwise", parent=start)
    log.assistant(LAST, "second try")
    states = by_message(*read(log))
    assert outline(states[NEXT]) == ["user: start", "assistant: first try", "user: no"]
    assert outline(states[LAST]) == ["user: start\n\nstart otherwise"]
    assert [states[key].branch for key in (ANSWER, NEXT, LAST)] == ["branch", "branch", "active"]


def test_a_resume_into_a_new_file_counts_each_turn_once() -> None:
    """1.0.69 copied everything under new uuids and with new times, but with the same message ids."""
    old = Log("s1", "1.0.69")
    old.user("hi")
    old.assistant(ANSWER, "hello")
    new = Log("s2", "1.0.69")
    new.user("hi")
    new.assistant(ANSWER, "hello")
    new.user("go on")
    new.assistant(NEXT, "going")
    traces = read(new, old)
    states = by_message(*traces)
    assert states.keys() == {ANSWER, NEXT}
    assert outline(states[NEXT]) == ["user: hi", "assistant: hello", "user: go on"]
    assert sum(trace.losses["copied-turn"] for trace in traces) == 1


def test_a_turn_copied_into_a_fork_is_taken_from_the_most_complete_copy() -> None:
    """2.1.69 copied into a fork only what a walk along the parents meets."""
    original = Log("s2", "2.1.69")
    fork = Log("s1", "2.1.69")
    for log in (original, fork):
        log.user("look", uuid="u1")
        first = log.assistant(ANSWER, ("t1", "Read"), uuid="a1")
        if log is original:
            second = log.assistant(ANSWER, ("t2", "Read"), uuid="a2")
            log.result("t1", "one", parent=first, uuid="r1")
            log.result("t2", "two", parent=second, uuid="r2")
        else:
            log.result("t1", "one", uuid="r1")
        log.assistant(NEXT, "Done.", uuid="a3")
    fork.user("now the fork")
    fork.assistant(LAST, "forked")
    traces = read(fork, original)
    states = by_message(*traces)
    assert [states[key].session_id for key in (ANSWER, NEXT, LAST)] == ["s2", "s2", "s1"]
    assert outline(states[NEXT])[2:] == ["t1: one", "t2: two"]
    assert outline(states[LAST])[1:3] == ["assistant: +t1", "t1: one"]


def test_after_a_resume_some_versions_send_only_messages_on_the_parent_chain() -> None:
    for version, calls in (
        ("2.1.69", ["assistant: +t2", "t2: two"]),
        ("2.1.150", ["assistant: +t1 +t2", "t1: one"]),
    ):
        log = Log(version=version)
        log.user("look")
        first = log.assistant(ANSWER, ("t1", "Read"))
        second = log.assistant(ANSWER, ("t2", "Read"))
        log.result("t1", "one", parent=first)
        log.result("t2", "two", parent=second)
        log.assistant(NEXT, "Done.")
        log.aside("last-prompt", lastPrompt="look")
        log.user("again")
        log.assistant(LAST, "Yes.")
        states = by_message(*read(log))
        assert outline(states[NEXT])[1:] == ["assistant: +t1 +t2", "t1: one", "t2: two"]
        assert outline(states[LAST])[1:3] == calls, version


def test_a_compaction_restarts_the_context_with_its_preserved_messages() -> None:
    log = Log(version="2.1.197")
    log.user("start")
    log.assistant(ANSWER, "one")
    head = log.user("two?")
    tail = log.assistant(NEXT, "two")
    segment = {"headUuid": head, "anchorUuid": "sum", "tailUuid": tail}
    messages = {"anchorUuid": "sum", "uuids": [head, tail]}
    log.system(
        "compact_boundary", parent=None, logicalParentUuid=tail, compactMetadata={"preservedSegment": segment}
    )
    log.user("Summary: one", uuid="sum", isCompactSummary=True, isVisibleInTranscriptOnly=True)
    log.user("three?")
    log.assistant(LAST, "three")
    for metadata in ({"preservedSegment": segment}, {"preservedMessages": messages, "preservedSegment": segment}):
        log.lines[4]["compactMetadata"] = metadata
        states = by_message(*read(log))
        assert outline(states[LAST]) == ["user: Summary: one\n\ntwo?", "assistant: two", "user: three?"]
        assert outline(states[NEXT]) == ["user: start", "assistant: one", "user: two?"]
        assert {state.branch for state in states.values()} == {"active"}
    log.lines[4]["compactMetadata"] = {"trigger": "auto"}
    assert outline(by_message(*read(log))[LAST]) == ["user: Summary: one\n\nthree?"]


def test_a_microcompaction_clears_results_from_then_on() -> None:
    log = Log(version="2.1.21")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Read"))
    log.result("t1", "long")
    log.assistant(NEXT, ("t2", "Read"))
    log.result("t2", "short")
    log.system("microcompact_boundary", microcompactMetadata={"compactedToolIds": ["t1"]})
    log.assistant(LAST, "Done.")
    states = by_message(*read(log))
    assert outline(states[NEXT])[2:] == ["t1: long"]
    assert outline(states[LAST])[1:] == ["assistant: +t1", f"t1: {CLEARED_RESULT}", "assistant: +t2", "t2: short"]


def test_a_response_that_no_later_record_links_to_is_restored_to_the_context() -> None:
    log = Log()
    prompt = log.user("hi")
    log.assistant(ANSWER, "hello")
    log.system("informational", parent=prompt, content="note")
    log.user("more")
    log.assistant(NEXT, "yes")
    assert outline(by_message(*read(log))[NEXT]) == ["user: hi", "assistant: hello", "user: more"]


def test_a_missing_parent_is_repaired_and_noted_in_the_state() -> None:
    log = Log()
    log.user("hi")
    log.assistant(ANSWER, "hello")
    log.user("more", parent="was-never-written")
    log.assistant(NEXT, "yes")
    (trace,) = read(log)
    state = by_message(trace)[NEXT]
    assert outline(state) == ["user: hi", "assistant: hello", "user: more"]
    assert (state.fidelity, state.notes) == ("repaired", ("missing-parent",))
    assert trace.losses == {"missing-parent": 1}


def test_records_that_were_not_sent_to_the_model_are_left_out_of_the_context() -> None:
    log = Log()
    log.user("Caveat: local", isMeta=True)
    log.system("local_command", content="<local-command-stdout>12</local-command-stdout>")
    log.user("hi")
    log.user("only shown", isVisibleInTranscriptOnly=True)
    log.assistant("synthetic-000000001", "API Error: 529", model="<synthetic>", isApiErrorMessage=True)
    log.assistant("synthetic-000000002", "No response requested.", model="<synthetic>")
    log.user("again")
    log.attachment("command_permissions", allowedTools=[])
    log.system("turn_duration", durationMs=3)
    log.aside("file-history-snapshot", messageId="x", snapshot={})
    log.assistant(ANSWER, "hello")
    (trace,) = read(log)
    assert [turn.message_id for turn in trace.turns] == [ANSWER]
    assert outline(by_message(trace)[ANSWER]) == [
        "user: Caveat: local\n\n<local-command-stdout>12</local-command-stdout>\n\nhi",
        "assistant: No response requested.",
        "user: again",
    ]
    assert not trace.losses


def test_a_prompt_queued_during_tool_calls_is_appended_to_the_last_result() -> None:
    log = Log(version="2.1.197")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.result("t1", "one")
    log.attachment("queued_command", prompt="and hurry", commandMode="prompt")
    log.assistant(NEXT, "Done.")
    *_, result = by_message(*read(log))[NEXT].messages
    assert result["tool_call_id"] == "t1"
    assert result["content"].startswith("one\n\n<system-reminder>") and "and hurry" in result["content"]


def test_plans_in_calls_are_sent_back_according_to_the_version() -> None:
    for version, sent in (
        ("1.0.69", {"plan": "# do"}),
        ("2.0.76", {}),
        ("2.1.69", {"plan": "# do"}),
        ("2.1.150", {}),
    ):
        log = Log(version=version)
        log.user("plan")
        log.assistant(ANSWER, ("t1", "ExitPlanMode", {"plan": "# do"}))
        log.result("t1", "approved")
        log.assistant(NEXT, "Doing.")
        states = by_message(*read(log))
        (call,) = states[NEXT].messages[1]["tool_calls"]
        assert msgspec.json.decode(call["function"]["arguments"]) == sent, version
        (call,) = states[ANSWER].student_action.tool_calls
        assert msgspec.json.decode(call["function"]["arguments"]) == {"plan": "# do"}


def test_a_response_cut_at_max_tokens_is_followed_by_the_continue_prompt() -> None:
    log = Log()
    log.user("write")
    log.assistant(ANSWER, "This is cut o", stop="max_tokens")
    log.assistant(NEXT, "ff.")
    state = by_message(*read(log))[NEXT]
    assert outline(state) == ["user: write", "assistant: This is cut o", f"user: {CONTINUE_PROMPT}"]
    assert state.fidelity == "repaired"


def test_responses_that_share_one_message_id_are_separate_turns() -> None:
    log = Log()
    log.user("hi")
    log.assistant("chatcmpl", "hello", model="glm-4.7")
    log.user("more")
    log.assistant("chatcmpl", "yes", model="glm-4.7")
    (trace,) = read(log)
    states = list(by_message(trace).values())
    assert [outline(state)[-1] for state in states] == ["user: hi", "user: more"]
    assert {state.source_family for state in states} == {"glm"}


def test_state_ids_stay_when_the_log_grows() -> None:
    log = Log()
    log.user("hi")
    log.assistant(ANSWER, "hello")
    before = by_message(*read(log))[ANSWER]
    log.user("more")
    log.assistant(NEXT, "yes")
    after = by_message(*read(log))
    assert after[ANSWER] == before and after[NEXT].state_id != before.state_id
