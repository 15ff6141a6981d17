"""An agent that hangs, wants a login, ends without a word or cannot write where it likes: a fault with a reason,
never a reward of 0.

Each agent's program is replaced by a real one that does that, in a cache that has everything else of this
machine's.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from understudy.agents.base import GATEWAY_SOCKET, AgentJob
from understudy.agents.install import install
from understudy.agents.packages import AGENT_PACKAGES, AgentPackage
from understudy.agents.registry import make_agent
from understudy.agents.runtimes import node_runtime, python_runtime
from understudy.config import cache_dir
from understudy.errors import ConfigError
from understudy.sandbox.base import Mount, Sandboxes, SandboxSpec
from understudy.store import Store
from understudy.tasks.environment import python_environment
from understudy.tasks.records import dump

from support import calc_task, understudy

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("isolation")]

OUTSIDE = """echo change >> calc.py
for path in /etc/understudy-was-here /opt/understudy/agent/here /usr/bin/git /work/here ~/../../here; do
    if echo here > $path; then echo "wrote $path" >&2; fi
done
exit 1"""
"""It also changes the task's file, which would be a patch."""

PROGRAMS = {
    "hangs": ("exec sleep 600", "stopped without a single model call, expected at least one"),
    "silent": ("exit 0", "nothing on stderr"),
    "pretends": (
        """echo '{"type":"turn.completed"}'""",
        "codex ended with exit code 0 without a single model call",
    ),
    "login": ("echo 'Please log in first' >&2; exit 1", "Please log in first"),
    "outside": (OUTSIDE, "Read-only file system"),
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with all of this machine's but the agents."""
    for package in AGENT_PACKAGES.values():
        if not package.unsupported:
            python_runtime(cache_dir(), package.requires_python)
    node_runtime(cache_dir())
    python_environment(cache_dir())
    made = tmp_path / "cache"
    made.mkdir()
    for entry in cache_dir().iterdir():
        if entry.name not in AGENT_PACKAGES:
            (made / entry.name).symlink_to(entry)
    return made


def put(package: AgentPackage, cache: Path, script: str) -> None:
    """Put a program that runs a shell script into a cache, as this package of the pinned version."""
    root = package.directory(cache)
    program = package.program_path(root)
    program.parent.mkdir(parents=True)
    shell = ["/bin/sh", "-c", script]
    match package.kind:
        case "native":
            program.write_text(f"#!/bin/sh\n{script}\n")
        case "node":
            run = f"spawnSync('/bin/sh', {json.dumps(shell[1:])}, {{stdio: 'inherit'}})"
            program.write_text(f"process.exit(require('child_process').{run}.status)\n")
        case "python":
            program.write_text(f"import subprocess, sys\nsys.exit(subprocess.run({shell!r}).returncode)\n")
            name = package.distribution_names[0].replace("-", "_")
            (package.package_path(root).parent / f"{name}-{package.version}.dist-info").mkdir()
    program.chmod(0o755)
    (package.package_path(root) / "package.json").write_text(json.dumps({"version": package.version}))


@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_agent_that_did_not_work_has_no_reward(kind: str, cache: Path, tmp_path: Path) -> None:
    script, message = PROGRAMS[kind]
    put(AGENT_PACKAGES["codex"], cache, script)
    dump([calc_task()], tmp_path / "tasks.jsonl")
    done = understudy(
        "run", "embedded", "--policy", "idle", "--tasks", tmp_path / "tasks.jsonl", "--agent", "codex",
        "--timeout", "2", "--output-dir", tmp_path / "out", "--json", env={"UNDERSTUDY_CACHE": str(cache)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["solved"], summary["unsolved"], summary["infrastructure_failures"]) == (0, 0, 1)
    (failure,) = summary["failures"]
    assert message in failure and "wrote" not in failure
    # What it printed can be looked up: it is stored with each attempt, and in the files of the last one.
    with Store.open(tmp_path / "out", create=False) as store:
        (rollout,) = store.runs.rollouts()
        attempts = [store.runs.logs(attempt.id) for attempt in store.runs.attempts(rollout.id)]
    assert len(attempts) == 3 and all({"stdout.txt", "stderr.txt"} <= set(logs) for logs in attempts)
    (directory,) = (tmp_path / "out" / "logs").glob("calc*")
    assert (directory / "stderr.txt").read_bytes() == attempts[-1]["stderr.txt"]


def test_a_python_agent_that_cannot_be_fetched_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ConfigError, match="mini-swe-agent could not be downloaded to the cache"):
        install("mini-swe-agent", cache)
    assert [path.name for path in (cache / "mini-swe-agent").iterdir() if path.name != ".lock"] == []


@pytest.mark.parametrize("kind", ["silent", "login", "outside"])
async def test_each_agent_says_why_it_did_not_work(
    kind: str, cache: Path, tmp_path: Path, sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, message = PROGRAMS[kind]
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(cache))
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "calc.py").write_text("x = 1\n")
    sandboxes.prepare_tree(tree)
    job = AgentJob(instruction="Work.", key="key", model="m", small_model="m", max_turns=9, timeout_s=60.0)
    with socket.socket(socket.AF_UNIX) as gateway:
        gateway.bind(str(tmp_path / "g.sock"))
        for package in AGENT_PACKAGES.values():
            if package.unsupported:
                continue
            put(package, cache, script)
            agent = make_agent(package.agent, {})
            assert agent.problems() == []
            spec = SandboxSpec(tree=tree, mounts=(*agent.mounts(), Mount(tmp_path / "g.sock", GATEWAY_SOCKET)))
            sandbox = await sandboxes.open(spec)
            try:
                result = await agent.run(sandbox, job)
            finally:
                await sandbox.close()
            assert result.outcome == "crashed", package.agent
            assert message in result.message and "wrote" not in result.message
            assert f"exit code {0 if kind == 'silent' else 1}" in result.message
