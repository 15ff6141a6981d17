"""`understudy doctor`: what a run needs and its state. `understudy setup`: fetch what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
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


def doctor(json_: Json = False) -> None:
    """Show everything a run needs, with its state. Exits with 1 when something required is missing."""
    checks = [HealthCheck(name, *check(), required) for name, required, check in _CHECKS]
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


# --- the checks: whether the thing is there, what was found, and what to do when it is not ------------------

_Result = tuple[bool, str, str]


def _python() -> _Result:
    new_enough = sys.version_info >= (3, 11)
    return new_enough, platform.python_version(), "" if new_enough else "use 3.11 or newer"


def _git() -> _Result:
    path = shutil.which("git")
    if path is None:
        return False, "not found", "install git, as: apt-get install git"
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return True, f"{path} ({output.splitlines()[0] if output else 'no version'})", ""


def _sandbox(kind: str) -> _Result:
    from understudy import plugins
    from understudy.sandbox.base import Sandboxes

    sandboxes: Sandboxes = plugins.load("sandboxes", kind)()
    if problems := sandboxes.problems():
        return False, "does not work here", "; ".join(problems)
    warnings = sandboxes.warnings()
    return True, "works, with less protection" if warnings else "works", "; ".join(warnings)


def _npm() -> _Result:
    from understudy.agents.claude_install import find_npm

    npm = find_npm()
    if npm is None:
        return False, "not found", "install Node.js with npm, or: pip install 'understudy[node]'"
    return True, " ".join(npm), ""


def _claude_code() -> _Result:
    from understudy.agents.claude_install import binary_path, is_installed
    from understudy.config import CLAUDE_CODE_VERSION

    try:
        binary = binary_path()
    except ConfigError as error:
        return False, str(error), ""
    if is_installed(binary):
        return True, f"{CLAUDE_CODE_VERSION} at {binary}", ""
    return False, f"{CLAUDE_CODE_VERSION} is not fetched", "understudy setup"


def _task_environment() -> _Result:
    from understudy.config import cache_dir
    from understudy.tasks.environment import is_installed

    if is_installed(cache_dir()):
        return True, "pinned pytest", ""
    return False, "not made yet", "understudy setup"


def _packages() -> _Result:
    from understudy.config import cache_dir
    from understudy.tasks.generate.packages import CATALOG
    from understudy.tasks.materialise import archive_path

    missing = [name for name, each in CATALOG.items() if not archive_path(each.sdist, cache_dir()).is_file()]
    if missing:
        return False, f"not fetched yet: {', '.join(missing)}", "understudy setup"
    return True, ", ".join(CATALOG), ""


def _extra(extra: str, *modules: str) -> _Result:
    """The packages of an extra, by the names that they are imported by."""
    if missing := [module for module in modules if find_spec(module) is None]:
        return False, f"not installed: {', '.join(missing)}", f"pip install 'understudy[{extra}]'"
    return True, ", ".join(f"{module} {version(module)}" for module in modules), ""


def _gpu() -> _Result:
    """The GPU as torch sees it. It is asked only where there is one: importing torch takes seconds."""
    device = next((path for path in _GPU_DEVICES if Path(path).exists()), None)
    if device is None:
        return True, "none: models are trained on the CPU", ""
    if find_spec("torch") is None:
        return False, f"{device}, and no torch", "pip install 'understudy[train]'"
    output = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    if seen := output.stdout.strip():
        return True, "; ".join(seen.splitlines()), ""
    remedy = "install the build of torch for this driver: https://pytorch.org/get-started/locally"
    return False, f"{device}, which torch {version('torch')} cannot use", remedy


_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
_ASK_TORCH = """import torch
for number in range(torch.cuda.device_count()):
    about = torch.cuda.get_device_properties(number)
    print(f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
"""


def _cache() -> _Result:
    from understudy.config import cache_dir

    cache = cache_dir()
    # os.access, for Path.exists raises where we may not look
    parent = next(path for path in (cache, *cache.parents) if os.access(path, os.F_OK))
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        return False, f"{cache} cannot be written", "set UNDERSTUDY_CACHE to a directory that you can write"
    free = shutil.disk_usage(parent).free / 2**30
    remedy = "" if free >= 2 else "free 2 GiB, or set UNDERSTUDY_CACHE"
    return free >= 2, f"{cache} ({free:.0f} GiB free)", remedy


_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "matplotlib")
_CHECKS: tuple[tuple[str, bool, Callable[[], _Result]], ...] = (
    ("Python", True, _python),
    ("git", True, _git),
    ("sandbox: local", True, partial(_sandbox, "local")),
    ("sandbox: docker (container images)", False, partial(_sandbox, "docker")),
    ("npm", False, _npm),
    ("Claude Code", True, _claude_code),
    ("tasks' environment", True, _task_environment),
    ("packages (tasks make)", False, _packages),
    ("cache directory", True, _cache),
    ("pyarrow (writing and reading datasets)", False, partial(_extra, "hf", "pyarrow")),
    ("datasets (tasks of the Hugging Face Hub)", False, partial(_extra, "hf", "datasets")),
    ("training", False, partial(_extra, "train", *_PACKAGES)),
    ("GPU (training)", False, _gpu),
)
"""What is checked, in this order: its name, whether a run needs it, and the check."""
