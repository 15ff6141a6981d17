"""`understudy grade`: reads predictions made elsewhere, and writes verdicts and SWE-bench's report files."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import typer
from msgspec import Struct, field

from understudy import plugins
from understudy.cli import EXIT_ERROR, EXIT_INTERRUPTED
from understudy.cli.interrupts import interrupted, run_sandboxes, run_stoppable
from understudy.cli.options import command
from understudy.cli.output import Json, print_json
from understudy.cli.progress import ProgressLine, counter, time_left
from understudy.cli.settings import DOCKER, LOCAL, TaskSettings, sandbox_for, unknown_task
from understudy.config import cache_dir
from understudy.errors import ConfigError
from understudy.grade.batch import GradingProgress, GradingSetup, PatchGrader, grade_all
from understudy.grade.official import run_official
from understudy.grade.predictions import Predictions, open_predictions
from understudy.grade.reports import LOGS, UNNAMED_MODEL, name_part, write_metadata, write_summary
from understudy.run.ray_cluster import RayOptions
from understudy.run.ray_graders import ray_graders
from understudy.run.regrade import GradePatch, RegradeSummary, regrade_run
from understudy.run.runner import validate_tasks
from understudy.sandbox.base import load_sandboxes
from understudy.store import Store
from understudy.store.address import StoreLocation, parse_location
from understudy.tasks.environment import environment_for
from understudy.tasks.load import load_tasks
from understudy.tasks.records import LoadedTasks
from understudy.types import Task
from understudy.util.files import locked
from understudy.util.processes import available_cpus
from understudy.util.settings import option
from understudy.util.text import visible

_MAX_SHOWN_ROWS = 20


class GradeSettings(Struct, frozen=True, kw_only=True):
    """The options of `understudy grade`."""

    table: ClassVar[str] = "grade"
    predictions: Annotated[
        str,
        option(
            "A .jsonl or .json file of predictions in the format of SWE-bench's harness, or: gold.", argument=True
        ),
    ] = ""
    regrade: Annotated[
        str | None,
        option(
            "Instead, grade a run's patches again with the current grader: the run's directory, or "
            "postgresql://…/DATABASE.",
            metavar="RUN",
        ),
    ] = None
    task: TaskSettings = TaskSettings()
    sandbox: Annotated[
        str | None,
        option("The kind of sandbox: local, docker or unsafe-local [default: docker if a task needs its image]."),
    ] = None
    run_id: Annotated[
        str | None,
        option(
            "The name of the reports; grading continues under the same name [default: understudy, or official]."
        ),
    ] = None
    output_dir: Annotated[Path, option("The directory for logs/ and the summary.", "--output-dir", "-o")] = Path()
    jobs: Annotated[int, option("Patches to grade at a time [default: CPUs].", "--jobs", "-j", ge=1)] = field(
        default_factory=available_cpus
    )
    timeout: (
        Annotated[
            float, option("Time limit for the tests of one patch, in seconds [default: the task's own].", ge=1)
        ]
        | None
    ) = None
    validate: Annotated[
        bool | None,
        option(
            "Check that the task's gold patch passes and the empty patch fails: for all tasks first, or for none "
            "[default: for tasks whose tests fail].",
            "--validate/--no-validate",
        ),
    ] = None
    official: Annotated[bool, option("Grade with the swebench package, in its own containers.", "--official")] = (
        False
    )
    engine: Annotated[
        Literal["local", "ray"], option("Where patches are graded: on this machine, or by a Ray cluster.")
    ] = "local"
    ray: RayOptions = RayOptions()
    config: Annotated[Path | None, option("A TOML file with options in a table [grade].", metavar="FILE.toml")] = (
        None
    )

    @property
    def name(self) -> str:
        """The name of the reports."""
        return self.run_id or ("official" if self.official else "understudy")


@command
def grade(settings: GradeSettings, json_: Json = False) -> None:
    """Grade predictions in parallel, and write the report files of SWE-bench's harness.

    The same command again grades only what has no report yet, or has another patch now. Ctrl-C lets running ones
    finish; a second Ctrl-C stops at once. Exits with 1 if a prediction could not be graded.
    """
    if settings.engine == "ray" and settings.official:
        raise ConfigError(
            "--engine ray: unsupported with --official, which grades in containers on this machine; leave out "
            "one of them"
        )
    if settings.regrade is not None:
        _regrade(settings, parse_location(settings.regrade), json_)
        return
    if not settings.predictions:
        raise ConfigError(
            "missing PREDICTIONS; give a .json or .jsonl file of them, `gold` for the tasks' own patches, or "
            "--regrade RUN"
        )
    if not settings.task.tasks:
        raise ConfigError("missing tasks; give the tasks of the predictions with --tasks or --dataset-path")
    name_part(settings.name)
    settings = msgspec.structs.replace(settings, output_dir=settings.output_dir.absolute())
    loaded = run_sandboxes(_load(settings))
    tasks = [_with_timeout(task, settings.timeout) for task in loaded.tasks]
    predictions = open_predictions(settings.predictions, tasks, settings.task.ids)
    if settings.official:
        _grade_officially(settings, predictions, tasks, json_)
        return
    grading, path = _grade(settings, predictions, loaded, tasks)
    _print_summary(grading, predictions, path, json_)
    if len(grading.outcomes) < grading.total:
        raise typer.Exit(EXIT_INTERRUPTED)
    failed = sum(outcome.status == "error" for outcome in grading.outcomes.values())
    if predictions.rejected.count or failed:
        raise typer.Exit(1 if failed < grading.total else EXIT_ERROR)


def _regrade(settings: GradeSettings, run: StoreLocation, as_json: bool) -> None:
    """Grade a run's patches again in the same kind of sandbox. Exits with 1 if one could not be graded.

    If the run is in a database, its files are written to the output directory.
    """
    if settings.predictions or settings.task.tasks:
        raise ConfigError("--regrade takes patches and tasks from the run; leave out the predictions and --tasks")
    line = ProgressLine()

    async def work() -> RegradeSummary:
        with (
            Store.open(run, create=False) as store,
            store.hold(".lock", busy=f"another process works on {run}; wait for it to end"),
        ):
            kinds = {settings.sandbox or str(run.config["sandbox"]) for run in store.runs.all()}
            if not store.runs.all():
                raise ConfigError(f"{run} has no runs to grade again; give the directory of a run to --regrade")
            if len(kinds) != 1:
                raise ConfigError(
                    f"{run}: its runs used different sandboxes: {', '.join(sorted(kinds))}; "
                    "choose one with --sandbox"
                )
            (kind,) = kinds
            directory = run if isinstance(run, Path) else settings.output_dir.absolute()
            async with _run_grader(settings, kind) as (grade_patch, concurrency):
                return await regrade_run(
                    store,
                    directory,
                    grade_patch,
                    concurrency=concurrency,
                    progress=lambda done, total: line.show(f"{done}/{total} graded", at_once=done == total),
                )

    summary = run_sandboxes(work())
    line.end()
    if as_json:
        print_json(msgspec.to_builtins(summary))
    else:
        typer.echo(f"{summary.solved} of {summary.rollouts} solved, {len(summary.changed)} verdicts differ")
        for rollout, (before, now) in summary.changed.items():
            typer.echo(f"{rollout}: {before:g} before, {now:g} now")
        for rollout, reason in summary.errors.items():
            typer.echo(visible(f"error: {rollout}: {reason}"), err=True)
    if summary.errors:
        raise typer.Exit(1)


@asynccontextmanager
async def _run_grader(settings: GradeSettings, kind: str) -> AsyncGenerator[tuple[GradePatch, int]]:
    """Yield what grades a run's patches in a kind of sandbox, here or on a Ray cluster, and how many at a time."""
    if settings.engine == "ray":
        async with ray_graders(settings.ray, kind, validate_failures=False, report=_warn) as graders:
            yield graders.grade_validated, graders.capacity
        return
    sandboxes = load_sandboxes(kind, _options(kind))
    try:
        environment = await asyncio.to_thread(environment_for, sandboxes, cache_dir())
        grader = PatchGrader(sandboxes=sandboxes, environment=environment, cache=cache_dir())
        yield grader.grade_validated, settings.jobs
    finally:
        await sandboxes.aclose()


def _with_timeout(task: Task, seconds: float | None) -> Task:
    if seconds is None:
        return task
    return msgspec.structs.replace(task, checks=msgspec.structs.replace(task.checks, timeout_s=seconds))


async def _load(settings: GradeSettings) -> LoadedTasks:
    """Return the requested tasks. Raises ConfigError for an id that none of them has."""
    task, sandbox = settings.task, settings.sandbox
    # Without a choice the sandboxes are only used for task folders. Whether they work here is checked once they
    # are needed.
    sandboxes = load_sandboxes(sandbox, _options(sandbox)) if sandbox else plugins.load("sandboxes", LOCAL)()
    try:
        loaded = await load_tasks(
            task.tasks, sandboxes=sandboxes, cache=cache_dir(), images=task.images, instance_ids=task.ids
        )
    finally:
        await sandboxes.aclose()
    if loaded.unknown:
        raise ConfigError(f"{unknown_task(loaded.unknown[0], task)}; correct the id, or leave it out")
    return loaded


def _options(sandbox: str) -> dict[str, Any]:
    """Return the options of the sandboxes. Those that fetch images report it on stderr."""

    def report(text: str) -> None:
        typer.echo(text, err=True)

    return {"progress": report} if sandbox == DOCKER else {}


def _grade_officially(
    settings: GradeSettings, predictions: Predictions, tasks: Sequence[Task], as_json: bool
) -> None:
    """Grade with SWE-bench's own harness. Exits with 1 if a prediction could not be graded."""
    try:
        grading = run_official(
            predictions,
            tasks,
            output=settings.output_dir,
            run_id=settings.name,
            jobs=settings.jobs,
            timeout_s=settings.timeout,
        )
    except KeyboardInterrupt:
        raise interrupted() from None
    if as_json:
        figures = {"summary": str(grading.path), "rows": predictions.rejected.messages, "errors": grading.skipped}
        print_json({**grading.summary, **figures})
    else:
        counted = {name: grading.summary.get(f"{name}_instances") for name in ("resolved", "unresolved", "error")}
        typer.echo(", ".join(f"{count} {name}" for name, count in counted.items()) + ", says SWE-bench's harness")
        for id, reason in list(grading.skipped.items())[:_MAX_SHOWN_ROWS]:
            typer.echo(visible(f"error: {id}: {reason}"), err=True)
        for message in predictions.rejected.messages:
            typer.echo(visible(f"error: {message}"), err=True)
        typer.echo(f"summary: {grading.path}")
    if grading.skipped or predictions.rejected.count or grading.summary.get("error_instances"):
        raise typer.Exit(1)


def _grade(
    settings: GradeSettings, predictions: Predictions, loaded: LoadedTasks, tasks: Sequence[Task]
) -> tuple[GradingProgress, Path]:
    """Grade all predictions. The first Ctrl-C or SIGTERM lets running ones finish, the second stops at once."""
    stop = asyncio.Event()
    output, name = settings.output_dir, settings.name

    def drain() -> bool:
        if stop.is_set():
            return False
        typer.echo("finishing what runs; Ctrl-C again stops at once", err=True)
        stop.set()
        return True

    lock = locked(
        output / LOGS / name / ".lock",
        busy=f"another process grades run {name!r} in {output}; give another --run-id",
        remedy="give an --output-dir that you can write",
    )
    with lock:
        return run_stoppable(_grade_until(stop, settings, predictions, loaded, tasks), drain)


async def _grade_until(
    stop: asyncio.Event,
    settings: GradeSettings,
    predictions: Predictions,
    loaded: LoadedTasks,
    tasks: Sequence[Task],
) -> tuple[GradingProgress, Path]:
    output, refused_rows = (
        settings.output_dir,
        {row.instance_id: f"{row.where}: {row.reason}" for row in loaded.refused},
    )
    kind = settings.sandbox or sandbox_for(tasks)
    cache, sandboxes = cache_dir(), load_sandboxes(kind, _options(kind))
    try:
        environment = await asyncio.to_thread(environment_for, sandboxes, cache)
        refused = dict(refused_rows)
        if settings.validate:
            validated = await validate_tasks(
                [task for task in tasks if task.instance_id in predictions.rows],
                cache=cache,
                sandboxes=sandboxes,
                environment=environment,
                concurrency=settings.jobs,
                progress=counter("{} of {} tasks validated"),
            )
            refused |= validated.refused
        grader = PatchGrader(
            sandboxes=sandboxes, environment=environment, cache=cache, validate_failures=settings.validate is None
        )
        setup = GradingSetup(
            tasks={task.instance_id: task for task in tasks},
            output=output,
            run_id=settings.name,
            grader=grader,
            refused=refused,
        )
        await asyncio.to_thread(write_metadata, output, settings.name, ", ".join(settings.task.tasks))
        if settings.engine == "ray":
            async with ray_graders(
                settings.ray, kind, validate_failures=grader.validate_failures, report=_warn
            ) as graders:
                setup = dataclasses.replace(setup, prepare_remotely=graders.prepare)
                grading = await grade_all(
                    setup, predictions, concurrency=graders.capacity, stop=stop, report_progress=_GradeProgress()
                )
        else:
            grading = await grade_all(
                setup, predictions, concurrency=settings.jobs, stop=stop, report_progress=_GradeProgress()
            )
    finally:
        await sandboxes.aclose()
    first = next(iter(predictions.rows.values()), None)
    path = await asyncio.to_thread(
        write_summary,
        output,
        settings.name,
        first.model if first else UNNAMED_MODEL,
        grading.outcomes,
        sorted({*setup.tasks, *refused_rows} - {""}),
        images=() if sandboxes.host_programs else {task.image for task in tasks if task.image},
    )
    return grading, path


def _warn(text: str) -> None:
    typer.echo(f"understudy: {text}", err=True)


class _GradeProgress:
    """Shows the progress of grading on stderr."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._line = ProgressLine()

    def __call__(self, grading: GradingProgress) -> None:
        graded, statuses = len(grading.outcomes), Counter(outcome.status for outcome in grading.outcomes.values())
        line = f"{graded}/{grading.total} graded · {statuses['resolved']} resolved · {statuses['error']} errors"
        if fresh := graded - grading.reused:
            line += f" · {time_left((time.monotonic() - self._started) / fresh * (grading.total - graded))}"
        self._line.show(line)
        if graded == grading.total:
            self._line.end()


def _summary_of(grading: GradingProgress, predictions: Predictions, path: Path) -> dict[str, Any]:
    counts = Counter[str](outcome.status for outcome in grading.outcomes.values())
    return {
        "predictions": grading.total,
        **{status: counts[status] for status in ("resolved", "unresolved", "empty", "error")},
        "refused_rows": predictions.rejected.count,
        "not_graded": grading.total - len(grading.outcomes),
        "found": grading.reused,
        "summary": str(path),
        "suspicious": sorted(id for id, outcome in grading.outcomes.items() if outcome.suspicious),
        "errors": {id: outcome.reason for id, outcome in grading.outcomes.items() if outcome.status == "error"},
        "rows": predictions.rejected.messages,
    }


def _print_summary(grading: GradingProgress, predictions: Predictions, path: Path, as_json: bool) -> None:
    figures = _summary_of(grading, predictions, path)
    if as_json:
        print_json(figures)
        return
    before = f" ({figures['found']} graded before)" if figures["found"] else ""
    typer.echo(
        f"{figures['resolved']} resolved, {figures['unresolved']} unresolved, {figures['empty']} empty, "
        f"{figures['error']} errors of {figures['predictions']} predictions{before}"
    )
    if suspicious := figures["suspicious"]:
        typer.echo(visible(f"suspicious, see verdict.json: {', '.join(suspicious[:_MAX_SHOWN_ROWS])}"))
    for id, reason in list(figures["errors"].items())[:_MAX_SHOWN_ROWS]:
        typer.echo(visible(f"error: {id}: {reason}"), err=True)
    for message in figures["rows"]:
        typer.echo(visible(f"error: {message}"), err=True)
    if figures["refused_rows"] > len(figures["rows"]):
        typer.echo(f"error: {figures['refused_rows']} rows are invalid predictions", err=True)
    if figures["not_graded"]:
        typer.echo("Stopped early; run the same command again to continue.", err=True)
    typer.echo(f"summary: {path}")
