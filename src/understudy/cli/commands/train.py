"""`understudy train`: samples become a better model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy.cli.commands.train_sources import imitated, refuse_of_exports, roles_of
from understudy.cli.display.train_progress import Steps, tell
from understudy.cli.options import command, filled
from understudy.errors import ConfigError
from understudy.train.options import DPOOptions, GRPOOptions, SFTOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Many
    from contextlib import AbstractContextManager

    from understudy.train.algorithms.trl import TrainingContext, TrainingSummary
    from understudy.train.engines.llamafactory import LlamaFactorySummary

app = typer.Typer(no_args_is_help=True, help="Train a model on what a run gathered: imitate, prefer, reinforce.")

_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's directory, or tiny: the one that comes with us.")
]
_From = Annotated[
    list[Path],
    typer.Option(
        "--from", metavar="DIR", help="What to learn from: a run's output, or an export. Can be given again."
    ),
]
_Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="The directory of the new model; must be empty.")
]
_Run = Annotated[str | None, typer.Option("--run", help="Rollouts of which run only.")]
_Roles = Annotated[
    str | None,
    typer.Option(
        help="Only calls of these roles: main, subagent, compaction, auxiliary [default: main,subagent]."
    ),
]
_Suspicious = Annotated[
    bool, typer.Option("--include-suspicious", help="Also rollouts whose patch may deceive the grader.")
]
_Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.toml", help="Options from a table [sft], [dpo] or [grpo].")
]
_Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in DIR.")]
_Checkpoint = Annotated[
    Path | None, typer.Option("--checkpoint", metavar="DIR", help="Go on from this checkpoint.")
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the model, or the training, in DIR.")]
_SaveSteps = Annotated[
    int, typer.Option("--save-steps", min=0, help="Optimizer steps between checkpoints [default: an epoch].")
]
_Track = Annotated[
    str, typer.Option("--track", metavar="auto|none|NAME,…", help="Also tell tensorboard, wandb, mlflow.")
]
_Engine = Annotated[str, typer.Option("--engine", metavar="trl|llamafactory", help="What trains.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the summary.")]


def sft(
    *,
    model: _Model,
    from_: _From,
    output: _Output,
    run: _Run = None,
    roles: _Roles = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="The least reward of a rollout that is imitated.")
    ] = 1.0,
    include_suspicious: _Suspicious = False,
    config: _Config = None,
    resume: _Resume = False,
    checkpoint: _Checkpoint = None,
    overwrite: _Overwrite = False,
    save_steps: _SaveSteps = 0,
    track: _Track = "auto",
    engine: _Engine = "trl",
    json_: _Json = False,
    options: dict[str, Any],
) -> None:
    """Imitate what solved the tasks: the loss is on the sampled tokens alone.

    From a run's output, or an export in the format trl-tokens, with the tokens as they were sampled; from an
    export in the format trl-sft by the model's own chat template.
    """
    from understudy.cli.commands.loop import model_directory

    settings = filled(SFTOptions, options, config, "sft")
    directory = model_directory(model)
    refuse_of_exports(from_, {"--run": run, "--roles": roles, "--include-suspicious": include_suspicious})
    if engine == "llamafactory":
        ours = {
            "--threshold": threshold != 1.0,
            "--resume": resume,
            "--checkpoint": checkpoint,
            "--overwrite": overwrite,
            "--save-steps": save_steps,
            "--track": track not in ("auto", "none"),
            "--micro-batch-tokens": settings.micro_batch_tokens != SFTOptions().micro_batch_tokens,
        }
        _by_llamafactory(directory, from_, output, settings, run, roles, include_suspicious, json_, ours)
        return
    if engine != "trl":
        raise ConfigError(f"--engine: {engine!r} is none of trl, llamafactory")
    from understudy.train.algorithms.sft import train_sft
    from understudy.train.requirements import FULL, need

    need(*FULL)
    steps = Steps("sft")
    course = _course(steps, checkpoint or resume, track, save_steps)
    sequences = imitated(directory, from_, run, roles, threshold, include_suspicious, course.left_out)
    with _claim(output, (directory, *from_), course.resume, overwrite), steps:
        made = train_sft(directory, sequences, output, settings, course)
    words = f"learned {made.tokens} sampled tokens of {made.rows} sequences in {_steps_and_loss(made)}"
    tell(made, f"{made.output}: {words}", json_)


def dpo(
    *,
    model: _Model,
    from_: _From,
    output: _Output,
    run: _Run = None,
    include_suspicious: _Suspicious = False,
    config: _Config = None,
    resume: _Resume = False,
    checkpoint: _Checkpoint = None,
    overwrite: _Overwrite = False,
    save_steps: _SaveSteps = 0,
    track: _Track = "auto",
    json_: _Json = False,
    options: dict[str, Any],
) -> None:
    """Prefer what solved a task to what did not, where two rollouts of it first did something else.

    From a run's output, or an export in the format trl-dpo, which may also hold what teachers prefer.
    """
    from understudy.cli.commands.loop import model_directory
    from understudy.train.algorithms.dpo import preferences, train_dpo
    from understudy.train.requirements import FULL, need

    settings = filled(DPOOptions, options, config, "dpo")
    need(*FULL)
    refuse_of_exports(from_, {"--run": run, "--include-suspicious": include_suspicious})
    steps = Steps("dpo")
    course = _course(steps, checkpoint or resume, track, save_steps)
    directory = model_directory(model)
    pairs = preferences(from_, directory, run=run, include_suspicious=include_suspicious, left_out=course.left_out)
    with _claim(output, (directory, *from_), course.resume, overwrite), steps:
        made = train_dpo(directory, pairs, output, settings, course)
    tell(made, f"{made.output}: learned {made.rows} pairs in {_steps_and_loss(made)}", json_)


def grpo(
    *,
    model: _Model,
    from_: _From,
    output: _Output,
    run: _Run = None,
    roles: _Roles = None,
    include_suspicious: _Suspicious = False,
    groups_per_update: Annotated[
        int, typer.Option("--groups-per-update", min=0, help="Groups that make one update [default: all].")
    ] = 0,
    config: _Config = None,
    resume: _Resume = False,
    checkpoint: _Checkpoint = None,
    overwrite: _Overwrite = False,
    save_steps: Annotated[
        int, typer.Option("--save-steps", min=0, help="Updates between checkpoints [default: none].")
    ] = 0,
    track: _Track = "auto",
    json_: _Json = False,
    options: dict[str, Any],
) -> None:
    """Make what did better than its group likelier, and what did worse unlikelier, by the exact tokens.

    From a run's output, or an export in the format trl-tokens, with token ids and logprobs.
    """
    from understudy.cli.commands.loop import model_directory
    from understudy.train import metrics
    from understudy.train.data.load import groups
    from understudy.train.data.tokenizer_check import check_tokenizer_matches
    from understudy.train.requirements import need

    settings = filled(GRPOOptions, options, config, "grpo")
    need()
    refuse_of_exports(from_, {"--run": run, "--roles": roles, "--include-suspicious": include_suspicious})
    trackers = metrics.chosen(track)
    directory = model_directory(model)
    check_tokenizer_matches(from_, directory, run)
    left_out = Counter[str]()
    read = groups(
        from_,
        run=run,
        roles=roles_of(roles),
        include_suspicious=include_suspicious,
        logprobs=settings.correction != "none",
        temperature=settings.temperature,
        left_out=left_out,
    )
    found = list(read)
    from understudy.train.algorithms.grpo import train_grpo

    with _claim(output, (directory, *from_), checkpoint or resume, overwrite), Steps("grpo") as steps:
        made = train_grpo(
            directory,
            found,
            output,
            settings,
            groups_per_update=groups_per_update,
            left_out=left_out,
            resume=checkpoint or resume,
            trackers=trackers,
            watch=lambda report, of: steps(
                report.step, of, {"reward": report.reward_mean, "loss": report.loss, "grad_norm": report.grad_norm}
            ),
            save_steps=save_steps,
        )
    words = (
        f"{made.output}: {made.updated} of {made.updates} updates over {made.groups} groups learned from "
        f"{made.tokens} sampled tokens, {made.seconds:.0f} s; logprobs differ from those sampled with by "
        f"{made.mismatch_mean:.2g} (at most {made.mismatch_max:.2g})"
    )
    tell(made, words, json_, made.skipped)


def _course(told: Steps, resume: bool | Path, track: str, save_steps: int) -> TrainingContext:
    """How a training through TRL goes. Raises ConfigError when a tracker is none."""
    from understudy.train.algorithms.trl import TrainingContext
    from understudy.train.metrics import chosen

    return TrainingContext(resume=resume, trackers=chosen(track), on_step=told, save_steps=save_steps)


def _claim(
    output: Path, needed: tuple[Path, ...], resume: bool | Path, overwrite: bool
) -> AbstractContextManager[None]:
    """The output as this training's own; `resume` is a checkpoint to go on from, or whether to go on at all."""
    from understudy.train.output_dir import claim

    needed = (*needed, resume) if isinstance(resume, Path) else needed
    return claim(output, resume=bool(resume), overwrite=overwrite, needed=needed)


def _steps_and_loss(made: TrainingSummary | LlamaFactorySummary) -> str:
    loss = f"loss {made.first_loss:.4f} → {made.last_loss:.4f}"
    return f"{made.steps} steps, {made.seconds:.0f} s; {loss}"


def _by_llamafactory(
    model: Path,
    sources: Many[Path],
    output: Path,
    settings: SFTOptions,
    run: str | None,
    roles: str | None,
    include_suspicious: bool,
    as_json: bool,
    ours: Mapping[str, object],
) -> None:
    """Have LLaMA-Factory train; `ours` are options that it does not know, true where they were given."""
    from understudy.train.engines import llamafactory

    if given := [option for option, value in ours.items() if value]:
        raise ConfigError(f"{given[0]} means nothing to LLaMA-Factory; leave it out, or train by --engine trl")

    made = llamafactory.train(
        model,
        sources,
        output,
        settings,
        run=run,
        roles=roles_of(roles),
        include_suspicious=include_suspicious,
        on_line=lambda line: typer.echo(line, err=True),
    )
    words = f"LLaMA-Factory learned {made.rows} conversations in {_steps_and_loss(made)}"
    tell(made, f"{made.output}: {words}", as_json)


app.command("sft", short_help="Imitate what solved the tasks.")(command(sft, SFTOptions))
app.command("dpo", short_help="Prefer what solved a task to what did not.")(command(dpo, DPOOptions))
app.command("grpo", short_help="Reinforce what did better than its group.")(command(grpo, GRPOOptions))
