"""Metrics of every training step: lines of JSON in a file, and optional trackers such as TensorBoard."""

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
_REQUIRED_VARIABLES = {"wandb": ("WANDB_API_KEY", "WANDB_MODE"), "mlflow": ("MLFLOW_TRACKING_URI",)}


def parse_trackers(choice: str) -> tuple[str, ...]:
    """Return the trackers that `--track` names: "auto", "none", or names separated by commas.

    "auto" takes TensorBoard if it is installed, and Weights & Biases or MLflow if they are installed and an
    environment variable says where they report to. Raises ConfigError for an unknown name or a tracker that is not
    installed.
    """
    if choice == "none":
        return ()
    if choice == "auto":
        return tuple(name for name in TRACKERS if find_spec(name) is not None and _is_configured(name))
    names = tuple(name.strip() for name in choice.split(",") if name.strip())
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"--track: {name!r} is not supported; give auto, none, or some of {', '.join(TRACKERS)}"
            )
        if find_spec(name) is None:
            raise ConfigError(
                f"--track: {name} is not installed; install it with pip install {name}, or leave it out"
            )
    return names


def _is_configured(name: str) -> bool:
    return (
        any(os.environ.get(variable) for variable in _REQUIRED_VARIABLES.get(name, ()))
        or name not in _REQUIRED_VARIABLES
    )


class Trackers:
    """The trackers with these names, called through accelerate; they write below a directory. A context
    manager.
    """

    def __init__(self, directory: Path, names: Iterable[str], title: str) -> None:
        self._directory = directory
        self._names = tuple(names)
        self._title = title
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        if self._names:
            require_packages("accelerate")
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            # Without an Accelerator: the first one in a process fixes its device and precision, which the trainer
            # has to do.
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
        """Send the metrics of a step to all trackers.

        Values in nested mappings are named `name/inner`; values that are not finite numbers are left out.
        """
        numbers = {
            key: float(value)
            for key, value in _flat(values)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        for tracker in self._open:
            tracker.log(numbers, step=step)


class MetricsWriter:
    """Writes to `metrics.jsonl` in a directory, and to trackers through accelerate. A context manager.

    When training is resumed, `start` is its first new step: later lines are removed from the file. Raises
    ConfigError when the file cannot be written.
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
                f"{self._path}: cannot be written: {error.strerror}; check the free disk space and the "
                "permissions of its directory, or choose another --output"
            ) from error

    def __enter__(self) -> Self:
        self._trackers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._trackers.__exit__()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the metrics of a step. In the file, numbers that are not finite are null; trackers get only
        numbers.
        """
        row = {"step": step, **values}
        self._file.write(msgspec.json.encode(_finite(row)) + b"\n")
        self._file.flush()
        self._trackers.log(step, values)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without an incomplete last line; an empty list if there is no file."""
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
        return {key: _finite(item) for key, item in inner.items()}
    return value
