"""Logged conversations, their states, preference pairs, and what redaction would replace."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from understudy.export.corpus import Corpus, ExportSelection
from understudy.ingest import trace_store
from understudy.ingest.redaction_preview import Conversation, preview_redaction, trace_conversations
from understudy.ingest.trace import Message, TraceState, TurnAction, expand, text_of
from understudy.preference.checks import Checks, PairCounts
from understudy.preference.pairs import replay_pairs
from understudy.preference.rollouts import rollout_pairs
from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.view.faults import ViewRefused, missing
from understudy.view.index import fitting
from understudy.view.routes import PairQuery, SessionFilter, StateFilter, StateQuery
from understudy.view.schema import TEXT_CHARACTERS
from understudy.view.schema.orders import RedactionLine, RedactionView, VoteView
from understudy.view.schema.rollouts import BlockView, TurnView
from understudy.view.schema.sessions import (
    PairPage,
    PairView,
    SessionPage,
    StatePage,
    StateView,
)

_PROMPT_TAIL = 6
_PREVIEWED = 50
"""How many conversations of a whole store are searched for a preview."""


def session_page(store: Store, query: SessionFilter) -> SessionPage:
    """Return a page of conversations in the order in which they were stored."""
    after = _number(query.cursor)
    listed, total = store.session_lists.traces(
        after, query.limit + 1, project=query.project, agent=query.agent, log_format=query.format, text=query.q
    )
    rows = [row for _, row in listed[: query.limit]]
    count = fitting(rows)
    more = len(listed) > count
    return SessionPage(
        sessions=tuple(rows[:count]), total=total, next=str(listed[count - 1][0]) if more and count else None
    )


def state_page(store: Store, query: StateFilter) -> StatePage:
    """Return a page of states in the order of their conversations. Raises ConfigError for an invalid condition."""
    start = _number(query.cursor)
    rows, total = store.session_lists.states(start, query.limit, trace_id=query.trace, where=query.where)
    count = fitting(rows)
    after = start + count
    return StatePage(states=tuple(rows[:count]), total=total, next=str(after) if count and after < total else None)


def _number(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not cursor.isdecimal() or len(cursor) > 15:
        raise ViewRefused(
            400, "cursor", f"cursor: {cursor[:50]!r} is none of ours", "take `next` of the page before"
        )
    return int(cursor)


def state_view(store: Store, state_id: str, query: StateQuery) -> StateView:
    """Return a state with some of its messages. Raises ViewRefused if there is none."""
    quoted = state_id.replace("'", "''")
    listed, _ = store.session_lists.states(0, 1, where=f"state_id = '{quoted}'")
    state = next(_states(store, f"state_id = '{quoted}'"), None) if listed else None
    if state is None:
        raise missing(f"the store has no state {state_id[:100]!r}", "take a `state_id` of the list")
    total = len(state.messages)
    first = max(0, total + query.start) if query.start < 0 else min(query.start, total)
    blocks = [_blocks(message, f"{first + n}") for n, message in enumerate(state.messages[first:][: query.limit])]
    count = fitting(blocks)
    return StateView(
        state_id=state_id,
        row=listed[0],
        messages=tuple(block for message in blocks[:count] for block in message),
        action=_action(state.student_action),
        first=first,
        total=total,
    )


def _states(store: Store, where: str) -> Iterator[TraceState]:
    for trace in trace_store.traces(store.sessions, where=where):
        yield from expand(trace)


# --- messages as blocks --------------------------------------------------------------------------------


def _block(ref: str, role: str, kind: Any, text: str, **more: Any) -> BlockView:
    return BlockView(ref=ref, role=role, kind=kind, text=text[:TEXT_CHARACTERS], text_size=len(text), **more)


def _call(ref: str, call: dict[str, Any]) -> BlockView:
    function: dict[str, Any] = call.get("function") or {}
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return BlockView(
        ref=ref,
        role="assistant",
        kind="tool_use",
        id=str(call.get("id") or "")[:500],
        name=str(function.get("name") or "")[:500],
        arguments=text[:TEXT_CHARACTERS],
        arguments_size=len(text),
    )


def _blocks(message: Message, ref: str) -> list[BlockView]:
    """Convert a chat message to blocks."""
    role = str(message.get("role", ""))
    blocks: list[BlockView] = []
    if thinking := message.get("reasoning_content"):
        blocks.append(_block(f"{ref}/thinking", role, "thinking", str(thinking)))
    text = text_of(message.get("content"))
    if role == "tool":
        blocks.append(
            _block(f"{ref}/result", role, "tool_result", text, id=str(message.get("tool_call_id") or ""))
        )
    elif text:
        blocks.append(_block(f"{ref}/text", role, "text", text))
    calls: Iterable[dict[str, Any]] = message.get("tool_calls") or ()
    return [*blocks, *(_call(f"{ref}/call/{number}", call) for number, call in enumerate(calls))]


def _action(action: TurnAction) -> tuple[BlockView, ...]:
    blocks: list[BlockView] = []
    if action.thinking:
        blocks.append(_block("action/thinking", "assistant", "thinking", action.thinking))
    if action.content:
        blocks.append(_block("action/text", "assistant", "text", action.content))
    return (*blocks, *(_call(f"action/call/{number}", call) for number, call in enumerate(action.tool_calls)))


# --- pairs ---------------------------------------------------------------------------------------------


def pair_page(store: Store, query: PairQuery, votes: Sequence[VoteView]) -> PairPage:
    """Return some of a store's preference pairs, as `understudy pairs --unredacted` makes them."""
    tally, checks = PairCounts(), Checks(honours_votes=False)
    if query.origin == "replay":
        pairs_made = replay_pairs(store, checked=checks, tally=tally)
    else:
        pairs_made = rollout_pairs(store, checked=checks, tally=tally)
    by_pair: dict[str, list[VoteView]] = {}
    for vote in votes:
        by_pair.setdefault(vote.subject_id, []).append(vote)
    pairs: list[PairView] = []
    chosen = list(islice(pairs_made, query.start, query.start + query.limit + 1))
    for pair in chosen[: query.limit]:
        tail = pair.messages[-_PROMPT_TAIL:]
        first = len(pair.messages) - len(tail)
        prompt = [block for n, message in enumerate(tail) for block in _blocks(message, f"{first + n}")]
        pairs.append(
            PairView(
                id=pair.pair_id,
                origin=pair.origin,
                prompt=tuple(prompt),
                prompt_messages=len(pair.messages),
                chosen=_action(pair.chosen),
                rejected=_action(pair.rejected),
                evidence=pair.evidence,
                votes=tuple(by_pair.get(pair.pair_id, ())),
            )
        )
    count = fitting(pairs)
    return PairPage(
        pairs=tuple(pairs[:count]),
        start=query.start,
        next=query.start + count if count and len(chosen) > count else None,
        compared=tally.compared,
        left_out=dict(tally.left_out),
    )


# --- redaction -----------------------------------------------------------------------------------------


def redaction_view(store: Store, turns: Sequence[TurnView] | None, samples: int) -> RedactionView:
    """Return what redaction would replace in a rollout's transcript, or in the first conversations of a store."""
    conversations = islice(_conversations(store, turns), _PREVIEWED)
    preview = preview_redaction(conversations, Redactor.from_user_key(), samples=samples)
    return RedactionView(
        conversations=preview.conversations,
        characters=preview.characters,
        replaced=preview.replaced,
        values=preview.values,
        samples=tuple(
            RedactionLine(rule=each.rule, conversation=each.where, context=each.context)
            for each in preview.samples
        ),
    )


def _conversations(store: Store, turns: Sequence[TurnView] | None) -> Iterator[Conversation]:
    if turns is not None:
        texts: list[Any] = []
        for turn in turns:
            for block in (*turn.asked, *turn.answered):
                texts += [text for text in (block.text, block.arguments) if text]
        yield "this rollout", texts
        return
    yield from trace_conversations(trace_store.traces(store.sessions, limit=_PREVIEWED * 20))
    if store.runs.all():
        rollouts = Corpus(store, ExportSelection(origins=("rollouts",)), unredacted=True)
        yield from ((one.example_id, [one.messages]) for one in rollouts.examples())


def agreement(votes: Sequence[VoteView]) -> tuple[float | None, int]:
    """Return the share of pairs of votes on one subject that agree (None without such pairs), and the number of
    subjects.
    """
    labels: dict[tuple[str, str], list[str]] = {}
    for vote in votes:
        labels.setdefault((vote.subject, vote.subject_id), []).append(vote.label)
    same = together = 0
    for each in labels.values():
        together += len(each) * (len(each) - 1) // 2
        same += sum(count * (count - 1) // 2 for count in Counter(each).values())
    return (same / together if together else None), len(labels)
