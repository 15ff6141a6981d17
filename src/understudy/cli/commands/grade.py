"""`understudy grade`: predictions made elsewhere in, verdicts and the harness's report files out."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy.cli.display.output import print_json
from understudy.cli.selection import DOCKER, LOCAL, instances, kind_for
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.grade.batch import GradingProgress
    from understudy.grade.predictions import Predictions
    from understudy.tasks.datasets.images import ImageChoice
    from understudy.tasks.records import LoadedTasks
    from understudy.types import Task

_PLAIN_S = 10.0
_SHOWN = 20


def grade(
    predictions: Annotated[
        str,
        typer.Argument(help="A .jsonl or .json file of predictions as SWE-bench's harness takes them, or: gold."),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", "--dataset-path", "-t", help="What they answer: a dataset, a file, a folder."),
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(help="local, docker or unsafe-local [default: docker where a task needs its image]."),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(help="Names the reports; the same again goes on [default: understudy, or official]."),
    ] = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Where logs/ and the summary go.")
    ] = Path(),
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Patches at a time [default: CPUs].")
    ] = None,
    instance_ids: Annotated[
        list[str] | None,
        typer.Option(help="Only these instances, with commas between them; repeatable."),
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Where instance images are taken from.")] = None,
    instance_image_tag: Annotated[str | None, typer.Option(help="Their tag.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds the tests of one may take [default: the task's own].")
    ] = None,
    validate: Annotated[
        bool | None,
        typer.Option(
            "--validate/--no-validate",
            help="Hold tasks to it that the gold patch passes and none fails: all of them first, or none "
            "[default: those whose tests fail].",
        ),
    ] = None,
    official: Annotated[
        bool, typer.Option("--official", help="Let the swebench package judge, on its own containers.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Grade predictions, several at once, and write the report files of SWE-bench's harness.

    The same command again grades what has no report yet, or another patch now. Ctrl-C lets the running ones
    finish; a second one stops at once. Exits with 1 when a prediction could not be graded.
    """
    from understudy.cli.exit_codes import EXIT_INTERRUPTED
    from understudy.grade.predictions import open_predictions
    from understudy.grade.reports import name_part
    from understudy.tasks.datasets.images import ImageChoice

    if not tasks:
        raise ConfigError("say which tasks the predictions answer, with --tasks or --dataset-path")
    name = run_id or ("official" if official else "understudy")
    name_part(name)
    images = ImageChoice(namespace=namespace, instance_image_tag=instance_image_tag)
    wanted = instances(instance_ids)
    loaded = asyncio.run(_load(sandbox, tasks, images, wanted))
    known = [_with_timeout(task, timeout) for task in loaded.tasks]
    given = open_predictions(predictions, known, wanted)
    output, at_a_time = output_dir.absolute(), jobs or os.cpu_count() or 1
    if official:
        _official(given, known, output, name, at_a_time, timeout, json_)
        return
    work = _Work(given, loaded, known, sandbox or kind_for(known), output, name, ", ".join(tasks))
    standing, path = work.carry_out(at_a_time, validate)
    _tell(standing, given, path, json_)
    if len(standing.outcomes) < standing.total:
        raise typer.Exit(EXIT_INTERRUPTED)
    if given.rejected.count or any(outcome.status == "error" for outcome in standing.outcomes.values()):
        raise typer.Exit(1)


def _with_timeout(task: Task, seconds: float | None) -> Task:
    import msgspec

    if seconds is None:
        return task
    return msgspec.structs.replace(task, checks=msgspec.structs.replace(task.checks, timeout_s=seconds))


async def _load(
    sandbox: str | None, specs: Sequence[str], images: ImageChoice, instance_ids: Sequence[str] | None
) -> LoadedTasks:
    """The tasks that are asked for. Raises ConfigError for an id that is none of theirs."""
    from understudy import plugins
    from understudy.config import cache_dir
    from understudy.sandbox.base import load_sandboxes
    from understudy.tasks.load import load_tasks

    # Without a choice it is for task folders only; whether it works here is asked when it is known to be used.
    sandboxes = load_sandboxes(sandbox, _options(sandbox)) if sandbox else plugins.load("sandboxes", LOCAL)()
    try:
        loaded = await load_tasks(
            specs, sandboxes=sandboxes, cache=cache_dir(), images=images, instance_ids=instance_ids
        )
    finally:
        await sandboxes.aclose()
    if loaded.unknown:
        raise ConfigError(f"--instance-ids: there is no task {loaded.unknown[0]!r} in {', '.join(specs)}")
    return loaded


def _options(sandbox: str) -> dict[str, Any]:
    """What the sandboxes are told: those that fetch images say so."""

    def told(said: str) -> None:
        typer.echo(said, err=True)

    return {"progress": told} if sandbox == DOCKER else {}


def _official(
    given: Predictions,
    tasks: Sequence[Task],
    output: Path,
    run_id: str,
    jobs: int,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Have SWE-bench's harness do it. Exits with 1 when a prediction could not be graded."""

    from understudy.cli.interrupts import interrupted
    from understudy.grade.official import run_official
    from understudy.util.text import visible

    try:
        done = run_official(given, tasks, output=output, run_id=run_id, jobs=jobs, timeout_s=timeout_s)
    except KeyboardInterrupt:
        raise interrupted() from None
    if as_json:
        figures = {"summary": str(done.path), "rows": given.rejected.messages, "errors": done.skipped}
        print_json({**done.summary, **figures})
    else:
        counted = {name: done.summary.get(f"{name}_instances") for name in ("resolved", "unresolved", "error")}
        typer.echo(", ".join(f"{count} {name}" for name, count in counted.items()) + ", says SWE-bench's harness")
        for id, reason in list(done.skipped.items())[:_SHOWN]:
            typer.echo(visible(f"error: {id}: {reason}"), err=True)
        for message in given.rejected.messages:
            typer.echo(visible(f"error: {message}"), err=True)
        typer.echo(f"summary: {done.path}")
    if done.skipped or given.rejected.count or done.summary.get("error_instances"):
        raise typer.Exit(1)


class _Work:
    """Grading from its start to its summary."""

    def __init__(
        self,
        given: Predictions,
        loaded: LoadedTasks,
        tasks: Sequence[Task],
        sandbox: str,
        output: Path,
        run_id: str,
        dataset: str,
    ) -> None:
        self._given = given
        self._refused = {row.instance_id: f"{row.where}: {row.reason}" for row in loaded.refused}
        self._tasks = tasks
        self._sandbox = sandbox
        self._output = output
        self._run_id = run_id
        self._dataset = dataset

    def carry_out(self, jobs: int, validate: bool | None) -> tuple[GradingProgress, Path]:
        """Grade all; the first Ctrl-C or SIGTERM lets what runs finish, the second stops at once."""
        from understudy.cli.interrupts import run_stoppable
        from understudy.grade.reports import LOGS
        from understudy.util.locks import locked

        stop = asyncio.Event()

        def drain() -> bool:
            if stop.is_set():
                return False
            typer.echo("finishing what runs; Ctrl-C again stops at once", err=True)
            stop.set()
            return True

        lock = locked(
            self._output / LOGS / self._run_id / ".lock",
            busy=f"another process grades run {self._run_id!r} in {self._output}; give another --run-id",
            remedy="give an --output-dir that you can write",
        )
        with lock:
            return run_stoppable(self._grade(jobs, validate, stop), drain)

    async def _grade(self, jobs: int, validate: bool | None, stop: asyncio.Event) -> tuple[GradingProgress, Path]:
        from understudy.config import cache_dir
        from understudy.grade.batch import GradingSetup, grade_all
        from understudy.grade.reports import NO_MODEL, write_metadata, write_summary
        from understudy.sandbox.base import load_sandboxes
        from understudy.tasks.environment import environment_for

        cache, sandboxes = cache_dir(), load_sandboxes(self._sandbox, _options(self._sandbox))
        try:
            environment = await asyncio.to_thread(environment_for, sandboxes, cache)
            refused = dict(self._refused)
            if validate:
                from understudy.run.validation import validate_tasks

                asked = [task for task in self._tasks if task.instance_id in self._given.rows]
                intake = await validate_tasks(
                    asked, cache=cache, sandboxes=sandboxes, environment=environment, concurrency=jobs
                )
                refused |= intake.refused
            bench = GradingSetup(
                tasks={task.instance_id: task for task in self._tasks},
                output=self._output,
                run_id=self._run_id,
                sandboxes=sandboxes,
                environment=environment,
                cache=cache,
                refused=refused,
                doubt=validate is None,
            )
            await asyncio.to_thread(write_metadata, self._output, self._run_id, self._dataset)
            standing = await grade_all(bench, self._given, concurrency=jobs, stop=stop, progress=_Progress())
        finally:
            await sandboxes.aclose()
        first = next(iter(self._given.rows.values()), None)
        used = () if sandboxes.host_programs else {task.image for task in self._tasks if task.image}
        path = await asyncio.to_thread(
            write_summary,
            self._output,
            self._run_id,
            first.model if first else NO_MODEL,
            standing.outcomes,
            sorted({*bench.tasks, *self._refused} - {""}),
            images=used,
        )
        return standing, path


class _Progress:
    """One line on stderr: drawn again on a terminal, now and then elsewhere."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()

    def __call__(self, standing: GradingProgress) -> None:
        done, now = len(standing.outcomes), time.monotonic()
        terminal = sys.stderr.isatty()
        if not terminal and now - self._told < _PLAIN_S:
            return
        self._told = now
        resolved = sum(outcome.status == "resolved" for outcome in standing.outcomes.values())
        errors = sum(outcome.status == "error" for outcome in standing.outcomes.values())
        fresh = done - standing.reused
        left = (now - self._began) / fresh * (standing.total - done) if fresh else 0.0
        line = f"{done}/{standing.total} graded · {resolved} resolved · {errors} errors"
        line += f" · {left:.0f} s left" if left else ""
        typer.echo(f"\r\x1b[K{line}" if terminal else line, err=True, nl=not terminal or done == standing.total)


def _figures(standing: GradingProgress, given: Predictions, path: Path) -> dict[str, Any]:
    from collections import Counter

    counts = Counter[str](outcome.status for outcome in standing.outcomes.values())
    return {
        "predictions": standing.total,
        **{status: counts[status] for status in ("resolved", "unresolved", "empty", "error")},
        "refused_rows": given.rejected.count,
        "not_graded": standing.total - len(standing.outcomes),
        "found": standing.reused,
        "summary": str(path),
        "suspicious": sorted(id for id, outcome in standing.outcomes.items() if outcome.suspicious),
        "errors": {id: outcome.reason for id, outcome in standing.outcomes.items() if outcome.status == "error"},
        "rows": given.rejected.messages,
    }


def _tell(standing: GradingProgress, given: Predictions, path: Path, as_json: bool) -> None:
    figures = _figures(standing, given, path)
    if as_json:
        print_json(figures)
        return
    from understudy.util.text import visible

    known = f" ({figures['found']} graded before)" if figures["found"] else ""
    typer.echo(
        f"{figures['resolved']} resolved, {figures['unresolved']} unresolved, {figures['empty']} empty, "
        f"{figures['error']} errors of {figures['predictions']} predictions{known}"
    )
    if suspicious := figures["suspicious"]:
        typer.echo(visible(f"suspicious, see verdict.json: {', '.join(suspicious[:_SHOWN])}"))
    for id, reason in list(figures["errors"].items())[:_SHOWN]:
        typer.echo(visible(f"error: {id}: {reason}"), err=True)
    for message in figures["rows"]:
        typer.echo(visible(f"error: {message}"), err=True)
    if figures["refused_rows"] > len(figures["rows"]):
        typer.echo(f"error: {figures['refused_rows']} rows are no predictions", err=True)
    if figures["not_graded"]:
        typer.echo("Stopped early; give the same command again to continue.", err=True)
    typer.echo(f"summary: {path}")
