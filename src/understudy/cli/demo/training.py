"""`understudy demo`: a model learns from its own graded rollouts, on a laptop.

A tiny model that we pretrained works on small tasks through the real Claude Code CLI. It imitates a teacher, and
then learns from its own graded rollouts; what it can do is measured each time on held-out tasks, whose names and
files it never saw. Every rate comes from rollouts that were graded, none from the trainer.
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
"""The temperature at which the held-out tasks are tried; what is learned from is sampled at 1."""

_EVALUATION = ("--evaluation", "--temperature", _EVALUATED_AT)
_LABELS = ("untrained", "after SFT", "before GRPO", "after GRPO")
_EXPECTED_GAIN = {"sft": 0.5, "grpo": 0.2}
"""By how much the solve rates must rise."""


class DemoSize(Struct, frozen=True, kw_only=True):
    """How much work a demonstration is."""

    tasks: int = 64
    """Tasks to learn from."""
    evaluated: int = 64
    """Held-out tasks."""
    steps: int = 7
    """Steps of GRPO."""
    groups: int = 8
    """Tasks a step."""
    samples: int = 6
    """Rollouts a task."""


def run_training(directory: Path, *, seed: int, size: DemoSize) -> bool:
    """Run it; returns whether the model got better by as much as is expected.

    Raises ConfigError when a command fails, or training's packages are not installed.
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
    """The steps, with one seed, of which each leaves a directory and is not repeated."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory)
        self.seed = ("--seed", str(seed))

    def tasks(self, split: str, count: int) -> Path:
        """The file with the tasks of a split."""
        path = self.directory / f"{split}.jsonl"
        if not path.exists():
            options = ("--split", split, "--count", str(count), *self.seed, "--output", path)
            self.command("tasks", "make", "functions", *options)
        return path

    def rollouts(self, name: str, tasks: Path, *arguments: str | Path) -> Path:
        """Run Claude Code on tasks; returns the run's directory."""
        directory = self.directory / name
        summary = self.command(
            "run", "embedded", *arguments, "--tasks", tasks, *_AGENT, *self.seed, "--output-dir", directory
        )
        self.say(f"{name}: {summary['solved']} of {summary['rollouts']} tasks solved in {summary['wall_s']:.0f} s")
        return directory

    def imitate(self, name: str, dataset: Path, *arguments: str) -> Path:
        """Train the tiny model on what the teacher did; returns the new model's directory."""
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
