"""`understudy tasks`: makes tasks, and checks existing ones."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.cli.options import command_group
from understudy.cli.output import Json, print_json
from understudy.cli.progress import ProgressLine
from understudy.cli.settings import LOCAL, sandbox_for
from understudy.errors import ConfigError, TaskError
from understudy.util.processes import available_cpus

if TYPE_CHECKING:
    from understudy.sandbox.base import Sandboxes
    from understudy.tasks.generate.history import HistoryTasks
    from understudy.types import Task

app = command_group("Make tasks, and check those you have.")

_Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Number of sandboxes at a time [default: CPUs].")
]
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
    json_: Json = False,
) -> None:
    """Make programming tasks: bugs in a package that its own tests catch, with those tests hidden.

    With functions: small modules with one wrong function each, in any number, for small models to learn on. With
    --repo: commits whose tests fail before and pass after them; their source trees are stored beside the file.
    """

    from understudy.config import cache_dir
    from understudy.run.runner import validate_tasks
    from understudy.sandbox.base import load_sandboxes
    from understudy.tasks.environment import python_environment
    from understudy.tasks.records import dump

    if (package is None) == (repo is None):
        raise ConfigError("expected either a PACKAGE or --repo PATH to make tasks from; give exactly one of them")
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
    workers = jobs or available_cpus()
    cache = cache_dir()
    sandboxes = load_sandboxes("local")

    async def work() -> None:
        commits: dict[str, int] = {}
        if repo is not None:
            tasks_made = await _from_repository(repo, name, count, trees, requirements, sandboxes, cache, workers)
            tasks, commits = tasks_made.tasks, tasks_made.refused
        else:
            assert package is not None
            tasks = await _generate(package, count, seed, split or TaskSplit.train, sandboxes, cache, workers)
        intake = await validate_tasks(
            tasks,
            cache=cache,
            sandboxes=sandboxes,
            environment=python_environment(cache),
            concurrency=workers,
            progress=_counter("{} of {} tasks validated"),
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        dump([_with_relative_source(task, path) for task in intake.accepted], path)
        accepted, refused = len(intake.accepted), intake.refused
        if json_:
            report = {
                "path": str(path),
                "tasks": [task.instance_id for task in intake.accepted],
                "refused": refused,
                **({"refused_commits": commits} if repo is not None else {}),
            }
            print_json(report)
        else:
            for reason, number in commits.items():
                typer.echo(f"{number} commits refused: {reason}")
            typer.echo(f"{accepted} tasks in {path}")
            typer.echo(f"next: understudy run --tasks {path}")
        # Many commits of a history are unsuitable as tasks, but a bug that we injected must make a valid task.
        if refused and repo is None:
            reasons = "; ".join(f"{task}: {reason}" for task, reason in refused.items())
            raise TaskError(
                f"{len(refused)} generated tasks did not pass validation: {reasons}; try another --seed"
            )
        for task, reason in refused.items():
            typer.echo(f"{task} did not pass validation: {reason}", err=True)

    asyncio.run(work())


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
        progress=_counter(f"{{}} of {count} tasks made, {{}} commits looked at"),
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

    progress = _counter(f"{{}} of {count} bugs kept, {{}} tried")
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
            intake = await validate_tasks(
                loaded.tasks,
                cache=cache,
                sandboxes=sandboxes,
                environment=environment_for(sandboxes, cache),
                concurrency=jobs or available_cpus(),
                progress=_counter("{} of {} tasks validated"),
                forget_failures=True,
            )
        finally:
            await sandboxes.aclose()
        rows = {refusal.instance_id or refusal.where: str(refusal) for refusal in loaded.refused}
        return ValidatedTasks(intake.accepted, rows | intake.refused, intake.protection)

    intake = asyncio.run(work())
    accepted = [task.instance_id for task in intake.accepted]
    protection = {task: dict(zip(("level", "reason"), intake.protection[task], strict=True)) for task in accepted}
    if json_:
        print_json({"accepted": accepted, "refused": intake.refused, "protection": protection})
    else:
        for task, each in protection.items():
            typer.echo(f"ok       {task}   protection: {each['level']} {each['reason']}".rstrip())
        for task, reason in intake.refused.items():
            typer.echo(f"refused  {task}: {reason}")
    if intake.refused:
        raise typer.Exit(1)


def _counter(what: str) -> Callable[[int, int], None]:
    """Return a progress callback for stderr: `what` is formatted with two numbers.

    Off a terminal, it is printed when the first number changes.
    """
    line, last = ProgressLine(plain_s=math.inf), -1

    def show(first: int, second: int) -> None:
        nonlocal last
        line.show(what.format(first, second), at_once=first != last)
        last = first

    return show
