"""Contents that are stored once: blobs by hash, request bodies in parts, conversations as nodes of a prefix
tree.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import zstandard
from msgspec import Raw, Struct
from sqlalchemy import ColumnElement, CompoundSelect, Connection, Select, bindparam, func, literal, select

from understudy.errors import StoreError
from understudy.store.bucket import Bucket, bucket_of
from understudy.store.decoding import damaged, decoder
from understudy.store.driver import WriterSession
from understudy.store.schema import blobs, nodes
from understudy.store.statements import HotStatement, hot_insert_once, json_values
from understudy.util.sequences import common_prefix_length

Buffer = bytes | Raw

MAX_MESSAGES = 10_000
MAX_KEYS = 100
_SLOTS = {
    "messages": "messages",
    "input": "messages",
    "contents": "messages",
    "system": "system",
    "instructions": "system",
    "systemInstruction": "system",
    "system_instruction": "system",
    "tools": "tools",
}
"""The slot of each body key, in all dialects. If two keys share a slot, the first one fills it."""
_KEY = re.compile(rb'[{,\s]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*+:\s*+')
_OPEN = re.compile(rb"\[\s*+")
_GLUE = re.compile(rb"[,\s]*+")
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_elements = msgspec.json.Decoder(list[Raw]).decode


class Skeleton(Struct, frozen=True, array_like=True):
    """What remains of a body without its parts: `pieces[i]` precedes slot `i`, the last piece follows all slots.

    `glue` separates two messages.
    """

    pieces: list[bytes]
    slots: list[str]
    glue: bytes = b","


_encode = msgspec.msgpack.Encoder().encode
_decode = decoder(Skeleton, "a request", packed=True)


class Parts(Struct, frozen=True):
    """A request body in parts. `skeleton` is an encoded Skeleton; `system` and `tools` are JSON values as sent."""

    skeleton: bytes
    system: Buffer | None = None
    tools: Buffer | None = None
    messages: Sequence[Buffer] = ()


def split_body(body: bytes) -> Parts:
    """Split a request body into parts from which `join_body` restores it byte by byte."""
    try:
        fields = _fields(body)
        slot_keys = _slot_keys(fields)
        messages = _elements(fields[slot_keys["messages"]]) if "messages" in slot_keys else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _unsplit(body)
    if len(fields) > MAX_KEYS or len(messages) > MAX_MESSAGES:
        return _unsplit(body)

    skeleton = Skeleton([], [], _glue(fields[slot_keys["messages"]], messages) if messages else b",")
    body_parts: dict[str, Buffer] = {}
    copied = position = 0
    for name, value in fields.items():
        if (key := _KEY.match(body, position)) is None:
            return _unsplit(body)
        start, size = key.end(), len(memoryview(value))
        position = start + size
        slot = _SLOTS.get(name)
        if slot is None or slot_keys.get(slot) != name:
            continue
        if slot != "messages":
            body_parts[slot] = value
        elif messages:
            start += _after_bracket(value)
            size = sum(len(memoryview(message)) for message in messages) + len(skeleton.glue) * (len(messages) - 1)
        else:
            continue
        skeleton.pieces.append(body[copied:start])
        skeleton.slots.append(slot)
        copied = start + size
    skeleton.pieces.append(body[copied:])

    parts = Parts(_encode(skeleton), body_parts.get("system"), body_parts.get("tools"), messages)
    # Bodies with duplicate keys or irregular spacing cannot be restored from parts, so they are stored whole.
    return parts if _fill(skeleton, body_parts, messages) == body else _unsplit(body)


def _slot_keys(fields: Mapping[str, Raw]) -> dict[str, str]:
    """Return the key that fills each slot. Messages must be a list: `input` may also be a single string."""
    slot_keys: dict[str, str] = {}
    for name, value in fields.items():
        slot = _SLOTS.get(name)
        if slot is not None and not (slot == "messages" and bytes(memoryview(value)[:1]) != b"["):
            slot_keys.setdefault(slot, name)
    return slot_keys


def join_body(skeleton: bytes, system: Buffer | None, tools: Buffer | None, messages: Sequence[Buffer]) -> bytes:
    """Return the body that `split_body` split into these parts. Raises StoreError if they do not fit together."""
    try:
        body_parts = {name: value for name, value in (("system", system), ("tools", tools)) if value is not None}
        return _fill(_decode(skeleton), body_parts, messages)
    except KeyError as error:
        raise damaged(f"a request lacks its part {error}, which its skeleton names") from error


def _fill(skeleton: Skeleton, body_parts: Mapping[str, Buffer], messages: Sequence[Buffer]) -> bytes:
    joined: list[Buffer] = []
    for piece, slot in zip(skeleton.pieces, skeleton.slots, strict=False):
        joined += (piece, skeleton.glue.join(messages) if slot == "messages" else body_parts[slot])
    joined.append(skeleton.pieces[-1])
    return b"".join(joined)


def _glue(value: Raw, messages: list[Raw]) -> bytes:
    if len(messages) == 1:
        return b","
    text = bytes(value)
    end = _after_bracket(value) + len(memoryview(messages[0]))
    return text[end : _match_end(_GLUE, text, end)]


def _after_bracket(value: Raw) -> int:
    return _match_end(_OPEN, value, 0)


def _match_end(pattern: re.Pattern[bytes], text: Buffer, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()


def _unsplit(body: bytes) -> Parts:
    return Parts(_encode(Skeleton([body], [])))


RAW: Final = 0
ZSTD: Final = 1
LEVEL: Final = 1
SMALL: Final = 96
"""Contents smaller than this many bytes are stored uncompressed, because zstd would not pay off."""

HASH: Final = 20
"""How many bytes of a SHA-256 identify a content. Finding two contents that agree in so many is infeasible."""

_STEPS: Final = 8
"""How many steps back from a conversation's end are read at first, since a call adds only a few messages."""

EMPTY: Final = 0
"""The node of the conversation without messages."""

CACHED_REQUEST_BYTES: Final = 32 << 20
"""Bytes of requests to cache in total: the last request of each of the most recent branches."""

_K = TypeVar("_K")
_REMEMBERED: Final = 100_000
_INSERT_BLOB = hot_insert_once(blobs, "hash", "codec", "data", "bucket_bytes", key="id", unique=("hash",))
_FIND_BLOB = HotStatement(select(blobs.c.id).where(blobs.c.hash == bindparam("hash")), "hash")
_INSERT_NODE = hot_insert_once(nodes, "parent_id", "blob_id", key="id", unique=("parent_id", "blob_id"))
_FIND_NODE = HotStatement(
    select(nodes.c.id).where(nodes.c.parent_id == bindparam("parent"), nodes.c.blob_id == bindparam("blob")),
    "parent",
    "blob",
)


class _Chain(Struct, frozen=True, gc=False):
    """The last stored request of a branch: its parts and their ids. `nodes[i]` is the node of `messages[i]`."""

    size: int
    parts: Parts
    system: int | None
    tools: int | None
    nodes: list[int]


_NOTHING = _Chain(0, Parts(b""), None, None, [])


class Packed(Struct, frozen=True, array_like=True, gc=False):
    """A content that is ready to be stored. Without `data` it refers to a content that was packed earlier."""

    digest: bytes
    codec: int = RAW
    data: bytes | None = None


def content_hash(data: Buffer) -> bytes:
    """Return the hash that identifies a content in the store."""
    return sha256(data).digest()[:HASH]


class Packer:
    """Compresses contents outside of the writer's thread, so that the writer only has to write them.

    A content that was packed before is returned without its data, so the results of one packer must be stored in
    the order in which they were returned.
    """

    def __init__(self) -> None:
        self._compress = zstandard.ZstdCompressor(level=LEVEL).compress
        self._known_digests: set[bytes] = set()

    def __call__(self, data: bytes) -> Packed:
        """Pack these bytes."""
        digest = content_hash(data)
        if digest in self._known_digests:
            return Packed(digest)
        if len(self._known_digests) >= _REMEMBERED:
            self._known_digests.clear()
        self._known_digests.add(digest)
        return Packed(digest, *_pack(self._compress, data))


class ContentWriter:
    """Writes blobs and nodes within the writer's transaction, and caches the ids of recent ones.

    A large content, if the store has a bucket, must be in the bucket before the transaction begins. One that is
    not is noted in `uploads`: then the transaction must be rolled back and repeated after `upload`.
    """

    def __init__(self, session: WriterSession, bucket: Bucket | None) -> None:
        self._session = session
        self._bucket = bucket
        self.uploads: dict[bytes, bytes] = {}
        self._uploaded: set[bytes] = set()
        self._blobs: dict[bytes, int] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        self._last_requests: OrderedDict[Hashable, _Chain] = OrderedDict()
        self._size = 0
        self._compress = zstandard.ZstdCompressor(level=LEVEL).compress

    def blob(self, data: Buffer) -> int:
        """Return the id of the blob with these bytes; a new one is stored."""
        digest = content_hash(data)
        blob_id = self._blobs.get(digest)
        if blob_id is None:
            row = (digest, *self.columns(digest, *self._packed(data)))
            blob_id = self._id(_INSERT_BLOB, row, _FIND_BLOB, (digest,))
            _remember(self._blobs, digest, blob_id)
        return blob_id

    def packed(self, content: Packed) -> int:
        """Return the id of the blob with this content; a new one is stored.

        Raises StoreError for a content without data that is not in the store.
        """
        blob_id = self._blobs.get(content.digest)
        if blob_id is None:
            if content.data is not None:
                row = (content.digest, *self.columns(content.digest, content.codec, content.data))
                blob_id = self._id(_INSERT_BLOB, row, _FIND_BLOB, (content.digest,))
            elif row := self._session.fetch_one(_FIND_BLOB, (content.digest,)):
                blob_id = int(row[0])
            else:
                raise StoreError(
                    f"an earlier write failed, so the content {content.digest.hex()[:12]}, which this write "
                    "needs, is not stored; run the same command again"
                )
            _remember(self._blobs, content.digest, blob_id)
        return blob_id

    def request(self, branch: Hashable, parts: Parts, size: int) -> tuple[int | None, int | None, int]:
        """Return the ids of a request's system prompt and tools, and the node of its last message; new ones are
        stored.

        Parts that equal those of the `branch`'s last request are compared instead of hashed. That covers most of a
        request, in a tenth of the time.
        """
        previous = self._last_requests.pop(branch, _NOTHING)
        system = previous.system if parts.system == previous.parts.system else self._blob(parts.system)
        tools = previous.tools if parts.tools == previous.parts.tools else self._blob(parts.tools)
        nodes = previous.nodes[: common_prefix_length(parts.messages, previous.parts.messages)]
        node = nodes[-1] if nodes else EMPTY
        for message in parts.messages[len(nodes) :]:
            node = self.node(node, self.blob(message))
            nodes.append(node)
        self._last_requests[branch] = _Chain(size, parts, system, tools, nodes)
        self._size += size - previous.size
        while self._size > CACHED_REQUEST_BYTES:
            self._size -= self._last_requests.popitem(last=False)[1].size
        return system, tools, node

    def store_together(self, requests: Sequence[tuple[Hashable, Parts, Sequence[Buffer]]]) -> None:
        """Store what is new in several requests, so that their ids are cached: in a few round trips for all.

        A request is given by its branch, its parts, and other contents that are stored with it.
        """
        data: dict[bytes, Buffer] = {}
        chains: list[tuple[int, list[bytes]]] = []
        for branch, parts, further_contents in requests:
            previous = self._last_requests.get(branch, _NOTHING)
            shared = common_prefix_length(parts.messages, previous.parts.messages)
            digests = [content_hash(message) for message in parts.messages[shared:]]
            chains.append((previous.nodes[shared - 1] if shared else EMPTY, digests))
            data.update(zip(digests, parts.messages[shared:], strict=True))
            outer = [parts.system if parts.system != previous.parts.system else None]
            outer.append(parts.tools if parts.tools != previous.parts.tools else None)
            data |= {
                content_hash(content): content for content in (*outer, *further_contents) if content is not None
            }
        # In one order in all processes, which could wait for each other otherwise.
        new_digests = sorted(data.keys() - self._blobs.keys())
        rows = [(digest, *self.columns(digest, *self._packed(data[digest]))) for digest in new_digests]
        ids = self._ids(_INSERT_BLOB, rows, _FIND_BLOB, [(digest,) for digest in new_digests])
        blob_ids = {digest: self._blobs[digest] for digest in data.keys() & self._blobs.keys()}
        for digest, blob_id in zip(new_digests, ids, strict=True):
            blob_ids[digest] = blob_id
            _remember(self._blobs, digest, blob_id)
        for position in range(max((len(digests) for _, digests in chains), default=0)):
            chains = [chain for chain in chains if len(chain[1]) > position]
            steps = [(node, blob_ids[digests[position]]) for node, digests in chains]
            nodes = {step: self._nodes[step] for step in steps if step in self._nodes}
            new_steps = sorted(set(steps) - nodes.keys())
            nodes |= zip(new_steps, self._ids(_INSERT_NODE, new_steps, _FIND_NODE, new_steps), strict=True)
            for step in new_steps:
                _remember(self._nodes, step, nodes[step])
            chains = [(nodes[step], digests) for step, (_, digests) in zip(steps, chains, strict=True)]

    def _blob(self, data: Buffer | None) -> int | None:
        return None if data is None else self.blob(data)

    def node(self, parent: int, blob_id: int) -> int:
        """Return the node that appends a blob to the conversation ending in `parent`; a new one is stored."""
        step = (parent, blob_id)
        node_id = self._nodes.get(step)
        if node_id is None:
            node_id = self._id(_INSERT_NODE, step, _FIND_NODE, step)
            _remember(self._nodes, step, node_id)
        return node_id

    def pack(self, data: bytes) -> bytes:
        """Return the bytes compressed for a column. The first byte is the codec."""
        return with_codec(*self._packed(data))

    def columns(self, digest: bytes, codec: int, packed: bytes) -> tuple[int, bytes, int | None]:
        """Return the columns `codec`, `data` and `bucket_bytes` of a content's row."""
        if self._bucket is None or len(packed) < self._bucket.setting.min_bytes:
            return codec, packed, None
        if digest not in self._uploaded and self._session.fetch_one(_FIND_BLOB, (digest,)) is None:
            self.uploads[digest] = with_codec(codec, packed)
        return in_bucket(packed)

    def upload(self) -> None:
        """Write to the bucket what the transaction that was rolled back needs there.

        Pruning needs exclusive access to the store, so the objects stay at least until this session ends. Raises
        BucketUnavailable and StoreError.
        """
        assert self._bucket is not None
        uploads, self.uploads = self.uploads, {}
        self._bucket.write(uploads)
        self._uploaded |= uploads.keys()

    def end_transaction(self) -> None:
        """Forget what was uploaded for the transaction that was committed."""
        self._uploaded.clear()

    def forget(self) -> None:
        """Clear the caches after a rollback, since ids in them may not be in the store."""
        self._blobs.clear()
        self._nodes.clear()
        self._last_requests.clear()
        self._size = 0

    def _id(
        self, insert_it: HotStatement, row: tuple[Any, ...], find_it: HotStatement, key: tuple[Any, ...]
    ) -> int:
        """Return the id of a row.

        It inserts first and searches second, since most rows that are not cached are new.
        """
        inserted = self._session.insert(insert_it, row)
        return self._existing(find_it, key) if inserted is None else inserted

    def _ids(
        self,
        insert_it: HotStatement,
        rows: Sequence[tuple[Any, ...]],
        find_it: HotStatement,
        keys: Sequence[tuple[Any, ...]],
    ) -> list[int]:
        """Return the ids of several rows, like `_id`."""
        inserted = self._session.insert_each(insert_it, rows)
        return [
            self._existing(find_it, key) if row_id is None else row_id
            for row_id, key in zip(inserted, keys, strict=True)
        ]

    def _existing(self, find_it: HotStatement, key: tuple[Any, ...]) -> int:
        existing = self._session.fetch_one(find_it, key)
        if existing is None:
            values = ", ".join(value.hex() if isinstance(value, bytes) else str(value) for value in key)
            raise damaged(f"the row of a content or node that was stored earlier is missing ({values})")
        return existing[0]

    def _packed(self, data: Buffer) -> tuple[int, bytes]:
        return _pack(self._compress, bytes(data))


def _pack(compress: Callable[[bytes], bytes], plain: bytes) -> tuple[int, bytes]:
    if len(plain) >= SMALL and len(packed := compress(plain)) < len(plain):
        return ZSTD, packed
    return RAW, plain


def unpack(column: bytes) -> bytes:
    """Decompress what `ContentWriter.pack` returned. Raises StoreError if it is damaged."""
    return _unpacked(column[0], column[1:], "a token column")


HEAD_BYTES: Final = 1 + 18
"""This many bytes of a column tell the size of its content: the codec, and zstd's longest header."""


def unpacked_size(head: bytes, size: int) -> int:
    """Return how many bytes `unpack` would return for a column of `size` bytes that begins with `head`."""
    if head[:1] == bytes((RAW,)):
        return size - 1
    try:
        return zstandard.frame_content_size(head[1:])
    except zstandard.ZstdError as error:
        raise damaged(f"a token column cannot be decompressed ({error})") from error


def with_codec(codec: int, packed: bytes) -> bytes:
    """Return a packed content as a column of tokens or an object of a bucket holds it: the codec is in front."""
    return bytes((codec,)) + packed


def stored_bytes() -> ColumnElement[int]:
    """Select the bytes that a content takes, in the database or in the bucket."""
    return func.coalesce(blobs.c.bucket_bytes, func.length(blobs.c.data))


def in_bucket(packed: bytes) -> tuple[int, bytes, int]:
    """Return the columns `codec`, `data` and `bucket_bytes` of a content that is in the bucket."""
    return RAW, b"", 1 + len(packed)


class BucketContent(NamedTuple):
    """A content that was read from a bucket: as its object has it, and its bytes."""

    codec: int
    packed: bytes
    plain: bytes


def read_objects(bucket: Bucket | None, digests: Sequence[bytes]) -> list[BucketContent]:
    """Return contents from a bucket, by their hashes. Raises StoreError if one is missing or damaged."""
    if bucket is None:
        raise damaged("it has contents in a bucket, but no setting of that bucket")
    contents: list[BucketContent] = []
    for digest, data in zip(digests, bucket.read(digests), strict=True):
        try:
            plain = unpack(data) if data else None
        except StoreError:
            plain = None
        if plain is None or content_hash(plain) != digest:
            raise StoreError(
                f"{bucket.name(digest)} is damaged: its content does not have the hash in its key; restore the "
                "object from a version or a copy of the bucket, or the store from a copy"
            )
        contents.append(BucketContent(data[0], data[1:], plain))
    return contents


def read_blobs(connection: Connection, ids: Iterable[int]) -> dict[int, bytes]:
    """Return the bytes of blobs by id. Raises StoreError if one is missing or damaged."""
    wanted_ids = set(ids)
    columns = (blobs.c.id, blobs.c.codec, blobs.c.data, blobs.c.bucket_bytes, blobs.c.hash)
    query = select(*columns).where(blobs.c.id.in_(json_values(sorted(wanted_ids))))
    # creating a decompressor takes longer than decompressing a small blob
    decompress = zstandard.ZstdDecompressor().decompress
    by_id: dict[int, bytes] = {}
    bucket_digests: dict[int, bytes] = {}
    for key, codec, data, bucket_bytes, digest in connection.execute(query).all():
        if bucket_bytes is None:
            by_id[key] = _unpacked(codec, data, f"blob {key}", decompress)
        else:
            bucket_digests[key] = digest
    if bucket_digests:
        contents = read_objects(bucket_of(connection), list(bucket_digests.values()))
        by_id |= {key: content.plain for key, content in zip(bucket_digests, contents, strict=True)}
    if missing := wanted_ids - by_id.keys():
        raise damaged(f"blob {min(missing)} is missing")
    return by_id


def read_nodes(connection: Connection, ends: Select[Any] | CompoundSelect[Any]) -> dict[int, tuple[int, int]]:
    """Return all nodes of some conversations: id → (id of the node before it, id of its blob).

    `ends` is a query for the ids of the conversations' last nodes.
    """
    columns = (nodes.c.id, nodes.c.parent_id, nodes.c.blob_id)
    chain = select(*columns).where(nodes.c.id.in_(ends)).cte("path", recursive=True)
    chain = chain.union(select(*columns).join(chain, nodes.c.id == chain.c.parent_id))
    return {key: (parent, blob) for key, parent, blob in connection.execute(select(chain)).all()}


def extend_nodes(connection: Connection, tree: dict[int, tuple[int, int]], ends: Iterable[int]) -> list[int]:
    """Add the nodes of some conversations to `tree`, reading only those that it lacks. Returns the new nodes."""
    new_nodes: list[int] = []
    missing_nodes = {node for node in ends if node != EMPTY and node not in tree}
    columns, steps = (nodes.c.id, nodes.c.parent_id, nodes.c.blob_id), _STEPS
    while missing_nodes:
        chain = select(*columns, literal(0).label("step")).where(
            nodes.c.id.in_(json_values(sorted(missing_nodes)))
        )
        chain = chain.cte("path", recursive=True)
        parents = select(*columns, chain.c.step + 1).join(chain, nodes.c.id == chain.c.parent_id)
        chain = chain.union(parents.where(chain.c.step < steps))
        links = {key: (parent, blob) for key, parent, blob, _ in connection.execute(select(chain)).all()}
        if missing := missing_nodes - links.keys():
            raise damaged(f"node {min(missing)} is missing")
        new_nodes += links.keys() - tree.keys()
        tree |= links
        missing_nodes = {parent for parent, _ in links.values() if parent != EMPTY and parent not in tree}
        steps *= 4
    return new_nodes


def blob_path(tree: Mapping[int, tuple[int, int]], node: int) -> list[int]:
    """Return the blob ids of a conversation, first message first. Raises StoreError if a node is missing."""
    steps: list[int] = []
    while node != EMPTY:
        if node not in tree or len(steps) > len(tree):
            raise damaged(f"node {node} does not lead to a root")
        node, blob = tree[node]
        steps.append(blob)
    steps.reverse()
    return steps


def _unpacked(
    codec: int, data: bytes, description: str, decompress: Callable[[bytes], bytes] = zstandard.decompress
) -> bytes:
    if codec == RAW:
        return data
    try:
        return decompress(data)
    except zstandard.ZstdError as error:
        raise damaged(f"{description} cannot be decompressed ({error})") from error


def _remember(memory: dict[_K, int], key: _K, value: int) -> None:
    if len(memory) >= _REMEMBERED:
        memory.clear()
    memory[key] = value
