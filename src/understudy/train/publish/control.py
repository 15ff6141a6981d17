"""Control requests to a model server: short JSON requests, each on a connection of its own, minutes apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from understudy.errors import BackendError, ConfigError
from understudy.util.http import HttpConnection, ResponseTooLarge, read_body

_T = TypeVar("_T")

TIMEOUT_S = 1800.0
"""How long one request may take, in seconds: loading large weights from a network disk takes minutes."""

_CONNECT_S = 10.0
_RETRY_PAUSES_S = (0.2, 1.0)
_MAX_BODY = 64 << 20
_MAX_REASON = 2000


class ControlClient:
    """The control endpoints of the server at `base_url`, which may end in `/v1`. Opens no connection before use.

    `missing` says what to do where an endpoint is not there.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, *, missing: str = "", timeout_s: float = TIMEOUT_S
    ) -> None:
        try:
            url = URL(base_url)
        except ValueError as error:
            raise ConfigError(f"invalid server address {base_url!r}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"invalid server address {base_url!r}: expected one like http://127.0.0.1:8000")
        path = url.path.rstrip("/").removesuffix("/v1")
        self._url = str(url.with_path(path or "/"))
        self._api_key = api_key
        self.base = self._connection().base
        """The address without a name, a password, `/v1` and the last slash."""
        self._missing = missing
        self._timeout_s = timeout_s

    async def post(
        self, path: str, body: object = None, query: Mapping[str, str] | None = None, *, missing: str | None = None
    ) -> bytes:
        """POST a request; returns the response body.

        Raises BackendError; ConfigError where there is no such endpoint.
        """
        return await self._request("POST", path, body, query, missing)

    async def get(self, path: str, expected: type[_T]) -> _T:
        """GET a typed response. Raises as `post` does."""
        return self.decode(path, await self._request("GET", path, None, None, None), expected)

    def decode(self, path: str, body: bytes, expected: type[_T]) -> _T:
        """A response body as the expected type. Raises BackendError."""
        try:
            return msgspec.json.decode(body, type=expected)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BackendError(
                f"{self.base}{path}: invalid response: {error}; check that this address is the model server's",
                status=200,
            ) from error

    async def _request(
        self, method: str, path: str, body: object, query: Mapping[str, str] | None, missing: str | None
    ) -> bytes:
        name = f"{method} {self.base}{path}"
        # Not kept between requests: the next may come from another thread, with an event loop of its own.
        connection = self._connection()
        try:
            async with await connection.open(
                method,
                self.base + path,
                None if body is None else msgspec.json.encode(body),
                timeouts=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S),
                params=query,
                retry_pauses_s=_RETRY_PAUSES_S,
                may_retry=lambda error: isinstance(error, aiohttp.ClientConnectorError),
            ) as response:
                status, answer = response.status, await read_body(response, _MAX_BODY)
        except aiohttp.ClientConnectorError as error:
            raise BackendError(f"{name}: no connection: {error}; is the server running?") from error
        except TimeoutError as error:
            raise BackendError(f"{name}: no response within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, ResponseTooLarge) as error:
            reason = connection.redact(str(error)) or type(error).__name__
            raise BackendError(f"{name}: the response broke off: {reason}") from error
        finally:
            await connection.close()
        if status == 200:
            return answer
        reason = connection.redact(answer[:_MAX_REASON].decode(errors="replace")).strip() or "no reason given"
        if status in (404, 405) and (advice := self._missing if missing is None else missing):
            raise ConfigError(f"{name}: the server has no such endpoint ({status}: {reason}); {advice}")
        raise BackendError(f"{name}: status {status}: {reason}", status=status, body=answer[:_MAX_REASON])

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._url, self._api_key, keep_alive=False)
