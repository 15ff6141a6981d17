"""Logged conversations, their states, preference pairs, and how far those who vote on them agree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from understudy.ingest import trace_store
from understudy.ingest.trace import Message, TraceState, TurnAction, expand, text_of
from understudy.preference.checks import Checks, Pair, PairCounts
from understudy.preference.pairs import replay_pairs
from understudy.preference.rollouts import rollout_pairs
from understudy.store import Store
from understudy.store.votes import CHOSEN
from understudy.view.faults import ViewRefused, not_found
from understudy.view.paging import MAX_ROW_BYTES, invalid_cursor, rows_that_fit, shortened, size_of
from understudy.view.routes import PairQuery, SessionFilter, StateFilter, StateQuery
from understudy.view.schema import TEXT_CHARACTERS
from understudy.view.schema.actions import VoteView
from understudy.view.schema.rollouts import BlockView
from understudy.view.schema.sessions import (
    PairPage,
    PairView,
    SessionPage,
    StatePage,
    StateView,
)
from understudy.view.transcripts import fit_blocks

_SHOWN_PROMPT_MESSAGES = 6
PAIR_LABELS = (CHOSEN, "rejected", "skip")


def session_page(store: Store, query: SessionFilter) -> SessionPage:
    """Return a page of conversations in the order in which they were stored."""
    after = _cursor_number(query.cursor)
    listed, total = store.session_lists.traces(
        after, query.limit + 1, project=query.project, agent=query.agent, log_format=query.format, text=query.q
    )
    rows = rows_that_fit([row for _, row in listed[: query.limit]])
    more = len(listed) > len(rows) > 0
    return SessionPage(sessions=rows, total=total, next=str(listed[len(rows) - 1][0]) if more else None)


def state_page(store: Store, query: StateFilter) -> StatePage:
    """Return a page of states in the order of their conversations. Raises ConfigError for an invalid condition."""
    start = _cursor_number(query.cursor)
    listed, total = store.session_lists.states(start, query.limit, trace_id=query.trace, where=query.where)
    rows = rows_that_fit(listed)
    after = start + len(rows)
    return StatePage(states=rows, total=total, next=str(after) if rows and after < total else None)


def _cursor_number(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not cursor.isdecimal() or len(cursor) > 15:
        raise invalid_cursor(cursor)
    return int(cursor)


def state_view(store: Store, state_id: str, query: StateQuery) -> StateView:
    """Return a state with some of its messages. Raises ViewRefused if there is none."""
    quoted = state_id.replace("'", "''")
    listed, _ = store.session_lists.states(0, 1, where=f"state_id = '{quoted}'")
    state = next(_states(store, f"state_id = '{quoted}'"), None) if listed else None
    if state is None:
        raise not_found(f"the store has no state {state_id[:100]!r}", "give a `state_id` from the list of states")
    total = len(state.messages)
    first = max(0, total + query.start) if query.start < 0 else min(query.start, total)
    row, action = (
        shortened(listed[0], MAX_ROW_BYTES // 4),
        fit_blocks(_action_blocks(state.student_action), MAX_ROW_BYTES // 4),
    )
    room = MAX_ROW_BYTES // 2
    messages: list[BlockView] = []
    end = first
    for message in state.messages[first:][: query.limit]:
        blocks = fit_blocks(_message_blocks(message, f"{end}"), MAX_ROW_BYTES // 2)
        room -= size_of(blocks)
        if room < 0 and messages:
            break
        messages += blocks
        end += 1
    return StateView(
        state_id=state_id,
        row=row,
        messages=tuple(messages),
        action=action,
        first=first,
        total=total,
        next=end if end < total else None,
    )


def _states(store: Store, where: str) -> Iterator[TraceState]:
    for trace in trace_store.traces(store.sessions, where=where):
        yield from expand(trace)


# --- messages as blocks --------------------------------------------------------------------------------


def _text_block(ref: str, role: str, kind: Any, text: str, **more: Any) -> BlockView:
    return BlockView(ref=ref, role=role, kind=kind, text=text[:TEXT_CHARACTERS], text_size=len(text), **more)


def _call_block(ref: str, call: dict[str, Any]) -> BlockView:
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


def _message_blocks(message: Message, ref: str) -> list[BlockView]:
    """Convert a chat message to blocks."""
    role = str(message.get("role", ""))
    blocks: list[BlockView] = []
    if thinking := message.get("reasoning_content"):
        blocks.append(_text_block(f"{ref}/thinking", role, "thinking", str(thinking)))
    text = text_of(message.get("content"))
    if role == "tool":
        blocks.append(
            _text_block(f"{ref}/result", role, "tool_result", text, id=str(message.get("tool_call_id") or ""))
        )
    elif text:
        blocks.append(_text_block(f"{ref}/text", role, "text", text))
    calls: Iterable[dict[str, Any]] = message.get("tool_calls") or ()
    return [*blocks, *(_call_block(f"{ref}/call/{number}", call) for number, call in enumerate(calls))]


def _action_blocks(action: TurnAction) -> tuple[BlockView, ...]:
    blocks: list[BlockView] = []
    if action.thinking:
        blocks.append(_text_block("action/thinking", "assistant", "thinking", action.thinking))
    if action.content:
        blocks.append(_text_block("action/text", "assistant", "text", action.content))
    return (
        *blocks,
        *(_call_block(f"action/call/{number}", call) for number, call in enumerate(action.tool_calls)),
    )


# --- pairs ---------------------------------------------------------------------------------------------


def pair_page(store: Store, query: PairQuery) -> PairPage:
    """Return some of a store's preference pairs, as `understudy pairs --unredacted` makes them."""
    tally, checks = PairCounts(), Checks(honours_votes=False)
    if query.origin == "replay":
        all_pairs = replay_pairs(store, checked=checks, tally=tally)
    else:
        all_pairs = rollout_pairs(store, checked=checks, tally=tally)
    pairs: list[PairView] = []
    selected = list(islice(all_pairs, query.start, query.start + query.limit + 1))
    for pair in selected[: query.limit]:
        tail = pair.messages[-_SHOWN_PROMPT_MESSAGES:]
        first = len(pair.messages) - len(tail)
        prompt = [block for n, message in enumerate(tail) for block in _message_blocks(message, f"{first + n}")]
        pairs.append(
            PairView(
                id=pair.pair_id,
                origin=pair.origin,
                prompt=fit_blocks(prompt, MAX_ROW_BYTES // 4),
                prompt_messages=len(pair.messages),
                chosen=fit_blocks(_action_blocks(pair.chosen), MAX_ROW_BYTES // 4),
                rejected=fit_blocks(_action_blocks(pair.rejected), MAX_ROW_BYTES // 4),
                evidence=pair.evidence,
            )
        )
    shown = rows_that_fit(pairs)
    return PairPage(
        pairs=shown,
        start=query.start,
        next=query.start + len(shown) if 0 < len(shown) < len(selected) else None,
        compared=tally.compared,
        left_out=dict(tally.left_out),
    )


class ShownPairs:
    """The pairs that were shown, by store: making all of them again for each vote on one takes too long."""

    def __init__(self) -> None:
        self._pair_ids: dict[str, set[str]] = {}

    def remember(self, store_id: str, pair_ids: Iterable[str]) -> None:
        """Add pairs of a store."""
        self._pair_ids.setdefault(store_id, set()).update(pair_ids)

    def check_vote(self, store_id: str, store: Store, pair_id: str, label: str) -> None:
        """Raise ViewRefused for a label that is not one of a pair, and if the store has no such pair."""
        if label not in PAIR_LABELS:
            raise ViewRefused(
                400,
                "label",
                f"label: a pair is voted {', '.join(PAIR_LABELS[:-1])} or {PAIR_LABELS[-1]}, got {label!r}",
                "`exclude` and `include` are for rollouts, with `subject` rollout",
            )
        shown = self._pair_ids.get(store_id, ())
        if pair_id not in shown and pair_id not in (pair.pair_id for pair in _all_pairs(store)):
            raise not_found(
                f"the store has no pair {pair_id[:100]!r} to vote on", "take an `id` of its pairs; reload the list"
            )
        self.remember(store_id, [pair_id])


def _all_pairs(store: Store) -> Iterator[Pair]:
    for make in (rollout_pairs, replay_pairs):
        yield from make(store, checked=Checks(honours_votes=False), tally=PairCounts())


def agreement(votes: Sequence[VoteView]) -> tuple[float | None, int]:
    """Return the share of pairs of votes on one subject that agree (None without such pairs), and the number of
    subjects.
    """
    labels: dict[tuple[str, str], list[str]] = {}
    for vote in votes:
        labels.setdefault((vote.subject, vote.subject_id), []).append(vote.label)
    agreeing = vote_pairs = 0
    for label in labels.values():
        vote_pairs += len(label) * (len(label) - 1) // 2
        agreeing += sum(count * (count - 1) // 2 for count in Counter(label).values())
    return (agreeing / vote_pairs if vote_pairs else None), len(labels)
