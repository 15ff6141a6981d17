"""Loads the tasks that a user names: files of records or rows, datasets, task folders, the smoke set."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

from understudy.errors import TaskError
from understudy.sandbox.base import Sandboxes
from understudy.tasks import folder, rows
from understudy.tasks.environment import environment_for
from understudy.tasks.recipes import ImageChoice
from understudy.tasks.records import LoadedTasks, RefusedRow
from understudy.tasks.row_formats import load_rows
from understudy.types import Task

SMOKE = "smoke"
"""The name of the instances that come with Understudy."""

_EXPECTED = (
    "a file of task records or dataset rows (.jsonl, .json, .parquet), a directory of Parquet files, a task "
    f"folder (with instruction.md), a directory of task folders, a dataset of the hub as ORG/NAME, or {SMOKE!r}"
)
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".ndjson", ".csv", ".toml", ".txt")


async def load_source(
    spec: str,
    *,
    sandboxes: Sandboxes,
    cache: Path,
    images: ImageChoice = ImageChoice(),  # noqa: B008
    instance_ids: Collection[str] | None = None,
) -> LoadedTasks:
    """Return the tasks that `spec` names, each id once, and the dataset rows that cannot become tasks.

    With `instance_ids` only tasks with these ids are returned, otherwise at least one task. Loading a folder may
    build its tree in one of `sandboxes`. Raises TaskError with file and reason, ConfigError when a dataset cannot
    be loaded.
    """
    wanted = None if instance_ids is None else frozenset(instance_ids)
    located = await asyncio.to_thread(_locate, spec)
    if isinstance(located, rows.HubName):
        read = partial(load_rows, rows.hub_rows(located), source=spec, base=Path(), choice=images, wanted=wanted)
        return await asyncio.to_thread(read)
    path, split = located
    folders = await asyncio.to_thread(_task_folders, path.absolute())
    if folders:
        return LoadedTasks(await _load_folders(folders, sandboxes, cache, wanted))
    if path.is_file() or rows.is_dataset(path):
        return await asyncio.to_thread(load_file, path, split, images, wanted)
    raise TaskError(f"{spec}: unsupported kind of file or directory; give {_EXPECTED}")


def load_file(
    path: Path,
    split: str = "",
    images: ImageChoice = ImageChoice(),  # noqa: B008
    wanted: Collection[str] | None = None,
) -> LoadedTasks:
    """Return the tasks of a file of records or rows, or of a directory that is a dataset; only the `wanted` ids if
    given.

    Raises TaskError with file, line and key, ConfigError for a split that is missing.
    """
    located_rows, base = rows.read_rows(path, split), path.absolute().parent
    return load_rows(located_rows, source=str(path), base=base, choice=images, wanted=wanted)


def _locate(spec: str) -> tuple[Path, str] | rows.HubName:
    """Return the path and split that a spec means, or a dataset of the hub. An existing path takes precedence."""
    path = Path(spec)
    if path.exists():
        return path, ""
    if spec == SMOKE:
        return smoke_file(), ""
    directory, _, split = spec.rpartition(":")
    if directory and Path(directory).is_dir():
        return Path(directory), split
    name = rows.parse_hub_name(spec)
    if name is None or path.suffix in _FILE_SUFFIXES or path.parent.exists():
        raise TaskError(f"{spec}: does not exist; give {_EXPECTED}")
    return name


async def load_tasks(
    specs: Iterable[str],
    *,
    sandboxes: Sandboxes,
    cache: Path,
    images: ImageChoice = ImageChoice(),  # noqa: B008
    instance_ids: Collection[str] | None = None,
) -> LoadedTasks:
    """Return the tasks of several specs, in order; `unknown` are the `instance_ids` that none of them has.

    Raises TaskError, also when two specs have a task with the same id, and ConfigError.
    """
    origins: dict[str, str] = {}
    tasks: list[Task] = []
    refused: list[RefusedRow] = []
    for spec in specs:
        loaded = await load_source(
            spec, sandboxes=sandboxes, cache=cache, images=images, instance_ids=instance_ids
        )
        refused += loaded.refused
        for task in loaded.tasks:
            if first_source := origins.get(task.instance_id):
                raise TaskError(
                    f"duplicate instance_id {task.instance_id}: {first_source} and {spec} both have it; give each "
                    "task an instance_id of its own (a folder's name), or give only one of these sources"
                )
            origins[task.instance_id] = spec
            tasks.append(task)
    existing = {*origins, *(refusal.instance_id for refusal in refused)}
    unknown = tuple(id for id in dict.fromkeys(instance_ids or ()) if id not in existing)
    return LoadedTasks(tasks, tuple(refused), unknown)


def smoke_file() -> Path:
    """Return the path of the rows that come with Understudy."""
    return Path(__file__).parents[1] / "data" / "smoke.jsonl"


def _task_folders(path: Path) -> list[Path]:
    """Return the directory itself if it is a task, otherwise the task directories in it."""
    if folder.is_task(path):
        return [path]
    return sorted(entry for entry in path.iterdir() if folder.is_task(entry)) if path.is_dir() else []


async def _load_folders(
    paths: Sequence[Path], sandboxes: Sandboxes, cache: Path, wanted: Collection[str] | None
) -> list[Task]:
    environment = await asyncio.to_thread(environment_for, sandboxes, cache)
    tasks: dict[str, Task] = {}
    loaded_from: dict[str, Path] = {}
    for path in paths:
        id = folder.instance_id(path)
        if wanted is not None and id not in wanted:
            continue
        if id in tasks:
            raise TaskError(
                f"{path}: its name gives the id {id!r}, which {loaded_from[id]} has too; rename one of the two"
            )
        loaded_from[id] = path
        tasks[id] = await folder.load_folder(path, sandboxes=sandboxes, environment=environment, cache=cache)
    return list(tasks.values())
