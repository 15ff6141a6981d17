"""What publishes weights to a model server, as the loop sees it."""

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
        raise BackendError(
            f"{name}: answered with status {status}, expected 200: {reason}",
            status=status,
            body=answer[:_MAX_REASON],
        )

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._url, self._api_key, keep_alive=False)


WeightsKind = Literal["full", "lora"]
PublishMethod = Literal["disk", "sleep", "lora"]
"""How a server takes weights from a disk: whole in place, whole on waking, or an adapter."""

ADAPTER = "policy"
"""The name under which a LoRA is served."""


class PublisherCapabilities(Struct, frozen=True, kw_only=True):
    """What a publisher takes and does.

    `kind` is what the directory that is published holds: a whole model, or a LoRA adapter. `drained` tells that
    nothing may be in flight meanwhile; else what is in flight goes on with the new weights. `model` is the name
    under which the weights are asked for, None where it stays the server's own. `releases` tells that `release`
    frees the server's GPU memory for a trainer beside it.
    """

    kind: WeightsKind = "full"
    drained: bool = False
    model: str | None = None
    releases: bool = False


class Publisher(Protocol):
    """Publishes weights to one server, or to several that serve the same model.

    Publishing twice is publishing once: whoever was killed in between publishes again.
    """

    @property
    def capabilities(self) -> PublisherCapabilities:
        """What it takes and does."""
        ...

    async def publish(self, weights: Path, version: str) -> None:
        """Have the server sample from the model directory `weights`, and call that `version`.

        Returns when the next token sampled is of that version. Raises ConfigError for a directory that cannot be
        published, or a server without the endpoints; BackendError when the server fails: it stays paused where it
        may hold neither the old weights nor the new ones, until a publishing succeeds.
        """
        ...

    async def current(self) -> str | None:
        """The version that the server samples from, None where it was never told. Raises BackendError."""
        ...

    async def release(self) -> None:
        """Free the server's GPU memory until the next `publish`; does nothing where that is not possible."""
        ...


class PathMapping(Struct, frozen=True):
    """The same directory under two paths: `here`, and as the `server` sees it."""

    here: Path
    server: Path

    def of(self, path: Path) -> Path:
        """A path of ours as the server sees it. Raises ConfigError for one that is not below `here`."""
        try:
            return self.server / path.resolve().relative_to(self.here.resolve())
        except ValueError:
            raise ConfigError(
                f"{path} is not below {self.here}, which the server sees as {self.server}; write the weights there"
            ) from None


_UNNAMED = "default"
"""What vLLM and SGLang call weights that were given no version."""


class _WeightsInfo(Struct):
    weight_version: str | int | None = None


class DiskPublisher:
    """What publishers have in common whose server reads weights from a disk that it shares with us.

    A kind of server takes weights by one of its `ways`; `missing` says what to do where it lacks an endpoint, and
    `version_path` is the one that names the version. `adapter` names what is loaded by "lora".
    """

    ways: tuple[PublishMethod, ...]
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
        if method not in self.ways:
            supported = ", ".join(self.ways)
            raise ConfigError(f"unsupported way to publish to this server {method!r}; expected one of {supported}")
        self.orders = ControlClient(base_url, api_key, missing=self.missing, timeout_s=timeout_s)
        self._method: PublishMethod = method
        self._adapter = adapter
        self._seen_as = seen_as

    async def current(self) -> str | None:
        """See Publisher."""
        version = (await self.orders.get(self.version_path, _WeightsInfo)).weight_version
        return None if version is None or version == _UNNAMED else str(version)

    async def release(self) -> None:
        """See Publisher."""

    def _seen(self, weights: Path) -> str:
        """The path at which the server finds the weights. Raises ConfigError where they are none for this way."""
        path = check_weights(weights, "lora" if self._method == "lora" else "full")
        return str(self._seen_as.of(path) if self._seen_as else path)


def check_weights(weights: Path, kind: WeightsKind) -> Path:
    """The absolute path of a directory that holds what `kind` says. Raises ConfigError when it does not."""
    path = weights.resolve()
    lora = kind == "lora"
    needed, other = ("adapter_config.json", "config.json") if lora else ("config.json", "adapter_config.json")
    stems = ("adapter_model",) if lora else ("model", "pytorch_model")
    if not (path / needed).is_file():
        hint = f"; it holds {'a whole model' if lora else 'a LoRA adapter'}" if (path / other).is_file() else ""
        raise ConfigError(f"{path} has no {needed}, so no weights to publish as {kind}{hint}")
    ends = ("safetensors", "bin")
    if not any(file.is_file() for stem in stems for end in ends for file in path.glob(f"{stem}*.{end}")):
        raise ConfigError(f"{path} has no {stems[0]}*.safetensors; were the weights saved whole?")
    return path


@contextmanager
def explain_load_failure(seen: str) -> Generator[None]:
    """Say of a server that failed to load the directory that it sees as `seen` what may be wrong."""
    try:
        yield
    except BackendError as error:
        raise BackendError(
            f"{error}. The server reads {seen} itself: has it that path, with the architecture that it serves? "
            "It stays paused, because its weights may be neither the old nor the new ones",
            status=error.status,
            body=error.body,
        ) from error
