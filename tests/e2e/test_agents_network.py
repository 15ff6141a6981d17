"""Real agents contact nothing but the gateway: not for telemetry, updates, lists of models or plugins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import require
from support.agents import AFTER, AGENTS, require_agent
from support.cli import without_network

pytestmark = [pytest.mark.e2e, pytest.mark.services]

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("agent", ("claude-code", *AGENTS, "openhands"))
def test_an_agent_contacts_nobody(agent: str, tmp_path: Path) -> None:
    require_agent(agent)
    apart = [*without_network(), "--mount"]
    if (tried := subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)).returncode != 0:
        require([f"network namespaces cannot be made here: {tried.stderr}"])
    done = subprocess.run(
        [*apart, sys.executable, "-m", "support.phone_program", agent, str(tmp_path)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert "name control.invalid" in report["control"] and "connection to port 443" in report["control"]
    assert (report["outcome"], report["file"]) == ("completed", AFTER), report
    assert report["contacts"] == []
