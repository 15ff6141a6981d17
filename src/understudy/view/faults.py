"""What the viewer refuses or cannot do, with the HTTP status and the text for the client."""

from __future__ import annotations

import json
from typing import Any, Final, cast

import msgspec

from understudy.errors import NotInStore, StoreError, StoreLocked, UnderstudyError
from understudy.view.schema.stores import ErrorAnswer, ViewError

_MAX_CHARACTERS: Final = 2_000
"""How much of an error is sent: names in it may be of any length."""


class ViewRefused(Exception):
    """A request that is answered with an error: its HTTP status, a type for programs, and a remedy."""

    def __init__(self, status: int, kind: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = ViewError(kind, message[:_MAX_CHARACTERS], remedy[:_MAX_CHARACTERS])

    def body(self) -> bytes:
        """Return the body of the response."""
        return encode(ErrorAnswer(self.error))


def not_found(message: str, remedy: str) -> ViewRefused:
    """Return a 404 error: `message` says what does not exist, `remedy` what to do."""
    return ViewRefused(404, "not_found", message, remedy)


def to_view_error(error: UnderstudyError) -> ViewRefused:
    """Convert one of our errors for a client: StoreErrors are the store's fault, all others the request's."""
    if isinstance(error, NotInStore):
        return not_found(str(error), "reload the list: what is asked for is not in the store")
    if isinstance(error, StoreLocked):
        return ViewRefused(
            503,
            "locked",
            str(error),
            "nothing was written; wait until the other process has ended its work on the store, then try again",
        )
    if isinstance(error, StoreError):
        return ViewRefused(
            503, "store", str(error), "do what the message says, then reload; other stores can still be viewed"
        )
    return ViewRefused(400, error.boundary, str(error), "correct the request as the message says")


def encode(value: object) -> bytes:
    """Encode an answer as JSON. Invalid Unicode in texts of models and programs is escaped."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_with_escapes(msgspec.to_builtins(value)))


def _with_escapes(value: Any) -> Any:
    """Return a value of JSON types in which texts that UTF-8 cannot encode are JSON with escapes."""
    match value:
        case str():
            return value if _is_valid(value) else msgspec.Raw(json.dumps(value).encode())
        case list() | tuple():
            return [_with_escapes(item) for item in cast("list[Any]", value)]
        case dict():
            entries = cast("dict[Any, Any]", value).items()
            return {
                key.encode(errors="replace").decode() if isinstance(key, str) else key: _with_escapes(item)
                for key, item in entries
            }
        case _:
            return value


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
