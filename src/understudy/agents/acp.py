"""Runs any agent that speaks the Agent Client Protocol: `--agent "acp:COMMAND"`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import msgspec

from understudy import plugins
from understudy.agents.base import AgentJob, AgentOutcome, AgentResult
from understudy.agents.claude_code import ClaudeCode
from understudy.agents.packaged import (
    GATEWAY,
    Launch,
    PackagedAgent,
    collect_logs,
    json_events,
    run_launched,
    runtime_command,
    runtime_mount,
    text_at,
)
from understudy.agents.packages import AGENT_PACKAGES
from understudy.agents.runtimes import python_path, runtime_problems
from understudy.config import cache_dir
from understudy.errors import ConfigError
from understudy.sandbox.base import Mount, Sandbox
from understudy.types import Call, Finding

_DRIVER = Path(__file__).with_name("acp_driver.py")
_OUTCOMES: dict[str, AgentOutcome] = {
    "end_turn": "completed",
    "max_tokens": "completed",
    "refusal": "completed",
    "max_turn_requests": "max_turns",
}
"""The protocol's reasons to stop that are an ordinary end."""


class AcpAgent:
    """Runs a command in the sandbox and speaks the Agent Client Protocol, version 1, to it.

    The command's first word is an agent of `AGENT_PACKAGES`, which is then mounted and set up as usual, or a
    program in the sandbox, which finds the gateway by the environment variables that providers' clients read.
    Raises ConfigError for a missing or malformed command, and if tools or a system prompt are given: the protocol
    cannot set them.
    """

    name: ClassVar[str] = "acp"
    version: ClassVar[str | None] = None
    limits_turns: ClassVar[bool] = False
    needs_model: ClassVar[bool] = True

    def __init__(self, command: str = "", tools: str = "", system_prompt: str = "") -> None:
        for flag, value in (("--tools", tools), ("--system-prompt", system_prompt)):
            if value:
                raise ConfigError(
                    f"{flag}: unsupported by --agent acp:COMMAND, because the Agent Client Protocol has no "
                    "such setting; leave it out"
                )
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise ConfigError(
                f"--agent acp:{command}: invalid command: {error}; give a command line with closed "
                'quotes, as in --agent "acp:gemini --acp"'
            ) from error
        if not self._argv:
            raise ConfigError(
                '--agent acp: a command is missing; give one after the colon, as in --agent "acp:gemini --acp"'
            )
        if self._argv[0] == ClaudeCode.name:
            raise ConfigError(
                f"--agent acp:{command}: Claude Code does not speak the Agent Client Protocol; use --agent "
                f"{ClaudeCode.name}, or an image that has an adapter for it and --agent acp:claude-agent-acp"
            )
        name, at, _ = self._argv[0].partition("@")
        if at and name in AGENT_PACKAGES:
            raise ConfigError(
                f"--agent acp:{command}: no version can be given, the pinned one is used; give acp:{name}, or try "
                f"another version with: understudy agents try {self._argv[0]}"
            )
        agent = plugins.load("agents", self._argv[0])() if self._argv[0] in AGENT_PACKAGES else None
        self._packaged: PackagedAgent | None = agent if isinstance(agent, PackagedAgent) else None

    def problems(self) -> list[str]:
        """Return why it cannot run here, each reason with a remedy; empty if it can."""
        if self._packaged is not None:
            return self._packaged.problems()
        if problems := runtime_problems():
            return problems
        if python_path(cache_dir()).exists():
            return []
        return [
            f"the Python that drives agents in sandboxes is missing ({python_path(cache_dir())}); make it with: "
            "understudy setup --agent gemini"
        ]

    def mounts(self) -> tuple[Mount, ...]:
        """Return mounts of the driver, and of the agent if it was fetched. Raises ConfigError."""
        if problems := self.problems():
            raise ConfigError(problems[0])
        return self._packaged.mounts() if self._packaged else (runtime_mount(),)

    async def run(self, sandbox: Sandbox, job: AgentJob) -> AgentResult:
        """Work on the job to its end or the job's wall-clock limit."""
        launch = self._packaged.launch(sandbox, job) if self._packaged else _launch(job)
        argv = [*self._packaged.program(sandbox), *self._argv[1:]] if self._packaged else self._argv
        driver_input = {"argv": argv, "prompt": job.instruction}
        launch = msgspec.structs.replace(
            launch,
            arguments=("-c", _DRIVER.read_text(encoding="utf-8")),
            stdin=msgspec.json.encode(driver_input).decode(),
        )
        completed = await run_launched(sandbox, job, runtime_command(sandbox), launch)
        logs = {"stdout.txt": completed.stdout, "stderr.txt": completed.stderr}
        if self._packaged is not None:
            logs |= await collect_logs(sandbox, self._packaged.log_directories)
        logs = {name: content.replace(job.key.encode(), b"<key>") for name, content in logs.items()}
        outcome: AgentOutcome | None = None
        message = ""
        if completed.timed_out:
            outcome, message = "timeout", f"stopped after {completed.duration_s:.0f} s"
        else:
            for event in json_events(completed.stdout):
                if event.get("type") in ("result", "error"):
                    reason = text_at(event, "stopReason")
                    outcome = _OUTCOMES.get(reason)
                    message = text_at(event, "message") or f"it stopped for the reason {reason!r}"
        if outcome is None:
            tail = completed.stderr.decode(errors="replace").strip()[-500:]
            message = message or f"no result (exit code {completed.exit_code})"
            message = f"{self._argv[0]}: {message}; its output ends: {tail or 'nothing'}"
        return AgentResult(
            outcome=outcome or "crashed",
            exit_code=completed.exit_code,
            message=message if outcome in (None, "timeout") else "",
            logs=logs,
        )

    def check(self, result: AgentResult, calls: Iterable[Call]) -> list[Finding]:
        """See Agent. The protocol has no log; an agent's own is compared if it is the usual one."""
        if self._packaged is None or not self._packaged.logs_over_acp:
            return []
        return self._packaged.check(result, calls)


def _launch(job: AgentJob) -> Launch:
    """Return how to start an unknown command: the gateway is in the variables of every provider's clients."""
    env = {
        "ANTHROPIC_API_KEY": job.key,
        "ANTHROPIC_BASE_URL": GATEWAY,
        "ANTHROPIC_MODEL": job.model,
        "GEMINI_API_KEY": job.key,
        "GOOGLE_GEMINI_BASE_URL": GATEWAY,
        "OPENAI_API_KEY": job.key,
        "OPENAI_BASE_URL": f"{GATEWAY}/v1",
        "OPENAI_MODEL": job.model,
        "UNDERSTUDY_API_KEY": job.key,
        "UNDERSTUDY_GATEWAY": GATEWAY,
        "UNDERSTUDY_MODEL": job.model,
    }
    return Launch(arguments=(), env=env, files={})
