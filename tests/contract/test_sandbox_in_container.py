"""Local sandboxes within a container: which rights docs/running.md asks for, and what is said without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.docker_engine import Engine, test_image

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]
PROBE = """
from understudy.sandbox.local.sandboxes import LocalSandboxes
for problem in LocalSandboxes().problems():
    print(problem)
"""
USER_RIGHTS = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
ROOT_RIGHTS = "--cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined"


def problems(engine: Engine, *options: str) -> str:
    """Why local sandboxes cannot be opened in a container that has this machine's programs."""
    shown = {"/usr", str(ROOT), sys.prefix, sys.base_prefix}
    mounts = [word for path in sorted(shown) for word in ("--volume", f"{path}:{path}:ro")]
    environment = ["--env", f"PYTHONPATH={ROOT / 'src'}", "--env", "PYTHONDONTWRITEBYTECODE=1"]
    command = ["docker", "--host", engine.url, "run", "--rm", "--network", "none", *mounts, *environment, *options]
    done = subprocess.run(
        [*command, test_image(engine), sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [
        f"--user 1000 --cap-drop ALL --security-opt no-new-privileges {USER_RIGHTS}",
        f"--user 0 {ROOT_RIGHTS}",
    ],
)
def test_a_container_with_the_documented_rights_can_open_sandboxes(engine: Engine, options: str):
    assert problems(engine, *options.split()) == ""


@pytest.mark.parametrize(("user", "rights"), [("1000", USER_RIGHTS), ("0", ROOT_RIGHTS)])
def test_the_missing_rights_are_named(engine: Engine, user: str, rights: str):
    assert rights in problems(engine, "--user", user)
