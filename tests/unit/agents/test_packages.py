"""Agents from registries: what is pinned, what is refused, and what a broken fetch says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from understudy.agents.install import agent_package, find_npm, install
from understudy.agents.packages import AGENT_PACKAGES, AgentPackage
from understudy.agents.runtimes import interpreter, launcher_command, own_interpreter, python_runtime
from understudy.config import cache_dir
from understudy.errors import ConfigError

from support import require

PACKAGES = list(AGENT_PACKAGES.values())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.agent)
def test_all_that_is_fetched_has_a_checksum_and_no_address(package: AgentPackage) -> None:
    text = package.lock.read_text(encoding="utf-8")
    assert "://" not in text
    if package.kind == "python":
        pins = re.split(r"\n(?=\w)", text.strip())
        assert all("--hash=sha256:" in pin for pin in pins)
        for name in package.distribution_names:
            assert any(pin.startswith(f"{name}=={package.version} ") for pin in pins)
        return
    locked = {name: entry for name, entry in json.loads(text)["packages"].items() if name}
    assert all(entry["integrity"].startswith("sha512-") for entry in locked.values())
    assert any(entry["version"].startswith(package.version) for entry in locked.values())


def test_an_agent_of_another_version_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path))
    package = agent_package("claude-code")
    (problem,) = package.problems()
    assert "not fetched" in problem and "understudy setup" in problem
    program = package.program_path(package.directory())
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    manifest = program.with_name("package.json")
    manifest.write_text('{"version": "9.9.9"}')
    (problem,) = package.problems()
    assert f"has Claude Code 9.9.9; expected {package.version}" in problem
    manifest.write_text(json.dumps({"version": package.version}))
    assert package.problems() == []


def test_nothing_is_fetched_for_an_unknown_agent() -> None:
    with pytest.raises(ConfigError, match=r"'nobody' is no agent .* give one of: claude-code, codex"):
        install("nobody")


@pytest.mark.skipif(find_npm() is None, reason="npm is missing")
def test_an_agent_that_cannot_be_fetched_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    with pytest.raises(ConfigError, match=r"npm could not download Claude Code .*\n.*ECONNREFUSED"):
        install("claude-code", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "claude-code").iterdir() if path.name != ".lock"] == []


def test_the_launcher_passes_on_files_output_and_exit_code(tmp_path: Path) -> None:
    require([] if sys.platform == "linux" else ["needs Linux"])
    root = python_runtime(cache_dir())
    script = 'cat "$1"; cat; echo "$GATEWAY" >&2; exit 7'
    job = {
        "socket": str(tmp_path / "none.sock"),
        "argv": ["sh", "-c", script, "sh", str(tmp_path / "new" / "file")],
        "env": {"GATEWAY": "{gateway}/v1"},
        "files": {str(tmp_path / "new" / "file"): "at {gateway}\n"},
        "stdin": "héllo",
    }
    done = subprocess.run(
        launcher_command(str(root)), input=json.dumps(job).encode(), capture_output=True, check=False
    )
    address = done.stderr.decode().strip().removesuffix("/v1")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address)
    assert (done.returncode, done.stdout.decode()) == (7, f"at {address}\nhéllo")
    killed = subprocess.run(
        launcher_command(str(root)),
        input=json.dumps({**job, "argv": ["sh", "-c", "kill -9 $$"]}).encode(),
        capture_output=True,
        check=False,
    )
    assert killed.returncode == 137
    absent = subprocess.run(
        launcher_command(str(root)),
        input=json.dumps({**job, "argv": ["/no/such/program"]}).encode(),
        capture_output=True,
        check=False,
    )
    assert absent.returncode == 127 and b"could not be started" in absent.stderr


def test_a_python_that_is_new_enough_is_found_and_others_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, own = interpreter.__wrapped__, own_interpreter()  # without its cache
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert search(own.version_info) == own
    major, minor = own.version_info
    with pytest.raises(
        ConfigError, match=rf"Python 3\.{minor + 1} or newer is required, and none was found: .* pyenv"
    ):
        search((major, minor + 1))
    newer = (major, minor + 2)
    facts = {"version": "v", "version_info": newer, "executable": "/p", "prefix": "/", "libraries": ["/l"]}
    scripts = {
        f"python3.{minor + 1}": "exit 127",  # what pyenv has on PATH for a version that is switched off
        f"pyenv/versions/3.{minor + 2}.0/bin/python3.{minor + 2}": f"echo '{json.dumps(facts)}'",
    }
    for name, script in scripts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    assert search((major, minor + 1)).version_info == newer


def test_a_package_without_its_python_says_what_to_install() -> None:
    package = structs.replace(agent_package("openhands"), requires_python=(3, 98))
    (problem,) = package.problems()
    assert problem.startswith("OpenHands: Python 3.98 or newer is required")
