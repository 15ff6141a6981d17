"""`understudy states`: the training states in a store, as a table, as JSON lines, or in a file."""

from __future__ import annotations

from collections import Counter
from heapq import nsmallest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from understudy.cli.output import counted, print_json, print_table
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.ingest.text_search import TextMatch
    from understudy.redact.redactor import Redactor
    from understudy.store.sessions import SessionRepository, TurnSelection

_MAX_ROWS = 50
_COLUMNS = (
    "state_id", "model", "project", "role", "fidelity", "tool_calls", "tool_errors", "denied", "interrupted",
    "tests", "edits", "edits_survived", "commits", "feedback", "resolved",
)  # fmt: skip


def states(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The store that `understudy ingest` made, or a database.")
    ] = "sessions",
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="Only states that match this SQL condition, such as \"tests = 'passed' AND denied = 0\".",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help=(
                "Only states with all these words in one text: the answer, its thinking, a call, or a new "
                "message; put a phrase in double quotes."
            ),
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=1,
            metavar="N",
            help="A random sample of this many states [default: the first 50 in a table, else all].",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The random seed of the sample.")] = 0,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Only count states and conversations, by project, model, agent, version or a --columns name.",
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print each state as a line of JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the states to a .jsonl or .parquet file."),
    ] = None,
    unredacted: Annotated[
        bool, typer.Option("--unredacted", help="Do not redact secrets, names and paths.")
    ] = False,
    columns: Annotated[
        bool, typer.Option("--columns", help="Print the names of the columns that --where can use.")
    ] = False,
) -> None:
    """List the training states in a store with what became of each turn; or print or write them, redacted.

    --where takes an SQL condition over the columns of states and conversations; --columns lists them.
    """
    from understudy.store import Store
    from understudy.store.address import parse_location
    from understudy.store.turn_filters import COLUMNS

    if columns:
        typer.echo("\n".join(COLUMNS))
        return
    if json_ and output is not None:
        raise ConfigError("--json prints the states and --output writes them to a file; give only one of them")
    if by is not None and (output is not None or limit is not None):
        raise ConfigError(
            "--by counts all states that --where selects, without writing any; leave out --output and --limit"
        )
    from understudy.redact.redactor import Redactor

    if by is not None:
        with Store.open(parse_location(directory), create=False) as store:
            _print_counts(store.sessions, by, where, text, json_)
        return
    redactor = None if unredacted or not (json_ or output or text) else Redactor.from_user_key()
    with Store.open(parse_location(directory), create=False) as store:
        sessions = store.sessions
        chosen: str | TurnSelection | None = where
        matches: dict[str, TextMatch] = {}
        if text is not None:
            matches = _states_with_words(sessions, text, where, limit, seed, redactor)
            chosen = sessions.sample(lambda row: row["state_id"] in matches, (), where, len(matches), seed)
        if output is not None:
            _write_file(sessions, output, chosen, limit, seed, redactor)
        elif json_:
            _print_json_lines(sessions, chosen, limit, seed, redactor, matches)
        elif text is not None:
            _print_table_of_matches(sessions, matches, where, limit)
        else:
            _print_table_of_states(sessions, where, limit, seed)


def _states_with_words(
    sessions: SessionRepository,
    text: str,
    where: str | None,
    limit: int | None,
    seed: int,
    redactor: Redactor | None,
) -> dict[str, TextMatch]:
    """Return the states that contain some words, by id: all of them, or a sample of --limit."""
    from understudy.ingest.text_search import search_texts
    from understudy.store.turn_filters import sample_rank

    matches = {match.state_id: match for match in search_texts(sessions, text, where, redactor)}
    if limit is None or limit >= len(matches):
        return matches
    sampled = set(nsmallest(limit, matches, lambda state_id: (sample_rank(state_id, seed), state_id)))
    return {state_id: match for state_id, match in matches.items() if state_id in sampled}


def _print_table_of_matches(
    sessions: SessionRepository, matches: dict[str, TextMatch], where: str | None, limit: int | None
) -> None:
    names = ("state_id", "model", "project")
    rows = [[_decoded(value) or "" for value in row] for row in sessions.table(names, where) if row[0] in matches]
    first_rows = rows[: limit or _MAX_ROWS]
    if first_rows:
        head = ("state", "model", "project", "in", "text")
        print_table(head, [(*row, matches[row[0]].role, matches[row[0]].snippet) for row in first_rows])
    typer.echo(f"{f'the first {len(first_rows)} of ' if len(first_rows) < len(rows) else ''}{len(rows)} states")


def _decoded(value: Any) -> Any:
    """Return a column's value as text. SQLite may return bytes for a text that is not valid UTF-8."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _write_file(
    sessions: SessionRepository,
    output: Path,
    where: str | TurnSelection | None,
    limit: int | None,
    seed: int,
    redactor: Redactor | None,
) -> None:
    from understudy.ingest.state_files import extract_states
    from understudy.redact.report import write_report_beside

    number = extract_states(sessions, output, where, limit, seed, redactor)
    report = write_report_beside(output, redactor and redactor.report)
    typer.echo(f"{number} states are in {output}")
    if redactor is None:
        typer.echo(f"warning: {output} is not redacted and may contain secrets; do not share it", err=True)
    else:
        counts = counted(dict(redactor.report.counts.most_common()))
        typer.echo(f"redacted: {counts or 'nothing was found'}; the list of replacements is in {report}", err=True)


def _print_json_lines(
    sessions: SessionRepository,
    where: str | TurnSelection | None,
    limit: int | None,
    seed: int,
    redactor: Redactor | None,
    matches: dict[str, TextMatch],
) -> None:
    from understudy.ingest.state_files import state_line, stored_states

    stream = typer.get_binary_stream("stdout")
    for state, trace in stored_states(sessions, where, limit, seed, redactor):
        match = matches.get(state.state_id)
        stream.write(state_line(state, trace, {} if match is None else {"match": asdict(match)}))
    stream.flush()


def _print_table_of_states(sessions: SessionRepository, where: str | None, limit: int | None, seed: int) -> None:
    from understudy.cli.session_page import signal_text

    rows: list[tuple[Any, ...]] = []
    sampled = None if limit is None else seed
    for row in sessions.table(_COLUMNS, where, limit=limit or _MAX_ROWS, seed=sampled):
        decoded = [_decoded(value) for value in row]
        values: dict[str, Any] = dict(zip(_COLUMNS, decoded, strict=True))
        names = ("state_id", "model", "project", "role", "fidelity")
        rows.append((*(values[name] or "" for name in names), values["tool_calls"], signal_text(values)))
    turns, traces = sessions.count(where)
    if rows:
        print_table(("state", "model", "project", "role", "fidelity", "calls", "signals"), rows)
    kind = "the first" if limit is None else "a sample of"
    count_text = f"{kind} {len(rows)} of " if len(rows) < turns else ""
    typer.echo(f"{count_text}{turns} states of {traces} conversations")


def _print_counts(
    sessions: SessionRepository, by: str, where: str | None, text: str | None, as_json: bool
) -> None:
    counted_rows = sessions.count_by(by, where)
    if text is not None:
        from understudy.ingest.text_search import search_texts

        matches = {match.state_id for match in search_texts(sessions, text, where, None)}
        turns: Counter[Any] = Counter()
        conversations: dict[Any, set[Any]] = {}
        for state_id, value, trace_id in sessions.table(("state_id", by, "trace_id"), where):
            if state_id in matches:
                turns[value] += 1
                conversations.setdefault(value, set()).add(trace_id)
        counted_rows = [(value, count, len(conversations[value])) for value, count in turns.most_common()]
    rows = [(_decoded(value), turns, traces) for value, turns, traces in counted_rows]
    if as_json:
        print_json([{by: value, "states": turns, "conversations": traces} for value, turns, traces in rows])
    elif rows:
        named = [("" if value is None else value, turns, traces) for value, turns, traces in rows]
        print_table((by, "states", "conversations"), named)
    else:
        typer.echo("no states")
