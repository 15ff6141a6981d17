"""Command lines in the spelling of the example that Understudy began from, answered with the present one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from understudy.errors import ConfigError

_OPTIONS = {
    "--model_name_or_path": "--backend-model-high",
    "--server_address": "--base-url",
    "--dataset_path": "--dataset-path",
    "--max_step": "--max-turns",
    "--max_turns": "--max-turns",
    "--output_dir": "--output-dir",
    "--base_url": "--base-url",
    "--backend_model_high": "--backend-model-high",
    "--backend_model_low": "--backend-model-low",
    "--frontend_model_high": "--frontend-model-high",
    "--frontend_model_low": "--frontend-model-low",
    "--cooldown_seconds": "--cooldown-seconds",
}
_OFFICIAL = "--official"
_WAYS = ("vllm", "anthropic", "openai", "sglang", "embedded")


def refuse_former(arguments: Sequence[str]) -> None:
    """Raise ConfigError with the command line to use when these arguments are in the former spelling."""
    begins_a_run = bool(arguments) and (arguments[0] in ("run", *_WAYS) or arguments[0].startswith("--"))
    options = {argument.partition("=")[0] for argument in arguments}
    without_run = bool(arguments) and arguments[0] in _WAYS
    if begins_a_run and (without_run or options & {_OFFICIAL, *_OPTIONS}):
        raise ConfigError(f"this is an older spelling; the command is now:\n  {present(arguments)}")


def present(arguments: Sequence[str]) -> str:
    """The present command line of former arguments, ready for a shell."""
    words = list(arguments[1:] if arguments[:1] == ["run"] else arguments)
    way = words.pop(0) if words and words[0] in _WAYS else ""
    official = _OFFICIAL in words or way == "anthropic"
    options = [
        (name, value)
        for name, value in _pairs(words)
        # It was the address of the server that --official did without.
        if name != _OFFICIAL and not (_OFFICIAL in words and name == "--base-url")
    ]
    way = "anthropic" if official else way or "vllm"
    if way in ("vllm", "openai") and "--backend-model-high" not in dict(options):
        options.insert(0, ("--backend-model-high", "MODEL"))
    flat = [word for name, value in options for word in ([name] if value is None else [name, value])]
    return shlex.join(["understudy", "run", way, *flat])


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each option by its present name, with its value where it has one."""
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        takes_next = not equals and name.startswith("--") and rest and not rest[0].startswith("--")
        if takes_next:
            value = rest.pop(0)
        name = _OPTIONS.get(name, name)
        if name == "--base-url" and value and "://" not in value:
            value = f"http://{value}"
        yield name, value if equals or takes_next else None
