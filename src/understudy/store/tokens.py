"""Token ids and logprobs as bytes, so that comparing, slicing and keeping long prompts costs almost nothing.

`Ids` are concatenated token ids, each encoded as a MessagePack integer of one to five bytes. That is as fast to
produce as four fixed bytes, and smaller if small ids are frequent. A prompt is stored as the number of *bytes*
that it shares with what came before it, and the bytes that follow. A cut in the middle of an id does no harm,
since the two are always joined again.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import msgspec

from understudy.errors import StoreError
from understudy.store.decoding import damaged

Ids = bytes
_ARRAY_32 = struct.Struct(">BI")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Any, ...]).decode


class TokenIds(Sequence[int]):
    """Token ids that are packed already, because nobody needs them one by one on their way to the store.

    Equal to a tuple of the same ids.
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
    """Where a stored prompt is: its call's row, the row that it builds on, and how many bytes it shares with that.

    The shared bytes are the beginning of that row's prompt followed by its completion.
    """

    key: int
    base_key: int | None
    shared: int


class StoredIds(TokenIds):
    """Token ids in the store. They are read at each access and not cached.

    `size` is their size in bytes, and `place` says where a prompt is stored.
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
        """The packed ids, read from the store now. Raises StoreError if they are damaged."""
        return self._load()

    @property
    def _ids(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return unpack_ids(self.packed, self._count)


def begins_with(prompt: Sequence[int], *beginning: Sequence[int]) -> bool:
    """Return whether a prompt begins with these ids, concatenated: the prompt of an earlier call and its
    completion.

    If the place in the store already answers this, no ids are read.
    """
    earlier_prompt = beginning[0] if beginning else ()
    if (
        isinstance(prompt, StoredIds)
        and isinstance(earlier_prompt, StoredIds)
        and prompt.place
        and earlier_prompt.place
    ):
        sizes = [ids.size for ids in beginning if isinstance(ids, StoredIds) and ids.size is not None]
        if prompt.place.base_key == earlier_prompt.place.key and len(sizes) == len(beginning):
            return prompt.place.shared >= sum(sizes)
    return pack_ids(prompt).startswith(b"".join(map(pack_ids, beginning)))


def pack_ids(ids: Sequence[int]) -> Ids:
    """Pack token ids. Raises StoreError if one does not fit in 64 bits."""
    if isinstance(ids, TokenIds):
        return ids.packed
    try:
        data = _encode(ids)
    except (TypeError, OverflowError) as error:
        invalid = next((id_ for id_ in ids if type(id_) is not int or not -(1 << 63) <= id_ < 1 << 64), None)
        raise StoreError(
            f"invalid token ids: {error}: got {invalid!r:.80}, expected integers that fit in 64 bits; correct "
            "what is passed as prompt_token_ids or completion_token_ids"
        ) from error
    # Drop the array's header, which holds the count in one, three or five bytes.
    return data[1 if len(ids) < 16 else 3 if len(ids) < 65_536 else 5 :]


def unpack_ids(ids: Ids, count: int) -> tuple[int, ...]:
    """Unpack `count` token ids. Raises StoreError if they are damaged."""
    try:
        return _decode(_ARRAY_32.pack(0xDD, count) + ids)
    except msgspec.MsgspecError as error:
        raise damaged(f"{count} token ids cannot be decoded ({error})") from error


def _is_packable(value: Any) -> bool:
    try:
        struct.pack("<d", value)
    except struct.error:
        return False
    return True


def pack_logprobs(values: Sequence[float]) -> bytes:
    """Pack logprobs without loss: as float32 if all are exactly representable (as from model servers), else as
    float64.

    Raises StoreError if one is not a number.
    """
    size = len(values)
    try:
        exact = struct.pack(f"<{size}d", *values)
    except struct.error as error:
        number, value = next((index, value) for index, value in enumerate(values) if not _is_packable(value))
        raise StoreError(
            f"invalid logprobs of a call: logprob {number} is {str(value)[:40]!r}, expected a number; please "
            "report it, or correct the backend if it is a plugin of your own"
        ) from error
    try:
        short = struct.pack(f"<{size}f", *values)
    except OverflowError:
        return b"d" + exact
    widened = struct.pack(f"<{size}d", *struct.unpack(f"<{size}f", short))
    return b"f" + short if widened == exact else b"d" + exact


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """Unpack logprobs."""
    kind, width = ("f", 4) if data[:1] == b"f" else ("d", 8)
    return struct.unpack(f"<{(len(data) - 1) // width}{kind}", data[1:])


def pack_float32(values: Iterable[float]) -> bytes:
    """Pack numbers as little-endian float32, with rounding."""
    numbers = list(values)
    return struct.pack(f"<{len(numbers)}f", *numbers)


def unpack_float32(data: bytes) -> tuple[float, ...]:
    """Unpack float32 numbers."""
    return struct.unpack(f"<{len(data) // 4}f", data)


def shared_bytes(earlier: Ids, prompt: Ids) -> int:
    """Return how many leading bytes the two have in common."""
    low, high = 0, min(len(earlier), len(prompt))
    if prompt.startswith(earlier[:high]):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if prompt.startswith(earlier[low:middle], low):
            low = middle
        else:
            high = middle
    return low


class RecentTokens:
    """Caches the tokens of calls, up to `limit` bytes; the least recently used are dropped first."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self._limit = limit
        self._size = 0
        self._ids: OrderedDict[int, Ids] = OrderedDict()

    def get(self, key: int) -> Ids | None:
        """Return the packed prompt and completion of a call if they are cached."""
        if (ids := self._ids.get(key)) is not None:
            self._ids.move_to_end(key)
        return ids

    def put(self, key: int, ids: Ids) -> None:
        """Cache the packed prompt and completion of a call."""
        self._size += len(ids) - len(self._ids.pop(key, b""))
        self._ids[key] = ids
        while self._size > self._limit:
            self._size -= len(self._ids.popitem(last=False)[1])

    def clear(self) -> None:
        """Drop all cached tokens."""
        self._ids.clear()
        self._size = 0
