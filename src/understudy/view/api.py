"""Computes the responses of the API.

Every method named in `routes` takes the path parameters, and the query.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy import __version__
from understudy.errors import UnderstudyError
from understudy.report.directories import index_file, store_id
from understudy.report.read import read_figures
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.store.votes import VoteSubject
from understudy.view import gateways, redaction, rollouts, sessions, stores, tokens, transcripts
from understudy.view.catalog import Catalog
from understudy.view.faults import ViewRefused, not_found
from understudy.view.index import RolloutIndex
from understudy.view.loops import loop_view
from understudy.view.open_store import TIMEOUT_S, ViewedStore
from understudy.view.paging import MAX_ROW_BYTES, shortened
from understudy.view.reports import report_view
from understudy.view.routes import (
    AttemptQuery,
    BodyQuery,
    CompareQuery,
    GroupQuery,
    LogQuery,
    NoParameters,
    PairQuery,
    RawQuery,
    RedactionQuery,
    ReportQuery,
    RolloutFilter,
    SessionFilter,
    StateFilter,
    StateQuery,
    TaskGridQuery,
    TextQuery,
    TokenQuery,
    TurnQuery,
    VoteQuery,
)
from understudy.view.schema.actions import (
    GatewayView,
    IntegrityRequest,
    PauseRequest,
    RedactionView,
    VoteList,
    VoteRequest,
    VoteView,
    WriteResponse,
)
from understudy.view.schema.report import ReportView
from understudy.view.schema.rollouts import (
    CallPage,
    ComparedRuns,
    GroupTurn,
    PatchView,
    RolloutHead,
    RolloutPage,
    RolloutRow,
    TaskGridPage,
    TaskGroup,
    TextRange,
    TokenPage,
    TurnPage,
    TurnView,
)
from understudy.view.schema.sessions import PairPage, SessionPage, StatePage, StateView
from understudy.view.schema.stores import LoopView, StoreHealth, StoreList, StoreSummary
from understudy.view.transcripts import Transcript, TranscriptCache

PathParameters = Mapping[str, str]
"""The variable parts of a path, by name."""


_HEAD_READ_LIMIT_S = 0.1
"""For this many seconds, a request about a whole rollout reads more of its calls; the page shows the part read
so far.
"""


class RawBody(Struct, frozen=True):
    """Part of a body, and the size of the whole, in bytes."""

    content: bytes
    size: int


class ViewApi:
    """Computes responses about the stores of a catalog. Its methods run in threads, several at once.

    `tokenizer` is the directory of the model whose tokenizer shows the texts of tokens, instead of the one in a
    run's configuration.
    """

    def __init__(self, catalog: Catalog, *, may_write: bool = True, tokenizer: Path | None = None) -> None:
        self.catalog = catalog
        self.may_write = may_write
        self._summaries = stores.SummaryCache()
        self._transcripts = TranscriptCache()
        self._tokenizers = tokens.TokenizerFinder(tokenizer)
        self._searches = redaction.StoreSearches()
        self._shown_pairs = sessions.ShownPairs()
        self._indexes: dict[str, RolloutIndex] = {}

    def close(self) -> None:
        """Close all stores and indexes."""
        for index in self._indexes.values():
            index.close()
        self.catalog.close()

    # --- stores ----------------------------------------------------------------------------------------

    def list_stores(self, parts: PathParameters, query: NoParameters) -> StoreList:
        summaries = [self._summaries.of(viewed) for viewed in self.catalog.scan()]
        return StoreList(
            stores=tuple(sorted(summaries, key=lambda summary: (-(summary.changed_at or 0.0), summary.name))),
            directories=tuple(str(location) for location in self.catalog.locations),
            may_write=self.may_write,
            version=__version__,
        )

    def read_store(self, parts: PathParameters, query: NoParameters) -> StoreSummary:
        return shortened(self._summaries.of(self.catalog.store(parts["store"])), MAX_ROW_BYTES)

    def read_health(self, parts: PathParameters, query: NoParameters) -> StoreHealth:
        viewed, store = self._open(parts)
        return stores.health(store, self._index(viewed, store).rows_of())

    def compare_stores(self, parts: PathParameters, query: CompareQuery) -> ComparedRuns:
        both = [self._open({"store": store_id}) for store_id in (query.before, query.after)]
        first, second = (self._index(viewed, store).rows_of() for viewed, store in both)
        return stores.compare_runs(both[0][0], both[1][0], first, second)

    def read_report(self, parts: PathParameters, query: ReportQuery) -> ReportView:
        chosen = [self.catalog.store(store_id) for store_id in query.stores.split(",")]
        figures = read_figures([viewed.location for viewed in chosen])
        return report_view(figures, {viewed.id for viewed in self.catalog.scan()})

    def read_loop(self, parts: PathParameters, query: NoParameters) -> LoopView:
        viewed = self.catalog.store(parts["store"])
        if viewed.kind != "loop":
            raise not_found(
                f"{viewed.name}: expected a training loop, got a store of another kind",
                "open a store whose kind is `loop`",
            )
        existing = {store.id for store in self.catalog.scan()}
        return loop_view(viewed.id, viewed.directory, partial(self._open_wave, existing))

    def _open_wave(self, existing: Set[str], location: StoreLocation) -> tuple[str, Store] | None:
        """Return a wave's store. A loop removes old waves, and then shows its own counts."""
        if store_id(location) not in existing:
            return None
        try:
            viewed = self.catalog.store(store_id(location))
            return viewed.id, viewed.reading()
        except (ViewRefused, UnderstudyError):
            return None

    # --- rollouts --------------------------------------------------------------------------------------

    def list_rollouts(self, parts: PathParameters, query: RolloutFilter) -> RolloutPage:
        viewed, store = self._open(parts)
        return self._index(viewed, store).page(store, query, _vote_counts(store))

    def list_tasks(self, parts: PathParameters, query: TaskGridQuery) -> TaskGridPage:
        viewed, store = self._open(parts)
        return self._index(viewed, store).tasks(query)

    def read_group(self, parts: PathParameters, query: GroupQuery) -> TaskGroup:
        viewed, store = self._open(parts)
        rows = self._index(viewed, store).rows_of(query.task, query.run)
        if not rows:
            raise not_found(
                f"task: the store has no rollout of task {query.task[:100]!r}",
                "give a `task_id` from the list of groups",
            )
        rows = [row for row in rows if row.agent == rows[0].agent]
        members: list[tuple[RolloutRow, tuple[GroupTurn, ...]]] = []
        for row in rows[: rollouts.MAX_COMPARED_ROLLOUTS]:
            with self._reading({**parts, "rollout": row.id}, None) as transcript:
                members.append((row, transcript.actions))
        return rollouts.task_group(query.task, members, len(rows))

    def read_rollout(self, parts: PathParameters, query: AttemptQuery) -> RolloutHead:
        viewed, store = self._open(parts)
        attempt = rollouts.shown_attempt(store, parts["rollout"], query.attempt)
        row = (
            None
            if attempt.rollout is None
            else self._index(viewed, store).row(attempt.rollout.id, _vote_counts(store))
        )
        votes = [vote for vote in _votes(store, "rollout") if row is not None and vote.subject_id == row.id]
        with self._reading(parts, query.attempt, within_s=_HEAD_READ_LIMIT_S) as transcript:
            return rollouts.rollout_head(store, attempt, row, transcript, votes)

    def list_turns(self, parts: PathParameters, query: TurnQuery) -> TurnPage:
        with self._reading(parts, query.attempt, until=_calls_needed(query)) as transcript:
            return transcripts.turn_page(transcript, query.branch, _first_turn(transcript, query), query.limit)

    def list_calls(self, parts: PathParameters, query: TurnQuery) -> CallPage:
        with self._reading(parts, query.attempt, until=_calls_needed(query)) as transcript:
            return transcripts.call_page(transcript, query.branch, _first_turn(transcript, query), query.limit)

    def read_body(self, parts: PathParameters, query: BodyQuery) -> TextRange:
        _, store = self._open(parts)
        with self._reading(parts, query.attempt) as transcript:
            return transcripts.block_range(store, transcript, query)

    def list_tokens(self, parts: PathParameters, query: TokenQuery, room: int = MAX_ROW_BYTES) -> TokenPage:
        _, store = self._open(parts)
        attempt = rollouts.shown_attempt(store, parts["rollout"], query.attempt)
        if attempt.attempt is None:
            raise not_found(f"rollout {parts['rollout'][:100]!r} has no attempt yet", "wait until it runs")
        configs = {run.id: run.config for run in store.runs.all()}
        config = {} if attempt.rollout is None else configs.get(attempt.rollout.run_id, {})
        with self._reading(parts, query.attempt) as transcript:
            return tokens.token_page(store, transcript, query, self._tokenizers.for_run(config), room)

    def read_patch(self, parts: PathParameters, query: TextQuery) -> PatchView:
        _, store = self._open(parts)
        attempt = rollouts.shown_attempt(store, parts["rollout"], query.attempt)
        return rollouts.patch_view(store, attempt, query.offset, query.length)

    def read_log(self, parts: PathParameters, query: LogQuery) -> TextRange:
        _, store = self._open(parts)
        attempt = rollouts.shown_attempt(store, parts["rollout"], query.attempt)
        return rollouts.log_range(store, attempt, query.name, query.offset, query.length)

    def read_raw(self, parts: PathParameters, query: RawQuery) -> RawBody:
        _, store = self._open(parts)
        call = store.calls.get(parts["call"])
        body = call.request if query.part == "request" else call.response
        return RawBody(body[query.offset : query.offset + query.length], len(body))

    # --- sessions and pairs ----------------------------------------------------------------------------

    def list_sessions(self, parts: PathParameters, query: SessionFilter) -> SessionPage:
        return sessions.session_page(self._open(parts)[1], query)

    def list_states(self, parts: PathParameters, query: StateFilter) -> StatePage:
        return sessions.state_page(self._open(parts)[1], query)

    def read_state(self, parts: PathParameters, query: StateQuery) -> StateView:
        return sessions.state_view(self._open(parts)[1], parts["state"], query)

    def list_pairs(self, parts: PathParameters, query: PairQuery) -> PairPage:
        viewed, store = self._open(parts)
        page = sessions.pair_page(store, query)
        self._shown_pairs.remember(viewed.id, [pair.id for pair in page.pairs])
        return page

    def preview_redaction(self, parts: PathParameters, query: RedactionQuery) -> RedactionView:
        viewed, store = self._open(parts)
        if query.rollout is None:
            return self._searches.continue_search(store, viewed.id, viewed.stamp(), query.samples)
        return redaction.rollout_view(
            self.complete_turns({**parts, "rollout": query.rollout}, None), query.samples
        )

    # --- gateways, votes and integrity -----------------------------------------------------------------

    def read_gateway(self, parts: PathParameters, query: NoParameters) -> GatewayView:
        viewed, store = self._open(parts)
        return gateways.gateway_view(store, viewed.location)

    def pause_gateway(self, parts: PathParameters, request: PauseRequest) -> WriteResponse:
        gateways.pause(self._open(parts)[0].directory, request)
        return WriteResponse()

    def list_votes(self, parts: PathParameters, query: VoteQuery) -> VoteList:
        votes = _votes(self._open(parts)[1], query.subject)
        share, subjects = sessions.agreement(votes)
        return VoteList(votes=tuple(votes), agreement=share, subjects=subjects)

    def write_vote(self, parts: PathParameters, request: VoteRequest) -> WriteResponse:
        if request.subject == "pair" and request.label is not None:
            viewed, store = self._open(parts)
            self._shown_pairs.check_vote(viewed.id, store, request.subject_id, request.label)
        with self._writing(parts) as store:
            if request.label is None:
                store.votes.remove(request.subject, request.subject_id, request.voter).result()
            else:
                store.votes.put(
                    request.subject, request.subject_id, request.voter, request.label, request.note
                ).result()
        return WriteResponse()

    def write_integrity(self, parts: PathParameters, request: IntegrityRequest) -> WriteResponse:
        with self._writing(parts) as store:
            decision = store.outcomes.decision(request.rollout_id)
            if decision is None:
                raise not_found(
                    f"rollout {request.rollout_id[:100]} has no verdict to review yet",
                    "wait until it is graded",
                )
            store.runs.review(decision.attempt.id, request.status, request.note).result()
        return WriteResponse()

    @contextmanager
    def _writing(self, parts: PathParameters) -> Generator[Store]:
        """Open a store for writing, for one request. Raises StoreLocked if another process has it locked."""
        viewed, _ = self._open(parts)
        with Store.open(viewed.location, create=False, wait_s=TIMEOUT_S) as store:
            yield store

    # --- shared helpers --------------------------------------------------------------------------------

    def _open(self, parts: PathParameters) -> tuple[ViewedStore, Store]:
        viewed = self.catalog.store(parts["store"])
        if viewed.kind == "loop":
            raise ViewRefused(
                400,
                "loop",
                f"{viewed.name} is a loop, which has no rollouts itself; expected a store",
                "open the store of one of its steps or evaluations",
            )
        return viewed, viewed.reading()

    def _index(self, viewed: ViewedStore, store: Store) -> RolloutIndex:
        index = self._indexes.get(viewed.id)
        if index is None:
            index = self._indexes.setdefault(viewed.id, RolloutIndex(index_file(viewed.id)))
        stamp = viewed.stamp()
        index.refresh(store, stamp, f"{viewed.location} {stamp[0] if stamp else 0}")
        return index

    @contextmanager
    def _reading(
        self,
        parts: PathParameters,
        attempt_id: str | None,
        until: int | None = None,
        within_s: float | None = None,
    ) -> Generator[Transcript]:
        """Yield the transcript of an attempt of a rollout; without `attempt_id`, of the attempt that is shown."""
        viewed, store = self._open(parts)
        attempt = rollouts.shown_attempt(store, parts["rollout"], attempt_id)
        if attempt.attempt is None:
            yield Transcript()
            return
        with self._transcripts.reading(store, viewed.id, attempt.attempt.id, until, within_s) as transcript:
            yield transcript

    def complete_turns(self, parts: PathParameters, attempt_id: str | None) -> tuple[TurnView, ...]:
        """Return all turns of an attempt of a rollout with complete texts, which may be large."""
        _, store = self._open(parts)
        attempt = rollouts.shown_attempt(store, parts["rollout"], attempt_id)
        return () if attempt.attempt is None else transcripts.complete_turns(store, attempt.attempt.id)


def _votes(store: Store, subject: VoteSubject | None) -> list[VoteView]:
    return [VoteView(**msgspec.structs.asdict(vote)) for vote in store.votes.all(subject)]


def _vote_counts(store: Store) -> dict[str, dict[str, int]]:
    """Return how many votes each label has, by rollout."""
    labels: dict[str, dict[str, int]] = {}
    for vote in store.votes.all("rollout"):
        counts = labels.setdefault(vote.subject_id, {})
        counts[vote.label] = counts.get(vote.label, 0) + 1
    return labels


def _calls_needed(query: TurnQuery) -> int | None:
    """Return how many calls must be read for a page; None for all."""
    return query.start + query.limit if query.branch is None and query.call is None else None


def _first_turn(transcript: Transcript, query: TurnQuery) -> int:
    """Return the index of the first turn: that of the named call, counted within the branch."""
    if query.call is None:
        return query.start
    turns, index = transcript.of_branch(query.branch), transcript.index(query.call)
    if index in turns:
        return turns.index(index)
    raise not_found(
        f"call: {query.call[:100]!r} is not among the calls of this branch",
        "leave `branch` out, or give the call's own branch",
    )
