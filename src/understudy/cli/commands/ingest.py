"""`understudy ingest`: extracts training states from the logs of agents' sessions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.cli.interrupts import interrupt_on_termination
from understudy.cli.output import Json, print_json
from understudy.cli.progress import ProgressLine
from understudy.errors import ConfigError
from understudy.util.processes import available_cpus

if TYPE_CHECKING:
    from understudy.ingest.batch_reader import IngestProgress, IngestSummary
    from understudy.ingest.verify import VerifyReport
    from understudy.store.address import StoreLocation

_MAX_JOBS = 8
_DEFAULT_STORE = "sessions"
_SHOWN_FINDINGS = 20
_MAX_ERROR_CHARACTERS = 500

_LEFT_OUT_REASONS = {
    "other_project": "of other projects (--project)",
    "few_turns": "of conversations with fewer turns (--min-turns)",
    "earlier": "from before --since",
    "undated": "without a time, which --since cannot place",
}


def ingest(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH...",
            help="Logs, directories or zip archives [default: Claude Code's projects directory].",
        ),
    ] = None,
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir",
            "-d",
            metavar="DIR",
            help="The store to write the states to: a directory or a database's URL [default: sessions].",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the states to a .jsonl or .parquet file instead of a store.",
        ),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="With --output: replace secrets and what identifies a person.")
    ] = False,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only read logs of this format, such as claude-code; a file is then read unchecked.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="Only turns from this date or time on, such as 2026-11-21T09:30."),
    ] = None,
    project: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only sessions in directories whose path contains TEXT.")
    ] = None,
    min_turns: Annotated[int, typer.Option(min=0, help="Only conversations with at least this many turns.")] = 0,
    all_roles: Annotated[
        bool,
        typer.Option(
            "--all-roles", help="Also turns that the agent program made for its own purposes: warm-ups, summaries."
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, help="Number of processes that read [default: one per CPU, at most 8]."
        ),
    ] = None,
    count_only: Annotated[
        bool | None,
        typer.Option(
            "--dry-run/--verify",
            help="Write nothing: only count the states, or check them for gaps (exit code 1 if there are any).",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Turn session logs into training states: what the model saw at each turn, and what it did.

    The format of each log is detected. The states go into a store, which other commands read, or into a file with
    one JSON object a line and messages in OpenAI's form. They hold what the logs hold, word for word: NOTHING IS
    REDACTED without --redact, so keep them to yourself. Logs are only read, never changed. The same command again
    reads only new or changed logs.
    """
    from understudy.ingest.batch_reader import StateSelection
    from understudy.ingest.formats.base import timestamp_seconds
    from understudy.ingest.formats.registry import format_named
    from understudy.ingest.found_logs import count_states, find_logs
    from understudy.ingest.log_files import MAX_ERRORS

    dry_run, verify = count_only is True, count_only is False
    if verify and (output is not None or directory is not None or redact):
        raise ConfigError("--verify only checks logs and writes nothing; leave out --output, --dir and --redact")
    if output is not None and directory is not None:
        raise ConfigError("--output writes a file and --dir names a store; give only one of them")
    if redact and output is None and not dry_run:
        raise ConfigError(
            "--redact needs --output FILE; add that, or leave --redact out: a store keeps the logs as they are, "
            "and `understudy export` redacts them"
        )
    if output is not None and output.suffix == ".parquet" and not dry_run:
        from understudy.ingest.state_files import require_pyarrow

        require_pyarrow(output)
    since_s = timestamp_seconds(since)
    if since is not None and since_s is None:
        raise ConfigError(
            f"--since: invalid date {since!r}; give a date or time such as 2026-11-21 or 2026-11-21T09:30"
        )
    selection = StateSelection(since_s, project, min_turns, all_roles)
    log_format = None if format is None else format_named(format)
    if not paths:
        paths = [_projects(os.environ)]
        typer.echo(f"reading {paths[0]}, the projects directory of Claude Code", err=True)
    jobs = jobs or min(available_cpus(), _MAX_JOBS)
    interrupt_on_termination()
    progress_line = ProgressLine()

    def progress(state: IngestProgress) -> None:
        text = f"read {state.read} of {state.total} files, {state.written / 1e6:.0f} MB written"
        progress_line.show(text if state.total else f"looking for logs: {state.files} files")

    if dry_run or verify:
        output = directory = None
    elif output is None and directory is None:
        directory = _DEFAULT_STORE
    location = None if directory is None else _location(directory)
    try:
        logs = find_logs(paths, log_format, output, progress)
        if not logs.batches:
            why = _listed(logs.skipped) or "there are no files"
            _print_errors(logs.errors)
            raise ConfigError(
                f"no logs were found in {', '.join(map(str, paths))} ({why}); give a log, a directory or a "
                "zip, or name the --format of a file"
            )
        if verify:
            from understudy.ingest.verify import verify as verify_logs

            report = verify_logs(
                logs.batches, lambda read: progress_line.show(f"checked {read} of {logs.files} files")
            )
            progress_line.end(keep=False)
            report.errors = [*logs.errors, *report.errors][:MAX_ERRORS]
            _print_report(report, json_)
            return
        if output is not None:
            from understudy.ingest.collect import collect_to_file

            counts = collect_to_file(logs, selection, output, jobs, progress, _key() if redact else None)
        elif location is not None:
            from understudy.ingest.collect import collect_to_store

            counts = collect_to_store(logs, selection, location, jobs, progress)
        else:
            counts = count_states(logs, selection, jobs, progress)
    except KeyboardInterrupt:
        from understudy.cli import EXIT_INTERRUPTED
        from understudy.cli.interrupts import interrupted

        progress_line.end(keep=False)
        if directory is not None:
            raise interrupted() from None
        typer.echo("understudy: interrupted; nothing was written", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        progress_line.end(keep=False)
    _print_summary(counts, output, location, redact, json_)


def _location(directory: str) -> StoreLocation:
    from understudy.store.address import parse_location

    return parse_location(directory)


def _key() -> bytes:
    from understudy.redact.pseudonyms import load_key

    return load_key()


def _projects(env: Mapping[str, str]) -> Path:
    """Return the directory where Claude Code keeps its logs. Raises ConfigError if there is none."""
    home = env.get("CLAUDE_CONFIG_DIR")
    projects = (Path(home).expanduser() if home else Path.home() / ".claude") / "projects"
    if not projects.is_dir():
        raise ConfigError(
            f"{projects}, the directory of Claude Code's sessions, does not exist; give the PATH of logs, or "
            "set CLAUDE_CONFIG_DIR to the directory that has projects/"
        )
    return projects


def _print_summary(
    counts: IngestSummary, output: Path | None, location: StoreLocation | None, redact: bool, as_json: bool
) -> None:
    file, store = _path_text(output), _path_text(location)
    if as_json:
        import msgspec

        print_json({"output": file, "dir": store, **msgspec.structs.asdict(counts)})
    elif location is not None:
        _print_stored(counts, location)
    else:
        _print_counts(counts, f"are in {file}" if file else "would be written")
    if redact:
        if not as_json:
            typer.echo(f"redacted: {_listed(counts.redactions) or 'nothing was found'}")
            if file:
                typer.echo(f"the list of replacements is in {file}.redaction.json")
    elif file or store:
        typer.echo(
            f"warning: {file or store} is not redacted and may contain secrets; do not share it",
            err=True,
        )


def _print_report(report: VerifyReport, as_json: bool) -> None:
    """Print what a check found. Raises typer.Exit with code 1 if it found anything."""
    from understudy.ingest.verify import CHECKS
    from understudy.util.text import visible

    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(report))
    else:
        typer.echo(f"{report.states} states of {report.conversations} conversations in {report.files} files")
        for check, meaning in CHECKS.items():
            typer.echo(f"{report.counts[check]:>8} {check}: {meaning}")
        for finding in report.findings[:_SHOWN_FINDINGS]:
            where = [finding.source, *filter(None, (finding.trace_id, finding.message_id))]
            typer.echo(f"{finding.check}: {visible(' '.join(where))}", err=True)
        if len(report.findings) > _SHOWN_FINDINGS:
            typer.echo(f"{_SHOWN_FINDINGS} findings are shown; --json has up to 1000", err=True)
        _print_errors(report.errors)
    if report.counts.total():
        typer.echo(
            "these states may lack something, or their logs are damaged: read those places of the logs, and leave "
            "the states out if they are wrong (docs/ingest.md explains the checks)",
            err=True,
        )
        raise typer.Exit(1)


def _path_text(path: StoreLocation | None) -> str | None:
    return None if path is None else os.fsencode(str(path)).decode(errors="replace")


def _print_stored(counts: IngestSummary, location: StoreLocation) -> None:
    from understudy.store import Store

    if counts.unchanged < counts.files:
        _print_counts(
            counts, f"were read: {counts.new} new, {counts.changed} changed, {counts.same} already there"
        )
    elif counts.errors or not counts.files:
        _print_unread(counts)
    if counts.unchanged:
        typer.echo(f"{counts.unchanged} files are unchanged and were not read again")
    with Store.open(location, create=False) as store:
        turns, traces = store.sessions.count()
    typer.echo(f"{turns} states of {traces} conversations are in {_path_text(location)}")


def _print_counts(counts: IngestSummary, where: str) -> None:
    read = counts.files
    if where.startswith("were"):
        read -= counts.unchanged
    elif counts.unchanged:
        unchanged = "all unchanged" if counts.unchanged == read else f"{counts.unchanged} unchanged"
        where = f"({unchanged}) {where}"
    typer.echo(f"{counts.states} states of {counts.traces} conversations in {read} files {where}")
    if counts.duplicates:
        typer.echo(f"{counts.duplicates} duplicate states, found in several files, were counted once")
    for name, counter in (
        ("format", counts.formats),
        ("model family", counts.families),
        ("fidelity", counts.fidelities),
        ("role", counts.roles),
    ):
        if counter:
            typer.echo(f"by {name}: {', '.join(f'{n} {kind}' for kind, n in counter.most_common())}")
    for kind, n in counts.left_out.most_common():
        role = _label(kind.removeprefix("role:"))
        reason = (
            _LEFT_OUT_REASONS.get(kind) or f"of {role} agents, which the program started for itself (--all-roles)"
        )
        typer.echo(f"left out: {n} states {reason}", err=True)
    _print_unread(counts)


def _print_unread(counts: IngestSummary) -> None:
    """Print which files and parts of files were not read, and why."""
    for title, counter in (("files not read", counts.skipped), ("lost in reading", counts.losses)):
        if counter:
            typer.echo(f"{title}: {_listed(counter)}", err=True)
    _print_errors(counts.errors)


def _print_errors(errors: Sequence[str]) -> None:
    from understudy.util.text import visible

    for error in errors:
        typer.echo(f"error: {visible(error[:_MAX_ERROR_CHARACTERS])}", err=True)


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{n} {_label(kind)}" for kind, n in counter.most_common())


def _label(kind: str) -> str:
    """Return the name of a count for display; it may contain text from a log."""
    from understudy.util.text import visible

    return visible(kind.replace("_", " ").replace("-", " "))
