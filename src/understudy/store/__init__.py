"""The store: one directory with everything a run did, down to the token. `Store` is the way in."""

from understudy.store.store import Counts, Store

__all__ = ["Counts", "Store"]
