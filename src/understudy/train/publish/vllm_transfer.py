"""Sends weights to vLLM over NCCL, with its weight transfer engine. No shared disk is needed.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' …

The sending side is vLLM's own code: it needs the package `vllm` in the server's version, and a GPU on this
machine. It sends control requests through the server's HTTP endpoints. Both machines must reach each other over
NCCL.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct
from yarl import URL

from understudy.errors import BackendError, ConfigError, UnderstudyError
from understudy.train.publish.base import TIMEOUT_S, PublisherCapabilities, check_weights
from understudy.train.publish.servers import VLLMPublisher

DEVICE = "cuda:0"


class _WorldSize(Struct):
    world_size: int


class TransferEngine(Protocol):
    """The sending side of a transfer, as vLLM implements it."""

    def send_weights(self) -> None:
        """Send all weights of its source, with the control requests to the server that this needs."""
        ...

    def shutdown(self) -> None:
        """Leave the NCCL process group."""
        ...


class SyncClient:
    """The HTTP client through which vLLM's sender controls the server (its protocol VLLMWeightSyncClient).

    Its methods block, so they must be called in a thread.
    """

    def __init__(self, publisher: VLLMPublisher) -> None:
        self._control = publisher.control
        self.version = ""
        """The version of the weights that are being sent."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make the server join the NCCL process group."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Make the server leave the process group."""
        self._post("/shutdown_weight_transfer_engine", None)

    def start_weight_update(self) -> None:
        """Make the server prepare for an update."""
        self._post("/start_weight_update", None)

    def update_weights(self, update_info: Any) -> None:
        """Make the server receive weights; returns when it has them."""
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make the server use the received weights, under their version."""
        self._post("/finish_weight_update", {"weight_version": weight_version or self.version})

    def _post(self, path: str, body: object) -> None:
        asyncio.run(self._control.post(path, body))


class WeightsDirectory:
    """The weights in a model directory. `path` may change between two transfers."""

    def __init__(self, path: Path, device: str = DEVICE) -> None:
        self.path = path
        self._device = device

    def shapes(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype (as safetensors names it) and shape of every tensor, sorted by name."""
        from safetensors import safe_open

        shapes_: list[tuple[str, str, tuple[int, ...]]] = []
        for file in self._files():
            with safe_open(file, framework="pt") as tensors_file:
                for name in tensors_file.keys():  # noqa: SIM118 (it is no dictionary)
                    part = tensors_file.get_slice(name)
                    shapes_.append((name, part.get_dtype(), tuple(part.get_shape())))
        return sorted(shapes_)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of every tensor, sorted by name; each is loaded to the device on its turn."""
        from safetensors import safe_open

        holds: dict[str, Path] = {}
        for file in self._files():
            with safe_open(file, framework="pt") as tensors_file:
                holds |= dict.fromkeys(tensors_file.keys(), file)
        for name in sorted(holds):
            with safe_open(holds[name], framework="pt", device=self._device) as tensors_file:
                yield name, tensors_file.get_tensor(name)

    def _files(self) -> list[Path]:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"{self.path} has no *.safetensors, the only format that a transfer reads; save the "
                "weights as safetensors"
            )
        return files


Connect = Callable[[SyncClient, WeightsDirectory, str, int], TransferEngine]
"""Creates the sending side from the client, the weights, this machine's address and the server's worker count."""


class TransferPublisher:
    """Sends whole weights to a vLLM server's GPUs (see Publisher).

    `address` is this machine's address for the server; by default the one that connections to the server come
    from.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        address: str | None = None,
        timeout_s: float = TIMEOUT_S,
        connect: Connect | None = None,
    ) -> None:
        self._server = VLLMPublisher(base_url, api_key=api_key, timeout_s=timeout_s)
        self._client = SyncClient(self._server)
        self._address = address
        self._connect = connect or vllm_engine
        self._engine: TransferEngine | None = None
        self._source: WeightsDirectory | None = None

    @property
    def capabilities(self) -> PublisherCapabilities:
        """See Publisher."""
        return PublisherCapabilities()

    async def publish(self, weights: Path, version: str) -> None:
        """See Publisher."""
        path = check_weights(weights, "full")
        await self._server.pause()
        self._client.version = version
        try:
            if self._engine is None or self._source is None:
                self._source = WeightsDirectory(path)
                world = await self._server.control.get("/get_world_size", _WorldSize)
                address = self._address or _own_address(self._server.control.base)
                # If an earlier sender was killed, the server may still be in its process group.
                await asyncio.to_thread(self._client.shutdown_weight_transfer_engine)
                self._engine = await asyncio.to_thread(
                    self._connect, self._client, self._source, address, world.world_size
                )
            self._source.path = path
            await asyncio.to_thread(self._engine.send_weights)
        except UnderstudyError:
            await self._leave()
            raise
        except (RuntimeError, ValueError, OSError) as error:
            await self._leave()
            raise BackendError(
                f"{self._server.control.base}: the weights could not be sent: {error}; see the "
                "server's log, then run "
                "the same command again. It stays paused, because its weights may be neither the old "
                "nor the new ones"
            ) from error
        await self._server.resume(version)

    async def current(self) -> str | None:
        """See Publisher."""
        return await self._server.current()

    async def release(self) -> None:
        """See Publisher."""

    async def _leave(self) -> None:
        """Leave the process group after a failure, because it cannot be used again; the next `publish` makes a new
        one.
        """
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)


def vllm_engine(client: SyncClient, source: WeightsDirectory, address: str, workers: int) -> TransferEngine:
    """Return vLLM's sending side. Raises ConfigError when the package or a GPU is missing."""
    try:
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        raise ConfigError(
            f"--publish transfer needs the package vllm on this machine too ({error}): pip install "
            "vllm, or give --publish disk"
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError("--publish transfer needs a GPU on this machine, and there is none; give --publish disk")
    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

    class Weights(WeightSource):
        """A model directory as a source of vLLM's sender."""

        @cached_property
        def metadata(self) -> list[Any]:
            """Return the name, type and shape of every parameter, which do not depend on the checkpoint."""
            return [ParamMeta(name, types[kind], shape) for name, kind, shape in source.shapes()]

        def iter_full(self) -> Iterator[tuple[str, Any]]:
            """Yield name and value of every tensor."""
            yield from source.tensors()

    info = NCCLTrainerInitInfo(master_address=address, master_port=_free_port(), world_size=workers + 1, rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=Weights())


def _own_address(server: str) -> str:
    """Return this machine's address on the way to the server."""
    url = URL(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing: it only makes the kernel choose a route and a local address.
        probe.connect((url.host or "127.0.0.1", url.port or 80))
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
