"""The report of a redaction: what was replaced where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.util.files import atomic_write

ReportPlace = tuple[str, str, str, int]
"""Where something was replaced, by which rule and pseudonym, and how often."""

MAX_PLACES = 100_000
"""How many places a report lists; replacements in further places are only counted."""


class RedactionReport:
    """Counts by rule, and a list of places, each with the rule and the pseudonym; never the secret itself.

    A place that is added twice, as when a text is redacted again, counts once while places are listed.
    """

    def __init__(self, places: int = MAX_PLACES) -> None:
        self._room = places
        self._places: dict[tuple[str, str, str], int] = {}
        self._unplaced: Counter[str] = Counter()

    def add(self, where: str, rule: str, pseudonym: str, times: int = 1) -> None:
        """Record that `rule` put `pseudonym` into the text named `where`, `times` times."""
        position = (where, rule, pseudonym)
        if position in self._places or len(self._places) < self._room:
            self._places[position] = times
        else:
            self._unplaced[rule] += times

    def merge(self, places: Iterable[ReportPlace], more: Counter[str]) -> None:
        """Add the report of another process: its places, and its counts of further places."""
        for position in places:
            self.add(*position)
        self._unplaced.update(more)

    def places(self) -> Iterator[ReportPlace]:
        """Return the places in the order in which they were added."""
        return ((*position, times) for position, times in self._places.items())

    def drain(self) -> list[ReportPlace]:
        """Return the places and remove them and their counts from the report."""
        places = list(self.places())
        self._places.clear()
        self._unplaced.clear()
        return places

    @property
    def more(self) -> Counter[str]:
        """Return how many replacements each rule made in places that are not listed."""
        return self._unplaced.copy()

    @property
    def counts(self) -> Counter[str]:
        """Return how many replacements each rule made."""
        counts = Counter(self._unplaced)
        for (_, rule, _), times in self._places.items():
            counts[rule] += times
        return counts

    @property
    def total(self) -> int:
        """Return how many replacements were made."""
        return self.counts.total()

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON value: `replaced`, `by_rule`, `places`, and `places_left_out` by rule."""
        counts = self.counts
        return {
            "replaced": counts.total(),
            "by_rule": dict(counts.most_common()),
            "places": [
                {"where": where, "rule": rule, "pseudonym": pseudonym, "times": times}
                for where, rule, pseudonym, times in self.places()
            ],
            "places_left_out": dict(self._unplaced),
        }

    def write(self, path: Path) -> None:
        """Write the report as JSON, atomically and readable by its owner only. Raises ConfigError if it cannot be
        written.
        """
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=True) + "\n"
        try:
            atomic_write(path, text.encode("ascii"), mode=0o600)
        except OSError as error:
            raise ConfigError(
                f"{path}: the redaction report cannot be written: {error.strerror}; free disk space or make the "
                "directory writable, or choose another --output"
            ) from error


def write_report_beside(output: Path, report: RedactionReport | None) -> Path | None:
    """Write the report on a file to `FILE.redaction.json` and return that path.

    Without a report, because the file was not redacted, the report of an earlier file is removed. Raises
    ConfigError if that fails.
    """
    path = output.with_name(f"{output.name}.redaction.json")
    if report is not None:
        report.write(path)
        return path
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: the report of an earlier file cannot be removed: {error.strerror}; remove it, because it "
            f"does not describe the new {output.name}, or choose another --output"
        ) from error
    return None
