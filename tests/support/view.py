"""A viewer over real stores, on a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from understudy.gateway.server.listen import Listener, tcp_socket
from understudy.store.address import StoreLocation
from understudy.view.api import ViewApi
from understudy.view.catalog import Catalog
from understudy.view.page import Page
from understudy.view.security import AccessRules
from understudy.view.server import BODY_TIMEOUT_S, ViewServer


class ViewClient:
    """A viewer's address, with what a browser would send."""

    def __init__(self, session: aiohttp.ClientSession, url: str, rules: AccessRules) -> None:
        self.session, self.url, self.rules = session, url, rules

    async def get(self, path: str, *, status: int = 200, **query: Any) -> Any:
        """The JSON that a path answers with."""
        params = {name: str(value) for name, value in query.items()}
        async with self.session.get(f"{self.url}{path}", params=params) as reply:
            content = await reply.read()
            assert reply.status == status, content
            assert reply.content_type == "application/json"
            assert len(content) <= 256_000
            return json.loads(content)

    async def post(self, path: str, body: Any, *, status: int = 200) -> Any:
        """The JSON that an order is answered with."""
        async with self.session.post(f"{self.url}{path}", json=body) as reply:
            assert reply.status == status, await reply.text()
            return await reply.json()

    async def store(self, name: str) -> str:
        """The path of the store with a name."""
        stores = (await self.get("/api/stores"))["stores"]
        return f"/api/stores/{next(each['id'] for each in stores if each['name'] == name)}"


@asynccontextmanager
async def viewing(
    *locations: StoreLocation,
    may_write: bool = True,
    assets: Path | None = None,
    host: str = "127.0.0.1",
    body_s: float = BODY_TIMEOUT_S,
) -> AsyncIterator[ViewClient]:
    """A viewer of some stores; without `assets` it has no page."""
    api = ViewApi(Catalog(locations), may_write=may_write)
    socket, url = tcp_socket("127.0.0.1", 0)
    rules = AccessRules(host, socket.getsockname()[1])
    server = ViewServer(api, rules, Page(assets or Path("/nonexistent")), body_timeout_s=body_s)
    listener = Listener(server, socket)
    await listener.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield ViewClient(session, url, rules)
    finally:
        server.stopping.set()
        await listener.stop()
        server.close()


async def pages(client: ViewClient, path: str, rows: str, **query: Any) -> list[list[Any]]:
    """All pages of a list, by its cursors."""
    result: list[list[Any]] = []
    cursor: Any = None
    while True:
        page = await client.get(path, **query, **({} if cursor is None else {"cursor": cursor}))
        result.append(page[rows])
        cursor = page["next"]
        if cursor is None:
            return result


def ids(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The ids of some rows."""
    return [row["id"] for row in rows]
