"""Claude Code's logs: what was sent beside the messages, and what is said where the log does not hold it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from understudy.ingest.claude_code.attachments import sent_attachment
from understudy.ingest.claude_code.versions import behaviour_of
from understudy.ingest.signals.annotate import annotate

from support.claude_log import Log, by_message, outline, read

ANSWER = "msg_0000000000000001"
NEXT = "msg_0000000000000002"
LAST = "msg_0000000000000003"
TOKENS = "<system-reminder>\n<total_tokens>9 tokens left</total_tokens>\n</system-reminder>"


def tokens(log: Log) -> str:
    return log.attachment("total_tokens_reminder", text="<total_tokens>9 tokens left</total_tokens>")


def test_reminders_are_sent_in_front_of_the_prompt_and_in_the_last_result() -> None:
    """As 2.1.250 sent them; each stays where it was sent."""
    log = Log(version="2.1.250")
    log.user("look")
    log.attachment("skill_listing", content="- demo: shows")
    tokens(log)
    log.assistant(ANSWER, ("t1", "Read"), ("t2", "Read"))
    log.result("t1", "one")
    log.result("t2", "two")
    tokens(log)
    log.assistant(NEXT, "Done.")
    log.user("thanks")
    tokens(log)
    log.assistant(LAST, "Welcome.")
    states = by_message(*read(log))
    skills = (
        "<system-reminder>\nThe following skills are available for use with the Skill tool:\n\n- demo: shows\n"
    )
    assert outline(states[ANSWER]) == [f"user: {skills}</system-reminder>\n{TOKENS}\nlook"]
    assert outline(states[NEXT])[2:] == ["t1: one", f"t2: two\n\n{TOKENS}"]
    assert outline(states[LAST])[3:] == [f"t2: two\n\n{TOKENS}", "assistant: Done.", f"user: {TOKENS}\nthanks"]
    assert {state.fidelity for state in states.values()} == {"exact"}


def test_reminders_are_placed_past_user_messages_written_since_the_result() -> None:
    log = Log(version="2.1.250")
    log.user("look")
    log.attachment("command_permissions", allowedTools=[])
    log.assistant(ANSWER, ("t1", "Bash"))
    log.result("t1", "stopped")
    log.user([{"type": "text", "text": "[Request interrupted by user for tool use]"}])
    log.user("go on")
    tokens(log)
    log.assistant(NEXT, "Going.")
    sent = outline(by_message(*read(log))[NEXT])
    assert sent[2:] == [
        f"t1: stopped\n\n{TOKENS}",
        "user: [Request interrupted by user for tool use]\n\ngo on",
    ]


def test_hook_context_of_a_tool_call_is_added_to_its_result() -> None:
    log = Log(version="2.1.250")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"), ("t2", "Bash"))
    log.result("t1", "one")
    log.result("t2", "two")
    for call in ("t1", "t2"):
        log.attachment(
            "hook_additional_context", content=[f"of {call}"], hookName="PostToolUse:Bash", toolUseID=call
        )
    log.assistant(NEXT, "Done.")
    messages = outline(by_message(*read(log))[NEXT])
    reminder = "<system-reminder>\nPostToolUse:Bash hook additional context: of {}\n</system-reminder>"
    assert messages[2:] == [f"t1: one\n\n{reminder.format('t1')}", f"t2: two\n\n{reminder.format('t2')}"]


def test_a_mentioned_file_and_image_are_in_the_context() -> None:
    log = Log(version="2.1.250")
    log.user("look at @a.py and @b.png")
    file = {"filePath": "/p/a.py", "content": "x = 1\n", "numLines": 2, "startLine": 1, "totalLines": 2}
    log.attachment("file", filename="/p/a.py", content={"type": "text", "file": file})
    image = {"base64": "QUJD", "type": "image/png"}
    log.attachment("file", filename="/p/b.png", content={"type": "image", "file": image})
    log.assistant(ANSWER, "Seen.")
    state = by_message(*read(log))[ANSWER]
    (message,) = state.messages
    texts = [part.get("text") for part in message["content"]]
    assert texts == [
        '<system-reminder>\nCalled the Read tool with the following input: {"file_path":"/p/a.py"}\n'
        "</system-reminder>",
        "<system-reminder>\nResult of calling the Read tool:\n1\tx = 1\n2\t\n</system-reminder>",
        '<system-reminder>\nCalled the Read tool with the following input: {"file_path":"/p/b.png"}\n'
        "</system-reminder>",
        None,
        "look at @a.py and @b.png",
    ]
    assert message["content"][3]["image_url"]["url"] == "data:image/png;base64,QUJD"
    assert state.fidelity == "exact"


@pytest.mark.parametrize(
    ("attachment", "note"),
    [
        ({"type": "todo_reminder", "content": []}, "reminders_not_logged"),
        ({"type": "plan_mode", "reminderType": "full"}, "reminders_not_logged"),
        ({"type": "of_the_future", "content": "x"}, "attachment_unknown"),
        ({"type": "nested_memory", "content": 3}, "attachment_unknown"),
        ({"type": "file", "content": {"type": "pdf"}}, "attachment_unknown"),
        ({"type": ["file"]}, "attachment_unknown"),
    ],
)
def test_states_after_an_attachment_of_unlogged_content_are_noted(attachment: dict[str, Any], note: str) -> None:
    log = Log(version="2.1.250")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.result("t1", "one")
    log.add("attachment", attachment=attachment)
    tokens(log)
    log.assistant(NEXT, "Done.")
    states = by_message(*read(log))
    assert states[ANSWER].fidelity == "exact"
    assert (states[NEXT].fidelity, states[NEXT].notes) == ("repaired", (note,))
    assert outline(states[NEXT])[2:] == [f"t1: one\n\n{TOKENS}"]


def test_mentions_and_summaries_of_versions_that_log_no_attachments() -> None:
    log = Log(version="2.0.76")
    log.user("mail me@example.org about a @decorator")
    log.assistant(ANSWER, ("t1", "Read"))
    log.result("t1", "one")
    log.assistant(NEXT, "Read.")
    log.user("and @src/b.py?")
    log.assistant(LAST, "Too.")
    log.system("compact_boundary", parent=None)
    log.user("A summary.", isCompactSummary=True)
    log.assistant("msg_0000000000000004", "On.")
    fidelities = {name: (state.fidelity, state.notes) for name, state in by_message(*read(log)).items()}
    assert fidelities[NEXT] == ("exact", ())
    assert fidelities[LAST] == ("repaired", ("mention_not_logged",))
    assert fidelities["msg_0000000000000004"] == ("repaired", ("reminders_not_logged",))


def test_blocks_of_unknown_types_are_noted() -> None:
    log = Log()
    log.user([{"type": "text", "text": "look"}, {"type": "hologram"}])
    log.assistant(ANSWER, "Seen.")
    state = by_message(*read(log))[ANSWER]
    assert (state.fidelity, state.notes) == ("repaired", ("unknown_block",))
    assert outline(state) == ["user: look\n[hologram left out: the model cannot read it]"]


@pytest.mark.parametrize(
    "value", [None, 1, [], {"type": "file"}, {"type": "agent_listing_delta", "addedLines": [1]}]
)
@pytest.mark.parametrize(
    "kind", ["skill_listing", "invoked_skills", "hook_success", "queued_command", "directory"]
)
def test_hostile_attachments_do_not_raise(kind: str, value: Any) -> None:
    fields = {"type": kind, "content": value, "prompt": value, "skills": value, "path": value}
    nothing = msgspec.Raw()
    sent_attachment(msgspec.Raw(msgspec.json.encode(fields)), nothing, behaviour_of("2.1.250"))
    sent_attachment(msgspec.Raw(msgspec.json.encode(value)), nothing, behaviour_of("2.1.250"))
    sent_attachment(nothing, msgspec.Raw(msgspec.json.encode(value)), behaviour_of("2.1.250"))


@pytest.mark.parametrize("queued", [True, False])
def test_feedback_is_read_past_reminders_and_out_of_results(queued: bool) -> None:
    log = Log(version="2.1.250")
    log.user("look")
    log.assistant(ANSWER, ("t1", "Bash"))
    log.result("t1", "one")
    if queued:
        log.attachment("queued_command", prompt="No, that is wrong.", commandMode="prompt")
        tokens(log)
    else:
        log.assistant(NEXT, "Done.")
        log.user("No, that is wrong.")
        tokens(log)
    log.assistant(LAST, "Sorry.")
    (trace,) = read(log)
    annotate(trace)
    signals = trace.turns[-2].signals
    assert signals is not None and signals.feedback == "negative"


def test_a_prompt_between_the_results_of_a_stopped_turn_is_noted() -> None:
    """2.1.61 sent the prompt too, though the conversation goes on from the results."""
    log = Log(version="2.1.61")
    log.user("look")
    first = log.assistant(ANSWER, ("t1", "Bash"))
    second = log.assistant(ANSWER, ("t2", "Bash"))
    log.user("slow answer", parent=second)
    log.result("t1", "stopped", parent=first)
    log.result("t2", "stopped", parent=second)
    log.user("now quick")
    log.assistant(NEXT, "Quick.")
    state = by_message(*read(log))[NEXT]
    assert (state.fidelity, state.notes) == ("repaired", ("prompt_between_results",))


@pytest.mark.parametrize(
    ("version", "model", "warned", "notes"),
    [
        ("2.1.69", "qwen3-coder", True, ()),
        ("2.1.69", "claude-opus-4-6", False, ()),
        ("2.1.98", "claude-opus-4-8", True, ()),
        ("2.1.98", "claude-sonnet-4-6", False, ()),
        ("2.1.98", "qwen3-coder", False, ()),
        ("2.1.112", "claude-opus-4-5-20251101", True, ()),
        ("2.1.112", "claude-sonnet-4-20250514", True, ()),
        ("2.1.112", "claude-opus-4-8", False, ()),
        ("2.1.112", "qwen3-coder", False, ()),
        ("2.1.140", "claude-opus-4-5", False, ("reminders_not_logged",)),
        ("2.1.160", "claude-opus-4-5", False, ("version_not_recorded",)),
        ("2.1.197", "claude-opus-4-5", False, ()),
    ],
)
def test_the_reminder_added_to_a_mentioned_file_is_rebuilt_or_noted(
    version: str, model: str, warned: bool, notes: tuple[str, ...]
) -> None:
    """Versions before 2.1.113 added a reminder to what they read for some models, which the attachment lacks."""
    log = Log(version=version)
    log.user("look at @a.py")
    file = {"filePath": "/p/a.py", "content": "x = 1", "startLine": 1}
    log.attachment("file", filename="/p/a.py", content={"type": "text", "file": file})
    log.assistant(ANSWER, "Seen.", model=model)
    state = by_message(*read(log))[ANSWER]
    assert state.notes == notes
    assert ("1→x = 1\n" if version == "2.1.69" else "1\tx = 1\n") in outline(state)[0]
    assert ("would be considered malware" in outline(state)[0]) is warned
    assert ("behavior.\n</system-reminder>\n\n</system-reminder>" in outline(state)[0]) is warned


def test_the_text_that_was_sent_is_taken_where_the_log_has_it() -> None:
    """2.1.330 logs what it rendered of an attachment, of unknown types too; but not of what it does not send."""
    log = Log(version="2.1.330")
    log.user("plan it")
    sent = {"rendered": [{"content": "<system-reminder>\nPlan.\n</system-reminder>"}]}
    log.add("attachment", attachment={"type": "plan_mode", "reminderType": "sparse"}, **sent)
    log.add("attachment", attachment={"type": "of_the_future"}, **sent)
    log.add("attachment", attachment={"type": "command_permissions"}, **sent)
    log.assistant(ANSWER, "Seen.")
    state = by_message(*read(log))[ANSWER]
    assert state.fidelity == "exact"
    assert outline(state)[0].count("\nPlan.\n") == 2 and outline(state)[0].endswith("plan it")


def test_reminders_of_plan_mode_and_of_tasks_have_the_text_of_the_program() -> None:
    sent: dict[str, tuple[str, tuple[str, ...]]] = {}
    path = "/h/.claude/plans/a-plan.md"
    task = {"id": "1", "subject": "Do it", "status": "pending", "blockedBy": []}
    for name, attachment in {
        "plan": {
            "type": "plan_mode",
            "reminderType": "full",
            "isSubAgent": False,
            "planFilePath": path,
            "planExists": False,
        },
        "short": {
            "type": "plan_mode",
            "reminderType": "sparse",
            "isSubAgent": False,
            "planFilePath": path,
            "planExists": False,
        },
        "again": {"type": "plan_mode_reentry", "planFilePath": path},
        "exit": {"type": "plan_mode_exit", "planFilePath": path, "planExists": True},
        "no plan": {"type": "plan_mode_exit", "planFilePath": path, "planExists": False},
        "tasks": {"type": "task_reminder", "content": [task], "itemCount": 1},
        "waiting": {"type": "task_reminder", "content": [task | {"blockedBy": ["2"]}], "itemCount": 1},
    }.items():
        log = Log(version="2.1.250")
        log.user("go on")
        log.add("attachment", attachment=attachment)
        log.assistant(ANSWER, "Seen.")
        state = by_message(*read(log))[ANSWER]
        sent[name] = outline(state)[0], state.notes
    unknown = ("user: go on", ("reminders_not_logged",))
    assert sent["short"] == sent["no plan"] == sent["waiting"] == unknown
    assert f"create your plan at {path} using" in sent["plan"][0] and "{" not in sent["plan"][0]
    assert sent["plan"][1] == ("reminder_of_program",)
    assert f"A plan file exists at {path} from your" in sent["again"][0] and not sent["again"][1]
    assert f"is located at {path} if" in sent["exit"][0] and not sent["exit"][1]
    assert (
        "existing tasks:\n\n#1. [pending] Do it\n</system-reminder>" in sent["tasks"][0] and not sent["tasks"][1]
    )


def test_a_log_that_holds_only_an_attachment_of_an_unknown_kind_is_read() -> None:
    log = Log(version="2.1.250")
    log.attachment("of_a_later_version", text="?")
    (trace,) = read(log)
    assert not trace.turns and not trace.nodes
