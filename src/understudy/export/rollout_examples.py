"""Examples of rollouts: of the calls of the deciding attempt, one by one, or a branch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from understudy.export.examples import Example
from understudy.export.matching import flaw, place
from understudy.ingest.model_families import model_family
from understudy.ingest.trace import Message
from understudy.trajectory.graded import Graded
from understudy.trajectory.roles import Role
from understudy.trajectory.tree import Node, Trajectory
from understudy.wire.blocks import Conversation
from understudy.wire.stored import ChatMessage, chat_messages
from understudy.wire.stored_tools import offered


class Told(Struct, frozen=True):
    """What a task tells of the examples made of it."""

    group: str
    source: str
    licence: str | None


def attempt_examples(
    trajectory: Trajectory,
    graded: Graded,
    told: Told,
    unit: str,
    roles: Collection[Role],
    left_out: Counter[str],
) -> Iterator[Example]:
    """The examples of an attempt: a call each, or a branch each, in which each of its calls is learned once.

    Calls that failed, did nothing, or were made again in vain are left out, and counted by why. Of a branch those
    are read, not learned, that the agent did not send back as they were: each is an example of its own.
    """
    for nodes in trajectory.branches.values():
        answers: list[tuple[Node, Message]] = []
        for node in nodes:
            if node.role not in roles:
                left_out[f"role {node.role}"] += 1
                continue
            answer = None if node.answer is None else _plain(chat_messages(Conversation(), node.answer)[0])
            reason = _flaw(node, answer)
            if reason:
                left_out[reason] += 1
            elif answer is not None:
                answers.append((node, answer))
        if unit == "turn":
            for node, answer in answers:
                messages = [*_history(node), answer]
                yield _example(graded, told, node, messages, (len(messages) - 1,), "turn")
            continue
        while answers:
            node, answer = answers.pop()
            messages = _history(node)
            trained: list[int] = []
            missed: list[tuple[Node, Message]] = []
            position = 0
            for earlier in answers:
                same = earlier[0].conversation.setting == node.conversation.setting
                found = place(messages, earlier[1], position) if same else None
                if found is None:
                    missed.append(earlier)
                    continue
                messages[found] = earlier[1]
                trained.append(found)
                position = found + 1
            answers = missed
            messages.append(answer)
            trained.append(len(messages) - 1)
            yield _example(graded, told, node, messages, tuple(trained), "conversation")


def _flaw(node: Node, answer: Message | None) -> str | None:
    if node.call.status != "ok" or answer is None:
        return "calls without an answer"
    return "superseded calls" if node.superseded else flaw(answer)


def _history(node: Node) -> list[Message]:
    return [_plain(message) for message in chat_messages(node.conversation)]


def _plain(message: ChatMessage) -> Message:
    plain: dict[str, Any] = msgspec.to_builtins(message)
    return {key: value for key, value in plain.items() if value is not None}


def _example(
    graded: Graded, told: Told, node: Node, messages: list[Message], trained: tuple[int, ...], unit: Any
) -> Example:
    reward, call = graded.verdict.reward, node.call
    return Example(
        example_id=call.id,
        origin="rollout",
        unit=unit,
        group=told.group,
        messages=messages,
        trained=trained,
        tools=offered(call),
        desirable=reward >= 1,
        reward=reward,
        model=call.backend_model,
        family=model_family(call.backend_model),
        source=told.source,
        licence=told.licence,
        meta={
            "run_id": graded.rollout.run_id,
            "rollout_id": graded.rollout.id,
            "attempt_id": graded.attempt.id,
            "instance_id": graded.rollout.task_id,
            "role": node.role,
            "branch": node.branch,
            "policy_version": call.policy_version,
            "integrity": graded.verdict.integrity.status,
        },
    )
