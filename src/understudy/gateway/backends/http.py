"""The HTTP client behind every backend: bounded, never redirected, and tried again only before the first byte."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Literal, TypeVar
from urllib.parse import unquote

import aiohttp
import msgspec
from msgspec import Struct, field

from understudy.errors import BackendError
from understudy.gateway.backends.sse import Event, Splitter

_T = TypeVar("_T")

IN_PIECES = 1 << 20
RETRY_PAUSES_S = (0.2, 0.8)
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 3600.0
STALL_TIMEOUT_S = 600.0
"""How long a stream may be silent, which is also how long a request may wait in the server's queue for one."""
ANSWER_LIMIT = 256 << 20
"""The largest answer that is read: a whole context with its tokens and logprobs is far smaller."""
REFUSAL_LIMIT = 64 << 10
REASON_LIMIT = 4000
"""How much of a refusal is kept: all of its body, in bytes, and of its message in an error, in characters."""

_SHOULD_RETRY = {"true": True, "false": False}
_USER_IN_URL = re.compile(r"(?<=://)[^/?#]*@")
_KEY_HEADERS = {"bearer": ("authorization", "Bearer {}"), "x-api-key": ("x-api-key", "{}")}


class NotServedError(BackendError):
    """A request that the server did not take: no byte of an answer came, or a status of 5xx before any other.

    Another endpoint may be asked the same.
    """


class NotConnectedError(NotServedError):
    """A request that was never sent: there was no connection."""


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
    """Requests to the server at `base_url`, with its key. Opens no connection before it is used.

    A name and password in `base_url` are sent as basic authorization where there is no `api_key`; unlike the rest
    of the address they stand in no error, which the agent may see. Nor does the key. `timeout_s` bounds a whole
    answer. Without `resend`, a request is sent again only where there was no connection to send it over.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        key_header: Literal["bearer", "x-api-key"] = "bearer",
        timeout_s: float = ANSWER_TIMEOUT_S,
        resend: bool = True,
    ) -> None:
        user = _USER_IN_URL.search(base_url)
        self.base = _USER_IN_URL.sub("", base_url).rstrip("/")
        """The address, without a name, a password and the last slash."""
        self._timeout_s = timeout_s
        self._resend = resend
        self._headers = {"content-type": "application/json"}
        self._secrets: list[str] = []
        if api_key:
            header, form = _KEY_HEADERS[key_header]
            self._headers[header] = form.format(api_key)
            self._secrets = [api_key]
        elif user:
            basic = b64encode(unquote(user[0].removesuffix("@")).encode()).decode()
            self._headers["authorization"] = f"Basic {basic}"
            self._secrets = [basic, user[0]]
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, url: str, body: object, expected: type[_T]) -> _T:
        """One JSON request (without a body when it is None) and its typed answer. Raises BackendError."""
        data = None if body is None else msgspec.json.encode(body)
        answer = await self.send(method, url, data)
        return self.decode(f"{method} {url}", answer, expected)

    async def models(self, url: str, headers: Mapping[str, str] | None = None) -> list[str]:
        """The names of the models that a server lists at `url`. Raises BackendError."""
        answer = await self.send("GET", url, None, headers)
        return [model.id for model in self.decode(f"GET {url}", answer, _ModelList).data]

    async def send(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """One request and the body of its answer. Raises BackendError, also for every status but 200."""
        async with self._open(method, url, data, headers) as response:
            return await self._whole(response)

    async def stream(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[list[Event]]:
        """The events of a streamed answer, those that come together together; to be used with `aclosing`.

        Comments are among them. Closing it ends the request. Raises BackendError as `send` does, and for a stream
        that breaks off, stalls or is too large.
        """
        splitter, size = Splitter(), 0
        async with self._open(method, url, data, headers, stall_s=STALL_TIMEOUT_S) as response:
            while piece := await self._read(response):
                size += len(piece)
                _check_size(response, size)
                if events := splitter.feed(piece):
                    yield events
            if rest := splitter.rest():
                yield [rest]

    def decode(self, request: str, answer: bytes, expected: type[_T]) -> _T:
        """An answer as what it ought to be; `request` names what was asked. Raises BackendError."""
        try:
            return msgspec.json.decode(answer, type=expected)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BackendError(
                f"{request}: an answer that makes no sense: {error}; is it the server that it should be?",
                status=200,
            ) from error

    def clean(self, text: str) -> str:
        """Text of the server's, without our key: it may end in a log, the store or a sandbox."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    async def close(self) -> None:
        """Drop the connections. May be called twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- one request ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str] | None,
        stall_s: float | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """An answer with status 200 whose body is still to be read. Raises BackendError for any other."""
        response = await self._answered(method, url, data, headers, stall_s)
        async with response:
            if response.status != 200:
                raise await self._refused(response)
            yield response

    async def _answered(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str] | None, stall_s: float | None
    ) -> aiohttp.ClientResponse:
        """Send until an answer comes; tried again only while no byte of one has come."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=stall_s)
        for pause in (*RETRY_PAUSES_S, None):
            try:
                # Where a redirect leads nobody has said that the conversation may go.
                return await self._client().request(
                    method, url, data=_sendable(data), headers=headers, timeout=timeout, allow_redirects=False
                )
            except (aiohttp.ClientError, OSError) as error:
                waited = isinstance(error, TimeoutError)
                unsent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
                final = waited or isinstance(error, aiohttp.InvalidURL) or not (self._resend or unsent)
                if pause is None or final:
                    # Who waited for an answer must not have it generated a second time elsewhere.
                    kind = NotConnectedError if unsent else BackendError if waited else NotServedError
                    raise kind(
                        f"{method} {url}: no answer: {self._said(error)}; is the model server running?"
                    ) from error
                await asyncio.sleep(pause)
        raise AssertionError("the last pause is None")

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        """The body of an answer. Raises BackendError above ANSWER_LIMIT, however small it was on the wire."""
        parts: list[bytes] = []
        size = 0
        while piece := await self._read(response):
            size += len(piece)
            _check_size(response, size)
            parts.append(piece)
        return b"".join(parts)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise BackendError(
                f"{response.method} {response.url}: the answer broke off: {self._said(error)}"
            ) from error

    async def _refused(self, response: aiohttp.ClientResponse) -> BackendError:
        body = await self._whole(response)
        for secret in self._secrets:
            body = body.replace(secret.encode(), b"***")
        kind = NotServedError if response.status >= 500 else BackendError
        return kind(
            f"{response.method} {response.url}: status {response.status}: {_reason(body)}",
            status=response.status,
            retry_after_s=_seconds(response.headers.get("retry-after")),
            should_retry=_SHOULD_RETRY.get(response.headers.get("x-should-retry", "")),
            body=body[:REFUSAL_LIMIT],
        )

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                # What one attempt's answer set must not go with another's request.
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _said(self, error: Exception) -> str:
        return self.clean(str(error)) or type(error).__name__


def _check_size(response: aiohttp.ClientResponse, size: int) -> None:
    if size > ANSWER_LIMIT:
        raise BackendError(f"{response.method} {response.url}: the answer has more than {ANSWER_LIMIT} bytes")


def _reason(answer: bytes) -> str:
    """What a refusal says: its message where it has the usual shape, else its beginning."""
    try:
        refusal = msgspec.json.decode(answer, type=_HttpErrorBody)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        refusal = _HttpErrorBody()
    error = refusal.error.message if isinstance(refusal.error, _HttpErrorDetail) else refusal.error
    return (error or refusal.message)[:REASON_LIMIT] or answer[:500].decode(errors="replace")


def _seconds(value: str | None) -> float | None:
    """A retry-after in seconds; the form with a date is not worth a parser."""
    return float(value) if value is not None and re.fullmatch(r"\d{1,9}(\.\d+)?", value.strip()) else None


def _sendable(data: bytes | None) -> bytes | BytesIO | None:
    """A body as it is sent: a large one in pieces, so that everything else goes on meanwhile."""
    return BytesIO(data) if data is not None and len(data) > IN_PIECES else data
