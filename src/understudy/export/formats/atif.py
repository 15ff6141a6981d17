"""ATIF 1.8: a JSON file for each rollout and each session, with the tokens, rewards and masks that are known.

What ATIF has no field for is in `extra`: of a trajectory `reward`, `resolved`, `task`, `policy_versions`; of a
step `loss_mask` (for its completion tokens), `policy_version`, `signals`. A rollout is the session of its main
agent with its subagents inside, and a file beside it for what followed a compaction. A session is a trajectory for
each path through it, the newest first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from understudy import __version__
from understudy.errors import ConfigError
from understudy.export.base import ExportSummary, FormatTraits, ProgressCallback, exporter, no_progress
from understudy.export.corpus import CallSource, ClientSession, Corpus, CorpusCounts
from understudy.export.examples import group_of, node_path
from understudy.export.files import ExportWriter, safe_file_name
from understudy.export.formats.atif_steps import ModelTurn, Step, steps, totals
from understudy.export.parquet import json_bytes
from understudy.ingest.trace import Message, OfferedTools, RequestShape, Trace, TraceTurn, shown_result, state_id
from understudy.preference.checks import message_of
from understudy.store.outcomes import GradedRollout
from understudy.trajectory.roles import Role
from understudy.trajectory.tree import Node, Trajectory
from understudy.types import Call, is_solved
from understudy.util.files import write_remedy
from understudy.wire.model import Block
from understudy.wire.stored import response_message, shown_messages

VERSION = "ATIF-v1.8"
Document = dict[str, Any]

_ABOUT = (
    "A JSON file holds a trajectory in ATIF 1.8: of a rollout, with its subagents in it, or of one path of a "
    "session. What goes on after a compaction is in a file of its own, which `continued_trajectory_ref` names; "
    "steps that stand in another file too are marked `is_copied_context`. `extra` of a trajectory has its "
    "`reward`, of a step the `loss_mask` of its tokens and the `policy_version`. Each row of `train.jsonl` and "
    "`test.jsonl` names a file of the split."
)
_LOAD = """import json
from atif import Trajectory

for line in open("{output}/train.jsonl"):
    Trajectory.model_validate_json(open("{output}/" + json.loads(line)["file"]).read())"""
_VERSION = re.compile(rb'"claude_code_version"\s*:\s*"([\w.+-]{1,40})"')
_SEARCHED_BYTES = 1 << 16


@exporter(FormatTraits(chooses_thinking=False, clients=True))
def export(
    corpus: Corpus,
    output: Path,
    *,
    tokens: Annotated[bool, "With the token ids and logprobs of each call, which make the files large."] = True,
    report: ProgressCallback = no_progress,
) -> ExportSummary:
    """Trajectories in ATIF 1.8, a JSON file for each rollout and each session.

    Raises ConfigError if there is nothing to write, or it cannot be written.
    """
    with ExportWriter(corpus, output, "atif", report) as writing:
        for group, name, document in trajectories(corpus):
            if not tokens:
                without_tokens(document)
            write_trajectory(writing, group, name, document, json_bytes(document) + b"\n")
        return writing.finish(_ABOUT, _LOAD)


def trajectories(corpus: Corpus) -> Iterator[tuple[str, str, Document]]:
    """Yield the group, file name and trajectory of each session and rollout of a corpus."""
    agents = {run.id: str(run.config.get("agent") or "unknown") for run in corpus.store.runs.all()}
    roles = corpus.selection.roles
    subagents = _subagents(corpus)
    for trace in corpus.traces():
        for name, document in session_documents(trace, subagents.get(trace.session_id, {})).items():
            yield group_of(trace), name, document
    sessions = corpus.counts
    for item in corpus.client_sessions() if corpus.selection.clients else corpus.rollouts():
        of_client = isinstance(item, ClientSession)
        version = agent_version(corpus.store.runs.logs(item.attempt.id))
        agent = {"name": "unknown" if of_client else agents[item.rollout.run_id], "version": version}
        base = safe_file_name(item.id if of_client else item.rollout.id)
        for name, document in rollout_documents(corpus.trajectory(item), item, roles, agent, base).items():
            yield item.id if of_client else item.rollout.task_id, name, document
    for name in CorpusCounts.__struct_fields__:
        setattr(corpus.counts, name, getattr(sessions, name) + getattr(corpus.counts, name))


def write_trajectory(writing: ExportWriter, group: str, name: str, document: Document, content: bytes) -> None:
    """Write the file of a trajectory, and the row that names it. Raises ConfigError if it cannot be written."""
    try:
        writing.path(name).write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"cannot write {writing.path(name)}: {error.strerror or error}; "
            f"{write_remedy(error, 'choose another --output')}"
        ) from error
    extra: dict[str, Any] = document["extra"]
    row = {"file": name, "group": group, "reward": extra.get("reward"), "steps": len(document["steps"])}
    writing.add(group, row)


def session_documents(trace: Trace, started: Mapping[str, str]) -> dict[str, Document]:
    """Return the trajectories of a trace by file name.

    `started` maps tool calls to the files of the agents they started.
    """
    paths = session_paths(trace)
    base = safe_file_name(trace.trace_id)
    names = [base, *(f"{base}.branch-{number}" for number in range(1, len(paths)))]
    documents = {
        f"{name}.json": session_document(trace, path, name, started)
        for name, path in zip(names, paths, strict=True)
    }
    # Turns that led to the session's end are on the active branch. If they lie on several paths, each path except
    # the newest was ended by a compaction; the newest comes first.
    active = [
        name for name, path in zip(names, paths, strict=True) if trace.turns[path.turns[-1]].branch == "active"
    ]
    for newer, older in pairwise(active):
        documents[f"{older}.json"]["continued_trajectory_ref"] = f"{newer}.json"
    return documents


def without_tokens(document: Document) -> None:
    """Remove the token ids from a trajectory."""
    for step in document["steps"]:
        for name in ("prompt_token_ids", "completion_token_ids", "logprobs"):
            step.get("metrics", {}).pop(name, None)
        step.get("extra", {}).pop("loss_mask", None)
    for child in document.get("subagent_trajectories", ()):
        without_tokens(child)


def _subagents(corpus: Corpus) -> dict[str, dict[str, str]]:
    """Return the files of the agents that sessions started, by session and tool call."""
    by_session: dict[str, dict[str, str]] = {}
    for trace in corpus.traces():
        if trace.parent is not None and trace.parent.tool_use_id is not None:
            files = by_session.setdefault(trace.parent.session_id, {})
            files[trace.parent.tool_use_id] = f"{safe_file_name(trace.trace_id)}.json"
    return by_session


def agent_version(logs: Mapping[str, bytes]) -> str:
    """Return the agent's version, which Claude Code prints at the beginning of its stream.

    The format requires one.
    """
    matches = (_VERSION.search(log, 0, _SEARCHED_BYTES) for log in logs.values())
    return next((match[1].decode() for match in matches if match), "unknown")


# --- Sessions ----------------------------------------------------------------------------------


class SessionPath(Struct, frozen=True):
    """A path from the beginning of a trace: its nodes and its turns, in order.

    `new` are the turns on no newer path.
    """

    nodes: list[int]
    turns: list[int]
    new: frozenset[int]


def session_paths(trace: Trace) -> list[SessionPath]:
    """Return the paths of a trace, so that each turn is new on exactly one. The newest turn's path comes first."""
    owners = {node: index for index, turn in enumerate(trace.turns) for node in turn.action}
    remaining = set(range(len(trace.turns)))
    paths: list[SessionPath] = []
    for newest in reversed(range(len(trace.turns))):
        if newest not in remaining:
            continue
        turn = trace.turns[newest]
        nodes = [*node_path(trace, turn.context), *turn.action]
        nodes_on_path = set(nodes)
        turns = list(dict.fromkeys(owners[node] for node in nodes if node in owners))
        complete = [index for index in turns if nodes_on_path.issuperset(trace.turns[index].action)]
        paths.append(SessionPath(nodes, complete, frozenset(remaining.intersection(complete))))
        remaining.difference_update(complete)
    return paths


def session_document(trace: Trace, path: SessionPath, identity: str, started: Mapping[str, str]) -> Document:
    """Return the trajectory of a path."""
    last_turn = trace.turns[path.turns[-1]]
    shape = last_turn.shape or trace.shape
    outcome, offered = trace.outcome, OfferedTools(trace).tools_of(last_turn)
    extra: dict[str, Any] = {
        "reward": outcome and outcome.reward,
        "resolved": outcome and outcome.resolved,
        "task": outcome and outcome.task,
        "exit_status": outcome and outcome.exit_status,
        "format": trace.format,
        "project": trace.project,
        "role": trace.role,
        "parent": msgspec.to_builtins(trace.parent),
        "branch": last_turn.branch,
        "fidelity": last_turn.fidelity,
    } | {"tools_source": offered.source, "tools_version": offered.version}
    return _document(
        trace.session_id,
        identity,
        {"name": trace.agent or trace.format, "version": trace.version or "unknown"},
        last_turn.model,
        offered.tools,
        steps(_session_items(trace, path, shape), started),
        {key: value for key, value in extra.items() if value is not None},
    )


def _document(
    session_id: str,
    identity: str,
    agent: Mapping[str, str],
    model: str | None,
    tools: list[dict[str, Any]] | None,
    steps: list[Step],
    extra: dict[str, Any],
) -> Document:
    named = ({"model_name": model} if model else {}) | ({"tool_definitions": tools} if tools else {})
    return {
        "schema_version": VERSION,
        "session_id": session_id,
        "trajectory_id": identity,
        "agent": {**agent, **named},
        "steps": steps,
        "final_metrics": totals(steps),
        "extra": {**extra, "written_by": f"understudy {__version__}"},
    }


def _session_items(trace: Trace, path: SessionPath, shape: RequestShape) -> list[Message | ModelTurn]:
    items: list[Message | ModelTurn] = []
    if shape.system is not None:
        items.append({"role": "system", "content": shape.system})
    begins = {trace.turns[index].action[0]: index for index in path.turns if trace.turns[index].action}
    action_nodes = {node for index in path.turns for node in trace.turns[index].action}
    for node in path.nodes:
        if node in begins:
            index = begins[node]
            items.append(_session_turn(trace, trace.turns[index], copied=index not in path.new))
        elif node not in action_nodes:
            items += (shown_result(trace, message) for message in trace.renderer.history(trace.nodes[node].body))
    return items


def _session_turn(trace: Trace, turn: TraceTurn, *, copied: bool) -> ModelTurn:
    action = trace.renderer.action([trace.nodes[node].body for node in turn.action])
    extra: dict[str, Any] = {
        "message_id": turn.message_id,
        "state_id": state_id(trace.trace_id, turn.message_id),
        "fidelity": turn.fidelity,
    }
    if turn.notes:
        extra["notes"] = list(turn.notes)
    if action.thinking_hidden:
        extra["thinking_hidden"] = True
    if turn.signals is not None:
        extra["signals"] = msgspec.to_builtins(turn.signals)
    message = message_of(action)
    return ModelTurn(message=message, model=turn.model, timestamp=turn.timestamp, extra=extra, copied=copied)


# --- Rollouts ----------------------------------------------------------------------------------


class AtifBranch(Struct, eq=False, kw_only=True):
    """A branch of calls with a trajectory of its own.

    `host` is the branch whose trajectory contains it, `continued` the branch that it continues. Without a host it
    has a file of its own.
    """

    branch: str
    nodes: list[Node]
    host: AtifBranch | None = None
    continued: AtifBranch | None = None


def rollout_documents(
    trajectory: Trajectory, graded: CallSource, roles: Collection[Role], agent: dict[str, Any], base: str
) -> dict[str, Document]:
    """Return the trajectories of a rollout or a client's session by file: `base`.json, then those beside it.

    Only answered calls with one of `roles` become steps. `agent` names the program.
    """
    lines = _exported_branches(trajectory, roles)
    names: dict[str, str] = {}
    counts = {"cont": 0, "branch": 0}
    for line in lines:
        if line.host is not None:
            names[line.branch] = line.branch
        elif line.continued is None and not names:
            names[line.branch] = f"{base}.json"
        else:
            kind = "branch" if line.continued is None else "cont"
            counts[kind] += 1
            names[line.branch] = f"{base}.{kind}-{counts[kind]}.json"
    by_branch = {line.branch: _rollout_document(line, lines, graded, agent, names) for line in lines}
    for line in lines:
        if line.continued is not None:
            by_branch[line.continued.branch]["continued_trajectory_ref"] = names[line.branch]
    # Innermost first, so that a trajectory is complete before it is put into another.
    for line in reversed(lines):
        if line.host is not None:
            by_branch[line.host.branch].setdefault("subagent_trajectories", []).insert(0, by_branch[line.branch])
    return {names[line.branch]: by_branch[line.branch] for line in lines if line.host is None}


def _exported_branches(trajectory: Trajectory, roles: Collection[Role]) -> list[AtifBranch]:
    lines: list[AtifBranch] = []
    line_of_call: dict[str, AtifBranch] = {}
    # Alternatives come last, because the rollout's first file is the branch with which its agent continued.
    for branch, nodes in sorted(trajectory.branches.items(), key=lambda item: item[1][0].alternative):
        answered = [node for node in nodes if node.role in roles and node.answer is not None]
        if not answered or all(node.superseded for node in answered):
            continue
        first_node = answered[0]
        line = AtifBranch(branch=branch, nodes=answered)
        if first_node.continues is not None:
            line.continued = _continued_branch(first_node, lines)
        if first_node.role != "main":
            line.host = (
                line.continued.host if line.continued else _starting_branch(first_node, line_of_call, lines)
            )
        for node in answered:
            line_of_call[node.call.id] = line
        lines.append(line)
    return lines


def _continued_branch(first_node: Node, lines: Sequence[AtifBranch]) -> AtifBranch | None:
    """Return the branch that a compaction ended: the last one of the same agent that no other branch continues
    yet.
    """
    key = (first_node.call.session_id, first_node.call.agent_id, first_node.role)
    continued = [line.continued for line in lines]
    for line in reversed(lines):
        branch_head = line.nodes[0]
        if (
            branch_head.call.session_id,
            branch_head.call.agent_id,
            branch_head.role,
        ) == key and line not in continued:
            return line
    return None


def _starting_branch(
    first_node: Node, line_of_call: dict[str, AtifBranch], lines: Sequence[AtifBranch]
) -> AtifBranch | None:
    """Return the branch that started another one, else the first branch."""
    for node in (first_node.spawned_by, first_node.parent):
        if node is not None and node.call.id in line_of_call:
            return line_of_call[node.call.id]
    return lines[0] if lines else None


def _rollout_document(
    line: AtifBranch,
    lines: Sequence[AtifBranch],
    graded: CallSource,
    agent: dict[str, Any],
    names: dict[str, str],
) -> Document:
    first_node, attempt = line.nodes[0], graded.attempt
    of_client = isinstance(graded, ClientSession)
    identity = graded.id if of_client else attempt.id
    extra: dict[str, Any] = {
        **({"client": graded.client, "attempt_id": attempt.id} if of_client else _outcome(graded)),
        "branch": line.branch,
        "role": first_node.role,
        "policy_versions": sorted({node.call.policy_version for node in line.nodes if node.call.policy_version}),
    }
    return _document(
        first_node.call.session_id or attempt.id,
        f"{identity}.{line.branch}" if line.host is None else line.branch,
        agent,
        line.nodes[-1].call.backend_model,
        first_node.conversation.tools,
        steps(_rollout_items(line.nodes), _started_agents(line, lines, names)),
        extra,
    )


def _outcome(graded: GradedRollout) -> dict[str, Any]:
    rollout, reward = graded.rollout, graded.verdict.reward
    return {
        "reward": reward,
        "resolved": is_solved(reward),
        "task": rollout.task_id,
        "exit_status": graded.attempt.status,
        "integrity": graded.verdict.integrity.status,
        "run_id": rollout.run_id,
        "rollout_id": rollout.id,
        "attempt_id": graded.attempt.id,
        "sample_index": rollout.sample_index,
    }


def _started_agents(line: AtifBranch, lines: Sequence[AtifBranch], names: dict[str, str]) -> dict[str, str]:
    """Return the agents that a branch's tool calls started, by the id of the call."""
    call_ids = {node.call.id for node in line.nodes}
    started: dict[str, str] = {}
    for other_line in lines:
        first_node = other_line.nodes[0]
        starter = first_node.spawned_by
        if (
            first_node.role != "subagent"
            or other_line.continued is not None
            or starter is None
            or starter.call.id not in call_ids
        ):
            continue
        prompt_texts = [block.text for block in first_node.conversation.blocks if block.kind == "text"]
        for block in starter.answer or ():
            if (
                block.kind == "tool_use"
                and block.inputs().get("prompt") in prompt_texts
                and block.id not in started
            ):
                started[block.id] = names[other_line.branch]
                break
    return started


def _rollout_items(nodes: Sequence[Node]) -> list[Message | ModelTurn]:
    """Yield the new messages of each call, and its answer.

    The answers are the original ones, not as the agent sent them back.
    """
    items: list[Message | ModelTurn] = []
    block_count = 0
    for number, node in enumerate(nodes):
        if number and node.parent is nodes[number - 1]:
            items += _messages(node, node.inherited_blocks)
        elif number:
            # A call in between was not answered, or is not exported.
            items += _messages(node, block_count)
        else:
            items += node.messages
        block_count = len(node.conversation.blocks)
        items.append(_rollout_turn(node, node.answer or ()))
    return items


def _messages(node: Node, start: int) -> list[Message]:
    """Return the messages that a call sent, from its block number `start` on."""
    blocks = node.conversation.blocks[start:]
    remaining = msgspec.structs.replace(node.conversation, instructions=(), blocks=blocks)
    return shown_messages(remaining, node.sampled)


def _rollout_turn(node: Node, answer: tuple[Block, ...]) -> ModelTurn:
    call = node.call
    extra: dict[str, Any] = {"call_id": call.id, "finish_reason": call.finish_reason}
    if call.policy_version is not None or call.policy_spans:
        extra["policy_version"] = call.policy_version
        extra["policy_spans"] = msgspec.to_builtins(call.policy_spans)
    if call.completion_token_ids is not None:
        extra["loss_mask"] = [0 if node.superseded else 1] * len(call.completion_token_ids)
    if node.superseded:
        extra["superseded"] = True
    return ModelTurn(
        message=response_message(answer),
        model=call.backend_model,
        timestamp=datetime.fromtimestamp(call.ended_at, UTC).isoformat().replace("+00:00", "Z"),
        metrics=_metrics(call),
        extra=extra,
    )


def _metrics(call: Call) -> dict[str, Any]:
    usage = call.usage
    metrics: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    if call.cost_usd is not None:
        metrics["cost_usd"] = call.cost_usd
    if call.prompt_token_ids is not None:
        metrics["prompt_token_ids"] = list(call.prompt_token_ids)
    if call.completion_token_ids is not None:
        metrics["completion_token_ids"] = list(call.completion_token_ids)
        logprobs = call.logprobs
        complete = logprobs is not None and len(logprobs) == len(call.completion_token_ids)
        if logprobs is not None and complete and all(map(math.isfinite, logprobs)):
            metrics["logprobs"] = list(logprobs)
    if usage.cache_write_tokens:
        metrics["extra"] = {"cache_write_tokens": usage.cache_write_tokens}
    return metrics
