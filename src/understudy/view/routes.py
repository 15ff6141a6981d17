"""The routes of the API: their paths, parameters and responses.

The server and the OpenAPI document use this table.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from understudy.types import IntegrityStatus, RolloutStatus
from understudy.view.schema.actions import (
    GatewayView,
    IntegrityRequest,
    PauseRequest,
    RedactionView,
    StoreChange,
    VoteList,
    VoteRequest,
    WriteResponse,
)
from understudy.view.schema.report import ReportView
from understudy.view.schema.rollouts import (
    CallPage,
    ComparedRuns,
    PatchView,
    RolloutHead,
    RolloutPage,
    TaskGridPage,
    TaskGroup,
    TextRange,
    TokenPage,
    TurnPage,
)
from understudy.view.schema.sessions import PairPage, SessionPage, StatePage, StateView
from understudy.view.schema.stores import LoopView, StoreHealth, StoreList, StoreSummary

Limit = Annotated[int, Meta(ge=1, le=1_000, description="The most rows of a page; fewer where they are long.")]
Cursor = Annotated[str, Meta(max_length=2_000, description="`next` of the page before.")]
Start = Annotated[int, Meta(ge=0, le=2**53 - 1, description="The index to begin at.")]
Identifier = Annotated[str, Meta(min_length=1, max_length=500)]
Query = Annotated[str, Meta(max_length=500, description="Words that must be in the text; quote a phrase.")]

SortKey = Literal[
    "created", "updated", "task", "status", "reward", "turns", "prompt_tokens", "completion_tokens", "cost",
    "seconds", "attempts",
]  # fmt: skip


class NoParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A route without query parameters."""


class PagedQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which page of a response whose lists are split over pages (`Route.lists`); without a cursor, the first."""

    cursor: Cursor | None = None


class RolloutFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rollouts, in which order.

    `task` matches a substring of the id, `reason` of the reason or the error.
    """

    run: Annotated[str, Meta(max_length=500)] | None = None
    task: Annotated[str, Meta(max_length=500)] | None = None
    status: RolloutStatus | None = None
    outcome: Literal["solved", "unsolved", "ungraded"] | None = None
    integrity: IntegrityStatus | None = None
    agent: Annotated[str, Meta(max_length=500)] | None = None
    reason: Annotated[str, Meta(max_length=500)] | None = None
    label: Annotated[str, Meta(max_length=40)] | None = None
    q: Query | None = None
    sort: SortKey = "created"
    descending: bool = False
    cursor: Cursor | None = None
    limit: Limit = 200


class TaskGridQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tasks of a store."""

    run: Annotated[str, Meta(max_length=500)] | None = None
    task: Annotated[str, Meta(max_length=500)] | None = None
    cursor: Cursor | None = None
    limit: Limit = 200


class GroupQuery(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rollouts of a task; `run` selects a run if the store has several."""

    task: Identifier
    run: Annotated[str, Meta(max_length=500)] | None = None


class AttemptQuery(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attempt of the rollout [default: the one that decided it, else the last]."""

    attempt: Identifier | None = None


class TurnQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Turns from an index on, or from the turn of a call; of all branches unless one is named."""

    attempt: Identifier | None = None
    branch: Annotated[str, Meta(max_length=500)] | None = None
    call: Identifier | None = None
    start: Start = 0
    limit: Limit = 50


class BodyQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a block's text or arguments, or of the data URL of an image in it. `ref` identifies the block."""

    ref: Annotated[str, Meta(min_length=1, max_length=600)]
    field: Literal["text", "arguments", "image"] = "text"
    image: Annotated[int, Meta(ge=0, description="Which image.")] = 0
    attempt: Identifier | None = None
    offset: Start = 0
    length: Annotated[int, Meta(ge=1, le=200_000, description="The most characters.")] = 50_000


class TextQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a patch or a log, in characters."""

    attempt: Identifier | None = None
    offset: Start = 0
    length: Annotated[int, Meta(ge=1, le=200_000, description="The most characters.")] = 50_000


class LogQuery(TextQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a log file of the attempt."""

    name: Identifier


class TokenQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokens of a call, or of its whole segment; `start` is an index within the segment."""

    call: Identifier
    attempt: Identifier | None = None
    scope: Literal["call", "segment"] = "call"
    start: Start | None = None
    limit: Annotated[int, Meta(ge=1, le=5_000, description="The most tokens.")] = 2_000


class RawQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A byte range of a body as it was sent. The response header `x-size` gives the size of the whole."""

    part: Literal["request", "response"] = "request"
    offset: Start = 0
    length: Annotated[int, Meta(ge=1, le=1_000_000, description="The most bytes.")] = 200_000


class CompareQuery(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two stores, by their ids."""

    before: Identifier
    after: Identifier


class ReportQuery(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The runs to compare, the first one being the baseline, or one run or loop: ids separated by commas."""

    stores: Annotated[str, Meta(min_length=1, max_length=2_000)]


class SessionFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which conversations."""

    project: Annotated[str, Meta(max_length=1_000)] | None = None
    agent: Annotated[str, Meta(max_length=500)] | None = None
    format: Annotated[str, Meta(max_length=500)] | None = None
    q: Annotated[str, Meta(max_length=500, description="A part of the log's path or the session's id.")] | None = (
        None
    )
    cursor: Cursor | None = None
    limit: Limit = 100


class StateFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which states: those of a conversation, or those that match an SQL condition, as in `understudy states
    --where`.
    """

    trace: Identifier | None = None
    where: Annotated[str, Meta(max_length=2_000)] | None = None
    cursor: Cursor | None = None
    limit: Limit = 200


class StateQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The messages of a state from an index on; a negative `start` counts from the end."""

    start: int = -20
    limit: Limit = 50


class PairQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pairs, with the options of `understudy pairs`."""

    origin: Literal["replay", "rollouts"] = "rollouts"
    start: Start = 0
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class VoteQuery(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Votes on one kind of subject, or all."""

    subject: Literal["rollout", "pair"] | None = None


class RedactionQuery(PagedQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rollout [default: the whole store], with at most this many samples per rule."""

    rollout: Identifier | None = None
    samples: Annotated[int, Meta(ge=0, le=20)] = 3


class EventQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store to follow [default: all]."""

    store: Identifier | None = None


class Route(Struct, frozen=True, kw_only=True):
    """One path of the API. `name` is the method of `ViewApi` that returns the response. Responses of the media
    `events` and `raw` are not JSON.

    `lists` are the lists and dicts of the response, by their paths in it, that may be too long for one page. The
    pages of such a response are joined by the client (see `paging`).
    """

    method: Literal["GET", "POST"]
    path: str
    name: str
    summary: str
    query: type[Struct] = NoParameters
    body: type[Struct] | None = None
    response: type[Any]
    media: Literal["json", "events", "raw"] = "json"
    lists: tuple[str, ...] = ()


_STORE: Final = "/api/stores/{store}"
_ROLLOUT: Final = _STORE + "/rollouts/{rollout}"


def _get(path: str, name: str, response: type[Any], summary: str, query: type[Struct] = NoParameters) -> Route:
    return Route(method="GET", path=path, name=name, response=response, summary=summary, query=query)


def _get_paged(
    path: str, name: str, response: type[Any], summary: str, lists: str, query: type[PagedQuery] = PagedQuery
) -> Route:
    return Route(
        method="GET",
        path=path,
        name=name,
        response=response,
        summary=summary,
        query=query,
        lists=tuple(lists.split()),
    )


def _post(path: str, name: str, body: type[Struct], summary: str) -> Route:
    return Route(method="POST", path=path, name=name, body=body, response=WriteResponse, summary=summary)


ROUTES: Final[tuple[Route, ...]] = (
    _get_paged(
        "/api/stores", "list_stores", StoreList, "All stores below the given directories.", "directories stores"
    ),
    _get(_STORE, "read_store", StoreSummary, "One store."),
    _get_paged(
        _STORE + "/health",
        "read_health",
        StoreHealth,
        "Phases, faults and reasons of a run.",
        "open phases faults unsolved workers versions",
    ),
    _get(_STORE + "/rollouts", "list_rollouts", RolloutPage, "Rollouts: filter, sort, full text.", RolloutFilter),
    _get(_STORE + "/tasks", "list_tasks", TaskGridPage, "The grid of tasks and samples.", TaskGridQuery),
    _get_paged(
        _STORE + "/group", "read_group", TaskGroup, "All rollouts of a task, aligned.", "members", GroupQuery
    ),
    _get_paged(
        _ROLLOUT,
        "read_rollout",
        RolloutHead,
        "A rollout's head, or a gateway client's.",
        "attempts logs branches segments votes verdict.integrity.evidence verdict.commands segment_calls "
        "verdict.tests",
        AttemptQuery,
    ),
    _get(_ROLLOUT + "/turns", "list_turns", TurnPage, "Turns with their blocks.", TurnQuery),
    _get(_ROLLOUT + "/calls", "list_calls", CallPage, "Calls, a line each.", TurnQuery),
    _get(_ROLLOUT + "/body", "read_body", TextRange, "The rest of a long block.", BodyQuery),
    _get(_ROLLOUT + "/tokens", "list_tokens", TokenPage, "Tokens of a call.", TokenQuery),
    _get(_ROLLOUT + "/patch", "read_patch", PatchView, "The patch.", TextQuery),
    _get(_ROLLOUT + "/log", "read_log", TextRange, "A log file of the attempt.", LogQuery),
    Route(
        method="GET",
        path=_STORE + "/calls/{call}/raw",
        name="read_raw",
        response=bytes,
        media="raw",
        query=RawQuery,
        summary="Bytes of a request or a response, as sent.",
    ),
    _get_paged("/api/compare", "compare_stores", ComparedRuns, "Two runs by task.", "tasks", CompareQuery),
    _get_paged(
        "/api/report",
        "read_report",
        ReportView,
        "Whether a policy got better, beyond chance.",
        "reasons charts point_stores figures.about figures.points figures.agents "
        "figures.boundaries figures.unsolved figures.notes figures.collected training figures.versions "
        "figures.tasks figures.training",
        ReportQuery,
    ),
    _get_paged(
        _STORE + "/loop", "read_loop", LoopView, "A loop's curves and funnels.", "refused evaluations steps"
    ),
    _get(_STORE + "/sessions", "list_sessions", SessionPage, "Logged conversations.", SessionFilter),
    _get(_STORE + "/states", "list_states", StatePage, "States of conversations.", StateFilter),
    _get(_STORE + "/states/{state}", "read_state", StateView, "A state with its messages.", StateQuery),
    _get(_STORE + "/pairs", "list_pairs", PairPage, "Preference pairs.", PairQuery),
    _get_paged(
        _STORE + "/gateway", "read_gateway", GatewayView, "A gateway, its calls and clients.", "calls clients"
    ),
    _get_paged(_STORE + "/votes", "list_votes", VoteList, "Votes and how far voters agree.", "votes", VoteQuery),
    _get_paged(
        _STORE + "/redaction",
        "preview_redaction",
        RedactionView,
        "What redaction would replace.",
        "replaced values samples",
        RedactionQuery,
    ),
    _post(_STORE + "/votes", "write_vote", VoteRequest, "Label a rollout or a pair."),
    _post(_STORE + "/integrity", "write_integrity", IntegrityRequest, "Say whether a patch is clean."),
    _post(_STORE + "/gateway/pause", "pause_gateway", PauseRequest, "Pause a gateway, or let it go on."),
    Route(
        method="GET",
        path="/api/events",
        name="follow_events",
        response=StoreChange,
        media="events",
        query=EventQuery,
        summary="Server-sent events named `change`, one for every change of a store.",
    ),
)
"""Every route of the API. With --read-only, routes with a body are rejected."""
