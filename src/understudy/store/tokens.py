"""Token ids and logprobs as bytes, so that comparing, cutting and keeping long prompts costs next to nothing.

`Ids` are token ids one after another, each as MessagePack writes an integer: one to five bytes for any real
vocabulary. That is made as fast as a fixed width of four bytes or faster, and is smaller where small ids are
frequent. A prompt is stored as the number of *bytes* it
shares with what came before it and the bytes that follow; a cut within an id heals when the two are joined.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import msgspec

from understudy.errors import StoreError

Ids = bytes
_ARRAY_32 = struct.Struct(">BI")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Any, ...]).decode


class TokenIds(Sequence[int]):
    """Token ids that are packed already: on their way to the store nobody needs them one by one.

    Equal to the tuple of the same ids.
    """

    def __init__(self, packed: Ids, count: int) -> None:
        self.packed = packed
        self._count = count

    @cached_property
    def _ids(self) -> tuple[int, ...]:
        return unpack_ids(self.packed, self._count)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self._ids[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        return self._ids == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._ids)

    def __repr__(self) -> str:
        return f"TokenIds{self._ids}"


class StoredPlace(NamedTuple):
    """Where a stored prompt is: its call's row, the row that it is stored after, how many bytes they share.

    What comes first in that row are the prompt and the completion of its call.
    """

    key: int
    base_key: int | None
    shared: int


class StoredIds(TokenIds):
    """Token ids that are in the store: read whenever they are looked at, and not remembered here.

    `size` is how many bytes they take, and `place` of a prompt where it is.
    """

    def __init__(
        self, load: Callable[[], Ids], count: int, size: int | None = None, place: StoredPlace | None = None
    ) -> None:
        self._load = load
        self._count = count
        self.size = size
        self.place = place

    @property
    def packed(self) -> Ids:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The packed ids, as they are read now. Raises StoreError when they are damaged."""
        return self._load()

    @property
    def _ids(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return unpack_ids(self.packed, self._count)


def begins_with(now: Sequence[int], *before: Sequence[int]) -> bool:
    """Whether a prompt begins with these ids, one after another: the prompt of an earlier call, its completion.

    What the store knows of that is not read.
    """
    first = before[0] if before else ()
    if isinstance(now, StoredIds) and isinstance(first, StoredIds) and now.place and first.place:
        sizes = [each.size for each in before if isinstance(each, StoredIds) and each.size is not None]
        if now.place.base_key == first.place.key and len(sizes) == len(before):
            return now.place.shared >= sum(sizes)
    return pack_ids(now).startswith(b"".join(map(pack_ids, before)))


def pack_ids(ids: Sequence[int]) -> Ids:
    """Pack token ids. Raises StoreError when one does not fit in 64 bits."""
    if isinstance(ids, TokenIds):
        return ids.packed
    try:
        data = _encode(ids)
    except (TypeError, OverflowError) as error:
        raise StoreError(f"token ids must be integers ({error}); check the backend's response") from error
    # The array's own header, which tells the count: one, three or five bytes.
    return data[1 if len(ids) < 16 else 3 if len(ids) < 65_536 else 5 :]


def unpack_ids(ids: Ids, count: int) -> tuple[int, ...]:
    """The `count` token ids that were packed. Raises StoreError when they are damaged."""
    try:
        return _decode(_ARRAY_32.pack(0xDD, count) + ids)
    except msgspec.MsgspecError as error:
        raise StoreError(f"the store is damaged: token ids: {error}; restore it from a copy") from error


def pack_logprobs(values: Sequence[float]) -> bytes:
    """Pack logprobs, bit for bit: as float32 where they are, as model servers give them, else as float64.

    Raises StoreError when one is not a number.
    """
    size = len(values)
    try:
        exact = struct.pack(f"<{size}d", *values)
    except struct.error as error:
        raise StoreError(f"logprobs must be numbers ({error}); check the backend's response") from error
    try:
        short = struct.pack(f"<{size}f", *values)
    except OverflowError:
        return b"d" + exact
    widened = struct.pack(f"<{size}d", *struct.unpack(f"<{size}f", short))
    return b"f" + short if widened == exact else b"d" + exact


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """The logprobs that were packed."""
    kind, width = ("f", 4) if data[:1] == b"f" else ("d", 8)
    return struct.unpack(f"<{(len(data) - 1) // width}{kind}", data[1:])


def pack_float32(values: Iterable[float]) -> bytes:
    """Pack numbers as float32, little-endian; what is not exact as such is rounded."""
    numbers = list(values)
    return struct.pack(f"<{len(numbers)}f", *numbers)


def unpack_float32(data: bytes) -> tuple[float, ...]:
    """The numbers that were packed."""
    return struct.unpack(f"<{len(data) // 4}f", data)


def shared_bytes(before: Ids, prompt: Ids) -> int:
    """How many leading bytes the two have in common."""
    low, high = 0, min(len(before), len(prompt))
    if prompt.startswith(before[:high]):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if prompt.startswith(before[low:middle], low):
            low = middle
        else:
            high = middle
    return low


class RecentTokens:
    """The tokens of the calls used last, up to `limit` bytes of them. What is not there is read again."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self._limit = limit
        self._size = 0
        self._ids: OrderedDict[int, Ids] = OrderedDict()

    def get(self, key: int) -> Ids | None:
        """The prompt and completion of a call, if it was used lately."""
        if (ids := self._ids.get(key)) is not None:
            self._ids.move_to_end(key)
        return ids

    def put(self, key: int, ids: Ids) -> None:
        """Keep the prompt and completion of a call."""
        self._size += len(ids) - len(self._ids.pop(key, b""))
        self._ids[key] = ids
        while self._size > self._limit:
            self._size -= len(self._ids.popitem(last=False)[1])

    def clear(self) -> None:
        """Keep nothing."""
        self._ids.clear()
        self._size = 0
