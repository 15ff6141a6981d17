"""Load tasks from what a user names: files of records or rows, datasets, task folders, the smoke set."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path

from msgspec import Struct

from understudy.errors import TaskError
from understudy.sandbox.base import Sandboxes
from understudy.tasks import folder, row_formats, rows
from understudy.tasks.environment import environment_for
from understudy.tasks.recipes import ImageChoice
from understudy.tasks.records import LoadedTasks, RefusedRow
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
    located = await asyncio.to_thread(_locate, spec)
    if isinstance(located, rows.HubName):
        return await asyncio.to_thread(
            lambda: row_formats.load_rows(
                rows.hub_rows(located), source=spec, base=Path(), choice=images, wanted=wanted
            )
        )
    path, split = located
    request = _LoadRequest(path, split, sandboxes, cache, images, wanted)
    for is_kind, read_it in _KINDS:
        if is_kind(path):
            return await read_it(request)
    raise TaskError(f"{spec}: is unsupported; expected {_EXPECTED}")


def _locate(spec: str) -> tuple[Path, str] | rows.HubName:
    """The path and the split that a spec means, or the dataset of the hub. What is on disk comes first."""
    path = Path(spec)
    if path.exists():
        return path, ""
    if spec == SMOKE:
        return smoke_file(), ""
    directory, _, split = spec.rpartition(":")
    if directory and Path(directory).is_dir():
        return Path(directory), split
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
        loaded = await load_source(
            spec, sandboxes=sandboxes, cache=cache, images=images, instance_ids=instance_ids
        )
        refused += loaded.refused
        for task in loaded.tasks:
            if other := origins.get(task.instance_id):
                raise TaskError(
                    f"task {task.instance_id} is in {other} and in {spec}; name it in one of them only"
                )
            origins[task.instance_id] = spec
            tasks.append(task)
    existing = {*origins, *(refusal.instance_id for refusal in refused)}
    unknown = tuple(id for id in dict.fromkeys(instance_ids or ()) if id not in existing)
    return LoadedTasks(tasks, tuple(refused), unknown)


def smoke_file() -> Path:
    """The file of rows that comes with Understudy."""
    return Path(__file__).parents[1] / "data" / "smoke.jsonl"


async def _rows(request: _LoadRequest) -> LoadedTasks:
    base = request.path.absolute().parent
    return await asyncio.to_thread(
        lambda: row_formats.load_rows(
            rows.read_rows(request.path, request.split),
            source=str(request.path),
            base=base,
            choice=request.images,
            wanted=request.wanted,
        )
    )


async def _folder(request: _LoadRequest) -> LoadedTasks:
    environment = await asyncio.to_thread(environment_for, request.sandboxes, request.cache)
    task = await folder.load_folder(
        request.path, sandboxes=request.sandboxes, environment=environment, cache=request.cache
    )
    return LoadedTasks([task] if request.wanted is None or task.instance_id in request.wanted else [])


async def _folders(request: _LoadRequest) -> LoadedTasks:
    tasks: dict[str, Task] = {}
    for path in _task_folders(request.path):
        if request.wanted is not None and folder.instance_id(path) not in request.wanted:
            continue
        for task in (
            await _folder(_LoadRequest(path, "", request.sandboxes, request.cache, request.images, None))
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
