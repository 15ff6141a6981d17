"""What an export must not contain twice, or at all: near-duplicate sessions, and the tasks of a benchmark.

Sessions are compared by their lines. Of each session the smallest hashes of lines are kept (a bottom-k sketch, as
in MinHash); the share of common hashes in two sketches estimates the share of common lines. Among the hashes up to
which both sketches are complete, the share of one that the other has too estimates how much of it is in the other.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self, cast
from zlib import crc32

from understudy.tasks.rows import read_rows

_SKETCH_HASHES = 256
_INDEXED_HASHES = 64
"""With 64 hashes, a session whose lines are all in one of ten times its length shares six of them with it on
average.
"""
_MIN_COMPARED_HASHES = 16
"""So many hashes tell how much of a session is in another; with fewer, as in one of 16 times its length, nothing
does.
"""
_MIN_LINES = 16
_MIN_LINE_CHARACTERS = 20
_MIN_ADDED_LINES = 3


def _lines(texts: Iterable[str]) -> set[str]:
    """Return the different meaningful lines: those of 20 characters or more, without blanks around them."""
    all_lines: set[str] = set()
    for text in set(texts):
        all_lines.update(text.splitlines())
    lines = {line.strip() for line in all_lines if len(line) >= _MIN_LINE_CHARACTERS}
    return {line for line in lines if len(line) >= _MIN_LINE_CHARACTERS}


class _Sketch(NamedTuple):
    """The smallest hashes of a session's lines, in order and as a set, and up to where they are all."""

    hashes: list[int]
    members: frozenset[int]
    reach: int


class NearDuplicates:
    """Finds sessions that share `threshold` of their lines with an earlier one, as a copy or a fork does, or of
    which so much is in the other, as of a log that was read before it grew.

    Sessions with fewer than 16 different lines are never near-duplicates.
    """

    def __init__(self, threshold: float = 0.8) -> None:
        self._threshold = threshold
        self._sketches: list[tuple[str, _Sketch]] = []
        self._by_hash: dict[int, list[int]] = {}

    def find(self, texts: Iterable[str]) -> tuple[list[str], _Sketch]:
        """Return the names of earlier near-duplicates, and the sketch of the texts for `add`."""
        hashes = sorted({crc32(line.encode(errors="surrogatepass")) for line in _lines(texts)})
        if len(hashes) < _MIN_LINES:
            return [], _Sketch([], frozenset(), 0)
        del hashes[_SKETCH_HASHES:]
        # Beyond the largest hash of a full sketch, it is unknown what the session has.
        sketch = _Sketch(hashes, frozenset(hashes), hashes[-1] if len(hashes) == _SKETCH_HASHES else 1 << 32)
        candidates = {number for key in hashes[:_INDEXED_HASHES] for number in self._by_hash.get(key, ())}
        near_numbers = [
            number for number in sorted(candidates) if self._is_near(sketch, self._sketches[number][1])
        ]
        return [self._sketches[number][0] for number in near_numbers], sketch

    def add(self, name: str, sketch: _Sketch) -> None:
        """Add a session by the sketch that `find` returned."""
        for key in sketch.hashes[:_INDEXED_HASHES]:
            self._by_hash.setdefault(key, []).append(len(self._sketches))
        self._sketches.append((name, sketch))

    def _is_near(self, sketch: _Sketch, earlier: _Sketch) -> bool:
        common = sketch.members & earlier.members
        # Most sessions that share lines share few of them.
        if len(common) < self._threshold * min(_MIN_LINES, _MIN_COMPARED_HASHES):
            return False
        union = len(sketch.hashes) + len(earlier.hashes) - len(common)
        if len(common) >= self._threshold * min(union, _SKETCH_HASHES):
            smallest = sorted(sketch.members | earlier.members)[:_SKETCH_HASHES]
            if len(common.intersection(smallest)) >= self._threshold * len(smallest):
                return True
        reach = min(sketch.reach, earlier.reach)
        shared = sum(key <= reach for key in common)
        sizes = (bisect_right(compared.hashes, reach) for compared in (sketch, earlier))
        return any(size >= _MIN_COMPARED_HASHES and shared >= self._threshold * size for size in sizes)


class Benchmark:
    """Tasks that training data must not contain, known by their ids, repositories and the lines of their gold
    patches.

    `rows` are those of a dataset in SWE-bench's format: `instance_id`, `repo` and `patch`.
    """

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._ids: set[str] = set()
        self._repositories: set[str] = set()
        self._added_lines: list[frozenset[str]] = []
        for row in rows:
            self._ids.add(str(row.get("instance_id") or ""))
            repository = str(row.get("repo") or "").lower()
            self._repositories |= {repository, repository.replace("/", "__")}
            added_lines = frozenset(
                _lines(
                    line[1:]
                    for line in str(row.get("patch") or "").splitlines()
                    if line.startswith("+") and not line.startswith("+++")
                )
            )
            if len(added_lines) >= _MIN_ADDED_LINES:
                self._added_lines.append(added_lines)
        self._ids.discard("")
        self._repositories.discard("")
        self._patterns = [
            re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, sorted(names))) + r")(?![\w-])")
            if names
            else None
            for names in (self._ids, self._repositories)
        ]
        self._tasks_by_line = self._by_line()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the tasks in a file of rows: JSONL, JSON or Parquet. Raises TaskError or ConfigError."""
        return cls(cast(dict[str, Any], row) for _, row in read_rows(path) if isinstance(row, dict))

    def _by_line(self) -> dict[str, list[int]]:
        by_line: dict[str, list[int]] = {}
        for number, added_lines in enumerate(self._added_lines):
            for line in added_lines:
                by_line.setdefault(line, []).append(number)
        return by_line

    def overlap(self, name: str, texts: Iterable[str] = ()) -> str | None:
        """Return why something belongs to the benchmark, or None.

        `name` is a task's id or a project, which is searched for ids and repositories (`owner/name`, or
        `owner__name` in a path). `texts` are a session's contents, which are searched for ids, and for gold
        patches of which two thirds of the added lines occur, and at least three.
        """
        ids, repositories = self._patterns
        if ids is not None and ids.search(name):
            return "task of the benchmark"
        if repositories is not None and repositories.search(name.lower()):
            return "repository of the benchmark"
        lines_found: dict[int, set[str]] = {}
        for text in texts:
            if ids is not None and "__" in text and ids.search(text):
                return "task of the benchmark"
            for line in _lines([text]):
                # Diffs and numbered listings put characters before a line.
                for candidate in (line, _LINE_PREFIX.sub("", line)):
                    for number in self._tasks_by_line.get(candidate, ()):
                        lines_found.setdefault(number, set()).add(candidate)
        if any(
            len(found) >= max(_MIN_ADDED_LINES, len(self._added_lines[number]) * 2 / 3)
            for number, found in lines_found.items()
        ):
            return "gold patch of the benchmark"
        return None


_LINE_PREFIX = re.compile(r"^(?:\d{1,6}[→:|\t]\s*|[+]\s*)+")
