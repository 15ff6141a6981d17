"""`understudy pairs`: makes preference pairs from replays and rollouts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import typer
from msgspec import Struct

from understudy.cli import EXIT_INTERRUPTED
from understudy.cli.interrupts import interrupt_on_termination
from understudy.cli.options import command
from understudy.cli.output import Json, counted, print_json
from understudy.cli.progress import LiveStatus, live
from understudy.cli.settings import thinking_of
from understudy.cli.templates import chat_template
from understudy.errors import ConfigError
from understudy.export.parquet import json_bytes
from understudy.preference.checks import Checks, Limits, Pair, PairCounts
from understudy.preference.consensus import MINIMUM
from understudy.preference.pairs import replay_pairs
from understudy.preference.rollouts import rollout_pairs
from understudy.redact.redactor import Redactor
from understudy.redact.report import write_report_beside
from understudy.store import Store
from understudy.store.address import parse_location
from understudy.types import SCHEMA
from understudy.util.files import atomic_path
from understudy.util.settings import option

_ORIGINS = ("replay", "rollouts", "all")
_COMPARED_ITEMS = {
    "replay": "states that teachers answered about",
    "rollouts": "pairs of a solved and an unsolved rollout",
}


class PairSettings(Struct, frozen=True, kw_only=True):
    """The options of `understudy pairs`: which pairs to make, and from what."""

    table: ClassVar[str] = "pairs"
    origin: Annotated[str, option("What to make pairs from.", "--from", metavar="replay|rollouts|all")] = "all"
    minimum: Annotated[int, option("Number of teachers that must agree.", ge=1)] = MINIMUM
    where: Annotated[
        str | None, option('Only states that match this SQL condition, such as "tool_errors > 0".', metavar="SQL")
    ] = None
    run: Annotated[str | None, option("Only rollouts of this run [default: all].")] = None
    include_suspicious: Annotated[
        bool, option("Also rollouts whose patch may deceive the grader.", "--include-suspicious")
    ] = False
    include_lossy: Annotated[
        bool, option("Also states whose log lacks part of what the model saw.", "--include-lossy")
    ] = False
    thinking: Annotated[
        str,
        option(
            "The thinking in the two answers: keep as logged; only pairs where both have it; strip it; or keep "
            "it only if both have it.",
            metavar="as-logged|both|strip|only-when-both",
        ),
    ] = "only-when-both"
    most: Annotated[int, option("Maximum number of pairs from the rollouts of one task.", ge=1)] = 16
    tokenizer: Annotated[
        Path | None, option("Only pairs that this tokenizer's chat template can render.", metavar="MODEL_DIR")
    ] = None
    max_chars: (
        Annotated[int, option("Maximum length of a prompt with its longer answer, in characters.", ge=1)] | None
    ) = None
    max_tokens: Annotated[int, option("The same limit in tokens; needs --tokenizer.", ge=1)] | None = None
    redacted: Annotated[
        bool, option("Do not redact the secrets, names and paths in the sessions.", "--unredacted", off=True)
    ] = True
    config: Annotated[Path | None, option("A TOML file with options in a table [pairs].", metavar="FILE.toml")] = (
        None
    )


@command
def pairs(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="The directory or database of a store: of a run, or of sessions and replays."
        ),
    ],
    settings: PairSettings,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.jsonl",
            help="The file to write, with one pair a line [default: only count the pairs].",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Make preference pairs: a chosen and a rejected action after the same messages.

    From a replay: what the teachers agree on (chosen) and what the session did (rejected), where the two differ in
    effect. From rollouts of one task: what a solved and an unsolved one did where they first differ. Without
    --output the pairs are only counted.
    """
    if settings.origin not in _ORIGINS:
        raise ConfigError(f"--from: unknown value {settings.origin!r}; give one of {', '.join(_ORIGINS)}")
    if settings.max_tokens is not None and settings.tokenizer is None:
        raise ConfigError(
            "--max-tokens: needs a tokenizer to count with; give --tokenizer MODEL_DIR, or use --max-chars"
        )
    thinking = thinking_of(settings.thinking) or "only-when-both"
    interrupt_on_termination()
    redactor = Redactor.from_user_key() if settings.redacted else None
    tallies = {origin: PairCounts() for origin in _ORIGINS[:2] if settings.origin in (origin, "all")}
    limits = Limits(chars=settings.max_chars, tokens=settings.max_tokens)
    try:
        with (
            Store.open(parse_location(directory), create=False) as store,
            chat_template(settings.tokenizer) as template,
            live(PairProgress(tallies), sys.stderr),
        ):
            checks = Checks(limits, template, thinking)
            found_pairs = _pairs(store, settings, redactor, checks, tallies)
            if output is None:
                for _ in found_pairs:
                    pass
            else:
                _write(found_pairs, output)
                write_report_beside(output, redactor and redactor.report)
    except KeyboardInterrupt:
        typer.echo("understudy: interrupted; nothing was written", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _print_summary(tallies, output, redactor, json_)


def _pairs(
    store: Store,
    settings: PairSettings,
    redactor: Redactor | None,
    checks: Checks,
    tallies: Mapping[str, PairCounts],
) -> Iterator[Pair]:
    """Yield the pairs from each origin that has a tally."""
    if "replay" in tallies:
        yield from replay_pairs(
            store,
            minimum=settings.minimum,
            where=settings.where,
            redactor=redactor,
            include_lossy=settings.include_lossy,
            checked=checks,
            tally=tallies["replay"],
        )
    if "rollouts" in tallies:
        yield from rollout_pairs(
            store,
            settings.run,
            include_suspicious=settings.include_suspicious,
            redactor=redactor,
            most=settings.most,
            checked=checks,
            tally=tallies["rollouts"],
        )


def _write(pairs: Iterator[Pair], output: Path) -> None:
    """Write the pairs, all or none, readable for the user only. Raises ConfigError if that fails."""

    if output.is_dir():
        raise ConfigError(f"--output: {output} is a directory; name a file, such as {output / 'pairs.jsonl'}")
    try:
        with atomic_path(output) as path:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for pair in pairs:
                    file.write(json_bytes({**msgspec.to_builtins(pair), "schema": SCHEMA}) + b"\n")
    except OSError as error:
        raise ConfigError(
            f"--output: {output}: cannot be written: {error.strerror}; check the free disk space and the "
            "permissions of its directory, or choose another --output"
        ) from error


class PairProgress(LiveStatus):
    """The number of comparisons so far. It is polled, because very many comparisons may give no pair."""

    def __init__(self, tallies: Mapping[str, PairCounts]) -> None:
        super().__init__()
        self._tallies = tallies.values()

    def line(self) -> str:
        """Return the number of comparisons and pairs so far; "" before the first."""
        compared, pairs = (
            sum(tally.compared for tally in self._tallies),
            sum(tally.pairs for tally in self._tallies),
        )
        return f"compared {compared}, {pairs} pairs" if compared else ""


def _print_summary(
    tallies: dict[str, PairCounts], output: Path | None, redactor: Redactor | None, as_json: bool
) -> None:
    name = None if output is None else os.fsencode(output).decode(errors="replace")
    replaced = {} if redactor is None else dict(redactor.report.counts.most_common())
    if as_json:
        summary = {"output": name, "pairs": sum(tally.pairs for tally in tallies.values()), **tallies}
        print_json({**summary, "redacted": redactor is not None, "replaced": replaced})
        return
    where = f"are in {name}" if name else "would be written"
    for origin, tally in tallies.items():
        typer.echo(f"from {origin}: {tally.pairs} pairs of {tally.compared} {_COMPARED_ITEMS[origin]} {where}")
        for reason, count in tally.left_out.most_common():
            typer.echo(f"left out: {count} {reason}", err=True)
        for reason, count in tally.answers.most_common():
            typer.echo(f"answers of teachers without a vote: {count} {reason}", err=True)
        for reason, count in tally.notes.most_common():
            if count:
                typer.echo(f"not compared: {count} {reason}", err=True)
    if replaced:
        typer.echo("replaced: " + counted(replaced), err=True)
    if redactor is not None and name:
        typer.echo(f"the list of replacements is in {name}.redaction.json", err=True)
    if redactor is None and name:
        typer.echo(f"warning: {name} is not redacted and may contain secrets; do not share it", err=True)
