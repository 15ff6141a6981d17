"""Installs the driver of Claude Code's Python SDK: created once in the cache, then mounted into sandboxes."""

from __future__ import annotations

import shutil
from pathlib import Path

from understudy.agents.runtimes import (
    build_once,
    compile_modules,
    copy_libraries,
    digest,
    install_wheels,
    python_command,
    python_path,
    python_runtime,
)
from understudy.tasks.materialise import materialise
from understudy.types import Sdist

# The SDK's wheels contain a Claude Code of 360 MiB, which is not used here; the source archive has only the SDK.
SDK = Sdist("claude-agent-sdk", "0.2.186", "16cb01af8309d371aae7c214b69d1a85f283a5aed06fc16054c1bc356c92f7a3")
_PINS = Path(__file__).with_name("claude_sdk.txt")
_DRIVER = Path(__file__).with_name("claude_sdk_driver.py")


def sdk_command(python: str, sdk: str) -> list[str]:
    """Return the command that runs the driver, with the Python at `python` and the SDK at `sdk` in the sandbox."""
    return python_command(python, f"{sdk}/driver.py", f"{sdk}/lib")


def sdk_directories(cache: Path) -> tuple[Path, Path]:
    """Return the directories of the Python and the SDK to mount; the first call makes them under `cache`.

    That takes half a minute and needs the network. Raises ConfigError if they cannot be made.
    """
    python = python_runtime(cache)
    key = digest(python_path(cache).name, repr(SDK), _PINS.read_text(), _DRIVER.read_text())
    return python, build_once(
        cache.absolute() / "claude-sdk" / key,
        "the SDK for --run-method python",
        lambda root: _build_sdk(root, python, cache),
    )


def _build_sdk(root: Path, python: Path, cache: Path) -> None:
    install_wheels(root / "site", _PINS, cache)
    unpacked = root / "sdk"
    materialise(SDK, unpacked, cache)
    (unpacked / "src" / "claude_agent_sdk").rename(root / "site" / "claude_agent_sdk")
    (unpacked / "LICENSE").rename(root / "site" / "claude_agent_sdk" / "LICENSE")
    shutil.rmtree(unpacked)
    shutil.copyfile(_DRIVER, root / "driver.py")
    copy_libraries(root)
    compile_modules(root, python)
