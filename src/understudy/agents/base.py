"""The agent protocol: what to mount, how to run, what to collect; and any shell command as an agent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal, Protocol

from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.sandbox.base import Mount, Sandbox
from understudy.types import Call, Finding

GATEWAY_SOCKET = "/run/understudy/gateway.sock"
"""Where the gateway's Unix socket is mounted in every sandbox that an agent runs in."""

AgentOutcome = Literal["completed", "max_turns", "timeout", "crashed"]


class AgentJob(Struct, frozen=True, kw_only=True):
    """The input of an agent for one attempt. `key` identifies the attempt at the gateway and has no use elsewhere.

    `model` and `small_model` are model names to request, the second for minor work. `instruction` is the task's
    text; `timeout_s` is the wall-clock limit of the whole run. `env` are the variables of the task's environment,
    such as those of an activated conda environment, which the agent passes on. With `resume` the agent continues
    its last session in this sandbox, and the instruction is its next message.
    """

    instruction: str
    key: str
    model: str
    small_model: str
    max_turns: int
    timeout_s: float
    env: dict[str, str] = field(default_factory=dict[str, str])
    resume: bool = False


class AgentResult(Struct, frozen=True, kw_only=True):
    """How an agent ended. `logs` are the files it left, by name; `message` is the reason of a crash."""

    outcome: AgentOutcome
    exit_code: int | None
    message: str = ""
    logs: dict[str, bytes] = field(default_factory=dict[str, bytes])


class Agent(Protocol):
    """A program that works on a task in a sandbox and reaches its model through `GATEWAY_SOCKET`."""

    name: ClassVar[str]
    version: ClassVar[str | None]
    """The version of the program that is run; None where it is not known."""
    limits_turns: ClassVar[bool]
    """Whether the agent obeys the job's `max_turns`; otherwise the gateway ends it after that many calls."""
    needs_model: ClassVar[bool]
    """Whether an end without any model call is a fault, so that nothing is graded."""

    def problems(self) -> list[str]:
        """Return why this agent cannot run here, each reason with a remedy; empty if it can."""
        ...

    def mounts(self) -> tuple[Mount, ...]:
        """Return the host's files that it needs, mounted read-only. Raises ConfigError when it is not
        installed.
        """
        ...

    async def run(self, sandbox: Sandbox, job: AgentJob) -> AgentResult:
        """Work on the job to its end. Raises SandboxError; a crash of the agent is an outcome, not an
        exception.
        """
        ...

    def check(self, result: AgentResult, calls: Iterable[Call]) -> list[Finding]:
        """Return the differences between the agent's own log and its calls; empty if it keeps no such log."""
        ...


MISSING_COMMAND = (
    "--agent shell needs a command, which runs in the task's tree; give it with --agent-command 'COMMAND'"
)
"""The problem of a shell agent without a command."""


class ShellAgent:
    """Runs `sh -c COMMAND` in the task's tree.

    The command finds the gateway at the Unix socket `$UNDERSTUDY_GATEWAY_SOCKET`, its key in
    `$UNDERSTUDY_API_KEY` and the model's name in `$UNDERSTUDY_MODEL`. An exit code other than 0 is a crash.
    """

    name: ClassVar[str] = "shell"
    version: ClassVar[str | None] = None
    limits_turns: ClassVar[bool] = True
    needs_model: ClassVar[bool] = False

    def __init__(self, command: str = "") -> None:
        self._command = command

    def problems(self) -> list[str]:
        """Return a problem if no command was given."""
        return [] if self._command else [MISSING_COMMAND]

    def mounts(self) -> tuple[Mount, ...]:
        """Return no mounts. Raises ConfigError when no command was given."""
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
                **job.env,
                "UNDERSTUDY_GATEWAY_SOCKET": sandbox.locate(GATEWAY_SOCKET),
                "UNDERSTUDY_API_KEY": job.key,
                "UNDERSTUDY_MODEL": job.model,
                "UNDERSTUDY_MAX_TURNS": str(job.max_turns),
            },
        )
        logs = {"stdout.txt": completed.stdout, "stderr.txt": completed.stderr}
        if completed.timed_out:
            message = f"stopped after {completed.duration_s:.0f} s"
            return AgentResult(outcome="timeout", exit_code=None, message=message, logs=logs)
        if completed.exit_code != 0:
            tail = completed.stderr.decode(errors="replace").strip()[-500:]
            message = f"--agent-command ended with exit code {completed.exit_code}, expected 0; stderr ends: "
            message += tail or "(it is empty)"
            return AgentResult(outcome="crashed", exit_code=completed.exit_code, message=message, logs=logs)
        return AgentResult(outcome="completed", exit_code=0, logs=logs)

    def check(self, result: AgentResult, calls: Iterable[Call]) -> list[Finding]:
        """See Agent. Returns no findings, because a command keeps no log that is known here."""
        return []
