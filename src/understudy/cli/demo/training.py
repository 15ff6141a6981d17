"""`understudy demo`: a model learns from graded rollouts, on a laptop.

A small model works on small tasks through the real Claude Code CLI. It imitates a teacher, and then learns from
its own graded rollouts. After each stage its solve rate is measured on held-out tasks, whose names and files it
never saw. Every rate comes from graded rollouts, none from the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer
from msgspec import Struct

from understudy.cli.demo.steps import DemoSteps
from understudy.errors import ConfigError
from understudy.model.directory import TINY, require_packages
from understudy.model.pretrained import PINNED
from understudy.train.tiny.corpus import SYSTEM_PROMPT, TOOLS


class DemoSize(Struct, frozen=True, kw_only=True):
    """How much work a demonstration does."""

    tasks: int
    """Training tasks."""
    held_out_tasks: int
    """Held-out tasks."""
    steps: int
    """Steps of GRPO; 0: no GRPO."""
    groups: int = 8
    """Tasks per step."""
    samples: int = 6
    """Rollouts per task."""


class DemoSettings(Struct, frozen=True, kw_only=True):
    """What a demonstration does with one model. Options of commands are written as on the command line."""

    size: DemoSize
    sft: tuple[str, ...]
    weak_sft: tuple[str, ...] | None
    """The training of the model that GRPO starts from; None: the one after SFT."""
    grpo: tuple[str, ...]
    answer_tokens: int
    run_options: tuple[str, ...] = ()
    """Options of every run of the model."""
    gains: Mapping[str, float]
    """How much the solve rates must rise."""


MODELS: Mapping[str, DemoSettings] = {
    TINY: DemoSettings(
        size=DemoSize(tasks=64, held_out_tasks=64, steps=7),
        sft=("--learning-rate", "3e-4", "--epochs", "3", "--batch-rollouts", "8"),
        weak_sft=("--learning-rate", "1e-4", "--epochs", "1", "--batch-rollouts", "8"),
        grpo=("--learning-rate", "3e-4", "--mini-batches", "2"),
        answer_tokens=200,
        gains={"after SFT": 0.5, "after GRPO": 0.2},
    ),
    # A batch of 24 takes little longer to decode than one of 8, because each step reads all weights from memory.
    # Four sequences are trained at a time. GRPO was not measured, so it is done only if asked for.
    "smollm2-135m": DemoSettings(
        size=DemoSize(tasks=192, held_out_tasks=208, steps=0),
        sft=(
            *("--learning-rate", "2e-4", "--epochs", "1", "--batch-rollouts", "4", "--warmup-steps", "4"),
            *("--micro-batch-tokens", "2304"),
        ),
        weak_sft=None,
        grpo=("--learning-rate", "1e-5", "--micro-batch-tokens", "2304"),
        answer_tokens=128,
        run_options=("--concurrency", "24"),
        gains={"after SFT": 0.2},
    ),
}
"""The models that `understudy demo` knows."""

_EVALUATION_TEMPERATURE = "0.5"
"""The temperature of evaluations. Rollouts to learn from are sampled at 1."""

EVALUATION = ("--evaluation", "--temperature", _EVALUATION_TEMPERATURE)
"""Options of the run that evaluates a model."""


def demo_settings(model: str) -> DemoSettings:
    """Return what the demonstration does with a model. Raises ConfigError for a model that it does not know."""
    if model not in MODELS:
        raise ConfigError(f"--model {model}: the demo has no settings for it; give {' or '.join(MODELS)}")
    return MODELS[model]


def run_training(directory: Path, model: str, *, seed: int, size: DemoSize) -> bool:
    """Run the demo with a model of `MODELS`. Returns whether the model improved by as much as is expected.

    Raises ConfigError if a command fails, or if the packages for training are not installed.
    """
    require_packages("torch", "transformers", "trl", "matplotlib")
    settings = demo_settings(model)
    demo = _Training(directory, model, settings, seed)
    if model in PINNED:
        demo.command("models", "fetch", model)
    train, held_out = demo.tasks("train", size.tasks), demo.tasks("held-out", size.held_out_tasks)

    weights = ("--weights", model, *settings.run_options, *EVALUATION)
    evaluated_runs = {"untrained": demo.rollouts("1-untrained", held_out, *weights)}

    teacher = demo.rollouts("2-teacher", train, "--policy", "terse")
    dataset = directory / "lessons"
    if not dataset.exists():
        demo.command("export", "trl-sft", teacher, "--output", dataset, "--solved-only")
    student = demo.imitate("sft", dataset, *settings.sft)
    weights = ("--weights", student, *settings.run_options, *EVALUATION)
    evaluated_runs["after SFT"] = demo.rollouts("3-sft", held_out, *weights)

    pages = [directory / "demo.html"]
    if size.steps:
        weaker_student = (
            student if settings.weak_sft is None else demo.imitate("beginner", dataset, *settings.weak_sft)
        )
        loop = directory / "4-loop"
        demo.command(
            *("train", "loop", weaker_student, "--tasks", train, "--eval-tasks", held_out),
            *("--steps", str(size.steps), "--groups", str(size.groups), "--samples", str(size.samples)),
            *(*settings.grpo, *settings.run_options, "--eval-temperature", _EVALUATION_TEMPERATURE),
            *(*demo.agent, *demo.seed, "--output-dir", loop),
        )
        demo.command("report", loop, "--png")
        pages.append(loop / "report.html")
        evaluated_runs["before GRPO"] = loop / "evaluations" / "step-0000"
        evaluated_runs["after GRPO"] = loop / "evaluations" / f"step-{size.steps:04}"

    labels = [word for label in evaluated_runs for word in ("--label", label)]
    report = demo.command("report", *evaluated_runs.values(), *labels, "--png", "--output", pages[0])
    rates = dict(zip(evaluated_runs, (point["solve_rate"] for point in report["points"]), strict=True))
    for label, rate in rates.items():
        demo.say(f"{label:12} {rate['estimate']:.2f} ({rate['low']:.2f} to {rate['high']:.2f})")
    demo.say(f"the pages: {', '.join(map(str, pages))}; `understudy view {directory}` shows every rollout")
    return _improved(rates, settings.gains)


class _Training(DemoSteps):
    """The steps of a demo with one model and seed. Each step leaves a directory, and is not repeated if that
    exists.
    """

    def __init__(self, directory: Path, model: str, settings: DemoSettings, seed: int) -> None:
        super().__init__(directory)
        self.seed = ("--seed", str(seed))
        limits = ("--max-turns", "6", "--answer-tokens", str(settings.answer_tokens))
        self.agent = ("--tools", TOOLS, *limits, "--system-prompt", SYSTEM_PROMPT)
        self._model = model

    def tasks(self, split: str, count: int) -> Path:
        """Return the file with the tasks of a split, making it if needed."""
        path = self.directory / f"{split}.jsonl"
        if not path.exists():
            options = ("--split", split, "--count", str(count), *self.seed, "--output", path)
            self.command("tasks", "make", "functions", *options)
        return path

    def rollouts(self, name: str, tasks: Path, *arguments: str | Path) -> Path:
        """Run Claude Code on tasks. Returns the run's directory."""
        directory = self.directory / name
        summary = self.command(
            "run", "embedded", *arguments, "--tasks", tasks, *self.agent, *self.seed, "--output-dir", directory
        )
        self.say(f"{name}: {summary['solved']} of {summary['rollouts']} tasks solved in {summary['wall_s']:.0f} s")
        return directory

    def imitate(self, name: str, dataset: Path, *arguments: str) -> Path:
        """Train the demo's model on what the teacher did. Returns the new model's directory."""
        directory = self.directory / name
        if not (directory / "config.json").exists():
            options = ("--from", dataset, "--output", directory, "--overwrite", *self.seed, *arguments)
            self.command("train", "sft", self._model, *options)
        return directory


_BASELINES = {"after SFT": "untrained", "after GRPO": "before GRPO"}


def _improved(rates: Mapping[str, Mapping[str, float]], expected: Mapping[str, float]) -> bool:
    gains = {
        label: rates[label]["estimate"] - rates[before]["estimate"]
        for label, before in _BASELINES.items()
        if label in rates
    }
    missed = [f"too little {label}" for label, least in expected.items() if gains.get(label, least) < least]
    missed += [
        f"the intervals before and {label} touch"
        for label in gains
        if rates[label]["low"] <= rates[_BASELINES[label]]["high"]
    ]
    if missed:
        figures = ", ".join(
            f"{gain:+.2f} {label}, expected {expected.get(label, 0.0):+.2f}" for label, gain in gains.items()
        )
        typer.echo(
            f"demo: the model gained less than expected: {'; '.join(missed)} ({figures}); give another --seed or "
            "more --tasks, or --no-check to accept it",
            err=True,
        )
    return not missed
