"""The coding agent pi, headless, speaking Chat Completions to the gateway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

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
from understudy.ingest.formats.pi import PiFormat
from understudy.sandbox.base import Completed, Sandbox

_CONTEXT_TOKENS = 1_000_000
"""Larger than any model's context, so that the model's server decides when the context is full; pi compacts then.
"""


class Pi(PackagedAgent):
    """Runs pi once per attempt and collects its events, its session log and how it ended."""

    name: ClassVar[str] = "pi"
    version: ClassVar[str | None] = AGENT_PACKAGES["pi"].version
    limits_turns: ClassVar[bool] = False
    log_directories: ClassVar[tuple[str, ...]] = (".pi/agent/sessions",)
    tool_names: ClassVar[tuple[str, ...]] = ("bash", "edit", "find", "grep", "ls", "read", "write")

    def launch(self, sandbox: Sandbox, job: AgentJob) -> Launch:
        """See PackagedAgent. The instruction goes in by stdin: it may be longer than an argument may be."""
        home = f"{sandbox.home}/.pi/agent"
        arguments = ["--print", "--mode", "json", "--offline", "--no-approve", "--provider", "understudy"]
        arguments += ["--model", job.model, "--no-extensions", "--thinking", "off"]
        arguments += ["--continue"] if job.resume else []
        arguments += ["--tools", ",".join(self._tools)] if self._tools else []
        arguments += ["--system-prompt", self._system_prompt] if self._system_prompt else []
        files = {f"{home}/models.json": _models(job.model), f"{home}/settings.json": _settings()}
        return Launch(
            arguments=arguments,
            env={"UNDERSTUDY_KEY": job.key, "PI_OFFLINE": "1", "PI_CODING_AGENT_DIR": home},
            files=files,
            stdin=job.instruction,
        )

    def logged_turns(self, logs: Mapping[str, bytes]) -> Iterable[LoggedTurn]:
        """See PackagedAgent."""
        return read_turns(PiFormat(), session_files(logs, ".jsonl"))

    def end_of(self, completed: Completed, logs: Mapping[str, bytes]) -> AgentEnd:
        """See PackagedAgent: settled, with a last message that is no error."""
        settled, reason, error = False, "", ""
        for event in json_events(completed.stdout):
            if event.get("type") == "agent_settled":
                settled = True
            elif event.get("type") == "message_end" and text_at(event, "message", "role") == "assistant":
                settled, reason = False, text_at(event, "message", "stopReason")
                error = text_at(event, "message", "errorMessage")
        if settled and completed.exit_code == 0 and reason not in ("", "error", "aborted"):
            return AgentEnd("completed")
        return self.crash(completed, error or (f"its last answer ended with {reason}" if reason else ""))


def _models(model: str) -> str:
    """Return the settings of a provider with one model, the gateway. They request no thinking effort, because the
    gateway sets the sampling.
    """
    provider: dict[str, Any] = {
        "baseUrl": f"{GATEWAY}/v1",
        "api": "openai-completions",
        "apiKey": "$UNDERSTUDY_KEY",
        "models": [{"id": model, "input": ["text", "image"], "contextWindow": _CONTEXT_TOKENS}],
    }
    return msgspec.json.encode({"providers": {"understudy": provider}}).decode()


def _settings() -> str:
    settings: dict[str, Any] = {
        "enableInstallTelemetry": False,
        "quietStartup": True,
        "retry": {"enabled": True, "maxRetries": 5, "baseDelayMs": 500},
    }
    return msgspec.json.encode(settings).decode()
