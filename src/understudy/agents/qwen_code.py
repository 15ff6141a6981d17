"""Qwen Code, headless, speaking Chat Completions to the gateway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from understudy.agents.base import AgentJob, AgentOutcome
from understudy.agents.packaged import (
    GATEWAY,
    AgentEnd,
    Launch,
    PackagedAgent,
    json_events,
    session_files,
    text_at,
)
from understudy.agents.packages import AGENT_PACKAGES
from understudy.agents.turn_log import LoggedTurn, read_turns
from understudy.ingest.formats.qwen_code import QwenCodeFormat
from understudy.sandbox.base import Completed, Sandbox

_TURN_LIMIT_EXIT_CODE = 53
"""The exit code of a session that has reached its turn limit."""

_LOOP_ERROR = "Loop detection halted the run"
"""The beginning of its error when the model repeats itself. That is the model's fault, so its work is graded."""

_OUTCOMES: dict[str, AgentOutcome] = {"success": "completed", "error_max_turns": "max_turns"}
"""The subtypes of its result that are an ordinary end."""

_SETTINGS: dict[str, Any] = {
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False, "disableUpdateNag": True},
    # Features whose calls do not belong to the work on the task.
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "ui": {"enableFollowupSuggestions": False},
    # Over the Agent Client Protocol it would otherwise ask the model whether a tool call is safe.
    "tools": {"approvalMode": "yolo"},
    "security": {"auth": {"selectedType": "openai"}},
}


_COMMAND = "understudy-instruction"
_COMMAND_FILE = "---\ndisable-model-invocation: true\n---\n{{args}}\n"
"""The file of a command of ours whose prompt is its argument.

Otherwise Qwen Code would read `@word` in an instruction as a file name and put a space before it, and `/word` at
its beginning as one of its own commands.
"""

_OTHER_TOOLS = (
    "agent", "artifact", "ask_user_question", "display_image", "enter_plan_mode", "enter_worktree", "exec",
    "exit_plan_mode", "exit_worktree", "get_goal", "image_gen", "list_agents", "propose_goal", "record_artifact",
    "record_source", "report_findings", "request_shutdown", "send_message", "skill", "structured_output",
    "task_create", "task_list", "task_stop", "task_update", "team_create", "team_delete", "team_plan_approval",
    "tool_call", "tool_search", "update_goal", "workflow",
)  # fmt: skip
"""Tools that are still offered when its option for core tools names others."""


_CORE_TOOLS = (
    "create_sub_session", "cron_create", "cron_delete", "cron_list", "edit", "glob", "grep_search",
    "list_directory", "loop_wakeup", "lsp", "monitor", "notebook_edit", "read_file", "read_mcp_resource",
    "run_shell_command", "save_memory", "todo_write", "write_file", "zoom_image",
)  # fmt: skip


class QwenCode(PackagedAgent):
    """Runs Qwen Code once per attempt and collects its events, its session log and how it ended."""

    name: ClassVar[str] = "qwen-code"
    version: ClassVar[str | None] = AGENT_PACKAGES["qwen-code"].version
    tool_names: ClassVar[tuple[str, ...]] = (*_CORE_TOOLS, *_OTHER_TOOLS)
    log_directories: ClassVar[tuple[str, ...]] = (".qwen/projects",)
    logs_over_acp: ClassVar[bool] = True

    def launch(self, sandbox: Sandbox, job: AgentJob) -> Launch:
        """See PackagedAgent."""
        arguments = ["--yolo", "--output-format", "stream-json", "--auth-type", "openai", "--model", job.model]
        arguments += ["--max-session-turns", str(job.max_turns), "--exclude-tools", "web_fetch"]
        arguments += ["--continue"] if job.resume else []
        arguments += ["--system-prompt", self._system_prompt] if self._system_prompt else []
        for tool in self._tools:
            arguments += ["--core-tools", tool]
        settings = dict(_SETTINGS)
        if self._tools:
            disabled = [name for name in _OTHER_TOOLS if name not in self._tools]
            settings["tools"] = {**_SETTINGS["tools"], "disabled": disabled}
        return Launch(
            arguments=arguments,
            env={
                "OPENAI_API_KEY": job.key,
                "OPENAI_BASE_URL": f"{GATEWAY}/v1",
                "OPENAI_MODEL": job.model,
                "QWEN_CODE_NO_RELAUNCH": "true",
            },
            files={
                f"{sandbox.home}/.qwen/settings.json": msgspec.json.encode(settings).decode(),
                f"{sandbox.home}/.qwen/commands/{_COMMAND}.md": _COMMAND_FILE,
            },
            # It inserts the arguments by JavaScript's `replaceAll`, to which `$$` is one dollar.
            stdin=f"/{_COMMAND} {job.instruction.replace('$', '$$')}",
        )

    def logged_turns(self, logs: Mapping[str, bytes]) -> Iterable[LoggedTurn]:
        """See PackagedAgent."""
        return read_turns(QwenCodeFormat(), session_files(logs, ".jsonl"))

    def end_of(self, completed: Completed, logs: Mapping[str, bytes]) -> AgentEnd:
        """See PackagedAgent: by its last `result` line."""
        results = [event for event in json_events(completed.stdout) if event.get("type") == "result"]
        if completed.exit_code == _TURN_LIMIT_EXIT_CODE:
            return AgentEnd("max_turns")
        if not results:
            return self.crash(completed)
        outcome = _OUTCOMES.get(text_at(results[-1], "subtype"))
        if outcome == "max_turns" or (outcome and not results[-1].get("is_error")):
            return AgentEnd(outcome)
        reason = text_at(results[-1], "error", "message") or text_at(results[-1], "result") or "an error"
        if reason.startswith(_LOOP_ERROR):
            return AgentEnd("completed")
        return self.crash(completed, reason)
