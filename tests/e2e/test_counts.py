"""What a call, a rollout and a session cost in counts (`bench/counts.py`), which no busy machine changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "counts.py"
# What was counted with Python 3.11. A change that costs less is welcome: lower the number with it.
COUNTED = {
    "call": {"functions": 965, "opened_files": 0, "processes": 0, "statements": 11, "written_bytes": 98_000},
    "rollout": {
        "functions": 21_500,
        "opened_files": 107,
        "processes": 7,  # all of them; those of sandboxes, which uvloop forked before, could not be counted
        "statements": 59,
        "written_bytes": 404_000,
    },
    "session": {
        "functions": 23_010,
        "opened_files": 10,
        "processes": 0,
        "statements": 449,
        "written_bytes": 525_000,
    },
}
# Other versions of Python call other functions, and a stream comes in other pieces.
SLACK = {"functions": 1.25}


@pytest.mark.usefixtures("isolation")
@pytest.mark.services
@pytest.mark.parametrize("subject", COUNTED)
def test_nothing_costs_more_than_it_did(subject: str, tmp_path: Path) -> None:
    command = [sys.executable, BENCH, "--only", subject]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    bounds = {key: number * SLACK.get(key, 1.1) for key, number in COUNTED[subject].items()}
    assert {key for key, count in counts.items() if count > bounds[key]} == set(), counts
    assert counts["statements"] > 0 and counts["functions"] > 0
