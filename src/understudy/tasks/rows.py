"""Reads rows of datasets from JSON, Parquet, the hub or what `datasets` saved, and checks their untrusted
values.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError, TaskError

_LINE_BYTES = 64 << 20
_FILE_BYTES = 2 << 30
_BATCH_ROWS = 256
_SPLIT_FILE = re.compile(r"(?P<split>.+?)(?:-[0-9]+-of-[0-9]+(?:-[0-9a-f]+)?)?\.parquet")
_SAVED_DATASET_FILES = ("dataset_dict.json", "dataset_info.json")

LocatedRow = tuple[str, Any]
"""A row's location for messages, and the row: any JSON value."""


def read_rows(path: Path, split: str = "") -> Iterator[LocatedRow]:
    """Yield the rows of a file or directory, of the named split; without a name, of the test split or the only
    one.

    Raises TaskError, naming file and line, for what cannot be read, ConfigError for a missing split or library.
    """
    if path.is_dir():
        if is_saved(path):
            remedy = "save it anew with save_to_disk, or give the path of a JSONL file"
            yield from _rows_by_library(str(path), split, lambda library: library.load_from_disk(path), remedy)
            return
        for file in _files_of_split(path, split):
            yield from _parquet(file)
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix == ".json":
        yield from _list(path)
    else:
        yield from _lines(path)


def is_dataset(path: Path) -> bool:
    """Return whether a directory is a dataset: one that `datasets` saved, or with Parquet files."""
    return is_saved(path) or bool(parquet_files(path))


def is_saved(path: Path) -> bool:
    """Return whether a directory is a dataset that `datasets` saved."""
    return any((path / name).is_file() for name in _SAVED_DATASET_FILES)


def parquet_files(path: Path) -> list[Path]:
    """Return the Parquet files of a directory and of its subdirectories, sorted."""
    return sorted(file for glob in ("*.parquet", "*/*.parquet") for file in path.glob(glob) if file.is_file())


def choose_split(name: str, splits: list[str], requested: str) -> str:
    """Return the requested split, otherwise `test`, otherwise the only one. Raises ConfigError if there
    is none.
    """
    if requested in splits:
        return requested
    if not splits:
        raise ConfigError(
            f"{name}: has no split; expected .parquet files in this directory, such as test.parquet: check the "
            "path"
        )
    if not requested:
        if "test" in splits:
            return "test"
        if len(splits) == 1:
            return splits[0]
    problem = f"has no split {requested!r}" if requested else "has several splits and no test split"
    available = ", ".join(splits)
    raise ConfigError(f"{name}: {problem}; available: {available}; select one as {name}:{splits[0]}")


def _files_of_split(path: Path, requested: str) -> list[Path]:
    by_split: dict[str, list[Path]] = {}
    for file in parquet_files(path):
        match = _SPLIT_FILE.fullmatch(file.name)
        by_split.setdefault(match["split"] if match else file.stem, []).append(file)
    return by_split[choose_split(str(path), sorted(by_split), requested)]


def _lines(path: Path) -> Iterator[LocatedRow]:
    with _readable(path), path.open("rb") as file:
        lines = iter(partial(file.readline, _LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if len(line) > _LINE_BYTES:
                raise TaskError(
                    f"{where}: longer than {_LINE_BYTES >> 20} MiB; expected one JSON object a line: shorten "
                    "the row"
                )
            if line.strip():
                yield where, _decoded(line, where)


@contextmanager
def _readable(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise TaskError(
            f"{path}: cannot be read: {error.strerror}; check the path and its permissions, or give another file "
            "of tasks or rows"
        ) from error


def _decoded(data: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(
            f"{where}: invalid JSON: {error}; expected one object a line, or, in a .json file, a list of objects: "
            "correct it there"
        ) from error


def _list(path: Path) -> Iterator[LocatedRow]:
    with _readable(path):
        if path.stat().st_size > _FILE_BYTES:
            raise TaskError(
                f"{path}: larger than {_FILE_BYTES >> 30} GiB, the maximum for one JSON document; write one "
                "object a line to a .jsonl file, which is read in parts"
            )
        document = _decoded(path.read_bytes(), str(path))
    if not isinstance(document, list):
        raise TaskError(
            f"{path}: expected a list of objects, got {json_type(document)}; put the objects in a list, or one a "
            "line in a .jsonl file"
        )
    for number, row in enumerate(cast("list[Any]", document), start=1):
        yield f"{path}[{number}]", row


def _parquet(path: Path) -> Iterator[LocatedRow]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: pyarrow, which reads Parquet, is missing; install it: pip install 'understudy[hf]'"
        ) from error
    library: Any = parquet
    arrow: Any = pyarrow
    failures: tuple[type[Exception], ...] = (OSError, arrow.ArrowException)
    number = 0
    try:
        with path.open("rb") as stream, library.ParquetFile(stream) as file:
            batches = file.iter_batches(batch_size=_BATCH_ROWS)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield f"{path}: row {number}", row
    except failures as error:
        raise TaskError(
            f"{path}: cannot be read as Parquet after row {number}: {error}; download it again"
        ) from error


_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)"
    r"(?::(?P<split>[A-Za-z0-9][A-Za-z0-9._-]*))?(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?"
)


class HubName(Struct, frozen=True):
    """A dataset on the hub: ORG/NAME, with split and revision if they were given."""

    name: str
    split: str = ""
    revision: str = ""


def parse_hub_name(spec: str) -> HubName | None:
    """Parse a spec of the form ORG/NAME[:SPLIT][@REVISION]; None when it has another form."""
    match = _NAME.fullmatch(spec)
    return HubName(match["name"], match["split"] or "", match["revision"] or "") if match else None


def hub_rows(wanted: HubName) -> Iterator[LocatedRow]:
    """Yield the rows of a dataset. Raises ConfigError when it cannot be loaded."""
    yield from _rows_by_library(
        wanted.name,
        wanted.split,
        lambda library: library.load_dataset(wanted.name, revision=wanted.revision or None),
        "check the name, the network and HF_ENDPOINT, or give the path of a downloaded file",
    )


def _rows_by_library(name: str, split: str, load: Callable[[Any], Any], remedy: str) -> Iterator[LocatedRow]:
    """Yield the rows that `load` gets from the library `datasets`. Raises ConfigError, with the remedy."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{name}: the library datasets is missing; install it: pip install "
            "'understudy[hf]', or give the path of a JSONL file"
        ) from error
    library: Any = datasets
    failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError)
    try:
        dataset = load(library)
    except failures as error:
        message = str(error).strip() or type(error).__name__
        raise ConfigError(f"{name}: the dataset cannot be loaded: {message}; {remedy}") from error
    yield from _rows_of_split(name, dataset, split)


def _rows_of_split(name: str, dataset: Any, split: str) -> Iterator[LocatedRow]:
    if isinstance(dataset, dict):  # a DatasetDict is a dict of splits
        chosen = choose_split(name, sorted(str(key) for key in dataset), split)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        dataset, name = dataset[chosen], f"{name}:{chosen}"  # pyright: ignore[reportUnknownVariableType]
    elif split:
        choose_split(name, [str(dataset.split)], split)
    for number, row in enumerate(dataset, start=1):  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        yield f"{name}: row {number}", row


# --- a row's values ------------------------------------------------------------------------------------

ROW_REMEDY = "correct this key; until then the row is left out"
"""What to do about a row that cannot become a task."""
_TYPE_NAMES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),
    (str, "a string"),
    ((int, float), "a number"),
    (Mapping, "an object"),
    ((list, tuple), "a list"),
)


def json_type(value: object) -> str:
    """Return the type of a JSON value, in words."""
    if value is None:
        return "nothing"
    return next((name for types, name in _TYPE_NAMES if isinstance(value, types)), f"a {type(value).__name__}")


class DatasetRow:
    """One row. Its methods raise TaskError with the key, what was expected and what was found, but not the
    location.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def has(self, key: str) -> bool:
        """Return whether the key has a value; empty strings and lists count as absent."""
        return self.data.get(key) not in (None, "", [], {})

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text that is not blank; `default` if the key is absent or null."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise TaskError(f"{key}: expected a string, got {json_type(value)}; {ROW_REMEDY}")
        if not value.strip() and default is None:
            raise TaskError(f"{key}: is empty; expected a string that is not blank: {ROW_REMEDY}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, which may be encoded as JSON; empty if the key is absent or null."""
        value = self.data.get(key)
        if value is None or value == "":
            return ()
        try:
            if isinstance(value, str):
                value = msgspec.json.decode(value)
            return tuple(msgspec.convert(value, list[str]))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TaskError(
                f"{key}: expected a list of strings, or JSON of one, got {json_type(value)} ({error}); "
                f"{ROW_REMEDY}"
            ) from error

    def lines(self, key: str) -> tuple[str, ...]:
        """Return commands, given as one string or a list of strings; empty if the key is absent or null."""
        value = self.data.get(key)
        return ((value,) if value.strip() else ()) if isinstance(value, str) else self.texts(key)

    def object(self, key: str) -> DatasetRow:
        """Return an object, which may be encoded as JSON; without keys if the key is absent or null."""
        value = self.data.get(key)
        if value is None or value == "":
            return DatasetRow({})
        try:
            if isinstance(value, str):
                value = msgspec.json.decode(value)
            return DatasetRow(msgspec.convert(value, dict[str, Any]))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TaskError(
                f"{key}: expected an object, or JSON of one, got {json_type(value)} ({error}); {ROW_REMEDY}"
            ) from error

    def metadata(self, *keys: str) -> dict[str, Any]:
        """Return the given keys that have a value, converted to JSON types."""
        values = {key: self.data[key] for key in keys if self.has(key)}
        non_json_types = datetime.date | bytes  # types of Parquet that JSON does not have
        return {key: str(value) if isinstance(value, non_json_types) else value for key, value in values.items()}
