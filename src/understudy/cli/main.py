"""The entry point of `understudy`: how errors and interrupts are reported.

The commands are imported inside `main`, so that Ctrl-C during the import is handled like any other.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise

from understudy.cli import EXIT_ERROR, EXIT_INTERRUPTED
from understudy.errors import ConfigError

_RENAMED_OPTIONS = {
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


_READ_DATABASES = (
    "run", "worker", "status", "store", "du", "prune", "show", "integrity", "states", "pairs", "export", "report",
    "view", "replay",
)  # fmt: skip
_DATABASE_OPTIONS = {"ingest": ("--dir", "-d"), "grade": ("--regrade",)}
"""Options, besides `--store`, of commands that accept a database there."""
_DATABASE = re.compile(r"(?:--?[\w-]+=)?(postgres(?:ql)?://.*)", re.DOTALL)


def refuse_databases(arguments: Sequence[str]) -> None:
    """Raise ConfigError if a command that needs a store's directory is given a database's URL."""
    if not arguments or arguments[0] in _READ_DATABASES:
        return
    options = ("--store", *_DATABASE_OPTIONS.get(arguments[0], ()))
    for before, argument in pairwise(arguments):
        if before in options or argument.startswith(tuple(f"{option}=" for option in options)):
            continue
        if match := _DATABASE.fullmatch(argument):
            from understudy.store.address import StoreUrl

            url = StoreUrl(match[1])  # this hides its password
            raise ConfigError(
                f"understudy {arguments[0]} needs a directory, and {url} is a database; copy the store into a "
                f"directory with: understudy store copy '{url}' DIRECTORY"
            )


def refuse_old_spelling(arguments: Sequence[str]) -> None:
    """Raise ConfigError with the current command line if these arguments use the old syntax."""
    if not arguments:
        return
    backend_first = arguments[0] in _BACKENDS
    starts_run = backend_first or arguments[0] == "run" or arguments[0].startswith("--")
    if backend_first or (starts_run and any(_OLD_OPTION.fullmatch(argument) for argument in arguments)):
        raise ConfigError(
            f"this command line uses an old syntax that was removed; use:\n  {current_spelling(arguments)}"
        )


def current_spelling(arguments: Sequence[str]) -> str:
    """Return the current command line for arguments in the old syntax, quoted for a shell."""
    remaining = list(arguments[1:] if arguments[:1] == ["run"] else arguments)
    backend = remaining.pop(0) if remaining and remaining[0] in _BACKENDS else "vllm"
    official = "--official" in remaining
    options: list[str] = []
    while remaining:
        argument = remaining.pop(0)
        if not _OLD_OPTION.fullmatch(argument):
            options.append(argument)
            continue
        name, equals, value = argument.removeprefix("--").replace("_", "-", argument.count("_")).partition("=")
        if equals:
            value = argument.partition("=")[2]
        elif name != "official" and remaining:
            value = remaining.pop(0)
        name = _RENAMED_OPTIONS.get(name, name)
        if name == "base-url" and "://" not in value:
            value = f"http://{value}"
        # --official meant Anthropic's own API, which needs no address.
        if name != "official" and not (official and name == "base-url"):
            options += [f"--{name}", value]
    backend = "anthropic" if official else backend
    if backend in ("vllm", "openai") and "--backend-model-high" not in options:
        options[:0] = ["--backend-model-high", "MODEL"]
    return shlex.join(["understudy", "run", backend, *options])


_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 done with failures, 2 a named error, 130 interrupted."""
    try:
        _buffer_output()
        _replace_what_cannot_be_printed()
        from understudy.errors import UnderstudyError

        try:
            from understudy.cli.app import app
            from understudy.cli.main import refuse_databases, refuse_old_spelling

            refuse_old_spelling(sys.argv[1:])
            refuse_databases(sys.argv[1:])
            try:
                app()
            finally:
                sys.stdout.flush()  # imported here, so that errors of the import are reported below
        except UnderstudyError as error:
            from understudy.util.text import visible

            _end(visible(f"{error.boundary} error: {error}"), EXIT_ERROR)
        except OSError as error:
            if error.errno not in (*_WRITE_ERRORS, errno.EPIPE):
                raise
            # Python would flush the rest at exit and fail again, so redirect it to nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if error.errno == errno.EPIPE:
                sys.exit(1)  # not an error: the reader has closed the pipe (`| head`)
            reason = f"cannot write to stdout or to a file: {error.strerror}"
            _end(f"{reason}; check the disk's free space and quota, then run the same command again", EXIT_ERROR)
    except KeyboardInterrupt:
        _end("interrupted", EXIT_INTERRUPTED)


def _buffer_output() -> None:
    """Give stdout a buffer if PYTHONUNBUFFERED has taken it away; each line is written at once all the same.

    Without one, a signal in the middle of a long line, as at the end of a child, cuts the line off silently.
    """
    raw = getattr(sys.stdout, "buffer", None)
    if isinstance(raw, io.RawIOBase):
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=True)


def _replace_what_cannot_be_printed() -> None:
    """Print characters that the terminal's encoding lacks, and invalid Unicode in file names, as `?`."""
    # Tests and notebooks may have replaced the streams by other kinds of files.
    reconfigure: Callable[..., None] | None = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def _end(message: str, code: int) -> None:
    print(f"understudy: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(code)
