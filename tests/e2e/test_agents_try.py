"""Another version of an agent is fetched, does what the pinned one does, and the difference is said."""

from __future__ import annotations

import json

import pytest

from support import understudy
from support.agents import require_agent

pytestmark = [pytest.mark.e2e, pytest.mark.services, pytest.mark.usefixtures("isolation")]


@pytest.mark.timeout(900)
def test_another_version_is_tried() -> None:
    require_agent("claude-code")
    done = understudy("agents", "try", "claude-code@2.1.330", "--json", timeout=800)
    assert done.returncode == 0, done.stderr or done.stdout
    report = json.loads(done.stdout)
    assert [trial["version"] for trial in report["trials"]] == ["2.1.197", "2.1.330"]
    assert report["problems"] == []
    assert all(len(trial["observations"]) >= 12 for trial in report["trials"])
    assert "tool ToolSearch: new" in report["changes"]


def test_a_version_that_is_not_there_is_an_error() -> None:
    require_agent("codex")
    done = understudy("agents", "try", "codex@0.0.1")
    assert done.returncode == 2
    assert "npm could not download Codex 0.0.1" in done.stderr
