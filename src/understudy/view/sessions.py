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
from understudy.view.faults import ViewRefused, missing
from understudy.view.paging import ROOM, fit, invalid_cursor, shortened, size_of
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

_PROMPT_TAIL = 6
PAIR_LABELS = (CHOSEN, "rejected", "skip")


def session_page(store: Store, query: SessionFilter) -> SessionPage:
    """Return a page of conversations in the order in which they were stored."""
    after = _number(query.cursor)
    listed, total = store.session_lists.traces(
        after, query.limit + 1, project=query.project, agent=query.agent, log_format=query.format, text=query.q
    )
    rows = fit([row for _, row in listed[: query.limit]])
    more = len(listed) > len(rows) > 0
    return SessionPage(sessions=rows, total=total, next=str(listed[len(rows) - 1][0]) if more else None)


def state_page(store: Store, query: StateFilter) -> StatePage:
    """Return a page of states in the order of their conversations. Raises ConfigError for an invalid condition."""
    start = _number(query.cursor)
    listed, total = store.session_lists.states(start, query.limit, trace_id=query.trace, where=query.where)
    rows = fit(listed)
    after = start + len(rows)
    return StatePage(states=rows, total=total, next=str(after) if rows and after < total else None)


def _number(cursor: str | None) -> int:
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
        raise missing(f"the store has no state {state_id[:100]!r}", "give a `state_id` from the list of states")
    total = len(state.messages)
    first = max(0, total + query.start) if query.start < 0 else min(query.start, total)
    row, action = shortened(listed[0], ROOM // 4), fit_blocks(_action(state.student_action), ROOM // 4)
    room = ROOM // 2
    messages: list[BlockView] = []
    end = first
    for message in state.messages[first:][: query.limit]:
        blocks = fit_blocks(_blocks(message, f"{end}"), ROOM // 2)
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


def pair_page(store: Store, query: PairQuery) -> PairPage:
    """Return some of a store's preference pairs, as `understudy pairs --unredacted` makes them."""
    tally, checks = PairCounts(), Checks(honours_votes=False)
    if query.origin == "replay":
        pairs_made = replay_pairs(store, checked=checks, tally=tally)
    else:
        pairs_made = rollout_pairs(store, checked=checks, tally=tally)
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
                prompt=fit_blocks(prompt, ROOM // 4),
                prompt_messages=len(pair.messages),
                chosen=fit_blocks(_action(pair.chosen), ROOM // 4),
                rejected=fit_blocks(_action(pair.rejected), ROOM // 4),
                evidence=pair.evidence,
            )
        )
    shown = fit(pairs)
    return PairPage(
        pairs=shown,
        start=query.start,
        next=query.start + len(shown) if 0 < len(shown) < len(chosen) else None,
        compared=tally.compared,
        left_out=dict(tally.left_out),
    )


class KnownPairs:
    """The pairs that were shown, by store: making all of them again for each vote on one takes too long."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}

    def remember(self, store_id: str, pair_ids: Iterable[str]) -> None:
        """Add pairs of a store."""
        self._known.setdefault(store_id, set()).update(pair_ids)

    def check_vote(self, store_id: str, store: Store, pair_id: str, label: str) -> None:
        """Raise ViewRefused for a label that is not one of a pair, and if the store has no such pair."""
        if label not in PAIR_LABELS:
            raise ViewRefused(
                400,
                "label",
                f"label: a pair is voted {', '.join(PAIR_LABELS[:-1])} or {PAIR_LABELS[-1]}, got {label!r}",
                "`exclude` and `include` are for rollouts, with `subject` rollout",
            )
        known = self._known.get(store_id, ())
        if pair_id not in known and pair_id not in (each.pair_id for each in _all_pairs(store)):
            raise missing(
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
    same = together = 0
    for each in labels.values():
        together += len(each) * (len(each) - 1) // 2
        same += sum(count * (count - 1) // 2 for count in Counter(each).values())
    return (same / together if together else None), len(labels)
