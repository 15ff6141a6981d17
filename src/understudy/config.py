"""Where things lie on this machine, and what is pinned."""

from __future__ import annotations

import os
from pathlib import Path

CLAUDE_CODE_VERSION = "2.1.197"
"""The Claude Code CLI this release is tested with; `npm` fetches exactly this one."""

SANDBOX_UID = 61616
"""Owner of everything an agent may write, when Understudy runs as root: no account of the host has it."""


def cache_dir() -> Path:
    """Directory for what can be made again: Claude Code, task sources, trees, environments.

    `UNDERSTUDY_CACHE`, else `$XDG_CACHE_HOME/understudy`, else `~/.cache/understudy`. Not created here.
    """
    if override := os.environ.get("UNDERSTUDY_CACHE"):
        return Path(override).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "understudy"
