"""`understudy train`: trains a model on samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer
from msgspec import Struct

from understudy.cli.commands.loop import loop, model_directory
from understudy.cli.options import command, command_group
from understudy.cli.output import Json, print_json
from understudy.cli.progress import ProgressLine
from understudy.cli.settings import roles_of
from understudy.errors import ConfigError
from understudy.train.options import DPOOptions, GRPOOptions, SFTOptions
from understudy.train.teacher import TeacherSettings
from understudy.util.settings import option

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from understudy.train.algorithms.trl import TrainingContext, TrainingSummary
    from understudy.train.algorithms.updater import GRPOSummary
    from understudy.train.engines.llamafactory import LlamaFactorySummary
    from understudy.train.groups import RolloutGroup, TokenSequence
    from understudy.trajectory.roles import Role

app = command_group("Train a model on what a run gathered: imitate, prefer, reinforce.")


class TrainingSettings(Struct, frozen=True, kw_only=True):
    """The options of every training, besides those of its trainer."""

    model: Annotated[
        str,
        option(
            "A model's directory, a GGUF file, a fetched model's name, or tiny for the model shipped with "
            "Understudy.",
            argument=True,
            metavar="MODEL",
        ),
    ]
    sources: Annotated[
        tuple[Path, ...],
        option("What to learn from: a run's output directory, or an export; repeatable.", "--from", metavar="DIR"),
    ]
    output: Annotated[
        Path, option("The directory for the new model; must be empty.", "--output", "-o", metavar="DIR")
    ]
    run: Annotated[str | None, option("Only learn from rollouts of this run.")] = None
    include_suspicious: Annotated[
        bool, option("Also learn from rollouts whose patch may deceive the grader.", "--include-suspicious")
    ] = False
    config: Annotated[
        Path | None, option("A TOML file with options in a table [sft], [dpo] or [grpo].", metavar="FILE.toml")
    ] = None
    resume: Annotated[bool, option("Continue from the last checkpoint in DIR.", "--resume")] = False
    checkpoint: Annotated[Path | None, option("Continue from this checkpoint.", metavar="DIR")] = None
    overwrite: Annotated[bool, option("Replace the model, or the unfinished training, in DIR.", "--overwrite")] = (
        False
    )
    save_steps: Annotated[
        int, option("Optimizer steps between checkpoints [default: once per epoch; for grpo none].", ge=0)
    ] = 0
    track: Annotated[
        str, option("Also report metrics to tensorboard, wandb or mlflow.", metavar="auto|none|NAME,…")
    ] = "auto"

    @property
    def resume_from(self) -> bool | Path:
        """The checkpoint to continue from, or True for the last one, or False."""
        return self.checkpoint or self.resume


class _RoleSettings(TrainingSettings, frozen=True, kw_only=True):
    """A training that learns from calls with some roles."""

    roles: Annotated[
        str | None,
        option(
            "Only learn from calls with these roles: main, subagent, compaction, auxiliary [default: "
            "main,subagent]."
        ),
    ] = None

    @property
    def chosen_roles(self) -> tuple[Role, ...]:
        """Return the roles that `roles` names. Raises ConfigError for an unknown one."""
        from understudy.types import WORK_ROLES

        return roles_of(self.roles, WORK_ROLES)


class SFTSettings(_RoleSettings, frozen=True, kw_only=True):
    """The options of `understudy train sft`."""

    table: ClassVar[str] = "sft"
    threshold: Annotated[float, option("The minimum reward of a rollout to imitate.")] = 1.0
    engine: Annotated[Literal["trl", "llamafactory"], option("The training engine.")] = "trl"
    trainer: SFTOptions = SFTOptions()


class DPOSettings(TrainingSettings, frozen=True, kw_only=True):
    """The options of `understudy train dpo`."""

    table: ClassVar[str] = "dpo"
    trainer: DPOOptions = DPOOptions()


class GRPOSettings(_RoleSettings, frozen=True, kw_only=True):
    """The options of `understudy train grpo`."""

    table: ClassVar[str] = "grpo"
    groups_per_update: Annotated[int, option("Number of task groups per update [default: all].", ge=0)] = 0
    trainer: GRPOOptions = GRPOOptions()


class DistillSettings(_RoleSettings, frozen=True, kw_only=True):
    """The options of `understudy train distill`. The options of its updates are in the table [grpo]."""

    table: ClassVar[str] = "distill"
    groups_per_update: Annotated[int, option("Number of task groups per update [default: all].", ge=0)] = 0
    teacher: TeacherSettings = TeacherSettings()
    trainer: GRPOOptions = GRPOOptions()


@command
def sft(settings: SFTSettings, json_: Json = False) -> None:
    """Imitate rollouts that solved their task (supervised fine-tuning). Only sampled tokens are learned.

    From a run's output, or an export in the format trl-tokens, the tokens are exactly those that were sampled;
    from an export in the format trl-sft, they come from the model's own chat template.
    """
    directory = model_directory(settings.model)
    _refuse_selection_in_exports(settings, settings.roles)
    if settings.engine == "llamafactory":
        _train_with_llamafactory(directory, settings, json_)
        return
    from understudy.model.directory import require_packages
    from understudy.train.algorithms.trl import train_sft
    from understudy.train.weights import TRL_PACKAGES

    require_packages(*TRL_PACKAGES)
    progress = StepProgress("sft")
    context = _training_context(progress, settings)
    sequences = sequences_to_imitate(directory, settings, context.left_out)
    with _claim_output(settings, directory), progress:
        result = train_sft(directory, sequences, settings.output, settings.trainer, context)
    text = f"learned {result.tokens} sampled tokens of {result.rows} sequences in {_steps_and_loss(result)}"
    print_training(result, f"{result.output}: {text}", json_)


@command
def dpo(settings: DPOSettings, json_: Json = False) -> None:
    """Prefer actions that solved a task to those that did not, where two of its rollouts first differ (DPO).

    From a run's output, or an export in the format trl-dpo, which may also hold teachers' preferences.
    """
    from understudy.model.directory import require_packages
    from understudy.train.algorithms.trl import load_preference_pairs, train_dpo
    from understudy.train.weights import TRL_PACKAGES

    require_packages(*TRL_PACKAGES)
    _refuse_selection_in_exports(settings)
    progress = StepProgress("dpo")
    context = _training_context(progress, settings)
    directory = model_directory(settings.model)
    pairs = load_preference_pairs(
        settings.sources,
        directory,
        run=settings.run,
        include_suspicious=settings.include_suspicious,
        left_out=context.left_out,
    )
    with _claim_output(settings, directory), progress:
        result = train_dpo(directory, pairs, settings.output, settings.trainer, context)
    print_training(result, f"{result.output}: learned {result.rows} pairs in {_steps_and_loss(result)}", json_)


@command
def grpo(settings: GRPOSettings, json_: Json = False) -> None:
    """Make rollouts that did better than their group likelier, and worse ones less likely, token by token (GRPO).

    From a run's output, or an export in the format trl-tokens, with token ids and logprobs.
    """
    left_out = Counter[str]()
    directory, loaded = _sampled_groups(settings, left_out)
    _update_policy(settings, settings.trainer, directory, loaded, left_out, "grpo", json_)


@command
def distill(settings: DistillSettings, json_: Json = False) -> None:
    """Move a student towards a teacher, by the teacher's logprobs of tokens that the student sampled.

    The rollouts are the student's own, from a run's output or an export in the format trl-tokens. A token's
    advantage is how much likelier the teacher finds it (reverse KL); --reward-coefficient adds the advantage of
    the reward. The teacher must have the student's vocabulary.
    """
    import asyncio

    from understudy.train.teacher import open_teacher

    if settings.teacher.teacher is None:
        raise ConfigError(
            "missing option --teacher; give the URL of the teacher's server, or a model's directory or name"
        )
    options = settings.teacher.options(settings.trainer)
    left_out = Counter[str]()
    directory, loaded = _sampled_groups(settings, left_out)

    async def scored() -> list[RolloutGroup]:
        async with open_teacher(settings.teacher, directory) as teacher:
            return await teacher.with_logprobs(loaded, left_out)

    groups = asyncio.run(scored())
    _update_policy(settings, options, directory, groups, left_out, "distill", json_)


def _sampled_groups(
    settings: GRPOSettings | DistillSettings, left_out: Counter[str]
) -> tuple[Path, list[RolloutGroup]]:
    """Return the model's directory, and the groups that it can be updated with. Raises ConfigError."""
    from understudy.model.directory import require_packages
    from understudy.train.groups import load_groups
    from understudy.train.render import check_tokenizer_matches

    require_packages()
    _refuse_selection_in_exports(settings, settings.roles)
    directory = model_directory(settings.model)
    check_tokenizer_matches(settings.sources, directory, settings.run)
    loaded = load_groups(
        settings.sources,
        run=settings.run,
        roles=settings.chosen_roles,
        include_suspicious=settings.include_suspicious,
        logprobs=settings.trainer.correction != "none",
        temperature=settings.trainer.temperature,
        left_out=left_out,
    )
    return directory, list(loaded)


def _update_policy(
    settings: GRPOSettings | DistillSettings,
    options: GRPOOptions,
    directory: Path,
    groups: list[RolloutGroup],
    left_out: Counter[str],
    name: str,
    json_: bool,
) -> None:
    """Make the updates, and print the result."""
    from understudy.train.algorithms.updater import train_grpo
    from understudy.train.metrics import parse_trackers

    trackers = parse_trackers(settings.track)
    with _claim_output(settings, directory), StepProgress(name) as progress:
        result = train_grpo(
            directory,
            groups,
            settings.output,
            options,
            groups_per_update=settings.groups_per_update,
            left_out=left_out,
            resume=settings.resume_from,
            trackers=trackers,
            on_update=lambda report, of: progress(
                report.step, of, {"reward": report.reward_mean, "loss": report.loss, "grad_norm": report.grad_norm}
            ),
            save_steps=settings.save_steps,
        )
    text = (
        f"{result.output}: {result.updated} of {result.updates} updates over {result.groups} groups learned from "
        f"{result.tokens} sampled tokens, {result.seconds:.0f} s; logprobs differ from those sampled with by "
        f"{result.mismatch_mean:.2g} (at most {result.mismatch_max:.2g})"
    )
    print_training(result, text, json_, result.skipped)


app.command("sft", short_help="Imitate what solved the tasks.")(sft)
app.command("dpo", short_help="Prefer what solved a task to what did not.")(dpo)
app.command("grpo", short_help="Reinforce what did better than its group.")(grpo)
app.command("distill", short_help="Move towards a teacher, on one's own rollouts.")(distill)
app.command("loop", short_help="Collect, grade, update, publish, and again.")(loop)


def _training_context(progress: StepProgress, settings: TrainingSettings) -> TrainingContext:
    """Return how a training with TRL proceeds: checkpoints and trackers.

    Raises ConfigError for an unknown tracker.
    """
    from understudy.train.algorithms.trl import TrainingContext
    from understudy.train.metrics import parse_trackers

    trackers = parse_trackers(settings.track)
    return TrainingContext(
        resume=settings.resume_from, trackers=trackers, on_step=progress, save_steps=settings.save_steps
    )


def _claim_output(settings: TrainingSettings, model: Path) -> AbstractContextManager[None]:
    """Claim the output directory for this training."""
    from understudy.train.weights import lock_output

    needed = [model, *settings.sources, *([settings.checkpoint] if settings.checkpoint else [])]
    return lock_output(
        settings.output, resume=bool(settings.resume_from), overwrite=settings.overwrite, needed=needed
    )


def _steps_and_loss(result: TrainingSummary | LlamaFactorySummary) -> str:
    loss = f"loss {result.first_loss:.4f} → {result.last_loss:.4f}"
    return f"{result.steps} steps, {result.seconds:.0f} s; {loss}"


def _train_with_llamafactory(model: Path, settings: SFTSettings, as_json: bool) -> None:
    """Train with LLaMA-Factory. Raises ConfigError for options that it does not support."""
    from understudy.train.engines import llamafactory

    unsupported = {
        "--threshold": settings.threshold != 1.0,
        "--resume": settings.resume,
        "--checkpoint": settings.checkpoint,
        "--overwrite": settings.overwrite,
        "--save-steps": settings.save_steps,
        "--track": settings.track not in ("auto", "none"),
        "--micro-batch-tokens": settings.trainer.micro_batch_tokens != SFTOptions().micro_batch_tokens,
    }
    if rejected := [option for option, value in unsupported.items() if value]:
        raise ConfigError(
            f"{', '.join(rejected)}: unsupported with --engine llamafactory; leave this out, or use --engine trl"
        )
    result = llamafactory.train(
        model,
        settings.sources,
        settings.output,
        settings.trainer,
        run=settings.run,
        roles=settings.chosen_roles,
        include_suspicious=settings.include_suspicious,
        on_line=lambda line: typer.echo(line, err=True),
    )
    text = f"LLaMA-Factory learned {result.rows} conversations in {_steps_and_loss(result)}"
    print_training(result, f"{result.output}: {text}", as_json)


# --- training data -------------------------------------------------------------------------------------


def _refuse_selection_in_exports(settings: TrainingSettings, roles: str | None = None) -> None:
    options = {"--run": settings.run, "--roles": roles, "--include-suspicious": settings.include_suspicious}
    refuse_options_for_exports(settings.sources, options)


def refuse_options_for_exports(sources: Sequence[Path], options: Mapping[str, object]) -> None:
    """Raise ConfigError if a source is an export and an option is given that selects rollouts."""
    from understudy.train.groups import is_export

    chosen = next((option for option, value in options.items() if value), None)
    if chosen is not None and (export := next(filter(is_export, sources), None)) is not None:
        raise ConfigError(
            f"{chosen} selects rollouts, but {export} is an export, whose rollouts were selected when it was "
            f"written; leave out {chosen}, or export again with it"
        )


def sequences_to_imitate(model: Path, settings: SFTSettings, left_out: Counter[str]) -> list[TokenSequence]:
    """Return the sequences to imitate, from stores and exports. Raises ConfigError if there are none."""
    from understudy.train.groups import export_format, format_counts, load_groups
    from understudy.train.render import check_tokenizer_matches, sequences_from_export

    sequences: list[TokenSequence] = []
    exact: list[Path] = []
    for source in settings.sources:
        if export_format(source) == "trl-sft":
            if settings.threshold != 1.0:
                raise ConfigError(
                    f"--threshold: the conversations of an export, such as {source}, have no rewards; leave out "
                    "--threshold"
                )
            sequences += sequences_from_export(source, model, left_out)
        else:
            exact.append(source)
    check_tokenizer_matches(exact, model, settings.run)
    loaded = load_groups(
        exact,
        run=settings.run,
        roles=settings.chosen_roles,
        include_suspicious=settings.include_suspicious,
        logprobs=False,
        imitation=True,
        left_out=left_out,
    )
    for group in loaded:
        for rollout in group.rollouts:
            if rollout.reward >= settings.threshold:
                sequences += rollout.sequences
            else:
                left_out[f"rollouts with a reward below {settings.threshold:g}"] += 1
    if not sequences:
        remedy = (
            "collect more rollouts, or lower --threshold"
            if any(left_out.values())
            else "collect rollouts with `understudy run`; sessions must be exported first, with `understudy "
            "export trl-sft STORE --output DATA`, for --from DATA"
        )
        raise ConfigError(
            f"no solved rollouts to learn from in {', '.join(map(str, settings.sources))} (left out: "
            f"{format_counts(left_out)}); {remedy}"
        )
    return sequences


def print_training(
    result: TrainingSummary | GRPOSummary | LlamaFactorySummary,
    text: str,
    as_json: bool,
    skipped: Mapping[str, int] | None = None,
) -> None:
    """Print the result to stdout, as JSON or as `text`. With the text, what was left out is printed to stderr."""
    if as_json:
        print_json(result)
        return
    for how, reasons in (("left out", result.left_out), ("skipped", skipped or {})):
        for why, count in reasons.items():
            typer.echo(f"{how}: {count} {why}", err=True)
    typer.echo(text)


class StepProgress:
    """Shows the progress of a training on stderr: each step on a terminal, otherwise every twentieth part."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = ProgressLine(plain_s=math.inf)
        self._reported = 0

    def __enter__(self) -> StepProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.end()

    def __call__(self, step: int, of: int, numbers: dict[str, float]) -> None:
        """Show a step."""
        figures = [f"{name} {numbers[name]:.4g}" for name in ("reward", "loss", "grad_norm") if name in numbers]
        twentieth = step * 20 // max(of, 1)
        text = " · ".join([f"{self._name}: step {step} of {of}", *figures])
        self._line.show(text, at_once=step == of or twentieth > self._reported)
        self._reported = twentieth
