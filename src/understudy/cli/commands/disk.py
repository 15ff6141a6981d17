"""`understudy du` and `understudy prune`: what takes space, and removing what is not needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct, field

from understudy.cli.options import command, duration_s
from understudy.cli.output import Json, counted, print_json, print_table, size_text
from understudy.config import cache_dir
from understudy.disk.stores import LOST, Droppable, PrunedStore, Retention
from understudy.errors import ConfigError
from understudy.util.settings import option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.disk.usage import DiskUse
    from understudy.store.address import StoreLocation

_DIRS_HELP = "Directories of runs and loops, or databases [default: ./runs]."
_UNUSED_FOR = "30d"


def du(
    locations: Annotated[list[str] | None, typer.Argument(metavar="[DIR|URL]...", help=_DIRS_HELP)] = None,
    json_: Json = False,
) -> None:
    """Show what takes space: stores, files of runs, weights of loops, the cache, prepared images.

    "Can go" is unused space in databases, and caches and images that were not used for 30 days. Nothing is
    changed. Fails if a store cannot be read.
    """
    from understudy.disk.stores import stores_of
    from understudy.disk.usage import cache_use, image_use, loop_use, store_use

    stores, loops = stores_of(_locations(locations))
    older = duration_s("--older-than", _UNUSED_FOR)
    uses = [*store_use(stores), *loop_use(loops), *cache_use(cache_dir(), older), *image_use(older)]
    if json_:
        print_json({"uses": uses, "bytes": sum(use.bytes for use in uses)})
    else:
        _print_uses(uses)
    if any(use.error for use in uses):
        raise typer.Exit(1)


def _print_uses(uses: Sequence[DiskUse]) -> None:
    rows = [
        (use.what, size_text(use.bytes), size_text(use.unused), use.where, use.note)
        for use in uses
        if use.bytes or use.note
    ]
    print_table(("what", "takes", "can go", "where", ""), rows)
    typer.echo(f"{size_text(sum(use.bytes for use in uses))} in all", err=True)


class PruneSettings(Struct, frozen=True, kw_only=True):
    """The options of `understudy prune`."""

    locations: Annotated[tuple[str, ...], option(_DIRS_HELP, argument=True, metavar="DIR|URL")] = ()
    drop: Annotated[
        tuple[str, ...],
        option("What to remove for good from runs that have ended: runs, bodies or token-values; repeatable."),
    ] = ()
    older_than: Annotated[
        str | None,
        option(
            "Only touch runs, caches and images that were not changed or used for this long, such as 30d or 12h."
        ),
    ] = None
    keep_runs: Annotated[int | None, option("With --drop: keep this many of the newest runs.")] = None
    keep_weights: Annotated[int | None, option("Keep the weights of this many loop steps.")] = None
    caches: Annotated[
        bool, option("Also remove cache entries that were not used for --older-than (30d).", "--caches")
    ] = False
    images: Annotated[
        bool, option("Also remove prepared container images made before --older-than (30d).", "--images")
    ] = False
    dry_run: Annotated[bool, option("Remove nothing; show what would be removed.", "--dry-run", "-n")] = False


class PruneSummary(Struct, frozen=True, kw_only=True):
    """What was, or would be, removed, in bytes and by place."""

    dry_run: bool
    stores: list[PrunedStore] = field(default_factory=list[PrunedStore])
    caches: list[str] = field(default_factory=list[str])
    images: list[str] = field(default_factory=list[str])
    bytes: int = 0
    skipped: list[str] = field(default_factory=list[str])


@command
def prune(settings: PruneSettings, json_: Json = False) -> None:
    """Remove what nothing needs: contents that no row refers to, and unused space in databases.

    --drop also removes things of ended runs for good; --caches and --images remove what can be made again. Stores
    that others have open, runs that have not ended, and what loops need to continue are left alone.
    """
    from understudy.cli.interrupts import interrupt_on_termination

    _check_settings(settings)
    interrupt_on_termination()
    try:
        summary = _prune(settings)
    except KeyboardInterrupt:
        from understudy.cli.interrupts import interrupted

        raise interrupted() from None
    if json_:
        print_json(summary)
    else:
        _print_summary(summary, settings)
    if summary.skipped:
        raise typer.Exit(1)


def _check_settings(settings: PruneSettings) -> None:
    for name, value, least in (("runs", settings.keep_runs, 0), ("weights", settings.keep_weights, 1)):
        if value is not None and value < least:
            raise ConfigError(
                f"--keep-{name}: got {value}, expected a number of at least {least}; give such a number, or leave "
                "the option out"
            )
    if unknown := set(settings.drop) - LOST.keys():
        raise ConfigError(f"--drop: invalid value {sorted(unknown)[0]!r}; give some of: {', '.join(LOST)}")
    if settings.drop and settings.older_than is None and settings.keep_runs is None:
        raise ConfigError(
            "--drop needs --older-than or --keep-runs, to select the runs; for all runs that have ended, use "
            "--keep-runs 0"
        )
    if settings.keep_runs is not None and not settings.drop:
        raise ConfigError(
            "--keep-runs only applies with --drop; add --drop, which says what to remove from the other runs"
        )


def _prune(settings: PruneSettings) -> PruneSummary:
    from understudy.disk.stores import Pruner, prune_loop, stores_of

    dry_run = settings.dry_run
    older = duration_s("--older-than", settings.older_than) if settings.older_than is not None else None
    retention = Retention(
        drop=frozenset(what for what in LOST if what in settings.drop),
        older_than_s=older or 0.0,
        keep_runs=settings.keep_runs or 0,
    )
    stores, loops = stores_of(_locations(settings.locations))
    pruner = Pruner(stores, retention, lambda line: typer.echo(line, err=True))
    changes = [*(pruner.plan() if dry_run else pruner.remove())]
    changes += [prune_loop(loop, settings.keep_weights, dry_run=dry_run) for loop in loops]
    skipped = [change.skipped for change in changes if change.skipped]
    unused = older if older is not None else duration_s("--older-than", _UNUSED_FOR)
    caches, cached_bytes = _prune_caches(unused, dry_run, skipped) if settings.caches else ([], 0)
    images, image_bytes = _prune_images(unused, dry_run) if settings.images else ([], 0)
    return PruneSummary(
        dry_run=dry_run,
        stores=changes,
        caches=caches,
        images=images,
        bytes=sum(change.bytes for change in changes) + cached_bytes + image_bytes,
        skipped=skipped,
    )


def _prune_caches(older_than_s: float, dry_run: bool, skipped: list[str]) -> tuple[list[str], int]:
    from understudy.disk.caches import remove_entries
    from understudy.disk.usage import unused_entries

    entries = unused_entries(cache_dir(), older_than_s)
    if not dry_run and cache_dir().is_dir():
        try:
            entries = remove_entries(cache_dir(), entries)
        except ConfigError as error:
            skipped.append(str(error))
            return [], 0
    return [str(entry.path) for entry in entries], sum(entry.bytes for entry in entries)


def _prune_images(older_than_s: float, dry_run: bool) -> tuple[list[str], int]:
    import time
    from contextlib import closing

    from understudy.sandbox.docker.engine import find_engine
    from understudy.sandbox.docker.images import remove_images, stored_images

    with closing(find_engine()) as engine:
        before = time.time() - older_than_s
        sizes = {image.name: image.bytes for image in stored_images(engine) if image.created_at < before}
        names = sorted(sizes) if dry_run else remove_images(engine, sizes)
    return names, sum(sizes[name] for name in names)


def _print_summary(summary: PruneSummary, settings: PruneSettings) -> None:
    would = "would go" if summary.dry_run else "gone"
    rows: list[tuple[str, str, str]] = []
    for pruned in summary.stores:
        parts = [
            f"{what} of {len(runs)} runs" if what != "runs" else f"{len(runs)} runs"
            for what, runs in pruned.runs.items()
        ]
        parts += [f"weights of {len(pruned.weights)} steps"] if pruned.weights else []
        if not pruned.skipped:
            parts += [f"stay: {counted(pruned.stays)}"] if pruned.stays else []
            rows.append((pruned.location, size_text(pruned.bytes), "; ".join(filter(None, (*parts, pruned.note)))))
    rows += [(path, "", "of the cache") for path in summary.caches]
    rows += [(name, "", "prepared image") for name in summary.images]
    if rows:
        print_table(("where", would, ""), rows)
    lost: set[Droppable] = {what for pruned in summary.stores for what in pruned.runs}
    for what in sorted(lost):
        typer.echo(f"{'would be lost' if summary.dry_run else 'lost'} with {what}: {LOST[what]}")
    for reason in summary.skipped:
        typer.echo(f"skipped: {reason}", err=True)
    if not summary.bytes and not lost:
        typer.echo("nothing to remove" + ("" if settings.drop else " without --drop, --caches or --images"))
    else:
        typer.echo(f"{size_text(summary.bytes)} {would}")


def _locations(texts: Sequence[str] | None) -> list[StoreLocation]:
    from understudy.store.address import parse_location

    if texts:
        return [parse_location(text) for text in texts]
    return [Path("runs")] if Path("runs").is_dir() else []
