"""Mixtures: how often examples from sessions occur in an export, depending on what became of their turns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.export.examples import Example
from understudy.store.sessions import SessionRepository
from understudy.store.turn_filters import sample_rank

NOT_DRAWN = "rows that were not drawn (--weight)"

_WEIGHT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*:\s*(\S.*)", re.DOTALL)
_MAX_WEIGHT = 100.0
_RANK_COUNT = 2.0**63


class WeightRule(Struct, frozen=True):
    """A weight, and the SQL condition for the turns that have it, over the columns of --where."""

    weight: float
    condition: str


class MixturePart(Struct, kw_only=True):
    """The effect of a rule: the `answers` for which it is the first matching rule, and how often they are
    `learned`.
    """

    weight: float
    condition: str
    answers: int = 0
    learned: int = 0


def parse_weight_rule(text: str) -> WeightRule:
    """Parse the rule in an option, such as `3: tests = 'passed'`. Raises ConfigError."""
    match = _WEIGHT.fullmatch(text)
    if match is None or float(match[1]) > _MAX_WEIGHT:
        raise ConfigError(
            f"--weight: got {text!r}, expected a number from 0 to {_MAX_WEIGHT:g}, a colon and an SQL condition "
            "on turns; give, for example, --weight \"3: tests = 'passed'\""
        )
    return WeightRule(float(match[1]), match[2].strip())


class Mixture:
    """Draws examples by weight. Raises ConfigError like `SessionRepository.select` for a rule's condition.

    An answer has the weight of the first rule whose condition matches its turn, else 1. An example with several
    answers has their mean weight. A weight of 2.3 gives two copies, and a third one in three of ten examples;
    which ones depends only on their ids and the seed.
    """

    def __init__(self, sessions: SessionRepository, rules: Sequence[WeightRule], seed: int) -> None:
        self._seed = seed
        self._rules: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self.parts = [MixturePart(weight=rule.weight, condition=rule.condition) for rule in rules]
        for number, rule in enumerate(rules):
            for (state_id,) in sessions.table(("state_id",), rule.condition):
                self._rules.setdefault(state_id, number)
        self.parts.append(MixturePart(weight=1.0, condition="all others"))

    def rename(self, exported: Sequence[str], stored: Sequence[str]) -> None:
        """Map ids of states in the export to those in the store.

        They differ if redaction replaced a secret in an id.
        """
        self._names = {
            exported_id: stored_id
            for exported_id, stored_id in zip(exported, stored, strict=True)
            if exported_id != stored_id
        }

    def copies(self, example: Example) -> int:
        """Return how often an example is written, and count it."""
        parts = [self._matching_part(answer) for answer in example.answer_ids]
        weight = sum(part.weight for part in parts) / len(parts)
        rank = sample_rank(example.example_id, self._seed) / _RANK_COUNT
        number = int(weight) + (rank < weight % 1)
        for part in parts:
            part.answers += 1
            part.learned += number
        return number

    def _matching_part(self, answer: str) -> MixturePart:
        return self.parts[self._rules.get(self._names.get(answer, answer), -1)]
