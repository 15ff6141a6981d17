"""The commands on a store in PostgreSQL, as a user runs them; the password of its URL is shown nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.store.address import StoreUrl

from support import understudy
from support.export import put_rollouts
from support.postgresql import PASSWORD

pytestmark = [pytest.mark.services, pytest.mark.e2e]


def test_a_run_in_a_database_is_reported_as_the_same_run_in_a_directory(
    tmp_path: Path, postgresql_store: StoreUrl
) -> None:
    for location in (tmp_path / "run", postgresql_store):
        put_rollouts(location, tasks=3, samples=2)
    labels = ("--label", "first", "--label", "second")
    done = understudy("report", "run", postgresql_store.secret_url, *labels, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["points"]
    assert first["solved"] + first["unsolved"] == 6
    differing = {"label", "directory", "seconds"}
    assert {name: value for name, value in first.items() if name not in differing} == {
        name: value for name, value in second.items() if name not in differing
    }
    alone = understudy("report", postgresql_store.secret_url, "--png", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"run", "report.html", "report.png"}
    page = (tmp_path / "report.html").read_text()
    assert "calc-0" in page
    for text in (done.stdout, done.stderr, alone.stdout, alone.stderr, page):
        assert PASSWORD not in text
