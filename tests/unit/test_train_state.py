"""What a loop keeps of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.errors import ConfigError, StoreError
from understudy.train.curriculum import Rate
from understudy.train.evaluate import Evaluation
from understudy.train.state import (
    GroupRef,
    LoopConfig,
    LoopDirectory,
    LoopState,
    StepState,
    number_of,
    version_of,
)

CONFIG = LoopConfig(model="/m", model_digest="d", tasks={"a": "1", "b": "2"}, steps=3, groups=2, samples=4)
START = LoopState(version="step-0000", weights="/m")


def begun(number: int, *tasks: str, **more: object) -> StepState:
    step = StepState(step=number, phase="collecting", run=f"steps/{number}", sampled_by="step-0000", tasks=tasks)
    return replace(step, **more)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path):
    directory = LoopDirectory(tmp_path / "loop")
    assert directory.load() is None
    done = begun(1, "a", "b", phase="published", used=(GroupRef(1, "a"),), report={"loss": 0.5}, weights="w")
    state = replace(
        START.with_step(done),
        rates={"a": Rate(tried=1.5, solved=0.5, step=1)},
        evaluations=(Evaluation(step=0, version="step-0000", run="e", solved=1, total=2, tasks={"c": (1, 2)}),),
        refused={"d": "no"},
    )
    directory.save(state)
    assert directory.load() == state
    assert not list((tmp_path / "loop").glob(".*.new"))


def test_metrics_follow_from_the_state(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    first = begun(1, "a", phase="published", version="step-0001", reward=0.5, report={"loss": 0.25, "step": 9})
    directory.save(START.with_step(first).with_step(begun(2, "b")))
    directory.save(START.with_step(first).with_step(begun(2, "b", phase="updated", version="step-0002")))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["version"]) for line in lines] == [(1, "step-0001"), (2, "step-0002")]
    assert lines[0]["loss"] == 0.25


def test_groups_wait_until_they_are_used_dropped_or_refused():
    state = START.with_step(begun(1, "a", "b", "c")).with_step(begun(2, "a", "d"))
    assert state.pending() == (
        GroupRef(1, "a"), GroupRef(1, "b"), GroupRef(1, "c"), GroupRef(2, "a"), GroupRef(2, "d")
    )  # fmt: skip
    first = begun(1, "a", "b", "c", phase="published", used=(GroupRef(1, "a"),), dropped=(GroupRef(1, "b"),))
    state = replace(state.with_step(first), refused={"d": "its gold patch fails"})
    assert state.pending() == (GroupRef(1, "c"), GroupRef(2, "a"))
    assert state.done == 1


def test_a_step_out_of_turn_is_refused():
    with pytest.raises(ValueError, match="step 2 cannot follow 0"):
        START.with_step(begun(2, "a"))


def test_skipped_is_summed_over_the_steps():
    state = START.with_step(begun(1, skipped={"x": 2})).with_step(begun(2, skipped={"x": 1, "y": 3}))
    assert state.skipped() == {"x": 3, "y": 3}


@pytest.mark.parametrize("name", [None, "", "step", "step-", "step-x", "v-0001", "0001"])
def test_a_version_that_is_none_of_a_loops_has_no_number(name: str | None):
    assert number_of(name) is None


def test_versions_have_the_number_of_their_step():
    assert version_of(7) == "step-0007"
    assert number_of(version_of(7)) == 7
    assert number_of(version_of(12345)) == 12345


def test_the_same_loop_goes_on_and_may_be_made_longer(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    directory.enter(CONFIG)
    directory.enter(CONFIG)
    directory.enter(replace(CONFIG, steps=9, keep=1, eval_every=2))
    assert json.loads((tmp_path / "loop.json").read_text())["steps"] == 9


def test_another_loop_is_refused_by_what_differs(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    directory.enter(CONFIG)
    with pytest.raises(ConfigError, match=r"samples: 4 before, 8 now.*--output-dir"):
        directory.enter(replace(CONFIG, samples=8))
    with pytest.raises(ConfigError, match="tasks: b, c"):
        directory.enter(replace(CONFIG, tasks={"a": "1", "c": "2"}))
    with pytest.raises(ConfigError, match="trainer: learning_rate"):
        directory.enter(replace(CONFIG, trainer={"learning_rate": 1.0}))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 3}', b"\xff\xfe"])
def test_a_damaged_state_is_told_with_its_file(tmp_path: Path, content: bytes):
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"state\.json"):
        LoopDirectory(tmp_path).load()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "loop").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        LoopDirectory(tmp_path / "loop").save(START)
