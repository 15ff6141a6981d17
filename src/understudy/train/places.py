"""Where a training writes: the new model in the output directory, all else under `training` in it.

A directory is a model once it has a config.json, which comes last: what was killed before is no model, and is
gone on with by `resume`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.train.weights import TRAINING, Written, save_model

CHECKPOINTS = "checkpoints"
_FINAL = "final"


def claim(output: Path, *, resume: bool, overwrite: bool = False) -> None:
    """Make the output directory ready. Raises ConfigError when it holds what must not be written over."""
    if (output / "config.json").exists():
        if not overwrite:
            raise ConfigError(f"{output} holds a model already; choose another --output, or give --overwrite")
        if not (output / TRAINING).is_dir():
            raise ConfigError(f"{output} holds a model that no training wrote; choose another --output")
        try:
            shutil.rmtree(output)
        except OSError as error:
            raise ConfigError(f"{output}: cannot be removed: {error}") from error
    elif output.is_dir() and any(path.name != TRAINING for path in output.iterdir()):
        raise ConfigError(f"{output} is not empty, and what is there is no model; choose another --output")
    elif (output / TRAINING).exists() and not resume:
        if not overwrite:
            raise ConfigError(
                f"{output} holds a training that did not end; go on with it by --resume, or begin anew by "
                "--overwrite"
            )
        shutil.rmtree(output / TRAINING)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be made: {error.strerror}; choose another --output") from error


def last_checkpoint(place: Path, resume: bool | Path, mark: str = "trainer_state.json") -> Path | None:
    """The checkpoint to go on from: the one named, else the last whole one; None where there is none yet.

    `mark` is a file that whole ones have. Raises ConfigError when the one named is none.
    """
    if isinstance(resume, Path):
        if not (resume / mark).is_file():
            raise ConfigError(
                f"{resume} is no checkpoint of this training; those are in DIR/{TRAINING}/{CHECKPOINTS}"
            )
        return resume
    made = (place / CHECKPOINTS).glob("checkpoint-*") if resume else ()
    found = [path for path in made if (path / mark).is_file()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def put_in_place(model: Any, source: Path, output: Path, written: Written) -> None:
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


def finish(place: Path) -> None:
    """Remove the checkpoints of a training that ended."""
    shutil.rmtree(place / CHECKPOINTS, ignore_errors=True)
