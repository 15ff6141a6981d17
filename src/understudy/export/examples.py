"""Examples: conversations to learn from, made from the turns of sessions and the calls of rollouts.

`trace_examples` makes those of sessions, `attempt_examples` those of the attempt that decided a rollout: one
example per turn (call), or one per path (branch) in which several answers are learned. The first part decides
which answers can be learned, and recognises an answer in a conversation that continued from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from understudy.ingest.model_families import model_family
from understudy.ingest.tool_lists import ToolList, ToolsSource, names_of
from understudy.ingest.trace import (
    SYSTEM_PROMPT,
    Message,
    OfferedTools,
    RequestShape,
    Trace,
    TraceOutcome,
    TraceTurn,
    TurnSignals,
    expand,
    messages_shown,
    rendered_node,
    state_id,
)
from understudy.preference.checks import Thinking, keeps_thinking, message_of
from understudy.store.outcomes import GradedRollout
from understudy.trajectory.roles import Role
from understudy.trajectory.tree import Node, Trajectory
from understudy.types import is_solved
from understudy.wire.arguments import UNPARSED_INPUT
from understudy.wire.stored import response_message, text_content

NOT_OFFERED = "calls of tools that were not offered"
"""The reason for leaving out an answer that calls a tool which its tool list lacks."""

INVALID_CALLS = "tool calls whose arguments are no JSON object"
"""The reason for leaving out an answer with invalid arguments, which would teach the model calls that no tool
can run.
"""

_decode_json = msgspec.json.Decoder().decode


def find_answer(messages: Sequence[Message], answer: Message, start: int) -> int | None:
    """Return the index of the first message from `start` on that is `answer` as the agent sent it back, or None.

    An agent may rewrite what it sends back (argument order, white space), so calls are compared by id, and text
    without white space.
    """
    marks = _comparison_key(answer)
    for index in range(start, len(messages)):
        if messages[index]["role"] == "assistant" and _comparison_key(messages[index]) == marks:
            return index
    return None


def is_same_answer(message: Message, answer: Message) -> bool:
    """Return whether a message is `answer` as it was sent back with equal arguments, so that it can be used in its
    place.
    """
    if _comparison_key(message) != _comparison_key(answer):
        return False
    calls = zip(message.get("tool_calls") or (), answer.get("tool_calls") or (), strict=True)
    return all(call == sent_call or arguments_of(call) == arguments_of(sent_call) for call, sent_call in calls)


def answer_flaw(answer: Message) -> str | None:
    """Return why an answer should not be learned, or None if it can be."""
    calls = answer.get("tool_calls") or ()
    if not calls and not (answer.get("content") or "").strip():
        return "empty answers"
    if any(not is_valid_call(call) for call in calls):
        return INVALID_CALLS
    return None


def is_valid_call(call: dict[str, Any]) -> bool:
    """Return whether the model wrote a tool call's arguments as a JSON object, with which a tool can be run.

    Claude Code keeps the text of invalid arguments under a special key.
    """
    arguments = arguments_of(call)
    return arguments is not None and UNPARSED_INPUT not in arguments


def arguments_of(call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a tool call, or None if they are not a JSON object."""
    try:
        value = _decode_json(call["function"]["arguments"])
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError, UnicodeEncodeError):
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def with_text_content(message: Message) -> Message:
    """Return the message with its content as text, in which `[image]` stands for an image."""
    content = message.get("content")
    return message if isinstance(content, str) else {**message, "content": text_content(content)}


def message_rows(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the arguments of their tool calls as objects, which chat templates expect.

    Arguments that are not a JSON object occur only in messages that are not learned; they become an object with
    the text under the key "arguments".
    """
    rows: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            rows.append({**message, "tool_calls": [_call_row(call) for call in calls]})
        else:
            rows.append({key: value for key, value in message.items() if key != "tool_calls"})
    return rows


def _call_row(call: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = call["function"]
    arguments = arguments_of(call)
    if arguments is None:
        arguments = {"arguments": function.get("arguments")}
    return {**call, "function": {**function, "arguments": arguments}}


def _comparison_key(message: Message) -> tuple[tuple[str, ...], str]:
    calls = tuple(str(call.get("id")) for call in message.get("tool_calls") or ())
    return calls, "".join((message.get("content") or "").split())


class Example(Struct, frozen=True, kw_only=True):
    """A conversation to learn from: messages in OpenAI's form, the last one being the assistant's.

    `trained` are the indexes in `messages` of the assistant messages to learn, in order; the others are only
    context. `answer_ids` are the ids of their states or calls. `unit` is "turn" if only the last is learned,
    "conversation" for a whole path. Trained messages have their thinking in `reasoning_content`. `tools_source`
    says where `tools` come from, and `tools_version` the agent version if they are not from the log. `group` is
    the project or task, which a split must not divide. `desirable` is whether it is to be learned or unlearned
    (KTO), None if unknown. `origin` is "session" or "rollout", `source` the log format or dataset, `licence` the
    licence of the source, None if unknown. `length` is in the units of `lengths.LengthRule`, None if not measured.
    """

    example_id: str
    origin: Literal["session", "rollout"]
    unit: Literal["turn", "conversation"]
    group: str
    messages: list[Message]
    trained: tuple[int, ...]
    answer_ids: tuple[str, ...] = ()
    tools: list[dict[str, Any]] | None = None
    tools_source: ToolsSource | None = None
    tools_version: str | None = None
    desirable: bool | None = None
    reward: float | None = None
    model: str | None = None
    family: str | None = None
    source: str = ""
    licence: str | None = None
    length: int | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


def with_thinking(example: Example, choice: Thinking) -> Example | None:
    """Return the example with its thinking kept or removed as requested; None if it is to be left out."""
    thoughts = [bool(example.messages[index].get("reasoning_content")) for index in example.trained]
    keeps = keeps_thinking(thoughts, choice)
    if keeps is None:
        return None
    if keeps or not any(thoughts):
        return example
    messages = [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        for message in example.messages
    ]
    return replace(example, messages=messages)


# --- Rollouts ----------------------------------------------------------------------------------


class TaskOrigin(Struct, frozen=True):
    """What a task determines about the examples made from it."""

    group: str
    source: str
    licence: str | None


def attempt_examples(
    trajectory: Trajectory,
    graded: GradedRollout,
    origin: TaskOrigin,
    unit: str,
    roles: Collection[Role],
    left_out: Counter[str],
) -> Iterator[Example]:
    """Yield the examples of an attempt: one per call, or one per branch in which each of its calls is learned
    once.

    Calls that failed, did nothing, or were superseded by a retry are left out and counted by reason. A branch's
    calls that the agent did not send back unchanged are only context in it; each is an example of its own.
    """
    for nodes in trajectory.branches.values():
        answers: list[tuple[Node, Message]] = []
        for node in nodes:
            if node.role not in roles:
                left_out[f"role {node.role}"] += 1
                continue
            answer = None if node.answer is None else response_message(node.answer)
            reason = _call_flaw(node, answer)
            if reason:
                left_out[reason] += 1
            elif answer is not None:
                answers.append((node, answer))
        if unit == "turn":
            for node, answer in answers:
                messages = [*_history(node), answer]
                yield _call_example(graded, origin, node, messages, {len(messages) - 1: node}, "turn")
            continue
        while answers:
            node, answer = answers.pop()
            messages = _history(node)
            learned: dict[int, Node] = {}
            unmatched: list[tuple[Node, Message]] = []
            position = 0
            for earlier, earlier_answer in answers:
                same_prompt = earlier.conversation.prompt_digest == node.conversation.prompt_digest
                index = find_answer(messages, earlier_answer, position) if same_prompt else None
                if index is None:
                    unmatched.append((earlier, earlier_answer))
                    continue
                messages[index] = earlier_answer
                learned[index] = earlier
                position = index + 1
            answers = unmatched
            learned[len(messages)] = node
            messages.append(answer)
            yield _call_example(graded, origin, node, messages, learned, "conversation")


def _call_flaw(node: Node, answer: Message | None) -> str | None:
    if node.call.status != "ok" or answer is None:
        return "calls without an answer"
    return "superseded calls" if node.superseded else answer_flaw(answer)


def _history(node: Node) -> list[Message]:
    return [with_text_content(message) for message in node.messages]


def _call_example(
    graded: GradedRollout,
    origin: TaskOrigin,
    node: Node,
    messages: list[Message],
    learned: dict[int, Node],
    unit: Any,
) -> Example:
    reward, call = graded.verdict.reward, node.call
    return Example(
        example_id=call.id,
        origin="rollout",
        unit=unit,
        group=origin.group,
        messages=messages,
        trained=tuple(learned),
        answer_ids=tuple(learned_node.call.id for learned_node in learned.values()),
        tools=node.conversation.tools or None,
        tools_source="logged" if node.conversation.tools else None,
        desirable=is_solved(reward),
        reward=reward,
        model=call.backend_model,
        family=model_family(call.backend_model),
        source=origin.source,
        licence=origin.licence,
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


# --- Sessions ----------------------------------------------------------------------------------


_PATH_POSITION_KEY = "understudy_at"
"""While messages are put in order, they carry their position on the path under this key."""


def trace_examples(trace: Trace, unit: str, left_out: Counter[str], notes: Counter[str]) -> Iterator[Example]:
    """Yield the examples of the turns in a trace. Other answers on its paths are only context.

    Each path teaches the turns on it that no earlier path had. Paths begin with the newest turn, and each turn
    that is on no path yet ends another one. What is left out is counted by reason.
    """
    return _turns(trace, left_out) if unit == "turn" else _paths(trace, left_out, notes)


def desirable(signals: TurnSignals | None, outcome: TraceOutcome | None = None) -> bool | None:
    """Return whether a turn should be learned (True) or unlearned (False); None if nothing tells.

    False: the user denied or interrupted a call, called it wrong, or an edit was undone later. True: otherwise, if
    tests that it ran passed, it made a commit, or the user praised it. If the turn itself tells nothing, the
    outcome of the whole conversation decides: whether its task was solved.
    """
    if signals is not None:
        undone = signals.edits_survived is not None and signals.edits_survived < signals.edits
        if signals.denied or signals.interrupted or undone or signals.feedback == "negative":
            return False
        if signals.tests == "passed" or signals.commits or signals.feedback == "positive":
            return True
    return None if outcome is None else outcome.resolved


def group_of(trace: Trace) -> str:
    """Return the project of a trace, or its task; else the session, including its subagents."""
    task = trace.outcome.task if trace.outcome else None
    return trace.project or task or (trace.parent.session_id if trace.parent else trace.session_id)


def _turns(trace: Trace, left_out: Counter[str]) -> Iterator[Example]:
    for state, turn in zip(expand(trace), trace.turns, strict=True):
        answer = with_text_content(message_of(state.student_action))
        offered = ToolList.of(state)
        if reason := answer_flaw(answer) or _not_offered(answer, offered):
            left_out[reason] += 1
            continue
        messages = [*map(with_text_content, state.messages), answer]
        yield _turn_example(trace, turn, messages, {len(messages) - 1: turn}, "turn", offered)


def _paths(trace: Trace, left_out: Counter[str], notes: Counter[str]) -> Iterator[Example]:
    remaining: dict[int, TraceTurn] = {}
    answers: dict[int, Message] = {}
    by_context: dict[int, list[int]] = {}
    rendered: dict[int, list[Message]] = {}
    offered = OfferedTools(trace, rendered)
    for number, turn in enumerate(trace.turns):
        tools = offered.tools_of(turn)
        answer = with_text_content(message_of(offered.action_of(turn)))
        if reason := answer_flaw(answer) or _not_offered(answer, tools):
            left_out[reason] += 1
            continue
        remaining[number], answers[number] = turn, answer
        by_context.setdefault(turn.context, []).append(number)
    for end_number in sorted(remaining, reverse=True):
        if end_number not in remaining:
            continue  # already trained on a newer path
        turn = remaining.pop(end_number)
        shape = turn.shape or trace.shape
        path = node_path(trace, turn.context)
        messages, answered = _path_messages(trace, path, shape, rendered)
        positions = [position for position, _ in answered]
        learned: dict[int, TraceTurn] = {}
        for position, node in enumerate((-1, *path), start=-1):
            for number in by_context.get(node, ()):
                if number not in remaining or not _same_shape(remaining[number].shape or trace.shape, shape):
                    continue
                # A turn's answer is the first one on the path after the node at which the model was asked.
                following = bisect_right(positions, position)
                index = answered[following][1] if following < len(answered) else None
                if index is not None and index not in learned and is_same_answer(messages[index], answers[number]):
                    messages[index] = answers[number]
                    learned[index] = remaining.pop(number)
        messages.append(answers[end_number])
        learned[len(messages) - 1] = turn
        notes["paths"] += 1
        yield _turn_example(trace, turn, messages, learned, "conversation", offered.tools_of(turn))


def _not_offered(answer: Message, offered: ToolList) -> str | None:
    """Return why an answer is left out if it calls a tool that was not offered, else None."""
    called = names_of(answer.get("tool_calls") or ())
    return None if called <= names_of(offered.tools or ()) else NOT_OFFERED


def _path_messages(
    trace: Trace, path: list[int], shape: RequestShape, rendered: dict[int, list[Message]]
) -> tuple[list[Message], list[tuple[int, int | None]]]:
    """Return the messages of a path, and for each answer its position on the path and its index in the messages.

    The index is None if ordering the messages dropped the answer. `rendered` caches nodes.
    """
    history: list[Message] = []
    positions: list[int] = []
    for position, node in enumerate(path):
        node_messages = rendered_node(trace, node, rendered)
        history += [{**message, _PATH_POSITION_KEY: position} for message in node_messages]
        answers = [message for message in node_messages if message["role"] == "assistant"]
        if any(message.get("content") or message.get("tool_calls") for message in answers):
            positions.append(position)
    system = SYSTEM_PROMPT if shape.system is None else shape.system
    messages: list[Message] = [{"role": "system", "content": system}]
    indexes: dict[int, int] = {}
    for message in messages_shown(trace, history):
        position = message.pop(_PATH_POSITION_KEY, -1)
        if message["role"] == "assistant":
            indexes.setdefault(position, len(messages))
        messages.append(with_text_content(message))
    return messages, [(position, indexes.get(position)) for position in positions]


def node_path(trace: Trace, end: int) -> list[int]:
    """Return the nodes of a trace from the beginning of its conversation to `end`."""
    path: list[int] = []
    while end >= 0:
        path.append(end)
        end = trace.nodes[end].parent
    return path[::-1]


def _same_shape(first: RequestShape, second: RequestShape) -> bool:
    return first is second or first == second


def _turn_example(
    trace: Trace,
    turn: TraceTurn,
    messages: list[Message],
    learned: dict[int, TraceTurn],
    unit: Any,
    offered: ToolList,
) -> Example:
    trained, outcome = tuple(sorted(learned)), trace.outcome
    reward = outcome.reward if outcome else None
    if reward is None and outcome and outcome.resolved is not None:
        reward = float(outcome.resolved)
    return Example(
        example_id=state_id(trace.trace_id, turn.message_id),
        origin="session",
        unit=unit,
        group=group_of(trace),
        messages=messages,
        trained=trained,
        answer_ids=tuple(state_id(trace.trace_id, learned[index].message_id) for index in trained),
        tools=offered.tools,
        tools_source=offered.source,
        tools_version=offered.version,
        desirable=desirable(turn.signals if unit == "turn" else None, outcome),
        reward=reward,
        model=turn.model,
        family=model_family(turn.model),
        source=trace.format,
        meta={
            "session_id": trace.session_id,
            "trace_id": trace.trace_id,
            "role": trace.role,
            "branch": turn.branch,
            "fidelity": turn.fidelity,
            "timestamp": turn.timestamp,
            "version": trace.version,
            "resolved": outcome.resolved if outcome else None,
            "task": outcome.task if outcome else None,
            "signals": [learned[index].signals for index in trained],
        },
    )
