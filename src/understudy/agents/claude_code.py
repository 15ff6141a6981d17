"""The real Claude Code CLI, headless, talking to the gateway through its Unix socket."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import orjson

from understudy.agents.base import GATEWAY_SOCKET, AgentJob, AgentOutcome, AgentResult
from understudy.agents.claude_install import sdk_command, sdk_directories
from understudy.agents.packaged import tar_members
from understudy.agents.packages import AGENT_PACKAGES, AgentPackage
from understudy.agents.runtimes import runtime_problems
from understudy.agents.session_log import compare_session_log
from understudy.agents.tool_names import read_tool_names
from understudy.config import CLAUDE_CODE_VERSION, cache_dir
from understudy.errors import AgentError, ConfigError, SandboxError
from understudy.ingest.claude_code.tool_table import claude_tools, tool_names
from understudy.ingest.tool_lists import names_of
from understudy.sandbox.base import Completed, Mount, Sandbox
from understudy.trajectory.tree import build
from understudy.types import Call, Finding

_BINARY = "/opt/understudy/claude"
_PYTHON = "/opt/understudy/python"
_SDK = "/opt/understudy/claude-sdk"

RUN_METHODS = ("cli", "python")
"""How Claude Code is driven: as a command of its own, or by its Python SDK."""

RUNTIME_SETTINGS = {
    # Without this its runtime collects garbage concurrently, which takes a sixth of the CPU time of a start.
    "BUN_JSC_useConcurrentGC": "0",
    # It optimises code later than by itself, and collects garbage from 256 MiB on in place of 32: sessions mostly
    # end before that pays. It saves 12 to 22 % of three calls; peak memory and long sessions cost what they did.
    "BUN_JSC_largeHeapSize": str(256 << 20),
    "BUN_JSC_thresholdForOptimizeAfterWarmUp": "20000",
    "BUN_JSC_thresholdForOptimizeAfterLongWarmUp": "20000",
    "BUN_JSC_thresholdForOptimizeSoon": "20000",
}
"""Variables that make the CLI's JavaScript runtime take less CPU time."""

_ENVIRONMENT = {
    "ANTHROPIC_BASE_URL": "http://localhost",
    **RUNTIME_SETTINGS,
    # A changing billing block at the beginning of the system prompt would invalidate every prefix cache.
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    # The CLI then waits 0.5, 1, 2, 4 and 8 s between its retries; a longer outage is retried by another attempt.
    "CLAUDE_CODE_MAX_RETRIES": "5",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "IS_SANDBOX": "1",
    # It asks the model when all MCP servers have started or failed. By itself it would wait five seconds at most,
    # and a model asked earlier has none of their tools.
    "MCP_CONNECTION_NONBLOCKING": "0",
    "MCP_CONNECT_TIMEOUT_MS": "60000",
}

_OUTCOMES: dict[str, AgentOutcome] = {"success": "completed", "error_max_turns": "max_turns"}
"""The CLI's result subtypes that are an ordinary end; every other one is a crash."""


_SETTINGS: dict[str, Any] = {
    "includeCoAuthoredBy": False,
    "cleanupPeriodDays": 3650,
    # Denied, because there is no network in a sandbox, and WebSearch would send a request to the model's provider.
    "permissions": {"deny": ["WebFetch", "WebSearch"]},
}
"""The user's settings in a sandbox."""


class _Permissions(msgspec.Struct):
    defaultMode: str = ""
    allow: list[str] = msgspec.field(default_factory=list[str])
    ask: list[str] = msgspec.field(default_factory=list[str])
    deny: list[str] = msgspec.field(default_factory=list[str])


class _Settings(msgspec.Struct):
    """The settings that are read or checked here, as Claude Code ignores invalid ones without an error."""

    permissions: _Permissions = msgspec.field(default_factory=_Permissions)


class _McpProgram(msgspec.Struct):
    command: str


class _McpConfig(msgspec.Struct):
    """The MCP servers, checked here, as Claude Code ignores invalid ones without an error."""

    mcpServers: dict[str, _McpProgram]


class _McpServer(msgspec.Struct):
    name: str
    status: str = ""


class _StreamEvent(msgspec.Struct):
    """The few fields of a stream-json line that decide how the run ended, and where its log is."""

    type: str
    subtype: str = ""
    is_error: bool = False
    result: str | None = None
    errors: list[Any] = msgspec.field(default_factory=list[Any])
    session_id: str = ""
    mcp_servers: list[_McpServer] = msgspec.field(default_factory=list[_McpServer])
    tools: list[Any] = msgspec.field(default_factory=list[Any])


_OLD_TOOL_NAMES = {"Task": "Agent"}
"""Names by which a session's first event still calls some tools."""


class ClaudeOptions(msgspec.Struct, frozen=True):
    """What Claude Code is started with: its only tools, and a system prompt in place of its own, if given.

    `mcp_config` and `settings` are JSON that it is started with; "" for none. `permission_mode` is the mode that
    these settings begin with; "" for no permission checks.
    """

    tools: tuple[str, ...] = ()
    system_prompt: str = ""
    mcp_config: str = ""
    settings: str = ""
    permission_mode: str = ""


class ClaudeCode:
    """Runs Claude Code once per attempt and collects its stream, its session logs and how it ended.

    `run_method` is one of `RUN_METHODS`. `open_file_limit` bounds the files that each of its processes may have
    open. `tools` are the only built-in tools it has, separated by commas, and `system_prompt` stands in the place
    of its own: a small model reads less. `mcp_config` and `settings` are JSON objects: MCP servers, and settings
    that are laid over those of the run. `skills` is a tar archive in base64, of directories with a SKILL.md each.
    With `debug` its own debug log is among the logs. Raises ConfigError for other values.
    """

    name: ClassVar[str] = "claude-code"
    version: ClassVar[str | None] = CLAUDE_CODE_VERSION
    limits_turns: ClassVar[bool] = True
    needs_model: ClassVar[bool] = True
    program_mount: ClassVar[str] = _BINARY

    def __init__(
        self,
        run_method: str = "cli",
        open_file_limit: str = "",
        tools: str = "",
        system_prompt: str = "",
        debug: str = "",
        mcp_config: str = "",
        settings: str = "",
        skills: str = "",
    ) -> None:
        if run_method not in RUN_METHODS:
            raise ConfigError(f"--run-method: unknown value {run_method!r}; give one of: {', '.join(RUN_METHODS)}")
        if open_file_limit and not (
            open_file_limit.isascii() and open_file_limit.isdigit() and int(open_file_limit)
        ):
            raise ConfigError(
                f"--open-file-limit: expected a number of files, at least 1, got {open_file_limit!r}; give such a "
                "number, or leave it out"
            )
        self._by_sdk = run_method == "python"
        names = _tool_names(tools) if tools else ()
        if mcp_config:
            _check_servers(mcp_config)
        self._options = ClaudeOptions(
            names, system_prompt, mcp_config, settings, _permission_mode(settings) if settings else ""
        )
        self._skills = b64decode(skills)
        self._open_file_limit = open_file_limit
        self._debug = bool(debug)
        self.package: AgentPackage = AGENT_PACKAGES[self.name]

    def problems(self) -> list[str]:
        """Return why Claude Code cannot run here; empty if it can."""
        problems = self.package.problems()
        if self._by_sdk:
            problems += [f"--run-method python: {problem}; use --run-method cli" for problem in runtime_problems()]
        return problems

    def mounts(self) -> tuple[Mount, ...]:
        """Return mounts of the CLI's binary and its driver. Raises ConfigError when it has not been fetched.

        The driver is created by the first call, which takes some time.
        """
        if problems := self.problems():
            raise ConfigError(problems[0])
        binary = Mount(self.package.program_path(self.package.directory()), _BINARY)
        if not self._by_sdk:
            return (binary,)
        python, sdk = sdk_directories(cache_dir())
        return binary, Mount(python, _PYTHON), Mount(sdk, _SDK)

    async def run(self, sandbox: Sandbox, job: AgentJob) -> AgentResult:
        """Run Claude Code on the instruction to its end or the job's wall-clock limit.

        Raises AgentError if one of its MCP servers did not start, or if it lacks one of the tools that it was to
        have: without them it is another agent.
        """
        config_dir = f"{sandbox.home}/.claude"
        # Only the debug log says why an MCP server did not start.
        needs_debug = self._debug or self._options.mcp_config
        debug_file = f"{sandbox.home}/.understudy-debug.txt" if needs_debug else ""
        await sandbox.write(f"{config_dir}/settings.json", orjson.dumps(_SETTINGS))
        if self._skills:
            await _put_skills(sandbox, f"{config_dir}/skills", self._skills)
        argv, stdin = (_sdk_command if self._by_sdk else _cli_command)(sandbox, job, self._options, debug_file)
        if self._open_file_limit:
            argv = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', self._open_file_limit, *argv]
        completed = await sandbox.run(
            argv,
            stdin=stdin,
            timeout_s=job.timeout_s,
            env={
                **job.env,
                **_ENVIRONMENT,
                "ANTHROPIC_UNIX_SOCKET": sandbox.locate(GATEWAY_SOCKET),
                "ANTHROPIC_AUTH_TOKEN": job.key,
                "CLAUDE_CONFIG_DIR": config_dir,
                **dict.fromkeys(_MODEL_VARIABLES, job.model),
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": job.small_model,
            },
        )
        events = list(_events(completed.stdout))
        _require_tools(events, self._options.tools)
        debug_log = await _debug_log(sandbox, debug_file, job.key) if debug_file else b""
        if self._options.mcp_config:
            _require_mcp_servers(events, debug_log)
        logs = {"stream.jsonl": completed.stdout, "stderr.txt": completed.stderr}
        session_id = next((event.session_id for event in events if event.session_id), "")
        logs.update(await session_logs(sandbox, f"{config_dir}/projects", session_id))
        if self._debug and debug_log:
            logs["debug.txt"] = debug_log
        outcome, message = _outcome_of(completed, events)
        return AgentResult(outcome=outcome, exit_code=completed.exit_code, message=message, logs=logs)

    def check(self, result: AgentResult, calls: Iterable[Call]) -> list[Finding]:
        """Return the differences between the session's log and the calls."""
        return compare_session_log(result.logs, build(calls), cut_off=result.outcome in ("timeout", "crashed"))


def _cli_command(
    sandbox: Sandbox, job: AgentJob, options: ClaudeOptions, debug_file: str
) -> tuple[list[str], bytes]:
    """Return the command and its stdin."""
    argv = [sandbox.locate(_BINARY), "-p", "--model", job.model, "--max-turns", str(job.max_turns)]
    argv += ["--continue"] if job.resume else []
    argv += ["--output-format", "stream-json", "--verbose"]
    mode = options.permission_mode
    argv += ["--permission-mode", mode] if mode else ["--dangerously-skip-permissions"]
    argv += ["--tools", ",".join(options.tools)] if options.tools else []
    argv += ["--system-prompt", options.system_prompt] if options.system_prompt else []
    argv += ["--mcp-config", options.mcp_config, "--strict-mcp-config"] if options.mcp_config else []
    argv += ["--settings", options.settings] if options.settings else []
    argv += ["--debug-file", debug_file] if debug_file else []
    # The instruction is passed by stdin, because it may begin with a dash or exceed the size limit of arguments.
    return argv, job.instruction.encode()


def _sdk_command(
    sandbox: Sandbox, job: AgentJob, options: ClaudeOptions, debug_file: str
) -> tuple[list[str], bytes]:
    """Return the command and its stdin. The options give the SDK's agent the same setup as the command line."""
    mode = options.permission_mode
    sdk_options = {
        "model": job.model,
        "max_turns": job.max_turns,
        "permission_mode": mode or "bypassPermissions",
        "system_prompt": options.system_prompt or {"type": "preset", "preset": "claude_code"},
        "tools": list(options.tools) or {"type": "preset", "preset": "claude_code"},
        "setting_sources": ["user", "project", "local"],
        "extra_args": {"debug-file": debug_file} if debug_file else {},
        "mcp_servers": options.mcp_config or {},
        "strict_mcp_config": bool(options.mcp_config),
        "settings": options.settings or None,
        "continue_conversation": job.resume,
    }
    driver_input = {
        "prompt": job.instruction,
        "cli": sandbox.locate(_BINARY),
        "plans": mode == "plan",
        "options": sdk_options,
    }
    return sdk_command(sandbox.locate(_PYTHON), sandbox.locate(_SDK)), orjson.dumps(driver_input)


_MODEL_VARIABLES = ("ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")


def _check_servers(mcp_config: str) -> None:
    """Raise ConfigError unless all servers of a configuration are programs to start."""
    try:
        msgspec.json.decode(mcp_config, type=_McpConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--mcp-config: {error}; give "
            '{"mcpServers": {"NAME": {"command": "PROGRAM", "args": [...]}}} with programs of the sandbox, which '
            "has no network"
        ) from error


def _permission_mode(settings: str) -> str:
    """Return the permission mode that settings begin with; "" if they name none. Raises ConfigError."""
    try:
        return msgspec.json.decode(settings, type=_Settings).permissions.defaultMode
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--settings: invalid permissions: {error}; correct them: expected "
            '{"permissions": {"defaultMode": "MODE", "allow": ["RULE"], "ask": ["RULE"], "deny": ["RULE"]}}, each '
            "key optional"
        ) from error


def _require_mcp_servers(events: Iterable[_StreamEvent], debug_log: bytes) -> None:
    """Raise AgentError unless all MCP servers of a run have started. Nothing is known of a run without events."""
    failed = {server.name for event in events for server in event.mcp_servers if server.status != "connected"}
    if failed:
        lines = debug_log.decode(errors="replace").splitlines()
        reasons = [line.partition("[ERROR] ")[2] for line in lines if "[ERROR]" in line and "MCP server" in line]
        raise AgentError(
            f"--mcp-config: MCP servers that did not start: {', '.join(sorted(failed))}; expected programs of the "
            "sandbox that work without network: correct their commands in that file. Claude Code says: "
            f"{'; '.join(reasons)[:500] or 'nothing'}"
        )


def _tool_names(tools: str) -> tuple[str, ...]:
    """Return the names in a list; those of any version are accepted, since a mode may offer what no recording has.

    Raises ConfigError for other names.
    """
    recorded = claude_tools(CLAUDE_CODE_VERSION, ())
    return read_tool_names(tools, "Claude Code", tool_names(), names_of(recorded.tools if recorded else ()))


def _require_tools(events: Iterable[_StreamEvent], requested: Sequence[str]) -> None:
    """Raise AgentError if a session begins without some of the tools that were asked for.

    Some that it knows are offered only in some modes, or were in other versions. Nothing is known of a run without
    events.
    """
    for event in events:
        offered = {_OLD_TOOL_NAMES.get(name, name) for name in map(str, event.tools)}
        missing = [name for name in requested if _OLD_TOOL_NAMES.get(name, name) not in offered]
        if event.subtype == "init" and missing:
            raise AgentError(
                f"--tools: Claude Code {CLAUDE_CODE_VERSION} does not offer {', '.join(missing)} in this mode; it "
                f"offers {', '.join(sorted(offered)) or 'none of these'}: leave out what it lacks"
            )


async def _put_skills(sandbox: Sandbox, directory: str, archive: bytes) -> None:
    """Unpack skills into a directory. Raises SandboxError."""
    unpack = ["sh", "-c", 'mkdir -p -- "$0" && exec tar -C "$0" -xf -', directory]
    completed = await sandbox.run(unpack, stdin=archive, timeout_s=60)
    if completed.exit_code != 0:
        message = completed.stderr.decode(errors="replace")[-500:]
        raise SandboxError(
            f"--skills: they could not be unpacked in the sandbox: {message}; check that its image has tar, and "
            "that its home has free space"
        )


def _events(stdout: bytes) -> Iterator[_StreamEvent]:
    """Yield the events of a stream. Lines that are none are skipped: output of other programs, or cut off."""
    for line in stdout.splitlines():
        try:
            yield msgspec.json.decode(line, type=_StreamEvent)
        except (ValueError, RecursionError):
            continue


def _outcome_of(completed: Completed, events: Sequence[_StreamEvent]) -> tuple[AgentOutcome, str]:
    """Return how the run ended, by the last `result` line of its stream, with a reason if it is a crash."""
    if completed.timed_out:
        return "timeout", f"stopped after {completed.duration_s:.0f} s"
    result = next((event for event in reversed(events) if event.type == "result"), None)
    if result is None:
        tail = completed.stderr.decode(errors="replace").strip()[-500:] or "nothing on stderr"
        return "crashed", f"Claude Code ended with exit code {completed.exit_code} and no result: {tail}"
    outcome = _OUTCOMES.get(result.subtype)
    if outcome == "max_turns" or (outcome and not result.is_error):
        return outcome, ""
    message = result.result or "; ".join(str(error) for error in result.errors) or "no message"
    kind = "an error" if result.subtype == "success" else result.subtype
    return "crashed", f"Claude Code reported {kind}: {message[:500]}"


# Characters of a working directory that the CLI replaces by "-" in the name of the directory with its logs.
_REPLACED_IN_DIRECTORIES = re.compile(r"[^A-Za-z0-9]")
_COLLECT_SCRIPT = """cd "$0" && for directory in */; do
    [ -e "$directory/$1.jsonl" ] && exec tar -C "$directory" --ignore-failed-read -cf - -- "$1.jsonl" "$1"
done"""


async def session_logs(sandbox: Sandbox, projects: str, session_id: str) -> dict[str, bytes]:
    """Return the session's JSONL and those of its subagents, by their paths below the CLI's project directory.

    If an agent destroys its log directory, only the log is lost: otherwise agents could turn a failure into an
    infrastructure error. A broken sandbox fails again when the patch is extracted.
    """
    if not re.fullmatch(r"[0-9a-f-]{36}", session_id):
        return {}  # the CLI ended before its session began, which its exit state explains
    if (log := await _single_log(sandbox, projects, session_id)) is not None:
        return {f"session/{session_id}.jsonl": log}
    try:
        archive = await sandbox.run(["sh", "-c", _COLLECT_SCRIPT, projects, session_id], timeout_s=30)
    except SandboxError:
        return {}
    return {f"session/{name}": content for name, content in tar_members(archive.stdout)}


async def _single_log(sandbox: Sandbox, projects: str, session_id: str) -> bytes | None:
    """Return the session's log if it is the only one and where the CLI puts it; None if that cannot be told.

    Most sessions have no subagents, and reading a file starts no process.
    """
    session = f"{projects}/{_REPLACED_IN_DIRECTORIES.sub('-', sandbox.workdir)}/{session_id}"
    try:
        log = await sandbox.read(f"{session}.jsonl")
    except (FileNotFoundError, SandboxError):
        return None
    try:
        await sandbox.read(session)
    except FileNotFoundError:
        return log
    except SandboxError:
        return None  # the directory of its subagents
    return None


async def _debug_log(sandbox: Sandbox, path: str, key: str) -> bytes:
    """Return the CLI's debug log, without the attempt's key; empty if the agent removed it."""
    try:
        content = await sandbox.read(path)
    except (FileNotFoundError, SandboxError):
        return b""
    return content.replace(key.encode(), b"<key>")
