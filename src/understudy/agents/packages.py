"""Agents that are fetched from a package registry: which ones, at which version, and where they lie in the cache.

The versions and the checksums of all that is fetched are in `locks/`: npm's lock files, and pip's requirements
with hashes. Each agent lies in a directory of the cache of its own, which sandboxes see read-only.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from understudy.agents.runtimes import (
    OLDEST_PYTHON,
    PythonVersion,
    digest,
    interpreter,
    node_path,
    python_path,
    runtime_problems,
)
from understudy.config import CLAUDE_CODE_VERSION, cache_dir
from understudy.errors import ConfigError

_LOCKS = Path(__file__).with_name("locks")
_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64"}

ProgramKind = Literal["native", "node", "python"]
"""What runs a program: nothing else, our Node.js, or our Python."""


class AgentPackage(Struct, frozen=True, kw_only=True):
    """A program in a registry, pinned.

    `package` is its directory below the one it is installed in, and `program` its file below that. In them
    `{machine}` is x64 or arm64, `{cpu}` x86_64 or aarch64, and `{libc}` is "-musl" where that is the C library.
    `distributions` are what a Python agent consists of in the registry; empty if that has the agent's name.
    `machines` are those that the registry has it for. `requires_python` is the oldest Python that it works with.
    `launched` says that it is started by `launcher.py`, which needs the Python of `runtimes.py`. `pinned` is false
    for versions other than the one that this release was made for (`at_version`).
    """

    agent: str
    title: str
    version: str
    kind: ProgramKind
    package: str
    program: str
    distributions: tuple[str, ...] = ()
    machines: tuple[str, ...] = ("x64", "arm64")
    requires_python: PythonVersion = OLDEST_PYTHON
    launched: bool = True
    pinned: bool = True

    def at_version(self, version: str) -> AgentPackage:
        """Return the package in another version, whose files are checked only by the checksums that the registry
        gives.
        """
        return self if version == self.version else structs.replace(self, version=version, pinned=False)

    @property
    def lock(self) -> Path:
        """The file with the versions and checksums of what is fetched."""
        return _LOCKS / f"{self.agent}.{'txt' if self.kind == 'python' else 'json'}"

    def directory(self, cache: Path | None = None) -> Path:
        """Return the directory of the installation. A Python package has one for each Python and lock file.

        Raises ConfigError if this machine has no Python that it works with.
        """
        home = (cache or cache_dir()).absolute() / self.agent
        if self.kind != "python":
            return home / self.version
        python = interpreter(self.requires_python).version
        return home / f"{self.version}-{digest(python, self.lock.read_text(encoding='utf-8'))}"

    def program_path(self, root: str | Path) -> Path:
        """Return the path of the program, with the installation directory at `root`. Raises ConfigError for
        unsupported machines.
        """
        return self.package_path(root) / self._for_machine(self.program)

    def package_path(self, root: str | Path) -> Path:
        """Return the path of its package, with the installation directory at `root`. Raises ConfigError for
        unsupported machines.
        """
        return Path(root) / self._for_machine(self.package)

    def is_installed(self, cache: Path | None = None) -> bool:
        """Return whether it can be run, with the runtimes that it needs; False also if this user may not read the
        directory.
        """
        cache = cache or cache_dir()
        program = self.program_path(self.directory(cache))
        runs = os.access(program, os.X_OK if self.kind == "native" else os.R_OK)
        return runs and all(path.exists() for path in self._runtimes(cache))

    def problems(self) -> list[str]:
        """Return why it cannot run here, each problem with its remedy; empty if it can."""
        if issues := [issue for issue in (self.unsupported,) if issue]:
            return issues
        directory = self.directory()
        if not self.is_installed():
            return [f"{self.title} is not fetched yet ({directory}); run: {self.setup_command}"]
        installed = self.installed_version(directory)
        if installed != self.version:
            return [
                f"{directory} has {self.title} {installed or 'of an unknown version'}; expected {self.version}. "
                f"Remove that directory and run: {self.setup_command}"
            ]
        return []

    @property
    def unsupported(self) -> str:
        """Why this machine cannot run it at all; "" if it can."""
        if platform.system() != "Linux" or _ARCHITECTURES.get(platform.machine()) not in self.machines:
            return (
                f"{self.title} runs in Understudy's sandboxes on Linux ({', '.join(self.machines)}); this is "
                f"{platform.system()} {platform.machine()}. Use such a machine, a virtual machine or WSL2."
            )
        try:
            interpreter(self.requires_python)
        except ConfigError as error:
            return f"{self.title}: {error}"
        return next(iter(runtime_problems()), "") if self.launched else ""

    @property
    def distribution_names(self) -> tuple[str, ...]:
        """The distributions of a Python agent in the registry, all of the same version."""
        return self.distributions or (self.agent,)

    @property
    def setup_command(self) -> str:
        """The command that installs it."""
        if not self.pinned:
            return f"understudy agents try {self.agent}@{self.version}"
        return "understudy setup" + ("" if self.agent == "claude-code" else f" --agent {self.agent}")

    def installed_version(self, directory: Path) -> str | None:
        """Return the version that the package in a directory declares; None if it declares none."""
        try:
            if self.kind == "python":
                name = self.distribution_names[0].replace("-", "_")
                (metadata,) = self.package_path(directory).parent.glob(f"{name}-*.dist-info")
                return metadata.name.removesuffix(".dist-info").rpartition("-")[2]
            manifest = json.loads((self.package_path(directory) / "package.json").read_bytes())
            return str(manifest["version"]).partition("-linux")[0]
        except (OSError, ValueError, KeyError):
            return None

    def _runtimes(self, cache: Path) -> list[Path]:
        paths = [node_path(cache)] if self.kind == "node" else []
        return [*paths, python_path(cache, self.requires_python)] if self.launched else paths

    def _for_machine(self, path: str) -> str:
        machine = _ARCHITECTURES.get(platform.machine(), "")
        if self.unsupported:
            raise ConfigError(self.unsupported)
        return path.format(
            machine=machine,
            cpu="x86_64" if machine == "x64" else "aarch64",
            libc="" if platform.libc_ver()[0] == "glibc" else "-musl",
        )


_PACKAGES = (
    AgentPackage(
        agent="claude-code",
        title="Claude Code",
        version=CLAUDE_CODE_VERSION,
        kind="native",
        package="node_modules/@anthropic-ai/claude-code-linux-{machine}{libc}",
        program="claude",
        launched=False,
    ),
    AgentPackage(
        agent="codex",
        title="Codex",
        version="0.169.0",
        kind="native",
        package="node_modules/@openai/codex-linux-{machine}",
        program="vendor/{cpu}-unknown-linux-musl/bin/codex",
    ),
    AgentPackage(
        agent="gemini",
        title="Gemini CLI",
        version="0.61.0",
        kind="node",
        package="node_modules/@google/gemini-cli",
        program="bundle/gemini.js",
    ),
    AgentPackage(
        agent="mini-swe-agent",
        title="mini-swe-agent",
        version="2.4.6",
        kind="python",
        package="site/minisweagent",
        program="run/mini.py",
    ),
    AgentPackage(
        agent="opencode",
        title="OpenCode",
        version="1.18.33",
        kind="native",
        package="node_modules/opencode-linux-{machine}-baseline",
        program="bin/opencode",
        machines=("x64",),
    ),
    # Without what only its tools for browsers and for advice import (browser-use, tom-swe, func-timeout).
    AgentPackage(
        agent="openhands",
        title="OpenHands",
        version="1.58.2",
        kind="python",
        package="site/openhands",
        program="sdk/__init__.py",
        distributions=("openhands-sdk", "openhands-tools"),
        requires_python=(3, 12),
    ),
    AgentPackage(
        agent="pi",
        title="pi",
        version="0.87.1",
        kind="node",
        package="node_modules/@earendil-works/pi-coding-agent",
        program="dist/cli.js",
    ),
    AgentPackage(
        agent="qwen-code",
        title="Qwen Code",
        version="0.24.4",
        kind="node",
        package="node_modules/@qwen-code/qwen-code",
        program="cli.js",
    ),
)

AGENT_PACKAGES = {package.agent: package for package in _PACKAGES}
"""The agents that are fetched, by name."""
