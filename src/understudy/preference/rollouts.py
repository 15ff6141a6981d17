"""Pairs from rollouts: of one task and agent, what a solved attempt did against what an unsolved one did instead.

The attempts of a task are laid upon each other from their first call. As long as their conversations are the same
(see `equivalence`) and their answers come to the same, they go together. Where answers differ there is a
pair, unless what the unsolved one did was also done, at that place, by one that was solved. Where conversations
differ before any answer does, as when a tool gave another result, they cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from understudy.ingest.model_families import model_family
from understudy.ingest.trace import Message, TurnAction, normalise_messages
from understudy.preference.checks import SAME, Checks, Pair, PairCounts
from understudy.preference.equivalence import (
    ActionEffect,
    beginning_digest,
    continuation_digest,
    difference_between,
    difference_json,
    digest,
    effect_of,
    same_effect,
)
from understudy.preference.normalise import WorkingDirectory, normalise_call
from understudy.preference.proposals import action_in
from understudy.store import Store
from understudy.store.outcomes import GradedRollout
from understudy.store.runs import check_run_id
from understudy.trajectory.tree import Node, build
from understudy.types import Protection, Task, is_solved

if TYPE_CHECKING:
    from understudy.redact.redactor import Redactor

ENVIRONMENT = "another environment before another action"
NOT_DIFFERENT = "no different action"
ALSO_SOLVED = "an action that solved it too"
SAME_PAIR = "the same pair as of other rollouts"
CUT = "an answer that was cut off"
MANY = "more pairs than wanted of the task"

MAX_PAIRS_PER_TASK = 16
"""The maximum number of pairs of one task and agent, by default."""


class _Step(Struct, frozen=True):
    """A call of an attempt's main line, without its content.

    `before` is a digest of what was new in its conversation.
    """

    call_id: str
    model: str
    policy_version: str | None
    cut: bool
    before: bytes
    effect: ActionEffect


class _MainLine(Struct, frozen=True):
    """The main line of a rollout's attempt, up to the first summary or restart of its conversation."""

    graded: GradedRollout
    steps: tuple[_Step, ...]

    @property
    def solved(self) -> bool:
        return is_solved(self.graded.verdict.reward)


def rollout_pairs(
    store: Store,
    run_id: str | None = None,
    *,
    include_suspicious: bool = False,
    protection: Protection = "none",
    redactor: Redactor | None = None,
    most: int = MAX_PAIRS_PER_TASK,
    checked: Checks | None = None,
    tally: PairCounts | None = None,
) -> Iterator[Pair]:
    """Yield a pair for each step at which a solved and an unsolved rollout of a task first act differently.

    There are at most `most` per task and agent. Rollouts of different runs or agents are not compared. Rollouts
    with a suspicious patch are left out unless `include_suspicious`, and so are those with less than this
    `protection` of their reward (`Verdict.has_protection`). With a `redactor`, pairs hold no secrets. Each solved
    rollout is compared with each unsolved one; `tally` counts the comparisons, and what was left out. Raises
    ConfigError if there is no such run.
    """
    tally = tally if tally is not None else PairCounts()
    checked = checked or Checks()
    checked.doubted = store.votes.doubted_pairs()
    run_ids = [run.id for run in store.runs.all()]
    check_run_id(run_id, run_ids)
    for selected_run in run_ids if run_id is None else [run_id]:
        chosen = store.outcomes.select_graded(
            selected_run, include_suspicious=include_suspicious, protection=protection
        )
        tally.notes["rollouts without a verdict"] += sum(chosen.left_out.values())
        tally.notes["rollouts with a suspicious patch"] += sum(chosen.suspicious.values())
        for (task_id, _), rollouts in chosen.groups().items():
            task = store.runs.task(selected_run, task_id)
            location = WorkingDirectory(task.workdir)
            solved = sum(is_solved(member.verdict.reward) for member in rollouts)
            if not 0 < solved < len(rollouts):
                tally.notes["tasks all of whose rollouts ended alike"] += 1
                continue
            lines = [_compared_line(store, member, location) for member in rollouts]
            tally.compared += solved * (len(lines) - solved)
            yield from _pairs_of_task(store, task, lines, location, redactor, most, checked, tally)


def _pairs_of_task(
    store: Store,
    task: Task,
    lines: Sequence[_MainLine],
    location: WorkingDirectory,
    redactor: Redactor | None,
    most: int,
    checked: Checks,
    tally: PairCounts,
) -> Iterator[Pair]:
    pair_count = 0
    # Groups of rollouts that are equal up to a step, with its index. A group is split where its rollouts differ.
    together: list[tuple[int, list[_MainLine]]] = [(0, list(lines))]
    while together:
        depth, members = together.pop()
        by_prefix: dict[bytes, list[_MainLine]] = {}
        for line in members:
            # A rollout that has ended is in a group of its own, under an empty key.
            before = line.steps[depth].before if depth < len(line.steps) else b""
            by_prefix.setdefault(before, []).append(line)
        ended = by_prefix.pop(b"", [])
        _count(
            tally,
            NOT_DIFFERENT,
            _count_opposed(ended, members) + _count_opposed(members, ended) - _count_opposed(ended, ended),
        )
        groups_of_state = list(by_prefix.values())
        for number, group in enumerate(groups_of_state):
            for later_group in groups_of_state[number + 1 :]:
                _count(tally, ENVIRONMENT, _count_opposed(group, later_group) + _count_opposed(later_group, group))
        for group in groups_of_state:
            classes = _classes(group, depth)
            for better in classes:
                for worse in classes:
                    compared = 0 if better is worse else _count_opposed(better, worse)
                    if not compared:
                        continue
                    if any(line.solved for line in worse):
                        _count(tally, ALSO_SOLVED, compared)
                        continue
                    _count(tally, SAME_PAIR, compared - 1)
                    if pair_count >= most:
                        _count(tally, MANY, 1)
                        continue
                    pair = _pair(store, task, better, worse, group, depth, location, redactor)
                    pair = pair if isinstance(pair, str) else checked.passed(pair, location)
                    if isinstance(pair, str):
                        _count(tally, pair, 1)
                        continue
                    pair_count += 1
                    tally.pairs += 1
                    yield pair
            # Reversed, so that the stack returns them in the order of the store.
            together += [
                (depth + 1, lines_of_class) for lines_of_class in reversed(classes) if len(lines_of_class) > 1
            ]


def _classes(lines: Sequence[_MainLine], depth: int) -> list[list[_MainLine]]:
    """Return the lines in groups of equal actions at a step; each joins the first group whose action has the same
    effect.
    """
    classes: list[list[_MainLine]] = []
    for line in lines:
        effect = line.steps[depth].effect
        matching = next(
            (candidates for candidates in classes if same_effect(candidates[0].steps[depth].effect, effect)), None
        )
        if matching is None:
            classes.append([line])
        else:
            matching.append(line)
    return classes


def _count_opposed(better: Sequence[_MainLine], worse: Sequence[_MainLine]) -> int:
    """Return the number of pairs of a solved rollout in the first group and an unsolved one in the second."""
    return sum(line.solved for line in better) * sum(not line.solved for line in worse)


def _count(tally: PairCounts, reason: str, number: int) -> None:
    if number:
        tally.left_out[reason] += number


def _pair(
    store: Store,
    task: Task,
    better: Sequence[_MainLine],
    worse: Sequence[_MainLine],
    group: Sequence[_MainLine],
    depth: int,
    location: WorkingDirectory,
    redactor: Redactor | None,
) -> Pair | str:
    """Return the pair of the first solved rollout and the first unsolved one, or the reason why there is none."""
    good = next((line for line in better if line.solved and not line.steps[depth].cut), None)
    bad = next(line for line in worse if not line.solved)
    if good is None:
        return CUT
    node, worse_node = (_main_nodes(store, line.graded)[depth] for line in (good, bad))
    messages, actions = _messages(node), [action_in(sibling.answer or ()) for sibling in (node, worse_node)]
    if redactor is not None:
        clean: dict[str, Any] = redactor.value(
            {"messages": messages, "actions": msgspec.to_builtins(actions)}, f"rollout {good.graded.rollout.id}"
        )
        messages, actions = clean["messages"], msgspec.convert(clean["actions"], list[TurnAction])
    difference = difference_between(*(effect_of(action, location) for action in actions))
    if difference is None:
        return SAME  # they differed in what is no secret any more
    ids = [line.graded.rollout.id for line in (good, bad)]
    return Pair(
        pair_id=digest(["rollouts", *ids, str(depth)]).hex(),
        origin="rollouts",
        group=task.instance_id,
        messages=messages,
        tools=node.conversation.tools or None,
        tools_source="logged" if node.conversation.tools else None,
        chosen=actions[0],
        rejected=actions[1],
        model=worse_node.call.backend_model,
        family=model_family(worse_node.call.backend_model),
        evidence={
            "task": task.instance_id,
            "turn": depth,
            "differs": difference_json(difference),
            "chosen": _evidence_of(good, depth),
            "rejected": _evidence_of(bad, depth),
            "rollouts_here": len(group),
            "solved_here": sum(line.solved for line in group),
            "did_as_chosen": len(better),
            "did_as_chosen_solved": sum(line.solved for line in better),
            "did_as_rejected": len(worse),
            "did_as_rejected_solved": sum(line.solved for line in worse),
        },
    )


def _evidence_of(line: _MainLine, depth: int) -> dict[str, Any]:
    step = line.steps[depth]
    return {
        "rollout_id": line.graded.rollout.id,
        "attempt_id": line.graded.attempt.id,
        "call_id": step.call_id,
        "reward": line.graded.verdict.reward,
        "reason": line.graded.verdict.reason,
        "integrity": line.graded.verdict.integrity.status,
        "model": step.model,
        "policy_version": step.policy_version,
    }


# --- the main line of a rollout ---------------------------------------------------------------------------


def _compared_line(store: Store, member: GradedRollout, location: WorkingDirectory) -> _MainLine:
    """Return the main line of an attempt, as far as it is compared."""
    steps: list[_Step] = []
    calls: list[str] = []
    for node in _main_nodes(store, member):
        fresh = node.conversation.blocks[node.inherited_blocks :]
        before = continuation_digest(fresh, calls) if steps else beginning_digest(node.conversation)
        action = action_in(node.answer or ())
        effect, call = effect_of(action, location), node.call
        cut = call.finish_reason == "length"
        steps.append(_Step(call.id, call.backend_model, call.policy_version, cut, before, effect))
        calls = [
            call["id"] for call in sorted(action.tool_calls, key=lambda call: normalise_call(call, location).key)
        ]
    return _MainLine(member, tuple(steps))


def _main_nodes(store: Store, member: GradedRollout) -> list[Node]:
    """Return the answered calls of the main session, each of which continues the one before.

    The line ends where the conversation was summarised or restarted.
    """
    nodes = build(store.calls.of_attempt(member.attempt.id)).nodes
    node = next((node for node in nodes if _begins_main_line(node)), None)
    line: list[Node] = []
    while node is not None and node.answer is not None:
        line.append(node)
        node = node.heir
    return line


def _begins_main_line(node: Node) -> bool:
    """Return whether a call begins the main line, which the session continued from."""
    aside = node.superseded or node.alternative
    return node.parent is None and node.role == "main" and not aside and node.answer is not None


def _messages(node: Node) -> list[Message]:
    """Return the conversation before a call in OpenAI form, without thinking."""
    return normalise_messages(
        [
            {name: value for name, value in message.items() if name != "reasoning_content"}
            for message in node.messages
        ]
    )
