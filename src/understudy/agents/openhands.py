"""OpenHands, headless through its software agent SDK, speaking Chat Completions to the gateway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from understudy.agents.base import AgentJob
from understudy.agents.openhands_driver import BUILT_IN_TOOLS, TOOLS
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
from understudy.ingest.formats.openhands import OpenHandsV1Format
from understudy.sandbox.base import Completed, Sandbox

_DRIVER = Path(__file__).with_name("openhands_driver.py")
_LOG_DIRECTORY = ".openhands/conversations"
_ENVIRONMENT = {
    "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LOG_LEVEL": "ERROR",
    "OPENHANDS_SUPPRESS_BANNER": "1",
}
_NO_CAPABILITIES = {
    "supports_prompt_cache": False,
    "supports_prompt_cache_retention": False,
    "supports_reasoning_effort": False,
    "supports_responses_api": False,
    "supports_vision": False,
    "thinking_mode": "none",
}
"""Otherwise the name of the model decides which parameters a request has."""

_INPUTRC = "set enable-bracketed-paste off\n"
"""Otherwise the control sequences of its interactive shell are in the results of commands."""


class OpenHands(PackagedAgent):
    """Runs a conversation of OpenHands' SDK once per attempt and collects its events and how it ended."""

    name: ClassVar[str] = "openhands"
    version: ClassVar[str | None] = AGENT_PACKAGES["openhands"].version
    log_directories: ClassVar[tuple[str, ...]] = (_LOG_DIRECTORY,)
    tool_names: ClassVar[tuple[str, ...]] = (*TOOLS, *BUILT_IN_TOOLS)

    def launch(self, sandbox: Sandbox, job: AgentJob) -> Launch:
        """See PackagedAgent."""
        driver_input: dict[str, Any] = {
            "prompt": job.instruction,
            "workspace": sandbox.workdir,
            "log": f"{sandbox.home}/{_LOG_DIRECTORY}",
            "max_turns": job.max_turns,
            "system_prompt": self._system_prompt,
            "tools": self._tools,
            "llm": {
                "model": f"openai/{job.model}",
                "api_key": job.key,
                "api_mode": "chat",
                "capability_overrides": _NO_CAPABILITIES,
                "input_cost_per_token": 0.0,
                "output_cost_per_token": 0.0,
                "num_retries": 6,
                "retry_min_wait": 1,
                "retry_max_wait": 16,
                "retry_multiplier": 1.0,
                "timeout": max(1, round(job.timeout_s)),
            },
        }
        return Launch(
            arguments=(f"{GATEWAY}/v1",),
            env=_ENVIRONMENT,
            files={f"{sandbox.home}/.inputrc": _INPUTRC},
            stdin=msgspec.json.encode(driver_input).decode(),
        )

    def program(self, sandbox: Sandbox) -> list[str]:
        """See PackagedAgent: the SDK is a library, which a script of ours drives."""
        return self.python_program(sandbox, _DRIVER.read_text(encoding="utf-8"))

    def logged_turns(self, logs: Mapping[str, bytes]) -> Iterable[LoggedTurn]:
        """See PackagedAgent."""
        events = session_files(logs, ".json")
        return read_turns(OpenHandsV1Format(), events) if events else ()

    def end_of(self, completed: Completed, logs: Mapping[str, bytes]) -> AgentEnd:
        """See PackagedAgent: by the driver's last line. A conversation that repeats itself is ended as stuck."""
        status = code = detail = ""
        for event in json_events(completed.stdout):
            status, code, detail = (text_at(event, name) for name in ("status", "code", "detail"))
        if status in ("finished", "stuck"):
            return AgentEnd("completed")
        if code == "MaxIterationsReached":
            return AgentEnd("max_turns")
        return self.crash(completed, f"{code}: {detail}" if code else status)
