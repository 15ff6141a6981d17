"""Tries a version of an agent: real runs with a scripted model, compared with those of the pinned version."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field, structs

from understudy.agents.base import GATEWAY_SOCKET, AgentJob, AgentResult
from understudy.agents.claude_code import ClaudeCode
from understudy.agents.install import agent_package, install
from understudy.agents.packaged import PackagedAgent
from understudy.agents.packages import AgentPackage
from understudy.agents.registry import make_agent
from understudy.config import cache_dir
from understudy.errors import BackendError, ConfigError
from understudy.gateway.budget import Budget
from understudy.gateway.keys import Keys
from understudy.gateway.prices import Price
from understudy.gateway.router import ModelRouter
from understudy.ingest.json_values import mapping
from understudy.model.protocol import ModelTool, ModelToolFunction
from understudy.model.scripted.toolsets import Toolset, toolset_of
from understudy.run.behaviours import EDITED_FILE, ORIGINAL_CONTENT, Behaviour, ScriptStep
from understudy.run.interruptible_sandbox import InterruptibleSandbox
from understudy.run.recording import (
    RecordingGateway,
    Reply,
    RunRecord,
    record_call,
    record_reply,
    run_record,
    write_records,
)
from understudy.sandbox.base import Mount, Sandbox, SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.store import Store
from understudy.tasks.environment import python_environment
from understudy.trajectory.request_wordings import wording_pattern
from understudy.trajectory.tree import build
from understudy.types import WORK_ROLES, Call, Files, Finding, PytestChecks, Task, Usage
from understudy.wire.errors import ContextOverflow
from understudy.wire.model import ChatRequest, Delta, Emit, Generation, ToolCall

_EXCERPT_LENGTH = 160
_TOO_LONG = 200_000
"""The length of a prompt, in tokens, that is refused as too long."""
_SUMMARY = "<summary><state_snapshot>All is well so far.</state_snapshot></summary>"
"""The scripted model's summary of a conversation, in the form that each agent expects."""
_VERSION = re.compile(r"\d[\w.+-]*")
_CHANGING = re.compile(
    r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|(?<=/tool-results/)\w+|\b(?=\w*\d)\w{6,}\b|\d+"
)
"""What differs from run to run: ids, times, process numbers."""


class Observation(Struct, frozen=True, kw_only=True):
    """What was observed of one behaviour of a version. `problems` describes what is wrong.

    `statuses` are those of the calls that work on the task, `results` the texts of tool results shown to the
    model, `tools` the offered tools as JSON by name. `turns` counts the answers that the agent's own log must
    contain; `log_differences` are the differences between that log and the calls.
    """

    behaviour: str
    problems: list[str]
    outcome: str
    statuses: list[str]
    roles: list[str]
    results: list[str]
    system: str
    tools: dict[str, str] = field(default_factory=dict[str, str])
    turns: int = 0
    log_differences: list[str] = field(default_factory=list[str])
    logs: list[str] = field(default_factory=list[str])


class ScriptedRun(Struct, frozen=True, kw_only=True):
    """A run of an agent through the script of a behaviour.

    `requests` are those that the script answered, `content` is what `EDITED_FILE` holds at the end, and `findings`
    are the differences between the agent's own log and the calls.
    """

    behaviour: Behaviour
    result: AgentResult
    calls: list[Call]
    requests: list[ChatRequest]
    content: str
    findings: list[Finding]
    record: RunRecord


class VersionTrial(Struct, frozen=True, kw_only=True):
    """What a version did in every behaviour."""

    agent: str
    version: str
    observations: list[Observation]

    @property
    def problems(self) -> list[str]:
        """All problems, each with its behaviour."""
        return [
            f"{observation.behaviour}: {problem}"
            for observation in self.observations
            for problem in observation.problems
        ]


class ScriptedBackend:
    """Answers with the steps of a script, then ends the work.

    Summaries and other requests without tools are not part of the script.
    """

    name = "script"
    model = "script"
    price: Price | None = None

    def __init__(self, steps: Sequence[ScriptStep]) -> None:
        self.steps = list(steps)
        self.requests: list[ChatRequest] = []
        self.script_hangs = asyncio.Event()
        self._prompt_tokens = 0

    async def generate(self, request: ChatRequest, emit: Emit | None = None) -> Generation:
        """See Backend."""
        summary = summarises(request)
        if not request.tools:
            text = _SUMMARY if summary else "A title for what is done here"
            record_reply(Reply(text=text))
            usage = Usage(prompt_tokens=self._prompt_tokens, completion_tokens=10)
            return Generation(model=self.model, text=text, finish_reason="stop", usage=usage)
        self.requests.append(request)
        toolset = _toolset(request)
        if summary:
            step = ScriptStep(_SUMMARY)
        elif self.steps:
            step = self.steps.pop(0)
        else:
            step = ScriptStep("Done.", lambda tools: tools.finish())
        calls = tuple(
            ToolCall(f"call_{len(self.requests)}_{number}", call.name, call.arguments)
            for number, call in enumerate(step.calls(toolset))
        )
        finish_reason = step.finish_reason or ("tool_calls" if calls else "stop")
        record_reply(
            Reply(
                text=step.text,
                reasoning=step.reasoning,
                tool_calls=tuple((call.id, call.name, call.arguments) for call in calls),
                finish_reason=finish_reason,
                status=step.status,
                retry_after_s=step.retry_after_s if step.status else None,
                overflow=step.overflow,
                breaks_after=step.breaks_after,
                hangs=step.hangs,
            )
        )
        if step.hangs:
            self.script_hangs.set()
            await asyncio.Event().wait()
        if step.overflow:
            # The summary of that prompt is a request of this length, too, from which agents calculate.
            self._prompt_tokens = _TOO_LONG
            raise ContextOverflow(_TOO_LONG, _TOO_LONG // 2)
        if step.status:
            raise BackendError(
                f"status {step.status}, simulated by the script of this trial; expected the agent to retry it, or "
                "to end with an error",
                status=step.status,
                retry_after_s=step.retry_after_s,
            )
        self._prompt_tokens = step.prompt_tokens or 1000 + 10 * len(self.requests)
        generation = Generation(
            model=self.model,
            text=step.text,
            reasoning=step.reasoning or None,
            tool_calls=calls,
            finish_reason=finish_reason,
            usage=Usage(prompt_tokens=self._prompt_tokens, completion_tokens=10),
        )
        if emit is not None:
            for delta in list(_pieces(generation))[: step.breaks_after]:
                emit(delta)
        if step.breaks_after is not None:
            raise BackendError(
                "the response broke off, simulated by the script of this trial; expected the agent to retry it, "
                "or to end with an error"
            )
        return generation

    async def count_tokens(self, request: ChatRequest) -> int:
        """See Backend."""
        return 1000

    async def models(self) -> list[str]:
        """See Backend."""
        return [self.model]

    async def close(self) -> None:
        """See Backend."""


def summarises(request: ChatRequest) -> bool:
    """Return whether a request asks for a summary of the conversation, by the wording that agents have for it."""
    first_message, last_message = request.messages[0], request.messages[-1]
    system = _text(first_message["content"]) if first_message["role"] == "system" else ""
    text = _text(last_message["content"]) if last_message["role"] == "user" else ""
    # Positions of `request_wordings`: in the user's last text, of a single question or of a conversation.
    asks = any(wording_pattern("compaction", where).match(text) for where in ("question", "fork"))
    return asks or wording_pattern("compaction", "instructions").match(system) is not None


def _pieces(generation: Generation) -> Iterator[Delta]:
    """Yield a generation as a model streams it, one piece for each part."""
    if generation.reasoning:
        yield Delta("reasoning", generation.reasoning)
    if generation.text:
        yield Delta("text", generation.text)
    for index, call in enumerate(generation.tool_calls):
        yield Delta("tool", index=index, id=call.id, name=call.name)
        yield Delta("arguments", call.arguments, index=index)


def _toolset(request: ChatRequest) -> Toolset:
    functions = [tool["function"] for tool in request.tools]
    return toolset_of(
        ModelTool(function=ModelToolFunction(name=function["name"], parameters=function.get("parameters")))
        for function in functions
    )


def parse_version(text: str) -> list[AgentPackage]:
    """Parse `NAME@VERSION`. Returns the pinned package, and the package to try if its version differs.

    Raises ConfigError.
    """
    name, separator, version = text.partition("@")
    pinned = agent_package(name)
    if separator and _VERSION.fullmatch(version) is None:
        raise ConfigError(f"{text}: invalid version {version!r}; give one such as {name}@{pinned.version}")
    return [pinned] if version in ("", pinned.version) else [pinned, pinned.at_version(version)]


async def try_version(
    package: AgentPackage,
    behaviours: Sequence[Behaviour],
    report: Callable[[str], None] = lambda _: None,
    record_to: Path | None = None,
) -> VersionTrial:
    """Fetch a version, unless it is here, and test the behaviours. Raises ConfigError and SandboxError.

    `record_to` is a directory for a recording of the requests and responses. Raises OSError if it cannot be
    written.
    """
    observations: list[Observation] = []
    records: list[RunRecord] = []
    async for run in scripted_runs(package, behaviours, report):
        observations.append(_observation(run))
        records.append(run.record)
    if record_to is not None:
        write_records(record_to, records)
    return VersionTrial(agent=package.agent, version=package.version, observations=observations)


async def scripted_runs(
    package: AgentPackage, behaviours: Sequence[Behaviour], report: Callable[[str], None] = lambda _: None
) -> AsyncIterator[ScriptedRun]:
    """Fetch a version, unless it is here, and run it through every script. Raises ConfigError and SandboxError."""
    install(package.agent, package=package)
    sandboxes = LocalSandboxes()
    if problems := sandboxes.problems():
        raise ConfigError(problems[0])
    root = Path(tempfile.mkdtemp(prefix="understudy-trial-"))
    try:
        with Store.open(root / "store") as store:
            store.runs.create("trial", {}).result()
            store.runs.add_tasks("trial", [_task()]).result()
            rollouts = [(behaviour.name, "trial", number) for number, behaviour in enumerate(behaviours)]
            store.runs.create_rollouts("trial", rollouts).result()
            for behaviour in behaviours:
                report(f"{package.title} {package.version}: {behaviour.name}")
                yield await _run(package, behaviour, store, root, sandboxes)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _task() -> Task:
    return Task(
        instance_id="trial",
        repo="trial",
        instruction=f"Change {EDITED_FILE}.",
        source=Files({EDITED_FILE: ORIGINAL_CONTENT}),
        checks=PytestChecks(files={}, fail_to_pass=(), pass_to_pass=()),
        gold_patch="",
    )


async def _run(
    package: AgentPackage, behaviour: Behaviour, store: Store, root: Path, sandboxes: LocalSandboxes
) -> ScriptedRun:
    agent = make_agent(package.agent, {})
    assert isinstance(agent, PackagedAgent | ClaudeCode), "only agents that are fetched have versions"
    agent.package = package
    environment = python_environment(cache_dir())
    tree, socket = root / "tree", root / "gateway.sock"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    (tree / EDITED_FILE).write_text(ORIGINAL_CONTENT, encoding="utf-8")
    (tree / ".git").mkdir()
    sandboxes.prepare_tree(tree)
    attempt = store.runs.start_attempt(behaviour.name).result().id
    store.runs.mark_running(attempt).result()
    backend, keys = ScriptedBackend(behaviour.steps), Keys()
    streaming = any(step.breaks_after is not None for step in behaviour.steps)
    gateway = RecordingGateway(
        ModelRouter(backend), store.calls, keys, streaming=streaming, observers=(record_call,)
    )
    await gateway.start_unix(socket)
    budget = None if agent.limits_turns else Budget(calls=behaviour.max_turns)
    try:
        mounts = (*agent.mounts(), Mount(socket, GATEWAY_SOCKET), *environment.mounts)
        spec = SandboxSpec(tree=tree, mounts=mounts, env=environment.env, path_prefixes=environment.path_prefixes)
        sandbox = await sandboxes.open(spec)
        try:
            job = AgentJob(
                instruction=_task().instruction,
                key=keys.issue(attempt, budget=budget),
                model="big",
                small_model="small",
                max_turns=behaviour.max_turns,
                timeout_s=behaviour.timeout_s,
            )
            interrupts = any(step.hangs for step in behaviour.steps)
            result = await (_interrupted(agent, sandbox, job, backend) if interrupts else agent.run(sandbox, job))
            if behaviour.resumed:
                backend.steps = list(behaviour.resumed)
                result = await agent.run(sandbox, structs.replace(job, resume=True))
            try:
                content = (await sandbox.read(EDITED_FILE)).decode(errors="replace")
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                content = ""  # the agent removed the file, or put something else there, which was not asked for
        finally:
            await sandbox.close()
    finally:
        await gateway.stop()
        socket.unlink(missing_ok=True)
    calls = list(store.calls.of_attempt(attempt))
    return ScriptedRun(
        behaviour=behaviour,
        result=result,
        calls=calls,
        requests=backend.requests,
        content=content,
        findings=agent.check(result, calls),
        record=run_record(
            package,
            behaviour.name,
            result.outcome,
            calls,
            gateway.exchanges,
            streaming=streaming,
            calls_limit=budget.calls if budget else None,
        ),
    )


async def _interrupted(
    agent: PackagedAgent | ClaudeCode, sandbox: Sandbox, job: AgentJob, backend: ScriptedBackend
) -> AgentResult:
    """Run the agent, and interrupt it when the script gives no answer."""
    interruptible = InterruptibleSandbox(sandbox, sandbox.locate(agent.program_mount))
    running = asyncio.create_task(agent.run(interruptible, job))
    hanging = asyncio.create_task(backend.script_hangs.wait())
    try:
        await asyncio.wait((running, hanging), return_when=asyncio.FIRST_COMPLETED)
        if hanging.done():
            await interruptible.interrupt()
        return await running
    finally:
        hanging.cancel()
        running.cancel()


def _observation(run: ScriptedRun) -> Observation:
    behaviour, result, requests, content = run.behaviour, run.result, run.requests, run.content
    findings = [finding.message for finding in run.findings]
    nodes = build(run.calls).nodes
    shown_request = max(requests, key=lambda request: len(request.messages), default=None)
    if len(behaviour.roles) > 1:
        # The longest request may belong to another conversation, so take the last one.
        shown_request = requests[-1] if requests else None
    messages = shown_request.messages if shown_request else []
    results = [_text(message["content"]) for message in messages if message["role"] == "tool"]
    problems = [] if behaviour.logs_differ else [f"its own log: {finding}" for finding in findings]
    if result.outcome not in behaviour.accepted_outcomes:
        expected = " or ".join(behaviour.accepted_outcomes)
        problems.append(f"it ended as {result.outcome}, expected {expected}: {result.message or 'no message'}")
    if len(results) < len(behaviour.expected_results):
        expected_count = len(behaviour.expected_results)
        problems.append(f"the model was shown {len(results)} results of tools, expected {expected_count}")
    problems += [
        f"the result {text[:_EXCERPT_LENGTH]!r} should have {marker!r}"
        for marker, text in zip(behaviour.expected_results, results, strict=False)
        if marker not in text
    ]
    if content != behaviour.file:
        problems.append(f"{EDITED_FILE} holds {content[:_EXCERPT_LENGTH]!r}, expected {behaviour.file!r}")
    roles = {node.role for node in nodes}
    problems += [f"no call is {role}, expected one" for role in behaviour.roles if role not in roles]
    if "compaction" in roles and not any(node.continues for node in nodes):
        problems.append("no call continues from the summary, expected one")
    work = [node for node in nodes if node.role in WORK_ROLES]
    rewritten = [node for node in work if node.origin == "history rewritten"]
    if rewritten and not behaviour.may_rewrite_history:
        problems.append(f"{len(rewritten)} requests do not go on from an earlier one: a history was rewritten")
    first = requests[0] if requests else None
    tools = [tool["function"] for tool in first.tools] if first else []
    system = [
        _text(message["content"]) for message in (first.messages if first else ()) if message["role"] == "system"
    ]
    return Observation(
        behaviour=behaviour.name,
        problems=problems,
        outcome=result.outcome,
        statuses=[node.call.status for node in work],
        roles=sorted(roles),
        results=results,
        system="\n".join(system),
        tools={tool["name"]: json.dumps(tool, sort_keys=True) for tool in tools},
        turns=sum(node.call.status == "ok" for node in work),
        log_differences=findings,
        logs=sorted({Path(name).suffix for name in result.logs if name.startswith("session/")}),
    )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content or ())


def changes(before: VersionTrial, after: VersionTrial) -> list[str]:
    """Return what another version does differently, as text."""
    lines: list[str] = []
    for earlier, later in zip(before.observations, after.observations, strict=True):
        pairs: list[tuple[str, Any, Any]] = [
            ("it ends as", earlier.outcome, later.outcome),
            ("calls of the work", earlier.statuses, later.statuses),
            ("roles of its calls", earlier.roles, later.roles),
            ("files of its session log", earlier.logs, later.logs),
            ("differences to its own log", len(earlier.log_differences), len(later.log_differences)),
            ("results of tools", len(earlier.results), len(later.results)),
        ]
        lines += [f"{earlier.behaviour}: {what}: {old}, now {new}" for what, old, new in pairs if old != new]
        texts = zip(earlier.results, later.results, strict=False)
        different = [
            pair for pair in texts if _without_changing_parts(pair[0]) != _without_changing_parts(pair[1])
        ]
        for old, new in different[:1]:
            difference = _first_difference(old, new)
            lines.append(
                f"{earlier.behaviour}: a tool's result: {old[difference:][:_EXCERPT_LENGTH]!r}, "
                f"now {new[difference:][:_EXCERPT_LENGTH]!r}"
            )
    # Tools and system prompt are the same in every behaviour.
    first_before, first_after = before.observations[0], after.observations[0]
    lines += [f"tool {name}: gone" for name in first_before.tools if name not in first_after.tools]
    lines += [f"tool {name}: new" for name in first_after.tools if name not in first_before.tools]
    lines += [
        f"tool {name}: {_changed_part(text, first_after.tools[name])}"
        for name, text in first_before.tools.items()
        if first_after.tools.get(name, text) != text
    ]
    if _without_changing_parts(first_before.system) != _without_changing_parts(first_after.system):
        difference = _first_difference(first_before.system, first_after.system)
        sizes = f"{len(first_before.system)} characters, now {len(first_after.system)}"
        lines.append(
            f"system prompt: {sizes}; it differs from {first_after.system[difference:][:_EXCERPT_LENGTH]!r} on"
        )
    return lines


def _changed_part(old: str, new: str) -> str:
    old_parameters, new_parameters = (mapping(mapping(json.loads(text)).get("parameters")) for text in (old, new))
    if old_parameters == new_parameters:
        return "another description"
    old_names, new_names = (
        set(mapping(old_parameters.get("properties"))),
        set(mapping(new_parameters.get("properties"))),
    )
    parts = [f"without {name}" for name in sorted(old_names - new_names)]
    parts += [f"with {name}" for name in sorted(new_names - old_names)]
    return f"other parameters ({', '.join(parts) or 'the same names'})"


def _without_changing_parts(text: str) -> str:
    return _CHANGING.sub("#", text)


def _first_difference(first: str, second: str) -> int:
    index = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return max(0, index - 20)
