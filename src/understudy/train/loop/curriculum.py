"""Which tasks a step collects: those that are solved now and then teach most, and none is forgotten."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from msgspec import Struct

DECAY = 0.7
"""What a task's earlier rollouts count when it is tried again: the policy that made them is another one now."""
FLOOR = 0.1
"""The least weight of a task, where one that is solved half of the time has 1."""


class Rate(Struct, frozen=True, kw_only=True):
    """How often a task was solved of late: `solved` of `tried`, both fading, and the step that tried it last."""

    tried: float = 0.0
    solved: float = 0.0
    step: int = 0

    @property
    def expected(self) -> float:
        """The solve rate to expect: one half for a task that was never tried."""
        return (self.solved + 0.5) / (self.tried + 1.0)

    def after(self, tried: int, solved: int, step: int) -> Rate:
        """The rate with further rollouts in it."""
        return Rate(tried=DECAY * self.tried + tried, solved=DECAY * self.solved + solved, step=step)


def choose(tasks: Iterable[str], rates: Mapping[str, Rate], count: int, *, seed: int, step: int) -> list[str]:
    """`count` of the tasks, or all if there are fewer, for one step; the same for the same arguments.

    Without replacement, by weights 4 p (1 - p) of the solve rate p to expect, and at least FLOOR
    (Efraimidis and Spirakis: the greatest u^(1/w) win).
    """
    draw = random.Random(f"curriculum {seed} {step}")
    keys: list[tuple[float, str]] = []
    for task in sorted(set(tasks)):
        rate = rates.get(task, Rate()).expected
        weight = max(FLOOR, 4.0 * rate * (1.0 - rate))
        keys.append((draw.random() ** (1.0 / weight), task))
    keys.sort(reverse=True)
    return [task for _, task in keys[:count]]
