"""The numbers of a loop reach trackers, and one that fails does not reach the loop."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from understudy.train.loop.loop import Watcher
from understudy.train.loop.runtime import TrackingWatcher
from understudy.train.loop.state import Evaluation, StepState

from support import optional

optional("accelerate", "tensorboard")

STEP = StepState(
    step=1, phase="published", run="r", sampled_by="step-0000", tasks=("a",), reward=0.25, report={"loss": 0.5}
)
EVALUATION = Evaluation(step=1, version="step-0001", run="e", solved=1, total=2)


class Noting(Watcher):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def stepped(self, step: StepState) -> None:
        self.seen.append(step)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.seen.append(evaluation)


def test_steps_and_evaluations_are_sent_to_the_tracker_and_the_inner_watcher(tmp_path: Path):
    inner = Noting()
    with TrackingWatcher(inner, tmp_path, ("tensorboard",)) as watching:
        watching.stepped(STEP)
        watching.evaluated(EVALUATION)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "understudy-loop"))
    events.Reload()
    scalars = {name: events.Scalars(name)[0].value for name in ("loss", "reward", "held_out/solve_rate")}
    assert scalars == {"loss": 0.5, "reward": 0.25, "held_out/solve_rate": 0.5}
    assert inner.seen == [STEP, EVALUATION]


def test_a_failing_tracker_is_logged_once_and_training_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    inner = Noting()
    with caplog.at_level(logging.WARNING), TrackingWatcher(inner, tmp_path / "file", ("tensorboard",)) as watching:
        watching.stepped(STEP)
        watching.stepped(STEP)
    assert inner.seen == [STEP, STEP]
    assert len([each for each in caplog.records if "tracking stopped" in each.message]) == 1
