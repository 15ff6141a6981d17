"""The store: one directory with everything a run did, down to the token. `Store` is the way in."""

from understudy.store.keys import StoredKey
from understudy.store.outcomes import AttemptUsage, RunCounts
from understudy.store.store import Store

__all__ = ["AttemptUsage", "RunCounts", "Store", "StoredKey"]
