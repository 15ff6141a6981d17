"""Any command as an agent: it reads the instruction from stdin and works in the current directory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from understudy.agents.base import GATEWAY_SOCKET, AgentJob, AgentResult
from understudy.errors import ConfigError
from understudy.sandbox.base import Mount, Sandbox
from understudy.types import Call, Finding


class ShellAgent:
    """Runs `sh -c COMMAND` in the task's tree.

    The command finds the gateway at the Unix socket `$UNDERSTUDY_GATEWAY_SOCKET`, its key in
    `$UNDERSTUDY_API_KEY` and the model's name in `$UNDERSTUDY_MODEL`. An exit code other than 0 is a crash.
    """

    name: ClassVar[str] = "shell"
    version: ClassVar[str | None] = None

    def __init__(self, command: str = "") -> None:
        self._command = command

    def problems(self) -> list[str]:
        """Says so when no command was given."""
        return [] if self._command else ["the shell agent needs a command: --agent-command 'COMMAND'"]

    def mounts(self) -> tuple[Mount, ...]:
        """Nothing. Raises ConfigError when no command was given."""
        if problems := self.problems():
            raise ConfigError(problems[0])
        return ()

    async def run(self, sandbox: Sandbox, job: AgentJob) -> AgentResult:
        """Run the command to its end or the job's wall-clock limit."""
        completed = await sandbox.run(
            ["sh", "-c", self._command],
            stdin=job.instruction.encode(),
            timeout_s=job.timeout_s,
            env={
                "UNDERSTUDY_GATEWAY_SOCKET": sandbox.locate(GATEWAY_SOCKET),
                "UNDERSTUDY_API_KEY": job.key,
                "UNDERSTUDY_MODEL": job.model,
                "UNDERSTUDY_MAX_TURNS": str(job.max_turns),
            },
        )
        logs = {"stdout.txt": completed.stdout, "stderr.txt": completed.stderr}
        if completed.timed_out:
            return AgentResult(outcome="timeout", exit_code=None, logs=logs)
        if completed.exit_code != 0:
            tail = completed.stderr.decode(errors="replace").strip()[-500:]
            message = f"the command ended with exit code {completed.exit_code}: {tail}"
            return AgentResult(outcome="crashed", exit_code=completed.exit_code, message=message, logs=logs)
        return AgentResult(outcome="completed", exit_code=0, logs=logs)

    def check(self, result: AgentResult, calls: Iterable[Call]) -> list[Finding]:
        """Nothing: a command keeps no log that is known here."""
        return []
