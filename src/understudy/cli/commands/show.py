"""`understudy show`: prints a rollout, a session, a state or a gateway's client, or lists them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy.cli.output import Json, console, print_table
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.cli.transcript import RolloutRecord
    from understudy.ingest.trace import Trace
    from understudy.store import Store
    from understudy.store.address import StoreLocation
    from understudy.types import Attempt, Rollout


_MAX_ROWS = 50
"""The number of sessions in a list."""


def show(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR] [ID]",
            help=(
                "The id (or its beginning) of a rollout, attempt, session or state, or the name of a gateway's "
                "client; the directory of the store may precede it. Without an id, all are listed."
            ),
        ),
    ] = None,
    directory: Annotated[
        str | None,
        typer.Option("--dir", help="A run's directory, or its database [default: the newest in ./runs]."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print all texts in full.")] = False,
    unredacted: Annotated[
        bool, typer.Option("--unredacted", help="Do not redact secrets, names and paths in sessions.")
    ] = False,
    json_: Json = False,
) -> None:
    """Show what a rollout was asked, what it did and how it was graded; or the contents of a session or a state.

    For a rollout: a line for each branch with its role, then turns, tools, patch, tests, errors. For a session:
    its origin, what could not be read, and each turn with its signals. For a state: the messages that the model
    saw, its tools, and what it did next. Sessions are redacted.
    """
    from understudy.store import Store

    location, name = _store_and_name(names or [], directory)
    with Store.open(location or newest_run(Path("runs")), create=False) as store:
        if name is None:
            _list(store, json_)
            return
        state, session = (None, None) if _is_of_run(store, name) else _session_match(store, name)
        if state is not None:
            _show_state(store, state, full=full, unredacted=unredacted, as_json=json_)
        elif session is not None:
            _show_session(store, session, full=full, unredacted=unredacted, as_json=json_)
        else:
            _show(_record(store, name), full=full, as_json=json_)


def _store_and_name(names: list[str], directory: str | None) -> tuple[StoreLocation | None, str | None]:
    """Return the store's directory and the id among the arguments. Raises ConfigError for too many arguments."""
    from understudy.store.address import StoreUrl, parse_location
    from understudy.store.sqlite import FILE

    if len(names) > 2 or (len(names) == 2 and directory is not None):
        raise ConfigError(
            f"{' '.join(names)}: too many arguments; give at most a store's directory and one id, or with "
            "--dir only the id"
        )
    if len(names) == 2:
        return parse_location(names[0]), names[1]
    location = None if directory is None else parse_location(directory)
    if names and location is None:
        named = parse_location(names[0])
        if isinstance(named, StoreUrl) or (named / FILE).is_file():
            return named, None
    return location, names[0] if names else None


def _is_of_run(store: Store, name: str) -> bool:
    """Return whether a name is the beginning of a rollout's id, an attempt's id, or a client's name."""
    from understudy.store.keys import CLIENT

    clients = {client.id for client in store.keys.clients()}
    rollout = name.rpartition(".")[0] if name.rpartition(".")[2].isdecimal() else name
    return bool({CLIENT + name, name} & clients) or any(
        row.id.startswith(name) or row.id == rollout for row in store.runs.rollouts()
    )


def _session_match(store: Store, name: str) -> tuple[str | None, str | None]:
    """Return (state id, session id) with the only match for the prefix `name` in its place and None in the other.

    Both are None if nothing matches and the store has rollouts.

    Raises ConfigError if several match, or if none does in a store of sessions.
    """
    states, sessions = store.sessions.ids_that_begin(name)
    if len(states) + len(sessions) == 1:
        return (states or [None])[0], (sessions or [None])[0]
    if states or sessions:
        kinds = (("states", states), ("sessions", sessions))
        examples = "; ".join(f"{kind} {', '.join(ids[:5])}" for kind, ids in kinds if ids)
        raise ConfigError(f"several ids begin with {name!r}: {examples}; give more characters of the one you mean")
    if store.runs.all():
        return None, None
    raise ConfigError(
        f"no id of a session or state begins with {name!r}; give one that `understudy show DIR` (sessions) or "
        "`understudy states DIR` (states) lists"
    )


def _show_session(store: Store, session_id: str, *, full: bool, unredacted: bool, as_json: bool) -> None:
    from understudy.cli.session_page import SessionPrinter, session_record, state_ids
    from understudy.ingest.trace_store import traces

    logged = list(traces(store, store.sessions.session(session_id)))
    session = logged if unredacted else _redacted(logged)
    name = next(
        clean.session_id for clean, trace in zip(session, logged, strict=True) if trace.session_id == session_id
    )
    record = session_record(name, session, [state_ids(trace) for trace in logged])
    if as_json:
        _print_json(record)
    else:
        SessionPrinter(console(), full=full).show_session(record)


def _show_state(store: Store, state_id: str, *, full: bool, unredacted: bool, as_json: bool) -> None:
    from understudy.cli.session_page import SessionPrinter, chosen_state, state_ids
    from understudy.ingest.state_files import state_line
    from understudy.ingest.trace_store import traces

    (logged,) = traces(store, store.sessions.conversation_of(state_id))
    (trace,) = [logged] if unredacted else _redacted([logged])
    shown = chosen_state(trace, state_ids(logged).index(state_id))
    if as_json:
        typer.echo(state_line(shown.state, trace), nl=False)
    else:
        SessionPrinter(console(), full=full).show_state(shown)


def _redacted(traces: list[Trace]) -> list[Trace]:
    from understudy.ingest.redaction import redact_trace
    from understudy.redact.redactor import Redactor

    redactor = Redactor.from_user_key()
    return [redact_trace(trace, redactor) for trace in traces]


def newest_run(runs: Path) -> Path:
    """Return the directory below `runs` whose store was written last. Raises ConfigError if there is none."""
    stores = {path.parent: path.stat().st_mtime for path in runs.glob("*/store.db*")}
    if not stores:
        raise ConfigError(
            f"{runs.absolute()} has no output directory of a run (*/store.db); name the directory of a run "
            "(--help says how), or begin one with `understudy run`"
        )
    return max(stores, key=lambda path: stores[path])


def _show(record: RolloutRecord, *, full: bool, as_json: bool) -> None:
    from understudy.cli.transcript import TranscriptPrinter, summary
    from understudy.trajectory.tree import build

    trajectory = build(record.calls)
    if as_json:
        _print_json(summary(record, trajectory))
    else:
        TranscriptPrinter(console(), full=full).show(record, trajectory)


def _record(store: Store, name: str) -> RolloutRecord:
    """Return the record of a client or an attempt with this name, otherwise of the rollout whose id begins with
    it.
    """
    from understudy.cli.transcript import RolloutRecord
    from understudy.store.keys import CLIENT

    attempts = {attempt.id: attempt for attempt in store.keys.clients()}
    if client := attempts.get(CLIENT + name) or attempts.get(name):
        return RolloutRecord(
            rollout=None,
            attempts=[client],
            task=None,
            attempt=client,
            calls=list(store.calls.of_attempt(client.id)),
            patch=None,
            verdict=None,
        )
    rollout_id, dot, number = name.rpartition(".")
    if dot and number.isdecimal() and any(rollout.id == rollout_id for rollout in store.runs.rollouts()):
        return _rollout_record(store, store.runs.rollout(rollout_id), store.runs.attempt(name))
    return _rollout_record(store, store.runs.find_rollout(name))


def _rollout_record(store: Store, rollout: Rollout, chosen: Attempt | None = None) -> RolloutRecord:
    """Return the record of a rollout with the chosen attempt, else the graded one, else the last one."""
    from understudy.cli.transcript import RolloutRecord

    attempts = store.runs.attempts(rollout.id)
    verdicts = [store.runs.verdict(attempt.id) for attempt in attempts]
    graded = [number for number, verdict in enumerate(verdicts) if verdict is not None]
    index = graded[-1] if graded else len(attempts) - 1
    if chosen is not None:
        index = attempts.index(chosen)
    attempt = attempts[index] if attempts else None
    return RolloutRecord(
        rollout=rollout,
        attempts=attempts,
        task=store.runs.task(rollout.run_id, rollout.task_id),
        attempt=attempt,
        calls=list(store.calls.of_attempt(attempt.id)) if attempt else [],
        patch=store.runs.patch(attempt.id) if attempt else None,
        verdict=verdicts[index] if attempts else None,
    )


def _list(store: Store, as_json: bool) -> None:
    import msgspec
    from msgspec.structs import asdict

    from understudy.store.keys import CLIENT
    from understudy.store.sessions import decoded

    rollouts: list[dict[str, Any]] = []
    for rollout in store.runs.rollouts():
        attempts = store.runs.attempts(rollout.id)
        verdicts = [store.runs.verdict(attempt.id) for attempt in attempts]
        latest_verdict = next((verdict for verdict in reversed(verdicts) if verdict is not None), None)
        rollouts.append(
            {
                **msgspec.to_builtins(rollout),
                "attempts": len(attempts),
                "reward": None if latest_verdict is None else latest_verdict.reward,
                "integrity": None if latest_verdict is None else latest_verdict.integrity.status,
                "findings": sum(len(attempt.findings) for attempt in attempts),
            }
        )
    clients: list[dict[str, Any]] = [
        {
            "name": client.id.removeprefix(CLIENT),
            "attempt_id": client.id,
            **msgspec.to_builtins(store.calls.usage(client.id)),
        }
        for client in store.keys.clients()
    ]
    sessions, number = store.sessions.summaries(_MAX_ROWS)
    summaries = [
        {name: decoded(value) if isinstance(value, bytes) else value for name, value in asdict(session).items()}
        for session in sessions
    ]
    if as_json:
        listed = {"sessions": summaries, "sessions_total": number} if number else {}
        _print_json({"rollouts": rollouts, "clients": clients, **listed})
        return
    if rollouts or not (clients or summaries):
        print_table(
            ("rollout", "task", "sample", "status", "reward", "integrity", "attempts", "findings", "error"),
            [
                (
                    *(row[name] for name in ("id", "task_id", "sample_index", "status")),
                    "" if row["reward"] is None else f"{row['reward']:g}",
                    row["integrity"] or "",
                    row["attempts"],
                    row["findings"] or "",
                    f"{row['error']['boundary']}: {row['error']['message']}" if row["error"] else "",
                )
                for row in rollouts
            ],
        )
    if clients:
        print_table(
            ("client", "calls", "prompt tokens", "completion tokens", "cost"),
            [
                (
                    row["name"],
                    row["calls"],
                    f"{row['prompt_tokens']:,}",
                    f"{row['completion_tokens']:,}",
                    f"${row['cost_usd']:,.4f}" if row["cost_usd"] else "",
                )
                for row in clients
            ],
        )
    if summaries:
        head = ("session_id", "format", "project", "conversations", "states", "last")
        print_table(
            ("session", *head[1:5], "last turn"),
            [tuple("" if row[name] is None else row[name] for name in head) for row in summaries],
        )
        typer.echo(f"{'the newest ' if len(summaries) < number else ''}{len(summaries)} of {number} sessions")


def _print_json(value: dict[str, Any]) -> None:
    """Print JSON in ASCII, so that a transcript cannot send control sequences to the terminal."""
    import json

    from understudy.types import SCHEMA

    typer.echo(json.dumps({"schema": SCHEMA, **value}))


class IntegrityStatus(StrEnum):
    """The possible verdicts on a patch's integrity."""

    clean = "clean"
    suspicious = "suspicious"


def integrity(
    rollout: Annotated[str, typer.Argument(help="The id of a rollout (or its beginning), or of an attempt.")],
    status: Annotated[IntegrityStatus, typer.Argument(help="The verdict of the review.")],
    reason: Annotated[str, typer.Option("--reason", help="The reason, for later readers.")],
    directory: Annotated[
        str | None,
        typer.Option("--dir", help="A run's directory, or its database [default: the newest in ./runs]."),
    ] = None,
) -> None:
    """Record after a review whether a rollout's patch is clean or suspicious. Exports leave suspicious ones out.

    The grader's finding is kept beside it.
    """
    from understudy.store import Store
    from understudy.store.address import parse_location

    location = newest_run(Path("runs")) if directory is None else parse_location(directory)
    with Store.open(location, create=False) as store:
        attempt_id = rollout
        rollout_id, _, number = rollout.rpartition(".")
        if not (number.isdecimal() and any(row.id == rollout_id for row in store.runs.rollouts())):
            match = store.runs.find_rollout(rollout)
            graded = [
                attempt.id
                for attempt in store.runs.attempts(match.id)
                if store.runs.verdict(attempt.id) is not None
            ]
            if not graded:
                raise ConfigError(
                    f"rollout {match.id} has no graded attempt to review; wait until it is graded, or, if it "
                    "failed or was cancelled, run it again or choose another rollout"
                )
            attempt_id = graded[-1]
        store.runs.review(attempt_id, status.value, reason).result()
    typer.echo(f"{attempt_id} is {status.value} now")
