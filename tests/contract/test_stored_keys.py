"""Keys in the store behind a running gateway: what an agent is told when the store cannot be read."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.router import ModelRouter
from understudy.gateway.serve.stored_keys import StoredKeys, issue
from understudy.gateway.serve.worker import ForwardingApp
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.listen import Listener, tcp_socket
from understudy.store import Store
from understudy.store.sqlite import FILE

from fakes.vllm import FakeVLLM

ASK = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def listening(*apps: Callable[..., Any]) -> AsyncIterator[list[str]]:
    """The addresses at which applications are served."""
    async with AsyncExitStack() as stack:
        urls: list[str] = []
        for app in apps:
            sock, url = tcp_socket("127.0.0.1", 0)
            listener = Listener(app, sock)
            await listener.start()
            stack.push_async_callback(listener.stop)
            urls.append(url)
        yield urls


async def test_keys_that_cannot_be_looked_up_are_told_in_the_callers_dialect_and_asked_for_again(
    tmp_path: Path,
) -> None:
    async with FakeVLLM() as model, aiohttp.ClientSession() as http:
        backend = VLLMBackend(model.url, "fake")
        with Store.open(tmp_path / "store") as store:
            headers = {"x-api-key": await issue(store, "me")}
            with sqlite3.connect(tmp_path / "store" / FILE) as database:
                database.execute("DROP TABLE keys")
            database.close()
            keys = StoredKeys(store, ModelRouter(backend), {}, None)
            gateway = Gateway(ModelRouter(backend), store.calls, keys)
            alone, of_two = (
                ForwardingApp(gateway, keys, 0, [tmp_path / n for n in names]) for names in ("0", "01")
            )
            async with listening(gateway, alone, of_two) as urls:
                for path, kind in (("messages", "api_error"), ("chat/completions", "server_error")):
                    for url in urls:
                        async with http.post(f"{url}/v1/{path}", json=ASK, headers=headers) as reply:
                            error = (await reply.json())["error"]
                            assert (reply.status, error["type"]) == (500, kind)
                            assert "x-should-retry" not in reply.headers
                            assert str(tmp_path) not in error["message"]
        await backend.close()
        assert model.requests == []
