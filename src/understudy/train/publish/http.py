"""Orders to a model server: short JSON requests, a connection each, for minutes lie between them."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from understudy.errors import BackendError, ConfigError

_T = TypeVar("_T")

TIMEOUT_S = 1800.0
"""How long one order may take, in seconds: loading large weights from a network disk takes minutes."""

_CONNECT_S = 10.0
_PAUSES_S = (0.2, 1.0, None)
_REASON = 2000


class Orders:
    """The control endpoints of the server at `base_url`, which may end in `/v1`. Opens no connection before use.

    `missing` says what to do where an endpoint is not there.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, *, missing: str = "", timeout_s: float = TIMEOUT_S
    ) -> None:
        try:
            url = URL(base_url)
        except ValueError as error:
            raise ConfigError(f"{base_url!r} is no address of a server: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"{base_url!r} is no address of a server; give one like http://127.0.0.1:8000")
        path = url.path.rstrip("/")
        self.base = str(url.with_user(None).with_path(path.removesuffix("/v1") or "/")).rstrip("/")
        """The address without a name, a password, `/v1` and the last slash."""
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        elif url.user:
            basic = b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
            self._headers["authorization"] = f"Basic {basic}"
        self._key = api_key
        self._missing = missing
        self._timeout_s = timeout_s

    async def post(
        self, path: str, body: object = None, query: Mapping[str, str] | None = None, *, missing: str | None = None
    ) -> bytes:
        """Send an order; returns the answer. Raises BackendError; ConfigError where there is no such endpoint."""
        return await self._call("POST", path, body, query, missing)

    async def get(self, path: str, expected: type[_T]) -> _T:
        """Ask; returns the typed answer. Raises as `post` does."""
        return self.decode(path, await self._call("GET", path, None, None, None), expected)

    def decode(self, path: str, answer: bytes, expected: type[_T]) -> _T:
        """An answer as what it ought to be. Raises BackendError."""
        try:
            return msgspec.json.decode(answer, type=expected)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BackendError(
                f"{self.base}{path}: an answer that makes no sense: {error}; is it the server that it should be?",
                status=200,
            ) from error

    async def _call(
        self, method: str, path: str, body: object, query: Mapping[str, str] | None, missing: str | None
    ) -> bytes:
        named = f"{method} {self.base}{path}"
        for pause in _PAUSES_S:
            try:
                status, answer = await self._once(method, path, body, query)
                break
            except aiohttp.ClientConnectorError as error:
                if pause is None:
                    raise BackendError(f"{named}: no connection: {error}; is the server running?") from error
                await asyncio.sleep(pause)
            except TimeoutError as error:
                raise BackendError(f"{named}: no answer within {self._timeout_s:g} s") from error
            except aiohttp.ClientError as error:
                raise BackendError(
                    f"{named}: the answer broke off: {self._clean(str(error)) or type(error).__name__}"
                ) from error
        else:
            raise AssertionError("the last pause is None")
        if status == 200:
            return answer
        said = self._clean(answer[:_REASON].decode(errors="replace")).strip() or "nothing"
        if status in (404, 405) and (advice := self._missing if missing is None else missing):
            raise ConfigError(f"{named}: the server has no such endpoint ({status}: {said}); {advice}")
        raise BackendError(f"{named}: status {status}: {said}", status=status, body=answer[:_REASON])

    async def _once(
        self, method: str, path: str, body: object, query: Mapping[str, str] | None
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S)
        given: dict[str, Any] = {"params": query} if query else {}
        if body is not None:
            given["data"] = msgspec.json.encode(body)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
            session.request(method, self.base + path, allow_redirects=False, **given) as response,
        ):
            return response.status, await response.read()

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text
