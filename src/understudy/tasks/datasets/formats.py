"""Formats of dataset rows: each row's format is recognised by its keys, and the row becomes a task.

To add a format, add a `TaskRowFormat` to FORMATS."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from understudy.errors import TaskError
from understudy.tasks import records
from understudy.tasks.datasets import live, multi, rebench, swebench, swesmith
from understudy.tasks.datasets.images import ImageChoice
from understudy.tasks.datasets.row import DatasetRow, json_type
from understudy.tasks.records import LoadedTasks, RefusedRow, summarise_refusals
from understudy.types import Task


class TaskRowFormat(Struct, frozen=True):
    """The keys that identify a format, and how its rows become tasks. `task` raises TaskError without location."""

    name: str
    keys: tuple[str, ...]
    task: Callable[[DatasetRow, ImageChoice], Task]


def _unsupported(what: str) -> Callable[[DatasetRow, ImageChoice], Task]:
    def refuse(row: DatasetRow, choice: ImageChoice) -> Task:
        raise TaskError(what)

    return refuse


FORMATS: tuple[TaskRowFormat, ...] = (
    TaskRowFormat(
        "R2E-Gym",
        ("expected_output_json",),
        _unsupported("R2E-Gym rows are not supported: their tests and how they are read are inside its images"),
    ),
    TaskRowFormat(
        "SWE-bench Pro",
        ("before_repo_set_cmd", "selected_test_files_to_run"),
        _unsupported(
            "SWE-bench Pro rows are not supported: the scripts that run and read its tests are not in them"
        ),
    ),
    TaskRowFormat("Multi-SWE-bench", ("org", "number", "fix_patch"), multi.task),
    TaskRowFormat("SWE-rebench", ("install_config", "test_patch"), rebench.task),
    TaskRowFormat("SWE-bench-Live", ("test_cmds", "log_parser"), live.task),
    TaskRowFormat("SWE-bench", ("base_commit", "test_patch"), swebench.task),
    TaskRowFormat("SWE-smith", ("image_name", "patch", "FAIL_TO_PASS"), swesmith.task),
)
"""The first whose keys a row has is its format."""

_OURS = ("instruction", "checks", "gold_patch")


def task_of(data: dict[str, Any], choice: ImageChoice = ImageChoice()) -> Task:  # noqa: B008
    """The task of a row in any of the formats. Raises TaskError without the row's place."""
    for format in FORMATS:
        if all(key in data for key in format.keys):
            task = format.task(DatasetRow(data), choice)
            records.check(task, format.name)
            return task
    expected = "; ".join(f"{format.name}: {', '.join(format.keys)}" for format in FORMATS)
    raise TaskError(
        f"has an unsupported format; expected the keys of one of these ({expected}; or a task record's)"
    )


def load_rows(
    rows: Iterable[tuple[str, Any]],
    *,
    source: str,
    base: Path,
    choice: ImageChoice,
    wanted: Collection[str] | None = None,
) -> LoadedTasks:
    """The tasks of rows, each with its place; with `wanted` those of these ids only.

    Our own records raise TaskError for whatever is wrong, with directories taken from `base`. Rows of others are
    refused one by one; TaskError is raised when none of them is left, or for what is not an object at all.
    """
    tasks: dict[str, Task] = {}
    refused: list[RefusedRow] = []
    empty = True
    for where, data in rows:
        empty = False
        if not isinstance(data, dict):
            raise TaskError(f"{where}: not a task record: Expected `object`, got {json_type(data)}")
        row: dict[str, Any] = data  # pyright: ignore[reportUnknownVariableType]
        instance_id = row.get("instance_id")
        name = instance_id if isinstance(instance_id, str) else ""
        if wanted is not None and name and name not in wanted:
            continue
        if any(key in row for key in _OURS):
            task = records.record(row, where, base)
            if task.instance_id in tasks:
                raise TaskError(
                    f"{where}: instance_id: {task.instance_id!r} is duplicate; give each task an id of its own"
                )
        else:
            try:
                task = task_of(row, choice)
                if task.instance_id in tasks:
                    raise TaskError("instance_id: is duplicate; the first row is used")
            except TaskError as error:
                refused.append(RefusedRow(name[:150], where, str(error)))
                continue
        if wanted is None or task.instance_id in wanted:
            tasks[task.instance_id] = task
    if empty:
        raise TaskError(f"{source}: no task found; expected one JSON object a line")
    if not tasks and refused:
        raise TaskError("\n".join([f"{source}: none of its rows can become a task", *summarise_refusals(refused)]))
    return LoadedTasks(list(tasks.values()), tuple(refused))
