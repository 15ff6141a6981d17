"""What a report tells, as plain numbers: every page, picture and plot is made of one `ReportFigures`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from understudy.report.comparison import RateDifference
from understudy.store.outcomes import VersionUse
from understudy.util.statistics import ConfidenceInterval, MeanEstimate

Kind = Literal["run", "runs", "loop", "training"]


class Point(Struct, frozen=True, kw_only=True):
    """One collection of rollouts by one policy: a run, a step of a loop, or an evaluation in it.

    `step` is None outside of a loop. `solved` and `unsolved` are rollouts whose last verdict is a reward of 1, or
    less; `suspicious` counts those of either whose patch may deceive the grader, `failed` the infrastructure
    failures, `pending` those that have not ended. `solve_rate` and `reward` are over graded rollouts; `turns`
    (answered calls), `sampled` (completion tokens) and `seconds` are means of a graded rollout; None where
    there is none. Tokens, calls and costs are sums over all attempts. `from_store` is False where only the loop's
    own word is left.
    """

    label: str
    step: int | None = None
    version: str | None = None
    directory: str = ""
    solved: int = 0
    unsolved: int = 0
    suspicious: int = 0
    suspicious_solved: int = 0
    failed: int = 0
    pending: int = 0
    timeouts: int = 0
    solve_rate: ConfidenceInterval | None = None
    reward: MeanEstimate | None = None
    turns: MeanEstimate | None = None
    sampled: MeanEstimate | None = None
    seconds: MeanEstimate | None = None
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    from_store: bool = True

    @property
    def graded(self) -> int:
        """How many rollouts have a verdict."""
        return self.solved + self.unsolved


class TaskRow(Struct, frozen=True, kw_only=True):
    """One task: (solved, graded) in each of the points of the report, and its turns in the last of them."""

    task_id: str
    tried: tuple[tuple[int, int], ...]
    turns: float | None = None


class BoundaryRow(Struct, frozen=True, kw_only=True):
    """Faults that crossed one boundary: attempts that met one, rollouts given up for it, what most of them say."""

    boundary: str
    attempts: int
    given_up: int
    example: str


class TrainingStep(Struct, frozen=True, kw_only=True):
    """What the trainer told of one step: numbers by name, and how many of what were skipped, by why."""

    step: int
    version: str | None
    values: dict[str, float]
    skipped: dict[str, float] = field(default_factory=dict[str, float])


class Headline(Struct, frozen=True, kw_only=True):
    """The first of the points beside the last. `strict` is the same where no suspicious patch counts as solved."""

    before: Point
    after: Point
    difference: RateDifference
    strict: RateDifference


class ReportFigures(Struct, frozen=True, kw_only=True):
    """A report in numbers.

    `points` are what is compared: the evaluations of a loop, or the runs that were given; `collected` are a
    loop's steps on its training tasks. `tasks` are those of `points`. `about` says what was run, `unsolved`
    counts why graded rollouts were not solved; `notes` say what of it is missing or does not agree. `made_at` in
    Unix seconds.
    """

    title: str
    kind: Kind
    directory: str
    made_at: float
    about: dict[str, str]
    points: tuple[Point, ...] = ()
    collected: tuple[Point, ...] = ()
    headline: Headline | None = None
    training: tuple[TrainingStep, ...] = ()
    tasks: tuple[TaskRow, ...] = ()
    boundaries: tuple[BoundaryRow, ...] = ()
    unsolved: dict[str, int] = field(default_factory=dict[str, int])
    versions: tuple[VersionUse, ...] = ()
    notes: tuple[str, ...] = ()
