"""What redaction would replace in a store before anything is exported, found in several requests."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from understudy.export.corpus import Corpus, ExportSelection
from understudy.ingest import trace_store
from understudy.ingest.redaction_preview import Conversation, RedactionSearch, trace_conversations
from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.view.schema.actions import RedactionLine, RedactionView
from understudy.view.schema.rollouts import TurnView

_SEARCH_TIME_LIMIT_S: Final = 1.0
"""For how many seconds a request continues the search."""
_MAX_AGE_S: Final = 30.0
"""For how many seconds a finished search is shown although the store has changed."""
_MAX_CACHED: Final = 4
_MAX_NAME_CHARACTERS: Final = 500
"""The most characters of a sample's name."""


class StoreSearch:
    """A search of all conversations of a store, continued by each request."""

    def __init__(self, store: Store, stamp: object, samples: int) -> None:
        self.lock = threading.Lock()
        self._stamp = stamp
        self._ended_at: float | None = None
        self._search = RedactionSearch(Redactor.from_user_key(), samples)
        self._remaining = _conversations(store)
        _, traces = store.sessions.count()
        counts = (store.outcomes.counts(run.id).rollouts for run in store.runs.all())
        self._total = traces + sum(sum(counted.values()) for counted in counts)

    def is_current(self, stamp: object) -> bool:
        """Return whether the search may be shown for a store with this stamp."""
        if self._ended_at is None or self._stamp == stamp:
            return True
        return time.monotonic() - self._ended_at < _MAX_AGE_S

    def continue_search(self) -> RedactionView:
        """Search for a while, at least one more conversation, and return what was found so far."""
        end = time.monotonic() + _SEARCH_TIME_LIMIT_S
        while self._ended_at is None and (conversation := next(self._remaining, None)) is not None:
            self._search.add(conversation)
            if time.monotonic() > end:
                break
        else:
            self._ended_at = self._ended_at or time.monotonic()
        return _view(self._search, self._total, complete=self._ended_at is not None)


class StoreSearches:
    """The last searches, by store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._searches: OrderedDict[tuple[str, int], StoreSearch] = OrderedDict()

    def continue_search(self, store: Store, key: str, stamp: object, samples: int) -> RedactionView:
        """Go on with the search of a store, or begin a new one. Raises StoreError."""
        with self._lock:
            search = self._searches.get((key, samples))
            if search is None or not search.is_current(stamp):
                search = self._searches[key, samples] = StoreSearch(store, stamp, samples)
            self._searches.move_to_end((key, samples))
            while len(self._searches) > _MAX_CACHED:
                self._searches.popitem(last=False)
        try:
            with search.lock:
                return search.continue_search()
        except BaseException:
            with self._lock:
                # An iterator that raised has ended, so the rest would be taken for searched.
                self._searches.pop((key, samples), None)
            raise


def rollout_view(turns: Sequence[TurnView], samples: int) -> RedactionView:
    """Return what redaction would replace in a rollout's transcript."""
    texts: list[Any] = []
    for turn in turns:
        for block in (*turn.asked, *turn.answered):
            texts += [text for text in (block.text, block.arguments) if text]
    search = RedactionSearch(Redactor.from_user_key(), samples)
    search.add(("this rollout", texts))
    return _view(search, 1, complete=True)


def _view(search: RedactionSearch, total: int, *, complete: bool) -> RedactionView:
    preview = search.preview()
    return RedactionView(
        conversations=preview.conversations,
        total=total,
        complete=complete,
        characters=preview.characters,
        replaced=preview.replaced,
        values=preview.values,
        samples=tuple(
            RedactionLine(
                rule=sample.rule, conversation=sample.where[:_MAX_NAME_CHARACTERS], context=sample.context
            )
            for sample in preview.samples
        ),
    )


def _conversations(store: Store) -> Iterator[Conversation]:
    """Yield all conversations of a store, one after the other, without keeping it open between them."""
    yield from trace_conversations(trace_store.traces(store.sessions))
    if store.runs.all():
        rollouts = Corpus(store, ExportSelection(origins=("rollouts",)), unredacted=True)
        yield from ((rollout.example_id, [rollout.messages]) for rollout in rollouts.examples())
