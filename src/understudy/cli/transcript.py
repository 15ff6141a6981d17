"""Shows a rollout as a transcript: its figures, a line for each branch, then turns, patch, tests and errors.

Everything in it was written by a model, or by a program that the model ran. None of it may reach the terminal as a
control sequence, or rich as markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field
from rich.text import Text

from understudy.cli.output import counted
from understudy.cli.page import PagePrinter
from understudy.store.keys import CLIENT
from understudy.trajectory.roles import Role
from understudy.trajectory.samples import merge
from understudy.trajectory.tree import Node, Trajectory
from understudy.types import Attempt, Call, ErrorInfo, Integrity, Rollout, Task, Verdict
from understudy.util.text import visible
from understudy.wire.arguments import comparable_arguments
from understudy.wire.model import Block


class BranchLine(Struct, frozen=True, kw_only=True):
    """A branch in one line. `above` is the branch that it hangs under, `depth` its nesting depth.

    `origin` says how the branch began; it is "" for the first call of all. `answered` counts its answered calls.
    """

    name: str
    role: Role
    above: str | None
    depth: int
    origin: str
    calls: int
    answered: int
    superseded: bool
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None


class ExactFigures(Struct, frozen=True, kw_only=True):
    """How exact tokens (token-in-token-out) worked: calls by how their prompt was made, and why it was not
    extended.

    `mismatches` counts the reasons why rendering the conversation again would have given other tokens.
    """

    prompts: dict[str, int]
    reasons: dict[str, int]
    mismatches: dict[str, int]


class TrajectoryFigures(Struct, frozen=True, kw_only=True):
    """A trajectory in figures. `priced` counts the calls with a known cost, `cost_usd` is their sum.

    `policy_versions` counts calls; a call during which the weights changed counts for each version. `segments`
    counts the token sequences that the calls merge into, by the reason why each began.
    """

    calls: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_usd: float
    priced: int
    policy_versions: dict[str, int] = field(default_factory=dict[str, int])
    segments: dict[str, int] = field(default_factory=dict[str, int])
    exact: ExactFigures | None = None


def outline(trajectory: Trajectory) -> list[BranchLine]:
    """Return a line for each branch, in order of their first calls."""
    branches = trajectory.branches
    heads = {name: nodes[0] for name, nodes in branches.items()}
    above = {name: _above(first, heads) for name, first in heads.items()}
    return [_line(name, nodes, above) for name, nodes in branches.items()]


def figures(trajectory: Trajectory) -> TrajectoryFigures:
    """Return the figures of all calls of a trajectory."""
    calls = [node.call for node in trajectory.nodes]
    costs = [call.cost_usd for call in calls if call.cost_usd is not None]
    return TrajectoryFigures(
        calls=len(calls),
        prompt_tokens=sum(call.usage.prompt_tokens for call in calls),
        completion_tokens=sum(call.usage.completion_tokens for call in calls),
        cached_tokens=sum(call.usage.cached_tokens for call in calls),
        cost_usd=sum(costs),
        priced=len(costs),
        policy_versions=dict(Counter(version for call in calls for version in _versions(call))),
        segments=merge(trajectory).reasons,
        exact=_exact(calls),
    )


def origin(first: Node) -> str:
    """Return how a branch began, from its first call; "" for the first call of all."""
    if first.spawned_by is not None:
        return f"started by call {first.spawned_by.call.sequence}"
    if first.continues is not None:
        return f"goes on from the summary of call {first.continues.call.sequence}"
    if first.parent is not None:
        return f"from call {first.parent.call.sequence}"
    return "" if first.origin in (None, "first call") else str(first.origin)


def _above(first: Node, heads: Mapping[str, Node]) -> str | None:
    """Return the branch that a branch hangs under.

    What follows a compaction is a sibling of what was summarised.
    """
    while first.continues is not None and first.continues.parent is not None:
        first = heads[first.continues.parent.branch]
    node = first.spawned_by or first.parent
    return None if node is None else node.branch


def _line(name: str, nodes: Sequence[Node], above: dict[str, str | None]) -> BranchLine:
    calls = [node.call for node in nodes]
    costs = [call.cost_usd for call in calls if call.cost_usd is not None]
    depth, parent = 0, above[name]
    while parent is not None:
        depth, parent = depth + 1, above[parent]
    return BranchLine(
        name=name,
        role=nodes[0].role,
        above=above[name],
        depth=depth,
        origin=origin(nodes[0]),
        calls=len(calls),
        answered=sum(call.status == "ok" for call in calls),
        superseded=all(node.superseded for node in nodes),
        prompt_tokens=sum(call.usage.prompt_tokens for call in calls),
        completion_tokens=sum(call.usage.completion_tokens for call in calls),
        cost_usd=sum(costs) if costs else None,
    )


def _versions(call: Call) -> Iterator[str]:
    if call.policy_spans:
        yield from dict.fromkeys(span.version for span in call.policy_spans)
    elif call.policy_version is not None:
        yield call.policy_version


def _exact(calls: Sequence[Call]) -> ExactFigures | None:
    notes = [call.audit for call in calls if call.audit.get("mode") == "exact"]
    if not notes:
        return None

    def count(name: str) -> dict[str, int]:
        return dict(Counter(str(note[name]) for note in notes if note.get(name)))

    return ExactFigures(prompts=count("prompt"), reasons=count("reason"), mismatches=count("mismatch"))


_PASSING = ("passed", "xfailed", "skipped")
_PATCH_STYLES = (("+++", "bold"), ("---", "bold"), ("diff ", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))
_MAX_INDENT = 8
_ROLE_STYLES = {"compaction": "cyan", "auxiliary": "dim"}
_STATUS_STYLES = {"succeeded": "green", "failed": "red", "timeout": "yellow", "unresponsive": "yellow"}


class RolloutRecord(Struct, frozen=True, kw_only=True):
    """Everything that is shown of one rollout. `attempt` is the one shown; `patch` and `verdict` belong to it.

    The client of a gateway that runs alone has neither a rollout nor a task.
    """

    rollout: Rollout | None
    attempts: list[Attempt]
    task: Task | None
    attempt: Attempt | None
    calls: list[Call]
    patch: bytes | None
    verdict: Verdict | None


class TranscriptPrinter(PagePrinter):
    """Prints records to a console. With `full`, nothing is shortened."""

    def show(self, record: RolloutRecord, trajectory: Trajectory) -> None:
        """Print the head, a line for each branch, the instruction, every branch, the patch, tests and errors."""
        lines = outline(trajectory)
        self._head(record)
        self._figures(figures(trajectory))
        self._outline(lines)
        self._findings(record, trajectory)
        if record.task is not None:
            self.section("instruction")
            self.text(record.task.instruction)
        for line, nodes in zip(lines, trajectory.branches.values(), strict=True):
            self._branch(line, nodes)
        if record.patch is not None:
            self.section("patch")
            self._patch(record.patch)
        if record.verdict is not None:
            self._integrity(record.verdict.integrity)
            self._tests(record.verdict)
        self._errors(record)

    # --- parts -----------------------------------------------------------------------------------------

    def _head(self, record: RolloutRecord) -> None:
        rollout, verdict = record.rollout, record.verdict
        if rollout is not None and record.task is not None:
            status = Text(rollout.status, style=_STATUS_STYLES.get(rollout.status, ""))
            self.fact("rollout", f"{rollout.id}   run {rollout.run_id}   sample {rollout.sample_index}")
            self.fact("task", f"{record.task.instance_id}   {record.task.repo}")
            self.fact("status", status)
            self.fact("reward", "none" if verdict is None else f"{verdict.reward:g}   {verdict.reason}")
            if verdict is not None and verdict.reused_from:
                self.fact("graded", f"with attempt {verdict.reused_from}, which made the same patch")
            if verdict is not None and verdict.protection != "twins" and verdict.reward > 0:
                self.fact("protection", f"{verdict.protection}   {verdict.unprotected}".rstrip())
            if verdict is not None and verdict.integrity.status != "clean":
                self.fact(
                    "integrity",
                    Text(f"{verdict.integrity.status}   {visible(verdict.integrity.reason)}", style="red"),
                )
        elif record.attempt is not None:
            self.fact("client", record.attempt.id.removeprefix(CLIENT))
        for attempt in record.attempts:
            ended = "" if attempt.ended_at is None else f"   {attempt.ended_at - attempt.started_at:.1f} s"
            mark = "   (shown)" if attempt is record.attempt and len(record.attempts) > 1 else ""
            self.fact("attempt", f"{attempt.number}   {attempt.status}{ended}{mark}")

    def _figures(self, figures: TrajectoryFigures) -> None:
        tokens = f"{figures.prompt_tokens:,} prompt tokens, {figures.completion_tokens:,} completion tokens"
        cached = f", {figures.cached_tokens:,} cached" if figures.cached_tokens else ""
        self.fact("calls", f"{figures.calls}   {tokens}{cached}")
        if figures.priced:
            partly = (
                "" if figures.priced == figures.calls else f"   of {figures.priced} calls whose price is known"
            )
            self.fact("cost", f"{_dollars(figures.cost_usd)}{partly}")
        if figures.policy_versions:
            self.fact("policy", ", ".join(f"{version} ({n})" for version, n in figures.policy_versions.items()))
        if figures.segments:
            self.fact("segments", counted(figures.segments))
        if figures.exact is not None:
            why = f"   because of {counted(figures.exact.reasons)}" if figures.exact.reasons else ""
            self.fact("prompts", f"{counted(figures.exact.prompts)}{why}")
            self.fact("audit", counted(figures.exact.mismatches) or "no mismatch")

    def _outline(self, lines: Sequence[BranchLine]) -> None:
        if lines:
            self.section("branches")
        width = max((len(visible(line.name)) + 2 * min(line.depth, _MAX_INDENT) for line in lines), default=0)
        for line in lines:
            name = f"{'  ' * min(line.depth, _MAX_INDENT)}{line.name}"
            parts = [f"{line.role:10}", f"{line.calls} calls" if line.calls != 1 else "1 call"]
            if line.answered != line.calls:
                parts.append(f"{line.calls - line.answered} without an answer")
            parts.append(f"{line.prompt_tokens:,} + {line.completion_tokens:,} tokens")
            if line.cost_usd is not None:
                parts.append(_dollars(line.cost_usd))
            parts += [line.origin] if line.origin else []
            parts += ["superseded"] if line.superseded else []
            style = "dim" if line.superseded else _ROLE_STYLES.get(line.role, "")
            self.line(f"{name:{width}}   {'   '.join(parts)}", style)

    def _findings(self, record: RolloutRecord, trajectory: Trajectory) -> None:
        numbers = {node.call.id: node.call.sequence for node in trajectory.nodes}
        findings = record.attempt.findings if record.attempt else ()
        if findings:
            self.section("findings")
        for finding in findings:
            where = "" if finding.call_id is None else f" (call {numbers.get(finding.call_id, finding.call_id)})"
            self.line(f"{finding.kind}: {finding.message}{where}", "yellow")

    def _branch(self, line: BranchLine, nodes: Sequence[Node]) -> None:
        depth = min(line.depth, _MAX_INDENT)
        self.section(f"branch {line.name}" + (f", {line.origin}" if line.origin else ""), depth)
        for node in nodes:
            self._turn(node, depth)

    def _turn(self, node: Node, depth: int) -> None:
        """Print what is new in the request, then the answer.

        The request of a superseded call is shown with its retry.
        """
        for block in node.conversation.blocks[node.inherited_blocks :]:
            if block.role != "assistant" and not node.superseded:
                self._block(block, depth)
        call = node.call
        note = f"call {call.sequence}   {call.backend_model}   {call.ended_at - call.started_at:.2f} s"
        note += f"   {call.usage.prompt_tokens:,} + {call.usage.completion_tokens:,} tokens"
        if call.status != "ok":
            note += f"   {call.status}"
        if call.cost_usd is not None:
            note += f"   {_dollars(call.cost_usd)}"
        if call.policy_version is not None:
            note += f"   policy {' > '.join([*(s.version for s in call.policy_spans[:-1]), call.policy_version])}"
        if node.superseded:
            note += "   superseded by a retry"
        self.line(note, "bold blue" if call.status == "ok" else "bold red", depth)
        if call.error is not None:
            self.line(_error(call.error), "red", depth + 1)
        for block in node.answer or ():
            self._block(block, depth)

    def _block(self, block: Block, depth: int) -> None:
        if block.kind == "tool_use":
            self.line(f"\u2192 {block.name}", "bold magenta", depth + 1)
            for key, value in _arguments(block):
                self.text(f"{key}: {value}", depth + 2)
        elif block.kind == "tool_result":
            self.line(
                "\u2190 error" if block.is_error else "\u2190 result",
                "red" if block.is_error else "green",
                depth + 1,
            )
            self.text(block.text, depth + 2, style="dim")
        elif block.kind == "thinking":
            self.text(block.text, depth + 1, style="italic dim")
        elif block.kind == "text":
            self.text(block.text, depth + 1, style="" if block.role == "assistant" else "yellow")
        else:
            self.line(f"[{block.name}]", "dim", depth + 1)

    def _patch(self, patch: bytes) -> None:
        if not patch:
            self.line("(empty)", "dim")
            return
        text = visible(patch.decode("utf-8", "replace"))
        for line in text.splitlines():
            style = next((style for start, style in _PATCH_STYLES if line.startswith(start)), "")
            self.console.print(Text(line, style=style), soft_wrap=True)

    def _integrity(self, integrity: Integrity) -> None:
        """Print what makes the patch suspicious, or made it so before it was reviewed."""
        if integrity.status == "clean" and not integrity.reason:
            return
        self.section("integrity")
        style = "red" if integrity.status != "clean" else "green"
        self.line(f"{integrity.status}: {integrity.reason}", style)
        for evidence in integrity.evidence:
            location = f"{evidence.path}:{evidence.line}" if evidence.line else evidence.path
            self.line(f"{evidence.rule}   {location}   {evidence.text}".rstrip(), "yellow", 1)

    def _tests(self, verdict: Verdict) -> None:
        if verdict.tests:
            self.section("tests")
        for name, outcome in sorted(verdict.tests.items(), key=lambda item: (item[1] in _PASSING, item[0])):
            self.line(f"{outcome:8} {name}", "green" if outcome in _PASSING else "red")
        if verdict.log and self.full:
            self.section("test log")
            self.text(verdict.log)

    def _errors(self, record: RolloutRecord) -> None:
        records = [("rollout", record.rollout.error)] if record.rollout else []
        records += [(f"attempt {attempt.number}", attempt.error) for attempt in record.attempts]
        errors = [(where, error) for where, error in records if error is not None]
        if errors:
            self.section("errors")
        for where, error in errors:
            self.line(f"{where}: {_error(error)}", "red")


def summary(record: RolloutRecord, trajectory: Trajectory) -> dict[str, Any]:
    """Return the record as JSON types: the rollout, its attempts, its branches with their turns, patch and
    verdict.

    `outline` has what `show` prints about each branch, `figures` the figures of the whole trajectory.
    """
    branches = {name: [_turn(node) for node in nodes] for name, nodes in trajectory.branches.items()}
    return {
        "rollout": msgspec.to_builtins(record.rollout),
        "attempt": msgspec.to_builtins(record.attempt),
        "attempts": msgspec.to_builtins(record.attempts),
        "instruction": None if record.task is None else record.task.instruction,
        "figures": msgspec.to_builtins(figures(trajectory)),
        "outline": msgspec.to_builtins(outline(trajectory)),
        "branches": branches,
        "patch": None if record.patch is None else record.patch.decode("utf-8", "replace"),
        "verdict": msgspec.to_builtins(record.verdict),
    }


def _turn(node: Node) -> dict[str, Any]:
    call = node.call
    return {
        "call_id": call.id,
        "sequence": call.sequence,
        "role": node.role,
        "status": call.status,
        "superseded": node.superseded,
        "dialect": call.dialect,
        "backend": call.backend,
        "model": call.backend_model,
        "prompt_tokens": call.usage.prompt_tokens,
        "completion_tokens": call.usage.completion_tokens,
        "cost_usd": call.cost_usd,
        "policy_version": call.policy_version,
        "policy_spans": [msgspec.structs.asdict(span) for span in call.policy_spans],
        "audit": call.audit,
        "new": _plain(node.conversation.blocks[node.inherited_blocks :]),
        "answer": _plain(node.answer or ()),
        "error": msgspec.to_builtins(call.error),
    }


_BLOCK_FIELDS = ("turn", "role", "kind", "text", "id", "name", "arguments", "is_error")
"""The fields of a block in `show --json`."""


def _plain(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    plain = [{name: getattr(block, name) for name in _BLOCK_FIELDS} for block in blocks]
    for block in plain:
        # Strip white space, which a model writes and an agent may leave out, so that both versions look the same.
        block["arguments"] = comparable_arguments(block["arguments"])
    return plain


def _arguments(block: Block) -> Iterator[tuple[str, str]]:
    for key, value in block.inputs().items() or [("input", block.arguments)]:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield key, f"\n{text}" if "\n" in text else text


def _error(error: ErrorInfo) -> str:
    return f"{error.boundary} error, {error.type}: {error.message}"


def _dollars(cost: float) -> str:
    return f"${cost:,.4f}"
