"""The HTTP client of every backend: bounded, without redirects, and retrying only before the first byte of a
response.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct, field

from understudy.errors import BackendError
from understudy.gateway.backends.transport import (
    ConnectionPool,
    NotConnected,
    ServerConnection,
    UnsendableRequest,
)
from understudy.util.http import ResponseTooLarge, ServerAddress
from understudy.wire.decoding import decoded

EVENT_LIMIT = 64 << 20
"""The largest single event. A first chunk with the token ids of a whole prompt is far smaller."""

_LINE_END = rb"(?:\r\n|\n|\r(?!\n))"
_BLANK_LINE = re.compile(_LINE_END + rb"{2}")
_MAX_BLANK_LINE_BYTES = 4


class ServerSentEvent(Struct, frozen=True, gc=False):
    """One event: its name ("" if it has none), its data lines joined, and its raw bytes.

    The concatenated `raw` of all events is the stream. An event without data is a comment, or only a name.
    """

    name: bytes
    data: bytes
    raw: bytes


class EventSplitter:
    """Splits a stream into events, whatever pieces it arrives in. `request` names the request in errors."""

    def __init__(self, request: str = "") -> None:
        self._request = request
        self._buffer = bytearray()
        self._returns = False

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """Add a piece, and return the events that it completes. Raises BackendError if one exceeds EVENT_LIMIT."""
        if not self._buffer and not self._returns and (event := _single_event(piece)):
            return [event]
        searched = max(len(self._buffer) - _MAX_BLANK_LINE_BYTES, 0)
        self._buffer += piece
        self._returns = self._returns or b"\r" in piece
        events = self._cut(searched) if self._returns else self._split(searched)
        if len(self._buffer) > EVENT_LIMIT:
            raise BackendError(
                f"{self._request}invalid stream: one event has more than {EVENT_LIMIT} bytes, the maximum; check "
                "that base_url is the address of the model server"
            )
        return events

    def feed_data(self, piece: bytes) -> list[bytes]:
        """Add a piece, and return the data of the events that it completes, where they have any.

        Most pieces consist of whole events with one line of data each, of which no objects are made here.
        """
        is_plain = piece.startswith(b"data: ") and piece.endswith(b"\n\n") and b"\r" not in piece
        if is_plain and not self._buffer and not self._returns:
            # The first event is cut out by itself, as a search for two bytes in a prompt's tokens takes longer.
            end = piece.find(b"\n")
            data = piece[end:-2].split(b"\n\ndata: ")
            if not data[0] and piece.count(b"\n", end) == 2 * len(data):
                data[0] = piece[6:end]
                if b"" not in data:
                    return data
        return [event.data for event in self.feed(piece) if event.data]

    def rest(self) -> ServerSentEvent | None:
        """Return what came after the last blank line, since some servers leave out the final one."""
        return _event(bytes(self._buffer)) if self._buffer else None

    def _split(self, start: int) -> list[ServerSentEvent]:
        """Split a stream without carriage returns, which most servers never send."""
        # Searching for one byte is several times as fast as searching for two.
        newline = self._buffer.find(b"\n", start)
        while newline >= 0 and not self._buffer.startswith(b"\n", newline + 1):
            newline = self._buffer.find(b"\n", newline + 1)
        if newline < 0:
            return []
        *lines, unfinished_line = bytes(self._buffer).split(b"\n")
        events: list[ServerSentEvent] = []
        event_lines: list[bytes] = []
        for line in lines:
            if line or not event_lines:
                event_lines.append(line)
            else:
                events.append(_plain_event(event_lines))
                event_lines = []
        self._buffer = bytearray(b"\n".join((*event_lines, unfinished_line)))
        return events

    def _cut(self, start: int) -> list[ServerSentEvent]:
        """Split a stream whose lines may end in any way."""
        events: list[ServerSentEvent] = []
        consumed = 0
        while blank := _BLANK_LINE.search(self._buffer, max(start, consumed)):
            events.append(_event(bytes(self._buffer[consumed : blank.end()])))
            consumed = blank.end()
        del self._buffer[:consumed]
        return events


def _single_event(piece: bytes) -> ServerSentEvent | None:
    """Return the event if the piece is exactly one in the usual form. Most servers send each event by itself."""
    if b"\r" in piece or not piece.endswith(b"\n\n"):
        return None
    end, line_end = len(piece) - 2, piece.find(b"\n")
    if piece.startswith(b"data: "):
        return ServerSentEvent(b"", piece[6:end], piece) if line_end == end else None
    named = piece.startswith(b"event: ") and piece.startswith(b"data: ", line_end + 1)
    if named and piece.find(b"\n", line_end + 1) == end:
        return ServerSentEvent(piece[7:line_end], piece[line_end + 7 : end], piece)
    return None


def _plain_event(lines: list[bytes]) -> ServerSentEvent:
    """Make an event from its lines, which contain no carriage return."""
    first_line, last_line = lines[0], lines[-1]
    if last_line.startswith(b"data: "):
        if len(lines) == 1:
            return ServerSentEvent(b"", last_line[6:], last_line + b"\n\n")
        if len(lines) == 2 and first_line.startswith(b"event: "):
            return ServerSentEvent(first_line[7:], last_line[6:], b"%b\n%b\n\n" % (first_line, last_line))
    return _event(b"\n".join((*lines, b"", b"")))


def _event(raw: bytes) -> ServerSentEvent:
    name, data = b"", list[bytes]()
    for line in raw.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return ServerSentEvent(name, b"\n".join(data), raw)


TakeEvents = Callable[[list[ServerSentEvent]], object]
"""Receives events that arrived together. Returning True stops the reading of the stream."""

_T = TypeVar("_T")

RETRY_PAUSES_S = (0.2, 0.8)
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 3600.0
STALL_TIMEOUT_S = 600.0
"""How long a stream may be silent, in seconds; a request may wait that long in the server's queue."""
ANSWER_LIMIT = 128 << 20
"""The largest response that is read whole. A full context with its tokens and logprobs is far smaller."""
STREAM_LIMIT = 256 << 20
"""The largest stream. 130,000 tokens with their logprobs take 80 MB, of which little is kept."""
RESPONSES_LIMIT = 512 << 20
"""How many bytes all responses being read may hold together, in one process."""
ERROR_LIMIT = 1 << 20
"""The largest error response that is read; REFUSAL_LIMIT bytes of it are kept."""
REFUSAL_LIMIT = 64 << 10
MAX_RETRY_AFTER_S = 86400.0
REASON_LIMIT = 4000
"""The limit of an error response's message, in characters."""

_SMALL_EVENT, _KEPT_OF_SMALL = 512, 128
"""Of an event of up to the first of these sizes, at most the second is counted as kept, in bytes: a token without
its framing. Events that arrive together count as if they had the same size.
"""
_COUNTED_AT_ONCE = 4096
"""After how many bytes kept of a stream the total is updated."""
_SHOULD_RETRY = {"true": True, "false": False}


class _ResponseMemory:
    """The memory held by the responses being read in this process. Each has a share of RESPONSES_LIMIT."""

    def __init__(self) -> None:
        self._total = 0
        self._sizes: dict[object, int] = {}

    @contextmanager
    def response(self) -> Generator[Callable[[int], None]]:
        """Yield a function that counts the bytes of one response.

        It raises BackendError if all responses together hold too much and this one holds more than its share.
        Small responses can therefore always be read.
        """
        response = object()
        self._sizes[response] = 0

        def count(size: int) -> None:
            self._sizes[response] += size
            self._total += size
            if self._total > RESPONSES_LIMIT and self._sizes[response] > RESPONSES_LIMIT // len(self._sizes):
                raise BackendError(
                    "overloaded: the responses of model servers that are being read hold more than "
                    f"{RESPONSES_LIMIT} bytes together, the maximum, and this is one of the largest; send "
                    "fewer requests at a time"
                )

        try:
            yield count
        finally:
            self._total -= self._sizes.pop(response)


_RESPONSES = _ResponseMemory()


class NotServedError(BackendError):
    """The server did not accept the request: no byte of a response came, or a status of 5xx came first.

    The same request may be sent to another endpoint.
    """


class NotConnectedError(NotServedError):
    """The request was never sent, because there was no connection."""


class _HttpErrorDetail(Struct):
    message: str = ""


class _HttpErrorBody(Struct):
    error: _HttpErrorDetail | str | None = None
    message: str = ""


class _ListedModel(Struct):
    id: str


class _ModelList(Struct):
    data: list[_ListedModel] = field(default_factory=list[_ListedModel])


class HttpClient:
    """Sends requests to the server at `base_url` (see ServerAddress), and raises errors as BackendError.

    `timeout_s` bounds a whole response. Without `resend`, a request is only sent again if there was no connection
    to send it on: otherwise the server may have generated, and billed, what was lost. `says_remedies`: the
    server's error responses say what to do, as those of our embedded server do, so nothing is added to them.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        key_header: Literal["bearer", "x-api-key"] = "bearer",
        timeout_s: float = ANSWER_TIMEOUT_S,
        resend: bool = True,
        says_remedies: bool = False,
    ) -> None:
        self._address = ServerAddress(base_url, api_key, key_header=key_header)
        self._pool = ConnectionPool()
        self._timeout_s = timeout_s
        self._resend = resend
        self._says_remedies = says_remedies

    @property
    def base(self) -> str:
        """The address without a name, a password and a trailing slash."""
        return self._address.base

    async def call(self, method: str, url: str, body: object, expected: type[_T]) -> _T:
        """Send one JSON request (without a body if it is None) and return its decoded response.

        Raises BackendError.
        """
        data = None if body is None else msgspec.json.encode(body)
        response = await self.send(method, url, data)
        return self.decode(f"{method} {url}", response, expected)

    async def models(self, url: str, headers: Mapping[str, str] | None = None) -> list[str]:
        """Return the names of the models that a server lists at `url`. Raises BackendError."""
        response = await self.send("GET", url, None, headers)
        return [model.id for model in self.decode(f"GET {url}", response, _ModelList).data]

    async def send(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Send one request, and return the body of its response.

        Raises BackendError, also for any status but 200.
        """
        pieces: list[bytes] = []
        with _RESPONSES.response() as count:
            async with self._open(method, url, data, headers) as response:

                def take(piece: bytes) -> None:
                    count(len(piece))
                    pieces.append(piece)

                await response.read(take, ANSWER_LIMIT)
            return self._address.redact_response(b"".join(pieces))

    async def stream(
        self,
        method: str,
        url: str,
        data: bytes | None,
        take: TakeEvents,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Pass the events of a streamed response to `take` as they arrive. Returns when the stream has ended.

        `take` gets the events that arrived together, including comments; if it returns True, the rest is not read.
        Raises BackendError like `send`, and for a stream that breaks off, stalls or is too large; and whatever
        `take` raises.
        """
        splitter = EventSplitter(f"{method} {url}: ")
        stopped = await self._read_stream(method, url, data, headers, splitter.feed, self._without_key, take)
        if not stopped and (rest := splitter.rest()):
            take(self._without_key([rest]))

    async def stream_data(
        self,
        method: str,
        url: str,
        data: bytes | None,
        take: Callable[[list[bytes]], object],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Do what `stream` does, with only the data of the events that have any. That takes less time."""
        splitter = EventSplitter(f"{method} {url}: ")
        hide_key = self._data_without_key
        stopped = await self._read_stream(method, url, data, headers, splitter.feed_data, hide_key, take)
        if not stopped and (rest := splitter.rest()) and rest.data:
            take(hide_key([rest.data]))

    async def _read_stream(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str] | None,
        split: Callable[[bytes], list[_T]],
        hide_key: Callable[[list[_T]], list[_T]],
        take: Callable[[list[_T]], object],
    ) -> bool:
        """Pass what `split` makes of the pieces of a response to `take`. Returns whether `take` stopped it."""
        has_key, arrived, kept = self._address.has_key, 0, 0
        with _RESPONSES.response() as count:

            def take_piece(piece: bytes) -> object:
                nonlocal arrived, kept
                arrived += len(piece)
                if not (events := split(piece)):
                    return None
                if has_key:
                    events = hide_key(events)
                usual = len(events) * _KEPT_OF_SMALL
                kept += min(arrived, usual) + max(arrived - len(events) * _SMALL_EVENT, 0)
                arrived = 0
                if kept > _COUNTED_AT_ONCE:
                    counted, kept = kept, 0
                    count(counted)
                return take(events)

            async with self._open(method, url, data, headers, stall_s=STALL_TIMEOUT_S) as response:
                await response.read(take_piece, STREAM_LIMIT)
            return response.stopped

    def decode(self, request: str, response: bytes, expected: type[_T]) -> _T:
        """Decode a response body as the expected type.

        Half of a surrogate pair, which UTF-8 cannot encode, becomes U+FFFD. `request` names the request in errors.
        Raises BackendError.
        """
        try:
            return decoded(partial(msgspec.json.decode, type=expected), response)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BackendError(
                f"{request}: invalid response: {error}; check that base_url is the address of the model server",
                status=200,
            ) from error

    def clean(self, text: str) -> str:
        """Remove our credentials from a text of the server, which may end up in a log, the store or a sandbox."""
        return self._address.redact(text)

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        self._pool.close()

    # --- one request ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str] | None,
        stall_s: float | None = None,
    ) -> AsyncGenerator[ServerConnection]:
        """Yield a response with status 200 whose body is not read yet. Raises BackendError for other statuses.

        The request is sent again only while no byte of a response has arrived.
        """
        sent = self._address.headers if headers is None else {**self._address.headers, **headers}
        for pause in (*RETRY_PAUSES_S, None):
            has_response = False
            try:
                async with self._pool.request(
                    method, url, data, sent, connect_s=CONNECT_TIMEOUT_S, total_s=self._timeout_s, stall_s=stall_s
                ) as response:
                    has_response = True
                    if response.status != 200:
                        raise await self._error_of(method, url, response)
                    yield response
                    return
            except ResponseTooLarge as error:
                raise BackendError(
                    f"{method} {url}: {error}; check that base_url is the address of the model server"
                ) from error
            except OSError as error:
                if has_response:
                    raise BackendError(
                        f"{method} {url}: the response broke off: {self._detail(error)}; see the model server's "
                        "log: it may have stopped or restarted"
                    ) from error
                if pause is None or not self._may_resend(error):
                    raise self._not_served(method, url, error) from error
                await asyncio.sleep(pause)

    def _not_served(self, method: str, url: str, error: OSError) -> BackendError:
        kind = NotServedError
        if isinstance(error, UnsendableRequest):
            return NotConnectedError(f"{method} {url}: {self._detail(error)}")
        if isinstance(error, NotConnected):
            kind = NotConnectedError
        elif isinstance(error, TimeoutError):
            # After a long wait, the request may have been generated, and must not be generated again elsewhere.
            kind = BackendError
        return kind(f"{method} {url}: no response: {self._detail(error)}")

    def _without_key(self, events: list[ServerSentEvent]) -> list[ServerSentEvent]:
        """Return the events with our key removed, in case the server sends it back."""
        # Almost no server does: searching four events together costs a third of searching each.
        if self._address.may_have_secret([event.raw for event in events]):
            for number, event in enumerate(events):
                raw = self._address.redact_response(event.raw)
                if raw is not event.raw:
                    events[number] = _event(raw)
        return events

    def _data_without_key(self, data: list[bytes]) -> list[bytes]:
        """Return the data of events with our key removed, in case the server sends it back."""
        if not self._address.may_have_secret(data):
            return data
        return [self._address.redact_response(part) for part in data]

    def _may_resend(self, error: OSError) -> bool:
        if isinstance(error, TimeoutError | UnsendableRequest):
            return False
        return self._resend or isinstance(error, NotConnected)

    async def _error_of(self, method: str, url: str, response: ServerConnection) -> BackendError:
        pieces: list[bytes] = []
        await response.read(pieces.append, ERROR_LIMIT)
        body = self._address.redact_bytes(b"".join(pieces))
        kind = NotServedError if response.status >= 500 else BackendError
        remedy = "" if self._says_remedies else f"; {_remedy(response.status)}"
        return kind(
            f"{method} {url}: status {response.status}: {_reason(body)}{remedy}",
            status=response.status,
            retry_after_s=retry_after_s(response.headers.get("retry-after")),
            should_retry=_SHOULD_RETRY.get(response.headers.get("x-should-retry", "")),
            body=body[:REFUSAL_LIMIT],
        )

    def _detail(self, error: Exception) -> str:
        return self.clean(str(error)) or type(error).__name__


_REMEDIES = {
    401: "check the API key, and the environment variable that holds it",
    403: "check the API key, and the environment variable that holds it",
    404: "check the server's address, and the name of the model",
    429: "send it again later, or fewer requests at a time",
}


def _remedy(status: int) -> str:
    """Return what to do after an error response. Agents do not get that of a rejected key (see `fault_of`)."""
    if status >= 500:
        return "see the model server's log, and send it again"
    return _REMEDIES.get(
        status, "change the request as the server says" if status >= 400 else "check the server's address"
    )


@contextmanager
def naming(request: str) -> Generator[None]:
    """Put `request`, such as POST URL, before the BackendErrors of a response that do not begin with it."""
    try:
        yield
    except BackendError as error:
        if not str(error).startswith(request):
            error.args = (f"{request}: {error}", *error.args[1:])
        raise


def _reason(body: bytes) -> str:
    """Return the message of an error response if it has the usual shape, else the beginning of its body."""
    try:
        response = msgspec.json.decode(body, type=_HttpErrorBody)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        response = _HttpErrorBody()
    error = response.error.message if isinstance(response.error, _HttpErrorDetail) else response.error
    reason = (error or response.message)[:REASON_LIMIT] or body[:500].decode(errors="replace")
    return reason.strip().removesuffix(".") or "without a reason"


def retry_after_s(value: str | None, now: float | None = None) -> float | None:
    """Parse a Retry-After header (a number of seconds or a date) into seconds from now (`now` in Unix seconds).

    Returns None if it is neither. The result is between 0 and MAX_RETRY_AFTER_S.
    """
    if value is None:
        return None
    if re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)", value := value.strip()):
        return min(max(float(value), 0.0), MAX_RETRY_AFTER_S)
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)  # an HTTP date is always in GMT
    return min(max(date.timestamp() - (time.time() if now is None else now), 0.0), MAX_RETRY_AFTER_S)
