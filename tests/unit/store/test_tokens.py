"""Token ids and logprobs: exact, whatever they are, and cheap where they continue what came before."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from understudy.errors import StoreError
from understudy.store.tokens import (
    RecentTokens,
    pack_ids,
    pack_logprobs,
    shared_bytes,
    unpack_ids,
    unpack_logprobs,
)

ids = st.lists(st.integers(0, 300_000), max_size=60).map(tuple)


@given(st.lists(st.integers(-(2**63), 2**64 - 1), max_size=80).map(tuple))
@example((7,) * 15)
@example((7,) * 16)
@example((7,) * 65_535)
@example((7,) * 65_536)
def test_token_ids_come_back(given_ids: tuple[int, ...]) -> None:
    assert unpack_ids(pack_ids(given_ids), len(given_ids)) == given_ids


@given(ids, ids, ids)
def test_a_prompt_is_what_it_shares_and_the_rest(
    common: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    old, new = pack_ids(common + before), pack_ids(common + after)
    shared = shared_bytes(old, new)
    assert shared >= len(pack_ids(common))
    assert old[:shared] == new[:shared]
    assert shared == min(len(old), len(new)) or old[shared] != new[shared]
    assert unpack_ids(old[:shared] + new[shared:], len(common + after)) == common + after


@given(st.lists(st.floats(width=64), max_size=50))
@example([-0.0, math.inf, -math.inf])
@example([5e-324, 1.7976931348623157e308])
def test_logprobs_come_back_bit_for_bit(values: list[float]) -> None:
    unpacked = unpack_logprobs(pack_logprobs(values))
    assert struct.pack(f"<{len(values)}d", *unpacked) == struct.pack(f"<{len(values)}d", *values)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=50))
def test_float32_logprobs_take_four_bytes(values: list[float]) -> None:
    assert len(pack_logprobs(values)) == 1 + 4 * len(values)


@pytest.mark.parametrize("bad", [(2**64,), (-(2**63) - 1,), (object(),)])
def test_ids_that_are_no_ids_are_a_clear_error(bad: tuple[int, ...]) -> None:
    with pytest.raises(StoreError, match=r"invalid token ids: .*: got .*, expected integers that fit"):
        pack_ids(bad)


@pytest.mark.parametrize("bad", [None, "nan", 10**400])
def test_logprobs_that_are_no_numbers_are_named(bad: Any) -> None:
    with pytest.raises(StoreError, match=rf"logprob 1 is '{str(bad)[:40]}', expected a number"):
        pack_logprobs([-0.5, bad, -1])


def test_damaged_ids_are_a_clear_error() -> None:
    with pytest.raises(StoreError, match="damaged"):
        unpack_ids(b"\x01", 2)


def test_what_was_used_last_is_kept() -> None:
    recent = RecentTokens(limit=10)
    recent.put(1, b"aaaa")
    recent.put(2, b"bbbb")
    assert recent.get(1) == b"aaaa"
    recent.put(3, b"cccc")
    assert (recent.get(1), recent.get(2), recent.get(3)) == (b"aaaa", None, b"cccc")
    recent.put(4, b"longer than the limit")
    assert recent.get(4) is None
