"""Calls, one row each. Of the request and the tokens, a row stores only what is new since the call before."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, LargeBinary, RowMapping, Text, and_, bindparam, func, select

from understudy.errors import LeaseLost, NotInStore, StoreError
from understudy.store import tokens
from understudy.store.contents import (
    HEAD_BYTES,
    Buffer,
    Parts,
    blob_path,
    extend_nodes,
    join_body,
    read_blobs,
    read_nodes,
    split_body,
    unpack,
    unpacked_size,
)
from understudy.store.database import InsertedCall, Repository, WriteContext, encode, error_column, read_error
from understudy.store.decoding import damaged, decoder
from understudy.store.schema import attempts, calls
from understudy.store.statements import HotStatement, hot_insert_once, json_rows, json_values
from understudy.store.tokens import Ids, RecentTokens, StoredIds, StoredPlace, pack_ids
from understudy.types import Call, PolicySpan, Usage

_PLAIN = (
    "id", "attempt_id", "sequence", "dialect", "requested_model", "backend", "backend_model", "status",
    "started_at", "ended_at", "parent_id", "session_id", "agent_id", "policy_version", "finish_reason",
)  # fmt: skip
_USAGE = ("prompt_tokens", "completion_tokens", "cached_tokens")
_CONTENT = ("sampling", "error", "skeleton_id", "system_id", "tools_id", "node_id", "response_id")
_TOKENS = ("base_key", "prompt_count", "shared", "suffix", "completion_count", "completion", "logprobs")
# Columns that later schemas added, in the order of `added` in `_row`.
_ADDED_COLUMNS = ("cache_write_tokens", "cost_usd", "policy_spans", "audit")
_REQUEST_PARTS = ("skeleton_id", "system_id", "tools_id")
_BLOBS = (*_REQUEST_PARTS, "response_id")
_WITHOUT_TOKENS = (
    *(
        calls.c[name]
        for name in ("key", *_PLAIN, *_USAGE, "sampling", "error", *_REQUEST_PARTS, "node_id", "response_id")
    ),
    *(calls.c[name] for name in ("base_key", "prompt_count", "shared", "completion_count", *_ADDED_COLUMNS)),
    *(func.length(calls.c[name]).label(f"{name}_size") for name in ("suffix", "completion")),
    *(
        func.substr(calls.c[name], 1, HEAD_BYTES, type_=LargeBinary).label(f"{name}_head")
        for name in ("suffix", "completion")
    ),
)
"""The columns of a call without its tokens; of these, only the sizes."""
_INSERT = hot_insert_once(
    calls,
    *_PLAIN,
    *_USAGE,
    *_CONTENT,
    *_TOKENS,
    *_ADDED_COLUMNS,
    key="key",
    unique=("id", "attempt_id", "sequence"),
)
# The row lock keeps a lease from being taken away while a write of its attempt is in progress.
_STATUS = HotStatement(
    select(attempts.c.status).where(attempts.c.id == bindparam("id")).with_for_update(read=True, key_share=True),
    "id",
)
_STATUSES = HotStatement(
    select(attempts.c.id, attempts.c.status)
    .where(attempts.c.id.in_(json_rows(bindparam("ids", type_=Text), Text)))
    .with_for_update(read=True, key_share=True, of=attempts),
    "ids",
)
_FIND = HotStatement(select(calls.c.attempt_id, calls.c.sequence).where(calls.c.id == bindparam("id")), "id")
_PARENT = HotStatement(
    select(calls.c.key, calls.c.base_key, calls.c.suffix.is_not(None)).where(calls.c.id == bindparam("id")), "id"
)
_LINK = HotStatement(
    select(calls.c.base_key, calls.c.shared, calls.c.suffix, calls.c.completion).where(
        calls.c.key == bindparam("key")
    ),
    "key",
)

_REMEMBERED_BASES = 10_000
"""How many recent calls to remember the base of their successors' tokens for."""

OuterKey = tuple[int | None, int | None, int | None]
"""The content ids of a request's skeleton, system prompt and tools."""

Link = tuple[int | None, int, bytes, bytes | None]
"""A call's tokens as stored: base, shared, suffix, completion."""

_object = decoder(dict[str, Any], "a call's sampling or audit")
_spans = decoder(tuple[PolicySpan, ...], "a call's list of policy versions")


PRUNED_REQUEST = b'{"understudy":"pruned"}'
"""Stands for the request of a call whose request and response were pruned. Its response holds the date."""

USAGE = (
    func.count().label("calls"),
    func.coalesce(func.sum(calls.c.prompt_tokens), 0).label("prompt_tokens"),
    func.coalesce(func.sum(calls.c.completion_tokens), 0).label("completion_tokens"),
    func.coalesce(func.sum(calls.c.cost_usd), 0.0).label("cost_usd"),
)
"""The columns of AttemptUsage, for any selection of calls."""


class AttemptUsage(Struct, frozen=True, kw_only=True):
    """Numbers of calls and tokens, and the cost.

    Failed calls count too. `cost_usd` sums the calls with a known price.
    """

    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float


class RequestTree:
    """The requests of an attempt as they are stored: a tree of messages that grows as calls are read.

    `steps` maps each node to the node before it and the content id of its message. `outers` are request bodies
    without their messages; requests with the same key have the same body. `contents` are the messages that the
    most recent read added.
    """

    def __init__(self) -> None:
        self.steps: dict[int, tuple[int, int]] = {}
        self.outers: dict[OuterKey, bytes] = {}
        self.contents: dict[int, bytes] = {}


class RequestPlace(Struct, frozen=True):
    """A request in a `RequestTree`: the key of its body without messages, and the node of its last message."""

    outer: OuterKey
    node: int


class CallRepository(Repository):
    """`Store.calls`: model requests with their responses and tokens."""

    def append(self, call: Call) -> Future[None]:
        """Store a call. A call whose id is stored already is left unchanged.

        Raises StoreError if the id or the sequence number belongs to another call, or if the attempt is unknown;
        LeaseLost if the attempt was taken from its worker.
        """
        writer = self._database.writer
        return writer.submit(lambda context: self._append(context, call), _prepare_appends, call)

    def _append(self, context: WriteContext, call: Call) -> None:
        if _status(context, call.attempt_id) == "unresponsive":
            if _is_stored(context, call):
                return
            raise LeaseLost(
                f"attempt {call.attempt_id} lost its lease because its worker did not renew it in time, so "
                f"call {call.id} was not stored; nothing needs to be done: the rollout is tried again"
            )
        inserted = context.inserted_calls.get(id(call))
        if inserted is None:
            row, base, ids = _row(context, call)
            key = context.session.insert(_INSERT, row)
            if key is None:
                if not _is_stored(context, call):
                    raise StoreError(
                        f"duplicate call: attempt {call.attempt_id} has another call with number {call.sequence}; "
                        f"give call {call.id} a new number"
                    )
                return
            inserted = InsertedCall(key, base, ids)
        if inserted.ids is not None:
            context.recent.put(inserted.key, inserted.ids)
        if len(context.token_bases) >= _REMEMBERED_BASES:
            context.token_bases.clear()
        context.token_bases[call.id] = inserted.base if inserted.ids is None else inserted.key

    def contents(self, attempt_id: str) -> Iterator[bytes]:
        """Yield the messages and responses of an attempt's calls as JSON, each distinct one once, oldest first."""
        of_attempt = calls.c.attempt_id == attempt_id
        query = select(calls.c.node_id, calls.c.response_id).where(of_attempt).order_by(calls.c.sequence)
        with self._reading() as connection:
            rows = connection.execute(query).all()
            tree = read_nodes(connection, select(calls.c.node_id).where(of_attempt))
            ids = dict.fromkeys(tree[node][1] for node in sorted(tree))
            ids.update(dict.fromkeys(row.response_id for row in rows))
            blobs = read_blobs(connection, ids)
        return (blobs[key] for key in ids)

    def of_attempt(self, attempt_id: str) -> Iterator[Call]:
        """Yield the calls of an attempt by sequence number, exactly as they were appended."""
        with self._reading() as connection:
            return self._named(_read(connection, calls.c.attempt_id == attempt_id))

    def in_parts(
        self, attempt_id: str, tree: RequestTree, after: int = -1, limit: int | None = None
    ) -> list[tuple[Call, RequestPlace]]:
        """Return calls of an attempt by sequence number, from those with a number above `after`, at most `limit`.

        The calls come without requests: the messages are added to `tree`, and each RequestPlace says where its
        request ends there. Tokens are read when they are accessed, and there are no logprobs. Reading all calls
        this way takes time linear in the conversation's length, and memory for `limit` calls at a time.
        """
        with self._reading() as connection:
            query = select(*_WITHOUT_TOKENS).where(calls.c.attempt_id == attempt_id, calls.c.sequence > after)
            rows = connection.execute(query.order_by(calls.c.sequence).limit(limit)).mappings().all()
            new_nodes = extend_nodes(connection, tree.steps, {row["node_id"] for row in rows})
            keys = {_outer_key(row) for row in rows}
            needed_blobs = {tree.steps[node][1] for node in new_nodes} | {row["response_id"] for row in rows}
            needed_blobs |= {blob for key in keys - tree.outers.keys() for blob in key if blob is not None}
            tree.contents = read_blobs(connection, needed_blobs)
        for skeleton, system, tools in keys - tree.outers.keys():
            parts = [None if key is None else tree.contents[key] for key in (skeleton, system, tools)]
            tree.outers[skeleton, system, tools] = join_body(parts[0] or b"", parts[1], parts[2], [])
        with self._database.driver.errors():
            for row in rows:
                _refuse_pruned(row["id"], tree.outers[_outer_key(row)], tree.contents[row["response_id"]])
        return [(self._without_tokens(row, tree), RequestPlace(_outer_key(row), row["node_id"])) for row in rows]

    def _without_tokens(self, row: RowMapping, tree: RequestTree) -> Call:
        call_id = row["id"]
        prompt = completion = None
        if row["completion_count"] is not None:
            size = unpacked_size(row["completion_head"], row["completion_size"])
            completion = StoredIds(
                lambda: pack_ids(self._tokens_of(call_id).completion_token_ids or ()),
                row["completion_count"],
                size,
            )
        if row["prompt_count"] is not None:
            prompt = StoredIds(
                lambda: pack_ids(self._tokens_of(call_id).prompt_token_ids or ()),
                row["prompt_count"],
                row["shared"] + unpacked_size(row["suffix_head"], row["suffix_size"]),
                StoredPlace(row["key"], row["base_key"], row["shared"]),
            )
        return Call(
            **_metadata(row),
            request=b"",
            response=tree.contents[row["response_id"]],
            prompt_token_ids=cast("tuple[int, ...] | None", prompt),
            completion_token_ids=cast("tuple[int, ...] | None", completion),
        )

    def _tokens_of(self, call_id: str) -> Call:
        return self.with_tokens([call_id])[0]

    def with_ids(self, call_ids: Sequence[str]) -> Iterator[Call]:
        """Yield some calls of one attempt by sequence number, exactly as they were appended."""
        with self._reading() as connection:
            return self._named(_read(connection, calls.c.id.in_(json_values(call_ids, Text))))

    def with_tokens(self, call_ids: Sequence[str]) -> list[Call]:
        """Return some calls with tokens but without requests and responses, by sequence number."""
        condition = calls.c.id.in_(json_values(call_ids, Text))
        with self._reading() as connection:
            rows = connection.execute(select(calls).where(condition).order_by(calls.c.sequence)).mappings().all()
            links = _read_links(connection, condition)
            recent = RecentTokens()
            return [_with_tokens(row, links, recent) for row in rows]

    def sessions(self, attempt_id: str, since: float, until: float) -> list[str | None]:
        """Return the session ids of an attempt's calls that began in [since, until), in Unix seconds, ordered by
        first call.

        None stands for calls whose agent sent no session id.
        """
        query = select(calls.c.session_id).where(_began(attempt_id, since, until))
        query = query.group_by(calls.c.session_id).order_by(func.min(calls.c.sequence))
        with self._reading() as connection:
            return list(connection.execute(query).scalars())

    def of_session(self, attempt_id: str, session_id: str | None, since: float, until: float) -> Iterator[Call]:
        """Yield the calls of a session that began in [since, until), by sequence number."""
        of_session = calls.c.session_id.is_not_distinct_from(session_id)
        with self._reading() as connection:
            return self._named(_read(connection, and_(_began(attempt_id, since, until), of_session)))

    def _named(self, calls_read: Iterator[Call]) -> Iterator[Call]:
        """Yield calls that are assembled one at a time. Errors meanwhile name the store, as while reading."""
        with self._database.driver.errors():
            yield from calls_read

    def get(self, call_id: str) -> Call:
        """Return a call by its id. Raises StoreError if there is none."""
        with self._reading() as connection:
            for call in _read(connection, calls.c.id == call_id):
                return call
        raise NotInStore(
            f"{self._name}: there is no call {call_id}; give one that `understudy show` lists for an attempt"
        )

    def versioned_models(self) -> frozenset[str]:
        """Return the models, by their backend's names, that have calls with a known version of the weights."""
        query = select(calls.c.backend_model).where(calls.c.policy_version.is_not(None)).distinct()
        with self._reading() as connection:
            return frozenset(connection.execute(query).scalars())

    def next_sequence(self, attempt_id: str) -> int:
        """Return the sequence number after the last call of an attempt; 0 if it has no calls."""
        query = select(func.max(calls.c.sequence)).where(calls.c.attempt_id == attempt_id)
        with self._reading() as connection:
            last_sequence: int | None = connection.execute(query).scalar()
        return 0 if last_sequence is None else last_sequence + 1

    def count(self, attempt_id: str, until: int | None = None) -> int:
        """Return how many calls an attempt has, up to the sequence number `until` if it is given."""
        query = select(func.count()).where(calls.c.attempt_id == attempt_id)
        with self._reading() as connection:
            return connection.execute(
                query if until is None else query.where(calls.c.sequence <= until)
            ).scalar_one()

    def usage(self, attempt_id: str) -> AttemptUsage:
        """Return an attempt's calls, tokens and costs so far; zeros if it is unknown."""
        query = select(*USAGE).where(calls.c.attempt_id == attempt_id)
        with self._reading() as connection:
            return AttemptUsage(**connection.execute(query).mappings().one())


# --- writing -------------------------------------------------------------------------------------------


def _row(context: WriteContext, call: Call) -> tuple[tuple[Any, ...], int | None, Ids | None]:
    """Store the contents of a call. Return its row for `_INSERT`, and what `_pack_tokens` returns."""
    contents = context.contents
    parts = context.split_requests.get(id(call)) or split_body(call.request)
    content = (
        encode(call.sampling),
        error_column(call.error),
        contents.blob(parts.skeleton),
        *contents.request(_branch(call), parts, len(call.request)),
        contents.blob(call.response),
    )
    packed, ids = _pack_tokens(context, call)
    plain_columns = [getattr(call, name) for name in _PLAIN]
    usage = [getattr(call.usage, name) for name in _USAGE]
    later_columns = (
        call.usage.cache_write_tokens,
        call.cost_usd,
        encode(call.policy_spans) if call.policy_spans else None,
        encode(call.audit) if call.audit else None,
    )
    return (*plain_columns, *usage, *content, *packed, *later_columns), packed[0], ids


def _pack_tokens(context: WriteContext, call: Call) -> tuple[tuple[Any, ...], Ids | None]:
    """Return the values of the columns `_TOKENS`, and the packed ids that the next call is likely to begin
    with.
    """
    pack = context.contents.pack
    base = _base_of(context, call.parent_id)
    logprobs = None if call.logprobs is None else pack(tokens.pack_logprobs(call.logprobs))
    packed_completion, count = b"", None
    if call.completion_token_ids is not None:
        packed_completion, count = tokens.pack_ids(call.completion_token_ids), len(call.completion_token_ids)
    completion = None if count is None else pack(packed_completion)
    if call.prompt_token_ids is None:
        return (base, None, None, None, count, completion, logprobs), None
    prompt = tokens.pack_ids(call.prompt_token_ids)
    base_ids = b"" if base is None else _ids_of(base, context.recent, lambda key: _read_link(context, key))
    shared = tokens.shared_bytes(base_ids, prompt)
    columns = (base, len(call.prompt_token_ids), shared, pack(prompt[shared:]), count, completion, logprobs)
    return columns, prompt + packed_completion


def _status(context: WriteContext, attempt_id: str) -> str | None:
    """Return the status of an attempt, which cannot change before the transaction ends; None if it is unknown."""
    if (locked := context.locked_statuses.get(attempt_id)) is not None:
        return locked
    row = context.session.fetch_one(_STATUS, (attempt_id,))
    return None if row is None else row[0]


def _is_stored(context: WriteContext, call: Call) -> bool:
    """Return whether a call is stored already. Raises StoreError if its id is that of another call."""
    existing = context.session.fetch_one(_FIND, (call.id,))
    if existing is not None and existing != (call.attempt_id, call.sequence):
        raise StoreError(
            f"duplicate call id {call.id}: it is stored as number {existing[1]} of attempt {existing[0]}; "
            f"give number {call.sequence} of attempt {call.attempt_id} a new id"
        )
    return existing is not None


def _prepare_appends(context: WriteContext, appended: Sequence[Call]) -> None:
    """Lock the attempts of several calls, and store the contents of all of them together."""
    attempt_ids = encode(sorted({call.attempt_id for call in appended})).decode()
    statuses: dict[str, str] = dict(context.session.fetch_all(_STATUSES, (attempt_ids,)))
    context.locked_statuses.update(statuses)
    accepted = [call for call in appended if statuses.get(call.attempt_id, "unresponsive") != "unresponsive"]
    requests: list[tuple[Hashable, Parts, list[Buffer]]] = []
    for call in accepted:
        parts = context.split_requests[id(call)] = split_body(call.request)
        requests.append((_branch(call), parts, [parts.skeleton, call.response]))
    context.contents.store_together(requests)
    if _are_independent(accepted):
        rows = [_row(context, call) for call in accepted]
        keys = context.session.insert_each(_INSERT, [row for row, _, _ in rows])
        for call, (_, base, ids), key in zip(accepted, rows, keys, strict=True):
            if key is not None:
                context.inserted_calls[id(call)] = InsertedCall(key, base, ids)


def _are_independent(appended: Sequence[Call]) -> bool:
    """Return whether calls can be inserted in any order: none builds on another one, or takes its place."""
    ids = {call.id for call in appended}
    places = {(call.attempt_id, call.sequence) for call in appended}
    return len(ids) == len(places) == len(appended) and ids.isdisjoint(call.parent_id for call in appended)


def _branch(call: Call) -> Hashable:
    return call.attempt_id, call.session_id, call.agent_id


def _base_of(context: WriteContext, parent_id: str | None) -> int | None:
    """Return the row of the nearest earlier call with prompt ids: the parent, or the call that the parent
    builds on.
    """
    if parent_id is None:
        return None
    if parent_id in context.token_bases:
        return context.token_bases[parent_id]
    row = context.session.fetch_one(_PARENT, (parent_id,))
    if row is None:
        return None
    key, base, has_prompt = row
    return key if has_prompt else base


def _read_link(context: WriteContext, key: int) -> Link:
    link = context.session.fetch_one(_LINK, (key,))
    if link is None:
        raise damaged(f"call row {key} is missing")
    base, shared, suffix, completion = link
    return base, shared, suffix, completion


def _began(attempt_id: str, since: float, until: float) -> ColumnElement[bool]:
    return and_(calls.c.attempt_id == attempt_id, calls.c.started_at >= since, calls.c.started_at < until)


# --- reading -------------------------------------------------------------------------------------------


def _read(connection: Connection, condition: ColumnElement[bool]) -> Iterator[Call]:
    """Yield the calls that meet a condition, by attempt and sequence number.

    All rows are read at once, each content once; the calls are assembled one at a time.
    """
    query = select(calls).where(condition).order_by(calls.c.attempt_id, calls.c.sequence)
    rows = connection.execute(query).mappings().all()
    tree = read_nodes(connection, select(calls.c.node_id).where(condition))
    blob_ids = {blob for _, blob in tree.values()}
    for row in rows:
        blob_ids.update(row[name] for name in _BLOBS if row[name] is not None)
    contents = read_blobs(connection, blob_ids)
    return _assemble(rows, tree, _read_links(connection, condition), contents)


def _outer_key(row: RowMapping) -> OuterKey:
    return (row["skeleton_id"], row["system_id"], row["tools_id"])


def _with_tokens(row: RowMapping, links: Mapping[int, Link], recent: RecentTokens) -> Call:
    """Return a call without request and response. Its tokens are unpacked when they are accessed."""
    key, completion, logprobs = row["key"], row["completion"], row["logprobs"]

    def prompt() -> Ids:
        ids = _ids_of(key, recent, links.__getitem__)
        return ids[: len(ids) - (0 if completion is None else len(unpack(completion)))]

    sampled = None if completion is None else StoredIds(lambda: unpack(completion), row["completion_count"])
    prompt_ids = None if row["suffix"] is None else StoredIds(prompt, row["prompt_count"])
    return Call(
        **_metadata(row),
        request=b"",
        response=b"",
        prompt_token_ids=cast("tuple[int, ...] | None", prompt_ids),
        completion_token_ids=cast("tuple[int, ...] | None", sampled),
        logprobs=None if logprobs is None else tokens.unpack_logprobs(unpack(logprobs)),
    )


def _read_links(connection: Connection, condition: ColumnElement[bool]) -> dict[int, Link]:
    """Return the stored tokens, by row, of the calls that meet a condition and of all calls that they build on."""
    chain = select(calls.c.key, calls.c.base_key).where(condition).cte("chain", recursive=True)
    chain = chain.union(select(calls.c.key, calls.c.base_key).join(chain, calls.c.key == chain.c.base_key))
    query = select(calls.c.key, calls.c.base_key, calls.c.shared, calls.c.suffix, calls.c.completion).where(
        calls.c.key.in_(select(chain.c.key))
    )
    return {
        key: (base, shared, suffix, completion)
        for key, base, shared, suffix, completion in connection.execute(query)
    }


def _assemble(
    rows: Sequence[RowMapping],
    tree: Mapping[int, tuple[int, int]],
    links: Mapping[int, Link],
    contents: Mapping[int, bytes],
) -> Iterator[Call]:
    recent = RecentTokens()
    for row in rows:
        prompt, completion, logprobs = _unpack_tokens(row, links, recent)
        request = join_body(
            contents[row["skeleton_id"]],
            contents.get(row["system_id"]),
            contents.get(row["tools_id"]),
            [contents[blob] for blob in blob_path(tree, row["node_id"])],
        )
        _refuse_pruned(row["id"], request, contents[row["response_id"]])
        yield Call(
            **_metadata(row),
            request=request,
            response=contents[row["response_id"]],
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            logprobs=logprobs,
        )


def _refuse_pruned(call_id: str, request: bytes, response: bytes) -> None:
    """Raise StoreError if a call's request and response were pruned."""
    if request == PRUNED_REQUEST:
        raise StoreError(
            f"the request and the response of call {call_id} were removed by `understudy prune` on "
            f"{_object(response).get('at')} and cannot be restored; use the rollout's status, patch and "
            "verdict, which remain"
        )


def _metadata(row: RowMapping) -> dict[str, Any]:
    """Return all fields of a call except its request, response and tokens."""
    return {
        **{name: row[name] for name in _PLAIN},
        "usage": Usage(**{name: row[name] for name in _USAGE}, cache_write_tokens=row["cache_write_tokens"]),
        "cost_usd": row["cost_usd"],
        "sampling": _object(row["sampling"]),
        "error": read_error(row["error"]),
        "policy_spans": _spans(row["policy_spans"]) if row["policy_spans"] else (),
        "audit": _object(row["audit"]) if row["audit"] else {},
    }


def _unpack_tokens(
    row: RowMapping, links: Mapping[int, Link], recent: RecentTokens
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[float, ...] | None]:
    prompt = completion = logprobs = None
    packed_completion = b""
    if row["completion"] is not None:
        packed_completion = unpack(row["completion"])
        completion = tokens.unpack_ids(packed_completion, row["completion_count"])
    if row["logprobs"] is not None:
        logprobs = tokens.unpack_logprobs(unpack(row["logprobs"]))
    if row["suffix"] is not None:
        ids = _ids_of(row["key"], recent, links.__getitem__)
        prompt = tokens.unpack_ids(ids[: len(ids) - len(packed_completion)], row["prompt_count"])
    return prompt, completion, logprobs


def _ids_of(key: int, recent: RecentTokens, link_of: Callable[[int], Link]) -> Ids:
    """Return the packed prompt and completion of a call that has a prompt.

    Follows the base calls back to one whose tokens are cached, then rebuilds the tokens from there.
    """
    chain: list[tuple[int, bytes, bytes | None]] = []
    step: int | None = key
    ids = b""
    while step is not None:
        if (cached := recent.get(step)) is not None:
            ids = cached
            break
        base, shared, suffix, completion = link_of(step)
        if base is not None and base >= step:
            raise damaged(f"call row {step} builds on row {base}, expected an earlier row")
        chain.append((shared, suffix, completion))
        step = base if shared else None
    for shared, suffix, completion in reversed(chain):
        packed_completion = b"" if completion is None else unpack(completion)
        ids = ids[:shared] + unpack(suffix) + packed_completion
    recent.put(key, ids)
    return ids
