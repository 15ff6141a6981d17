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
        ("2.1.69", "A background agent completed a task:\n", "task:\n"),
        ("2.1.110", SYSTEM, "any pending question.\n\n"),
        ("2.1.330", SYSTEM, "as approval or consent.\n\n"),
    ],
)
def test_a_task_notification_is_wrapped_in_the_text_of_its_version(version: str, begin: str, end: str) -> None:
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


def test_a_subagent_is_noted_as_lacking_reminders_that_its_session_logs() -> None:
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


def hooked(log: Log, event: str, call: str) -> None:
    log.attachment(
        "hook_additional_context", content=[f"{event} {call}"], hookName=f"{event}ToolUse:Bash", toolUseID=call
    )


def test_pre_tool_hook_context_keeps_reminders_out_of_the_tool_result() -> None:
    """As 2.1.110 sent it: results first, then all texts in the order of the log."""
    log = Log(version="2.1.110")
    log.user("go")
    log.assistant(FIRST, ("t1", "Bash"), ("t2", "Bash"))
    second = log.last
    hooked(log, "Pre", "t2")
    log.result("t2", "two", parent=second)
    hooked(log, "Post", "t2")
    hooked(log, "Pre", "t1")
    log.result("t1", "one", parent="s1-2")
    hooked(log, "Post", "t1")
    log.assistant(SECOND, "Done.")
    state = by_message(*read(log))[SECOND]
    texts = [
        f"<system-reminder>\n{event}ToolUse:Bash hook additional context: {event} {call}\n</system-reminder>"
        for call in ("t2", "t1")
        for event in ("Pre", "Post")
    ]
    assert outline(state)[2:] == ["t2: two", "t1: one", "user: " + "\n\n".join(texts)]
    assert state.fidelity == "exact"


def test_a_queued_prompt_between_what_hooks_added_has_an_unknown_order() -> None:
    log = Log(version="2.1.110")
    log.user("go")
    log.assistant(FIRST, ("t1", "Bash"))
    hooked(log, "Pre", "t1")
    log.result("t1", "one", parent="s1-2")
    hooked(log, "Post", "t1")
    log.attachment("queued_command", prompt="and the docs", commandMode="prompt")
    log.assistant(SECOND, "Done.")
    state = by_message(*read(log))[SECOND]
    text = outline(state)[3]
    assert text.index("Pre t1") < text.index("and the docs") < text.index("Post t1")
    assert (state.fidelity, state.notes) == ("repaired", ("hook_order_not_logged",))


def test_a_queued_prompt_beside_hooks_that_are_not_logged_has_an_unknown_order() -> None:
    log = Log(version="2.1.61")
    log.user("go")
    log.assistant(FIRST, ("t1", "Bash"))
    log.add("progress", data={"type": "hook_progress", "hookEvent": "PreToolUse", "hookName": "PreToolUse:Bash"})
    log.aside("queue-operation", operation="enqueue", content="and the docs", timestamp="2026-11-21T10:00:02.500Z")
    log.result("t1", "one", parent="s1-2")
    log.aside("queue-operation", operation="remove", timestamp="2026-11-21T10:00:04.500Z")
    log.assistant(SECOND, "Done.")
    state = by_message(*read(log))[SECOND]
    assert "and the docs" in outline(state)[2]
    assert (state.fidelity, state.notes) == ("repaired", ("hook_order_not_logged",))


@pytest.mark.parametrize(
    ("version", "model", "is_system"),
    [
        ("2.1.197", "qwen3-coder", True),
        ("2.1.197", "claude-opus-4-8", True),
        ("2.1.197", "claude-sonnet-4-5-20250929", False),
        ("2.1.197", "claude-opus-4-20250514", False),
        ("2.1.110", "qwen3-coder", False),
    ],
)
def test_newer_versions_send_reminders_to_newer_models_as_system_messages(
    version: str, model: str, is_system: bool
) -> None:
    """Such a message stands behind all that the user wrote, and its texts are not wrapped."""
    log = Log(version=version)
    log.attachment("total_tokens_reminder", text="9 left")
    log.user("go")
    log.attachment("skill_listing", content="- demo: shows")
    log.assistant(FIRST, ("t1", "Bash"), model=model)
    log.result("t1", "one")
    log.attachment("total_tokens_reminder", text="8 left")
    log.assistant(SECOND, "Done.", model=model)
    skills = "The following skills are available for use with the Skill tool:\n\n- demo: shows"
    states = by_message(*read(log))
    if is_system:
        assert outline(states[FIRST]) == [f"user: go\n\n9 left\n\n{skills}"]
        assert outline(states[SECOND])[2:] == ["t1: one", "user: 8 left"]
    else:
        assert outline(states[FIRST])[0].endswith("</system-reminder>\ngo")
        assert outline(states[SECOND])[2:] == ["t1: one\n\n<system-reminder>\n8 left\n</system-reminder>"]
    assert states[SECOND].fidelity == "exact"


def test_a_reminder_goes_into_a_result_that_is_a_list_in_newer_versions() -> None:
    """As 2.1.280 sent it: as a text of its own, a newline behind the one before."""
    contents: dict[str, object] = {}
    for version in ("2.1.197", "2.1.280"):
        log = Log(version=version)
        log.user("go")
        log.assistant(FIRST, ("t1", "Agent"))
        log.result("t1", [{"type": "text", "text": "Launched."}])
        log.attachment("total_tokens_reminder", text="9 left")
        log.assistant(SECOND, "Done.")
        contents[version] = [message["content"] for message in by_message(*read(log))[SECOND].messages[2:]]
    reminder = "<system-reminder>\n9 left\n</system-reminder>"
    assert contents["2.1.197"] == ["Launched.", reminder]
    assert contents["2.1.280"] == [[{"type": "text", "text": "Launched.\n"}, {"type": "text", "text": reminder}]]


@pytest.mark.parametrize(("version", "end"), [("2.1.280", "\n</system-reminder>"), ("2.1.212", "")])
def test_a_notification_that_was_sent_as_a_prompt_is_wrapped_in_newer_versions(version: str, end: str) -> None:
    log = Log(version=version)
    log.user("<task-notification>over</task-notification>")
    log.attachment("total_tokens_reminder", text="9 left")
    log.assistant(FIRST, "Done.")
    state = by_message(*read(log))[FIRST]
    assert outline(state)[0].endswith(f"or consent.\n\n<task-notification>over</task-notification>{end}")
    assert state.fidelity == "exact"


def test_the_session_environment_is_in_the_context_where_its_text_is_known() -> None:
    snapshot = {
        "workingDirectory": "/w",
        "isWorktree": False,
        "isGitRepo": True,
        "additionalWorkingDirectories": [],
        "platform": "linux",
        "shell": "bash",
        "osVersion": "Linux 6",
    }
    notes: dict[str, tuple[str, ...]] = {}
    for name, version, environment in (
        ("known", "2.1.280", snapshot),
        ("worktree", "2.1.280", snapshot | {"isWorktree": True}),
        ("newer", "2.1.330", snapshot),
    ):
        log = Log(version=version)
        log.user("go")
        log.attachment("environment", snapshot=environment)
        log.attachment("instructions", files=[{"path": "/w/CLAUDE.md", "type": "Project", "content": "Be brief."}])
        log.attachment("session_context", context={"gitStatus": "clean"})
        log.attachment("date", date="2026-11-21")
        log.attachment("model", text="You are powered by a model.")
        log.assistant(FIRST, "Done.")
        state = by_message(*read(log))[FIRST]
        notes[name] = state.notes
        if name == "known":
            text = outline(state)[0]
            assert "\n - Primary working directory: /w\n - Is a git repository: true\n" in text
            assert (
                "Contents of /w/CLAUDE.md (project instructions, checked into the codebase):\n\nBe brief." in text
            )
            assert "# gitStatus\nclean\n\nIMPORTANT: this context may" in text
            assert "\nToday's date is 2026-11-21.\n" in text and "\nYou are powered by a model.\n" in text
    unknown = ("attachment_unknown",)
    assert notes == {"known": (), "worktree": unknown, "newer": unknown}


def test_results_keep_their_order_where_records_stand_before_their_parents() -> None:
    log = Log(version="2.1.197")
    log.user("go")
    log.assistant(FIRST, ("t1", "Bash"), ("t2", "Bash"))
    log.result("t1", "one", parent="s1-2")
    log.result("t2", "two", parent="s1-3")
    log.assistant(SECOND, "Done.")
    log.lines.insert(0, log.lines.pop())  # written before all that it follows
    state = by_message(*read(log))[SECOND]
    assert outline(state)[2:] == ["t1: one", "t2: two"]


def test_requests_after_a_prompt_sent_before_a_stopped_tools_result_have_both() -> None:
    """The user wrote before a stopped tool was gone; its result came later, and later requests have both."""
    log = Log(version="2.1.110")
    log.user("go")
    log.assistant(FIRST, ("t1", "Bash"))
    log.user("never mind")
    log.result("t1", "stopped", parent="s1-2")
    log.user([{"type": "text", "text": "[Request interrupted by user for tool use]"}])
    log.assistant(SECOND, "Fine.")
    log.user("next")
    log.assistant(THIRD, "Done.")
    states = by_message(*read(log))
    assert outline(states[THIRD])[2:] == [
        "t1: stopped",
        "user: never mind\n\n[Request interrupted by user for tool use]",
        "assistant: Fine.",
        "user: next",
    ]
    assert states[SECOND].notes == ("prompt_between_results",)
    assert states[THIRD].fidelity == "exact"


def test_an_agent_has_the_prompt_of_the_call_that_started_it_where_its_log_lacks_it() -> None:
    """2.0.55 logs a subagent from its first response on."""
    log = Log(version="2.0.55")
    log.user("go")
    log.assistant(FIRST, ("t1", "Task", {"prompt": "look around"}))
    log.result("t1", "seen", toolUseResult={"agentId": "a1"})
    agents = {name: Log(version="2.0.55", isSidechain=True, agentId=name) for name in ("a1", "a2")}
    agents["a1"].assistant(SECOND, "Seen.", parent=None)
    agents["a2"].assistant(THIRD, "Ready.", parent=None)
    files = {f"agent-{name}.jsonl": agent.data() for name, agent in agents.items()}
    traces = read(log, **files)
    states = by_message(*traces)
    assert outline(states[SECOND]) == ["user: look around"]
    assert states[SECOND].fidelity == "exact"
    assert [trace.role for trace in traces] == ["main", "subagent", "warmup"]
    assert outline(states[THIRD]) == ["user: Warmup"]
    assert (states[THIRD].fidelity, states[THIRD].notes) == ("repaired", ("prompt_not_logged",))


def test_snapshots_that_are_repeated_amid_a_turn_show_one_resume() -> None:
    """They are written while the turn runs; the parallel calls after the resume are all sent."""
    log = Log(version="2.1.75")
    for name in ("s1-1", "s1-9"):
        log.aside("file-history-snapshot", messageId=name, isSnapshotUpdate=False)
    log.user("go")
    log.assistant(FIRST, "Done.")
    log.aside("file-history-snapshot", messageId="s1-1", isSnapshotUpdate=False)
    log.user("again")
    first = log.assistant(SECOND, ("t1", "Bash"))
    second = log.assistant(SECOND, ("t2", "Bash"))
    log.aside("file-history-snapshot", messageId="s1-9", isSnapshotUpdate=False)
    log.result("t1", "one", parent=first)
    log.result("t2", "two", parent=second)
    log.assistant(THIRD, "Here.")
    assert outline(by_message(*read(log))[THIRD])[3:] == ["assistant: +t1 +t2", "t1: one", "t2: two"]


def test_a_turn_belongs_to_the_session_that_a_later_fork_copied_it_from() -> None:
    """A fork behind a compaction begins with another response, and 2.1.75 copies not all results of a turn."""
    original, fork = Log("s2", version="2.1.75"), Log("s1", version="2.1.75")
    original.user("go")
    original.assistant(FIRST, "Ready.")
    original.user("both")
    first = original.assistant(SECOND, ("t1", "Bash"))
    second = original.assistant(SECOND, ("t2", "Bash"))
    original.result("t1", "one", parent=first)
    original.result("t2", "two", parent=second)
    original.assistant(THIRD, "Here.")
    fork.lines = [line | {"sessionId": "s1"} for at, line in enumerate(original.lines) if at not in (0, 1, 3, 5)]
    fork.lines[0]["parentUuid"] = None
    fork.lines[1]["parentUuid"] = fork.lines[0]["uuid"]
    state = by_message(*read(fork, original))[THIRD]
    assert outline(state)[3:] == ["assistant: +t1 +t2", "t1: one", "t2: two"]


def test_titles_written_behind_a_turn_show_a_resume() -> None:
    """2.0.30 writes titles of sessions when it starts; what it did not log is gone then."""
    log = Log(version="2.0.30")
    log.user("go")
    log.assistant(FIRST, ("t1", "Bash"))
    log.aside("queue-operation", operation="enqueue", content="and the docs", timestamp="2026-11-21T10:00:02.500Z")
    log.result("t1", "one")
    log.aside("queue-operation", operation="remove", timestamp="2026-11-21T10:00:04.500Z")
    log.aside("summary", summary="A title", leafUuid="x")
    log.assistant(SECOND, "Done.")
    log.aside("summary", summary="A title", leafUuid="x")
    log.user("again")
    log.assistant(THIRD, "Here.")
    states = by_message(*read(log))
    assert "and the docs" in outline(states[SECOND])[2]
    assert outline(states[THIRD])[2:] == ["t1: one", "assistant: Done.", "user: again"]


@pytest.mark.parametrize(("version", "name"), [("2.1.75", "Agent"), ("2.0.76", "Task")])
def test_a_call_by_the_old_name_of_the_tool_is_sent_back_by_the_new_one(version: str, name: str) -> None:
    log = Log(version=version)
    log.user("go")
    log.assistant(FIRST, ("t1", "Task", {"prompt": "look"}))
    log.result("t1", "seen")
    log.assistant(SECOND, "Done.")
    states = by_message(*read(log))
    assert states[FIRST].student_action.tool_calls[0]["function"]["name"] == "Task"
    assert states[SECOND].messages[1]["tool_calls"][0]["function"]["name"] == name


def test_a_plan_is_sent_back_as_logged_where_the_tool_was_to_be_searched_for() -> None:
    arguments: list[str] = []
    for deferred in ([], ["WebFetch"], ["ExitPlanMode"]):
        log = Log(version="2.1.250")
        log.user("go")
        log.add(
            "attachment",
            attachment={"type": "deferred_tools_delta", "addedNames": deferred},
            rendered=[{"content": "Tools."}],
        )
        log.assistant(FIRST, ("t1", "ExitPlanMode", {"plan": "Do it."}))
        log.result("t1", "fine")
        log.assistant(SECOND, "Done.")
        arguments.append(by_message(*read(log))[SECOND].messages[1]["tool_calls"][0]["function"]["arguments"])
    assert arguments == ["{}", "{}", '{"plan":"Do it."}']


def test_files_and_the_attribution_are_the_users_texts_where_reminders_are_system_messages() -> None:
    """As 2.1.330 sent it: behind the results, and no part of them; the attribution is in no result at all."""
    file = {"content": "<system-reminder>\nA file.\n</system-reminder>"}
    change = {"content": "<system-reminder>\nAttribution.\n</system-reminder>"}
    tokens = {"content": "<system-reminder>\n9 left\n</system-reminder>"}
    sent: dict[str, list[str]] = {}
    for model in ("claude-opus-4-8", "claude-sonnet-4-5"):
        log = Log(version="2.1.330")
        log.user("go")
        log.assistant(FIRST, ("t1", "Read"), model=model)
        log.result("t1", "one")
        for kind, rendered in (
            ("nested_memory", file),
            ("remote_session_change", change),
            ("total_tokens_reminder", tokens),
        ):
            log.add("attachment", attachment={"type": kind}, rendered=[rendered])
        log.assistant(SECOND, "Done.", model=model)
        sent[model] = outline(by_message(*read(log))[SECOND])[2:]
    texts = [one["content"] for one in (file, change, tokens)]
    assert sent["claude-opus-4-8"] == ["t1: one", f"user: {texts[0]}\n\n{texts[1]}\n\n9 left"]
    assert sent["claude-sonnet-4-5"][0] == f"t1: one\n\n{texts[0]}" and texts[1] in sent["claude-sonnet-4-5"][1]


def test_attachments_logged_before_a_summary_are_sent_before_it() -> None:
    log = Log(version="2.1.280")
    log.user("go")
    log.assistant(FIRST, "Ready.")
    log.system("compact_boundary", parent=None)
    log.attachment("date", date="2026-11-21")
    log.user("This session is being continued", isCompactSummary=True)
    log.user("next")
    log.assistant(SECOND, "Done.")
    text = outline(by_message(*read(log))[SECOND])[0]
    assert text.index("Today's date") < text.index("being continued") < text.index("next")


def test_a_response_to_a_summary_that_is_not_logged_is_noted() -> None:
    log = Log(version="2.1.112")
    log.user("go")
    log.assistant(FIRST, ("t1", "Bash"))
    log.result("t1", "one")
    above = log.last
    log.system("compact_boundary", parent=None)
    log.assistant(SECOND, "Done.", parent=above)
    assert by_message(*read(log))[SECOND].notes == ("reminders_not_logged",)


def test_the_status_of_a_task_has_the_text_that_was_recorded() -> None:
    status = {"taskId": "a1", "taskType": "local_agent", "description": "Look", "deltaSummary": None}
    notes: list[tuple[str, ...]] = []
    for state in ("completed", "running"):
        log = Log(version="2.1.220")
        log.user("go")
        log.attachment("task_status", **status, status=state, outputFilePath="/t/a1.output")
        log.assistant(FIRST, "Done.")
        first = by_message(*read(log))[FIRST]
        notes.append(first.notes)
        if state == "completed":
            assert "(status: completed) (description: Look) Read the output file" in outline(first)[0]
    assert notes == [(), ("attachment_unknown",)]
