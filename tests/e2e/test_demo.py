"""`make demo`, with a few tasks: every command of it in its order, and what it leaves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.train.loop.state import LoopDirectory

from support import optional, understudy

optional("torch")
pytestmark = [
    pytest.mark.services,
    pytest.mark.e2e,
    pytest.mark.usefixtures("claude_code", "isolation"),
    pytest.mark.timeout(600),
]

SMALL = ("--tasks", "2", "--evaluated", "2", "--steps", "1", "--groups", "1", "--samples", "2", "--no-check")


def test_the_demo_goes_through_and_its_rates_are_those_of_graded_rollouts(tmp_path: Path):
    root = tmp_path / "demo"
    command = [sys.executable, "-m", "understudy", "demo", *SMALL, "--output-dir", root]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rates = dict(re.findall(r"\] (untrained|after SFT|before GRPO|after GRPO) +([\d.]+) \(", done.stdout))
    assert list(rates) == ["untrained", "after SFT", "before GRPO", "after GRPO"]
    state = LoopDirectory(root / "4-loop").load()
    assert state is not None
    runs = [
        root / "1-untrained",
        root / "3-sft",
        *(root / "4-loop" / each.run for each in state.evaluations),
    ]
    reports = [json.loads(understudy("show", "--dir", run, "--json").stdout) for run in runs]
    graded = [sum(rollout["reward"] for rollout in each["rollouts"]) / 2 for each in reports]
    assert [float(rate) for rate in rates.values()] == graded
    assert "2-teacher: 2 of 2 tasks solved" in done.stdout
    for name in ("demo.html", "demo.png", "4-loop/report.html"):
        assert (root / name).stat().st_size > 1000, name
