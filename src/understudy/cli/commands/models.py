"""`understudy models`: pretrained models, downloaded once and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.options import command_group
from understudy.cli.output import Json, print_facts, print_json, print_table
from understudy.config import cache_dir
from understudy.errors import ConfigError
from understudy.model.pretrained import (
    PINNED,
    FetchedModel,
    cached_directory,
    fetched_models,
    is_hub_name,
    read_record,
    verify_files,
)

app = command_group("Fetch pretrained models, and list those that are here.")


@app.command("fetch")
def fetch_model(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A model that `understudy models list` shows, such as smollm2-135m, or OWNER/NAME on the Hugging "
            "Face Hub.",
        ),
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="The branch, tag or commit on the hub [default: main].")
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(metavar="FILE", help="Build the model from this GGUF file of the repository.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Download the model again, even if it is in the cache.")
    ] = False,
    json_: Json = False,
) -> None:
    """Download a pretrained model to the cache, verify it, and show its licence.

    A model that is already here is verified too: every file against its SHA-256.
    """
    pinned = PINNED.get(name)
    if pinned is None and not is_hub_name(name):
        raise ConfigError(
            f"unknown model {name[:200]!r}; give one of {', '.join(PINNED)}, or OWNER/NAME for one of the Hugging "
            "Face Hub"
        )
    if pinned is not None and (revision or gguf):
        raise ConfigError(
            f"--revision and --gguf: unsupported for {name}, whose version is pinned; leave them out"
        )
    cache = cache_dir()
    directory = cached_directory(name, cache)
    if directory.is_dir() and not overwrite:
        if revision or gguf:
            raise ConfigError(
                f"{name} is already in the cache, in {directory}; use --overwrite to download it again"
            )
        fetched = FetchedModel(directory=str(directory), record=read_record(directory))
        verify_files(fetched)
    else:
        fetched = _fetch(name, revision, gguf, cache)
    if json_:
        print_json(fetched)
        return
    record = fetched.record
    facts = [("directory", fetched.directory), ("source", record.source), ("pinned by", record.sha256)]
    print_facts(record.name, [*facts, ("licence", record.license), ("files checked", len(record.files))])


@app.command("list")
def list_models(json_: Json = False) -> None:
    """List the models in the cache, and the pinned ones that can be downloaded."""
    fetched = fetched_models()
    here = {model.record.name for model in fetched}
    missing = [pinned for pinned in PINNED.values() if pinned.name not in here]
    if json_:
        print_json({"fetched": fetched, "available": missing})
        return
    rows = [(model.record.name, model.record.license, model.directory, model.record.source) for model in fetched]
    rows += [(pinned.name, pinned.license, "not fetched", pinned.description) for pinned in missing]
    print_table(("name", "licence", "directory", "source"), rows)


def _fetch(name: str, revision: str | None, gguf: str | None, cache: Path) -> FetchedModel:
    def report(text: str) -> None:
        typer.echo(text, err=True)

    if (pinned := PINNED.get(name)) is not None:
        from understudy.model.directory import require_packages
        from understudy.model.fetch import fetch_pinned
        from understudy.tasks.environment import python_environment

        require_packages("torch", "transformers", "gguf")
        python = Path(python_environment(cache).path_prefixes[0], "python")
        return fetch_pinned(pinned, python=python, cache=cache, report=report)
    from understudy.model.hub import fetch_from_hub

    return fetch_from_hub(name, revision=revision, gguf=gguf, cache=cache, report=report)
