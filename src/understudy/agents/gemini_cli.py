"""Gemini CLI, headless, speaking Gemini's generateContent to the gateway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from understudy.agents.base import AgentJob
from understudy.agents.packaged import GATEWAY, AgentEnd, Launch, PackagedAgent, session_files, text_at
from understudy.agents.packages import AGENT_PACKAGES
from understudy.agents.turn_log import LoggedTurn, read_turns
from understudy.ingest.formats.gemini import GeminiFormat
from understudy.sandbox.base import Completed, Sandbox

_TURN_LIMIT_EXIT_CODE = 53
_NEEDS_GOOGLE = ("google_web_search", "web_fetch")
"""Tools that have Google's servers look something up."""

_COMMAND = "understudy-instruction"
_INSERTIONS = ("@{", "!{", "{{args}}")
"""Syntax in the prompt of a command that inserts a file, the output of a command, or the arguments."""

_ENVIRONMENT = {
    "GOOGLE_GEMINI_BASE_URL": GATEWAY,
    "GEMINI_CLI_NO_RELAUNCH": "true",
    "GEMINI_CLI_TRUST_WORKSPACE": "true",
    "NO_BROWSER": "true",
    "NO_COLOR": "1",
}


_TOOLS = (
    "activate_skill", "ask_user", "complete_task", "enter_plan_mode", "exit_plan_mode", "get_internal_docs",
    "glob", "grep_search", "invoke_agent", "list_background_processes", "list_directory", "list_mcp_resources",
    "read_background_output", "read_file", "read_many_files", "read_mcp_resource", "replace", "run_shell_command",
    "tracker_add_dependency", "tracker_create_task", "tracker_get_task", "tracker_list_tasks",
    "tracker_update_task", "tracker_visualize", "update_topic", "write_file", "write_todos",
)  # fmt: skip


class GeminiCli(PackagedAgent):
    """Runs Gemini CLI once per attempt and collects its session log and how it ended.

    It prints only its result: as a stream of events, its output lacks the end when a tool printed much.
    """

    name: ClassVar[str] = "gemini"
    version: ClassVar[str | None] = AGENT_PACKAGES["gemini"].version
    tool_names: ClassVar[tuple[str, ...]] = _TOOLS
    log_directories: ClassVar[tuple[str, ...]] = (".gemini/tmp",)

    def launch(self, sandbox: Sandbox, job: AgentJob) -> Launch:
        """See PackagedAgent. The instruction is passed by stdin, because it may exceed the size limit of
        arguments.
        """
        home = f"{sandbox.home}/.gemini"
        settings = settings_of(self._tools, job.max_turns)
        stdin, command = _submission(job.instruction)
        files = {f"{home}/settings.json": msgspec.json.encode(settings).decode()}
        if command:
            files[f"{home}/commands/{_COMMAND}.toml"] = command
        env = {**_ENVIRONMENT, "GEMINI_API_KEY": job.key}
        if self._system_prompt:
            env["GEMINI_SYSTEM_MD"] = f"{home}/system.md"
            files[env["GEMINI_SYSTEM_MD"]] = self._system_prompt
        return Launch(
            arguments=(
                "--yolo",
                "--model",
                job.model,
                "--output-format",
                "json",
                *(("--resume", "latest") if job.resume else ()),
            ),
            env=env,
            files=files,
            stdin=stdin,
        )

    def logged_turns(self, logs: Mapping[str, bytes]) -> Iterable[LoggedTurn]:
        """See PackagedAgent."""
        return read_turns(GeminiFormat(), session_files(logs, ".jsonl"))

    def end_of(self, completed: Completed, logs: Mapping[str, bytes]) -> AgentEnd:
        """See PackagedAgent: decided by its result, or by the exit code for the turn limit."""
        if completed.exit_code == _TURN_LIMIT_EXIT_CODE:
            return AgentEnd("max_turns")
        if completed.exit_code == 0 and "response" in _result(completed.stdout):
            return AgentEnd("completed")
        errors = (text_at(_result(output), "error", "message") for output in (completed.stdout, completed.stderr))
        return self.crash(completed, next(filter(None, errors), ""))


def _submission(instruction: str) -> tuple[str, str]:
    """Return what is passed by stdin, and the TOML of a command that it runs, "" for none.

    The instruction is the prompt of a command of ours, which Gemini CLI submits as it is. Otherwise it would add
    the file that `@word` names, and take `/word` at the beginning for one of its own commands. An instruction with
    `_INSERTIONS` has no such command, since they cannot be escaped.
    """
    if any(insertion in instruction for insertion in _INSERTIONS):
        return instruction, ""
    # TOML's strings are written as in JSON, which does not escape the control character DEL.
    prompt = msgspec.json.encode(instruction).decode().replace("\x7f", "\\u007f")
    return f"/{_COMMAND}", f"prompt = {prompt}\n"


def _result(output: bytes) -> dict[str, Any]:
    """Return the JSON object, over several lines, at the end of an output; empty if there is none."""
    _, _, text = (b"\n" + output.strip()).rpartition(b"\n{\n")
    try:
        return msgspec.json.decode(b"{" + text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}


def settings_of(tools: tuple[str, ...], max_turns: int) -> dict[str, Any]:
    """Return Gemini CLI's settings: the gateway's key, no telemetry or updates, and only these tools if any are
    given.
    """
    return {
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False, "maxAttempts": 6},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "model": {"maxSessionTurns": max_turns},
        "tools": {"exclude": list(_NEEDS_GOOGLE)} | ({"core": list(tools)} if tools else {}),
    }
