"""Weights for vLLM over NCCL, through its weight transfer engine: no disk is shared.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' …

The sender is vLLM's own (package `vllm`, of the server's version, and a GPU on this machine); what it orders goes
through the endpoints that its HTTP client uses. Both ends must reach each other over NCCL.
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


class _World(Struct):
    world_size: int


class TransferEngine(Protocol):
    """The sending end, as vLLM has it."""

    def send_weights(self) -> None:
        """Send all weights that its source holds, ordering the server along."""
        ...

    def shutdown(self) -> None:
        """Leave the group."""
        ...


class SyncClient:
    """What a sender of vLLM's orders a server through (its protocol VLLMWeightSyncClient). For threads."""

    def __init__(self, publisher: VLLMPublisher) -> None:
        self._orders = publisher.orders
        self.version = ""
        """What the weights that are being sent are called."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the server join the group."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Have the server leave it."""
        self._post("/shutdown_weight_transfer_engine", None)

    def start_weight_update(self) -> None:
        """Have it make ready."""
        self._post("/start_weight_update", None)

    def update_weights(self, update_info: Any) -> None:
        """Have it receive; returns when it has."""
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have it take what it received for its weights, under their version."""
        self._post("/finish_weight_update", {"weight_version": weight_version or self.version})

    def _post(self, path: str, body: object) -> None:
        asyncio.run(self._orders.post(path, body))


class WeightsDirectory:
    """The weights in a model directory, which may change from one sending to the next."""

    def __init__(self, path: Path, device: str = DEVICE) -> None:
        self.path = path
        self._device = device

    def shapes(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, type as safetensors names it, and shape of every tensor, in the order of names."""
        from safetensors import safe_open

        shapes_: list[tuple[str, str, tuple[int, ...]]] = []
        for file in self._files():
            with safe_open(file, framework="pt") as tensors_file:
                for name in tensors_file.keys():  # noqa: SIM118 (it is no dictionary)
                    part = tensors_file.get_slice(name)
                    shapes_.append((name, part.get_dtype(), tuple(part.get_shape())))
        return sorted(shapes_)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Every tensor, on the device, in the order of names; one at a time."""
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
            raise ConfigError(f"{self.path} has no *.safetensors; a transfer reads no other format")
        return files


Connect = Callable[[SyncClient, WeightsDirectory, str, int], TransferEngine]
"""Makes the sending end: from the client, the weights, our address and the number of the server's workers."""


class TransferPublisher:
    """Sends whole weights to a vLLM server's GPUs (see Publisher).

    `address` is ours as the server sees it; else the one by which we reach it.
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
        await self._server.hold()
        self._client.version = version
        try:
            if self._engine is None or self._source is None:
                self._source = WeightsDirectory(path)
                world = await self._server.orders.get("/get_world_size", _World)
                address = self._address or _own_address(self._server.orders.base)
                # Of a sender that was killed the server may still hold the other end.
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
                f"{self._server.orders.base}: the weights could not be sent: {error}. The server stays paused, "
                "because its weights may be neither the old nor the new ones"
            ) from error
        await self._server.go_on(version)

    async def current(self) -> str | None:
        """See Publisher."""
        return await self._server.current()

    async def release(self) -> None:
        """See Publisher."""

    async def _leave(self) -> None:
        """After a failure the group is of no use; the next publishing makes another."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)


def vllm_engine(client: SyncClient, source: WeightsDirectory, address: str, workers: int) -> TransferEngine:
    """vLLM's own sending end. Raises ConfigError where the package or a GPU is missing."""
    try:
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        raise ConfigError(
            f"sending weights to vLLM needs its package here too ({error}): pip install vllm, or publish by disk"
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError("sending weights to vLLM needs a GPU on this machine; publish by disk instead")
    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

    class Weights(WeightSource):
        """A model directory as what vLLM sends."""

        @cached_property
        def metadata(self) -> list[Any]:
            """Every parameter; the same in every directory of one model."""
            return [ParamMeta(name, types[kind], shape) for name, kind, shape in source.shapes()]

        def iter_full(self) -> Iterator[tuple[str, Any]]:
            """Every tensor."""
            yield from source.tensors()

    info = NCCLTrainerInitInfo(master_address=address, master_port=_free_port(), world_size=workers + 1, rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=Weights())


def _own_address(server: str) -> str:
    """The address by which this machine reaches the server."""
    url = URL(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel only chooses a way.
        probe.connect((url.host or "127.0.0.1", url.port or 80))
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
