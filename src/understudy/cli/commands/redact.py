"""`understudy redact preview`: shows what a redaction would replace, before an export is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.cli.output import print_json, print_table

if TYPE_CHECKING:
    from understudy.ingest.redaction_preview import Conversation

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)


@app.callback()
def _redact() -> None:  # pyright: ignore[reportUnusedFunction]
    """Say what a redaction replaces."""


@app.command()
def preview(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A run, a store, session logs, or a text file."),
    ],
    where: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="Only sessions of a store with states that match this SQL condition."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, metavar="N", help="Maximum number of samples per rule.")] = 3,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show what redaction would replace: counts by rule, and samples with the secrets masked.

    Writes no file. Rollouts of a run are searched as well, although exports do not redact them.
    """
    from msgspec import to_builtins

    from understudy.ingest.redaction_preview import preview_redaction
    from understudy.redact.redactor import Redactor

    result = preview_redaction(_conversations(source, where), Redactor.from_user_key(), samples=samples)
    if json_:
        print_json(to_builtins(result))
        return
    if result.replaced:
        rows = [(rule, count, result.values.get(rule, 0)) for rule, count in result.replaced.items()]
        print_table(("rule", "replaced", "values"), rows)
        print_table(
            ("rule", "in", "text"), [(sample.rule, sample.where, sample.context) for sample in result.samples]
        )
    total = sum(result.replaced.values())
    typer.echo(
        f"{total} replacements in {result.conversations} conversations ({result.characters / 1e6:.2f} MB of text)"
    )


def _conversations(source: Path, where: str | None) -> Iterator[Conversation]:
    from understudy.errors import ConfigError
    from understudy.export.corpus import Corpus, ExportSelection
    from understudy.ingest import trace_store
    from understudy.ingest.redaction_preview import file_conversations, trace_conversations
    from understudy.store import Store
    from understudy.store.sqlite import FILE

    if not (source / FILE).is_file():
        if where is not None:
            raise ConfigError(
                f"{source} is not a store, so --where does not apply; leave it out, or give the directory of a "
                "store"
            )
        yield from file_conversations(source)
        return
    with Store.open(source, create=False) as store:
        yield from trace_conversations(trace_store.traces(store.sessions, where=where))
        if store.runs.all():
            rollouts = Corpus(store, ExportSelection(origins=("rollouts",)), unredacted=True)
            yield from ((rollout.example_id, [rollout.messages]) for rollout in rollouts.examples())
