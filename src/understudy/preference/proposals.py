"""Reads what teachers proposed from the calls that they answered, and what a judge chose among proposals."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct, field

from understudy.ingest.tool_lists import names_of
from understudy.ingest.trace import Message, TurnAction, tool_call
from understudy.preference.consensus import Judge, Proposal
from understudy.preference.normalise import has_unreadable_call
from understudy.store import Store
from understudy.types import Call
from understudy.wire.model import Block
from understudy.wire.stored import read_response

_CUT_OFF_REASONS = frozenset({"length"})
_WITHHELD_REASONS = frozenset({"content_filter"})
_VALID_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_INVALID = re.compile(r"[^a-zA-Z0-9_-]+")
_SUBSTITUTE_NAME = re.compile(r".*_[0-9a-f]{8}")
_NUMBER = re.compile(r"\s*(?:<choice>)?\s*(\d{1,4})\s*(?:</choice>)?\s*[.]?\s*")


class _Function(Struct):
    name: str = ""


class _Tool(Struct):
    name: str = ""
    function: _Function | None = None


class _Offered(Struct):
    tools: list[_Tool] = field(default_factory=list[_Tool])


_offered = msgspec.json.Decoder(_Offered).decode


def proposals(
    store: Store,
    state_id: str,
    *,
    replay: str | None = None,
    names: Iterable[str] = (),
    left_out: Counter[str] | None = None,
) -> list[Proposal]:
    """Return the proposals of teachers for a state, by teacher and number, of one replay or of all.

    `names` are those of the tools in the state, which a teacher may have been shown under other names (see
    `sent_name`). These answers are no proposals, and are counted in `left_out` by reason: cut off at the token
    limit (cut), withheld by the provider (withheld), empty (empty), with arguments that are not a JSON object
    (bad_arguments), with a tool that was not offered (unknown_tool), unreadable (unreadable). Raises StoreError.
    """
    result: list[Proposal] = []
    sent = {sent_name(name): name for name in names}
    asks = {
        ask.call_id: ask
        for ask in store.asks.of_state(state_id, "teacher")
        if ask.call_id is not None and ask.status == "answered" and replay in (None, ask.replay_id)
    }
    # All calls at once: they share most of their request, which is then read once.
    calls = {call.id: call for call in store.calls.with_ids(list(asks))}
    for call_id, ask in asks.items():
        action, why = action_of(calls.get(call_id) or store.calls.get(call_id), sent)
        if action is None:
            if left_out is not None:
                left_out[why] += 1
            continue
        result.append(
            Proposal(
                ask_id=ask.id,
                replay_id=ask.replay_id,
                teacher=ask.teacher,
                model=ask.model,
                family=ask.family,
                action=action,
                cost_usd=ask.cost_usd,
            )
        )
    return result


@cache
def sent_name(name: str) -> str:
    """Return the name of a tool in requests to teachers: its own if every API accepts it, otherwise a similar one.

    OpenAI and Anthropic refuse long names, and names with other characters than letters, digits, `_` and `-`.
    """
    if _VALID_NAME.fullmatch(name):
        return name
    mark = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    return f"{_INVALID.sub('_', name)[:55]}_{mark}"


def names_in(messages: Iterable[Message], tools: Iterable[dict[str, Any]] | None) -> set[str]:
    """Return the names of the tools that are offered, or called in messages."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return names_of((*calls, *(tools or ())))


def action_of(call: Call, sent: Mapping[str, str]) -> tuple[TurnAction | None, str]:
    """Return the action of an answered call; or None, and the reason why it is no proposal (see `proposals`).

    `sent` maps the names of tools that the teacher was shown to the names in the state.
    """
    blocks = read_response(call)
    if blocks is None:
        return None, "unreadable"
    if call.finish_reason in _CUT_OFF_REASONS:
        return None, "cut"
    if call.finish_reason in _WITHHELD_REASONS:
        return None, "withheld"
    action = action_in(blocks, sent)
    if not action.tool_calls and not (action.content or "").strip():
        return None, "empty"
    if has_unreadable_call(action):
        return None, "bad_arguments"
    names = {block.name for block in blocks if block.kind == "tool_use"}
    lost = any(name not in sent and _SUBSTITUTE_NAME.fullmatch(name) for name in names)
    return (None, "unknown_tool") if lost or not names <= _tools_of(call) else (action, "")


def action_in(blocks: Sequence[Block], names: Mapping[str, str] = MappingProxyType({})) -> TurnAction:
    """Return the action of an answer. `names` maps names of tools to others."""
    texts = [block.text for block in blocks if block.kind == "text" and block.text]
    thought = [block.text for block in blocks if block.kind == "thinking" and block.text]
    hidden = any(block.kind == "thinking" or block.name == "redacted_thinking" for block in blocks)
    return TurnAction(
        content="\n".join(texts) or None,
        thinking="\n".join(thought) or None,
        thinking_hidden=hidden and not thought,
        tool_calls=[
            tool_call(b.id, names.get(b.name, b.name), b.arguments) for b in blocks if b.kind == "tool_use"
        ],
    )


def _tools_of(call: Call) -> set[str]:
    try:
        offered = _offered(call.request)
    except msgspec.MsgspecError:
        return set()
    return {tool.function.name if tool.function else tool.name for tool in offered.tools}


# --- the judge -----------------------------------------------------------------------------------------


def judge_ask_id(replay_id: str, state_id: str, judge: str, ask_ids: Sequence[str]) -> str:
    """Return the id of the ask in which a judge chooses among these proposals. It depends on them, and on the
    judge (its `teacher` and `model`, joined by `judge_name`).
    """
    encoded = msgspec.json.encode([replay_id, state_id, judge, sorted(ask_ids)])
    return hashlib.blake2b(encoded, digest_size=16, person=b"judge").hexdigest()


def judge_name(teacher: str, model: str) -> str:
    """Return the name of a judge in the ids of its asks."""
    return f"{teacher}/{model}"


def shown_order(ask_id: str, ask_ids: Sequence[str]) -> list[str]:
    """Return the order in which proposals are shown to a judge: random, but always the same for an ask."""
    order = sorted(ask_ids)
    random.Random(ask_id).shuffle(order)
    return order


def judged(store: Store, state_id: str, candidates: Sequence[Proposal]) -> int | None:
    """Return the index of the proposal that a judge chose; None if no judge was asked, or it chose none.

    Raises StoreError.
    """
    ids = [proposal.ask_id for proposal in candidates]
    for ask in store.asks.of_state(state_id, "judge"):
        name = judge_name(ask.teacher, ask.model)
        if ask.call_id is None or ask.id != judge_ask_id(ask.replay_id, state_id, name, ids):
            continue
        if (chosen := choice(store.calls.get(ask.call_id), len(ids))) is not None:
            return ids.index(shown_order(ask.id, ids)[chosen])
    return None


def judge_of(store: Store, state_id: str) -> Judge:
    """Return a judge for `consensus`: it returns what was chosen when the replay asked about the state."""
    return lambda groups: judged(store, state_id, [group.proposal for group in groups])


def choice(call: Call, count: int) -> int | None:
    """Return the index of the proposal that a judge's answer names; None if it is anything but a valid number."""
    blocks = read_response(call) or ()
    answer_text = "".join(block.text for block in blocks if block.kind == "text")
    number = _NUMBER.fullmatch(answer_text)
    if number is None or call.finish_reason in _CUT_OFF_REASONS or not 1 <= int(number[1]) <= count:
        return None
    return int(number[1]) - 1
