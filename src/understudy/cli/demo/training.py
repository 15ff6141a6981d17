"""`understudy demo`: a model learns from its own graded rollouts, on a laptop.

A tiny pretrained model works on small tasks through the real Claude Code CLI. It imitates a teacher, and then
learns from its own graded rollouts. After each stage its solve rate is measured on held-out tasks, whose names and
files it never saw. Every rate comes from graded rollouts, none from the trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from msgspec import Struct

from understudy.cli.demo.steps import DemoSteps
from understudy.model.directory import require_packages
from understudy.train.tiny.corpus import SYSTEM_PROMPT, TOOLS

_MODEL = "tiny"
_AGENT = ("--tools", TOOLS, "--max-turns", "6", "--answer-tokens", "200", "--system-prompt", SYSTEM_PROMPT)
_SFT = ("--learning-rate", "3e-4", "--epochs", "3", "--batch-rollouts", "8")
_WEAK_SFT = ("--learning-rate", "1e-4", "--epochs", "1", "--batch-rollouts", "8")
_GRPO = ("--learning-rate", "3e-4", "--mini-batches", "2")
_EVALUATED_AT = "0.5"
"""The temperature of evaluations. Rollouts to learn from are sampled at 1."""

_EVALUATION = ("--evaluation", "--temperature", _EVALUATED_AT)
_LABELS = ("untrained", "after SFT", "before GRPO", "after GRPO")
_EXPECTED_GAIN = {"sft": 0.5, "grpo": 0.2}
"""How much the solve rates must rise."""


class DemoSize(Struct, frozen=True, kw_only=True):
    """How much work a demonstration does."""

    tasks: int = 64
    """Training tasks."""
    evaluated: int = 64
    """Held-out tasks."""
    steps: int = 7
    """Steps of GRPO."""
    groups: int = 8
    """Tasks per step."""
    samples: int = 6
    """Rollouts per task."""


def run_training(directory: Path, *, seed: int, size: DemoSize) -> bool:
    """Run the demo. Returns whether the model improved by as much as is expected.

    Raises ConfigError if a command fails, or if the packages for training are not installed.
    """
    require_packages("torch", "transformers", "trl", "matplotlib")
    demo = _Training(directory, seed)
    train, held_out = demo.tasks("train", size.tasks), demo.tasks("held-out", size.evaluated)

    base = demo.rollouts("1-untrained", held_out, "--weights", _MODEL, *_EVALUATION)

    teacher = demo.rollouts("2-teacher", train, "--policy", "terse")
    dataset = directory / "lessons"
    if not dataset.exists():
        demo.command("export", "trl-sft", teacher, "--output", dataset, "--solved-only")
    student = demo.imitate("sft", dataset, *_SFT)
    imitated = demo.rollouts("3-sft", held_out, "--weights", student, *_EVALUATION)

    beginner = demo.imitate("beginner", dataset, *_WEAK_SFT)
    loop = directory / "4-loop"
    demo.command(
        *("train", "loop", beginner, "--tasks", train, "--eval-tasks", held_out),
        *("--steps", str(size.steps), "--groups", str(size.groups), "--samples", str(size.samples)),
        *(*_GRPO, "--eval-temperature", _EVALUATED_AT, *_AGENT, *demo.seed, "--output-dir", loop),
    )
    demo.command("report", loop, "--png")

    ends = [loop / "evaluations" / f"step-{step:04}" for step in (0, size.steps)]
    labels = [word for label in _LABELS for word in ("--label", label)]
    page = directory / "demo.html"
    report = demo.command("report", base, imitated, *ends, *labels, "--png", "--output", page)
    rates = [point["solve_rate"] for point in report["points"]]
    for label, rate in zip(_LABELS, rates, strict=True):
        demo.say(f"{label:12} {rate['estimate']:.2f} ({rate['low']:.2f} to {rate['high']:.2f})")
    demo.say(f"the pages: {page}, {loop / 'report.html'}; `understudy view {directory}` shows every rollout")
    return _improved(rates)


class _Training(DemoSteps):
    """The steps of a demo with one seed. Each step leaves a directory, and is not repeated if that exists."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory)
        self.seed = ("--seed", str(seed))

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
            "run", "embedded", *arguments, "--tasks", tasks, *_AGENT, *self.seed, "--output-dir", directory
        )
        self.say(f"{name}: {summary['solved']} of {summary['rollouts']} tasks solved in {summary['wall_s']:.0f} s")
        return directory

    def imitate(self, name: str, dataset: Path, *arguments: str) -> Path:
        """Train the tiny model on what the teacher did. Returns the new model's directory."""
        directory = self.directory / name
        if not (directory / "config.json").exists():
            options = ("--from", dataset, "--output", directory, "--overwrite", *self.seed, *arguments)
            self.command("train", "sft", _MODEL, *options)
        return directory


def _improved(rates: list[dict[str, Any]]) -> bool:
    untrained, sft, weak, grpo = rates
    gains = {"sft": sft["estimate"] - untrained["estimate"], "grpo": grpo["estimate"] - weak["estimate"]}
    missed = [name for name, least in _EXPECTED_GAIN.items() if gains[name] < least]
    if grpo["low"] <= weak["high"]:
        missed.append("the intervals before and after GRPO touch")
    if missed:
        typer.echo(f"demo: less was gained than expected ({', '.join(missed)}): {gains}", err=True)
    return not missed
