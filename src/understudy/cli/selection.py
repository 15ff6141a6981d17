"""Which tasks a command is about, and in what kind of sandbox they are run where nobody names one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.types import Task

DOCKER = "docker"
LOCAL = "local"


def instances(texts: Sequence[str] | None) -> tuple[str, ...] | None:
    """The ids that `--instance-ids` names, each once; None where it was not given: all.

    Raises ConfigError when it was given and names none.
    """
    if texts is None:
        return None
    ids = tuple(dict.fromkeys(id for text in texts for part in text.split(",") if (id := part.strip())))
    if not ids:
        raise ConfigError("--instance-ids: there is no id in it; expected ids with commas between them")
    return ids


def kind_for(tasks: Iterable[Task]) -> str:
    """The kind of sandbox, by name: containers where one of the tasks cannot be run without its image."""
    from understudy.types import ImageTree

    return DOCKER if any(isinstance(task.source, ImageTree) for task in tasks) else LOCAL
