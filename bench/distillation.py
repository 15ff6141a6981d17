"""What a student learns from a teacher: by imitation, and by distillation on its own rollouts, as many of each.

    python bench/distillation.py [--model MODEL] [--directory DIR] [--seeds N,N,...] [--quarter] [--json FILE]

The teacher is a model after the SFT of `understudy demo`: the shipped `tiny`, or `smollm2-135m`. The student is
`tiny` as shipped; SmolLM2 as published makes no tool call, so its student has imitated a quarter as many rollouts
as its teacher, and is evaluated too. Both work on generated tasks through the real Claude Code CLI. For each seed,
with its own tasks, samples and trainings:

- SFT: the teacher works on the training tasks, and the student imitates the exact tokens that it sampled: of all
  rollouts, or only of those that solved their task.
- Distillation: the student works on the same tasks, as many times, and learns from the teacher's logprobs of what
  it sampled (reverse KL), in a loop that collects each step's rollouts with the newest weights.

All have the same number of rollouts, of passes over them, of optimizer steps, and of rollouts in each step, but
for SFT on solved rollouts, which has fewer (and is left out for SmolLM2, whose teacher solves most of its tasks).
With `--quarter` there are three arms more: SFT on the first quarter of the teacher's rollouts, once as above and
once without the decay of its learning rate, since the loop's rate is constant; and the loop's weights after a
quarter of its steps. Every model is evaluated on the same held-out tasks with the same seeds, so that differences
are paired by task; their intervals are Newcombe's for pairs. CPU time is that of a command and its children. The
costs of an arm are those of collecting its rollouts and of training on them.

A step that ended is not repeated: the same command goes on after the last one. The figures go to
bench/results/distillation.json (distillation-MODEL.json for another model than `tiny`) unless `--json` says where.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from understudy.cli.demo.steps import DemoSteps
from understudy.cli.demo.training import EVALUATION, MODELS
from understudy.model.directory import TINY
from understudy.model.pretrained import PINNED
from understudy.store import Store
from understudy.train.tiny.corpus import SYSTEM_PROMPT, TOOLS
from understudy.util.files import atomic_write
from understudy.util.statistics import newcombe_paired, wilson

RESULTS = Path(__file__).parent / "results"
TEACHER_SEED = 1
GROUPS, SAMPLES, STEPS = 4, 2, 8
"""Tasks of a step of the loop, rollouts of each, and steps."""
TASKS, ROLLOUTS = GROUPS * STEPS, GROUPS * SAMPLES * STEPS
PASSES = 3
PASS_OPTIONS = ("--epochs", str(PASSES))
SFT_OPTIONS = (*PASS_OPTIONS, "--batch-rollouts", str(GROUPS * SAMPLES))
ARMS = ("SFT", "SFT, solved", "distillation")


class Subject(Struct, frozen=True, kw_only=True):
    """What is compared with one model of the demonstration."""

    model: str
    teacher_tasks: int
    student_tasks: int
    """Tasks whose rollouts by a scripted policy the student has imitated; 0: it is the model itself."""
    held_out: int
    sft: tuple[str, ...]
    """Options of the SFT on the teacher's rollouts."""
    distillation: tuple[str, ...]
    """Options of the loop that distills."""
    arms: tuple[str, ...] = ARMS


SUBJECTS = {
    TINY: Subject(
        model=TINY,
        teacher_tasks=64,
        student_tasks=0,
        held_out=64,
        sft=("--learning-rate", "3e-4"),
        distillation=("--learning-rate", "3e-4"),
    ),
    "smollm2-135m": Subject(
        model="smollm2-135m",
        teacher_tasks=192,
        student_tasks=48,
        held_out=104,
        sft=("--learning-rate", "1e-4", "--micro-batch-tokens", "2304"),
        distillation=("--learning-rate", "1e-4", "--micro-batch-tokens", "2304"),
        arms=("student", "SFT", "distillation"),
    ),
}
OF_A_QUARTER = ("SFT, quarter", "SFT, quarter, constant rate", "distillation, quarter")
COMPARED = (
    *(("student", "SFT"), ("student", "distillation")),
    *(("SFT", "distillation"), ("SFT, solved", "distillation"), ("SFT", "SFT, solved")),
    *((arm, "distillation, quarter") for arm in OF_A_QUARTER[:2]),
)
"""Pairs of arms: how many more tasks the second one solves."""


class Cost(Struct, frozen=True):
    """What commands took: seconds of wall clock, and of CPU time of the commands and their children."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


class Step(Struct, frozen=True):
    """A command that ended: what it printed, and its cost."""

    output: dict[str, Any]
    cost: Cost


class Arm(Struct, frozen=True):
    """One way to make a model: its steps, and the tokens in its loss, each counted once per pass."""

    model: Path
    steps: tuple[Step, ...] = ()
    rollouts: int = 0
    learned_tokens: int = 0
    teacher_kl: tuple[float, float] | None = None
    """The reverse KL to the teacher per sampled token, in nats, in the first and the last update."""

    @property
    def cost(self) -> Cost:
        """The cost of all its steps."""
        return sum((step.cost for step in self.steps), Cost())


class Experiment(DemoSteps):
    """The commands of one directory. A step leaves a record in `steps/`; one without a record begins anew."""

    def __init__(self, directory: Path, subject: Subject) -> None:
        super().__init__(directory)
        self.subject, self._settings = subject, MODELS[subject.model]
        limits = ("--max-turns", "6", "--answer-tokens", str(self._settings.answer_tokens))
        self.agent = ("--tools", TOOLS, *limits, "--system-prompt", SYSTEM_PROMPT)
        self.run_options = self._settings.run_options
        if subject.model in PINNED:
            self.step(directory / "fetched", "models", "fetch", subject.model)

    def step(self, output: Path, *arguments: str | Path) -> Step:
        """Run a command that writes to `output`, unless it ended before."""
        record = self.directory / "steps" / f"{output.relative_to(self.directory)}.json".replace("/", "-")
        if record.exists():
            return msgspec.json.decode(record.read_bytes(), type=Step)
        if output.is_dir():
            shutil.rmtree(output)
        output.unlink(missing_ok=True)
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        printed = self.command(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        ended = Step(printed, Cost(time.monotonic() - began, cpu_s))
        record.parent.mkdir(exist_ok=True)
        atomic_write(record, msgspec.json.encode(ended))
        return ended

    def tasks(self, name: str, split: str, count: int, seed: int) -> Path:
        """Return the file with the tasks of a split."""
        path = self.directory / f"{name}.jsonl"
        options = ("--split", split, "--count", str(count), "--seed", str(seed), "--output", path)
        self.step(path, "tasks", "make", "functions", *options)
        return path

    def rollouts(self, name: str, tasks: Path, seed: int, *options: str | Path) -> tuple[Path, Step]:
        """Run the embedded model on tasks. Returns the run's directory and the step."""
        directory = self.directory / name
        common = ("--tasks", tasks, *self.agent, *self.run_options, "--seed", str(seed), "--output-dir", directory)
        ended = self.step(directory, "run", "embedded", *options, *common)
        self.say(
            f"{name}: {ended.output['solved']} of {ended.output['rollouts']} solved, {ended.cost.cpu_s:.0f} CPU-s"
        )
        return directory, ended

    def trained(self, name: str, *command: str | Path) -> tuple[Path, Step]:
        """Run `understudy train` with `command`. Returns the new model's directory and the step."""
        directory = self.directory / name
        return directory, self.step(directory, "train", *command, "--output", directory)

    def teacher(self) -> Path:
        """Return the teacher's directory: the model that `understudy demo` has after its SFT."""
        return self._imitator("teacher", self.subject.teacher_tasks, TEACHER_SEED)

    def student(self) -> str | Path:
        """Return the student, a model's name or directory."""
        count = self.subject.student_tasks
        return self._imitator("student", count, TEACHER_SEED) if count else self.subject.model

    def _imitator(self, name: str, count: int, seed: int) -> Path:
        """Return the directory of the model after it imitated a scripted policy on `count` tasks."""
        tasks = self.tasks(f"{name}-tasks", "train", count, seed)
        lessons, _ = self.rollouts(f"{name}-lessons", tasks, seed, "--policy", "terse")
        dataset = self.directory / f"{name}-dataset"
        self.step(dataset, "export", "trl-sft", lessons, "--output", dataset, "--solved-only")
        options = ("--from", dataset, "--seed", str(seed), *self._settings.sft)
        return self.trained(name, "sft", self.subject.model, *options)[0]


class Comparison:
    """The arms of one seed."""

    def __init__(self, experiment: Experiment, teacher: Path, student: str | Path, seed: int) -> None:
        self.experiment, self.teacher, self.student, self.number = experiment, teacher, student, seed
        self.tasks = experiment.tasks(f"{seed}-train", "train", TASKS, seed)
        self.held_out = experiment.tasks(f"{seed}-held-out", "held-out", experiment.subject.held_out, seed)

    def arm(self, name: str) -> Arm:
        """Return an arm of the subject or of `OF_A_QUARTER`, making it if needed."""
        match name:
            case "student":
                return Arm(Path(self.student))
            case "SFT":
                return self._imitation("sft", "0")
            case "SFT, solved":
                return self._imitation("sft-solved", "1")
            case "SFT, quarter":
                return self._imitation("sft-quarter", "0", quarter=True)
            case "SFT, quarter, constant rate":
                return self._imitation("sft-quarter-constant", "0", "--schedule", "constant", quarter=True)
            case "distillation":
                return self._loop(quarter=False)
            case _:
                return self._loop(quarter=True)

    def evaluated(self, name: str, arm: Arm) -> dict[str, bool | None]:
        """Return whether an arm's model solved each held-out task; None where there is no verdict."""
        label = f"{self.number}-evaluation-{name.replace(',', '').replace(' ', '-')}"
        options = ("--weights", arm.model, *EVALUATION)
        run, ended = self.experiment.rollouts(label, self.held_out, self.number, *options)
        with Store.open(run, create=False) as store:
            counts = store.outcomes.by_task(ended.output["run_id"])
        return {task: one.solved > 0 if one.graded else None for task, one in counts.items()}

    def _sampled(self) -> list[tuple[Path, Step]]:
        """The teacher's rollouts on the training tasks, in two runs: the first quarter of them, and the rest."""
        lines = self.tasks.read_text(encoding="utf-8").splitlines(keepends=True)
        runs: list[tuple[Path, Step]] = []
        for part, chosen in (("first", lines[: TASKS // 4]), ("rest", lines[TASKS // 4 :])):
            path = self.tasks.with_name(f"{self.number}-train-{part}.jsonl")
            path.write_text("".join(chosen), encoding="utf-8")
            sampling = ("--weights", self.teacher, "--temperature", "1", "--samples", str(SAMPLES))
            runs.append(
                self.experiment.rollouts(f"{self.number}-teacher-rollouts-{part}", path, self.number, *sampling)
            )
        return runs

    def _imitation(self, name: str, threshold: str, *schedule: str, quarter: bool = False) -> Arm:
        runs = self._sampled()[: 1 if quarter else 2]
        sources = [part for run, _ in runs for part in ("--from", run)]
        recipe = (*self.experiment.subject.sft, *SFT_OPTIONS, *schedule)
        options = ("--threshold", threshold, "--seed", str(self.number), *recipe)
        model, trained = self.experiment.trained(f"{self.number}-{name}", "sft", self.student, *sources, *options)
        rollouts = sum(step.output["rollouts"] for _, step in runs)
        return Arm(model, (*(step for _, step in runs), trained), rollouts, trained.output["tokens"] * PASSES)

    def _loop(self, *, quarter: bool) -> Arm:
        directory = self.experiment.directory / f"{self.number}-loop"
        ended = self.experiment.step(
            directory,
            *("train", "loop", self.student, "--teacher", self.teacher, "--tasks", self.tasks),
            *("--steps", str(STEPS), "--groups", str(GROUPS), "--samples", str(SAMPLES), "--keep", str(STEPS)),
            *(*self.experiment.subject.distillation, *PASS_OPTIONS, *self.experiment.run_options),
            *(*self.experiment.agent, "--seed", str(self.number), "--output-dir", directory),
        )
        if quarter:  # The weights on the way; what they took is a part of what the whole loop took.
            weights = directory / "steps" / f"step-{STEPS // 4:04}" / "weights"
            return _distilled(weights, (), directory / "metrics.jsonl", STEPS // 4)
        return _distilled(Path(ended.output["weights"]), (ended,), directory / "metrics.jsonl", STEPS)


def _distilled(model: Path, steps: tuple[Step, ...], metrics: Path, updates: int) -> Arm:
    """The arm of the first updates of a distillation, with what its metrics say."""
    reports = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()][:updates]
    tokens = sum(each["tokens"] for each in reports) * PASSES
    kl = (reports[0]["teacher_kl"], reports[-1]["teacher_kl"])
    return Arm(model, steps, sum(each["rollouts"] for each in reports), tokens, kl)


# --- the table

Solved = Mapping[str, bool | None]


def pairs(before: Sequence[Solved], after: Sequence[Solved]) -> list[tuple[float, float]]:
    """The held-out tasks of some seeds that have a verdict in both arms: whether each solved it."""
    return [
        (float(first[task] or 0), float(last[task] or 0))
        for first, last in zip(before, after, strict=True)
        for task in first
        if first[task] is not None and last.get(task) is not None
    ]


def share(solved: Sequence[Solved]) -> dict[str, Any]:
    """The solved held-out tasks of some seeds, with Wilson's interval."""
    verdicts = [verdict for each in solved for verdict in each.values() if verdict is not None]
    rate = wilson(sum(verdicts), len(verdicts))
    return {"solved": sum(verdicts), "tasks": len(verdicts), "low": rate.low, "high": rate.high}


def row(arm: Arm, solved: Solved) -> dict[str, Any]:
    """The figures of one arm and seed."""
    return {
        **share([solved]),
        "rollouts": arm.rollouts,
        "learned_tokens": arm.learned_tokens,
        "teacher_kl": arm.teacher_kl,
        "cpu_s": arm.cost.cpu_s,
        "wall_s": arm.cost.wall_s,
    }


def difference(before: Sequence[Solved], after: Sequence[Solved]) -> dict[str, Any]:
    """How many more tasks the second arm solved, paired by task, with Newcombe's interval."""
    both = pairs(before, after)
    gain = newcombe_paired(both)
    return {
        "gained": sum(first < last for first, last in both),
        "lost": sum(first > last for first, last in both),
        "tasks": len(both),
        "difference": gain.estimate,
        "low": gain.low,
        "high": gain.high,
    }


def print_rows(seed: int, rows: Mapping[str, dict[str, Any]]) -> None:
    """Print the arms of one seed."""
    print(f"\nseed {seed:<32}{'solved':>10}{'95 %':>15}{'rollouts':>10}{'tokens':>9}{'CPU-s':>8}{'wall s':>8}  KL")
    for name, one in rows.items():
        kl = "" if one["teacher_kl"] is None else "{:.3f} → {:.3f}".format(*one["teacher_kl"])
        print(
            f"{name:<37}{one['solved']:>4} of {one['tasks']:<4}{one['low']:>6.2f} to {one['high']:.2f}"
            f"{one['rollouts']:>9}{one['learned_tokens']:>9}{one['cpu_s']:>8.0f}{one['wall_s']:>8.0f}  {kl}"
        )


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SUBJECTS, default=TINY, help="whose student and teacher")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--directory", type=Path, help="for runs and models [default: runs/distillation]")
    parser.add_argument("--seeds", default="1,2,3", metavar="N,N,...")
    parser.add_argument("--quarter", action="store_true", help="also with a quarter of the rollouts")
    options = parser.parse_args()
    name = "distillation" if options.model == TINY else f"distillation-{options.model}"
    directory, figures_file = options.directory or Path("runs") / name, options.json or RESULTS / f"{name}.json"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arms = [*SUBJECTS[options.model].arms, *(OF_A_QUARTER if options.quarter else ())]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    experiment = Experiment(directory.absolute(), SUBJECTS[options.model])
    teacher, student = experiment.teacher(), experiment.student()
    rows: dict[int, dict[str, dict[str, Any]]] = {}
    solved: dict[str, list[Solved]] = {name: [] for name in arms}
    for seed in seeds:
        comparison = Comparison(experiment, teacher, student, seed)
        rows[seed] = {}
        for name in arms:
            arm = comparison.arm(name)
            solved[name].append(comparison.evaluated(name, arm))
            rows[seed][name] = row(arm, solved[name][-1])
        print_rows(seed, rows[seed])
    differences: dict[str, dict[str, Any]] = {}
    print(f"\n{'difference, paired by task':<62}{'gained':>8}{'lost':>6}{'difference':>12}{'95 %':>18}")
    for before, after in COMPARED:
        if before not in arms or after not in arms:
            continue
        for label, span in [
            *((f"seed {seed}", slice(number, number + 1)) for number, seed in enumerate(seeds)),
            ("all seeds", slice(None)),
        ]:
            one = difference(solved[before][span], solved[after][span])
            differences[f"{after} - {before}, {label}"] = one
            print(
                f"{f'{after} - {before}, {label}':<62}{one['gained']:>8}{one['lost']:>6}"
                f"{one['difference']:>+12.2f}{one['low']:>+9.2f} to {one['high']:+.2f}"
            )
    figures_file.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "arms": rows,
        "over all seeds": {name: share(each) for name, each in solved.items()},
        "differences": differences,
    }
    figures_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
