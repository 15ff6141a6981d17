"""Logged conversations and their states as lists show them: rows, sums and counts, one page at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from sqlalchemy import ColumnElement, RowMapping, func, select

from understudy.store.database import Repository
from understudy.store.decoding import decoder
from understudy.store.schema import traces, turns
from understudy.store.statements import text_position
from understudy.store.turn_filters import select_turns

_PATIENCE_S = 5.0
"""How long an expression of a list may run, in seconds. A few slow ones must not keep other lists waiting."""

_value = decoder(object, "a session's outcome or its list of losses")


class SessionRow(Struct, frozen=True, kw_only=True):
    """A logged conversation. Signals are summed over its turns; `losses` counts what its log does not hold.

    `tests`, `feedback` and `fidelity` count turns by value; `began` is the earliest timestamp of a turn.
    """

    trace_id: str
    session_id: str
    format: str
    source: str
    role: str
    project: str | None
    agent: str | None
    version: str | None
    states: int
    tool_calls: int
    tool_errors: int
    denied: int
    interrupted: int
    edits: int
    edits_survived: int | None
    commits: int
    tests: dict[str, int]
    feedback: dict[str, int]
    fidelity: dict[str, int]
    losses: dict[str, int]
    outcome: dict[str, Any] | None
    began: str | None = None


class StateRow(Struct, frozen=True):
    """A state: one turn of a logged conversation, with what became of it. Fields are as in `TurnRow`."""

    state_id: str
    trace_id: str
    position: int
    branch: str
    fidelity: str
    notes: str
    model: str | None
    timestamp: str | None
    tool_calls: int
    tool_errors: int
    denied: int
    interrupted: int
    tests: str | None
    edits: int
    edits_survived: int | None
    commits: int
    feedback: str | None


_SUMMED = ("tool_calls", "tool_errors", "denied", "interrupted", "edits", "edits_survived", "commits")
_NO_SIGNALS: Mapping[str, Any] = {}
_COUNTED = ("tests", "feedback", "fidelity")
_PLAIN = ("session_id", "format", "source", "role", "project", "agent", "version")


class SessionListRepository(Repository):
    """`Store.session_lists`: pages of traces and turns."""

    def traces(
        self,
        after: int,
        limit: int,
        *,
        project: str | None = None,
        agent: str | None = None,
        log_format: str | None = None,
        text: str | None = None,
    ) -> tuple[list[tuple[int, SessionRow]], int]:
        """Return a page of traces with their keys, in order of the keys after `after`, and the total number of
        traces.

        `text` is a substring of the log's path or of the session id.
        """
        conditions: list[ColumnElement[bool]] = [
            column == value
            for column, value in (
                (traces.c.project, project),
                (traces.c.agent, agent),
                (traces.c.format, log_format),
            )
            if value is not None
        ]
        if text is not None:
            conditions.append(
                (text_position(traces.c.source, text) > 0) | (text_position(traces.c.session_id, text) > 0)
            )
        page = select(traces).where(*conditions, traces.c.key > after).order_by(traces.c.key).limit(limit)
        with self._reading() as connection:
            total: int = connection.execute(
                select(func.count()).select_from(traces).where(*conditions)
            ).scalar_one()
            rows = connection.execute(page).mappings().all()
            keys = [row["key"] for row in rows]
            is_on_page = turns.c.trace_key.in_(keys)
            sums = [func.sum(turns.c[name]).label(name) for name in _SUMMED]
            state_columns = (func.count().label("states"), func.min(turns.c.timestamp).label("began"))
            query = select(turns.c.trace_key, *state_columns, *sums).where(is_on_page).group_by(turns.c.trace_key)
            summed: dict[int, RowMapping] = {row["trace_key"]: row for row in connection.execute(query).mappings()}
            counted: dict[str, dict[int, dict[str, int]]] = {}
            for name in _COUNTED:
                by_value = select(turns.c.trace_key, turns.c[name], func.count()).where(
                    is_on_page, turns.c[name].is_not(None)
                )
                counts = counted.setdefault(name, {})
                for key, value, number in connection.execute(by_value.group_by(turns.c.trace_key, turns.c[name])):
                    counts.setdefault(key, {})[str(value)] = number
        keyed_rows = [
            (row["key"], _session_row(row, summed.get(row["key"], _NO_SIGNALS), counted)) for row in rows
        ]
        return keyed_rows, total

    def states(
        self, start: int, limit: int, *, trace_id: str | None = None, where: str | None = None
    ) -> tuple[list[StateRow], int]:
        """Return `limit` turns from number `start` on, and how many there are in total. `where` is as in `select`.

        `trace_id` restricts them to one trace. Raises ConfigError like `select`.
        """
        if trace_id is not None:
            quoted = trace_id.replace("'", "''")
            where = f"trace_id = '{quoted}'" + ("" if where is None else f" AND (\n{where}\n)")
        names = StateRow.__struct_fields__
        with self._database.driver.turns_connection() as raw:
            ((total,),) = select_turns(raw, ("count(*)",), where, None, _PATIENCE_S)
            rows = select_turns(raw, names, where, start + limit, _PATIENCE_S)[start:]
        return [StateRow(*map(_text, row)) for row in rows], total


def _text(value: Any) -> Any:
    """Return a column for display. SQLite may hold bytes if a log's text was not valid Unicode."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _counts(losses: bytes) -> dict[str, int]:
    value: Any = _value(losses)
    return {str(name): int(count) for name, count in value.items()} if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _session_row(
    row: RowMapping, sums: RowMapping | Mapping[str, Any], counted: Mapping[str, Mapping[int, dict[str, int]]]
) -> SessionRow:
    key: int = row["key"]
    fields: dict[str, Any] = {name: _text(row[name]) for name in _PLAIN}
    fields |= {name: sums.get(name, 0) for name in (*_SUMMED, "states")}
    fields |= {name: counted[name].get(key, {}) for name in _COUNTED}
    outcome: Any = None if row["outcome"] is None else _value(row["outcome"])
    fields |= {"losses": _counts(row["losses"]), "outcome": outcome, "began": _text(sums.get("began"))}
    return SessionRow(trace_id=_text(row["id"]), **fields)
