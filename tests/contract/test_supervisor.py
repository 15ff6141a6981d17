"""The gateway's worker processes, as their supervisor keeps them."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import GatewayError
from understudy.gateway.config import GatewayConfig, ModelConfig, ModelsConfig
from understudy.gateway.serve import supervisor as module
from understudy.gateway.serve.supervisor import Supervisor, WorkerProcess, WorkerUnavailable, supervise
from understudy.gateway.serve.worker import WorkerSpec
from understudy.gateway.server.listen import tcp_socket
from understudy.util.files import locked

from fakes.vllm import FakeVLLM
from support import until


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


async def test_a_worker_that_hangs_does_not_outlive_a_stop_that_is_called_off(tmp_path: Path) -> None:
    before = children()
    listener, _ = tcp_socket("127.0.0.1", 0)
    async with FakeVLLM() as model:
        high = ModelConfig(backend="vllm", model="fake", base_url=model.url)
        config = GatewayConfig(models=ModelsConfig(high=high))
        with listener, locked(tmp_path / ".lock", busy="busy") as lock:
            async with supervise(config, tmp_path, [listener], workers=1, lock=lock) as supervisor:
                (worker,) = children() - before
                os.kill(worker, signal.SIGSTOP)
                stopping = asyncio.ensure_future(supervisor.stop())
                await asyncio.sleep(0.1)
                stopping.cancel()
                await until(lambda: worker not in children())


class DeafWorker(WorkerProcess):
    """A worker that starts while an operator pauses the gateway, and takes no orders."""

    supervisor: Supervisor

    async def start(self, *, paused: bool, version: str | None) -> None:
        await super().start(paused=paused, version=version)
        with suppress(GatewayError):
            await self.supervisor.pause(0)

    async def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        raise GatewayError("it takes no orders")


async def test_a_worker_that_cannot_be_told_what_it_missed_is_not_left_running(tmp_path: Path) -> None:
    before = children()
    listener, _ = tcp_socket("127.0.0.1", 0)
    async with FakeVLLM() as model:
        high = ModelConfig(backend="vllm", model="fake", base_url=model.url)
        with listener, locked(tmp_path / ".lock", busy="busy") as lock:
            spec = WorkerSpec(
                config=GatewayConfig(models=ModelsConfig(high=high)),
                store=str(tmp_path / "store"),
                index=0,
                sockets=[str(tmp_path / "0.sock")],
                listeners=[listener.fileno()],
                admin_key="k" * 32,
            )
            worker = DeafWorker(spec, lock)
            worker.supervisor = Supervisor([worker])
            with pytest.raises(GatewayError, match="takes no orders"):
                await worker.supervisor.start()
            assert worker.process is not None
            assert children() == before


async def test_an_order_that_comes_while_a_worker_restarts_reaches_the_new_worker(tmp_path: Path) -> None:
    before = children()
    listener, _ = tcp_socket("127.0.0.1", 0)
    async with FakeVLLM() as model:
        high = ModelConfig(backend="vllm", model="fake", base_url=model.url)
        config = GatewayConfig(models=ModelsConfig(high=high))
        with listener, locked(tmp_path / ".lock", busy="busy") as lock:
            async with supervise(config, tmp_path, [listener], workers=2, lock=lock) as supervisor:
                workers = children() - before
                watch = asyncio.ensure_future(supervisor.watch())
                os.kill(min(workers), signal.SIGKILL)
                await asyncio.sleep(0)
                assert await supervisor.pause(0) == 0
                state = await supervisor.state()
                assert (state.paused, state.in_flight) == (True, 0)
                assert len(children() - before) == 2 and min(workers) not in children()
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)


async def test_an_order_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ORDER_TIMEOUT_S", 0.2)
    sockets, config = (
        [str(tmp_path / "0.sock")],
        GatewayConfig(models=ModelsConfig(high=ModelConfig(backend="vllm"))),
    )
    spec = WorkerSpec(config=config, store="", index=0, sockets=sockets, listeners=[], admin_key="k" * 32)
    worker = WorkerProcess(spec, 0)
    with pytest.raises(
        WorkerUnavailable, match=r"worker 0 does not respond: .*; send the request again once it has restarted"
    ):
        await Supervisor([worker]).state()
    await worker.stop()
