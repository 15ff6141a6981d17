"""A session as ATIF: a trajectory for each path of it, the newest first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from understudy import __version__
from understudy.export.formats.atif_rollout import VERSION, Document
from understudy.export.formats.atif_steps import Did, plain, steps, totals
from understudy.ingest.trace import Message, RequestShape, Trace, TraceTurn, TurnAction, state_id


class Path(Struct, frozen=True):
    """A way from the beginning of a trace: its nodes, and the turns on it, in order. `new` are on no newer one."""

    nodes: list[int]
    turns: list[int]
    new: frozenset[int]


def paths(trace: Trace) -> list[Path]:
    """The paths of a trace, so that each of its turns is new on one: the newest turn's first."""
    owners = {node: index for index, turn in enumerate(trace.turns) for node in turn.action}
    waiting = set(range(len(trace.turns)))
    found: list[Path] = []
    for last in reversed(range(len(trace.turns))):
        if last not in waiting:
            continue
        turn = trace.turns[last]
        nodes = [*_way(trace, turn.context), *turn.action]
        on = set(nodes)
        turns = list(dict.fromkeys(owners[node] for node in nodes if node in owners))
        whole = [index for index in turns if on.issuperset(trace.turns[index].action)]
        found.append(Path(nodes, whole, frozenset(waiting.intersection(whole))))
        waiting.difference_update(whole)
    return found


def document(
    trace: Trace, path: Path, identity: str, started: Mapping[str, str], continued: str | None
) -> Document:
    """The trajectory of a path. `started` maps tool calls to the files of the agents they started; `continued` is
    the file of the path that goes on from it."""
    last = trace.turns[path.turns[-1]]
    shape = last.shape or trace.shape
    made = steps(_items(trace, path, shape), started)
    outcome = trace.outcome
    extra: dict[str, Any] = {
        "reward": None if outcome is None else outcome.reward,
        "resolved": None if outcome is None else outcome.resolved,
        "task": None if outcome is None else outcome.task,
        "exit_status": None if outcome is None else outcome.exit_status,
        "format": trace.format,
        "project": trace.project,
        "role": trace.role,
        "parent": None if trace.parent is None else plain(trace.parent),
        "branch": last.branch,
        "fidelity": last.fidelity,
        "written_by": f"understudy {__version__}",
    }
    agent: dict[str, Any] = {"name": trace.agent or trace.format, "version": trace.version or "unknown"}
    if last.model:
        agent["model_name"] = last.model
    if shape.tools:
        agent["tool_definitions"] = shape.tools
    told: Document = {
        "schema_version": VERSION,
        "session_id": trace.session_id,
        "trajectory_id": identity,
        "agent": agent,
        "steps": made,
        "final_metrics": totals(made),
        "extra": {key: value for key, value in extra.items() if value is not None},
    }
    return told if continued is None else {**told, "continued_trajectory_ref": continued}


def _way(trace: Trace, end: int) -> list[int]:
    way: list[int] = []
    while end >= 0:
        way.append(end)
        end = trace.nodes[end].parent
    return way[::-1]


def _items(trace: Trace, path: Path, shape: RequestShape) -> list[Message | Did]:
    items: list[Message | Did] = []
    if shape.system is not None:
        items.append({"role": "system", "content": shape.system})
    begins = {trace.turns[index].action[0]: index for index in path.turns if trace.turns[index].action}
    own = {node for index in path.turns for node in trace.turns[index].action}
    for node in path.nodes:
        if node in begins:
            index = begins[node]
            items.append(_did(trace, trace.turns[index], copied=index not in path.new))
        elif node not in own:
            items += trace.renderer.history(trace.nodes[node].body)
    return items


def _did(trace: Trace, turn: TraceTurn, *, copied: bool) -> Did:
    action: TurnAction = trace.renderer.action([trace.nodes[node].body for node in turn.action])
    message: Message = {"role": "assistant", "content": action.content or ""}
    if action.thinking:
        message["reasoning_content"] = action.thinking
    if action.tool_calls:
        message["tool_calls"] = action.tool_calls
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
        extra["signals"] = plain(turn.signals)
    return Did(message=message, model=turn.model, timestamp=turn.timestamp, extra=extra, copied=copied)


def continuations(trace: Trace, found: Sequence[Path]) -> dict[int, int]:
    """Of paths that a compaction ended, by place: the place of the path that goes on from each.

    All turns that led to the session's end are of the active branch; those that lie on several paths stand in the
    order in which they were taken.
    """
    active = [at for at, path in enumerate(found) if trace.turns[path.turns[-1]].branch == "active"]
    return {older: newer for newer, older in pairwise(active)}


def callers(parents: Collection[tuple[str | None, str]]) -> dict[str, str]:
    """Tool calls to the files of the agents that they started."""
    return {call: file for call, file in parents if call is not None}
