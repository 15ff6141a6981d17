"""HTTP requests to model servers: limited response sizes, no redirects, and no credentials in any message.

Callers translate errors into their own: `open` raises what aiohttp raises.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from io import BytesIO
from typing import Literal
from urllib.parse import unquote

import aiohttp
from yarl import URL

UPLOAD_IN_PIECES_ABOVE_BYTES = 1 << 20
"""A request body of more bytes is sent in pieces, so that the event loop serves other requests meanwhile."""

_USER_IN_URL = re.compile(r"(?<=://)[^/?#]*@")
_KEY_HEADERS = {"bearer": ("authorization", "Bearer {}"), "x-api-key": ("x-api-key", "{}")}

_MIN_ENCODED_BYTES = 8
"""Shorter secrets are looked for as they are: their hex or base64 would be found in ordinary text."""
_MIN_BYTES_IN_RESPONSES = 16
"""Shorter secrets, in characters, are not looked for in successful responses."""


def _any_form(secrets: Sequence[str]) -> re.Pattern[bytes]:
    """Return a pattern that finds secrets, also in the forms in which a server may echo them in an error.

    That is any mix of URL, JSON and HTML escapes, hex, and base64 of a text that contains them.
    """
    forms: list[str] = []
    for secret in secrets:
        data = secret.encode()
        forms.append("".join(map(_any_escape, data)))
        if len(data) >= _MIN_ENCODED_BYTES:
            forms.append(f"(?i:{data.hex()})")
            forms += (_in_base64(data, before) for before in range(3))
    return re.compile("|".join(forms).encode("latin-1"))


def _any_escape(byte: int) -> str:
    """Return a pattern that matches a byte in all its escaped forms."""
    code = f"(?i:{byte:02x})"
    return rf"(?:\\?{re.escape(chr(byte))}|%(?:25)*{code}|\\+u00{code}|\\+x{code}|&#0*{byte};|&#x0*{code};)"


def _in_base64(data: bytes, before: int) -> str:
    """Return a pattern of the characters of a base64 text that depend on `data` only, with `before` bytes before
    it.
    """
    encoded = b64encode(bytes(before) + data).decode().rstrip("=")
    first = -(-before * 8 // 6)
    last = (before + len(data)) * 8 // 6
    return "".join({"+": "[+-]", "/": "[/_]"}.get(char, char) for char in encoded[first:last])


def _plain_forms(secrets: Sequence[str]) -> tuple[bytes, ...]:
    """Return the secrets as they are, in hex and in base64: what can be looked for in every successful response.

    Short secrets are left out: one such as "EMPTY" is no real key, and an ordinary word in a response.
    """
    forms: list[bytes] = []
    for data in (secret.encode() for secret in secrets if len(secret) >= _MIN_BYTES_IN_RESPONSES):
        forms += (data, data.hex().encode())
        for before in range(3):
            first, last = -(-before * 8 // 6), (before + len(data)) * 8 // 6
            forms.append(b64encode(bytes(before) + data).rstrip(b"=")[first:last])
    return tuple(forms)


class ResponseTooLarge(Exception):
    """A response body has more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the response has more than {limit} bytes, the maximum")
        self.limit = limit


def was_not_sent(error: BaseException) -> bool:
    """Return whether a request certainly failed before the server saw any of it, because there was no
    connection.
    """
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


class ServerAddress:
    """The server at `base_url`, with the headers of requests to it.

    A name and password in `base_url` are sent as basic authorization where there is no `api_key`. They are no part
    of `base`, so that they stand in no message; the same goes for the key (see `redact`).
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        key_header: Literal["bearer", "x-api-key"] = "bearer",
    ) -> None:
        user = _USER_IN_URL.search(base_url)
        self.base = _USER_IN_URL.sub("", base_url).rstrip("/")
        """The address without a name, a password and the last slash."""
        self.headers = {"content-type": "application/json"}
        self._secrets: list[str] = []
        if api_key:
            header, form = _KEY_HEADERS[key_header]
            self.headers[header] = form.format(api_key)
            self._secrets = [api_key]
        elif user:
            basic = b64encode(unquote(user[0].removesuffix("@")).encode()).decode()
            self.headers["authorization"] = f"Basic {basic}"
            self._secrets = [basic, user[0]]
        self._secret_forms = _any_form(self._secrets) if self._secrets else None
        self._plain_forms = _plain_forms(self._secrets)
        self.has_key = bool(self._plain_forms)
        """Whether there is a secret that `redact_response` looks for."""

    def redact(self, text: str) -> str:
        """Return a text of the server without our credentials, because it may be written to a log, the store or a
        sandbox.
        """
        return self.redact_bytes(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def redact_bytes(self, data: bytes) -> bytes:
        """See `redact`."""
        return self._secret_forms.sub(b"***", data) if self._secret_forms else data

    def may_have_secret(self, parts: Sequence[bytes]) -> bool:
        """Return whether `redact_response` may change one of the parts of a successful response."""
        if not self._plain_forms:
            return False
        together = parts[0] if len(parts) == 1 else b"".join(parts)
        return any(form in together for form in self._plain_forms)

    def redact_response(self, data: bytes) -> bytes:
        """Return a part of a successful response without our credentials, whether written plainly, in hex or in
        base64.
        """
        for form in self._plain_forms:
            if form in data:
                data = data.replace(form, b"***")
        return data


class HttpConnection(ServerAddress):
    """Connections to a server (see ServerAddress). Opens none before it is used.

    With `keep_alive`, connections are used again; there is no limit on how many are open at once. The gateway's
    backends have connections of their own (`gateway/backends/transport.py`), because a stream costs less there.
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, keep_alive: bool = True) -> None:
        super().__init__(base_url, api_key)
        self._keep_alive = keep_alive
        self._session: aiohttp.ClientSession | None = None

    async def open(
        self,
        method: str,
        url: str | URL,
        data: bytes | None = None,
        *,
        timeouts: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        retry_pauses_s: Sequence[float] = (),
        may_retry: Callable[[Exception], bool] = was_not_sent,
    ) -> aiohttp.ClientResponse:
        """Yield the response to one request, whatever its status, with its body still unread; use with `async
        with`.

        If no response came, the request is sent again after each of `retry_pauses_s` seconds, as long as
        `may_retry` returns true for the error. (aiohttp itself repeats a GET once when the connection is lost.)
        Redirects are not followed, because the conversation must not be sent to an address that nobody configured.
        Raises aiohttp.ClientError or OSError (which includes TimeoutError).
        """
        for pause in (*retry_pauses_s, None):
            try:
                return await self._client().request(
                    method,
                    url,
                    data=_upload(data),
                    headers=headers,
                    params=params,
                    timeout=timeouts,
                    allow_redirects=False,
                )
            except (aiohttp.ClientError, OSError) as error:
                if pause is None or not may_retry(error):
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("internal error: the loop ends with a response or an error")

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self.headers,
                connector=aiohttp.TCPConnector(limit=0, force_close=not self._keep_alive),
                # A cookie from the response to one attempt must not be sent with another attempt's request.
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


async def read_pieces(response: aiohttp.ClientResponse, limit: int) -> AsyncGenerator[bytes]:
    """Yield the body as it arrives; the limit is on decompressed bytes.

    Raises ResponseTooLarge, and what aiohttp raises when the connection is lost.
    """
    size = 0
    while piece := await response.content.readany():
        size += len(piece)
        if size > limit:
            raise ResponseTooLarge(limit)
        yield piece


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the whole body. Raises as `read_pieces` does."""
    return b"".join([piece async for piece in read_pieces(response, limit)])


def _upload(data: bytes | None) -> bytes | BytesIO | None:
    return BytesIO(data) if data is not None and len(data) > UPLOAD_IN_PIECES_ABOVE_BYTES else data
