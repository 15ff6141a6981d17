"""The gateway's worker processes, as their supervisor keeps them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from understudy.gateway.config import GatewayConfig, ModelConfig, ModelsConfig
from understudy.gateway.serve.supervisor import supervise
from understudy.gateway.server.listen import tcp_socket
from understudy.util.locks import locked

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
