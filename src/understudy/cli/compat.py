"""Command lines of the example that Understudy grew out of: refused, with the one to use now."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from understudy.errors import ConfigError

_RENAMED = {
    "model-name-or-path": "backend-model-high",
    "server-address": "base-url",
    "max-step": "max-turns",
}
_BACKENDS = ("vllm", "anthropic", "openai", "sglang", "embedded")
_OLD_OPTION = re.compile(
    r"--(official|(?:dataset_path|output_dir|base_url|max_turns|(?:back|front)end_model_(?:high|low)|cooldown_seconds"
    r"|model_name_or_path|server_address|max_step))(=.*)?",
    re.DOTALL,
)


def refuse_old_spelling(arguments: Sequence[str]) -> None:
    """Raise ConfigError with the command line to use when these arguments are in the old spelling."""
    if not arguments:
        return
    backend_first = arguments[0] in _BACKENDS
    starts_run = backend_first or arguments[0] == "run" or arguments[0].startswith("--")
    if backend_first or (starts_run and any(_OLD_OPTION.fullmatch(argument) for argument in arguments)):
        raise ConfigError(f"this is an older spelling; the command is now:\n  {current_spelling(arguments)}")


def current_spelling(arguments: Sequence[str]) -> str:
    """The command line that does now what these arguments did, ready for a shell."""
    rest = list(arguments[1:] if arguments[:1] == ["run"] else arguments)
    backend = rest.pop(0) if rest and rest[0] in _BACKENDS else "vllm"
    official = "--official" in rest
    options: list[str] = []
    while rest:
        argument = rest.pop(0)
        if not _OLD_OPTION.fullmatch(argument):
            options.append(argument)
            continue
        name, equals, value = argument.removeprefix("--").replace("_", "-", argument.count("_")).partition("=")
        if equals:
            value = argument.partition("=")[2]
        elif name != "official" and rest:
            value = rest.pop(0)
        name = _RENAMED.get(name, name)
        if name == "base-url" and "://" not in value:
            value = f"http://{value}"
        # --official asked Anthropic itself, so it needs no address.
        if name != "official" and not (official and name == "base-url"):
            options += [f"--{name}", value]
    backend = "anthropic" if official else backend
    if backend in ("vllm", "openai") and "--backend-model-high" not in options:
        options[:0] = ["--backend-model-high", "MODEL"]
    return shlex.join(["understudy", "run", backend, *options])
