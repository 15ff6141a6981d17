"""A rollout as ATIF: the session with its subagents in it, and beside it what followed a compaction."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from understudy import __version__
from understudy.export.formats.atif_steps import Did, instant, plain, steps, totals
from understudy.ingest.trace import Message
from understudy.trajectory.graded import Graded
from understudy.trajectory.roles import Role
from understudy.trajectory.tree import Node, Trajectory
from understudy.types import Call
from understudy.wire.blocks import Block, Conversation
from understudy.wire.stored import ChatMessage, chat_messages
from understudy.wire.stored_tools import offered

VERSION = "ATIF-v1.8"
Document = dict[str, Any]


class Line(Struct, eq=False, kw_only=True):
    """A branch of calls that one trajectory tells.

    `host` is the line whose trajectory it is put into, `before` the one that it goes on from; without a host it
    has a file of its own.
    """

    branch: str
    nodes: list[Node]
    host: Line | None = None
    before: Line | None = None


def documents(
    trajectory: Trajectory, graded: Graded, roles: Collection[Role], agent: dict[str, Any], base: str
) -> dict[str, Document]:
    """The trajectories of a rollout by the name of their file: `base`.json, then those beside it.

    Only calls with one of `roles`, that were answered, are steps. `agent` names the program.
    """
    lines = _lines(trajectory, roles)
    names: dict[str, str] = {}
    counts = {"cont": 0, "branch": 0}
    for line in lines:
        if line.host is not None:
            names[line.branch] = line.branch
        elif line.before is None and not names:
            names[line.branch] = f"{base}.json"
        else:
            kind = "branch" if line.before is None else "cont"
            counts[kind] += 1
            names[line.branch] = f"{base}.{kind}-{counts[kind]}.json"
    made = {line.branch: _document(line, lines, graded, agent, names) for line in lines}
    for line in lines:
        if line.before is not None:
            made[line.before.branch]["continued_trajectory_ref"] = names[line.branch]
    # The innermost first, so that what is put into another is whole.
    for line in reversed(lines):
        if line.host is not None:
            made[line.host.branch].setdefault("subagent_trajectories", []).insert(0, made[line.branch])
    return {names[line.branch]: made[line.branch] for line in lines if line.host is None}


def _lines(trajectory: Trajectory, roles: Collection[Role]) -> list[Line]:
    lines: list[Line] = []
    of: dict[str, Line] = {}
    for branch, nodes in trajectory.branches.items():
        told = [node for node in nodes if node.role in roles and node.answer is not None]
        if not told or all(node.superseded for node in told):
            continue
        head = told[0]
        line = Line(branch=branch, nodes=told)
        if head.continues is not None:
            line.before = _before(head, lines)
        if head.role != "main":
            line.host = line.before.host if line.before else _host(head, of, lines)
        for node in told:
            of[node.call.id] = line
        lines.append(line)
    return lines


def _before(head: Node, lines: Sequence[Line]) -> Line | None:
    """The line that a compaction ended: the last one of the same agent that nothing goes on from yet."""
    key = (head.call.session_id, head.call.agent_id)
    taken = [line.before for line in lines]
    same = [
        line
        for line in lines
        if (line.nodes[0].call.session_id, line.nodes[0].call.agent_id) == key
        and line.nodes[0].role == head.role
        and line not in taken
    ]
    return same[-1] if same else None


def _host(head: Node, of: dict[str, Line], lines: Sequence[Line]) -> Line | None:
    """The line that started another, else the first one."""
    for node in (head.spawned_by, head.parent):
        if node is not None and node.call.id in of:
            return of[node.call.id]
    return lines[0] if lines else None


def _document(
    line: Line, lines: Sequence[Line], graded: Graded, agent: dict[str, Any], names: dict[str, str]
) -> Document:
    head, last = line.nodes[0], line.nodes[-1]
    made = steps(_items(line.nodes), _started(line, lines, names))
    verdict = graded.verdict
    policies = sorted({node.call.policy_version for node in line.nodes if node.call.policy_version})
    extra: dict[str, Any] = {
        "reward": verdict.reward,
        "resolved": verdict.reward >= 1,
        "task": graded.rollout.task_id,
        "exit_status": graded.attempt.status,
        "integrity": verdict.integrity.status,
        "run_id": graded.rollout.run_id,
        "rollout_id": graded.rollout.id,
        "attempt_id": graded.attempt.id,
        "sample_index": graded.rollout.sample_index,
        "branch": line.branch,
        "role": head.role,
        "policy_versions": policies,
        "written_by": f"understudy {__version__}",
    }
    known: dict[str, Any] = {**agent, "model_name": last.call.backend_model}
    tools = offered(head.call)
    if tools:
        known["tool_definitions"] = tools
    return {
        "schema_version": VERSION,
        "session_id": head.call.session_id or graded.attempt.id,
        "trajectory_id": f"{graded.attempt.id}.{line.branch}" if line.host is None else line.branch,
        "agent": known,
        "steps": made,
        "final_metrics": totals(made),
        "extra": extra,
    }


def _started(line: Line, lines: Sequence[Line], names: dict[str, str]) -> dict[str, str]:
    """The agents that tool calls of a line started, by the id of the call."""
    own = {node.call.id for node in line.nodes}
    started: dict[str, str] = {}
    for other in lines:
        head = other.nodes[0]
        by = head.spawned_by
        if head.role != "subagent" or other.before is not None or by is None or by.call.id not in own:
            continue
        asked = [block.text for block in head.conversation.blocks if block.kind == "text"]
        for block in by.answer or ():
            if block.kind == "tool_use" and block.inputs().get("prompt") in asked and block.id not in started:
                started[block.id] = names[other.branch]
                break
    return started


def _items(nodes: Sequence[Node]) -> list[Message | Did]:
    """What each call sent that was new, and what it was answered with.

    The answers of the calls are those that were given, not as the agent sent them back.
    """
    items: list[Message | Did] = []
    known = 0
    for number, node in enumerate(nodes):
        conversation = node.conversation
        if number and node.parent is nodes[number - 1]:
            fresh = msgspec.structs.replace(conversation, system="", blocks=conversation.blocks[node.fresh :])
            items += _messages(fresh)
        elif number:
            # A call between was not answered, or is not told.
            rest = msgspec.structs.replace(conversation, system="", blocks=conversation.blocks[known:])
            items += _messages(rest)
        else:
            items += _messages(conversation)
        known = len(conversation.blocks)
        items.append(_did(node, node.answer or ()))
    return items


def _messages(conversation: Conversation) -> list[Message]:
    return [_plain(message) for message in chat_messages(conversation)]


def _plain(message: ChatMessage) -> Message:
    told: dict[str, Any] = msgspec.to_builtins(message)
    return {key: value for key, value in told.items() if value is not None}


def _did(node: Node, answer: tuple[Block, ...]) -> Did:
    call = node.call
    extra: dict[str, Any] = {"call_id": call.id, "finish_reason": call.finish_reason}
    if call.policy_version is not None or call.policy_spans:
        extra["policy_version"] = call.policy_version
        extra["policy_spans"] = plain(call.policy_spans)
    if call.completion_token_ids is not None:
        extra["loss_mask"] = [0 if node.superseded else 1] * len(call.completion_token_ids)
    if node.superseded:
        extra["superseded"] = True
    return Did(
        message=_plain(chat_messages(Conversation(), answer)[0]),
        model=call.backend_model,
        timestamp=instant(call.ended_at),
        metrics=_metrics(call),
        extra=extra,
    )


def _metrics(call: Call) -> dict[str, Any]:
    usage = call.usage
    told: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    if call.cost_usd is not None:
        told["cost_usd"] = call.cost_usd
    if call.prompt_token_ids is not None:
        told["prompt_token_ids"] = list(call.prompt_token_ids)
    if call.completion_token_ids is not None:
        told["completion_token_ids"] = list(call.completion_token_ids)
        known = call.logprobs
        if known is not None and len(known) == len(call.completion_token_ids) and all(map(math.isfinite, known)):
            told["logprobs"] = list(known)
    if usage.cache_write_tokens:
        told["extra"] = {"cache_write_tokens": usage.cache_write_tokens}
    return told
