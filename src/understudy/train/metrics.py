"""The numbers of every step: a line of JSON each, and whatever tracker is at hand."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import msgspec

from understudy.errors import ConfigError
from understudy.model.directory import require_packages

FILE = "metrics.jsonl"
TRACKERS = ("tensorboard", "wandb", "mlflow")
_WANTED_BY = {"wandb": ("WANDB_API_KEY", "WANDB_MODE"), "mlflow": ("MLFLOW_TRACKING_URI",)}


def parse_trackers(choice: str) -> tuple[str, ...]:
    """The trackers that `--track` names: "auto", "none", or names with commas between them.

    auto: TensorBoard where it is installed; Weights & Biases and MLflow where they are installed and the
    environment names what they report to. Raises ConfigError for a name that is none, or is not installed.
    """
    if choice == "none":
        return ()
    if choice == "auto":
        return tuple(name for name in TRACKERS if find_spec(name) is not None and _is_recorded(name))
    names = tuple(name.strip() for name in choice.split(",") if name.strip())
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"--track: {name!r} is not supported; expected auto, none, or some of {', '.join(TRACKERS)}"
            )
        if find_spec(name) is None:
            raise ConfigError(f"--track: {name} is not installed; install it: pip install {name}")
    return names


def _is_recorded(name: str) -> bool:
    return any(os.environ.get(variable) for variable in _WANTED_BY.get(name, ())) or name not in _WANTED_BY


class Trackers:
    """The trackers of these names, through accelerate; they write below a directory. To be used as a context."""

    def __init__(self, directory: Path, names: Iterable[str], title: str) -> None:
        self._directory = directory
        self._names = tuple(names)
        self._title = title
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        if self._names:
            require_packages("accelerate")
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            # Not by an Accelerator: a process's first settles device and precision, and that is the trainer's.
            for name in self._names:
                kind: Any = LOGGER_TYPE_TO_CLASS[name]
                where = [str(self._directory)] if kind.requires_logging_directory else []
                tracker = kind(self._title, *where)
                tracker.start()
                self._open.append(tracker)
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in self._open:
            tracker.finish()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of a step, those in mappings as `name/inner`; what is no finite number is left out."""
        numbers = {
            key: float(value)
            for key, value in _flat(values)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        for tracker in self._open:
            tracker.log(numbers, step=step)


class MetricsWriter:
    """Writes to `metrics.jsonl` in a directory, and to `trackers` through accelerate. To be used as a context.

    Steps from `start` on are written anew when training goes on from an earlier point. Raises ConfigError when
    the file cannot be written.
    """

    def __init__(
        self, directory: Path, trackers: Iterable[str] = (), *, start: int | None = None, name: str = "understudy"
    ) -> None:
        self._path = directory / FILE
        self._trackers = Trackers(directory, trackers, name)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            earlier = [] if start is None else [line for line in read_metrics(self._path) if line["step"] < start]
            self._path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in earlier))
            self._file = self._path.open("ab")
        except OSError as error:
            raise ConfigError(
                f"{self._path}: cannot be written: {error.strerror}; make room, or choose another --output"
            ) from error

    def __enter__(self) -> Self:
        self._trackers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._trackers.__exit__()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers of a step; what is not finite is null in JSON. Trackers get the numbers alone."""
        row = {"step": step, **values}
        self._file.write(msgspec.json.encode(_finite(row)) + b"\n")
        self._file.flush()
        self._trackers.log(step, values)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without a last one that was cut short; none where there is no file."""
    rows: list[dict[str, Any]] = []
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return rows
    for line in content.splitlines():
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.MsgspecError:
            break
    return rows


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
            pairs += _flat(inner, f"{prefix}{key}/")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        inner: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {key: _finite(each) for key, each in inner.items()}
    return value
