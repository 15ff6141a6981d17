"""The admin API of a gateway, and its client. It has its own listener and its own key in the gateway's directory.

Agents cannot reach it: the gateway that they talk to has none of these paths, and their keys are not accepted
here.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import aiohttp
import msgspec
from msgspec import Meta, Struct

from understudy.errors import ConfigError, GatewayError, UnderstudyError
from understudy.gateway.control import GatewayState, GenerationControl, RunningCall
from understudy.gateway.server.http import ClientGone, HttpRequest, Receive, Scope, Send
from understudy.gateway.telemetry.metrics import CONTENT_TYPE, GatewayMetrics
from understudy.util.files import atomic_write
from understudy.util.text import reason_of

MIN_KEY_LENGTH = 16
"""The minimum length of an admin key, in characters."""
BODY_LIMIT = 10_000

_T = TypeVar("_T", bound=Struct)

_VERSION = r"^[!-~]{1,200}\Z"
Version = Annotated[str, Meta(pattern=_VERSION)]


class AdminTarget(Protocol):
    """What an operator controls: one gateway, or a supervisor that passes requests to all its workers."""

    async def pause(self, drain_s: float) -> int:
        """Start no further generation, and wait for up to `drain_s` seconds.

        Returns how many generations are left.
        """
        ...

    async def resume(self, version: str | None) -> None:
        """Resume generation, with this version of the weights if one is given."""
        ...

    async def publish(self, version: str) -> None:
        """Record this version of the weights from now on."""
        ...

    async def state(self) -> GatewayState:
        """Return the current state, summed over all workers."""
        ...

    async def calls(self) -> list[RunningCall]:
        """Return the calls that have no answer yet, of all workers."""
        ...

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        ...


class SingleGateway:
    """Controls the gateway in this process (see AdminTarget)."""

    def __init__(
        self, control: GenerationControl, metrics: GatewayMetrics, running: Callable[[], list[RunningCall]]
    ) -> None:
        self._control = control
        self._metrics = metrics
        self._running = running

    async def pause(self, drain_s: float) -> int:
        self._control.pause()
        return await self._control.drain(drain_s)

    async def resume(self, version: str | None) -> None:
        self._control.resume(version)

    async def publish(self, version: str) -> None:
        self._control.publish(version)

    async def state(self) -> GatewayState:
        return self._control.snapshot()

    async def calls(self) -> list[RunningCall]:
        return self._running()

    async def metrics(self) -> bytes:
        return self._metrics.text()


class RunningCalls(Struct, frozen=True):
    """The response to `GET /calls`."""

    calls: list[RunningCall]


class _Pause(Struct, forbid_unknown_fields=True):
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 60.0


class _Resume(Struct, forbid_unknown_fields=True):
    version: Version | None = None


class _Publish(Struct, forbid_unknown_fields=True):
    version: Version


class _AdminError(Exception):
    """A rejected admin request, with its HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminApp:
    """An ASGI application through which the holder of `key` controls `target`.

    Raises ConfigError if the key is too short to be a secret.
    """

    def __init__(self, target: AdminTarget, key: str) -> None:
        if len(key) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"{ADMIN_KEY}: admin key too short: expected at least {MIN_KEY_LENGTH} characters, got "
                f"{len(key)}; delete the file in the gateway's directory, and restart the gateway, which makes a "
                "new key"
            )
        self._target = target
        self._key = key.encode()
        self._routes: dict[str, tuple[str, Callable[[HttpRequest], Awaitable[None]]]] = {
            "/state": ("GET", self._state),
            "/calls": ("GET", self._calls),
            "/metrics": ("GET", self._metrics),
            "/pause": ("POST", self._pause),
            "/resume": ("POST", self._resume),
            "/publish": ("POST", self._publish),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive, send)
        try:
            await self._answer(request)
        except ClientGone:
            return
        except _AdminError as error:
            await _reply(request, error.status, {"error": {"message": str(error)}})
        except UnderstudyError as error:
            # Errors are reported to the operator in full, such as a worker that has ended, or a full store.
            await _reply(request, 500, {"error": {"message": str(error), "boundary": error.boundary}})

    async def _answer(self, request: HttpRequest) -> None:
        if request.path == "/healthz":
            return await _reply(request, 200, {"status": "ok"})
        if not hmac.compare_digest(request.api_key().encode(), self._key):
            raise _AdminError(
                401,
                f"invalid admin key: expected the one in {ADMIN_KEY} of the gateway's directory; send it in the "
                "header `authorization: Bearer KEY`",
            )
        method, handler = self._routes.get(request.path, ("", None))
        if handler is None:
            paths = ", ".join(["/healthz", *self._routes])
            raise _AdminError(
                404, f"{request.path[:200]}: no such path, expected one of {paths}; correct the path"
            )
        if request.method != method:
            raise _AdminError(
                405, f"{request.path}: expected {method}, got {request.method[:20]}; send it with {method}"
            )
        await handler(request)

    async def _state(self, request: HttpRequest) -> None:
        await _reply(request, 200, await self._target.state())

    async def _calls(self, request: HttpRequest) -> None:
        await _reply(request, 200, RunningCalls(await self._target.calls()))

    async def _metrics(self, request: HttpRequest) -> None:
        await request.send_response(200, await self._target.metrics(), content_type=CONTENT_TYPE)

    async def _pause(self, request: HttpRequest) -> None:
        order = await _read(request, _Pause)
        await _reply(request, 200, {"in_flight": await self._target.pause(order.drain_s)})

    async def _resume(self, request: HttpRequest) -> None:
        await self._target.resume((await _read(request, _Resume)).version)
        await self._state(request)

    async def _publish(self, request: HttpRequest) -> None:
        await self._target.publish((await _read(request, _Publish)).version)
        await self._state(request)


async def _read(request: HttpRequest, type_: type[_T]) -> _T:
    """Decode the body as `type_`. No body means an empty object."""
    body = bytearray()
    async for chunk in request.body_chunks():
        body += chunk
        if len(body) > BODY_LIMIT:
            raise _AdminError(
                413,
                f"request body too large: expected at most {BODY_LIMIT} bytes; send only the fields of "
                f"{request.path}",
            )
    try:
        return msgspec.json.decode(bytes(body) or b"{}", type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fields = ", ".join(field.name for field in msgspec.structs.fields(type_))
        reason = str(error).replace(
            f"`str` matching regex {_VERSION!r}",
            "a version of 1 to 200 printable ASCII characters, without spaces",
        )
        raise _AdminError(
            400, f"invalid request body: {reason}; send {request.path} a JSON object with {fields}"
        ) from error


async def _reply(request: HttpRequest, status: int, body: Any) -> None:
    await request.send_response(status, msgspec.json.encode(body))


ADDRESS = "gateway.json"
ADMIN_KEY = "admin.key"


class GatewayAddress(Struct, frozen=True):
    """Where a gateway listens for agents and for its operator.

    `store` is the database with its keys and calls, without its password; None if they are in the gateway's
    directory.
    """

    url: str
    admin_url: str
    pid: int
    store: str | None = None


def admin_key(directory: Path) -> str:
    """Return the admin key in a gateway's directory. It is created if missing, and readable by its owner only."""
    path = directory / ADMIN_KEY
    if not path.exists():
        # Written durably, because a gateway with half a key, as after a power cut, would accept no admin requests.
        atomic_write(path, secrets.token_urlsafe(32).encode(), fsync=True, mode=0o600)
    return path.read_text().strip()


def announce(directory: Path, address: GatewayAddress) -> None:
    """Write the address file atomically."""
    atomic_write(directory / ADDRESS, msgspec.json.encode(address))


_MAX_RESPONSE_BYTES = 16 << 20
"""The largest response of a gateway's admin address that is read."""


class _RejectionText(Struct):
    message: str


class _Rejection(Struct):
    error: _RejectionText


def rejection(answer: bytes) -> str:
    """Return the message of a rejected admin request, or the beginning of what else came."""
    try:
        return msgspec.json.decode(answer, type=_Rejection).error.message[:500]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return answer[:500].decode(errors="replace")


async def _bounded_text(response: aiohttp.ClientResponse) -> str:
    """Return a response's text. Raises GatewayError if it is too large: a directory may name any address."""
    try:
        await response.content.readexactly(_MAX_RESPONSE_BYTES + 1)
    except asyncio.IncompleteReadError as whole:
        return whole.partial.decode(errors="replace")
    raise GatewayError(
        f"{response.url} sent more than {_MAX_RESPONSE_BYTES >> 20} MiB; check that it is a gateway's admin "
        "address"
    )


async def send_admin_request(directory: Path, method: str, path: str, body: dict[str, Any] | None = None) -> str:
    """Send an admin request to the gateway of a directory, and return the response.

    Raises ConfigError and GatewayError.
    """
    try:
        address = msgspec.json.decode((directory / ADDRESS).read_bytes(), type=GatewayAddress)
    except OSError as error:
        raise ConfigError(
            f"no gateway is running in {directory} ({ADDRESS}: {error.strerror}); name its directory with --dir, "
            "or start one with: understudy gateway serve"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{directory / ADDRESS}: invalid address file of a gateway: {error}; restart the gateway, which "
            "writes it"
        ) from error
    try:
        key = (directory / ADMIN_KEY).read_bytes().strip().decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(
            f"{directory / ADMIN_KEY}: the gateway's admin key cannot be read: {error.strerror}; run as the user "
            "who started the gateway, or restart the gateway, which makes a missing key"
        ) from error
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{directory / ADMIN_KEY}: invalid admin key, expected one line of printable ASCII characters; delete "
            "the file, and restart the gateway, which makes a new key"
        )
    try:
        headers = {"authorization": f"Bearer {key}"}
        # Without a timeout, because a drain takes as long as the request asks for.
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.request(method, address.admin_url + path, json=body, allow_redirects=False) as response,
        ):
            answer = await _bounded_text(response)
    except (aiohttp.ClientError, OSError) as error:
        raise GatewayError(
            f"the gateway in {directory} does not respond at {address.admin_url}: {reason_of(error)}; check that "
            f"it is still running (pid {address.pid}), or start it again: understudy gateway serve"
        ) from error
    if response.status != 200:
        raise GatewayError(
            f"the gateway in {directory} rejected {path} (status {response.status}, expected 200): "
            f"{rejection(answer.encode())}; see its log"
        )
    return answer
