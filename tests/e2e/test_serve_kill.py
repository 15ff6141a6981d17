"""kill -9 of the gateway's processes at random moments under load: whatever was answered whole is kept, once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl

from fakes import sse
from fakes.vllm import FakeVLLM, Say
from support import kills
from support.serve import Served, gateway

pytestmark = pytest.mark.services

KILLS = kills(20)
CLIENTS = 12


class Load:
    """Clients that ask without pause, and note the ids of the answers that came whole."""

    def __init__(self, served: Served, keys: list[str]) -> None:
        self.served = served
        self.keys = keys
        self.answered: list[str] = []
        self.broken = 0

    async def client(self, number: int) -> None:
        key = self.keys[number % len(self.keys)]
        async with aiohttp.ClientSession() as http:
            turn = 0
            while True:
                turn += 1
                stream = turn % 2 == 0
                try:
                    status, body = await self.served.ask(http, key, f"client {number} turn {turn}", stream=stream)
                except (aiohttp.ClientError, OSError):
                    self.broken += 1
                    await asyncio.sleep(0.02)
                    continue
                if status == 200 and not stream:
                    self.answered.append(json.loads(body)["id"])
                elif status == 200 and b"event: message_stop" in body:
                    self.answered.append(sse.message(body)["id"])
                else:
                    self.broken += 1
                    await asyncio.sleep(0.02)


async def _more(load: Load, count: int) -> None:
    target = len(load.answered) + count
    async with asyncio.timeout(30):
        while len(load.answered) < target:  # noqa: ASYNC110 - it is a list that grows
            await asyncio.sleep(0.005)


@pytest.mark.timeout(280)
async def test_what_was_answered_is_kept_once_however_often_it_is_killed(
    tmp_path: Path, location: StoreLocation
) -> None:
    rng = random.Random(50)
    is_database = isinstance(location, StoreUrl)
    directory = tmp_path / "gateway" if is_database else location
    store_option = ("--store", location.secret_url) if is_database else ()
    async with FakeVLLM(default=Say(text="ok " * 40)) as model:
        arguments = (
            "vllm",
            "--base-url",
            model.url,
            "--backend-model-high",
            "fake",
            "--workers",
            "2",
            *store_option,
        )
        async with Served(directory, *arguments) as served:
            issue = ("--dir", str(directory), *store_option)
            keys = [await gateway("issue", f"client-{number}", *issue) for number in range(4)]
            load = Load(served, keys)
            clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
            for kill in range(KILLS):
                await _more(load, 5)
                await asyncio.sleep(rng.random() * 0.1)
                if kill % 5 == 4:
                    await served.kill()
                elif workers := served.workers():
                    os.kill(rng.choice(workers), signal.SIGKILL)
            await _more(load, 20)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            assert await served.stop() == 0
    with Store.open(location, create=False) as store:
        calls = {attempt.id: list(store.calls.of_attempt(attempt.id)) for attempt in store.keys.clients()}
    stored = Counter(
        json.loads(call.response)["id"] for of in calls.values() for call in of if call.status == "ok"
    )
    assert load.broken > 0
    assert len(load.answered) == len(set(load.answered)) > KILLS * 5
    assert {message: stored[message] for message in load.answered if stored[message] != 1} == {}
    for of in calls.values():
        assert [call.sequence for call in of] == list(range(len(of)))
