"""`understudy run --max-cost`, and what a run is estimated to take: the real CLI and priced calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.store import Store

from support import understudy

pytestmark = [pytest.mark.e2e, pytest.mark.services, pytest.mark.usefixtures("claude_code", "isolation")]

PRICED = '[models.high]\nbackend = "embedded"\nprice = { input = 10.0, output = 30.0 }\n'


def test_a_ceiling_holds_and_a_higher_one_goes_on(calc_tasks: Path, tmp_path: Path):
    config, output = tmp_path / "priced.toml", tmp_path / "out"
    config.write_text(PRICED)
    common = ("run", "--config", config, "--tasks", calc_tasks, "--output-dir", output, "-j", "1", "--json")
    probe = understudy(*common[:6], tmp_path / "probe", "--limit", "1", "-j", "1", "--json")
    assert probe.returncode == 0, probe.stderr
    one = json.loads(probe.stdout)["cost_usd"]
    assert one > 0
    dry = understudy(*common, "--dry-run", "--measured-by", tmp_path / "probe")
    assert dry.returncode == 0, dry.stderr
    estimate = json.loads(dry.stdout)
    assert estimate["rollouts"] == 4 and estimate["cost_usd"] == pytest.approx(4 * one, rel=1e-3)
    limit = 2.0 + one
    stopped = understudy(*common, "--max-cost", str(limit))
    with Store.open(output, create=False) as store:
        (run,) = store.runs.all()
        spent = store.outcomes.counts(run.id).cost_usd
    assert spent <= limit
    if stopped.returncode:
        assert "--max-cost" in stopped.stderr
    tight = understudy(*common, "--max-cost", "0.001", "--samples", "2")
    assert tight.returncode == 2 and "could exceed the limit" in tight.stderr
    again = understudy(*common, "--max-cost", "1000")
    assert again.returncode == 0 and json.loads(again.stdout)["solved"] == 4, again.stderr


def test_a_ceiling_needs_prices(calc_tasks: Path, tmp_path: Path):
    done = understudy("run", "embedded", "--tasks", calc_tasks, "--max-cost", "1", "-o", tmp_path / "out")
    assert done.returncode == 2 and "--max-cost needs the price" in done.stderr
    assert not (tmp_path / "out").exists()
