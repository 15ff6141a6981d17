"""`understudy gateway serve` as a user runs it: keys, workers, restarts, orders."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from playwright.sync_api import expect
from yarl import URL

from understudy.gateway.serve.stored_keys import RECHECK_S
from understudy.store import Store

from fakes.vllm import FakeVLLM, Hang, Say, Step
from support import until
from support.serve import Served, gateway
from support.view import viewing
from support.viewer import Watched, chromium, store_ids
from support.viewer import serving as view_serving


class Rig:
    """A gateway in processes of its own, its model, and a key for it."""

    def __init__(self, served: Served, model: FakeVLLM, http: aiohttp.ClientSession, key: str) -> None:
        self.served, self.model, self.http, self.key = served, model, http, key

    async def ask(self, text: str, *, key: str | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
        status, body = await self.served.ask(self.http, key or self.key, text, **fields)
        return status, json.loads(body)

    async def order(self, *arguments: str) -> dict[str, Any]:
        return json.loads(await gateway(*arguments, "--dir", str(self.served.directory)))

    async def until_waiting(self, count: int) -> dict[str, Any]:
        """What the gateway says of itself once so many requests wait."""
        async with asyncio.timeout(30):
            while (state := await self.order("state"))["waiting"] != count:
                pass
        return state


@asynccontextmanager
async def serving(
    tmp_path: Path, *script: Step, workers: int = 2, default: Step | None = None
) -> AsyncIterator[Rig]:
    async with FakeVLLM(*script, default=default) as model:
        directory = tmp_path / "gateway"
        key = await gateway("issue", "me", "--dir", str(directory))
        flags = ("--base-url", model.url, "--backend-model-high", "fake", "--workers", str(workers))
        async with Served(directory, "vllm", *flags) as served, aiohttp.ClientSession() as http:
            yield Rig(served, model, http, key)


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def kept(tmp_path: Path, name: str = "me") -> list[Any]:
    with Store.open(tmp_path / "gateway", create=False) as store:
        return list(store.calls.of_attempt(f"client-{name}"))


async def test_the_viewer_pauses_a_gateway_and_lets_it_go_on(tmp_path: Path) -> None:
    async with serving(tmp_path, default=Say(text="here")) as rig, viewing(rig.served.directory) as client:
        store = await client.store("gateway")
        state = await client.get(f"{store}/gateway")
        assert (state["reachable"], state["paused"]) == (True, False), state["note"]
        assert (await client.post(f"{store}/gateway/pause", {"paused": True}))["stored"]
        waiting_request = asyncio.create_task(rig.ask("hi"))
        async with asyncio.timeout(30):
            while (state := await client.get(f"{store}/gateway"))["waiting"] != 1:
                pass
        assert state["paused"] and not waiting_request.done()
        (call,) = state["calls"]
        assert (call["attempt_id"], call["model"], call["generating"]) == ("client-me", "m", False)
        assert call["started_at"] <= state["read_at"] and call["request_bytes"] > 50
        assert (await client.post(f"{store}/gateway/pause", {"paused": False}))["stored"]
        assert (await waiting_request)[0] == 200
        state = await client.get(f"{store}/gateway")
        assert not state["paused"] and state["calls"] == []


@pytest.mark.services
async def test_a_click_in_a_browser_pauses_a_live_gateway_and_another_lets_it_go_on(tmp_path: Path) -> None:
    answered = asyncio.Event()
    script = (Say(text="first", hold=answered), Say(text="second"))
    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        # Playwright's objects belong to the thread that made them.
        browser = partial(asyncio.get_running_loop().run_in_executor, threads)
        async with serving(tmp_path, *script) as rig:
            url = await browser(stack.enter_context, view_serving(rig.served.directory))
            watched = await browser(lambda: Watched(stack.enter_context(chromium()), url))

            def until_row(pattern: str) -> asyncio.Future[None]:
                row = watched.page.get_by_role("row", name=re.compile(pattern))
                return browser(expect(row).to_be_visible)

            try:
                first = asyncio.create_task(rig.ask("hi", metadata={"user_id": "me"}))
                await browser(watched.open, f"/s/{store_ids(url)['gateway']}")
                await until_row("me.*generating")
                await browser(watched.page.get_by_role("button", name="Pause").click)
                await browser(expect(watched.page.get_by_text("paused", exact=True)).to_be_visible)
                second = asyncio.create_task(rig.ask("more"))
                await until_row("me.*waiting")
                answered.set()
                assert (await first)[0] == 200 and not second.done()
                await browser(watched.page.get_by_role("button", name="Let it go on").click)
                assert (await second)[0] == 200
                await browser(expect(watched.page.get_by_text("No call is in flight.")).to_be_visible)
                await browser(expect(watched.page.get_by_text("running", exact=True)).to_be_visible)
                assert not watched.faults
            finally:
                await browser(stack.close)


async def test_keys_open_their_own_client_until_they_expire_or_are_revoked(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig:
        directory = str(rig.served.directory)
        short = await gateway("issue", "short", "--dir", directory, "--expires", "4s")
        assert (await rig.ask("hi"))[0] == 200
        assert (await rig.ask("hi", key=short))[0] == 200
        assert (await rig.ask("hi", key="sk-understudy-wrong"))[0] == 403
        await gateway("revoke", "me", "--dir", directory)
        await asyncio.sleep(max(RECHECK_S, 4) + 1.2)
        for key in (rig.key, short):
            status, body = await rig.ask("again", key=key)
            assert (status, body["error"]["type"]) == (403, "permission_error")
        listed = await gateway("keys", "--dir", directory)
        assert {tuple(line.split("\t")) for line in listed.splitlines()} == {
            ("me", "revoked"),
            ("short", "expired"),
        }
    assert len(kept(tmp_path)) == 1
    assert len(kept(tmp_path, "short")) == 1


async def test_all_workers_serve_one_session_and_a_restart_goes_on_with_it(tmp_path: Path) -> None:
    raw = '{"file_path" :"/a",  "n": 1.0}'
    script = [Say(text="", tools=[("call_0", "Edit", raw)]), *(Say(text=str(n)) for n in range(9))]
    async with serving(tmp_path, *script) as rig:
        _, first = await rig.ask("go")
        tool = first["content"][0]
        await asyncio.gather(*(rig.ask(str(n), stream=False) for n in range(6)))
        await rig.served.kill()
        tool["input"] = {"n": 1, "file_path": "/a", "replace_all": False}  # as Claude Code sends it back
        result = {"type": "tool_result", "tool_use_id": tool["id"], "content": "ok"}
        messages = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [tool]},
            {"role": "user", "content": [result]},
        ]
        status, _ = await rig.ask("", messages=messages)
        assert status == 200
        sent = rig.model.requests[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    calls = kept(tmp_path)
    assert sent == raw
    assert [call.sequence for call in calls] == list(range(8))
    assert calls[-1].parent_id == calls[-2].id


async def test_a_client_that_leaves_is_recorded_whichever_worker_it_spoke_to(tmp_path: Path) -> None:
    hang = Hang()
    async with serving(tmp_path, default=hang) as rig:
        for _ in range(2):
            hang.disconnected.clear()
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as http:
                with pytest.raises(TimeoutError):
                    await rig.served.ask(http, rig.key, "wait")
            await asyncio.wait_for(hang.disconnected.wait(), 10)
    assert [call.status for call in kept(tmp_path)] == ["abandoned"] * 2


async def test_orders_reach_all_workers(tmp_path: Path) -> None:
    async with serving(tmp_path, workers=2) as rig:
        directory = str(rig.served.directory)
        others = [await gateway("issue", f"client {n}", "--dir", directory) for n in range(4)]
        assert await rig.order("pause", "--drain", "1") == {"in_flight": 0}
        waiting_requests = [asyncio.create_task(rig.ask("hi", key=key)) for key in others]
        assert (await rig.until_waiting(4))["paused"]
        assert rig.model.requests == []
        await rig.order("resume", "--version", "v2")
        assert [(await task)[0] for task in waiting_requests] == [200] * 4
        address = json.loads((rig.served.directory / "gateway.json").read_text())
        key = (rig.served.directory / "admin.key").read_text().strip()
        async with rig.http.get(
            f"{address['admin_url']}/metrics", headers={"authorization": f"Bearer {key}"}
        ) as r:
            metrics = await r.text()
        async with rig.http.get(f"{address['admin_url']}/metrics", headers={"authorization": "Bearer x"}) as r:
            assert r.status == 401
    counted = [line for line in metrics.splitlines() if line.startswith("understudy_gateway_calls_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) == 4
    assert [call.policy_version for n in range(4) for call in kept(tmp_path, f"client {n}")] == ["v2"] * 4


async def test_a_second_gateway_over_the_same_directory_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, workers=1) as rig:
        second = Served(rig.served.directory, *rig.served.arguments)
        address = (rig.served.directory / "gateway.json").read_bytes()
        with pytest.raises(AssertionError, match="another gateway is using"):
            await second.start()
        (rig.served.directory / "gateway.json").write_bytes(address)
        assert (await rig.ask("hi"))[0] == 200


async def test_a_backend_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    served = Served(tmp_path / "g", "vllm", "--base-url", "http://127.0.0.1:9/v1", "--backend-model-high", "m")
    with pytest.raises(AssertionError, match="and that the server is running") as failure:
        await served.start()
    assert "key: sk-" not in str(failure.value)


async def test_what_workers_log_reaches_the_operator_and_the_first_key_is_shown_once(tmp_path: Path) -> None:
    async with FakeVLLM() as model:
        urls = ("--base-url", "http://127.0.0.1:9/v1", "--base-url", model.url)
        async with Served(tmp_path / "g", "vllm", *urls, "--backend-model-high", "fake") as served:
            pass
    assert b"an endpoint does not answer, so the others are used" in served.stderr
    assert served.stderr.count(b"key: sk-") == 1


async def test_no_agent_reaches_the_place_for_orders_whichever_worker_it_speaks_to(tmp_path: Path) -> None:
    async with serving(tmp_path, workers=2) as rig:
        for path in ("/admin/healthz", "/state", "/admin/../state") * 8:
            url = URL(rig.served.url + path, encoded=True)
            headers = {"x-api-key": rig.key, "connection": "close"}
            async with rig.http.get(url, headers=headers) as reply:
                assert (reply.status, (await reply.json())["error"]["type"]) == (404, "not_found_error")


async def test_a_gateway_that_is_told_to_end_tells_those_who_wait_to_come_back(tmp_path: Path) -> None:
    async with serving(tmp_path, default=Hang()) as rig:
        waiting = [asyncio.create_task(rig.ask(str(n))) for n in range(4)]
        await until(lambda: len(rig.model.requests) == 4)
        assert await rig.served.stop() == 0
        answers = [await task for task in waiting]
    assert {(status, body["error"]["type"]) for status, body in answers} == {(529, "overloaded_error")}
    assert b"Traceback" not in rig.served.stderr
    assert [call.status for call in kept(tmp_path)] == ["abandoned"] * 4


async def test_a_gateway_begins_when_the_workers_of_a_killed_one_have_kept_their_answers(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with serving(tmp_path, default=Say(text="ok", hold=hold)) as rig:
        under_way = asyncio.create_task(rig.ask("one"))
        await until(lambda: rig.model.requests)
        os.kill(rig.served.pid, signal.SIGKILL)
        asyncio.get_running_loop().call_later(3, hold.set)
        async with Served(rig.served.directory, *rig.served.arguments) as second:
            assert hold.is_set()
            status, _ = await second.ask(rig.http, rig.key, "two")
        assert (status, (await under_way)[0]) == (200, 200)
    assert [(call.sequence, call.status) for call in kept(tmp_path)] == [(0, "ok"), (1, "ok")]


async def test_a_worker_that_starts_again_catches_up_with_what_was_ordered_meanwhile(tmp_path: Path) -> None:
    async with serving(tmp_path, workers=1) as rig:
        directory = ("--dir", str(rig.served.directory))
        address = json.loads((rig.served.directory / "gateway.json").read_text())["admin_url"]
        headers = {"authorization": f"Bearer {(rig.served.directory / 'admin.key').read_text().strip()}"}
        (worker,) = rig.served.workers()
        os.kill(worker, signal.SIGKILL)

        def restarted_workers() -> list[int]:
            """The next worker, once it is a program of its own, which the supervisor waits for."""
            return [pid for pid in rig.served.workers() if pid != worker and b"serve.worker" in command_of(pid)]

        await until(restarted_workers)
        os.kill(restarted_workers()[0], signal.SIGSTOP)
        async with rig.http.post(f"{address}/pause", json={"drain_s": 0}, headers=headers) as reply:
            assert reply.status == 500, "the worker was there already"
        os.kill(restarted_workers()[0], signal.SIGCONT)
        async with asyncio.timeout(30):
            while True:
                try:
                    await gateway("state", *directory)
                    break
                except AssertionError:
                    await asyncio.sleep(0.1)
        waiting_request = asyncio.create_task(rig.ask("hi"))
        assert (await rig.until_waiting(1))["paused"]
        await gateway("resume", *directory)
        assert (await waiting_request)[0] == 200
