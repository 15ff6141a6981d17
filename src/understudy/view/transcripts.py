"""The calls of an attempt as turns: read in batches, reduced to what each call adds, and cached for a while.

A call's request repeats the whole conversation; a turn has only what is new in it, and only the beginning of long
texts. So reading takes time linear in the conversation's length, and the first turns can be shown before the last
are read. The rest of a text, and tokens, are read on request.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice

import msgspec

from understudy.store import Store
from understudy.store.calls import RequestTree
from understudy.trajectory.samples import Outlined, Segment, SegmentOutline, outline
from understudy.trajectory.tree import Node, Trajectory, TreeBuilder
from understudy.types import Call
from understudy.view.faults import not_found
from understudy.view.paging import MAX_ROW_BYTES, rows_that_fit, shortened, size_of
from understudy.view.routes import BodyQuery
from understudy.view.schema import TEXT_CHARACTERS
from understudy.view.schema.rollouts import (
    BlockView,
    BranchView,
    CallLine,
    CallPage,
    GroupTurn,
    ImageView,
    SegmentView,
    TextRange,
    TurnPage,
    TurnView,
)
from understudy.wire.decoding import UNREADABLE
from understudy.wire.model import Block, Conversation, Part, image_url
from understudy.wire.stored import (
    CutText,
    RequestReader,
    estimated_characters,
    image_data,
    read_request,
    read_response,
)

_SHORT_TEXT_CHARACTERS = 300
"""If a turn's blocks do not fit on a page, this many characters of each text are shown."""
_MAX_IMAGES = 50
"""As many of a shortened block's images are shown."""
_NO_LIMIT = 1 << 53
_MAX_ACTION_CHARACTERS = 160
_BATCH_CALLS = 100
"""How many calls are read at once."""
_PAUSE_S = 0.0005
"""How many seconds the lock of a transcript is released between batches, so that waiting threads can get it."""
_CACHE_CHARACTERS = 12_000_000
"""About how many characters of tool results are kept per attempt.

If there are very many results, less of each is kept.
"""
MAX_ACTIONS = 200
"""The most turns of a rollout that are compared with those of others."""


class Transcript:
    """An attempt's calls read so far, in order. `total` is how many there are.

    `nodes` belong to a tree that may grow, so use them only within `TranscriptCache.reading`.
    """

    def __init__(self, nodes: tuple[Node, ...] = (), total: int = 0) -> None:
        self.nodes = nodes
        self.total = total
        self.unread = total - len(nodes)
        """How many calls of the attempt are not read yet. Some that were read may still be missing in `nodes`."""

    @cached_property
    def _by_call(self) -> dict[str, int]:
        return {node.call.id: index for index, node in enumerate(self.nodes)}

    @cached_property
    def outlined(self) -> Outlined:
        """The token sequences without their tokens."""
        return outline(Trajectory(self.nodes))

    @cached_property
    def segment_calls(self) -> tuple[str, ...]:
        """The ids of the calls of all token sequences, one sequence after the other."""
        return tuple(call_id for segment in self.outlined.segments for call_id in segment.call_ids)

    @cached_property
    def branches(self) -> tuple[BranchView, ...]:
        """A line for each branch."""
        return _branch_views(self.nodes, self._by_call)

    @cached_property
    def actions(self) -> tuple[GroupTurn, ...]:
        """One line for each of the first main turns, with one turn more than is shown."""
        main = (
            _action(index, node)
            for index, node in enumerate(self.nodes)
            if node.role == "main" and not node.superseded and not node.alternative
        )
        return tuple(islice(main, MAX_ACTIONS + 1))

    def index(self, call_id: str) -> int:
        """Return the index of a call. Raises ViewRefused if there is none."""
        index = self._by_call.get(call_id)
        if index is None:
            raise not_found(f"this attempt has no call {call_id[:100]!r}", "give a `call_id` from its turns")
        return index

    def of_branch(self, branch: str | None) -> Sequence[int]:
        """Return the indexes of a branch's calls, or of all calls."""
        if branch is None:
            return range(len(self.nodes))
        return [index for index, node in enumerate(self.nodes) if node.branch == branch]

    def turn(self, index: int, cut: int = TEXT_CHARACTERS) -> TurnView:
        """Return a call as a turn, with at most `cut` characters of each text."""
        return _turn(index, self.nodes[index], cut)


class TranscriptReader:
    """Reads the calls of an attempt in batches. Each call costs only what is new in it.

    Only the beginnings of tool results are kept, unless `whole` is set. `size` is about how many characters are
    held.
    """

    def __init__(self, attempt_id: str, *, whole: bool = False) -> None:
        self.lock = threading.Lock()
        self.size = 0
        self._attempt_id = attempt_id
        self._whole = whole
        self._begin(0)

    def _begin(self, total: int) -> None:
        self._tree = RequestTree()
        max_characters = min(TEXT_CHARACTERS, max(_SHORT_TEXT_CHARACTERS, _CACHE_CHARACTERS // max(1, total)))
        self._reader = RequestReader(self._tree.steps, None if self._whole else max_characters)
        self._builder = TreeBuilder()
        self._read = 0
        self._last = -1
        self._total = total
        self._transcript: Transcript | None = None
        self._node_characters = self.size = 0

    def read(self, store: Store, until: int | None) -> Transcript:
        """Return the transcript with at least `until` calls (default: all)."""
        needed = self.calls_needed(store, until)
        while self.read_batch(store, needed):
            pass
        return self.transcript(needed)

    def calls_needed(self, store: Store, until: int | None) -> int:
        """Return how many of the calls that exist now must be read for the first `until` calls (default: all)."""
        self._total = total = store.calls.count(self._attempt_id)
        # A call that began earlier may be stored later, but the tree needs calls in the order in which they began.
        if not self._read or store.calls.count(self._attempt_id, self._last) != self._read:
            self._begin(total)
        return total if until is None else min(total, until)

    def transcript(self, needed: int = 0) -> Transcript:
        """Return what has been read so far, with the first `needed` calls if they were read.

        Finding the branches takes time for all calls read so far. So while a long attempt is being read, they are
        found anew only when the number of calls has grown by half.
        """
        transcript = self._transcript
        if transcript is None or not self._is_enough(transcript, min(needed, self._read)):
            transcript = self._transcript = Transcript(self._builder.trajectory().nodes, self._total)
        transcript.unread = self._total - self._read
        return transcript

    def _is_enough(self, transcript: Transcript, needed: int) -> bool:
        if transcript.total != self._total or self._read == self._total:
            return (transcript.total, len(transcript.nodes)) == (self._total, self._read)
        return len(transcript.nodes) >= needed and self._read < 1.5 * len(transcript.nodes)

    def read_batch(self, store: Store, needed: int) -> bool:
        """Read the next batch of the first `needed` calls. Returns False if there is none."""
        if self._read >= needed:
            return False
        limit = min(needed - self._read, _BATCH_CALLS)
        piece = store.calls.in_parts(self._attempt_id, self._tree, self._last, limit)
        conversations: dict[str, Conversation] = {}
        for call, position in piece:
            with suppress(*UNREADABLE):
                outer = self._tree.outers[position.outer]
                conversations[call.id] = self._reader.read(
                    call.dialect, position.node, position.outer, outer, self._tree.contents
                )
        missing_ids = {call.id for call, _ in piece if call.id not in conversations}
        for call in store.calls.with_ids(tuple(missing_ids)) if missing_ids else ():
            conversations[call.id] = self._reader.whole(call)
        for call, _ in piece:
            node = self._builder.add(call, conversations[call.id])
            node.shorten()
            self._node_characters += 3_000 + estimated_characters(node.answer or ())
            if call.id in missing_ids:
                self._node_characters += estimated_characters(node.conversation.blocks)
            node.call = msgspec.structs.replace(call, response=b"")
            self._last = call.sequence
        self._read += len(piece)
        self._tree.contents = {}
        outers = sum(map(len, self._tree.outers.values()))
        self.size = self._node_characters + self._reader.characters + outers + 300 * len(self._tree.steps)
        return bool(piece)


class TranscriptCache:
    """Caches recently read transcripts, up to `limit` characters in total. Safe to use from many threads."""

    def __init__(self, limit: int = 40_000_000) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._readers: OrderedDict[tuple[str, str], TranscriptReader] = OrderedDict()

    @contextmanager
    def reading(
        self, store: Store, key: str, attempt_id: str, until: int | None = None, within_s: float | None = None
    ) -> Generator[Transcript]:
        """Yield the transcript of an attempt with at least the first `until` calls (default: all).

        `within_s` limits the reading to this many seconds, but reads at least one more batch. Raises StoreError.
        """
        with self._lock:
            reader = self._readers.get((key, attempt_id))
            if reader is None:
                reader = self._readers.setdefault((key, attempt_id), TranscriptReader(attempt_id))
            self._readers.move_to_end((key, attempt_id))
        with reader.lock:
            needed = reader.calls_needed(store, until)
        # Requests for calls that are read already do not wait for other requests.
        end = math.inf if within_s is None else time.monotonic() + within_s
        while self._read_batch(reader, store, needed) and time.monotonic() < end:
            time.sleep(_PAUSE_S)
        with reader.lock:
            yield reader.transcript(needed if within_s is None else 0)
        with self._lock:
            size = sum(reader.size for reader in self._readers.values())
            while size > self._limit and len(self._readers) > 1:
                size -= self._readers.popitem(last=False)[1].size

    def _read_batch(self, reader: TranscriptReader, store: Store, needed: int) -> bool:
        with reader.lock:
            return reader.read_batch(store, needed)


def complete_turns(store: Store, attempt_id: str) -> tuple[TurnView, ...]:
    """Return the turns of an attempt with complete texts. Raises StoreError."""
    transcript = TranscriptReader(attempt_id, whole=True).read(store, None)
    return tuple(transcript.turn(index, _NO_LIMIT) for index in range(len(transcript.nodes)))


def _request_blocks(node: Node) -> list[Block]:
    """Return what is new in a request. What a superseded call asked is shown with the call that replaced it."""
    return [] if node.superseded else _without_assistant_blocks(node.conversation.blocks[node.inherited_blocks :])


def _without_assistant_blocks(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if block.role != "assistant"]


def _turn(index: int, node: Node, cut: int) -> TurnView:
    call = node.call
    system = [
        block_view(Block(0, "system", "text", text=text), f"{call.id}/system/{number}", cut)
        for number, text in enumerate(node.conversation.instructions if node.parent is None else ())
    ]
    versions = dict.fromkeys(span.version for span in call.policy_spans)
    return TurnView(
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
        asked=(*system, *_views(_request_blocks(node), f"{call.id}/asked", cut)),
        answered=_views(node.answer or (), f"{call.id}/answered", cut),
        left_out=0,
        usage=call.usage,
        has_tokens=call.completion_token_ids is not None,
        policy_versions=tuple(versions or ([] if call.policy_version is None else [call.policy_version])),
        finish_reason=call.finish_reason,
        cost_usd=call.cost_usd,
        superseded=node.superseded,
        alternative=node.alternative,
        parent=_call_id(node.parent),
        spawned_by=_call_id(node.spawned_by),
        continues=_call_id(node.continues),
        error=call.error,
    )


def _action(index: int, node: Node) -> GroupTurn:
    """Return what a turn did on one line, and a digest of all of it."""
    parts: list[str] = []
    digest = hashlib.sha256()
    for block in node.answer or ():
        if block.kind == "tool_use":
            parts.append(f"{block.name} {block.arguments[:_MAX_ACTION_CHARACTERS]}")
            digest.update(f"\0{block.name}\0{block.arguments}".encode(errors="replace"))
        elif block.kind == "text":
            parts.append(block.text[: 4 * _MAX_ACTION_CHARACTERS])
            digest.update(f"\1{block.text.strip()}".encode(errors="replace"))
    action = " ".join(" | ".join(parts).split())
    return GroupTurn(
        call_id=node.call.id, index=index, action=action[:_MAX_ACTION_CHARACTERS], digest=digest.hexdigest()[:12]
    )


def _call_id(node: Node | None) -> str | None:
    return None if node is None else node.call.id


def segment_of(store: Store, segment: SegmentOutline) -> tuple[Segment, list[Call]]:
    """Return a segment with its tokens, and the calls that it consists of. Raises StoreError."""
    calls = store.calls.with_tokens(segment.call_ids)
    by_id = {call.id: call for call in calls}
    ordered = [by_id[call_id] for call_id in segment.call_ids]
    return segment.with_tokens(ordered), ordered


# --- views ---------------------------------------------------------------------------------------------


def turn_page(transcript: Transcript, branch: str | None, start: int, limit: int) -> TurnPage:
    """Return turns of a branch, or all turns, from `start` on, as many as fit on a page."""
    turns = transcript.of_branch(branch)
    total = transcript.total if branch is None else len(turns)
    views: list[TurnView] = []
    room = MAX_ROW_BYTES
    for index in turns[start : start + limit]:
        view = transcript.turn(index)
        size = size_of(view)
        if size > room and not views:
            view = _fitting_turn(view, room)
            size = size_of(view)
        if size > room and views:
            break
        views.append(view)
        room -= size + 1
    after = start + len(views)
    return TurnPage(turns=tuple(views), start=start, total=total, next=after if views and after < total else None)


def _fitting_turn(turn: TurnView, room: int) -> TurnView:
    """Return a turn that fits on a page: with short texts, and only the last of its request's new blocks."""
    answered = fit_blocks(turn.answered, room // 2)
    view = msgspec.structs.replace(turn, asked=(), answered=answered)
    if size_of(view) > room - 10_000:
        view = shortened(view, room - 10_000)
    room_left = room - size_of(view)
    request_views: list[BlockView] = []
    for block in map(_shortened_block, reversed(turn.asked)):
        room_left -= size_of(block) + 1
        if room_left < 0:
            break
        request_views.append(block)
    left_out = len(turn.asked) - len(request_views)
    return msgspec.structs.replace(view, asked=tuple(reversed(request_views)), left_out=left_out)


def fit_blocks(blocks: Sequence[BlockView], room: int) -> tuple[BlockView, ...]:
    """Return blocks that take at most `room` bytes: whole, else with short texts, and the first ones of too many.
    The last block then says how many are left out.
    """
    if size_of(blocks) <= room:
        return tuple(blocks)
    chosen: list[BlockView] = []
    room -= 500
    for block in map(_shortened_block, blocks):
        room -= size_of(block) + 1
        if room < 0:
            text = f"{len(blocks) - len(chosen):,} more blocks do not fit on this page and are left out"
            chosen.append(BlockView(ref="", role=block.role, kind="other", text=text, text_size=len(text)))
            break
        chosen.append(block)
    return tuple(chosen)


def _shortened_block(block: BlockView) -> BlockView:
    return msgspec.structs.replace(
        block,
        text=block.text[:_SHORT_TEXT_CHARACTERS],
        arguments=block.arguments[:_SHORT_TEXT_CHARACTERS],
        name=block.name[:_SHORT_TEXT_CHARACTERS],
        images=block.images[:_MAX_IMAGES],
    )


def _views(blocks: Sequence[Block], prefix: str, cut: int) -> tuple[BlockView, ...]:
    return tuple(block_view(block, f"{prefix}/{number}", cut) for number, block in enumerate(blocks))


def block_view(block: Block, ref: str, cut: int = TEXT_CHARACTERS) -> BlockView:
    """Return a block with at most `cut` characters of its text."""
    return BlockView(
        ref=ref,
        role=block.role,
        kind=block.kind,
        text=block.text[:cut],
        text_size=block.source.size if isinstance(block.source, CutText) else len(block.text),
        id=block.id[:500],
        name=block.name[:500],
        arguments=block.arguments[:cut],
        arguments_size=len(block.arguments),
        is_error=block.is_error,
        malformed=block.is_malformed,
        images=tuple(map(_image_view, block.images)),
    )


def _image_view(image: Part) -> ImageView:
    """Return an image without its data, whether the image is complete or cut (`cut_block`)."""
    media_type, characters = image_data(image)
    return ImageView(media_type=media_type, size=characters * 3 // 4)


def block_range(store: Store, transcript: Transcript, query: BodyQuery) -> TextRange:
    """Return part of a block's text, arguments or image. Raises ViewRefused if there is no such block."""
    ref = query.ref
    call_id, _, number = ref.rpartition("/")
    call_id, _, part = call_id.rpartition("/")
    node = transcript.nodes[transcript.index(call_id)]
    call = store.calls.get(call_id)
    conversation = read_request(call)
    fresh = len(node.conversation.blocks) - node.inherited_blocks
    blocks: dict[str, Sequence[Block]] = {
        "system": [Block(0, "system", "text", text=text) for text in conversation.instructions],
        "asked": _without_assistant_blocks(conversation.blocks[len(conversation.blocks) - fresh :]),
        "answered": read_response(call) or (),
    }
    if part not in blocks or not number.isdecimal() or int(number) >= len(blocks[part]):
        raise not_found(
            f"ref: {ref[:100]!r} names no block of this attempt", "give the `ref` of a block of one of its turns"
        )
    block = blocks[part][int(number)]
    if query.field != "image":
        return text_range(getattr(block, query.field), query.offset, query.length)
    if query.image >= len(block.images):
        raise not_found(
            f"image: there is no image {query.image}; the block has {len(block.images)}",
            "give a number below that; the first is 0",
        )
    return text_range(image_url(block.images[query.image]), query.offset, query.length)


def text_range(text: str, offset: int, length: int) -> TextRange:
    """Return the part of a text that fits on a page."""
    part = text[offset : offset + length]
    while size_of(part) > MAX_ROW_BYTES:
        part = part[: len(part) // 2]
    after = offset + len(part)
    return TextRange(text=part, offset=offset, size=len(text), next=after if part and after < len(text) else None)


def call_page(transcript: Transcript, branch: str | None, start: int, limit: int) -> CallPage:
    """Return the calls of a branch, or all calls, on one line each."""
    turns = transcript.of_branch(branch)
    total = transcript.total if branch is None else len(turns)
    lines = rows_that_fit([_call_line(index, transcript.nodes[index]) for index in turns[start : start + limit]])
    after = start + len(lines)
    return CallPage(calls=lines, start=start, total=total, next=after if lines and after < total else None)


def _call_line(index: int, node: Node) -> CallLine:
    call = node.call
    return CallLine(
        index=index,
        call_id=call.id,
        branch=node.branch,
        role=node.role,
        status=call.status,
        started_at=call.started_at,
        ended_at=call.ended_at,
        prompt_tokens=call.usage.prompt_tokens,
        completion_tokens=call.usage.completion_tokens,
        tools=tuple(block.name[:100] for block in node.answer or () if block.kind == "tool_use")[:50],
        superseded=node.superseded,
    )


def _branch_views(nodes: Sequence[Node], indices: dict[str, int]) -> tuple[BranchView, ...]:
    """Return a line for each branch, in order of their first calls."""
    branches: dict[str, list[Node]] = {}
    for node in nodes:
        branches.setdefault(node.branch, []).append(node)
    above = {name: _parent_branch(branch_nodes[0], branches) for name, branch_nodes in branches.items()}
    return tuple(
        _branch_view(name, branch_nodes, above, indices[branch_nodes[0].call.id])
        for name, branch_nodes in branches.items()
    )


def _parent_branch(first: Node, branches: dict[str, list[Node]]) -> str | None:
    """Return the branch that a branch hangs under.

    What follows a compaction is a sibling of what was summarised.
    """
    while first.continues is not None and (before := first.continues.parent) is not None:
        first = branches[before.branch][0]
    node = first.spawned_by or first.parent
    return None if node is None else node.branch


def _branch_view(name: str, nodes: Sequence[Node], above: dict[str, str | None], first_turn: int) -> BranchView:
    first = nodes[0]
    depth, parent = 0, above[name]
    while parent is not None and depth < len(above):
        depth, parent = depth + 1, above[parent]
    costs = [node.call.cost_usd for node in nodes if node.call.cost_usd is not None]
    return BranchView(
        name=name,
        role=first.role,
        above=above[name],
        depth=depth,
        origin=first.origin or "",
        calls=len(nodes),
        superseded=all(node.superseded for node in nodes),
        first_turn=first_turn,
        started_at=min(node.call.started_at for node in nodes),
        ended_at=max(node.call.ended_at for node in nodes),
        prompt_tokens=sum(node.call.usage.prompt_tokens for node in nodes),
        completion_tokens=sum(node.call.usage.completion_tokens for node in nodes),
        cost_usd=sum(costs) if costs else None,
        spawned_by=_call_id(first.spawned_by),
        continues=_call_id(first.continues),
    )


def segment_views(transcript: Transcript) -> tuple[SegmentView, ...]:
    """Return the token sequences, and why each begins where it does."""
    return tuple(segment_view(index, segment) for index, segment in enumerate(transcript.outlined.segments))


def segment_view(index: int, segment: SegmentOutline) -> SegmentView:
    """Return one token sequence without its tokens."""
    return SegmentView(
        index=index,
        reason=segment.reason,
        branch=segment.branch,
        role=segment.role,
        calls=len(segment.call_ids),
        tokens=segment.tokens,
        sampled=segment.sampled,
        superseded=segment.superseded,
    )
