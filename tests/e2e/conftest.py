"""Fixtures for the tests that run the real CLI."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.cli import ATOMIC, Rig


@pytest.fixture
def claude(request: pytest.FixtureRequest) -> Path:
    """The binary of the CLI: the pinned one, or that of another version which the environment names."""
    if override := os.environ.get("UNDERSTUDY_TEST_CLAUDE"):
        return Path(override)
    return request.getfixturevalue("claude_code")


@pytest.fixture
async def rig(request: pytest.FixtureRequest, tmp_path: Path, claude: Path) -> AsyncIterator[Rig]:
    """The CLI before a gateway and a scripted model; another way than the default is a parameter."""
    async with Rig(tmp_path, claude, getattr(request, "param", ATOMIC)) as rig:
        yield rig
