"""What a trainer computed for tokens: kept beside the calls, bounded, and removed oldest first."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.store import Store
from understudy.store.training import TokenValues

from support.store import make_call

COUNT = 40


def values(call_id: str, advantage: float = 0.5) -> TokenValues:
    logprobs = tuple(-number / 7 for number in range(COUNT))
    return TokenValues(
        call_id=call_id, logprobs=logprobs, ratios=(1.0, math.nan) * (COUNT // 2), advantages=(advantage,) * COUNT
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as store:
        client = store.keys.add_client("x").result()
        for number in range(4):
            store.calls.append(make_call(client.id, number, id=f"c{number}")).result()
        yield store


def test_values_come_back_as_float32_by_call_and_by_step(store: Store):
    stored = store.training.record(1, "step-0001", [values("c0"), values("c1")], limit_bytes=1 << 20).result()
    assert stored == 2
    assert store.training.record(2, "step-0002", [values("c0", -1.0)], limit_bytes=1 << 20).result() == 1
    first, second = store.training.of_call("c0")
    assert (first.step, first.version, second.step, second.version) == (1, "step-0001", 2, "step-0002")
    exact = [struct.unpack("<f", struct.pack("<f", -number / 7))[0] for number in range(COUNT)]
    assert list(first.logprobs) == exact and first.advantages == (0.5,) * COUNT
    assert first.ratios[0] == 1.0 and math.isnan(first.ratios[1])
    assert second.advantages == (-1.0,) * COUNT
    assert [each.call_id for each in store.training.of_step(1)] == ["c0", "c1"]
    assert store.training.of_call("c3") == []


def test_a_step_that_is_repeated_replaces_what_it_had_and_calls_of_other_stores_are_ignored(store: Store):
    store.training.record(1, "a", [values("c0"), values("c1")], limit_bytes=1 << 20).result()
    stored = store.training.record(1, "b", [values("c2"), values("elsewhere")], limit_bytes=1 << 20).result()
    assert stored == 1
    assert [(each.call_id, each.version) for each in store.training.of_step(1)] == [("c2", "b")]


def test_the_bound_holds_and_the_oldest_steps_go_first(store: Store):
    store.training.record(1, "a", [values("c0")], limit_bytes=1 << 20).result()
    (step,) = store.training.steps()
    assert (step.step, step.calls) == (1, 1)
    # Three arrays of 40 float32 each; two of them compress.
    assert 0 < step.bytes < 3 * 4 * COUNT + 3
    limit = 2 * step.bytes
    for number in (2, 3, 4):
        store.training.record(number, "b", [values("c1")], limit_bytes=limit).result()
        assert sum(each.bytes for each in store.training.steps()) <= limit
    assert [each.step for each in store.training.steps()] == [3, 4]
    stored = store.training.record(5, "c", [values(f"c{n}") for n in range(4)], limit_bytes=limit).result()
    assert stored == 2, "what a step has beyond the bound is left out"
    assert [(each.step, each.calls) for each in store.training.steps()] == [(5, 2)]


def test_pruning_removes_steps_until_the_rest_fits(store: Store):
    for number in (1, 2, 3):
        store.training.record(number, "v", [values("c0")], limit_bytes=1 << 20).result()
    size = store.training.steps()[0].bytes
    assert store.training.prune(2 * size).result() == 1
    assert [each.step for each in store.training.steps()] == [2, 3]
    assert store.training.prune().result() == 2
    assert store.training.steps() == []
