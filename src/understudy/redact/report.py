"""What was replaced where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.util.atomic import atomic_write

ReportPlace = tuple[str, str, str, int]
"""Where, by which rule, which pseudonym, and how often."""

MAX_PLACES = 100_000
"""How many places a report names; what is found beyond them is only counted."""


class RedactionReport:
    """Counts by rule, and the places: where, which rule, which pseudonym. Never the secret.

    The same place told twice, as when the same text is redacted again, counts once while there is room for places.
    """

    def __init__(self, places: int = MAX_PLACES) -> None:
        self._room = places
        self._places: dict[tuple[str, str, str], int] = {}
        self._unplaced: Counter[str] = Counter()

    def add(self, where: str, rule: str, pseudonym: str, times: int = 1) -> None:
        """Note that `rule` put `pseudonym` so many times into the text that `where` names."""
        position = (where, rule, pseudonym)
        if position in self._places or len(self._places) < self._room:
            self._places[position] = times
        else:
            self._unplaced[rule] += times

    def merge(self, places: Iterable[ReportPlace], more: Counter[str]) -> None:
        """Take over what the report of another process says: its places, and what it only counted."""
        for position in places:
            self.add(*position)
        self._unplaced.update(more)

    def places(self) -> Iterator[ReportPlace]:
        """The places, in the order in which they were found."""
        return ((*position, times) for position, times in self._places.items())

    @property
    def more(self) -> Counter[str]:
        """How many replacements each rule made in places that are not named."""
        return self._unplaced.copy()

    @property
    def counts(self) -> Counter[str]:
        """How many replacements each rule made."""
        counts = Counter(self._unplaced)
        for (_, rule, _), times in self._places.items():
            counts[rule] += times
        return counts

    @property
    def total(self) -> int:
        """How many replacements were made."""
        return self.counts.total()

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON value: `replaced`, `by_rule`, `places`, and `places_left_out` by rule."""
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
        """Write it as JSON, whole, for its owner alone. Raises ConfigError when the file cannot be written."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=True) + "\n"
        try:
            atomic_write(path, text.encode("ascii"), mode=0o600)
        except OSError as error:
            raise ConfigError(f"{path}: the report of redaction cannot be written: {error.strerror}") from error


def write_report_beside(output: Path, report: RedactionReport | None) -> Path | None:
    """Write the report of a file as `FILE.redaction.json`, and return its path.

    Without a report, as of a file that was not redacted, one that is left there of an earlier file is removed.
    Raises ConfigError when that cannot be done.
    """
    path = output.with_name(f"{output.name}.redaction.json")
    if report is not None:
        report.write(path)
        return path
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: is of an earlier file, and cannot be removed: {error.strerror}") from error
    return None
