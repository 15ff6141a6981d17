"""Reconstructs what the CLI sent for each `attachment` record: mentioned files, reminders, queued prompts, hook
output.

The texts were taken from recorded requests and from the CLI programs themselves (versions 2.0.64 to 2.1.330).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Raw, Struct

from understudy.ingest.claude_code import program_texts
from understudy.ingest.claude_code.records import ClaudeBlock
from understudy.ingest.claude_code.render import value_of
from understudy.ingest.claude_code.versions import VersionBehaviour
from understudy.ingest.json_values import items, mapping, string

_WRAPPED = re.compile(r"^<system-reminder>\n?([\s\S]*?)\n?</system-reminder>$")
_SEPARATE_KIND = "remote_session_change"
_CONTEXT = frozenset(("instructions", "session_context", _SEPARATE_KIND))
_FILES = frozenset(("directory", "file", "nested_memory"))

Parts = Sequence[str | ClaudeBlock]
"""Texts and image blocks."""

NOT_LOGGED = "reminders_not_logged"
"""The note on states after a reminder that the log mentions without its text."""

OF_PROGRAM = "reminder_of_program"
"""The note on states after a reminder whose text comes from the CLI program, which the user's account may change.
"""

HOOK_ORDER = "hook_order_not_logged"
"""The note on states where a queued prompt and the output of tool hooks were sent together in an unknown order."""

UNKNOWN = "attachment_unknown"
"""The note on states after an attachment whose type or contents are unknown."""


class SentAttachment(Struct, frozen=True):
    """What the CLI sent for an attachment; `note` says why this may be incomplete.

    `tool_use_id`: the call with whose result it was sent, if that is not the last one. `amid_users`: it is sent as
    the user's text even to models that get reminders as system messages. `is_apart`: it is never merged into a
    tool result. `is_queued`: it is a queued prompt.
    """

    parts: Parts = ()
    note: str | None = None
    tool_use_id: str | None = None
    amid_users: bool = False
    is_apart: bool = False
    is_queued: bool = False

    def bare_texts(self) -> list[str]:
        """Return the texts as a system message has them, without the reminder tags; an empty list if there are
        images.
        """
        if any(isinstance(part, ClaudeBlock) for part in self.parts):
            return []
        return [_WRAPPED.sub(r"\1", part) for part in self.parts if isinstance(part, str)]


_RULES = {
    "directory": ("files_are_users",),
    "file": ("numbers_with_tab", "warns_of_files", "adds_to_files", "files_are_users"),
    "invoked_skills": ("invoked_skills",),
    "nested_memory": ("files_are_users",),
    "plan_mode": ("known_reminders", "agents_name_files"),
    "plan_mode_exit": ("known_reminders",),
    "plan_mode_reentry": ("known_reminders",),
    "queued_command": ("queued", "notification"),
    "task_reminder": ("known_reminders",),
}


def is_confirmed(attachment: Raw, rendered: Raw, behaviour: VersionBehaviour) -> bool:
    """Return whether the recorded versions just before and after this one send the attachment in the same way.

    Compares the rules for its position and, if the log lacks the sent text, for its text.
    """
    kind = string(mapping(value_of(attachment)).get("type")) or ""
    rules = _RULES.get(kind, ()) if _rendered(rendered) is None else ()
    return behaviour.is_confirmed("has_system_messages", "extends_lists", *rules)


def sent_attachment(attachment: Raw, rendered: Raw, behaviour: VersionBehaviour) -> SentAttachment:
    """Return what the CLI sent for an attachment. Malformed or unexpected contents give the note `UNKNOWN`.

    `rendered` is the text as it was sent, which newer versions log; it is empty in logs of older ones.
    """
    fields = mapping(value_of(attachment))
    kind = string(fields.get("type")) or ""
    if kind in _NOT_SENT:
        return SentAttachment()
    if (texts := _rendered(rendered)) is not None:
        return _sent(fields, kind, texts, None, behaviour)
    if behaviour.logs_requests and kind in _CHANGED_TEXTS:
        return SentAttachment(note=UNKNOWN)
    if kind in _TEXT_IN_PROGRAM:
        return _of_program(fields, kind, behaviour)
    parts = _file(fields, behaviour) if kind == "file" else None
    if kind == "queued_command":
        parts = _queued_command(fields, behaviour)
    elif kind in _TEXTS or kind == "invoked_skills":
        try:
            if kind == "invoked_skills":
                parts = _invoked_skills(fields, behaviour)
            else:
                sent = _TEXTS[kind](fields)
                parts = [reminder(text) for text in ([sent] if isinstance(sent, str) else sent)]
        except (AttributeError, KeyError, TypeError, ValueError):
            return SentAttachment(note=UNKNOWN)
    if parts is None:
        return SentAttachment(note=UNKNOWN)
    with_reminder = (
        kind == "file" and behaviour.adds_to_files and not any(isinstance(part, ClaudeBlock) for part in parts)
    )
    note = NOT_LOGGED if with_reminder else None
    return _sent(fields, kind, parts, note, behaviour)


def _of_program(fields: dict[str, Any], kind: str, behaviour: VersionBehaviour) -> SentAttachment:
    """Build a reminder from the text in this version's program; without a text, and with a note, if that is
    unknown.
    """
    try:
        if behaviour.known_reminders and kind == "plan_mode":
            text = program_texts.plan_mode(fields, by_agents=behaviour.agents_name_files)
            return SentAttachment([reminder(text)], OF_PROGRAM)
        if behaviour.known_reminders and kind in _PROGRAM_TEXTS:
            return SentAttachment([reminder(_PROGRAM_TEXTS[kind](fields))])
    except (KeyError, TypeError, ValueError):
        pass
    return SentAttachment(note=NOT_LOGGED)


def _sent(
    fields: dict[str, Any], kind: str, parts: Parts, note: str | None, behaviour: VersionBehaviour
) -> SentAttachment:
    users = kind in _CONTEXT or (behaviour.files_are_users and kind in _FILES)
    return SentAttachment(
        parts,
        note,
        string(fields.get("toolUseID")),
        amid_users=users,
        is_apart=kind == _SEPARATE_KIND,
        is_queued=kind == "queued_command",
    )


def _rendered(rendered: Raw) -> list[str] | None:
    """Return the logged texts that were sent, or None if the log lacks them or something other than text was
    sent.
    """
    texts = [string(mapping(message).get("content")) for message in items(value_of(rendered))]
    sent_texts = [text for text in texts if text is not None]
    return sent_texts if sent_texts and len(sent_texts) == len(texts) else None


def reminder(content: str) -> str:
    """Wrap a text in the tags with which the CLI marks what does not come from the user."""
    return f"<system-reminder>\n{content}\n</system-reminder>"


def defers_plans(attachment: Raw) -> bool:
    """Return whether an attachment says that the tool which ends plan mode is deferred: the model has to search
    for it first.
    """
    fields = mapping(value_of(attachment))
    return fields.get("type") == "deferred_tools_delta" and "ExitPlanMode" in items(fields.get("addedNames"))


def queued_text(attachment: Raw) -> str:
    """Return the text of the prompt in a `queued_command` attachment, or "" for other attachments."""
    fields = mapping(value_of(attachment))
    return _prompt_text(fields.get("prompt")) if fields.get("type") == "queued_command" else ""


def _prompt_text(prompt: Any) -> str:
    blocks = [prompt] if isinstance(prompt, str) else items(prompt)
    texts = (block if isinstance(block, str) else string(mapping(block).get("text")) for block in blocks)
    return "\n".join(filter(None, texts))


def _queued_command(fields: dict[str, Any], behaviour: VersionBehaviour) -> Parts | None:
    prompt = fields.get("prompt")
    if fields.get("commandMode") == "task-notification":
        return [reminder(f"{behaviour.notification}{_prompt_text(prompt)}")]
    images = [block for block in map(mapping, items(prompt)) if block.get("type") == "image"]
    return [_prompt_text(prompt).join(behaviour.queued), *(_image(block.get("source")) for block in images)]


def _image(source: Any) -> ClaudeBlock:
    return ClaudeBlock(type="image", source=Raw(json.dumps(source).encode()))


def _call(tool: str, arguments: dict[str, str]) -> str:
    arguments_text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return reminder(f"Called the {tool} tool with the following input: {arguments_text}")


def _file(fields: dict[str, Any], behaviour: VersionBehaviour) -> Parts | None:
    """Build the messages for a mentioned file, as if the model had read it; None if it is neither text nor an
    image.
    """
    content = mapping(fields.get("content"))
    file, call = mapping(content.get("file")), _call("Read", {"file_path": str(fields.get("filename"))})
    if content.get("type") == "image" and isinstance(file.get("base64"), str):
        source = {"type": "base64", "media_type": file.get("type") or "image/png", "data": file["base64"]}
        return [call, _image(source)]
    text, start_line = file.get("content"), file.get("startLine")
    if content.get("type") != "text" or not isinstance(text, str) or fields.get("truncated"):
        return None
    warning = program_texts.MALWARE if behaviour.warns_of_files else ""
    line_format = "{}\t{}" if behaviour.numbers_with_tab else "{:>6}→{}"
    lines = text.replace("\r\n", "\n").split("\n") if text else []
    numbered = (
        line_format.format(number, line)
        for number, line in enumerate(lines, start_line if isinstance(start_line, int) else 1)
    )
    return [call, reminder("Result of calling the Read tool:\n" + "\n".join(numbered) + warning)]


def _directory(fields: dict[str, Any]) -> list[str]:
    path, listing = fields["path"], fields["content"]
    arguments = {"command": f"ls {path}", "description": f"Lists files in {path}"}
    arguments_text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return [
        f"Called the Bash tool with the following input: {arguments_text}",
        f"Result of calling the Bash tool:\n{listing}",
    ]


def _agents(fields: dict[str, Any]) -> str:
    initial = fields.get("isInitial")
    heading = "Available agent types" if initial else "New agent types are now available"
    paragraphs: list[str] = []
    if added_lines := fields.get("addedLines"):
        paragraphs.append(f"{heading} for the Agent tool:\n" + "\n".join(added_lines))
    if removed_types := fields.get("removedTypes"):
        paragraphs.append(
            "The following agent types are no longer available:\n"
            + "\n".join(f"- {agent_type}" for agent_type in removed_types)
        )
    if initial and fields.get("showConcurrencyNote"):
        paragraphs.append(
            "When you launch multiple agents for independent work, send them in a single message with multiple "
            "tool uses so they run concurrently."
        )
    return "\n\n".join(paragraphs)


def _skills(fields: dict[str, Any]) -> str | list[str]:
    listing = fields["content"]
    return f"The following skills are available for use with the Skill tool:\n\n{listing}" if listing else []


def _invoked_skills(fields: dict[str, Any], behaviour: VersionBehaviour) -> Parts:
    skills = "\n\n---\n\n".join(
        f"### Skill: {skill['name']}\nPath: {skill['path']}\n\n{skill['content']}" for skill in fields["skills"]
    )
    return [reminder(f"{behaviour.invoked_skills}\n\n{skills}")] if skills else []


_INSTRUCTIONS = {
    "Project": "project instructions, checked into the codebase",
    "Local": "user's private project instructions, not checked in",
    "User": "user's private global instructions for all projects",
}


def _instructions(fields: dict[str, Any]) -> str:
    files = "\n\n".join(
        f"Contents of {file['path']} ({_INSTRUCTIONS[file['type']]}):\n\n{file['content']}"
        for file in fields["files"]
    )
    return (
        "Codebase and user instructions are shown below. Be sure to adhere to these instructions. IMPORTANT: "
        f"These instructions OVERRIDE any default behavior and you MUST follow them exactly as written.\n\n{files}"
    )


def _session_context(fields: dict[str, Any]) -> str:
    context = "\n".join(f"# {name}\n{value}" for name, value in fields["context"].items())
    return (
        f"As you answer the user's questions, you can use the following context:\n{context}\n\nIMPORTANT: this "
        "context may or may not be relevant to your tasks. You should not respond to this context unless it is "
        "highly relevant to your task."
    )


def _environment(fields: dict[str, Any]) -> str:
    snapshot = fields["snapshot"]
    if snapshot["isWorktree"] or snapshot["additionalWorkingDirectories"]:
        raise program_texts.unsupported("environment", snapshot, "no worktree and no additional directories")
    return (
        "# Environment\nYou have been invoked in the following environment: \n"
        f" - Primary working directory: {snapshot['workingDirectory']}\n"
        f" - Is a git repository: {str(snapshot['isGitRepo']).lower()}\n - Platform: {snapshot['platform']}\n"
        f" - Shell: {snapshot['shell']}\n - OS Version: {snapshot['osVersion']}"
    )


def _attribution(fields: dict[str, Any]) -> str:
    if fields["url"] or fields["sendUserFileHint"] or fields["managedCommit"] or fields["managedPr"]:
        raise program_texts.unsupported(
            "remote_session_change", fields, "none of url, sendUserFileHint, managedCommit and managedPr"
        )
    return (
        "Attribution for git commits and pull requests you create from here on (this replaces Claude Code's own "
        "earlier attribution guidance, such as a previous copy of this reminder; the user's own instructions "
        "about these lines, such as a CLAUDE.md or memory rule, take precedence over this reminder, but do not "
        "add attribution lines this reminder leaves out):\n"
        f"- End git commit messages with:\n{fields['commit']}\n"
        f"- End pull request descriptions with:\n{fields['pr']}"
    )


def _hook_success(fields: dict[str, Any]) -> str | list[str]:
    is_sent = fields["hookEvent"] in ("SessionStart", "UserPromptSubmit") and fields["content"]
    return f"{fields['hookName']} hook success: {fields['content']}" if is_sent else []


def _hook_context(fields: dict[str, Any]) -> str | list[str]:
    lines = "\n".join(fields["content"])
    return f"{fields['hookName']} hook additional context: {lines}" if fields["content"] else []


def _hook_error(fields: dict[str, Any]) -> str:
    error = fields["blockingError"]
    return f'{fields["hookName"]} hook blocking error from command: "{error["command"]}": {error["blockingError"]}'


def _edited_file(fields: dict[str, Any]) -> str:
    return (
        f"Note: {fields['filename']} was modified, either by the user or by a linter. This change was "
        "intentional, so make sure to take it into account as you proceed (ie. don't revert it unless the user "
        "asks you to). Don't tell the user this, since they are already aware. Here are the relevant changes "
        "(shown with line numbers):"
        f"\n{fields['snippet']}"
    )


def _selected_lines(fields: dict[str, Any]) -> str:
    lines = fields["content"]
    if len(lines) > 2000:
        lines = lines[:2000] + "\n... (truncated)"
    return (
        f"The user selected the lines {fields['lineStart']} to {fields['lineEnd']} from {fields['filename']}:\n"
        f"{lines}\n\nThis may or may not be related to the current task."
    )


def _task_status(fields: dict[str, Any]) -> str:
    if fields["status"] != "completed" or fields["deltaSummary"]:
        raise program_texts.unsupported("task_status", fields, "a completed task without a deltaSummary")
    return (
        f"Task {fields['taskId']} (type: {fields['taskType']}) (status: completed) (description: "
        f"{fields['description']}) Read the output file to retrieve the result: {fields['outputFilePath']}"
    )


_TEXTS: dict[str, Callable[[dict[str, Any]], str | list[str]]] = {
    "agent_listing_delta": _agents,
    "critical_system_reminder": lambda fields: fields["content"],
    "date": lambda fields: f"Today's date is {fields['date']}.",
    "date_change": lambda fields: (
        f"The date has changed. Today's date is now {fields['newDate']}. DO NOT mention this to the user "
        "explicitly because they are already aware."
    ),
    "directory": _directory,
    "edited_text_file": _edited_file,
    "environment": _environment,
    "hook_additional_context": _hook_context,
    "hook_blocking_error": _hook_error,
    "hook_stopped_continuation": lambda fields: (
        f"{fields['hookName']} hook stopped continuation: {fields['message']}"
    ),
    "hook_success": _hook_success,
    "instructions": _instructions,
    "model": lambda fields: fields["text"],
    "nested_memory": lambda fields: f"Contents of {fields['content']['path']}:\n\n{fields['content']['content']}",
    "opened_file_in_ide": lambda fields: (
        f"The user opened the file {fields['filename']} in the IDE. This may or may not be related to the "
        "current task."
    ),
    "plan_file_reference": lambda fields: (
        f"A plan file exists from plan mode at: {fields['planFilePath']}\n\nPlan contents:\n\n"
        f"{fields['planContent']}\n\n"
        "If this plan is relevant to the current work and not already complete, continue working on it."
    ),
    "remote_session_change": _attribution,
    "selected_lines_in_ide": _selected_lines,
    "session_context": _session_context,
    "skill_listing": _skills,
    "task_status": _task_status,
    "token_usage": lambda fields: (
        f"Token usage: {fields['used']}/{fields['total']}; {fields['remaining']} remaining"
    ),
    "total_tokens_reminder": lambda fields: fields["text"],
}

_NOT_SENT_TEXT = """
already_read_file command_permissions context_efficiency current_session_memory dynamic_skill edited_image_file
hook_cancelled hook_deferred_tool hook_error_during_execution hook_non_blocking_error hook_permission_decision
hook_system_message max_turns_reached prompt_snapshot structured_output teammate_shutdown_batch
"""
_NOT_SENT = frozenset(_NOT_SENT_TEXT.split())

_UNLOGGED_TEXT = """
auto_mode auto_mode_exit compaction_reminder output_style plan_mode plan_mode_exit plan_mode_reentry task_reminder
todo_reminder ultrathink_effort verify_plan_reminder
"""
_CHANGED_TEXTS = frozenset(("environment", "session_context"))
"""Attachments whose texts differ in versions that log their requests. Those logs hold the sent texts."""

_TEXT_IN_PROGRAM = frozenset(_UNLOGGED_TEXT.split())
"""Reminders whose texts differ by version and are not logged: they exist only in the CLI program."""

_PROGRAM_TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "plan_mode_exit": program_texts.plan_mode_exit,
    "plan_mode_reentry": program_texts.plan_mode_again,
    "task_reminder": program_texts.task_reminder,
}
