"""From what a person names to tasks: files of records or rows, a dataset's name, task folders, the smoke set."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path

from msgspec import Struct

from understudy.errors import TaskError
from understudy.sandbox.base import Sandboxes
from understudy.tasks.datasets import formats, rows
from understudy.tasks.datasets.images import ImageChoice
from understudy.tasks.environment import environment_for
from understudy.tasks.records import LoadedTasks, RefusedRow
from understudy.tasks.sources import folder
from understudy.types import Task

SMOKE = "smoke"
"""The name of the instances that come with Understudy."""

_EXPECTED = (
    "a file of task records or dataset rows (.jsonl, .json, .parquet), a directory of Parquet files, a task "
    f"folder (with instruction.md), a directory of task folders, a dataset of the hub as ORG/NAME, or {SMOKE!r}"
)
_FILES = (".jsonl", ".json", ".parquet", ".ndjson", ".csv", ".toml", ".txt")


class _LoadRequest(Struct, frozen=True):
    path: Path
    split: str
    sandboxes: Sandboxes
    cache: Path
    images: ImageChoice
    wanted: frozenset[str] | None


async def load_source(
    spec: str,
    *,
    sandboxes: Sandboxes,
    cache: Path,
    images: ImageChoice = ImageChoice(),  # noqa: B008
    instance_ids: Collection[str] | None = None,
) -> LoadedTasks:
    """The tasks that `spec` names, each id once, and the rows of datasets that cannot be tasks.

    With `instance_ids` those only, else at least one task. Folders may build their tree in a sandbox, hence
    `sandboxes`. Raises TaskError with file and reason, ConfigError when a dataset cannot be had.
    """
    wanted = None if instance_ids is None else frozenset(instance_ids)
    found = await asyncio.to_thread(_locate, spec)
    if isinstance(found, rows.HubName):
        return await asyncio.to_thread(
            lambda: formats.load(rows.hub_rows(found), source=spec, base=Path(), choice=images, wanted=wanted)
        )
    path, split = found
    place = _LoadRequest(path, split, sandboxes, cache, images, wanted)
    for is_kind, read_it in _KINDS:
        if is_kind(path):
            return await read_it(place)
    raise TaskError(f"{spec}: is none of these; expected {_EXPECTED}")


def _locate(spec: str) -> tuple[Path, str] | rows.HubName:
    """The path and the split that a spec means, or the dataset of the hub. What is on disk comes first."""
    path = Path(spec)
    if path.exists():
        return path, ""
    if spec == SMOKE:
        return smoke_file(), ""
    place, _, split = spec.rpartition(":")
    if place and Path(place).is_dir():
        return Path(place), split
    name = rows.parse_hub_name(spec)
    if name is None or path.suffix in _FILES or path.parent.exists():
        raise TaskError(f"{spec}: does not exist; expected {_EXPECTED}")
    return name


async def load_tasks(
    specs: Iterable[str],
    *,
    sandboxes: Sandboxes,
    cache: Path,
    images: ImageChoice = ImageChoice(),  # noqa: B008
    instance_ids: Collection[str] | None = None,
) -> LoadedTasks:
    """The tasks of several specs, in order; `unknown` are the `instance_ids` that none of them has.

    Raises TaskError, also when two of them have a task of the same id, and ConfigError.
    """
    origins: dict[str, str] = {}
    tasks: list[Task] = []
    refused: list[RefusedRow] = []
    for spec in specs:
        found = await load_source(spec, sandboxes=sandboxes, cache=cache, images=images, instance_ids=instance_ids)
        refused += found.refused
        for task in found.tasks:
            if other := origins.get(task.instance_id):
                raise TaskError(f"task {task.instance_id} is in {other} and in {spec}; give it once")
            origins[task.instance_id] = spec
            tasks.append(task)
    known = {*origins, *(refusal.instance_id for refusal in refused)}
    unknown = tuple(id for id in dict.fromkeys(instance_ids or ()) if id not in known)
    return LoadedTasks(tasks, tuple(refused), unknown)


def smoke_file() -> Path:
    """The file of rows that comes with Understudy."""
    return Path(__file__).parents[1] / "data" / "smoke.jsonl"


async def _rows(place: _LoadRequest) -> LoadedTasks:
    base = place.path.absolute().parent
    return await asyncio.to_thread(
        lambda: formats.load(
            rows.read_rows(place.path, place.split),
            source=str(place.path),
            base=base,
            choice=place.images,
            wanted=place.wanted,
        )
    )


async def _folder(place: _LoadRequest) -> LoadedTasks:
    environment = await asyncio.to_thread(environment_for, place.sandboxes, place.cache)
    task = await folder.load_folder(
        place.path, sandboxes=place.sandboxes, environment=environment, cache=place.cache
    )
    return LoadedTasks([task] if place.wanted is None or task.instance_id in place.wanted else [])


async def _folders(place: _LoadRequest) -> LoadedTasks:
    tasks: dict[str, Task] = {}
    for path in _task_folders(place.path):
        if place.wanted is not None and folder.instance_id(path) not in place.wanted:
            continue
        for task in (
            await _folder(_LoadRequest(path, "", place.sandboxes, place.cache, place.images, None))
        ).tasks:
            if task.instance_id in tasks:
                raise TaskError(
                    f"{path}: its name gives the id {task.instance_id!r}, which another folder has; rename one"
                )
            tasks[task.instance_id] = task
    return LoadedTasks(list(tasks.values()))


def _task_folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if folder.is_task(entry)) if path.is_dir() else []


def _is_dataset(path: Path) -> bool:
    return path.is_dir() and (rows.is_saved(path) or bool(rows.parquet_files(path)))


_KINDS: tuple[tuple[Callable[[Path], bool], Callable[[_LoadRequest], Awaitable[LoadedTasks]]], ...] = (
    (Path.is_file, _rows),
    (folder.is_task, _folder),
    (lambda path: bool(_task_folders(path)), _folders),
    (_is_dataset, _rows),
)
