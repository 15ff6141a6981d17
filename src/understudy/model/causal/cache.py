"""The KV cache: slots for the sequences being decoded, and a prefix cache of finished ones that may be reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from transformers.cache_utils import Cache

_CAPACITY_STEP = 256
"""Slots grow in steps of this many tokens."""

Ids = npt.NDArray[np.int32]


class CachedSequence(Struct, frozen=True):
    """Keys and values of the tokens `ids` under the weights `owner`: for each layer a pair of tensors [heads,
    tokens, size].
    """

    owner: str
    ids: Ids
    layers: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return sum(part.numel() * part.element_size() for pair in self.layers for part in pair)

    def prefix(self, length: int) -> CachedSequence:
        """Return a copy that holds its first `length` tokens."""
        layers = [(keys[:, :length].clone(), values[:, :length].clone()) for keys, values in self.layers]
        return CachedSequence(self.owner, self.ids[:length], layers)


class SlotCache(Cache):
    """The KV cache that `transformers` gets: row i of each layer's tensors is the sequence in slot i.

    Sequences are left-aligned. After a sequence's end there are stale values, which the attention mask hides.
    Before each forward pass, `target` selects the rows that it computes and the positions of their new tokens.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows = self._capacity = 0
        self._target: tuple[Sequence[int], Sequence[int], int] = ((), (), 0)
        self._indexes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._row_range: slice | None = None

    def reserve(self, rows: int, length: int) -> None:
        """Allocate memory for sequences of `length` tokens in the first `rows` slots."""
        if rows <= self._rows and length <= self._capacity:
            return
        self._rows = max(rows, self._rows)
        if length > self._capacity:
            self._capacity = max(length, min(2 * self._capacity, self._capacity + 8 * _CAPACITY_STEP))
            self._capacity = -(-self._capacity // _CAPACITY_STEP) * _CAPACITY_STEP
        # one layer at a time, so that only one old copy is in memory
        for layer, (keys, values) in enumerate(self._pairs):
            self._pairs[layer] = (self._grown(keys), self._grown(values))

    def target(self, rows: Sequence[int], starts: Sequence[int], length: int) -> None:
        """Select what the next forward pass computes: `length` new tokens for each of `rows`, written from
        `starts` on.

        With several rows, `length` is 1.
        """
        self._target = (rows, starts, length)
        self._indexes = None
        if len(rows) > 1:
            # On the device of the cache, because every layer would copy them there.
            device = self._pairs[0][0].device if self._pairs else None
            self._indexes = (torch.tensor(rows, device=device), torch.tensor(starts, device=device))
        first, last = rows[0], rows[-1]
        # Adjacent rows can be read as a slice, without copying; others must be indexed, which copies them.
        self._row_range = slice(first, last + 1) if list(rows) == [*range(first, last + 1)] else None

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values; return all keys and values of the target rows."""
        while len(self._pairs) <= layer_idx:
            self._pairs.append((self._empty(key_states), self._empty(value_states)))
        keys, values = self._pairs[layer_idx]
        rows, starts, length = self._target
        end = max(starts) + length
        if self._indexes is None:
            row, start = rows[0], starts[0]
            keys[row, :, start:end] = key_states[0]
            values[row, :, start:end] = value_states[0]
            return keys[row : row + 1, :, :end], values[row : row + 1, :, :end]
        row_index, positions = self._indexes
        keys[row_index, :, positions] = key_states[:, :, 0]
        values[row_index, :, positions] = value_states[:, :, 0]
        chosen = row_index if self._row_range is None else self._row_range
        return keys[chosen, :, :end], values[chosen, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens precede those of the next forward pass."""
        return max(self._target[1], default=0)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` into slot `target`."""
        for pair in self._pairs:
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def zero(self, row: int) -> None:
        """Fill a slot with zeros."""
        for pair in self._pairs:
            for tensor in pair:
                tensor[row].zero_()

    def save(self, row: int, owner: str, ids: Ids) -> CachedSequence:
        """Return a copy of the sequence in a slot, whose tokens are `ids`."""
        length = len(ids)
        return CachedSequence(
            owner,
            ids,
            [(keys[row, :, :length].clone(), values[row, :, :length].clone()) for keys, values in self._pairs],
        )

    def load(self, row: int, sequence: CachedSequence, length: int) -> None:
        """Copy the first `length` tokens of a cached sequence into a slot."""
        while len(self._pairs) < len(sequence.layers):
            keys, values = sequence.layers[len(self._pairs)]
            self._pairs.append((self._empty(keys.unsqueeze(0)), self._empty(values.unsqueeze(0))))
        for (keys, values), (cached_keys, cached_values) in zip(self._pairs, sequence.layers, strict=True):
            keys[row, :, :length] = cached_keys[:, :length]
            values[row, :, :length] = cached_values[:, :length]

    def clear(self) -> None:
        """Drop all sequences and free their memory."""
        self._pairs = []
        self._rows = self._capacity = 0

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = like.shape
        return like.new_zeros((self._rows, heads, self._capacity, size))

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = self._empty(old)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


class PrefixCache:
    """Recently decoded sequences, so that a prompt that shares a prefix with one need not compute that prefix
    again.

    Holds at most `limit` bytes; the least recently used sequences are evicted first.
    """

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._sequences: list[CachedSequence] = []  # the most recently used is last

    def find(self, owner: str, ids: Ids) -> tuple[CachedSequence | None, int]:
        """Return the sequence with the longest common prefix with `ids`, or None, and that prefix's length."""
        best, length = None, 0
        for sequence in self._sequences:
            if sequence.owner == owner and (shared := common_prefix_length(sequence.ids, ids)) > length:
                best, length = sequence, shared
        if best is not None:
            self._remove(best)
            self._append(best)
        return best, length

    def add(self, sequence: CachedSequence) -> None:
        """Add a sequence, shortened to the limit; cached sequences that are prefixes of it are dropped."""
        if sequence.size > self._limit:
            sequence = sequence.prefix(len(sequence.ids) * self._limit // sequence.size)
        if not len(sequence.ids):
            return
        for cached_sequence in [cached for cached in self._sequences if cached.owner == sequence.owner]:
            shared = common_prefix_length(cached_sequence.ids, sequence.ids)
            if shared == len(sequence.ids):
                return
            if shared == len(cached_sequence.ids):
                self._remove(cached_sequence)
        self._append(sequence)
        while self.size > self._limit:
            self._remove(self._sequences[0])

    def clear(self, owner: str | None = None) -> None:
        """Drop all sequences, or only those computed with the weights `owner`."""
        for sequence in [cached for cached in self._sequences if owner is None or cached.owner == owner]:
            self._remove(sequence)

    def _append(self, sequence: CachedSequence) -> None:
        self._sequences.append(sequence)
        self.size += sequence.size

    def _remove(self, sequence: CachedSequence) -> None:
        self._sequences = [cached for cached in self._sequences if cached is not sequence]
        self.size -= sequence.size


def common_prefix_length(a: Ids, b: Ids) -> int:
    """Return how many leading tokens two sequences share."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
