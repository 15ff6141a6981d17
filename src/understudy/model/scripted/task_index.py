"""The tasks that a scripted policy has the answers to, found by the instruction that a message holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.errors import TaskError

_ANCHOR = 24


class ScriptedTask(Struct, frozen=True):
    """What a policy needs of a task record; the other fields of the record are not read."""

    instance_id: str
    instruction: str
    gold_patch: str
    workdir: str = "/workspace"


class TaskIndex:
    """Tasks by instruction. Raises TaskError when two have the same one and want different patches."""

    def __init__(self, tasks: Iterable[ScriptedTask]) -> None:
        texts: dict[str, ScriptedTask] = {}
        for task in tasks:
            first = texts.setdefault(task.instruction.strip(), task)
            if first.gold_patch != task.gold_patch:
                raise TaskError(
                    f"tasks {first.instance_id} and {task.instance_id} have the same instruction, by which "
                    "scripted policies tell tasks apart; give each its own"
                )
        texts.pop("", None)
        # A text is looked through for one short stretch of every instruction: of its beginning, middle and
        # end, the one that the fewest instructions share, as statements from one maker often begin alike.
        spread: Counter[str] = Counter(anchor for text in texts for anchor in set(_anchors(text)))
        self._by_anchor: defaultdict[str, list[tuple[str, ScriptedTask]]] = defaultdict(list)
        for text, task in texts.items():
            self._by_anchor[min(_anchors(text), key=lambda anchor: spread[anchor])].append((text, task))
        self._lengths = sorted({len(anchor) for anchor in self._by_anchor})
        self.find = lru_cache(maxsize=256)(self._find)

    def _find(self, text: str) -> ScriptedTask | None:
        """The task whose instruction occurs in the text, the longest one if there are several."""
        candidates = {
            stretch
            for length in self._lengths
            for stretch in {text[start : start + length] for start in range(len(text) - length + 1)}
            if stretch in self._by_anchor
        }
        matches = [
            (instruction, task)
            for anchor in candidates
            for instruction, task in self._by_anchor[anchor]
            if instruction in text
        ]
        return max(matches, key=lambda match: len(match[0]))[1] if matches else None


def _anchors(text: str) -> tuple[str, ...]:
    middle = max(0, (len(text) - _ANCHOR) // 2)
    return (text[:_ANCHOR], text[middle : middle + _ANCHOR], text[-_ANCHOR:])


def read_tasks(path: Path) -> TaskIndex:
    """The tasks of a JSONL file of task records. Raises TaskError naming file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TaskError(
            f"cannot read the task file {path}: {error.strerror}; give an existing JSONL file"
        ) from error
    tasks: list[ScriptedTask] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tasks.append(msgspec.json.decode(line, type=ScriptedTask))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TaskError(f"{path}, line {number}: not a task record: {error}") from None
    return TaskIndex(tasks)
