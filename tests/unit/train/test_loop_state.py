"""What a loop keeps of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.errors import ConfigError, StoreError, TaskError
from understudy.train.groups import RolloutGroup, TokenSequence, TrainingRollout
from understudy.train.loop import batches
from understudy.train.loop.batches import group_age
from understudy.train.loop.state import (
    Evaluation,
    GroupRef,
    LoopConfig,
    LoopDirectory,
    LoopState,
    StepState,
    TaskSolveRate,
    prune,
    step_number,
    version_name,
)

from support import files_of_at_most

CONFIG = LoopConfig(model="/m", model_digest="d", tasks={"a": "1", "b": "2"}, steps=3, groups=2, samples=4)
START = LoopState(version="step-0000", weights="/m")


def begun(number: int, *tasks: str, **more: object) -> StepState:
    step = StepState(step=number, phase="collecting", run=f"steps/{number}", sampled_by="step-0000", tasks=tasks)
    return replace(step, **more)


def test_the_state_round_trips_through_its_file(tmp_path: Path):
    directory = LoopDirectory(tmp_path / "loop")
    assert directory.load() is None
    done = begun(1, "a", "b", phase="published", used=(GroupRef(1, "a"),), report={"loss": 0.5}, weights="w")
    state = replace(
        START.with_step(done),
        rates={"a": TaskSolveRate(tried=1.5, solved=0.5, step=1)},
        evaluations=(Evaluation(step=0, version="step-0000", run="e", solved=1, total=2, tasks={"c": (1, 2)}),),
        refused={"d": "no"},
    )
    directory.save(state)
    assert directory.load() == state
    assert not list((tmp_path / "loop").glob(".*.new"))


def test_the_metrics_file_is_written_from_the_state(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    first = begun(1, "a", phase="published", version="step-0001", reward=0.5, report={"loss": 0.25, "step": 9})
    directory.save(START.with_step(first).with_step(begun(2, "b")))
    directory.save(START.with_step(first).with_step(begun(2, "b", phase="updated", version="step-0002")))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["version"]) for line in lines] == [(1, "step-0001"), (2, "step-0002")]
    assert lines[0]["loss"] == 0.25


def test_groups_are_pending_until_used_dropped_or_refused():
    state = START.with_step(begun(1, "a", "b", "c")).with_step(begun(2, "a", "d"))
    assert state.pending() == (
        GroupRef(1, "a"), GroupRef(1, "b"), GroupRef(1, "c"), GroupRef(2, "a"), GroupRef(2, "d")
    )  # fmt: skip
    first = begun(1, "a", "b", "c", phase="published", used=(GroupRef(1, "a"),), dropped=(GroupRef(1, "b"),))
    state = replace(state.with_step(first), refused={"d": "its gold patch fails"})
    assert state.pending() == (GroupRef(1, "c"), GroupRef(2, "a"))
    assert state.done == 1


def test_a_step_out_of_order_is_refused():
    with pytest.raises(ValueError, match="step 2 cannot be added to 0 steps"):
        START.with_step(begun(2, "a"))


def test_skipped_counts_are_summed_over_the_steps():
    state = START.with_step(begun(1, skipped={"x": 2})).with_step(begun(2, skipped={"x": 1, "y": 3}))
    assert state.skipped() == {"x": 3, "y": 3}


@pytest.mark.parametrize("name", [None, "", "step", "step-", "step-x", "v-0001", "0001"])
def test_a_version_not_made_by_a_loop_has_no_step_number(name: str | None):
    assert step_number(name) is None


def test_version_names_contain_their_step_number():
    assert version_name(7) == "step-0007"
    assert step_number(version_name(7)) == 7
    assert step_number(version_name(12345)) == 12345


def test_the_same_loop_resumes_and_may_get_more_steps(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    directory.enter(CONFIG)
    directory.enter(CONFIG)
    directory.enter(replace(CONFIG, steps=9, keep=1, eval_every=2))
    assert json.loads((tmp_path / "loop.json").read_text())["steps"] == 9


def test_resuming_with_another_configuration_is_refused_naming_the_difference(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    directory.enter(CONFIG)
    with pytest.raises(ConfigError, match=r"samples: 4 before, 8 now.*--output-dir"):
        directory.enter(replace(CONFIG, samples=8))
    with pytest.raises(ConfigError, match="tasks: b, c"):
        directory.enter(replace(CONFIG, tasks={"a": "1", "c": "2"}))
    with pytest.raises(ConfigError, match="trainer: learning_rate"):
        directory.enter(replace(CONFIG, trainer={"learning_rate": 1.0}))


def test_a_directory_that_holds_a_run_model_or_training_is_refused(tmp_path: Path):
    for name, contents in (("store.db", "a run"), ("config.json", "a model"), ("training", "a training")):
        (tmp_path / contents / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match=f"{contents} holds {contents} .*--output-dir"):
            LoopDirectory(tmp_path / contents).enter(CONFIG)
        assert [path.name for path in (tmp_path / contents).iterdir()] == [name]


def test_a_changed_base_model_is_refused_with_its_path(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    directory.enter(CONFIG)
    with pytest.raises(ConfigError, match=r"differs in what is in /m, which has changed since\)"):
        directory.enter(replace(CONFIG, model_digest="e"))
    with pytest.raises(ConfigError, match=r"differs in model: '/m' before, '/n' now\)"):
        directory.enter(replace(CONFIG, model="/n", model_digest="e"))


IMPOSSIBLE = (
    '"steps": [{"step": 2, "phase": "collecting", "run": "r", "sampled_by": "v", "tasks": []}]',
    '"steps": [{"step": 1, "phase": "collecting", "run": "r", "sampled_by": "v", "tasks": [], "solved": 1}]',
    '"evaluations": [{"step": 0, "version": "v", "run": "e", "solved": 2, "total": 1}]',
    '"evaluations": [{"step": 0, "version": "v", "run": "e", "solved": 0, "total": 1, "tasks": {"a": [1, 0]}}]',
)
DAMAGED = (b"", b"{", b"[]", b'{"version": 3}', b"\xff\xfe")


@pytest.mark.parametrize(
    "content", [*DAMAGED, *(f'{{"version": "v", "weights": "w", {each}}}'.encode() for each in IMPOSSIBLE)]
)
def test_a_damaged_state_is_reported_with_its_file(tmp_path: Path, content: bytes):
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"state\.json: invalid content"):
        LoopDirectory(tmp_path).load()


def test_a_state_that_cannot_be_written_is_a_store_error(tmp_path: Path):
    (tmp_path / "loop").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        LoopDirectory(tmp_path / "loop").save(START)


def test_a_full_disk_keeps_the_previous_state(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    directory.save(START)
    larger = START.with_step(begun(1, *(f"task-{number}" for number in range(1000))))
    refused = pytest.raises(StoreError, match=r"state\.json: cannot be written.*same command again")
    with files_of_at_most(4096), refused:
        directory.save(larger)
    assert directory.load() == START
    assert not list(tmp_path.glob(".*.new"))


def test_a_partially_written_state_is_ignored(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    directory.save(START)
    (tmp_path / ".state.json.new").write_text('{"version": ')
    assert directory.load() == START
    directory.save(START)
    assert not list(tmp_path.glob(".*.new"))


PUBLISHED = START.with_step(begun(1, phase="published", version="step-0001", weights="steps/step-0001/weights"))


def test_the_age_of_weights_is_counted_in_published_versions():
    assert (START.trained, START.behind(0)) == (None, 0)
    state = PUBLISHED.with_step(begun(2, phase="published", version="step-0001"))
    third = begun(3, phase="updated", version="step-0003", weights="steps/step-0003/weights")
    state = state.with_step(third)
    assert [state.behind(number) for number in range(4)] == [1, 0, 0, 0], "a step without weights is no version"
    assert state.trained == "steps/step-0003/weights", "learned, though nobody answers with it yet"
    assert state.with_step(replace(third, phase="published")).behind(0) == 2


def group(*versions: str | None) -> RolloutGroup:
    sequence = TokenSequence(token_ids=(1,), loss_mask=(1,), logprobs=(0.0,), policy_versions=versions)
    return RolloutGroup(
        task_id="a", rollouts=(TrainingRollout(rollout_id="r", task_id="a", reward=1.0, sequences=(sequence,)),)
    )


@pytest.mark.parametrize(
    ("versions", "age"), [(("step-0001",), 0), (("step-0001", "step-0000"), 1), (("step-0001", None), 1), ((), 1)]
)
def test_the_age_of_a_group_is_that_of_its_oldest_policy_version(versions: tuple[str | None, ...], age: int):
    # The first wave began under step-0000.
    assert group_age(group(*versions), GroupRef(1, "a"), PUBLISHED) == age


def test_a_step_starts_only_as_many_groups_as_are_not_carried_over(tmp_path: Path):
    config = replace(CONFIG, groups=3)
    tasks = ["a", "b", "c", "d", "e"]
    state = START.with_step(begun(1, "a", "b", "c", phase="published", used=(GroupRef(1, "b"),)))
    step = batches.start_step(config, LoopDirectory(tmp_path), state, 2, tasks)
    assert len(step.tasks) == 1 and step.tasks[0] in {"b", "d", "e"}
    none_left = replace(state, refused=dict.fromkeys(tasks, "its gold patch fails"))
    with pytest.raises(TaskError, match="a: its gold patch fails"):
        batches.start_step(config, LoopDirectory(tmp_path), none_left, 2, tasks)


def test_pruning_keeps_unpublished_weights_and_removes_partial_files(tmp_path: Path):
    directory = LoopDirectory(tmp_path)
    state = START
    for number in (1, 2, 3):
        directory.weights(number).mkdir(parents=True)
        phase = "updated" if number == 3 else "published"
        state = state.with_step(
            begun(number, phase=phase, version=version_name(number), weights=f"steps/step-000{number}/weights")
        )
    (directory.step(3) / ".0a.new").mkdir()
    (directory.step(3) / ".0b.old" / "inner").mkdir(parents=True)
    (directory.step(3) / ".0c.new").write_bytes(b"half")
    prune(directory, replace(state, version="step-0002"), keep=1)
    assert [directory.weights(number).exists() for number in (1, 2, 3)] == [False, True, True]
    assert not list(tmp_path.glob("steps/*/.*"))


def test_an_evaluation_has_a_solve_rate_interval():
    tried = Evaluation(step=0, version="step-0000", run="evaluations/step-0000", solved=8, total=10)
    assert (round(tried.rate.low, 3), round(tried.rate.high, 3)) == (0.49, 0.943)
