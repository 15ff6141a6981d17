"""A run with all its contents in an S3 bucket: made, graded anew, exported, verified; its agents see no key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.store import Store
from understudy.tasks.records import dump

from support import calc_task, understudy
from support.s3_server import S3Server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.services,
    pytest.mark.usefixtures("isolation"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("sandbox", ["local", "unsafe-local"])
def test_agents_see_no_credentials(sandbox: str, tmp_path: Path, s3_server: S3Server) -> None:
    out = tmp_path / "out"
    s3_server.give_bucket(out, min_bytes=1)
    dump([calc_task(0)], tmp_path / "tasks.jsonl")
    command = ("--agent", "shell", "--agent-command", "env >> calc.py", "--sandbox", sandbox, "--json")
    done = understudy("run", "embedded", "--policy", "idle", "-t", tmp_path / "tasks.jsonl", "-o", out, *command)
    assert done.returncode == 0, done.stderr
    with Store.open(out) as store:
        (rollout,) = store.runs.rollouts()
        patch = store.runs.patch(store.runs.attempts(rollout.id)[-1].id)
        assert store.bucket.compare().missing == 0
    assert patch is not None and b"PATH=" in patch and b"AWS_" not in patch


@pytest.mark.usefixtures("claude_code")
def test_a_run_is_graded_anew_exported_and_verified(calc_tasks: Path, tmp_path: Path, s3_server: S3Server) -> None:
    out = tmp_path / "out"
    name = s3_server.give_bucket(out, min_bytes=1)
    done = understudy("run", "embedded", "--tasks", calc_tasks, "--limit", "1", "-o", out, "--json", timeout=200)
    assert done.returncode == 0 and json.loads(done.stdout)["solved"] == 1, done.stderr
    assert len(s3_server.objects(name)) > 10
    for command in (
        ("grade", "--regrade", out),
        ("export", "trl-tokens", out, "-o", tmp_path / "tokens"),
        ("report", out, "--output", tmp_path / "page.html"),
        ("verify", out),
        ("prune", out, "--drop", "bodies", "--keep-runs", "0"),
        ("show", "--dir", out),
    ):
        done = understudy(*command, timeout=200)
        assert done.returncode == 0, (command, done.stderr)
