"""What the viewer refuses or cannot do, with the status and the words that a client gets for it."""

from __future__ import annotations

import msgspec

from understudy.errors import NotInStore, StoreError, UnderstudyError
from understudy.view.schema.stores import ErrorAnswer, ViewError


class ViewRefused(Exception):
    """A request that is answered with an error: its HTTP status, a type for programs, and what to do."""

    def __init__(self, status: int, kind: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = ViewError(kind, message, remedy)

    def body(self) -> bytes:
        """The answer's body."""
        return encode(ErrorAnswer(self.error))


def missing(what: str, remedy: str) -> ViewRefused:
    """The fault that something is not there."""
    return ViewRefused(404, "not_found", what, remedy)


def fault_of(error: UnderstudyError) -> ViewRefused:
    """An error of ours as a client gets it: a store's is the store's, anything else what was asked for."""
    if isinstance(error, NotInStore):
        return missing(str(error), "reload the list: what is asked for is not in the store")
    if isinstance(error, StoreError):
        return ViewRefused(
            503, "store", str(error), "follow the message, then reload; the viewer goes on with other stores"
        )
    return ViewRefused(400, error.boundary, str(error), "change what is asked for as the message says")


def encode(answer: object) -> bytes:
    """An answer as JSON; a text that is no Unicode, as models and programs write them, with escapes."""
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:
        import json

        return json.dumps(msgspec.to_builtins(answer)).encode()
