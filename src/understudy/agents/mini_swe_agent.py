"""mini-swe-agent, headless, speaking Chat Completions to the gateway: one tool, the shell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import msgspec

from understudy.agents.base import AgentJob
from understudy.agents.packaged import GATEWAY, AgentEnd, Launch, PackagedAgent, session_files, text_at
from understudy.agents.packages import AGENT_PACKAGES
from understudy.agents.turn_log import LoggedTurn, read_turns
from understudy.ingest.formats.swe_agents import MiniSweAgentFormat
from understudy.sandbox.base import Completed, Sandbox

_DIRECTORY = ".mini-swe-agent"
_TRAJECTORY = f"{_DIRECTORY}/run.traj.json"
_ORDINARY_ENDS = {
    "Submitted": AgentEnd("completed"),
    "LimitsExceeded": AgentEnd("max_turns"),
    "RepeatedFormatError": AgentEnd("completed"),
}
"""The exit states that are an ordinary end, including that the model called no tool in several turns."""


class MiniSweAgent(PackagedAgent):
    """Runs mini-swe-agent once per attempt and collects its trajectory and how it ended."""

    name: ClassVar[str] = "mini-swe-agent"
    version: ClassVar[str | None] = AGENT_PACKAGES["mini-swe-agent"].version
    log_directories: ClassVar[tuple[str, ...]] = (_TRAJECTORY,)
    tools_unsupported: ClassVar[str] = "its only tool is the shell"

    def launch(self, sandbox: Sandbox, job: AgentJob) -> Launch:
        """See PackagedAgent."""
        directory = f"{sandbox.home}/{_DIRECTORY}"
        settings = f"{directory}/run.yaml"
        return Launch(
            arguments=(
                "--yolo", "--exit-immediately", "-c", "mini.yaml", "-c", settings,
                "--output", f"{sandbox.home}/{_TRAJECTORY}",
            ),
            env={
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_TELEMETRY": "False",
                "MSWEA_CONFIGURED": "true",
                "MSWEA_GLOBAL_CONFIG_DIR": directory,
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "6",
                "MSWEA_SILENT_STARTUP": "1",
            },
            files={settings: msgspec.json.encode(self._settings(job)).decode()},
        )  # fmt: skip

    def logged_turns(self, logs: Mapping[str, bytes]) -> Iterable[LoggedTurn]:
        """See PackagedAgent."""
        return read_turns(MiniSweAgentFormat(), session_files(logs, ".traj.json"))

    def must_log(self, turn: LoggedTurn) -> bool:
        """See PackagedAgent: its log leaves out actions that it could not run."""
        return bool(turn.calls) and all(
            name == "bash" and text_at(_inputs(arguments), "command") for name, arguments in turn.calls
        )

    def _settings(self, job: AgentJob) -> dict[str, Any]:
        """Return what overrides its own settings, as JSON, which is valid YAML."""
        agent = {"step_limit": job.max_turns, "cost_limit": 0}
        return {
            "run": {"task": job.instruction},
            "agent": agent | ({"system_template": _literal(self._system_prompt)} if self._system_prompt else {}),
            "model": {
                "model_class": "litellm",
                "model_name": f"openai/{job.model}",
                "cost_tracking": "ignore_errors",
                "model_kwargs": {
                    "api_base": f"{GATEWAY}/v1",
                    "api_key": job.key,
                    "custom_llm_provider": "openai",
                },
            },
        }

    def end_of(self, completed: Completed, logs: Mapping[str, bytes]) -> AgentEnd:
        """See PackagedAgent: decided by the exit state in the trajectory."""
        try:
            status = text_at(msgspec.json.decode(logs[f"session/{_TRAJECTORY}"]), "info", "exit_status")
        except (KeyError, ValueError, RecursionError):
            return self.crash(completed)
        return _ORDINARY_ENDS.get(status) or self.crash(completed, _last_error(logs) or status)


def _inputs(arguments: str) -> Any:
    """Return the arguments of a call; None if they are not a JSON object."""
    try:
        return msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return None


def _literal(text: str) -> str:
    """Return a template that renders as the text."""
    return "{{ " + msgspec.json.encode(text).decode() + " }}"


def _last_error(logs: Mapping[str, bytes]) -> str:
    """Return what the last message of the trajectory says."""
    messages = msgspec.json.decode(logs[f"session/{_TRAJECTORY}"]).get("messages")
    last_message = cast(list[Any], messages)[-1] if isinstance(messages, list) and messages else None
    return text_at(last_message, "extra", "exception_str") or text_at(last_message, "content")
