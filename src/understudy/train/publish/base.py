"""The interface of weight publishers as the loop uses it, and what their implementations share."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import aiohttp
import msgspec
from msgspec import Struct
from yarl import URL

from understudy.errors import BackendError, ConfigError
from understudy.util.http import HttpConnection, ResponseTooLarge, read_body

_T = TypeVar("_T")

TIMEOUT_S = 1800.0
"""How long one request may take, in seconds: loading large weights from a network disk takes minutes."""

_CONNECT_S = 10.0
_RETRY_PAUSES_S = (0.2, 1.0)
_MAX_BODY_BYTES = 64 << 20
_MAX_REASON_CHARACTERS = 2000


class ControlClient:
    """A client for the control endpoints of the server at `base_url`, which may end in `/v1`. Connects only when
    used.

    `missing` is the advice in the error when an endpoint does not exist.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, *, missing: str = "", timeout_s: float = TIMEOUT_S
    ) -> None:
        try:
            url = URL(base_url)
        except ValueError:
            url = URL("")
        if url.scheme not in ("http", "https") or not url.host:
            address = base_url.rpartition("@")[2][:200]  # without a name and password
            raise ConfigError(
                f"invalid server address {address!r}; expected http:// or https:// and a host: give one like "
                "http://127.0.0.1:8000"
            )
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
        """POST a request; return the response body.

        Raises BackendError when the server fails, ConfigError when it has no such endpoint.
        """
        return await self._request("POST", path, body, query, missing)

    async def get(self, path: str, expected: type[_T]) -> _T:
        """GET a response and return it decoded as `expected`. Raises as `post` does."""
        return self.decode(path, await self._request("GET", path, None, None, None), expected)

    def decode(self, path: str, body: bytes, expected: type[_T]) -> _T:
        """Return a response body decoded as `expected`. Raises BackendError when it is invalid."""
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
        # A new connection for each request, because the next may come from another thread with its own event loop.
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
                status, body_received = response.status, await read_body(response, _MAX_BODY_BYTES)
        except aiohttp.ClientConnectorError as error:
            raise BackendError(
                f"{name}: no connection: {error}; start the server, or correct its address"
            ) from error
        except TimeoutError as error:
            raise BackendError(
                f"{name}: no response within {self._timeout_s:g} s; see the server's log, then run the "
                "same command again"
            ) from error
        except ResponseTooLarge as error:
            raise BackendError(f"{name}: {error}; check that this is the address of a model server") from error
        except aiohttp.ClientError as error:
            reason = connection.redact(str(error)) or type(error).__name__
            raise BackendError(
                f"{name}: the connection broke during the response: {reason}; see the server's log, then run "
                "the same command again"
            ) from error
        finally:
            await connection.close()
        if status == 200:
            return body_received
        reason = (
            connection.redact(body_received[:_MAX_REASON_CHARACTERS].decode(errors="replace")).strip()
            or "no reason given"
        )
        if status in (404, 405) and (advice := self._missing if missing is None else missing):
            raise ConfigError(f"{name}: the server has no such endpoint ({status}: {reason}); {advice}")
        raise BackendError(
            f"{name}: status {status}, expected 200: {reason}; see the server's log, then run the same "
            "command again",
            status=status,
            body=body_received[:_MAX_REASON_CHARACTERS],
        )

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._url, self._api_key, keep_alive=False)


WeightsKind = Literal["full", "lora"]
PublishMethod = Literal["disk", "sleep", "lora"]
"""How a server takes weights from a disk: whole in place, whole on waking, or an adapter."""

ADAPTER = "policy"
"""The name under which a LoRA is served."""


class PublisherCapabilities(Struct, frozen=True, kw_only=True):
    """What a publisher publishes, and how.

    `kind` is what the published directory holds: a whole model, or a LoRA adapter. With `drained`, no call may be
    in flight during publishing; otherwise calls in flight continue with the new weights. `model` is the model name
    to request from then on, None if it stays the server's own. `releases` says that `release` frees the server's
    GPU memory, for a trainer on the same GPU.
    """

    kind: WeightsKind = "full"
    drained: bool = False
    model: str | None = None
    releases: bool = False


class Publisher(Protocol):
    """Publishes weights to one server, or to several that serve the same model.

    Publishing is idempotent: after an interruption, publish again.
    """

    @property
    def capabilities(self) -> PublisherCapabilities:
        """Return what this publisher publishes, and how."""
        ...

    async def publish(self, weights: Path, version: str) -> None:
        """Make the server sample from the model directory `weights`, as `version`.

        Returns when every token sampled from then on is of that version. Raises ConfigError for a directory that
        cannot be published, or a server without the endpoints; BackendError when the server fails. A server that
        may hold neither the old nor the new weights stays paused until a later `publish` succeeds.
        """
        ...

    async def current(self) -> str | None:
        """Return the version that the server samples from, None if it was never given one. Raises BackendError."""
        ...

    async def release(self) -> None:
        """Free the server's GPU memory until the next `publish`. Does nothing unless `capabilities.releases` is
        true.
        """
        ...


class PathMapping(Struct, frozen=True):
    """The path of a directory on this machine (`here`) and on the server's machine (`server`)."""

    here: Path
    server: Path

    def of(self, path: Path) -> Path:
        """Return the server's path for a path of this machine. Raises ConfigError for one that is not below
        `here`.
        """
        try:
            return self.server / path.resolve().relative_to(self.here.resolve())
        except ValueError:
            raise ConfigError(
                f"{path} is not below {self.here}, the only directory whose path on the server is known "
                f"({self.server}); write the weights below {self.here}"
            ) from None


_DEFAULT_VERSION = "default"
"""The version that vLLM and SGLang report for weights that were never given one."""


class _WeightsInfo(Struct):
    weight_version: str | int | None = None


class DiskPublisher:
    """Base of the publishers whose server reads weights from a disk that it shares with this machine.

    A subclass supports the methods in `methods`. `missing` is the advice when the server lacks an endpoint,
    `version_path` is the endpoint that returns the version. `adapter` is the name under which "lora" loads an
    adapter.
    """

    methods: tuple[PublishMethod, ...]
    missing: str
    version_path: str

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        method: PublishMethod = "disk",
        adapter: str = ADAPTER,
        seen_as: PathMapping | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if method not in self.methods:
            supported = ", ".join(self.methods)
            raise ConfigError(
                f"unsupported method {method!r} of publishing to this server; give one of {supported}"
            )
        self.control = ControlClient(base_url, api_key, missing=self.missing, timeout_s=timeout_s)
        self._method: PublishMethod = method
        self._adapter = adapter
        self._seen_as = seen_as

    async def current(self) -> str | None:
        """See Publisher."""
        version = (await self.control.get(self.version_path, _WeightsInfo)).weight_version
        return None if version is None or version == _DEFAULT_VERSION else str(version)

    async def release(self) -> None:
        """See Publisher."""

    def _server_path(self, weights: Path) -> str:
        """Return the server's path of the weights. Raises ConfigError when they are not of the kind that the
        method needs.
        """
        path = check_weights(weights, "lora" if self._method == "lora" else "full")
        return str(self._seen_as.of(path) if self._seen_as else path)


def check_weights(weights: Path, kind: WeightsKind) -> Path:
    """Return the absolute path of a directory with weights of this kind. Raises ConfigError when it has none."""
    path = weights.resolve()
    lora = kind == "lora"
    needed, unexpected = ("adapter_config.json", "config.json") if lora else ("config.json", "adapter_config.json")
    stems = ("adapter_model",) if lora else ("model", "pytorch_model")
    if not (path / needed).is_file():
        remedy = f"give a directory with {'a LoRA adapter' if lora else 'a model'}"
        if (path / unexpected).is_file():
            remedy += (
                f", or publish {'its model with --publish disk' if lora else 'its adapter with --publish lora'}"
            )
        raise ConfigError(f"{path} has no {needed}, which weights to publish as {kind} need; {remedy}")
    ends = ("safetensors", "bin")
    if not any(file.is_file() for stem in stems for end in ends for file in path.glob(f"{stem}*.{end}")):
        raise ConfigError(
            f"{path} has no {stems[0]}*.safetensors, so it was not saved completely; save the weights again"
        )
    return path


@contextmanager
def explain_load_failure(server_path: str) -> Generator[None]:
    """Add likely causes to the BackendError of a server that could not load weights from `server_path`."""
    try:
        yield
    except BackendError as error:
        raise BackendError(
            f"{error}. The server reads {server_path} from its own disk: check that it has that path, with "
            "a model of the architecture that it serves. It stays paused, because its weights may be neither "
            "the old nor the new ones",
            status=error.status,
            body=error.body,
        ) from error
