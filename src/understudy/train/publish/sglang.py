"""Weights for SGLang, through its own endpoints for reinforcement learning.

    python -m sglang.launch_server --model-path MODEL …                        full weights
    python -m sglang.launch_server --model-path MODEL --enable-lora --max-lora-rank 32 --lora-target-modules all …

With `--admin-api-key` these endpoints ask for that key, else for the one of `--api-key`.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, field

from understudy.errors import BackendError
from understudy.train.publish.base import DiskPublisher, PublisherCapabilities, load_failure

_UNTOLD = "default"
"""What SGLang calls weights whose version it was not told."""


class _CommandResult(Struct):
    success: bool
    message: str = ""
    error_message: str | None = None


class _SGLangInfo(Struct):
    weight_version: str | int | None = None


class _Card(Struct):
    id: str
    parent: str | None = None


class _Cards(Struct):
    data: list[_Card] = field(default_factory=list[_Card])


class SGLangPublisher(DiskPublisher):
    """Has an SGLang server read weights from a disk that it shares with us (see Publisher).

    `way`: "disk" loads whole weights in place, between a pause and its end; "lora" loads an adapter in
    place of the one before. SGLang takes `lora:ADAPTER` for the name of a model with it.
    """

    ways = ("disk", "lora")
    missing = "is it an SGLang server, of version 0.5.20 or later?"

    @property
    def capabilities(self) -> PublisherCapabilities:
        """See Publisher."""
        if self._method == "lora":
            # There is a moment without the adapter, and it waits for what uses the old one.
            return PublisherCapabilities(kind="lora", drained=True, model=f"lora:{self._adapter}")
        return PublisherCapabilities()

    async def publish(self, weights: Path, version: str) -> None:
        """See Publisher."""
        seen = self._seen(weights)
        if self._method == "lora":
            await self._load_adapter(seen, version)
            return
        # Retracted requests hold no cache: it is flushed with the update, and computed anew.
        await self.orders.post("/pause_generation", {"mode": "retract"})
        await self._load(seen, version)
        await self.orders.post("/continue_generation", {})

    async def current(self) -> str | None:
        """See Publisher."""
        version = (await self.orders.get("/model_info", _SGLangInfo)).weight_version
        return None if version is None or version == _UNTOLD else str(version)

    async def release(self) -> None:
        """See Publisher."""

    async def _load(self, seen: str, version: str) -> None:
        order = {
            "model_path": seen,
            "weight_version": version,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        try:
            await self._order("/update_weights_from_disk", order)
        except BackendError as error:
            raise load_failure(error, seen) from error

    async def _load_adapter(self, seen: str, version: str) -> None:
        loaded = await self.orders.get("/v1/models", _Cards)
        if any(card.id == self._adapter and card.parent is not None for card in loaded.data):
            await self._order("/unload_lora_adapter", {"lora_name": self._adapter})
        # Its cache is keyed by an id that every loading makes anew.
        await self._order("/load_lora_adapter", {"lora_name": self._adapter, "lora_path": seen})
        await self._order("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def _order(self, path: str, order: object) -> None:
        done = self.orders.decode(path, await self.orders.post(path, order), _CommandResult)
        if not done.success:
            reason = done.error_message or done.message or "no reason given"
            raise BackendError(f"POST {self.orders.base}{path}: the server refused: {reason}", status=200)
