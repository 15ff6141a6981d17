"""Base of agents that are fetched from a registry: how they are mounted, started and logged."""

from __future__ import annotations

import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import msgspec
from msgspec import Struct

from understudy.agents.base import GATEWAY_SOCKET, AgentJob, AgentOutcome, AgentResult
from understudy.agents.packages import AGENT_PACKAGES, AgentPackage
from understudy.agents.runtimes import launcher_command, node_path, python_command, python_path
from understudy.agents.tool_names import read_tool_names
from understudy.agents.turn_log import LoggedTurn, compare_turns
from understudy.config import cache_dir
from understudy.errors import ConfigError, SandboxError
from understudy.sandbox.base import Completed, Mount, Sandbox
from understudy.trajectory.tree import build
from understudy.types import Call, Finding
from understudy.wire.decoding import UNREADABLE, decoded

_AGENT = "/opt/understudy/agent"
_PYTHON = "/opt/understudy/python"
_NODE = "/opt/understudy/node"
_TAIL_CHARACTERS = 500

GATEWAY = "{gateway}"
"""Stands for the gateway's address in what `launcher.py` writes and runs."""


class Launch(Struct, frozen=True, kw_only=True):
    """The input of `launcher.py`, which describes it; `arguments` are without the program of the command."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, str]
    stdin: str = ""


class AgentEnd(Struct, frozen=True):
    """How an agent ended, with the reason if it crashed."""

    outcome: AgentOutcome
    message: str = ""


class PackagedAgent(ABC):
    """An agent of `AGENT_PACKAGES` that is started by `launcher.py` and speaks to the gateway over TCP.

    `tools` are the only tools it has, separated by commas, and `system_prompt` stands in the place of its own.
    Raises ConfigError if it has no such setting.
    """

    name: ClassVar[str]
    version: ClassVar[str | None]
    limits_turns: ClassVar[bool] = True
    needs_model: ClassVar[bool] = True
    program_mount: ClassVar[str] = _AGENT
    log_directories: ClassVar[tuple[str, ...]] = ()
    """The directories of its logs, relative to the home."""
    logs_over_acp: ClassVar[bool] = False
    """Whether its log is the same if it is driven over the Agent Client Protocol."""
    tools_unsupported: ClassVar[str] = ""
    """Why `tools` is unsupported; "" if it is supported."""
    tool_names: ClassVar[tuple[str, ...]] = ()
    """The tools that the pinned version can have without network."""

    def __init__(self, tools: str = "", system_prompt: str = "") -> None:
        if tools and self.tools_unsupported:
            raise ConfigError(
                f"--tools: unsupported by --agent {self.name}: {self.tools_unsupported}; leave it out"
            )
        self.package: AgentPackage = AGENT_PACKAGES[self.name]
        self._tools = read_tool_names(tools, self.package.title, self.tool_names)
        self._system_prompt = system_prompt

    def problems(self) -> list[str]:
        """Return why it cannot run here, each reason with a remedy; empty if it can."""
        return self.package.problems()

    def mounts(self) -> tuple[Mount, ...]:
        """Return mounts of its package and the runtimes that it needs. Raises ConfigError when it has not been
        fetched.
        """
        if problems := self.problems():
            raise ConfigError(problems[0])
        cache = cache_dir()
        mounts = (
            Mount(self.package.directory(cache), _AGENT),
            Mount(python_path(cache, self.package.requires_python), _PYTHON),
        )
        return (*mounts, Mount(node_path(cache), _NODE)) if self.package.kind == "node" else mounts

    async def run(self, sandbox: Sandbox, job: AgentJob) -> AgentResult:
        """Work on the job to its end or the job's wall-clock limit."""
        launch = self.launch(sandbox, job)
        completed = await run_launched(sandbox, job, self.program(sandbox), launch)
        logs = {"stdout.txt": completed.stdout, "stderr.txt": completed.stderr}
        logs |= await collect_logs(sandbox, self.log_directories)
        logs = {name: content.replace(job.key.encode(), b"<key>") for name, content in logs.items()}
        if completed.timed_out:
            end = AgentEnd("timeout", f"stopped after {completed.duration_s:.0f} s")
        else:
            end = self.end_of(completed, logs)
        return AgentResult(outcome=end.outcome, exit_code=completed.exit_code, message=end.message, logs=logs)

    def check(self, result: AgentResult, calls: Iterable[Call]) -> list[Finding]:
        """Return the differences between its log and the calls."""
        turns = self.logged_turns(result.logs)
        cut_off = result.outcome in ("timeout", "crashed")
        return [] if turns is None else compare_turns(turns, build(calls), cut_off=cut_off, must_log=self.must_log)

    def logged_turns(self, logs: Mapping[str, bytes]) -> Iterable[LoggedTurn] | None:
        """Return the responses in its own log, in order; None if they are not compared."""
        return None

    def must_log(self, turn: LoggedTurn) -> bool:
        """Return whether a response of the model must be in the agent's own log."""
        return True

    @abstractmethod
    def launch(self, sandbox: Sandbox, job: AgentJob) -> Launch:
        """Return the arguments, files and variables for the job, with which it asks no questions and contacts only
        the gateway.
        """

    @abstractmethod
    def end_of(self, completed: Completed, logs: Mapping[str, bytes]) -> AgentEnd:
        """Return how a run that was not stopped from outside ended."""

    def crash(self, completed: Completed, reason: str = "") -> AgentEnd:
        """Return the end of a run that did not report one, with the end of stderr if there is no reason."""
        tail = completed.stderr.decode(errors="replace").strip()[-_TAIL_CHARACTERS:] or "nothing on stderr"
        reason = f"reported: {reason[:_TAIL_CHARACTERS]}" if reason else f"left no result: {tail}"
        return AgentEnd("crashed", f"{self.package.title} ended with exit code {completed.exit_code} and {reason}")

    def program(self, sandbox: Sandbox) -> list[str]:
        """Return the command that runs its program in a sandbox."""
        root = sandbox.locate(_AGENT)
        program = str(self.package.program_path(root))
        match self.package.kind:
            case "native":
                return [program]
            case "node":
                return [f"{sandbox.locate(_NODE)}/bin/node", program]
            case "python":
                module = program.removeprefix(f"{root}/site/").removesuffix(".py").replace("/", ".")
                return [*self.python_program(sandbox, _RUN_MODULE), module]

    def python_program(self, sandbox: Sandbox, code: str) -> list[str]:
        """Return the command that runs code by the agent's Python; it gets the packages' directory."""
        root = sandbox.locate(_AGENT)
        return [*python_command(sandbox.locate(_PYTHON), "-c", f"{root}/lib"), code, f"{root}/site"]


_RUN_MODULE = """\
import runpy, sys
sys.path.insert(0, sys.argv[1])
del sys.argv[1]
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


async def run_launched(sandbox: Sandbox, job: AgentJob, program: Sequence[str], launch: Launch) -> Completed:
    """Run a program by `launcher.py`, to its end or the job's wall-clock limit. Raises SandboxError."""
    launcher_input = {
        "socket": sandbox.locate(GATEWAY_SOCKET),
        "argv": [*program, *launch.arguments],
        "env": {**job.env, **launch.env},
        "files": launch.files,
        "stdin": launch.stdin,
    }
    return await sandbox.run(
        launcher_command(sandbox.locate(_PYTHON)),
        stdin=msgspec.json.encode(launcher_input),
        timeout_s=job.timeout_s,
    )


def runtime_mount() -> Mount:
    """Return the mount of the Python that drives agents."""
    return Mount(python_path(cache_dir()), _PYTHON)


def runtime_command(sandbox: Sandbox) -> list[str]:
    """Return the command of that Python in a sandbox, without the script."""
    return python_command(sandbox.locate(_PYTHON), "")[:-1]


async def collect_logs(sandbox: Sandbox, directories: Sequence[str]) -> dict[str, bytes]:
    """Return the files below directories of the home, by their paths, as `session/…`; missing directories are
    skipped.

    If an agent destroys its logs, only the logs are lost: otherwise agents could turn a failure into an
    infrastructure error. A broken sandbox fails again when the patch is extracted.
    """
    if not directories:
        return {}
    try:
        archive = await sandbox.run(
            ["tar", "-C", sandbox.home, "--ignore-failed-read", "-cf", "-", "--", *directories], timeout_s=30
        )
    except SandboxError:
        return {}
    return {f"session/{name}": content for name, content in tar_members(archive.stdout)}


def tar_members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the regular files of a tar archive, as far as it can be read."""
    try:
        # Only uncompressed and not sparse, so that the content is never larger than the archive.
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as members:
            for member in members:
                plain = member.isfile() and not member.issparse()
                content = members.extractfile(member) if plain else None
                if content is not None:
                    # The store accepts no other names.
                    yield member.name.encode(errors="replace").decode(), content.read()
    except tarfile.TarError:
        return


def session_files(logs: Mapping[str, bytes], suffix: str) -> dict[str, bytes]:
    """Return the files of its session log whose names end with `suffix`."""
    return {name: log for name, log in logs.items() if name.startswith("session/") and name.endswith(suffix)}


def json_events(output: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines of an output; other lines are skipped."""
    for line in output.splitlines():
        try:
            event = decoded(msgspec.json.decode, line)
        except UNREADABLE:
            continue
        if isinstance(event, dict):
            yield cast(dict[str, Any], event)


def text_at(value: Any, *path: str) -> str:
    """Return the text at a path of keys in a JSON value; "" if there is none."""
    for key in path:
        value = cast(dict[str, Any], value).get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
