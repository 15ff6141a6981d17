"""The Codex CLI of OpenAI, headless (`codex exec`), speaking the Responses API to the gateway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import msgspec

from understudy.agents.base import AgentJob
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
from understudy.ingest.formats.codex import CodexFormat
from understudy.sandbox.base import Completed, Sandbox

SUBSTITUTE_MODEL = "gpt-5.5"
"""The model that Codex is told to request in place of one that it does not know.

Codex gives a model that it does not know fewer tools, without the one that edits. The gateway answers a request
for any name with the run's model.
"""

_FEATURES_OFF = (
    "api_key_model_discovery", "apps", "browser_use", "browser_use_external", "browser_use_full_cdp_access",
    "computer_use", "goals", "image_generation", "in_app_browser", "plugins", "remote_plugin", "plugin_sharing",
    "shell_snapshot", "skill_search", "tool_suggest", "workspace_dependencies",
)  # fmt: skip
"""Features that need OpenAI's servers, a desktop or a user."""


class Codex(PackagedAgent):
    """Runs Codex once per attempt and collects its events, its session log and how it ended."""

    name: ClassVar[str] = "codex"
    version: ClassVar[str | None] = AGENT_PACKAGES["codex"].version
    limits_turns: ClassVar[bool] = False
    log_directories: ClassVar[tuple[str, ...]] = (".codex/sessions",)
    tools_unsupported: ClassVar[str] = "Codex chooses its tools by the model"

    def launch(self, sandbox: Sandbox, job: AgentJob) -> Launch:
        """See PackagedAgent."""
        home = f"{sandbox.home}/.codex"
        instructions = f"{home}/instructions.md"
        files = {f"{home}/config.toml": _config(instructions if self._system_prompt else "")}
        if self._system_prompt:
            files[instructions] = self._system_prompt
        model = job.model if job.model.startswith("gpt-") else SUBSTITUTE_MODEL
        return Launch(
            arguments=(
                "exec", *(("resume", "--last") if job.resume else ()), "--json", "--model", model,
                "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "-",
            ),
            env={"CODEX_HOME": home, "UNDERSTUDY_KEY": job.key},
            files=files,
            stdin=job.instruction,
        )  # fmt: skip

    def logged_turns(self, logs: Mapping[str, bytes]) -> Iterable[LoggedTurn]:
        """See PackagedAgent."""
        return read_turns(CodexFormat(), session_files(logs, ".jsonl"))

    def end_of(self, completed: Completed, logs: Mapping[str, bytes]) -> AgentEnd:
        """See PackagedAgent: decided by the last event that ends a turn."""
        error, ended = "", False
        for event in json_events(completed.stdout):
            match event.get("type"):
                case "turn.started":
                    error, ended = "", False
                case "turn.completed":
                    ended = True
                case "turn.failed":
                    error = text_at(event, "error", "message") or error or "no message"
                case "error":
                    error = text_at(event, "message") or "no message"
                case _:
                    pass
        return AgentEnd("completed") if ended and completed.exit_code == 0 else self.crash(completed, error)


def _config(instructions: str) -> str:
    """Return Codex's settings as TOML, in which strings and booleans are written as in JSON."""
    tables = {
        "": {
            "model_provider": "understudy",
            "check_for_update_on_startup": False,
            # Its start files set PATH anew, without the task's own programs.
            "allow_login_shell": False,
            "web_search": "disabled",
            "history.persistence": "none",
            **({"model_instructions_file": instructions} if instructions else {}),
        },
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "features": dict.fromkeys(_FEATURES_OFF, False),
        "model_providers.understudy": {
            "name": "Understudy",
            "base_url": f"{GATEWAY}/v1",
            "wire_api": "responses",
            "env_key": "UNDERSTUDY_KEY",
            # The waits are 0.2, 0.4, … s. A longer outage is left to another attempt.
            "request_max_retries": 5,
            "stream_max_retries": 5,
        },
    }
    return "".join(
        (f"[{table}]\n" if table else "")
        + "".join(f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in values.items())
        for table, values in tables.items()
    )
