"""`understudy tasks`: makes tasks, and checks existing ones."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy.cli import EXIT_INTERRUPTED
from understudy.cli.interrupts import run_sandboxes
from understudy.cli.options import command_group, from_options
from understudy.cli.output import Json, print_json
from understudy.cli.progress import counter
from understudy.cli.settings import LOCAL, sandbox_for
from understudy.errors import ConfigError, TaskError
from understudy.util.processes import available_cpus

if TYPE_CHECKING:
    from understudy.cli.commands.run import RunSettings
    from understudy.run.difficulty import SolveRates, TriedTask
    from understudy.run.runner import RunSummary, ValidatedTasks
    from understudy.sandbox.base import Sandboxes
    from understudy.tasks.generate.history import HistoryTasks
    from understudy.types import Task

app = command_group("Make tasks, and check those you have.")

_Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Number of sandboxes at a time [default: CPUs].")
]
_MAX_REASONS = 5
_FUNCTIONS = "functions"


class TaskSplit(StrEnum):
    """Which generated tasks: those for training, or held-out ones whose names and files no training has seen."""

    train = "train"
    held_out = "held-out"


@app.command("make")
def make_tasks(
    package: Annotated[
        str | None,
        typer.Argument(
            help="A package of the catalog, such as toolz or boltons; or functions, for small generated tasks."
        ),
    ] = None,
    repo: Annotated[
        Path | None,
        typer.Option(help="Instead of a package: a git repository; tasks are made from its newest commits."),
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --repo: requirements file of what its tests need [default: what pyproject.toml declares].",
        ),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of tasks.")] = 10,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed makes the same tasks.")] = 0,
    split: Annotated[
        TaskSplit | None,
        typer.Option(help="With functions: tasks for training, or held-out ones [default: train]."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The JSONL file to write [default: tasks/PACKAGE-COUNT-SEED.jsonl]."),
    ] = None,
    jobs: _Jobs = None,
    probe: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Run an agent N times on each task, and keep only tasks that the model solves sometimes.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --probe: the model's directory, the name of a fetched model, or tiny."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="With --probe: a TOML file as for `understudy run`, with the model's server, and the agent's "
            "options in [run].",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Make programming tasks: bugs in a package that its own tests catch, with those tests hidden.

    With functions: small modules with one wrong function each, in any number, for small models to learn on. With
    --repo: commits whose tests fail before and pass after them; their source trees are stored beside the file.
    With --probe: all tasks are stored beside the file too, with their run; the same command again continues it.
    """

    from understudy.config import cache_dir
    from understudy.run.difficulty import tried_tasks
    from understudy.run.runner import validate_tasks
    from understudy.sandbox.base import load_sandboxes
    from understudy.tasks.environment import python_environment
    from understudy.tasks.records import dump

    if (package is None) == (repo is None):
        from understudy.tasks.generate.packages import CATALOG

        raise ConfigError(
            f"expected either a PACKAGE or --repo PATH to make tasks from, got {'both' if package else 'none'}; "
            f"give one of {', '.join((_FUNCTIONS, *CATALOG))}, or --repo PATH"
        )
    if split is not None and package != _FUNCTIONS:
        raise ConfigError(
            f"--split: {package or repo} has no splits; use --split only with: understudy tasks make {_FUNCTIONS}"
        )
    if requirements is not None and repo is None:
        raise ConfigError(
            "--requirements only applies with --repo, since the requirements of a PACKAGE are built in; leave it "
            "out"
        )
    if package == _FUNCTIONS:
        name = f"{_FUNCTIONS}-{(split or TaskSplit.train).value}"
    else:
        name = package or _repository_name(repo)
    path = output or Path("tasks") / f"{name}-{count}-{seed}.jsonl"
    trees = path.absolute().with_name(f"{path.stem}-trees")
    # Read before any task is made, because a mistake in them should not cost that time.
    probing = _probe_settings(path, probe, model, config)
    workers = jobs or available_cpus()
    cache = cache_dir()
    sandboxes = load_sandboxes("local")

    async def work() -> tuple[ValidatedTasks, dict[str, int]]:
        commits: dict[str, int] = {}
        if repo is not None:
            tasks_made = await _from_repository(repo, name, count, trees, requirements, sandboxes, cache, workers)
            tasks, commits = tasks_made.tasks, tasks_made.refused
        else:
            assert package is not None
            tasks = await _generate(package, count, seed, split or TaskSplit.train, sandboxes, cache, workers)
        validated = await validate_tasks(
            tasks,
            cache=cache,
            sandboxes=sandboxes,
            environment=python_environment(cache),
            concurrency=workers,
            progress=counter("{} of {} tasks validated"),
        )
        return validated, commits

    validated, commits = run_sandboxes(work())
    refused = validated.refused
    # Many commits of a history are unsuitable as tasks, but a bug that we injected must make a valid task.
    if refused and (repo is None or not validated.accepted):
        reasons = "; ".join(f"{task}: {reason}" for task, reason in list(refused.items())[:_MAX_REASONS])
        if len(refused) > _MAX_REASONS:
            reasons += f"; and {len(refused) - _MAX_REASONS} more"
        remedy = "try another --seed" if repo is None else "give its tests' requirements with --requirements"
        if not path.exists():  # trees of an earlier file with this name are needed
            shutil.rmtree(trees, ignore_errors=True)
        raise TaskError(f"{len(refused)} generated tasks did not pass validation: {reasons}; {remedy}")
    made_path = path if probing is None else Path(probing.task.tasks[0])
    made_path.parent.mkdir(parents=True, exist_ok=True)
    dump([_with_relative_source(task, made_path) for task in validated.accepted], made_path)
    for task, reason in refused.items():
        first_line, *_ = reason.split("\n")  # what the tests printed follows, and is in the report of --json
        typer.echo(f"{task} did not pass validation: {first_line}", err=True)
    report: dict[str, object] = {"path": str(path), "tasks": [task.instance_id for task in validated.accepted]}
    report["refused"] = refused
    if repo is not None:
        report["refused_commits"] = commits
    if probing is not None:
        summary = _run_probe(probing)
        tried = tried_tasks([Path(summary.output_dir)], summary.run_id)
        report |= _write_selection(tried, None, path) | {"run": summary.output_dir}
    if json_:
        print_json(report)
        return
    for reason, number in commits.items():
        typer.echo(f"{number} commits refused: {reason}")
    _print_selection(report)


def _probe_settings(path: Path, samples: int | None, model: str | None, config: Path | None) -> RunSettings | None:
    """Return the settings of the run that probes the tasks for `path`; None without --probe."""
    if samples is None:
        if model is not None or config is not None:
            raise ConfigError("--model and --config only apply with --probe; add --probe N, or leave them out")
        return None
    if model is None and config is None:
        raise ConfigError(
            "--probe needs the model to probe with; give --model, or --config with the server of a model"
        )
    from understudy.cli.commands.run import RunSettings, run_config_of

    options = {
        "config": config,
        "weights": model,
        "tasks": [str(path.with_name(f"{path.stem}-all.jsonl"))],
        "samples": samples,
        "output_dir": path.with_name(f"{path.stem}-probe"),
    }
    settings: RunSettings = from_options(RunSettings, options)
    if settings.store is not None or settings.engine != "local":
        raise ConfigError(
            f"{config}: its keys store and engine do not apply to --probe, whose run is in a directory; leave "
            "them out, or use understudy run and then understudy tasks filter"
        )
    run_config_of(settings, settings.agent.only_agent)
    return settings


def _run_probe(settings: RunSettings) -> RunSummary:
    """Run the probe, or continue it. Raises typer.Exit when it was interrupted, with a line that says so."""
    from understudy.cli.commands.run import run_config_of, run_one
    from understudy.run.runner import check_prices

    config = run_config_of(settings, settings.agent.only_agent)
    if settings.max_cost_usd is not None:
        check_prices(config.gateway)
    summary = run_one(config, settings)
    if summary.pending:
        typer.echo("Stopped early; run the same command again to continue.", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    return summary


def _write_selection(tried: list[TriedTask], bounds: SolveRates | None, path: Path) -> dict[str, object]:
    """Write the tasks to learn from to `path`; return what a report says of them. Raises TaskError if none is
    left.
    """
    from understudy.run.difficulty import select
    from understudy.tasks.records import dump

    chosen = select(tried, bounds)
    if not chosen.kept:
        counts = ", ".join(f"{count} {reason}" for reason, count in chosen.counts.items())
        raise TaskError(
            f"none of {len(tried)} tasks is left ({counts or 'the run has no task'}), so {path} was not written; "
            "use other tasks or more rollouts, or give wider bounds: understudy tasks filter RUN --solve-rate "
            "LOW..HIGH"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    dump([_with_relative_source(task, path) for task in chosen.kept], path)
    rates = {
        difficulty.task.instance_id: {"solved": difficulty.solved, "graded": difficulty.graded}
        for difficulty in tried
    }
    kept = [task.instance_id for task in chosen.kept]
    return {"path": str(path), "tasks": kept, "dropped": chosen.dropped, "solve_rates": rates}


def _print_selection(report: Mapping[str, Any]) -> None:
    """Print what was written, and how many tasks were dropped by reason."""
    dropped: dict[str, str] = report.get("dropped", {})
    for reason, number in Counter(dropped.values()).most_common():
        typer.echo(f"{number} tasks dropped: {reason}")
    typer.echo(f"{len(report['tasks'])} tasks in {report['path']}")
    typer.echo(f"next: understudy run --tasks {report['path']}")


@app.command("filter")
def filter_tasks(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Output directories of runs, whose tasks are filtered.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSONL file to write.")],
    solve_rate: Annotated[
        str | None,
        typer.Option(
            "--solve-rate",
            metavar="LOW..HIGH",
            help="Keep tasks whose solve rate is within these bounds, such as 0.1..0.9 [default: tasks that are "
            "neither always nor never solved].",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Keep the tasks of runs that a model can learn from, by how often their rollouts solved them.

    Counts are over all rollouts of the given runs that were graded. Tasks that are left out are counted by reason.
    """
    from understudy.run.difficulty import parse_solve_rates, tried_tasks

    bounds = None if solve_rate is None else parse_solve_rates("--solve-rate", solve_rate)
    report = _write_selection(tried_tasks(runs), bounds, output)
    if json_:
        print_json(report)
    else:
        _print_selection(report)


def _repository_name(repo: Path | None) -> str:
    """Return the name for a repository's tasks: that of its directory, or of the parent of a bare repository."""
    assert repo is not None
    path = repo.resolve()
    name = path.parent.name if path.name in (".git", "repo", "git") else path.name.removesuffix(".git")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "repository"


async def _from_repository(
    repo: Path,
    name: str,
    count: int,
    trees: Path,
    requirements: Path | None,
    sandboxes: Sandboxes,
    cache: Path,
    jobs: int,
) -> HistoryTasks:
    """Return the tasks from a repository's history, not validated yet. Raises TaskError and ConfigError."""
    from understudy.tasks.environment import python_environment
    from understudy.tasks.generate.git_history import History
    from understudy.tasks.generate.history import make_from_history
    from understudy.tasks.generate.requirements import declared_requirements, pin
    from understudy.tasks.materialise import read_text

    history = History(repo)
    if requirements is not None:
        lines = read_text(requirements, "requirements, one a line").splitlines()
    else:
        lines = declared_requirements(history.file("HEAD", "pyproject.toml") or "")
    packages = pin(lines, cache=cache)
    return await make_from_history(
        history,
        name,
        count,
        trees=trees,
        packages=packages,
        sandboxes=sandboxes,
        environment=python_environment(cache, packages),
        cache=cache,
        jobs=jobs,
        progress=counter(f"{{}} of {count} tasks made, {{}} commits looked at"),
    )


def _with_relative_source(task: Task, path: Path) -> Task:
    """Return a task with a source path relative to its task file, so that both can be moved together."""
    from msgspec.structs import replace

    from understudy.types import Directory

    base = path.absolute().parent
    if isinstance(task.source, Directory) and Path(task.source.path).is_relative_to(base):
        return replace(task, source=Directory(str(Path(task.source.path).relative_to(base))))
    return task


async def _generate(
    package: str, count: int, seed: int, split: TaskSplit, sandboxes: Sandboxes, cache: Path, jobs: int
) -> list[Task]:
    """Generate the tasks, not validated yet. Raises TaskError."""
    if package == _FUNCTIONS:
        from understudy.tasks.generate.functions import make_functions

        return make_functions(count, seed, split.value)
    from understudy.tasks.generate.mutated import make_mutated

    progress = counter(f"{{}} of {count} bugs kept, {{}} tried")
    return await make_mutated(package, count, seed, sandboxes=sandboxes, cache=cache, jobs=jobs, progress=progress)


@app.command("check")
def check_tasks(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="TASKS...",
            help="Files of task records or dataset rows, names of Hugging Face datasets, task folders, or `smoke` "
            "for the built-in small set.",
        ),
    ],
    sandbox: Annotated[
        str | None,
        typer.Option(
            help="The kind of sandbox: local, docker or unsafe-local [default: docker if a task needs its image]."
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="Docker: the registry namespace of instance images, such as swebench or starryzhang; or none."
        ),
    ] = None,
    instance_image_tag: Annotated[
        str | None, typer.Option(help="Docker: the tag of instance images [default: latest].")
    ] = None,
    jobs: _Jobs = None,
    json_: Json = False,
) -> None:
    """Validate tasks: the gold patch must score 1 and the empty patch 0. Exits with 1 if a task is rejected.

    Runs the tasks' own tests in sandboxes, with and without the gold patch, and what their images, Dockerfiles and
    solution scripts require; no agent and no model. A task that failed before is validated again; other commands
    remember the failure. For each task that passes, prints how far twins protect its rewards against forged
    passes, and why not further: twins, partial or none.
    """

    from understudy.config import cache_dir
    from understudy.run.runner import ValidatedTasks, validate_tasks
    from understudy.sandbox.base import load_sandboxes
    from understudy.tasks.environment import environment_for
    from understudy.tasks.load import load_tasks
    from understudy.tasks.recipes import ImageChoice

    cache = cache_dir()
    images = ImageChoice(namespace, instance_image_tag)
    sandboxes = load_sandboxes(sandbox or LOCAL)

    async def work() -> ValidatedTasks:
        nonlocal sandboxes
        try:
            loaded = await load_tasks(specs, sandboxes=sandboxes, cache=cache, images=images)
            if sandbox is None:
                sandboxes = load_sandboxes(sandbox_for(loaded.tasks))
            validated = await validate_tasks(
                loaded.tasks,
                cache=cache,
                sandboxes=sandboxes,
                environment=environment_for(sandboxes, cache),
                concurrency=jobs or available_cpus(),
                progress=counter("{} of {} tasks validated"),
                forget_failures=True,
            )
        finally:
            await sandboxes.aclose()
        rows = {refusal.instance_id or refusal.where: str(refusal) for refusal in loaded.refused}
        return ValidatedTasks(validated.accepted, rows | validated.refused, validated.protection)

    validated = run_sandboxes(work())
    accepted = [task.instance_id for task in validated.accepted]
    protection = {
        task: dict(zip(("level", "reason"), validated.protection[task], strict=True)) for task in accepted
    }
    if json_:
        print_json({"accepted": accepted, "refused": validated.refused, "protection": protection})
    else:
        for task, task_protection in protection.items():
            typer.echo(
                f"ok       {task}   protection: {task_protection['level']} {task_protection['reason']}".rstrip()
            )
        for task, reason in validated.refused.items():
            typer.echo(f"refused  {task}: {reason}")
    if validated.refused:
        raise typer.Exit(1)
