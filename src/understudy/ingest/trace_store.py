"""Writes traces to a store and reads them back. A stored trace expands into the same states as the original.

A trace is rendered once, when it is stored. Each node becomes a list of messages in the store's prefix tree; nodes
without messages are left out. Only what the stored turns need is kept.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict

from understudy.errors import StoreError
from understudy.ingest.model_families import model_family
from understudy.ingest.prompt_sizes import (
    PromptSize,
    UnloggedTools,
    answer_chars,
    json_bytes,
    messages_size,
    shape_size,
)
from understudy.ingest.trace import (
    SYSTEM_PROMPT,
    Message,
    OfferedTools,
    RequestShape,
    Trace,
    TraceNode,
    TraceOutcome,
    TraceParent,
    TraceState,
    TraceTurn,
    TurnAction,
    TurnSignals,
    expand,
    state_ids_of,
)
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl, parse_location
from understudy.store.contents import Packed, Packer
from understudy.store.sessions import (
    SessionRepository,
    TextOrBytes,
    TraceChanges,
    TraceRow,
    TurnRow,
    TurnSelection,
    decoded,
)

TraceSource = Store | SessionRepository | StoreLocation | str
"""Where traces are read from: an open store, its sessions, or a store's location, which is opened for the call."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_decoder = cache(msgspec.json.Decoder)


class StoredBody(Struct, frozen=True, gc=False):
    """The body of a node read from a store: its messages and, if a turn ends in it, the turn's action."""

    messages: bytes
    action: bytes | None = None


class _StoredAction(Struct, kw_only=True, omit_defaults=True):
    """An action as it is stored.

    With `seen`, its text and calls are taken from the message that later turns see.
    """

    seen: bool = False
    content: str | None = None
    thinking: str | None = None
    thinking_hidden: bool = False
    tool_calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class StoredRenderer:
    """The renderer of a trace that was read from a store: its nodes are stored as rendered messages, which it
    decodes. `source` is the path of the trace's log, for errors. Raises StoreError for damaged messages.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def history(self, body: StoredBody) -> list[Message]:
        """Return the node's messages."""
        return _load(body.messages, self._source)

    def action(self, bodies: Sequence[StoredBody]) -> TurnAction:
        """Return the action of the turn that has these bodies."""
        body = next(body for body in reversed(bodies) if body.action is not None)
        stored: _StoredAction = _struct(body.action or b"", _StoredAction, self._source)
        content, calls = stored.content, stored.tool_calls
        if stored.seen:
            (message,) = _load(body.messages, self._source)
            content, calls = message["content"], message.get("tool_calls", [])
        return TurnAction(
            content=content, thinking=stored.thinking, thinking_hidden=stored.thinking_hidden, tool_calls=calls
        )


# --- into the store ------------------------------------------------------------------------------------


def store_trace(sessions: SessionRepository, trace: Trace) -> Future[TraceChanges]:
    """Store a trace with all its turns. Stored turns are updated; others in the store stay."""
    return sessions.add([trace_rows(trace, Packer())])


def trace_rows(
    trace: Trace, packer: Packer, indexes: Iterable[int] | None = None
) -> tuple[TraceRow, list[Packed]]:
    """Return the row and the contents to store for a trace.

    `indexes`: those of the turns to store (default: all).
    """
    contents = _ContentTable(packer)
    nodes = _NodeTable(trace, contents)
    offered = OfferedTools(trace)
    unlogged = UnloggedTools.of(trace, offered)
    identity_of = state_ids_of(trace.trace_id)
    turns = [
        _turn_row(trace, index, identity_of, contents, nodes, offered)
        for index in (range(len(trace.turns)) if indexes is None else indexes)
    ]
    row = TraceRow(
        id=storable(trace.trace_id),
        session_id=storable(trace.session_id),
        format=trace.format,
        source=storable(trace.source),
        role=trace.role,
        project=_storable_or_none(trace.project),
        agent=_storable_or_none(trace.agent),
        version=_storable_or_none(trace.version),
        parent=None if trace.parent is None else json_bytes(trace.parent),
        outcome=None if trace.outcome is None else json_bytes(trace.outcome),
        losses=json_bytes(trace.losses),
        system=None if trace.shape.system is None else contents.add(json_bytes(trace.shape.system)),
        tools=None if trace.shape.tools is None else contents.add(json_bytes(trace.shape.tools)),
        nodes=nodes.rows,
        turns=turns,
        former_states={
            former_identity_of(trace.turns[turn.position].message_id).hex(): turn.state_id
            for former_identity_of in map(state_ids_of, trace.former_ids)
            for turn in turns
        },
        tools_source=unlogged.source,
        tools_bytes=unlogged.size.plain,
        tools_escaped=unlogged.size.escaped,
    )
    return row, contents.packed


def _turn_row(
    trace: Trace,
    index: int,
    identity_of: Callable[[str], bytes],
    contents: _ContentTable,
    nodes: _NodeTable,
    offered: OfferedTools,
) -> TurnRow:
    turn = trace.turns[index]
    shape = turn.shape
    action = offered.action_of(turn)
    context = nodes.position_of(turn.context)
    answer, answer_messages = nodes.answer(context, turn.action)
    signals: dict[str, Any] = {} if turn.signals is None else asdict(turn.signals)
    if turn.signals is not None:
        signals["interrupted"] = int(turn.signals.interrupted)
    size = (nodes.shape_size if shape is None else shape_size(shape)).plus(nodes.size(context))
    return TurnRow(
        state_id=identity_of(turn.message_id).hex(),
        position=index,
        message_id=storable(turn.message_id),
        node=context,
        answer=answer,
        action=contents.add(json_bytes(_stored_form(action, answer_messages))),
        branch=turn.branch,
        fidelity=turn.fidelity,
        notes=json_bytes(turn.notes).decode(),
        model=_storable_or_none(turn.model),
        family=model_family(turn.model),
        timestamp=_storable_or_none(turn.timestamp),
        system=None if shape is None else contents.add(json_bytes(shape.system)),
        tools=None if shape is None else contents.add(json_bytes(shape.tools)),
        prompt_bytes=size.plain,
        prompt_escaped=size.escaped,
        prompt_messages=size.messages,
        prompt_images=size.images,
        answer_chars=answer_chars(action),
        **signals,
    )


def _stored_form(action: TurnAction, later_messages: Sequence[Message]) -> TurnAction | _StoredAction:
    message: Message = {"role": "assistant", "content": action.content}
    if action.tool_calls:
        message["tool_calls"] = action.tool_calls
    if len(later_messages) != 1 or later_messages[0] != message:
        return action
    return _StoredAction(seen=True, thinking=action.thinking, thinking_hidden=action.thinking_hidden)


class _ContentTable:
    """The distinct contents of a trace."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self._positions: dict[bytes, int] = {}
        self.packed: list[Packed] = []

    def add(self, data: bytes) -> int:
        """Add a content unless it is there already. Returns its index in `packed`."""
        packed = self._packer(data)
        position = self._positions.setdefault(packed.digest, len(self.packed))
        if position == len(self.packed):
            self.packed.append(packed)
        return position


class _NodeTable:
    """The nodes that turns need. Each is rendered once, when it is first needed."""

    def __init__(self, trace: Trace, contents: _ContentTable) -> None:
        self._trace = trace
        self._contents = contents
        self._positions = {-1: -1}
        self._last_rendered: tuple[int, list[Message]] = (-1, [])
        self._sizes: list[PromptSize] = []
        self.shape_size = shape_size(trace.shape)
        self.rows: list[tuple[int, int]] = []

    def size(self, position: int) -> PromptSize:
        """Return the size of the messages from the root to a node (-1: none)."""
        return self._sizes[position] if position >= 0 else PromptSize()

    def position_of(self, node: int) -> int:
        """Return a node's index in `rows`; for a node without messages, that of its nearest ancestor with messages
        (-1: none).
        """
        pending: list[int] = []
        while node not in self._positions:
            pending.append(node)
            node = self._trace.nodes[node].parent
        for pending_node in reversed(pending):
            parent = self._positions[node]
            messages = self._trace.renderer.history(self._trace.nodes[pending_node].body)
            self._last_rendered = (pending_node, messages)
            if messages:
                data = json_bytes(messages)
                self.rows.append((parent, self._contents.add(data)))
                self._sizes.append(self.size(parent).plus(messages_size(messages, data)))
                parent = len(self.rows) - 1
            self._positions[pending_node] = parent
            node = pending_node
        return self._positions[node]

    def answer(self, context: int, action: Sequence[int]) -> tuple[int | None, list[Message]]:
        """Return where in `rows` a turn's action ends, and the action's messages; `context` is where the turn's
        context ends.

        Returns (None, []) if the action adds no messages or does not follow the context.
        """
        end, messages_added = context, list[Message]()
        for node in action:
            position = self.position_of(node)
            if position == end:
                continue
            # A node without messages has the position of an ancestor, which need not belong to the action.
            messages = self._messages(node)
            if not messages or self.rows[position][0] != end:
                return None, []
            end = position
            messages_added += messages
        return (None, []) if end == context else (end, messages_added)

    def _messages(self, node: int) -> list[Message]:
        """Return the messages of a node. They are reused if the node was the last one to be placed."""
        if self._last_rendered[0] != node:
            self._last_rendered = (node, self._trace.renderer.history(self._trace.nodes[node].body))
        return self._last_rendered[1]


# --- out of the store ----------------------------------------------------------------------------------


def traces(
    library: TraceSource,
    where: str | TurnSelection | None = None,
    *,
    limit: int | None = None,
    seed: int | None = None,
) -> Iterator[Trace]:
    """Yield the stored traces, each with those of its turns that match `where`.

    Only one trace is in memory at a time.

    `where` is an SQL expression over `understudy.store.turn_filters.COLUMNS`, or an existing selection. `limit` is
    the maximum number of turns over all traces: the first ones or, with `seed`, a random sample. Raises StoreError
    if there is no store, and ConfigError if the expression is invalid.
    """
    with _open_sessions(library) as sessions:
        selection = where if isinstance(where, TurnSelection) else sessions.select(where, limit=limit, seed=seed)
        for row, contents in sessions.read(selection):
            yield _trace(row, contents)


def states(
    library: TraceSource,
    where: str | None = None,
    *,
    limit: int | None = None,
    seed: int | None = None,
    system: str | None = SYSTEM_PROMPT,
) -> Iterator[TraceState]:
    """Yield the stored states that match `where`. Parameters are as in `traces`; `system` is as in `trace.expand`.

    Nothing is redacted: redact states with `ingest.redaction` before they leave this machine.
    """
    for trace in traces(library, where, limit=limit, seed=seed):
        yield from expand(trace, system=system)


@contextmanager
def _open_sessions(library: TraceSource) -> Generator[SessionRepository]:
    if isinstance(library, SessionRepository):
        yield library
    elif isinstance(library, Store):
        yield library.sessions
    else:
        location = library if isinstance(library, StoreUrl) else parse_location(library)
        with Store.open(location, create=False) as store:
            yield store.sessions


def _trace(row: TraceRow, contents: Sequence[bytes]) -> Trace:
    source = decoded(row.source)
    nodes = [TraceNode(parent, StoredBody(contents[content])) for parent, content in row.nodes]
    return Trace(
        trace_id=decoded(row.id),
        session_id=decoded(row.session_id),
        format=row.format,
        source=source,
        renderer=StoredRenderer(source),
        nodes=nodes,
        turns=[_turn(turn, nodes, contents, source) for turn in row.turns],
        project=text_or_none(row.project),
        parent=None if row.parent is None else _struct(row.parent, TraceParent, source),
        role=row.role,
        agent=text_or_none(row.agent),
        version=text_or_none(row.version),
        shape=_shape(row, contents, source),
        outcome=None if row.outcome is None else _struct(row.outcome, TraceOutcome, source),
        losses=Counter(_struct(row.losses, dict[str, int], source)),
    )


def _shape(row: TraceRow | TurnRow, contents: Sequence[bytes], source: str) -> RequestShape:
    return RequestShape(
        None if row.system is None else _load(contents[row.system], source),
        None if row.tools is None else _load(contents[row.tools], source),
    )


def _turn(row: TurnRow, nodes: list[TraceNode], contents: Sequence[bytes], source: str) -> TraceTurn:
    shaped = row.system is not None and row.tools is not None
    signals: dict[str, Any] = {name: getattr(row, name) for name in TurnSignals.__struct_fields__}
    signals["interrupted"] = bool(row.interrupted)
    return TraceTurn(
        message_id=decoded(row.message_id),
        context=row.node,
        action=_action_nodes(row, nodes, contents[row.action]),
        model=text_or_none(row.model),
        timestamp=text_or_none(row.timestamp),
        branch=cast(Any, row.branch),
        fidelity=cast(Any, row.fidelity),
        notes=_struct(row.notes.encode(), tuple[str, ...], source),
        shape=_shape(row, contents, source) if shaped else None,
        signals=TurnSignals(**signals),
    )


def _action_nodes(row: TurnRow, nodes: list[TraceNode], action: bytes) -> tuple[int, ...]:
    """Return the nodes of a turn's action, the last of which holds the action.

    A node is added if the tree has none.
    """
    path: list[int] = []
    node = -1 if row.answer is None else row.answer
    while node not in (-1, row.node):
        path.append(node)
        node = nodes[node].parent
    if path and node == row.node:
        last_node = nodes[path[0]]
        if last_node.body.action is None:
            nodes[path[0]] = TraceNode(last_node.parent, StoredBody(last_node.body.messages, action))
            return tuple(reversed(path))
        nodes.append(TraceNode(last_node.parent, StoredBody(last_node.body.messages, action)))
        return (*reversed(path[1:]), len(nodes) - 1)
    nodes.append(TraceNode(row.node, StoredBody(b"[]", action)))
    return (len(nodes) - 1,)


# --- texts that may be no Unicode ----------------------------------------------------------------------


def storable(text: str) -> TextOrBytes:
    """Return the text, or bytes if it is not valid Unicode, which happens with file names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")
    return text


def _storable_or_none(text: str | None) -> TextOrBytes | None:
    return None if text is None else storable(text)


def text_or_none(value: TextOrBytes | None) -> str | None:
    """Convert a stored text back to what the log had. None stays None."""
    return None if value is None else decoded(value)


def _load(data: bytes, source: str) -> Any:
    try:
        return _decode(data)
    except msgspec.DecodeError:
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(source, error) from error


def _struct(data: bytes, kind: Any, source: str) -> Any:
    try:
        return _decoder(kind).decode(data)
    except msgspec.MsgspecError:
        pass
    try:
        return msgspec.convert(_load(data, source), kind)
    except msgspec.ValidationError as error:
        raise _damaged(source, error) from error


def _damaged(source: str, error: Exception) -> StoreError:
    return StoreError(
        f"{source}: what the store holds of this log is damaged: {error}; ingest the log again into another store"
    )
