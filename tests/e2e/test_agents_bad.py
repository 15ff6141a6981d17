"""An agent that hangs, wants a login or ends without a word is a fault that is told, never a reward of 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.agents.install import agent_package
from understudy.agents.runtimes import python_runtime
from understudy.config import cache_dir
from understudy.tasks.environment import python_environment
from understudy.tasks.records import dump

from support import calc_task, understudy

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("isolation")]

PROGRAMS = {
    "hangs": ("exec sleep 600", "codex stopped without a single model call, expected at least one"),
    "silent": ("exit 0", "Codex ended with exit code 0 and left no result: nothing on stderr"),
    "pretends": (
        """echo '{"type":"turn.completed"}'""",
        "codex ended with exit code 0 without a single model call",
    ),
    "login": ("echo 'Please log in first' >&2; exit 1", "exit code 1 and left no result: Please log in first"),
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with all of this machine's but Codex."""
    python_runtime(cache_dir())
    python_environment(cache_dir())
    made = tmp_path / "cache"
    made.mkdir()
    for entry in cache_dir().iterdir():
        if entry.name != "codex":
            (made / entry.name).symlink_to(entry)
    return made


@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_agent_that_did_not_work_has_no_reward(kind: str, cache: Path, tmp_path: Path) -> None:
    script, message = PROGRAMS[kind]
    package = agent_package("codex")
    program = package.program_path(package.directory(cache))
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    manifest = package.package_path(package.directory(cache)) / "package.json"
    manifest.write_text(json.dumps({"version": package.version}))
    dump([calc_task()], tmp_path / "tasks.jsonl")
    done = understudy(
        "run", "embedded", "--policy", "idle", "--tasks", tmp_path / "tasks.jsonl", "--agent", "codex",
        "--timeout", "2", "--output-dir", tmp_path / "out", "--json", env={"UNDERSTUDY_CACHE": str(cache)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["solved"], summary["unsolved"], summary["infrastructure_failures"]) == (0, 0, 1)
    (failure,) = summary["failures"]
    assert message in failure
