"""Sessions that other programs logged: the logs that were read, their traces, and a row for each turn.

The store knows nothing about log formats: contents come as bytes, and `ingest.trace_store` decides what is in
them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from heapq import nsmallest
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Text,
    bindparam,
    delete,
    func,
    or_,
    select,
    union,
    update,
)

from understudy.errors import ConfigError
from understudy.store.contents import EMPTY, Packed, read_blobs, read_nodes
from understudy.store.database import Repository, WriteContext, queued
from understudy.store.decoding import damaged
from understudy.store.schema import asks, sources, traces, turns
from understudy.store.statements import HotStatement, hot_insert, json_field, json_values, row_id
from understudy.store.turn_filters import COLUMNS, sample_rank, select_turns

TextOrBytes = Any
"""A text; if it is not valid Unicode, as with some file names, bytes in UTF-8 that may encode surrogates."""


class LogSource(Struct, frozen=True, array_like=True):
    """A log's state at the time when it was read.

    `batch` names the logs that are read together, `reader` the version and options of the reader (see
    `ingest.collect`).
    """

    path: TextOrBytes
    batch: TextOrBytes
    size: int
    modified_ns: int
    reader: str


class TurnRow(Struct, array_like=True, kw_only=True):
    """A turn. `node` and `answer` are indexes of its trace's nodes (-1: the beginning).

    `action`, `system` and `tools` are indexes of contents; `system` and `tools` are None if they are the trace's.
    `notes` is a JSON list. The signals are named as in `ingest.trace.TurnSignals`. `prompt_…` is the size of the
    prompt (`ingest.prompt_sizes.PromptSize`) without tools that its log lacks, `answer_chars` that of the answer.
    """

    state_id: str
    position: int
    message_id: TextOrBytes
    node: int
    answer: int | None
    action: int
    branch: str
    fidelity: str
    notes: str
    model: TextOrBytes | None
    family: str | None
    timestamp: TextOrBytes | None
    system: int | None
    tools: int | None
    tool_calls: int = 0
    tool_errors: int = 0
    denied: int = 0
    interrupted: int = 0
    tests: str | None = None
    edits: int = 0
    edits_survived: int | None = None
    commits: int = 0
    feedback: str | None = None
    prompt_bytes: int | None = None
    prompt_escaped: int | None = None
    prompt_messages: int | None = None
    prompt_images: int | None = None
    answer_chars: int | None = None


class TraceRow(Struct, array_like=True, kw_only=True):
    """A trace with some of its turns and the nodes that they need.

    A node is a pair: the index of the node before it (-1: none), and the index of a content. `parent`, `outcome`
    and `losses` are JSON; `system` and `tools` are indexes of contents. `former_states` maps state ids given by
    earlier releases to the current ids. `tools_source`, `tools_bytes` and `tools_escaped` are about the tools of
    turns whose log has none.
    """

    id: TextOrBytes
    session_id: TextOrBytes
    format: str
    source: TextOrBytes
    role: str
    project: TextOrBytes | None
    agent: TextOrBytes | None
    version: TextOrBytes | None
    parent: bytes | None
    outcome: bytes | None
    losses: bytes
    system: int | None
    tools: int | None
    nodes: list[tuple[int, int]]
    turns: list[TurnRow]
    former_states: dict[str, str] = {}
    tools_source: str | None = None
    tools_bytes: int | None = None
    tools_escaped: int | None = None


PackedTrace = tuple[TraceRow, list[Packed]]
"""A trace and its contents."""


class TraceChanges(Struct, frozen=True):
    """The result of storing a trace: how many of its turns were new, changed, or stored already (`same`)."""

    new: int = 0
    changed: int = 0
    same: int = 0


def decoded(value: TextOrBytes) -> str:
    """Return a stored text as a string, as it was before it was stored."""
    return value if isinstance(value, str) else value.decode(errors="surrogatepass")


_PLAIN = ("id", "session_id", "format", "source", "role", "project", "agent", "version")
_BYTES = ("parent", "outcome", "losses")
_TOOLS = ("tools_source", "tools_bytes", "tools_escaped")
_TRACE = (*_PLAIN, *_BYTES, "system_id", "tools_id")
_SIGNALS = TurnRow.__struct_fields__[TurnRow.__struct_fields__.index("tool_calls") :]
_COLUMNS = tuple(column.name for column in turns.columns)
_POSITION = _COLUMNS.index("position")
_SIZES = _COLUMNS.index("prompt_bytes")

_PUT_TRACE = hot_insert(traces, *_TRACE, "read_at", *_TOOLS, replaces="id")
_FIND_TRACE = HotStatement(
    select(traces.c.key, *(traces.c[name] for name in (*_TRACE, *_TOOLS))).where(traces.c.id == bindparam("id")),
    "id",
)
_PUT_TURN = hot_insert(turns, *_COLUMNS, replaces="state_id")
_FIND_TURNS = HotStatement(select(turns).where(turns.c.trace_key == bindparam("trace_key")), "trace_key")
_SOURCE = ("path", "batch", "size", "modified_ns", "reader", "read_at")
_PUT_SOURCE = hot_insert(sources, *_SOURCE, replaces="path")


class SessionSummary(Struct, frozen=True, kw_only=True):
    """A session in a list: how many conversations and states it has, and the time of its last turn."""

    session_id: TextOrBytes
    format: str
    project: TextOrBytes | None
    conversations: int
    states: int
    last: TextOrBytes | None


class StoredSize(Struct, frozen=True):
    """The size of a stored turn (see `TurnRow` and `TraceRow`), with what decides who may be asked about it.

    All sizes are None in a store of an earlier release. `is_logged`: its log has the tools that it was offered.
    """

    trace_key: int
    turn_key: int
    state_id: str
    role: str
    model: TextOrBytes | None
    is_logged: bool
    tools_source: str | None
    tools_bytes: int | None
    tools_escaped: int | None
    prompt_bytes: int | None
    prompt_escaped: int | None
    prompt_messages: int | None
    prompt_images: int | None
    answer_chars: int | None


class TurnSelection(Mapping[int, "array[int]"]):
    """Selected turns: the keys of their traces, each with the keys of its turns, in order."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._turns: dict[int, array[int]] = {}
        for trace, turn in pairs:
            self._turns.setdefault(trace, array("q")).append(turn)
        self.turns = len(pairs)

    def __getitem__(self, key: int) -> array[int]:
        return self._turns[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._turns)

    def __len__(self) -> int:
        return len(self._turns)


class SessionRepository(Repository):
    """`Store.sessions`: logs that were read, with their traces and turns."""

    @queued
    def add(
        self, context: WriteContext, packed_traces: Sequence[PackedTrace], sources: Sequence[LogSource] = ()
    ) -> TraceChanges:
        """Store traces, all or none, and record `sources` as read.

        Pass a log's source with the last of its traces.

        Existing turns are updated. Turns that a trace no longer has stay in the store.
        """
        totals = TraceChanges()
        for trace, contents in packed_traces:
            changes = _write_trace(context, trace, contents)
            totals = TraceChanges(
                totals.new + changes.new, totals.changed + changes.changed, totals.same + changes.same
            )
        context.session.insert_many(
            _PUT_SOURCE, [(*msgspec.structs.astuple(source), time.time()) for source in sources]
        )
        return totals

    def sources(self) -> dict[TextOrBytes, LogSource]:
        """Return the logs that were read, by path."""
        query = select(*(sources.c[name] for name in _SOURCE[:-1]))
        return {source.path: source for source in self._read_all(query, lambda row: LogSource(**row))}

    def select(
        self, where: str | None = None, *, limit: int | None = None, seed: int | None = None
    ) -> TurnSelection:
        """Select the turns that match an SQL expression over `COLUMNS`, in the order in which they were stored.

        `limit` is the maximum number of turns: the first ones or, with `seed`, a random sample that is the same
        for the same seed. Raises ConfigError if the expression is invalid or takes too long.
        """
        with self._database.driver.turns_connection() as raw:
            return TurnSelection(select_turns(raw, ("trace_key", "turn_key"), where, limit, seed=seed))

    def sample(
        self,
        accept: Callable[[Mapping[str, Any]], bool],
        columns: Sequence[str],
        where: str | None,
        limit: int,
        seed: int,
        preferred: Set[str] = frozenset(),
    ) -> TurnSelection:
        """Select a random sample, like `select`, among the turns that `accept` accepts.

        `accept` gets `columns` of each turn. The states in `preferred` come first. Raises ConfigError like
        `select`.
        """

        def order(row: Mapping[str, Any]) -> tuple[bool, int]:
            return row["state_id"] not in preferred, sample_rank(row["state_id"], seed)

        read_columns = ("trace_key", "turn_key", "state_id", *(name for name in columns if name in COLUMNS))
        with self._database.driver.turns_connection() as raw:
            rows = (
                dict(zip(read_columns, row, strict=True)) for row in select_turns(raw, read_columns, where, None)
            )
            sampled = nsmallest(limit, filter(accept, rows), order)
        return TurnSelection(sorted((row["trace_key"], row["turn_key"]) for row in sampled))

    def table(
        self,
        columns: Sequence[str],
        where: str | None = None,
        *,
        limit: int | None = None,
        seed: int | None = None,
    ) -> list[tuple[Any, ...]]:
        """Return some of `COLUMNS` for the turns that `select` would select. Raises ConfigError like `select`."""
        with self._database.driver.turns_connection() as raw:
            return select_turns(raw, [name for name in columns if name in COLUMNS], where, limit, seed=seed)

    def sizes(self, where: str | None = None) -> Iterator[StoredSize]:
        """Yield the sizes of the turns that `select` would select. Raises ConfigError like `select`."""
        with self._database.driver.turns_connection() as raw:
            rows = select_turns(raw, StoredSize.__struct_fields__, where, None)
        return (StoredSize(*row) for row in rows)

    def count(self, where: str | None = None) -> tuple[int, int]:
        """Return how many turns match an expression, and how many traces they belong to.

        Raises ConfigError like `select`.
        """
        with self._database.driver.turns_connection() as raw:
            ((turns_, traces_),) = select_turns(raw, ("count(*)", "count(DISTINCT trace_key)"), where, None)
        return turns_, traces_

    def count_by(self, column: str, where: str | None = None) -> list[tuple[Any, int, int]]:
        """Return, for each value of a column, the numbers of its turns and traces, sorted by turns (most first).

        Raises ConfigError if the column is not in `COLUMNS`, and like `select`.
        """
        if column not in COLUMNS:
            raise ConfigError(f"unknown column {column!r}; give one of: {', '.join(COLUMNS)}")
        counts = (column, "count(*)", "count(DISTINCT trace_key)")
        with self._database.driver.turns_connection() as raw:
            return [(row[0], row[1], row[2]) for row in select_turns(raw, counts, where, None, group=column)]

    def ids_that_begin(self, prefix: str, most: int = 6) -> tuple[list[str], list[str]]:
        """Return the ids of states and of sessions that equal `prefix`, else those that begin with it, at most
        `most` each.

        A session can also be named by the id of one of its traces.
        """

        def matching(column: ColumnElement[Any], *names: ColumnElement[Any]) -> list[str]:
            for condition in (
                or_(*(name == prefix for name in names)),
                or_(*(func.substr(name, 1, len(prefix)) == prefix for name in names)),
            ):
                query = select(column).where(condition).distinct().order_by(column).limit(most)
                if ids := [decoded(value) for value in connection.execute(query).scalars()]:
                    return ids
            return []

        with self._reading() as connection:
            states = matching(turns.c.state_id, turns.c.state_id)
            sessions = matching(traces.c.session_id, traces.c.session_id, traces.c.id)
        exact = (
            [matching_id for matching_id in states if matching_id == prefix],
            [matching_id for matching_id in sessions if matching_id == prefix],
        )
        return exact if any(exact) else (states, sessions)

    def summaries(self, limit: int) -> tuple[list[SessionSummary], int]:
        """Return at most `limit` sessions, those with the newest turns first, and the total number of sessions."""
        last_timestamp = func.max(turns.c.timestamp)
        columns = {
            "session_id": traces.c.session_id,
            "format": func.min(traces.c.format),
            "project": func.min(traces.c.project),
            "conversations": func.count(traces.c.key.distinct()),
            "states": func.count(),
            "last": last_timestamp,
        }
        query = (
            select(*(column.label(name) for name, column in columns.items()))
            .join_from(turns, traces, traces.c.key == turns.c.trace_key)
            .group_by(traces.c.session_id)
            .order_by(last_timestamp.desc().nulls_last(), traces.c.session_id)
            .limit(limit)
        )
        with self._reading() as connection:
            total: int = connection.execute(select(func.count(traces.c.session_id.distinct()))).scalar_one()
            return [SessionSummary(**row) for row in connection.execute(query).mappings()], total

    def conversation_of(self, state_id: str) -> TurnSelection:
        """Select all turns of the trace that a state belongs to."""
        trace = select(turns.c.trace_key).where(turns.c.state_id == state_id)
        return self._turns_of(turns.c.trace_key.in_(trace))

    def whole_conversations(self, selection: TurnSelection) -> TurnSelection:
        """Select all turns of the traces that have a selected turn."""
        return self._turns_of(turns.c.trace_key.in_(json_values(list(selection))))

    def session(self, session_id: str) -> TurnSelection:
        """Select all turns of a session: of its own traces, and of the subagents that it started."""
        started = json_field(traces.c.parent, "session_id") == session_id
        trace_keys = select(traces.c.key).where(or_(traces.c.session_id == session_id, started))
        return self._turns_of(turns.c.trace_key.in_(trace_keys))

    def _turns_of(self, condition: ColumnElement[bool]) -> TurnSelection:
        query = select(turns.c.trace_key, row_id(turns)).where(condition)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(turns.c.trace_key, turns.c.position, row_id(turns)))
            return TurnSelection([(trace, turn) for trace, turn in rows])

    def read(self, selection: TurnSelection) -> Iterator[tuple[TraceRow, list[bytes]]]:
        """Yield the traces of the selected turns, with only these turns, and their contents.

        Each is read when needed.
        """
        for key, turn_keys in selection.items():
            with self._reading() as connection:
                trace_and_contents = _read(connection, key, turn_keys)
            yield trace_and_contents


# --- writing -------------------------------------------------------------------------------------------


def _write_trace(context: WriteContext, row: TraceRow, contents: Sequence[Packed]) -> TraceChanges:
    ids = [context.contents.packed(content) for content in contents]
    if not row.turns:
        return TraceChanges()
    nodes: list[int] = []
    for parent, content in row.nodes:
        nodes.append(context.contents.node(nodes[parent] if parent >= 0 else EMPTY, ids[content]))
    key = _write_trace_row(context, row, ids)
    stored = {row[0]: row for row in context.session.fetch_all(_FIND_TURNS, (key,))}
    written_rows: list[tuple[Any, ...]] = []
    new_count = changed_count = 0
    for turn in row.turns:
        values = (
            turn.state_id,
            key,
            turn.position,
            turn.message_id,
            nodes[turn.node] if turn.node >= 0 else EMPTY,
            None if turn.answer is None else nodes[turn.answer],
            ids[turn.action],
            turn.branch,
            turn.fidelity,
            turn.notes,
            turn.model,
            turn.family,
            turn.timestamp,
            None if turn.system is None else ids[turn.system],
            None if turn.tools is None else ids[turn.tools],
            *(getattr(turn, name) for name in _SIGNALS),
        )
        parent = stored.get(turn.state_id)
        if parent == values:
            continue
        written_rows.append(values)
        if parent is None:
            new_count += 1
        elif _content(parent) != _content(values):
            changed_count += 1
    context.session.insert_many(_PUT_TURN, written_rows)
    if row.former_states:
        # Hardly ever one of them is stored, so all are sought together.
        is_former = turns.c.state_id.in_(json_values([*row.former_states], Text))
        stored_ids = set(context.connection.execute(select(turns.c.state_id).where(is_former)).scalars())
        for former, state_id in row.former_states.items():
            if former in stored_ids:
                _replace_turn(context, former, state_id)
    return TraceChanges(new_count, changed_count, len(row.turns) - new_count - changed_count)


def _replace_turn(context: WriteContext, former: str, state_id: str) -> None:
    """Remove a turn that is now stored under another id, and its trace if that has no turns left.

    What teachers were asked about the turn is moved to the new id.
    """
    key = context.connection.execute(select(turns.c.trace_key).where(turns.c.state_id == former)).scalar()
    if key is None:
        return
    context.connection.execute(update(asks).where(asks.c.state_id == former).values(state_id=state_id))
    context.connection.execute(delete(turns).where(turns.c.state_id == former))
    remaining_turns = select(turns.c.state_id).where(turns.c.trace_key == key)
    context.connection.execute(delete(traces).where(traces.c.key == key, ~remaining_turns.exists()))


def _content(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of a turn without its position, which moves when another turn is found before it, and
    without sizes, which stores of earlier releases lack.
    """
    return values[:_POSITION] + values[_POSITION + 1 : _SIZES]


def _write_trace_row(context: WriteContext, row: TraceRow, ids: Sequence[int]) -> int:
    values = (
        *(getattr(row, name) for name in (*_PLAIN, *_BYTES)),
        None if row.system is None else ids[row.system],
        None if row.tools is None else ids[row.tools],
    )
    tools = tuple(getattr(row, name) for name in _TOOLS)
    stored_trace = context.session.fetch_one(_FIND_TRACE, (row.id,))
    if stored_trace is None or stored_trace[1:] != (*values, *tools):
        context.session.insert_many(_PUT_TRACE, [(*values, time.time(), *tools)])
        stored_trace = stored_trace or context.session.fetch_one(_FIND_TRACE, (row.id,))
    if stored_trace is None:
        raise damaged(f"trace {row.id!r} was written but is missing")
    return stored_trace[0]


# --- reading -------------------------------------------------------------------------------------------


def _read(connection: Connection, key: int, keys: array[int]) -> tuple[TraceRow, list[bytes]]:
    trace = connection.execute(select(traces).where(traces.c.key == key)).mappings().one()
    condition = row_id(turns).in_(json_values(keys))
    rows = (
        connection.execute(select(turns).where(condition).order_by(turns.c.position, row_id(turns)))
        .mappings()
        .all()
    )
    ends = union(
        select(turns.c.node_id).where(condition),
        select(turns.c.answer_id).where(condition, turns.c.answer_id.is_not(None)),
    )
    tree = read_nodes(connection, ends)
    places = _Places()
    nodes: list[tuple[int, int]] = []
    index_of = {EMPTY: -1}
    for node in sorted(tree):
        parent, content = tree[node]
        if parent not in index_of:
            raise damaged(f"node {node} does not lead to a root")
        index_of[node] = len(nodes)
        nodes.append((index_of[parent], places[content]))
    row = TraceRow(
        **{name: trace[name] for name in (*_PLAIN, *_BYTES)},
        system=places.of(trace["system_id"]),
        tools=places.of(trace["tools_id"]),
        nodes=nodes,
        turns=[_turn(row, index_of, places) for row in rows],
    )
    contents = read_blobs(connection, places)
    return row, [contents[content] for content in places]


def _turn(row: RowMapping, index_of: Mapping[int, int], places: _Places) -> TurnRow:
    plain_columns = (
        "state_id",
        "position",
        "message_id",
        "branch",
        "fidelity",
        "notes",
        "model",
        "family",
        "timestamp",
    )
    return TurnRow(
        **{name: row[name] for name in (*plain_columns, *_SIGNALS)},
        node=index_of[row["node_id"]],
        answer=None if row["answer_id"] is None else index_of[row["answer_id"]],
        action=places[row["action_id"]],
        system=places.of(row["system_id"]),
        tools=places.of(row["tools_id"]),
    )


class _Places(dict[int, int]):
    """Maps blob ids to their index, in the order in which they were first looked up."""

    def __missing__(self, key: int) -> int:
        self[key] = position = len(self)
        return position

    def of(self, key: int | None) -> int | None:
        """Return the index of a blob, or None for None."""
        return None if key is None else self[key]
