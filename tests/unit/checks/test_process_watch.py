"""The watch over a Python that starts with it, without a sandbox: what it sends, and what it leaves alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.checks.runtime_events import APART, WATCH_MOUNT

START = f'{APART}export UNDERSTUDY_WATCH_PIPE="$(readlink /proc/self/fd/8)"\nexec "$@"\n'


def run_watched(
    program: str, *, rewards: tuple[str, ...] = (), walled: bool = False, path: tuple[str, ...] = ()
) -> tuple[str, str]:
    """What a Python printed that ran `program`, and the evidence; it must end with exit code 0."""
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": ":".join((str(WATCH_MOUNT.source), *path)),
        "UNDERSTUDY_WATCH": "\n".join(("/nowhere", "1" if walled else "", str(len(rewards)), *rewards)),
    }
    command = ["/bin/sh", "-c", START, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout, done.stderr


def rules(evidence: str) -> list[str]:
    return [line.split()[1] for line in evidence.splitlines() if line]


CLOSES_DESCRIPTORS = """\
import os, subprocess, sys
os.closerange(3, 100)
subprocess.run(["true"], check=True)
"""
OPENS_ANOTHER_FILE = """\
os.dup2(os.open(PLACE, os.O_RDWR | os.O_CREAT), 8, inheritable=True)
listing = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[-1])"
assert subprocess.check_output([sys.executable, "-c", listing], env={}, text=True) == "3\\n"
import gc
gc.get_objects()
"""


def test_a_program_that_closes_all_descriptors_goes_on(tmp_path: Path) -> None:
    assert rules(run_watched(CLOSES_DESCRIPTORS)[1]) == ["start"]
    other = tmp_path / "other"
    run_watched(CLOSES_DESCRIPTORS + OPENS_ANOTHER_FILE.replace("PLACE", repr(str(other))))
    assert other.read_bytes() == b""


def test_a_process_is_watched_where_it_cannot_be_walled(tmp_path: Path) -> None:
    (tmp_path / "ctypes.py").write_text("raise ImportError('No module named _ctypes')\n")
    _, evidence = run_watched("", rewards=(f"{tmp_path}/reward.txt",), walled=True, path=(str(tmp_path),))
    assert rules(evidence) == ["start", "reward-open", "end"]


def test_a_process_is_watched_before_the_directory_of_the_reward_exists(tmp_path: Path) -> None:
    for walled in (False, True):
        _, evidence = run_watched("", rewards=(f"{tmp_path}/logs/reward.txt",), walled=walled)
        assert rules(evidence)[0] == "start" and rules(evidence)[-1] == "end"


WITHHOLDS = """\
import os, sys
listdir = os.listdir
os.listdir = lambda path: [*listdir(path), "removed-by-now"]
sys.path.append({watch!r})
import landlock
print(landlock.withhold({{{place!r}}}))
"""


def test_a_file_that_is_removed_meanwhile_does_not_prevent_the_wall(tmp_path: Path) -> None:
    place = tmp_path / "rewards"
    place.mkdir()
    program = WITHHOLDS.format(watch=str(WATCH_MOUNT.source), place=str(place))
    plain = program.replace(', "removed-by-now"', "")
    if subprocess.check_output([sys.executable, "-c", plain], text=True) != "True\n":
        pytest.skip("this kernel has no Landlock")
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True\n"


def test_pythons_of_any_age_can_read_what_they_load_as_they_start() -> None:
    tree = ast.parse((WATCH_MOUNT.source / "sitecustomize.py").read_text())
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    passed_on = {id(argument) for call in calls for argument in call.args}
    newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.AsyncFunctionDef, ast.Await)
    for node in ast.walk(tree):
        assert not isinstance(node, newer), ast.dump(node)
        assert not isinstance(node, ast.Starred) or id(node) in passed_on, f"line {node.lineno}"
        if isinstance(node, ast.arguments):
            assert not node.kwonlyargs and not node.posonlyargs
            assert not any(each.annotation for each in node.args)
