"""The options of a trainer as options of its command: a field of its struct each; a TOML file has them too."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from understudy.errors import ConfigError

T = TypeVar("T")

_HELP = {
    "learning_rate": "The learning rate at its height.",
    "weight_decay": "What is taken off the weights, by share of the learning rate.",
    "beta1": "AdamW's first.",
    "beta2": "AdamW's second.",
    "warmup_steps": "Optimizer steps in which the learning rate grows to its height.",
    "max_grad_norm": "The gradient is cut to this length.",
    "epochs": "How often the same data are gone through.",
    "max_tokens": "Longer sequences are left out, and counted.",
    "micro_batch_tokens": "Tokens that go through the model at once; lower it where memory runs out.",
    "precision": "auto is bf16 on a GPU that has it.",
    "gradient_checkpointing": "Less memory, more time.",
    "seed": "Of all that is drawn.",
    "batch_rollouts": "Sequences that make one optimizer step.",
    "schedule": "How the learning rate goes down.",
    "beta": "How strongly the policy is held to the reference.",
    "label_smoothing": "How often a preference is taken to be the wrong way round.",
    "batch_pairs": "Pairs that make one optimizer step.",
    "advantage": "What a rollout is compared with: its group's mean and deviation, its mean, the others' mean.",
    "loss": "Which ratio is clipped, and how.",
    "clip_low": "How far below 1 a ratio counts [default: by the loss].",
    "clip_high": "How far above 1 [default: by the loss].",
    "normalisation": "What a token weighs.",
    "constant_tokens": "What a rollout's sum is divided by under --normalisation constant.",
    "correction": "What is done about tokens that another policy sampled.",
    "truncate_at": "The most that such a token weighs under --correction truncate.",
    "band_low": "Where the band of --correction band begins.",
    "band_high": "Where it ends.",
    "kl_coefficient": "Above 0 the policy is held to the model that training began with.",
    "entropy_coefficient": "Above 0 an undecided policy is rewarded.",
    "temperature": "What the rollouts were sampled with.",
    "dynamic_sampling": "Leave out groups whose rewards are all equal.",
    "overlong_tokens": "Sampled tokens at which a rollout's reward is 1 lower [default: length costs nothing].",
    "overlong_buffer": "Over how many tokens before that the penalty grows.",
    "mini_batches": "Optimizer steps of an update.",
}
_LORA = {
    "rank": "Of the adapter.",
    "alpha": "Its scale, times its rank.",
    "dropout": "Of its input.",
    "modules": "Layers that get one, with commas between them [default: all linear ones].",
}
_LORA_PREFIX = "lora_"


def options_of(kind: type[Any]) -> list[inspect.Parameter]:
    """The parameters of a command for the fields of a struct of options, None where nothing is said."""
    import msgspec

    from understudy.train.options import LoraOptions

    found: list[inspect.Parameter] = []
    for each in msgspec.structs.fields(kind):
        if each.name == "lora":
            found.append(_parameter("lora", bool, False, "Train an adapter in place of all weights."))
            for own in msgspec.structs.fields(LoraOptions):
                found.append(_parameter(_LORA_PREFIX + own.name, own.type, own.default, _LORA.get(own.name, "")))
        else:
            found.append(_parameter(each.name, each.type, each.default, _HELP.get(each.name, "")))
    return found


def filled(kind: Callable[..., T], given: Mapping[str, Any], config: Path | None, table: str) -> T:
    """The struct of options: what was `given`, else what a table of the file `config` says, else its defaults.

    Raises ConfigError naming what makes no sense.
    """
    import msgspec

    values = {} if config is None else _table(config, table)
    lora: Any = values.get("lora")
    own = {key.removeprefix(_LORA_PREFIX): value for key, value in given.items() if key.startswith(_LORA_PREFIX)}
    own = {key: value for key, value in own.items() if value is not None}
    if isinstance(own.get("modules"), str):
        own["modules"] = [part.strip() for part in own["modules"].split(",") if part.strip()]
    wanted = given.get("lora")
    if own and wanted is False:
        raise ConfigError("--no-lora: and yet there are options of the adapter; leave one or the other out")
    if wanted is False:
        values.pop("lora", None)
    elif wanted or own or isinstance(lora, dict):
        values["lora"] = {**(lora if isinstance(lora, dict) else {}), **own}
    said = {key: value for key, value in given.items() if value is not None}
    values |= {key: value for key, value in said.items() if key != "lora" and not key.startswith(_LORA_PREFIX)}
    try:
        return msgspec.convert(values, kind)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except msgspec.ValidationError as error:
        where = f"{config}: [{table}]" if config is not None else "options"
        raise ConfigError(f"{where}: {error}") from error


def command(body: Callable[..., None], kind: type[Any]) -> Callable[..., None]:
    """A command with the parameters of `body`, but `options`, and with the options of a trainer.

    `body` is called with its own parameters, and with what was said of the trainer's as `options`.
    """
    hints = inspect.get_annotations(body, eval_str=True)
    own = [
        each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(body).parameters.values()
        if each.name != "options"
    ]
    more = options_of(kind)
    names = {each.name for each in more}

    def run(**given: Any) -> None:
        body(options={name: given.pop(name) for name in names}, **given)

    run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*own, *more)}
    run.__doc__ = body.__doc__
    run.__name__ = body.__name__
    return run


def _parameter(name: str, kind: Any, default: Any, told: str) -> inspect.Parameter:
    plain, choices = _plain(kind)
    flag = "--" + name.replace("_", "-")
    more: dict[str, Any] = {}
    if choices:
        more["metavar"] = "|".join(choices)
    if default is not None and plain is not bool and default != ():
        told = f"{told} [default: {default}]"
    if plain is bool:
        told = f"{told} [default: {'yes' if default else 'no'}]" if name != "lora" else told
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    option = typer.Option(flag, help=told, show_default=False, rich_help_panel=None, **more)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, option]
    )


def _plain(kind: Any) -> tuple[Any, tuple[str, ...]]:
    """The type of an option's value, and the words it can be where it is a choice."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is Literal:
        return str, get_args(kind)
    return (str if get_origin(kind) is tuple else kind), ()


def _table(path: Path, name: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from error
    if name not in content:
        raise ConfigError(f"{path}: has no table [{name}]; it has: {', '.join(content) or 'nothing'}")
    found = content[name]
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {name} must be a table, as [{name}]")
    return dict(found)  # pyright: ignore[reportUnknownArgumentType]
