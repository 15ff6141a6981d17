"""Answers about gateways and votes, the bodies that the viewer accepts, and its events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from understudy.gateway.control import RunningCall
from understudy.view.schema.stores import StoreState

# --- the gateway -----------------------------------------------------------------------------------------


class GatewayClient(Struct, frozen=True, kw_only=True):
    """A client of a gateway that runs alone: what it used, and what it may use. Keys are stored as hashes only."""

    name: str
    attempt_id: str
    created_at: float
    expires_at: float | None
    revoked: bool
    budget: dict[str, Any]
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float


class GatewayView(Struct, frozen=True, kw_only=True):
    """A gateway. `reachable` is false if none runs or its admin key cannot be read; `note` says why.

    `in_flight` generations run, and `waiting` requests are held by a pause. `calls` are those without an answer
    yet, the oldest first, at the time `read_at`, None if nothing was read.
    """

    reachable: bool
    note: str
    url: str | None
    paused: bool
    version: str | None
    in_flight: int
    waiting: int
    calls: tuple[RunningCall, ...]
    read_at: float | None
    clients: tuple[GatewayClient, ...]
    next: str | None = None


# --- what users write ------------------------------------------------------------------------------------

Subject = Literal["rollout", "pair"]
Label = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}\Z")]
Voter = Annotated[str, Meta(min_length=1, max_length=80, pattern=r"^\S(.*\S)?$")]
Note = Annotated[str, Meta(max_length=2_000)]


class VoteView(Struct, frozen=True, kw_only=True):
    """A person's label on a rollout or a pair. A later label by the same voter replaces it."""

    subject: Subject
    subject_id: str
    voter: str
    label: str
    note: str
    voted_at: float


class VoteRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A label to store: `chosen`, `rejected` or `skip` for a pair; `include`, `exclude` or another for a rollout.

    Without a label, the voter's vote is removed.
    """

    subject: Subject
    subject_id: Annotated[str, Meta(min_length=1, max_length=500)]
    voter: Voter
    label: Label | None
    note: Note = ""


class VoteList(Struct, frozen=True, kw_only=True):
    """Votes, and how far voters agree: the share of pairs of votes on one subject that have the same label."""

    votes: tuple[VoteView, ...]
    agreement: float | None
    subjects: int
    next: str | None = None


class IntegrityRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person's decision on whether a rollout's patch is clean, and why."""

    rollout_id: Annotated[str, Meta(min_length=1, max_length=500)]
    status: Literal["clean", "suspicious"]
    note: Annotated[str, Meta(min_length=1, max_length=2_000)]


class PauseRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pause a gateway, or let it continue."""

    paused: bool
    drain_s: Annotated[float, Meta(ge=0, le=60)] = 0.0


class WriteResponse(Struct, frozen=True):
    """The request was stored."""

    stored: bool = True


# --- redaction and events --------------------------------------------------------------------------------


class RedactionLine(Struct, frozen=True, kw_only=True):
    """A replacement that redaction would make, with the redacted text around it."""

    rule: str
    conversation: str
    context: str


class RedactionView(Struct, frozen=True, kw_only=True):
    """What redaction would replace: by rule, the numbers of replacements and of distinct secrets.

    `conversations` were searched so far, in a store with `total` logged conversations and rollouts; each request
    goes on until the search is `complete`. Exports leave some out, such as rollouts without a verdict, so the
    number can end below `total`.
    """

    conversations: int
    total: int
    complete: bool
    characters: int
    replaced: dict[str, int]
    values: dict[str, int]
    samples: tuple[RedactionLine, ...]
    next: str | None = None


class StoreChange(Struct, frozen=True, kw_only=True):
    """The data of an event `change`: a store was written, vanished, or is back.

    `counter` grows with each event.
    """

    store_id: str
    counter: int
    state: StoreState
