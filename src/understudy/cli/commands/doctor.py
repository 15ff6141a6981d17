"""`understudy doctor`: what a run needs and its state. `understudy setup`: fetch what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import typer
from msgspec import Struct

from understudy.cli.output import Json, print_json
from understudy.errors import ConfigError


class HealthCheck(Struct, frozen=True):
    """One thing a run needs: whether it is there, what was found, and what to do when it is not."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = True


def doctor(
    json_: Json = False,
) -> None:
    """Show everything a run needs, with its state. Exits with 1 when something required is missing."""
    checks = [check() for check in _CHECKS]
    healthy = all(check.ok for check in checks if check.required)
    if json_:
        print_json({"ok": healthy, "checks": checks})
    else:
        _print(checks)
    if not healthy:
        raise typer.Exit(1)


def setup() -> None:
    """Fetch what a run needs and is not here yet: Claude Code, the tasks' environment, the pinned packages."""
    from understudy.agents.claude_install import install
    from understudy.config import cache_dir
    from understudy.tasks.environment import python_environment
    from understudy.tasks.generate.packages import CATALOG
    from understudy.tasks.materialise import fetch

    cache = cache_dir()
    typer.echo(f"Claude Code: {install(cache)}", err=True)
    python_environment(cache)
    typer.echo("tasks' environment: ready", err=True)
    sdists = [package.sdist for package in CATALOG.values()]
    for sdist in sdists:
        fetch(sdist, cache)
    typer.echo(
        f"packages to make tasks of: {', '.join(f'{sdist.name} {sdist.version}' for sdist in sdists)}", err=True
    )


def _print(checks: list[HealthCheck]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        mark = "ok" if check.ok else ("missing" if check.required else "optional")
        table.add_row(mark, check.name, check.found, check.remedy)
    Console().print(table, markup=False)


def _python() -> HealthCheck:
    version = platform.python_version()
    return HealthCheck(
        "Python", sys.version_info >= (3, 11), version, "" if sys.version_info >= (3, 11) else "use 3.11 or newer"
    )


def _tool(name: str, remedy: str, *, required: bool = True) -> Callable[[], HealthCheck]:
    def check() -> HealthCheck:
        path = shutil.which(name)
        if path is None:
            return HealthCheck(name, False, "not found", remedy, required)
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        return HealthCheck(
            name,
            True,
            f"{path} ({output.strip().splitlines()[0] if output.strip() else 'no version'})",
            "",
            required,
        )

    return check


def _sandbox() -> HealthCheck:
    from understudy.sandbox.local.sandboxes import LocalSandboxes

    problems = LocalSandboxes().problems()
    state = "does not work here" if problems else "works"
    return HealthCheck("sandbox: local", not problems, state, "; ".join(problems))


def _docker() -> HealthCheck:
    from understudy.sandbox.docker.sandboxes import DockerSandboxes

    problems = DockerSandboxes().problems()
    state = "does not work here" if problems else "works"
    return HealthCheck(
        "sandbox: docker (container images)", not problems, state, "; ".join(problems), required=False
    )


def _npm() -> HealthCheck:
    from understudy.agents.claude_install import find_npm

    npm = find_npm()
    remedy = "" if npm else "install Node.js with npm, or: pip install 'understudy[node]'"
    return HealthCheck("npm", npm is not None, " ".join(npm) if npm else "not found", remedy, required=False)


def _claude_code() -> HealthCheck:
    from understudy.agents.claude_install import binary_path, is_installed
    from understudy.config import CLAUDE_CODE_VERSION

    try:
        binary = binary_path()
    except ConfigError as error:
        return HealthCheck("Claude Code", False, str(error))
    if is_installed(binary):
        return HealthCheck("Claude Code", True, f"{CLAUDE_CODE_VERSION} at {binary}")
    return HealthCheck("Claude Code", False, f"{CLAUDE_CODE_VERSION} is not fetched", "understudy setup")


def _task_environment() -> HealthCheck:
    from understudy.config import cache_dir
    from understudy.tasks.environment import is_installed

    installed = is_installed(cache_dir())
    remedy = "" if installed else "understudy setup"
    return HealthCheck("tasks' environment", installed, "pinned pytest" if installed else "not made yet", remedy)


def _packages() -> HealthCheck:
    from understudy.config import cache_dir
    from understudy.tasks.generate.packages import CATALOG
    from understudy.tasks.materialise import archive_path

    missing = [name for name, each in CATALOG.items() if not archive_path(each.sdist, cache_dir()).is_file()]
    state = f"not fetched yet: {', '.join(missing)}" if missing else ", ".join(CATALOG)
    return HealthCheck(
        "packages (tasks make)", not missing, state, "understudy setup" if missing else "", required=False
    )


def _extra(name: str, extra: str, *modules: str) -> Callable[[], HealthCheck]:
    """The check of an extra's packages, by the names that they are imported by."""

    def check() -> HealthCheck:
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            state, remedy = f"not installed: {', '.join(missing)}", f"pip install 'understudy[{extra}]'"
            return HealthCheck(name, False, state, remedy, required=False)
        return HealthCheck(
            name, True, ", ".join(f"{module} {version(module)}" for module in modules), required=False
        )

    return check


def _gpu() -> HealthCheck:
    """The GPU as torch sees it. It is asked only where there is one: importing torch takes seconds."""
    name = "GPU (training)"
    device = next((path for path in _GPU_DEVICES if Path(path).exists()), None)
    if device is None:
        return HealthCheck(name, True, "none: models are trained on the CPU", required=False)
    if find_spec("torch") is None:
        return HealthCheck(
            name, False, f"{device}, and no torch", "pip install 'understudy[train]'", required=False
        )
    output = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    if seen := output.stdout.strip():
        return HealthCheck(name, True, "; ".join(seen.splitlines()), required=False)
    remedy = "install the build of torch for this driver: https://pytorch.org/get-started/locally"
    return HealthCheck(name, False, f"{device}, which torch {version('torch')} cannot use", remedy, required=False)


_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
_ASK_TORCH = """import torch
for number in range(torch.cuda.device_count()):
    about = torch.cuda.get_device_properties(number)
    print(f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
"""


def _cache() -> HealthCheck:
    from understudy.config import cache_dir

    cache = cache_dir()
    # os.access, for Path.exists raises where we may not look
    parent = next(path for path in (cache, *cache.parents) if os.access(path, os.F_OK))
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        remedy = "set UNDERSTUDY_CACHE to a directory that you can write"
        return HealthCheck("cache directory", False, f"{cache} cannot be written", remedy)
    free = shutil.disk_usage(parent).free / 2**30
    enough = free >= 2
    return HealthCheck(
        "cache directory",
        enough,
        f"{cache} ({free:.0f} GiB free)",
        "" if enough else "free 2 GiB, or set UNDERSTUDY_CACHE",
    )


_CHECKS: tuple[Callable[[], HealthCheck], ...] = (
    _python,
    _tool("git", "install git, as: apt-get install git"),
    _sandbox,
    _docker,
    _npm,
    _claude_code,
    _task_environment,
    _packages,
    _cache,
    _extra("pyarrow (writing and reading datasets)", "hf", "pyarrow"),
    _extra("datasets (tasks of the Hugging Face Hub)", "hf", "datasets"),
    _extra("training", "train", "torch", "transformers", "trl", "peft", "accelerate", "matplotlib"),
    _gpu,
)
