"""`understudy doctor`: what a run needs and whether it is there. `understudy setup`: fetch what is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from understudy.cli.output import Json, print_facts, print_json

if TYPE_CHECKING:
    from understudy.model.memory import MemoryEstimate


class HealthCheck(Struct, frozen=True):
    """One thing that a run needs: whether it is there, what was found, and what to do if it is missing."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = True


def doctor(
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Only calculate whether a GPU has the memory for a model: its name or directory."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="With --gpu: length of a sequence in tokens [default: the model's context]."),
    ] = None,
    sequences: Annotated[
        int, typer.Option(min=1, help="With --gpu: number of sequences that are sampled at once.")
    ] = 8,
    micro_batch_tokens: Annotated[
        int, typer.Option(min=1, help="With --gpu: number of tokens in a training micro-batch.")
    ] = 8192,
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, help="With --gpu: train a LoRA adapter of this rank instead of all weights."),
    ] = None,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing",
            help="With --gpu: recompute activations, which takes less memory and more time.",
        ),
    ] = False,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="With --gpu: the GPU's memory in GiB [default: that of this machine's first GPU]."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Show everything that a run needs and whether it is there. Exits with 1 if something required is missing.

    With --gpu MODEL, calculate the memory for serving and training the model, and compare it with a GPU's; exits
    with 1 if either does not fit.
    """
    if gpu is not None:
        from understudy.model.fetch import model_path
        from understudy.model.memory import estimate_memory, read_shape

        shape = read_shape(model_path(gpu))
        needed = estimate_memory(
            shape,
            context=context or shape.context,
            sequences=sequences,
            micro_batch_tokens=micro_batch_tokens,
            lora_rank=lora_rank,
            checkpointing=gradient_checkpointing,
        )
        _print_memory(shape.parameters, needed, memory_gib or _gpu_memory_gib(), json_)
        return
    from understudy.agents.packages import AGENT_PACKAGES

    checks = [HealthCheck(name, *check(), required) for name, required, check in _CHECKS]
    other_packages = (package for name, package in AGENT_PACKAGES.items() if name != "claude-code")
    checks += [HealthCheck(f"agent: {package.title}", *_agent(package.agent), False) for package in other_packages]
    healthy = all(check.ok for check in checks if check.required)
    if json_:
        print_json({"ok": healthy, "checks": checks})
    else:
        _print(checks)
    if not healthy:
        raise typer.Exit(1)


def _print_memory(parameters: int, needed: MemoryEstimate, memory_gib: float | None, as_json: bool) -> None:
    """Print what a model needs and what is available. Exits with 1 if it does not fit."""
    room = None if memory_gib is None else memory_gib * 2**30 * _USABLE_MEMORY_SHARE
    fits = {name: None if room is None else getattr(needed, name) <= room for name in ("serving", "training")}
    if as_json:
        print_json({"parameters": parameters, "bytes": needed, "memory_gib": memory_gib, "fits": fits})
    else:
        sizes = {name: getattr(needed, name) for name in ("weights", "kv_cache", "serving", "optimizer")}
        sizes |= {name: getattr(needed, name) for name in ("activations", "logits", "training")}
        verdicts = {True: "fits", False: "does not fit", None: ""}
        facts = [("parameters", f"{parameters / 1e6:.0f} M")]
        for name, size in sizes.items():
            facts.append((name.replace("_", " "), f"{size / 2**30:.2f} GiB {verdicts[fits.get(name)]}".rstrip()))
        memory = "none here; give the GPU's with --memory-gib" if memory_gib is None else f"{memory_gib:.0f} GiB"
        print_facts("memory, calculated", [*facts, ("GPU", memory)])
    if False in fits.values():
        raise typer.Exit(1)


def _gpu_memory_gib() -> float | None:
    """Return the memory in GiB of the first GPU that torch can use, or None."""
    seen = _gpu()[1]
    match = re.search(r", ([0-9]+) GiB", seen)
    return float(match[1]) if match else None


_USABLE_MEMORY_SHARE = 0.9
"""The share of a GPU's memory for weights and tensors. The rest goes to the CUDA context and to fragmentation."""


def setup(
    agent: Annotated[
        list[str] | None,
        typer.Option(help="Also fetch this agent, such as codex; repeatable."),
    ] = None,
) -> None:
    """Fetch what a run needs and is not here yet: Claude Code, the tasks' Python environment, the pinned
    packages.
    """
    from understudy.agents.install import agent_package, install
    from understudy.config import cache_dir
    from understudy.tasks.environment import python_environment
    from understudy.tasks.generate.packages import CATALOG
    from understudy.tasks.materialise import fetch

    cache = cache_dir()
    for name in dict.fromkeys(("claude-code", *(agent or ()))):
        typer.echo(f"{agent_package(name).title}: {install(name, cache)}", err=True)
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


# --- the checks: each returns whether the thing is there, what was found, and the remedy --------------------

_Result = tuple[bool, str, str]


def _python() -> _Result:
    new_enough = sys.version_info >= (3, 11)
    return (
        new_enough,
        platform.python_version(),
        "" if new_enough else "install Understudy with Python 3.11 or newer",
    )


def _git() -> _Result:
    path = shutil.which("git")
    if path is None:
        return False, "not found on PATH", "install git, such as with: apt-get install git"
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
    from understudy.agents.install import find_npm

    npm = find_npm()
    if npm is None:
        return False, "not found", "install Node.js with npm, or: pip install 'understudy[node]'"
    return True, " ".join(npm), ""


def _agent(name: str) -> _Result:
    from understudy.agents.packages import AGENT_PACKAGES

    package = AGENT_PACKAGES[name]
    if package.unsupported:
        return False, "does not run on this machine", package.unsupported
    if not package.is_installed():
        return False, f"{package.version} is not fetched", package.setup_command
    if problems := package.problems():
        return False, problems[0], package.setup_command
    return True, f"{package.version} at {package.directory()}", ""


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

    missing = [name for name, package in CATALOG.items() if not archive_path(package.sdist, cache_dir()).is_file()]
    if missing:
        return False, f"not fetched yet: {', '.join(missing)}", "understudy setup"
    return True, ", ".join(CATALOG), ""


def _extra(extra: str, *modules: str) -> _Result:
    """Check the packages of an extra, given by their import names."""
    if missing := [module for module in modules if find_spec(module) is None]:
        return False, f"not installed: {', '.join(missing)}", f"pip install 'understudy[{extra}]'"
    return True, ", ".join(f"{module} {version(module)}" for module in modules), ""


def _gpu() -> _Result:
    """Check the GPU as torch sees it.

    Torch is only asked if there is a GPU, because importing it takes seconds.
    """
    device = next((path for path in _GPU_DEVICES if Path(path).exists()), None)
    if device is None:
        return True, "none: models are trained on the CPU", ""
    if find_spec("torch") is None:
        return False, f"{device}, but torch is not installed", "pip install 'understudy[train]'"
    output = subprocess.run([sys.executable, "-c", _TORCH_SCRIPT], capture_output=True, text=True, check=False)
    if seen := output.stdout.strip():
        return True, "; ".join(seen.splitlines()), ""
    remedy = "install the build of torch for this driver: https://pytorch.org/get-started/locally"
    return False, f"{device}, which torch {version('torch')} cannot use", remedy


_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
_TORCH_SCRIPT = """import torch
for number in range(torch.cuda.device_count()):
    about = torch.cuda.get_device_properties(number)
    print(f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
"""


def _cache() -> _Result:
    from understudy.config import cache_dir

    cache = cache_dir()
    # os.access, because Path.exists raises if we may not look into the directory
    parent = next(path for path in (cache, *cache.parents) if os.access(path, os.F_OK))
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        return False, f"{cache} cannot be written", "set UNDERSTUDY_CACHE to a directory that you can write"
    free = shutil.disk_usage(parent).free / 2**30
    remedy = (
        "" if free >= 2 else "free disk space up to 2 GiB, or set UNDERSTUDY_CACHE to another disk's directory"
    )
    return free >= 2, f"{cache} ({free:.0f} GiB free)", remedy


_TRAINING_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "matplotlib")
_CHECKS: tuple[tuple[str, bool, Callable[[], _Result]], ...] = (
    ("Python", True, _python),
    ("git", True, _git),
    ("sandbox: local", True, partial(_sandbox, "local")),
    ("sandbox: docker (container images)", False, partial(_sandbox, "docker")),
    ("npm", False, _npm),
    ("Claude Code", True, partial(_agent, "claude-code")),
    ("tasks' environment", True, _task_environment),
    ("packages (tasks make)", False, _packages),
    ("cache directory", True, _cache),
    ("pyarrow (writing and reading datasets)", False, partial(_extra, "hf", "pyarrow")),
    ("datasets (tasks of the Hugging Face Hub)", False, partial(_extra, "hf", "datasets")),
    ("training", False, partial(_extra, "train", *_TRAINING_PACKAGES)),
    ("GPU (training)", False, _gpu),
)
"""The checks, in order: the name, whether a run requires it, and the function."""
