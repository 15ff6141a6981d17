"""Runs whose sandboxes are in pods: the real CLI and kubectl, the gateway here, the relay between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import understudy
from support.kubernetes_server import Cluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.services,
    pytest.mark.usefixtures("claude_code", "isolation"),
    pytest.mark.timeout(600),
]


def test_the_real_cli_solves_tasks_in_pods(cluster: Cluster, calc_tasks: Path, tmp_path: Path) -> None:
    done = understudy(
        "run", "embedded", "--tasks", calc_tasks, "--limit", "2", "--sandbox", cluster.name, "-j", "2",
        "-o", tmp_path / "out", "--json", timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["solved"], summary["infrastructure_failures"]) == (2, 2, 0)
    labels = [json.loads(pod["metadata"]["annotations"]["understudy/labels"]) for pod in cluster.server.created]
    assert len({each["attempt"] for each in labels if "attempt" in each}) == 2
    assert cluster.server.pods == {}
