"""The whole loop on a laptop, in the commands that a person would type.

A tiny model that we pretrained works on small tasks through the real Claude Code CLI. It imitates a teacher, and
then learns from its own graded rollouts; what it can do is measured each time on held-out tasks, whose names and
files it never saw. Every rate comes from rollouts that were graded, none from the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from understudy.train.tiny.corpus import SYSTEM_PROMPT, TOOLS

UNDERSTUDY = Path(sys.executable).with_name("understudy")
MODEL = "tiny"
AGENT = (
    *("--tools", TOOLS, "--max-turns", "6", "--answer-tokens", "200"),
    *("--system-prompt", SYSTEM_PROMPT),
)
SFT = ("--learning-rate", "3e-4", "--epochs", "3", "--batch-rollouts", "8")
WEAK_SFT = ("--learning-rate", "1e-4", "--epochs", "1", "--batch-rollouts", "8")
GRPO = ("--learning-rate", "3e-4", "--mini-batches", "2")
EVALUATED_AT = "0.5"
"""The temperature at which the held-out tasks are tried; what is learned from is sampled at 1."""

EVALUATION = ("--evaluation", "--temperature", EVALUATED_AT)

LEAST_GAIN = {"sft": 0.5, "grpo": 0.2}
"""By how much the solve rates must rise."""


class Demo:
    """The commands of one demo; the files of each seed are in a directory of their own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.place: Path = options.directory / f"seed-{options.seed}"
        self.place.mkdir(parents=True, exist_ok=True)
        self.seed = ("--seed", str(options.seed))
        self.began = time.monotonic()

    def understudy(self, *arguments: str | Path) -> dict[str, Any]:
        """Run a command with `--json`, its progress passed through, and return what it printed."""
        texts = [str(argument) for argument in arguments]
        print(f"\n$ understudy {shlex.join(texts)}", flush=True)
        done = subprocess.run([UNDERSTUDY, *texts, "--json"], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"demo: the command above ended with exit code {done.returncode}\n{done.stdout}")
        return json.loads(done.stdout)

    def tasks(self, split: str, count: int) -> Path:
        """The tasks of a split, made once."""
        path = self.place / f"{split}.jsonl"
        if not path.exists():
            wanted = ("--split", split, "--count", str(count), *self.seed, "--output", path)
            self.understudy("tasks", "make", "functions", *wanted)
        return path

    def run(self, name: str, tasks: Path, *arguments: str | Path) -> Path:
        """Run Claude Code on tasks; what it did is in the directory that is returned."""
        where = self.place / name
        summary = self.understudy(
            "run", "embedded", *arguments, "--tasks", tasks, *AGENT, *self.seed, "--output-dir", where
        )
        self.say(f"{name}: {summary['solved']} of {summary['rollouts']} tasks solved in {summary['wall_s']:.0f} s")
        return where

    def imitate(self, name: str, teacher: Path, *arguments: str) -> Path:
        """Train the tiny model on what the teacher did."""
        where = self.place / name
        if not (where / "config.json").exists():
            wanted = ("--from", teacher, "--output", where, "--overwrite", *self.seed, *arguments)
            self.understudy("train", "sft", MODEL, *wanted)
        return where

    def say(self, text: str) -> None:
        """Print a line with the time since the demo began."""
        print(f"[{time.monotonic() - self.began:4.0f} s] {text}", flush=True)


def arguments() -> argparse.Namespace:
    """What the demo was asked for."""
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "1")), help="of everything")
    parser.add_argument("--directory", type=Path, default=Path("runs/demo"))
    parser.add_argument("--tasks", type=int, default=64, help="to learn from")
    parser.add_argument("--evaluated", type=int, default=64, help="held-out tasks")
    parser.add_argument("--steps", type=int, default=7, help="of GRPO")
    parser.add_argument("--groups", type=int, default=8, help="tasks a step")
    parser.add_argument("--samples", type=int, default=6, help="rollouts a task")
    parser.add_argument("--no-check", action="store_true", help="whatever the figures are, end with 0")
    return parser.parse_args()


def main() -> None:
    """Run the demo; exits with 1 when the model did not get better."""
    options = arguments()
    demo = Demo(options)
    train, held_out = demo.tasks("train", options.tasks), demo.tasks("held-out", options.evaluated)

    base = demo.run("1-untrained", held_out, "--weights", MODEL, *EVALUATION)

    teacher = demo.run("2-teacher", train, "--policy", "terse")
    lessons = demo.place / "lessons"
    if not lessons.exists():
        demo.understudy("export", "trl-sft", teacher, "--output", lessons, "--solved-only")
    student = demo.imitate("sft", lessons, *SFT)
    imitated = demo.run("3-sft", held_out, "--weights", student, *EVALUATION)

    beginner = demo.imitate("beginner", lessons, *WEAK_SFT)
    loop = demo.place / "4-loop"
    demo.understudy(
        *("train", "loop", beginner, "--tasks", train, "--eval-tasks", held_out),
        *("--steps", str(options.steps), "--groups", str(options.groups), "--samples", str(options.samples)),
        *(*GRPO, "--eval-temperature", EVALUATED_AT, *AGENT, *demo.seed, "--output-dir", loop),
    )
    demo.understudy("report", loop, "--png")

    ends = [loop / "evaluations" / f"step-{step:04}" for step in (0, options.steps)]
    labels = ("untrained", "after SFT", "before GRPO", "after GRPO")
    named = [word for label in labels for word in ("--label", label)]
    page = demo.place / "demo.html"
    report = demo.understudy("report", base, imitated, *ends, *named, "--png", "--output", page)
    subprocess.run([UNDERSTUDY, "report", base, imitated, *ends, *named, "--output", page], check=True)
    rates = [point["solve_rate"] for point in report["points"]]
    for label, rate in zip(labels, rates, strict=True):
        demo.say(f"{label:12} {rate['estimate']:.2f} ({rate['low']:.2f} to {rate['high']:.2f})")
    demo.say(f"the pages: {page}, {loop / 'report.html'}")
    untrained, sft, weak, grpo = rates
    gains = {"sft": sft["estimate"] - untrained["estimate"], "grpo": grpo["estimate"] - weak["estimate"]}
    short = [name for name, least in LEAST_GAIN.items() if gains[name] < least]
    if grpo["low"] <= weak["high"]:
        short.append("the intervals of GRPO touch")
    if short and not options.no_check:
        sys.exit(f"demo: less was gained than expected ({', '.join(short)}): {gains}")


if __name__ == "__main__":
    main()
