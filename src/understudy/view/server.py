"""The viewer's server: an ASGI application over the API, the page and the events, on uvicorn."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import Struct

from understudy.errors import UnderstudyError
from understudy.gateway.server.http import ClientGone, HttpRequest, Receive, Scope, Send
from understudy.gateway.server.listen import Listener, http_url, tcp_socket
from understudy.util.validation import validation_text
from understudy.view.api import RawBody, ViewApi
from understudy.view.events import ChangeWatch, send_events
from understudy.view.faults import ViewRefused, encode, to_view_error
from understudy.view.page import NOT_BUILT, Page
from understudy.view.paging import CursorScope, PagedResponses
from understudy.view.routes import ROUTES, EventQuery, PagedQuery, Route
from understudy.view.security import HEADERS, AccessRules, address_for_others

_log = logging.getLogger(__name__)

BODY_LIMIT: Final = 20_000
BODY_TIMEOUT_S: Final = 30.0
"""For how many seconds a request may send its body."""
WORKERS: Final = 4
"""How many requests are computed at the same time. Further requests wait."""
_NO_STORE: Final = ((b"cache-control", b"no-store"), *HEADERS)
_EVENTS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), *_NO_STORE]


class ViewServer:
    """The ASGI application. `stopping` ends the event streams; a body may take `body_timeout_s` to arrive."""

    def __init__(
        self, api: ViewApi, rules: AccessRules, page: Page, *, body_timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._api = api
        self._rules = rules
        self._page = page
        self._body_timeout_s = body_timeout_s
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="view")
        self._routes = [(route, _pattern(route.path)) for route in ROUTES if route.body is None or api.may_write]
        self._paged_responses = PagedResponses()
        self.stopping = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive, send)
        try:
            await self._respond(request, scope)
        except ClientGone:
            return
        except ViewRefused as refused:
            await self._refuse(request, refused)
        except UnderstudyError as error:
            await self._refuse(request, to_view_error(error))
        except Exception:  # noqa: BLE001 - a fault of ours in one answer must not end the others
            _log.exception("internal error of the viewer in %s %s; please report it", request.method, request.path)
            message = f"internal error of the viewer in {request.method} {request.path[:200]}"
            await self._refuse(
                request,
                ViewRefused(
                    500, "internal", message, "reload; please report it with the traceback in its terminal"
                ),
            )

    async def _refuse(self, request: HttpRequest, refused: ViewRefused) -> None:
        if not request.started:
            await request.send_response(refused.status, refused.body(), _NO_STORE)

    async def _respond(self, request: HttpRequest, scope: Scope) -> None:
        if len(request.query) > 10_000:
            raise ViewRefused(
                414,
                "query",
                f"the query has {len(request.query):,} bytes; expected at most 10,000",
                "send a shorter query",
            )
        pairs = parse_qsl(
            request.query.decode("latin-1"), keep_blank_values=True, encoding="utf-8", errors="replace"
        )
        query = dict(pairs)
        token = query.pop("token", None)
        self._rules.check(request.method, request.headers, token)
        request.authenticate()
        raw: bytes = scope.get("raw_path") or request.path.encode()
        segments = [unquote_to_bytes(part).decode("utf-8", "replace") for part in raw.split(b"/")[1:]]
        if segments[:1] != ["api"]:  # `*`, the target of OPTIONS, has no segment
            return await self._send_page(request, token)
        route, parts = self._route(request.method, segments)
        values = _decoded(query, route.query, "the query")
        if route.media == "events":
            return await self._send_events(request, values)
        cursors = CursorScope(route.name, parts, values)
        values = cursors.without_prefix(values)
        body = None if route.body is None else await self._body(request, route.body)
        method: Callable[..., Any] = getattr(self._api, route.name)
        work = partial(method, parts, values) if body is None else partial(method, parts, body)
        if isinstance(values, PagedQuery):
            work = partial(self._paged_responses.page, values.cursor, route.lists, work)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._workers, work)
        if isinstance(result, RawBody):
            size = (b"x-size", str(result.size).encode())
            attachment = (b"content-disposition", b"attachment")
            await request.send_response(
                200, result.content, (size, attachment, *_NO_STORE), content_type=b"application/octet-stream"
            )
        else:
            content = await loop.run_in_executor(self._workers, encode, cursors.with_prefix(result))
            await request.send_response(200, content, _NO_STORE)

    def _route(self, method: str, segments: Sequence[str]) -> tuple[Route, dict[str, str]]:
        """Return the route of a request, and the variable parts of its path. Raises ViewRefused."""
        other_methods: list[str] = []
        for route, pattern in self._routes:
            if (parts := _match(pattern, segments)) is not None:
                if route.method == method:
                    return route, parts
                other_methods.append(route.method)
        path = "/" + "/".join(segments)
        if method == "POST" and not self._api.may_write:
            raise ViewRefused(
                403,
                "read_only",
                "the viewer was started with --read-only, so it refuses every request that writes",
                "restart `understudy view` without --read-only",
            )
        if other_methods:
            raise ViewRefused(
                405,
                "method",
                f"{path[:200]}: method {method[:20]} is not allowed, expected {' or '.join(other_methods)}",
                "send the request with that method",
            )
        raise ViewRefused(
            404, "not_found", f"{path[:200]}: no such path", "`understudy view --openapi` prints all paths"
        )

    async def _body(self, request: HttpRequest, kind: type[Struct]) -> Struct:
        """Return the body of a writing request. Raises ViewRefused if it is too large or invalid."""
        declared = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if declared != b"application/json":
            # Another site's form can send other content types without a preflight request, but not JSON.
            raise ViewRefused(
                415,
                "content_type",
                f"content-type: expected application/json, got {declared[:100].decode('latin-1')!r}",
                "send JSON",
            )
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return _decoded(await self._whole_body(request), kind, "the body")
        except TimeoutError as error:
            raise ViewRefused(
                408, "body", f"the body did not arrive within {self._body_timeout_s:g} s", "send it again, at once"
            ) from error

    async def _whole_body(self, request: HttpRequest) -> bytes:
        body = bytearray()
        async for chunk in request.body_chunks():
            body += chunk
            if len(body) > BODY_LIMIT:
                raise ViewRefused(
                    413,
                    "body",
                    f"the body is too large: expected at most {BODY_LIMIT} bytes",
                    "send a smaller body, such as a shorter note",
                )
        return bytes(body)

    async def _send_events(self, request: HttpRequest, query: Struct) -> None:
        assert isinstance(query, EventQuery)
        if query.store is None:
            watch = ChangeWatch(self._api.catalog.scan)
        else:
            only = self._api.catalog.store(query.store)
            watch = ChangeWatch(lambda: [only])
        await request.start(200, _EVENTS)
        disconnected = asyncio.ensure_future(request.wait_for_disconnect())
        sending = asyncio.ensure_future(send_events(watch, request.write, self.stopping))
        try:
            await asyncio.wait({disconnected, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
            sending.cancel()
            results = await asyncio.gather(disconnected, sending, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, OSError):
                _log.error(
                    "internal error of the viewer in %s, whose clients connect again; please report it",
                    request.path,
                    exc_info=result,
                )
        await request.write(b"", last=True)

    async def _send_page(self, request: HttpRequest, token: str | None) -> None:
        if request.method not in ("GET", "HEAD"):
            raise ViewRefused(
                405, "method", f"expected GET, got {request.method[:20]}", "send the request with GET"
            )
        headers = [*HEADERS]
        if token is not None and self._rules.token is not None:
            headers.append((b"set-cookie", self._rules.cookie()))
        if not self._page.is_built:
            await request.send_response(
                503, NOT_BUILT.encode(), headers, content_type=b"text/plain; charset=utf-8"
            )
            return
        file = self._page.file_at(request.path)
        if file is None:
            raise ViewRefused(
                404,
                "not_found",
                f"{request.path[:200]}: no such file of the page, expected one of the version that runs",
                "reload the page: it may be of an earlier version",
            )
        content = file.content
        if file.compressed is not None and b"gzip" in request.headers.get(b"accept-encoding", b""):
            content = file.compressed
            headers.append((b"content-encoding", b"gzip"))
        file_headers = dict(file.headers)
        kind = file_headers.pop(b"content-type")
        await request.send_response(200, content, [*file_headers.items(), *headers], content_type=kind)

    def close(self) -> None:
        """Close threads and stores, once no request is being answered."""
        self._workers.shutdown(cancel_futures=True)
        self._api.close()


def _pattern(path: str) -> list[str]:
    return path.split("/")[1:]


def _match(pattern: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    """Return the variable parts of a path by name, or None if the path does not match."""
    if len(pattern) != len(segments):
        return None
    parts: dict[str, str] = {}
    for expected, segment in zip(pattern, segments, strict=True):
        if expected.startswith("{"):
            parts[expected[1:-1]] = segment
        elif expected != segment:
            return None
    return parts


def _decoded(data: bytes | Mapping[str, str], kind: type[Struct], what: str) -> Struct:
    """Decode a query or a body into its struct. Raises ViewRefused naming the field."""
    try:
        if isinstance(data, bytes):
            return msgspec.json.decode(data, type=kind)
        return msgspec.convert(data, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fields = ", ".join(field.encode_name for field in msgspec.structs.fields(kind)) or "nothing"
        message = f"{what}: {validation_text(error, kind)}"
        raise ViewRefused(400, "parameter", message, f"correct it; the fields are: {fields}") from error


async def serve_view(
    api: ViewApi, host: str, port: int, started: Callable[[str, str | None], None], page: Page | None = None
) -> None:
    """Serve until SIGINT or SIGTERM. `started` gets the address and, if one is required, the token.

    Raises ConfigError if the address cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    socket, _ = tcp_socket(host, port)
    bound = socket.getsockname()[1]
    rules = AccessRules(host, bound)
    server = ViewServer(api, rules, page or Page())
    listener = Listener(server, socket)
    await listener.start()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled.set)
        started(http_url(address_for_others(host), bound), rules.token)
        await signalled.wait()
    finally:
        server.stopping.set()
        await listener.stop()
        server.close()
