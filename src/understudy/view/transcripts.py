"""The calls of an attempt as turns: read once, cut down to what each call adds, and remembered for a while.

A call's request repeats the whole conversation; a turn has what is new in it. So a remembered transcript takes the
length of the conversation, not its square.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from understudy.store import Store
from understudy.trajectory.samples import Segment, merge
from understudy.trajectory.tree import Node, build
from understudy.types import CallStatus, ErrorInfo, PolicySpan, Usage
from understudy.view.faults import missing
from understudy.view.index import fitting
from understudy.view.schema import PAGE_BYTES, TEXT_CHARACTERS
from understudy.view.schema.rollouts import (
    BlockView,
    BranchView,
    CallLine,
    CallPage,
    SegmentView,
    TextRange,
    TurnPage,
    TurnView,
)
from understudy.wire.model import Block

_SHORT = 300
"""Where a turn's blocks would not fit into a page, so much of each text is shown."""


class TranscriptTurn(Struct, frozen=True, kw_only=True):
    """A call without the conversation before it; fields as in `TurnView`, blocks whole."""

    index: int
    call_id: str
    sequence: int
    branch: str
    role: str
    status: CallStatus
    requested_model: str
    model: str
    backend: str
    started_at: float
    ended_at: float
    system: tuple[str, ...]
    asked: tuple[Block, ...]
    answered: tuple[Block, ...]
    usage: Usage
    has_tokens: bool
    spans: tuple[PolicySpan, ...]
    policy_version: str | None
    finish_reason: str | None
    cost_usd: float | None
    superseded: bool
    alternative: bool
    parent: str | None
    spawned_by: str | None
    continues: str | None
    origin: str
    error: ErrorInfo | None

    @property
    def policy_versions(self) -> tuple[str, ...]:
        """The versions of the weights that sampled it, in order."""
        if self.spans:
            return tuple(dict.fromkeys(span.version for span in self.spans))
        return () if self.policy_version is None else (self.policy_version,)

    def characters(self) -> int:
        """About how much memory its texts take."""
        blocks = (*self.asked, *self.answered)
        return 500 + sum(map(len, self.system)) + sum(len(each.text) + len(each.arguments) for each in blocks)


class Transcript(Struct, frozen=True, kw_only=True):
    """An attempt's turns in the order of its calls, and its token sequences."""

    turns: tuple[TranscriptTurn, ...]
    segments: tuple[Segment, ...]
    reasons: dict[str, int]

    def turn(self, call_id: str) -> TranscriptTurn:
        """The turn of a call. Raises ViewRefused where there is none."""
        for turn in self.turns:
            if turn.call_id == call_id:
                return turn
        raise missing(f"this attempt has no call {call_id[:100]!r}", "take a `call_id` of its turns")

    def of_branch(self, branch: str | None) -> Sequence[TranscriptTurn]:
        """The turns of a branch, or all."""
        return self.turns if branch is None else [turn for turn in self.turns if turn.branch == branch]


class TranscriptCache:
    """The transcripts that were read last, up to `limit` characters of them. Safe to use from many threads."""

    def __init__(self, limit: int = 40_000_000) -> None:
        self._limit = limit
        self._size = 0
        self._lock = threading.Lock()
        self._transcripts: OrderedDict[tuple[str, str], tuple[int, int, Transcript]] = OrderedDict()

    def read(self, store: Store, key: str, attempt_id: str) -> Transcript:
        """The transcript of an attempt as it is now. Raises StoreError."""
        calls = store.calls.usage(attempt_id).calls
        name = (key, attempt_id)
        with self._lock:
            if (cached := self._transcripts.get(name)) is not None and cached[0] == calls:
                self._transcripts.move_to_end(name)
                return cached[2]
        transcript = read_transcript(store, attempt_id)
        size = sum(turn.characters() for turn in transcript.turns)
        size += sum(40 * len(segment.token_ids) for segment in transcript.segments)
        with self._lock:
            if (old := self._transcripts.pop(name, None)) is not None:
                self._size -= old[1]
            self._transcripts[name] = (len(transcript.turns), size, transcript)
            self._size += size
            while self._size > self._limit and len(self._transcripts) > 1:
                self._size -= self._transcripts.popitem(last=False)[1][1]
        return transcript


def read_transcript(store: Store, attempt_id: str) -> Transcript:
    """The transcript of an attempt. Raises StoreError."""
    trajectory = build(store.calls.of_attempt(attempt_id))
    merged = merge(trajectory)
    return Transcript(
        turns=tuple(_turn(index, node) for index, node in enumerate(trajectory.nodes)),
        segments=merged.segments,
        reasons=merged.reasons,
    )


def _turn(index: int, node: Node) -> TranscriptTurn:
    call = node.call
    # A superseded call's request is shown with the call that was made in its place.
    fresh = () if node.superseded else node.conversation.blocks[node.fresh :]
    return TranscriptTurn(
        index=index,
        call_id=call.id,
        sequence=call.sequence,
        branch=node.branch,
        role=node.role,
        status=call.status,
        requested_model=call.requested_model,
        model=call.backend_model,
        backend=call.backend,
        started_at=call.started_at,
        ended_at=call.ended_at,
        system=node.conversation.instructions if node.parent is None else (),
        asked=tuple(block for block in fresh if block.role != "assistant"),
        answered=node.answer or (),
        usage=call.usage,
        has_tokens=call.completion_token_ids is not None,
        spans=call.policy_spans,
        policy_version=call.policy_version,
        finish_reason=call.finish_reason,
        cost_usd=call.cost_usd,
        superseded=node.superseded,
        alternative=node.alternative,
        parent=_call_id(node.parent),
        spawned_by=_call_id(node.spawned_by),
        continues=_call_id(node.continues),
        origin=node.origin or "",
        error=call.error,
    )


def _call_id(node: Node | None) -> str | None:
    return None if node is None else node.call.id


# --- views ---------------------------------------------------------------------------------------------


def turn_page(transcript: Transcript, branch: str | None, start: int, limit: int) -> TurnPage:
    """Turns of a branch, or all, from `start` on, as many as a page has room for."""
    turns = transcript.of_branch(branch)
    views: list[TurnView] = []
    room = PAGE_BYTES - 2_000
    for turn in turns[start : start + limit]:
        view = turn_view(turn)
        size = len(_encoded(view))
        if size > room and not views:
            view = _shortened(turn)
            size = len(_encoded(view))
        if size > room and views:
            break
        views.append(view)
        room -= size + 1
    after = start + len(views)
    return TurnPage(
        turns=tuple(views), start=start, total=len(turns), next=after if views and after < len(turns) else None
    )


def _encoded(view: object) -> bytes:
    try:
        return msgspec.json.encode(view)
    except UnicodeEncodeError:
        return b" " * (6 * len(str(view)))


def _shortened(turn: TranscriptTurn) -> TurnView:
    """A turn that a page has room for: short texts, and only the last of what was asked."""
    view = turn_view(turn, _SHORT)
    room = PAGE_BYTES - 10_000 - len(_encoded(msgspec.structs.replace(view, asked=())))
    asked: list[BlockView] = []
    for block in reversed(view.asked):
        room -= len(_encoded(block)) + 1
        if room < 0:
            break
        asked.append(block)
    left_out = len(view.asked) - len(asked)
    return msgspec.structs.replace(view, asked=tuple(reversed(asked)), left_out=left_out)


def turn_view(turn: TranscriptTurn, cut: int = TEXT_CHARACTERS) -> TurnView:
    """A turn with texts of at most `cut` characters."""
    system = tuple(
        block_view(Block(0, "system", "text", text=text), f"{turn.call_id}/system/{number}", cut)
        for number, text in enumerate(turn.system)
    )
    plain = {name: getattr(turn, name) for name in _SAME}
    return TurnView(
        **plain,
        asked=(*system, *_views(turn.asked, f"{turn.call_id}/asked", cut)),
        answered=_views(turn.answered, f"{turn.call_id}/answered", cut),
        left_out=0,
        policy_versions=turn.policy_versions,
    )


_SAME = (
    "index", "call_id", "sequence", "branch", "role", "status", "requested_model", "model", "backend",
    "started_at", "ended_at", "usage", "has_tokens", "finish_reason", "cost_usd", "superseded", "alternative",
    "parent", "spawned_by", "continues", "error",
)  # fmt: skip


def _views(blocks: Sequence[Block], prefix: str, cut: int) -> tuple[BlockView, ...]:
    return tuple(block_view(block, f"{prefix}/{number}", cut) for number, block in enumerate(blocks))


def block_view(block: Block, ref: str, cut: int = TEXT_CHARACTERS) -> BlockView:
    """A block with a text of at most `cut` characters."""
    return BlockView(
        ref=ref,
        role=block.role,
        kind=block.kind,
        text=block.text[:cut],
        text_size=len(block.text),
        id=block.id[:500],
        name=block.name[:500],
        arguments=block.arguments[:cut],
        arguments_size=len(block.arguments),
        is_error=block.is_error,
        malformed=block.is_malformed,
        images=len(block.images),
    )


def body_range(transcript: Transcript, ref: str, field: str, offset: int, length: int) -> TextRange:
    """A part of a block's text or arguments. Raises ViewRefused for a `ref` that names none."""
    call_id, _, rest = ref.rpartition("/")
    call_id, _, part = call_id.rpartition("/")
    turn = transcript.turn(call_id)
    texts: dict[str, list[str]] = {
        "system": list(turn.system) if field == "text" else [""] * len(turn.system),
        "asked": [getattr(block, field) for block in turn.asked],
        "answered": [getattr(block, field) for block in turn.answered],
    }
    if part not in texts or not rest.isdecimal() or int(rest) >= len(texts[part]):
        raise missing(f"ref: {ref[:100]!r} names no block of this attempt", "take the `ref` of a block of a turn")
    return text_range(texts[part][int(rest)], offset, length)


def text_range(text: str, offset: int, length: int) -> TextRange:
    """A part of a text that a page has room for."""
    part = text[offset : offset + length]
    while len(_encoded(part)) > PAGE_BYTES - 2_000:
        part = part[: len(part) // 2]
    after = offset + len(part)
    return TextRange(text=part, offset=offset, size=len(text), next=after if part and after < len(text) else None)


def call_page(transcript: Transcript, branch: str | None, start: int, limit: int) -> CallPage:
    """Calls of a branch, or all, a line each."""
    turns = transcript.of_branch(branch)
    lines = [
        CallLine(
            index=turn.index,
            call_id=turn.call_id,
            branch=turn.branch,
            role=turn.role,
            status=turn.status,
            started_at=turn.started_at,
            ended_at=turn.ended_at,
            prompt_tokens=turn.usage.prompt_tokens,
            completion_tokens=turn.usage.completion_tokens,
            tools=tuple(block.name[:100] for block in turn.answered if block.kind == "tool_use")[:50],
            superseded=turn.superseded,
        )
        for turn in turns[start : start + limit]
    ]
    count = fitting(lines)
    after = start + count
    return CallPage(
        calls=tuple(lines[:count]),
        start=start,
        total=len(turns),
        next=after if count and after < len(turns) else None,
    )


def branch_views(transcript: Transcript) -> tuple[BranchView, ...]:
    """A line for each branch, in the order of their first calls."""
    by_call = {turn.call_id: turn for turn in transcript.turns}
    branches: dict[str, list[TranscriptTurn]] = {}
    for turn in transcript.turns:
        branches.setdefault(turn.branch, []).append(turn)
    above = {name: _above(turns[0], branches, by_call) for name, turns in branches.items()}
    return tuple(_branch_view(name, turns, above) for name, turns in branches.items())


def _above(
    first: TranscriptTurn, branches: dict[str, list[TranscriptTurn]], by_call: dict[str, TranscriptTurn]
) -> str | None:
    """The branch that one hangs under. What goes on after a compaction stands beside what was summed up."""
    while first.continues is not None and (before := by_call[first.continues].parent) is not None:
        first = branches[by_call[before].branch][0]
    call_id = first.spawned_by or first.parent
    return None if call_id is None else by_call[call_id].branch


def _branch_view(name: str, turns: Sequence[TranscriptTurn], above: dict[str, str | None]) -> BranchView:
    first = turns[0]
    depth, at = 0, above[name]
    while at is not None and depth < len(above):
        depth, at = depth + 1, above[at]
    costs = [turn.cost_usd for turn in turns if turn.cost_usd is not None]
    return BranchView(
        name=name,
        role=first.role,
        above=above[name],
        depth=depth,
        origin=first.origin,
        calls=len(turns),
        superseded=all(turn.superseded for turn in turns),
        first_turn=first.index,
        started_at=min(turn.started_at for turn in turns),
        ended_at=max(turn.ended_at for turn in turns),
        prompt_tokens=sum(turn.usage.prompt_tokens for turn in turns),
        completion_tokens=sum(turn.usage.completion_tokens for turn in turns),
        cost_usd=sum(costs) if costs else None,
        spawned_by=first.spawned_by,
        continues=first.continues,
    )


def segment_views(transcript: Transcript) -> tuple[SegmentView, ...]:
    """The token sequences, and why each begins where it does."""
    return tuple(segment_view(index, segment) for index, segment in enumerate(transcript.segments))


def segment_view(index: int, segment: Segment) -> SegmentView:
    """One token sequence without its tokens."""
    return SegmentView(
        index=index,
        reason=segment.reason,
        branch=segment.branch,
        role=segment.role,
        call_ids=segment.call_ids,
        tokens=len(segment.token_ids),
        sampled=sum(segment.loss_mask),
        superseded=segment.superseded,
    )
