"""Makes commands whose options are the fields of a settings struct (see `understudy.util.settings`)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import typer
from msgspec import Struct

from understudy.errors import ConfigError
from understudy.util.settings import Option, build, options_of, read_toml, require_table


def command_group(help_text: str, **more: Any) -> typer.Typer:
    """Return a command that contains other commands."""
    # Rich's markup would treat "[default: …]" in a help text as a style, and drop it.
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None, add_completion=False, **more)


_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration_s(option: str, text: str) -> float:
    """Parse a duration with a unit into seconds. Raises ConfigError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{option}: invalid duration {text!r}; give a number with a unit, such as 90m, 8h or 30d"
        )
    return float(match[1]) * _SECONDS[match[2]]


def command(body: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the parameters of `body`. A parameter that is a settings struct becomes options.

    The struct's field `config`, if it has one, names a TOML file with its tables. `body` gets the struct with
    values from the command line, then from the file, then defaults. If the class attribute `needs_table` is false,
    the file may have only other tables.
    """
    hints = inspect.get_annotations(body, eval_str=True)
    parameters: list[inspect.Parameter] = []
    settings: list[tuple[str, type[Struct]]] = []
    for parameter in inspect.signature(body).parameters.values():
        hint = hints[parameter.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            settings.append((parameter.name, hint))
            parameters += [_parameter(option) for option in options_of(hint)]
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    names = {name: [option.name for option in options_of(kind)] for name, kind in settings}

    def run(**options: Any) -> None:
        for name, kind in settings:
            values = {option: _plain(options.pop(option)) for option in names[name]}
            options[name] = from_options(kind, values)
        body(**options)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = body.__doc__
    run.__name__ = body.__name__
    return run


def from_options(kind: type[Any], options: dict[str, Any]) -> Any:
    """Return the settings from the command line's options and the file that they name. Raises ConfigError."""
    config = options.get("config")
    if config is None:
        return build(kind, options, {})
    file = read_toml(Path(config))
    if getattr(kind, "needs_table", True):
        require_table(file, kind, str(config))
    return build(kind, options, file, str(config))


def _plain(value: Any) -> Any:
    """Convert a value of the command line for the settings. An empty list means that the option was not given."""
    if isinstance(value, Enum):
        return value.value
    return None if value == [] else value


def _parameter(option: Option) -> inspect.Parameter:
    """Return the command parameter for an option. Its default is None, which tells options that were not given."""
    extra = option.extra
    constraints: dict[str, Any] = {}
    kind = _type(option)
    flags = [*extra.get("flags", ())] or ["--" + option.name.strip("_").replace("_", "-")]
    if option.type is bool and not extra.get("flags"):
        flags[0] += f"/--no-{flags[0].removeprefix('--')}"
    if kind in (int, float):
        constraints = {"min": option.meta.ge, "max": option.meta.le}
    if extra.get("metavar"):
        constraints["metavar"] = extra["metavar"]
    constraints |= {"help": _help(option), "show_default": False}
    required = option.default is msgspec.NODEFAULT
    if extra.get("argument"):
        kind, info = kind if required else kind | None, typer.Argument(**constraints)
    else:
        if extra.get("off"):
            flags = [f" /{flag}" for flag in flags]
        kind, info = kind if required else kind | None, typer.Option(*flags, **constraints)
    default = inspect.Parameter.empty if required else None
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _type(option: Option) -> Any:
    """Return the type of an option for Typer."""
    if option.choices:
        return StrEnum(option.name, [(choice, choice) for choice in option.choices])
    if get_origin(option.type) is tuple:
        return str if option.extra.get("commas") else list[get_args(option.type)[0]]
    return option.type


def _help(option: Option) -> str:
    """Return an option's help, with its default appended unless the text already has one."""
    text, default = option.meta.description or "", option.default
    if "[default:" in text or option.switch or default in (None, msgspec.NODEFAULT, "", ()):
        return text
    if isinstance(default, bool):
        # A switch that only turns something on or off needs no default.
        return text if option.extra.get("flags") else f"{text} [default: {'yes' if default else 'no'}]"
    return f"{text} [default: {default}]"
