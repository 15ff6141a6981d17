"""`make demo`, with a few tasks: every command of it in its order, and what it leaves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.train.state import LoopDirectory

from support import understudy

pytest.importorskip("torch")
pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("claude_code", "isolation"), pytest.mark.timeout(600)]

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"
SMALL = ("--tasks", "2", "--evaluated", "2", "--steps", "1", "--groups", "1", "--samples", "2", "--no-check")


def demo(place: Path) -> str:
    """What the demo says, step by step."""
    command = [sys.executable, DEMO, *SMALL, "--directory", place]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_goes_through_and_a_second_time_repeats_nothing(tmp_path: Path):
    said = demo(tmp_path)
    rates = dict(re.findall(r"\] (untrained|after SFT|before GRPO|after GRPO) +([\d.]+) \(", said))
    assert list(rates) == ["untrained", "after SFT", "before GRPO", "after GRPO"]
    place = tmp_path / "seed-1"
    state = LoopDirectory(place / "4-loop").load()
    assert state is not None
    # The rates that are shown are those of the graded rollouts.
    runs = [place / "1-untrained", place / "3-sft", *(place / "4-loop" / each.run for each in state.evaluations)]
    shown = [json.loads(understudy("show", "--dir", run, "--json").stdout) for run in runs]
    graded = [sum(rollout["reward"] for rollout in each["rollouts"]) / 2 for each in shown]
    assert [float(rate) for rate in rates.values()] == graded
    assert "2-teacher: 2 of 2 tasks solved" in said
    for name in ("demo.html", "demo.png", "4-loop/report.html"):
        assert (place / name).stat().st_size > 1000, name
    written = {path: path.stat().st_mtime_ns for path in place.rglob("*.safetensors")}
    assert written
    demo(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*.safetensors")} == written
