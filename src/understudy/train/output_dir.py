"""Where a training writes: the new model in the output directory, all else under `training` in it.

A directory is a model once it has a config.json, which comes last: what was killed before is no model, and is
gone on with by `resume`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.train.weights import TRAINING, WeightsRecord, save_model
from understudy.util.locks import locked

CHECKPOINTS = "checkpoints"
_FINAL = "final"
_LOCK = ".lock"
_REMEDY = "choose another --output"


@contextmanager
def claim_output(
    output: Path, *, resume: bool, overwrite: bool = False, needed: Iterable[Path] = ()
) -> Generator[None]:
    """Make the output directory ready, and keep other trainings out of it while the context lasts.

    `needed` is what the training reads: a directory that holds some of it is not overwritten. Raises ConfigError
    when the directory holds what must not be written over, or another training is at it.
    """
    lock = output / TRAINING / _LOCK
    busy = f"another training is writing to {output}; wait for it, or choose another --output"
    if lock.exists():
        with locked(lock, busy=busy, remedy=_REMEDY):
            pass  # nobody is in there whose work would be removed
    _make_ready(output, resume=resume, overwrite=overwrite, needed=needed)
    with locked(lock, busy=busy, remedy=_REMEDY):
        yield


def _make_ready(output: Path, *, resume: bool, overwrite: bool, needed: Iterable[Path]) -> None:
    inside = next((each for each in needed if each.resolve().is_relative_to(output.resolve())), None)
    if overwrite and inside is not None:
        raise ConfigError(f"{output} holds {inside}, which is training data; choose another --output")
    # Killed while the model was being put in place: what lies beside the training is of it.
    unfinished = (output / TRAINING / _FINAL).is_dir()
    if (output / "config.json").exists():
        if not overwrite:
            raise ConfigError(f"{output} holds a model already; choose another --output, or give --overwrite")
        if not (output / TRAINING).is_dir():
            raise ConfigError(f"{output} holds a model that no training wrote; choose another --output")
        _remove(output)
    elif output.is_dir() and not unfinished and any(path.name != TRAINING for path in output.iterdir()):
        raise ConfigError(f"{output} is not empty, and what it holds is not a model; choose another --output")
    elif _holds_more_than_a_lock(output / TRAINING) and not resume:
        if not overwrite:
            raise ConfigError(
                f"{output} holds an unfinished training; continue it with --resume, or start again with "
                "--overwrite"
            )
        _remove(output if unfinished else output / TRAINING)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be created: {error.strerror}; choose another --output") from error


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be removed: {error}; {_REMEDY}") from error


def _holds_more_than_a_lock(directory: Path) -> bool:
    return directory.exists() and any(path.name != _LOCK for path in directory.iterdir())


def last_checkpoint(directory: Path, resume: bool | Path, mark: str = "trainer_state.json") -> Path | None:
    """The checkpoint to go on from: the one named, else the last whole one; None where there is none yet.

    `mark` is a file that whole ones have. Raises ConfigError when the one named is none.
    """
    if isinstance(resume, Path):
        if not (resume / mark).is_file():
            raise ConfigError(
                f"{resume} is not a checkpoint of this training; expected one in DIR/{TRAINING}/{CHECKPOINTS}"
            )
        return resume
    candidates = (directory / CHECKPOINTS).glob("checkpoint-*") if resume else ()
    complete = [path for path in candidates if _is_whole(path / mark)]
    return max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _is_whole(mark: Path) -> bool:
    """Whether a file of JSON was written to its end, which a full disk or a kill may have prevented."""
    try:
        json.loads(mark.read_bytes())
    except (OSError, ValueError):
        return False
    return True


def install_model(model: Any, source: Path, output: Path, written: WeightsRecord) -> None:
    """Write the model into a directory in which its training stays, the config last."""
    final = output / TRAINING / _FINAL
    save_model(model, source, final, written=written)
    shutil.rmtree(final / TRAINING)
    for path in sorted(final.iterdir(), key=lambda path: path.name == "config.json"):
        target = output / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    final.rmdir()


def remove_checkpoints(directory: Path) -> None:
    """Remove the checkpoints of a training that ended, and what was half written when it was killed."""
    for path in (directory / CHECKPOINTS, *directory.glob(".*.new"), *directory.glob(".*.old")):
        shutil.rmtree(path, ignore_errors=True)
