"""Where files are on this machine, and which versions are pinned."""

from __future__ import annotations

import os
from pathlib import Path

CLAUDE_CODE_VERSION = "2.1.197"
"""The Claude Code CLI this release is tested with; `npm` fetches exactly this one."""

SANDBOX_UID = 61616
"""Owner of everything an agent may write, when Understudy runs as root: no account of the host has it."""

ANY_DIRECTORY = "UNDERSTUDY_ALLOW_ANY_DIRECTORY"
"""The environment variable that lets task files name directories that are not below them."""


def any_directory_allowed() -> bool:
    """Return whether task files may name any directory of this machine: the user set ANY_DIRECTORY to 1."""
    return os.environ.get(ANY_DIRECTORY) == "1"


CACHE_LOCK = ".in-use"
"""The file in the cache that all processes lock together which have sandboxes, whose mounts are in there."""


def cache_dir() -> Path:
    """Return the directory for what can be made again: Claude Code, task sources, trees, environments.

    `UNDERSTUDY_CACHE`, otherwise `$XDG_CACHE_HOME/understudy`, otherwise `~/.cache/understudy`. It is not created
    here.
    """
    if override := os.environ.get("UNDERSTUDY_CACHE"):
        return Path(override).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "understudy"
