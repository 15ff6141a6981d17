"""Fixtures of the contract tests of sandboxes on other machines."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import require, ssh_server
from support.harbor_provider import ENVIRONMENT, HarborProvider, problems


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    path.mkdir()
    (path / "README").write_text("as it was\n")
    return path


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_server.SshMachine]:
    require(ssh_server.problems())
    with ssh_server.ssh_machine(tmp_path_factory.mktemp("ssh")) as started:
        yield started


@pytest.fixture(scope="module")
def harbor_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the environments, which takes a while to fill."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def provider(tmp_path: Path, harbor_cache: Path, monkeypatch: pytest.MonkeyPatch) -> HarborProvider:
    require(problems())
    modules = tmp_path / "modules"
    modules.mkdir()
    shutil.copy(ENVIRONMENT, modules)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "own cache"))
    program = Path(sys.executable).with_name("understudy")
    return HarborProvider(tmp_path, f"env UNDERSTUDY_CACHE={harbor_cache} PYTHONPATH= {program} sandboxes serve")
