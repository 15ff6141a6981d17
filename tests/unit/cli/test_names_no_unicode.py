"""Directories whose names are no Unicode, and terminals that can show little: every command ends in words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support import UNDERSTUDY
from support.export import put_rollouts, put_sessions, session

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A terminal that shows ASCII only, for Python would otherwise take UTF-8 to be meant."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("names") / "store"
    put_rollouts(directory)
    put_sessions(directory, [session("caf\udce9 ✓ \ud800", project="/srv/déjà")])
    return directory


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("states", "states.parquet"),
        ("export hf --from rollouts", ""),
        ("export trl-sft", "sft"),
        ("export atif", "atif"),
    ],
)
def test_directories_with_undecodable_names_are_accepted(command: str, output: str, store: Path, tmp_path: Path):
    home = tmp_path / "d\udce9"
    shutil.copytree(store, home / "store")
    stdout = run(command, home, output, *(["--json"] if command != "states" else []))
    if command != "states":
        assert json.loads(stdout)["output_dir"].endswith(f"d?/{output or 'store'}")
    assert not output or (home / output).exists()


@pytest.mark.parametrize(("command", "output"), [("states", ""), ("show --dir", ""), ("export trl-sft", "sft")])
def test_commands_run_with_an_ascii_only_terminal(command: str, output: str, store: Path, tmp_path: Path):
    home = tmp_path / "dé"
    shutil.copytree(store, home / "store")
    run(command, home, output, env=ASCII)


def run(command: str, home: Path, output: str, *more: str, env: dict[str, str] | None = None) -> str:
    """What a command on the store in `home` prints."""
    arguments = [str(UNDERSTUDY), *command.split(), str(home / "store"), *more]
    arguments += ["-o", str(home / output)] if output else []
    done = subprocess.run(
        list(map(os.fsencode, arguments)), capture_output=True, check=False, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stderr
    return done.stdout.decode(errors="replace")
