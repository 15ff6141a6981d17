"""Which charts a report has, out of its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from understudy.report import formatting
from understudy.report.figures import Figures, Point
from understudy.report.svg import Bar, Dot, Series, curve, forest, text
from understudy.train.loop.evaluation import Interval
from understudy.train.loop.state import number_of

Card = tuple[str, str, str]
"""Title, chart and caption; the latter two are HTML."""

_TRAINING = (
    ("mismatch_mean", "Mismatch, mean", "behaviour against training log-probabilities of the same tokens"),
    ("mismatch_max", "Mismatch, greatest", "of any one token"),
    ("loss", "Loss", ""),
    ("grad_norm", "Norm of the gradient", "before it is clipped"),
    ("kl", "KL to the reference", ""),
    ("entropy", "Entropy", "of the policy, per token"),
    ("clip_fraction", "Clipped", "share of tokens"),
    ("tokens", "Tokens learned from", ""),
    ("groups", "Groups learned from", ""),
    ("seconds", "Seconds", "of the update"),
)


_ELSEWHERE = {"reward", "reward_mean", "collected", "solved", "rollouts", "sequences"}
"""What the graded rollouts themselves tell."""


def chart_cards(figures: Figures) -> list[Card]:
    """Solve rate, reward, tokens and turns over the steps of a loop; of several runs the latter two."""
    if figures.kind != "loop":
        return []
    binary = all(
        point.reward is None or point.solve_rate is None or point.reward == point.solve_rate
        for point in (*figures.points, *figures.collected)
    )
    cards = [
        _card(figures, "Solve rate", "", lambda point: point.solve_rate, formatting.percent, (0.0, 1.0)),
        _card(
            figures,
            "Mean reward",
            "every reward was 0 or 1, so this is the solve rate" if binary else "",
            lambda point: point.reward,
            formatting.number,
            (0.0, 1.0) if binary else None,
        ),
        _card(figures, "Sampled tokens", "of a rollout", lambda point: point.sampled, formatting.number, None),
        _card(figures, "Turns", "answered calls of a rollout", lambda point: point.turns, formatting.number, None),
    ]
    return [card for card in cards if card[1]]


def points_chart(figures: Figures) -> str:
    """The solve rates of several runs under each other; nothing where the page has them already."""
    if figures.kind != "runs" or len(figures.points) < 3:
        return ""
    bars = [
        Bar(
            name=point.label,
            value=point.solve_rate.estimate,
            low=point.solve_rate.low,
            high=point.solve_rate.high,
            told=formatting.rate(point.solve_rate),
        )
        for point in figures.points
        if point.solve_rate is not None
    ]
    return forest(bars, name="solve rate of each run with its 95 % interval") if bars else ""


def training_cards(figures: Figures) -> list[Card]:
    """A small chart for each number that the trainer told: known ones first, others where they change."""
    every: dict[str, set[float]] = {}
    for step in figures.training:
        for name, value in step.values.items():
            every.setdefault(name, set()).add(value)
    told = every.keys()
    changing = {name for name, values in every.items() if len(values) > 1}
    known = [row for row in _TRAINING if row[0] in told]
    others = sorted(changing - {name for name, _, _ in _TRAINING} - _ELSEWHERE)[:24]
    cards: list[Card] = []
    for name, title, caption in [*known, *((name, name, "") for name in others)]:
        dots = [
            Dot(x=step.step, y=step.values[name], told=f"step {step.step}: {formatting.number(step.values[name])}")
            for step in figures.training
            if name in step.values
        ]
        chart = curve(
            [Series(name=name, dots=dots)], name=title, told=formatting.number, size=(400, 140), x_name="step"
        )
        now = f"<em>{text(formatting.number(dots[-1].y))}</em>"
        cards.append((title[:80], chart, f"{now}{text(caption)}"))
    return cards


def place(point: Point) -> float:
    """How many updates the policy of a point of a loop had: what its version says, else its step."""
    made_by = number_of(point.version)
    return float(point.step or 0) if made_by is None else float(made_by)


def _card(
    figures: Figures,
    title: str,
    caption: str,
    value: Callable[[Point], Interval | None],
    told: Callable[[float], str],
    bounds: tuple[float, float] | None,
) -> Card:
    held_out, training = _dots(figures.points, value, told), _dots(figures.collected, value, told)
    series = [Series(name="training tasks", dots=training, style="side")] if training else []
    series += [Series(name="held-out tasks", dots=held_out)] if held_out else []
    legend = "".join(f'<span class="key {one.style}">{text(one.name)}</span>' for one in reversed(series))
    axis = formatting.tick if told is formatting.percent else told
    return title, curve(series, name=title, told=axis, bounds=bounds), f"{text(caption)} {legend}"


def _dots(
    points: Sequence[Point], value: Callable[[Point], Interval | None], told: Callable[[float], str]
) -> list[Dot]:
    dots: list[Dot] = []
    for point in points:
        if (found := value(point)) is None:
            continue
        span = f"{told(found.estimate)}, 95 % interval {told(found.low)} to {told(found.high)}"
        dots.append(
            Dot(
                x=place(point),
                y=found.estimate,
                low=found.low,
                high=found.high,
                told=f"{point.label}: {span}; {point.graded} rollouts",
            )
        )
    return sorted(dots, key=lambda dot: dot.x)
