"""Weights for vLLM, through the control endpoints that it has in its development mode.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL …                                            full weights
    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-sleep-mode …                        trainer on the same GPU
    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora …        a LoRA

These endpoints ask for no key, whatever `--api-key` says: the server has to be out of others' reach. Ours of the
embedded model speaks the same.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec import Struct, field

from understudy.errors import BackendError, ConfigError
from understudy.train.publish.base import DiskPublisher, PublisherCapabilities, explain_load_failure

_RESET_TRIES = 20
_RESET_PAUSE_S = 0.25


class _Reset(Struct):
    success: bool


class _Sleeping(Struct):
    is_sleeping: bool


class _Awake(Struct):
    status: str


class VLLMPublisher(DiskPublisher):
    """Has a vLLM server read weights from a disk that it shares with us (see Publisher).

    The method "disk" loads whole weights in place, between a pause and a resume; "sleep" does it on waking, and
    `release` has the server sleep before; "lora" loads an adapter in place, served under the name `adapter`.
    """

    ways = ("disk", "sleep", "lora")
    version_path = "/weight_info"
    missing = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
    missing_lora = "start vLLM with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"

    @property
    def capabilities(self) -> PublisherCapabilities:
        """See Publisher."""
        if self._method == "lora":
            return PublisherCapabilities(kind="lora", model=self._adapter)
        # Asleep, a server has no memory for what was in flight.
        return PublisherCapabilities(drained=self._method == "sleep", releases=self._method == "sleep")

    async def publish(self, weights: Path, version: str) -> None:
        """See Publisher."""
        seen = self._seen(weights)
        if self._method == "sleep":
            await self._on_waking(seen, version)
            return
        await self.hold()
        if self._method == "lora":
            await self._load_adapter(seen)
        else:
            await self._load(seen)
        await self.go_on(version)

    async def release(self) -> None:
        """See Publisher."""
        if self._method == "sleep" and not (await self.orders.get("/is_sleeping", _Sleeping)).is_sleeping:
            await self._sleep()

    # --- in between -------------------------------------------------------------------------------------

    async def hold(self) -> None:
        """Have the server sample nothing until `go_on`, which continues what is in flight."""
        await self.orders.post("/pause", query={"mode": "keep", "clear_cache": "true"})

    async def go_on(self, version: str) -> None:
        """Forget what was computed with the old weights, and sample on, as `version`."""
        for _ in range(_RESET_TRIES):
            answer = await self.orders.post("/reset_prefix_cache", query={"reset_running_requests": "true"})
            if self.orders.decode("/reset_prefix_cache", answer, _Reset).success:
                break
            await asyncio.sleep(_RESET_PAUSE_S)
        else:
            raise BackendError(
                f"{self.orders.base}: the prefix cache still holds what the old weights computed, and cannot be "
                "reset; the server stays paused. Run the same command again"
            )
        await self._name(version)
        await self.orders.post("/resume")

    async def _on_waking(self, seen: str, version: str) -> None:
        await self.release()
        if await self._wake("weights"):
            # It was merely paused, which it calls sleeping too.
            await self._sleep()
            await self._wake("weights")
        await self._load(seen)
        # It samples as soon as it is wholly awake.
        await self._name(version)
        if not await self._wake("kv_cache"):
            raise BackendError(
                f"{self.orders.base}: the server is still asleep after /wake_up; see its log, "
                "restart it, and run the same command again"
            )

    async def _sleep(self) -> None:
        # Asleep it has no memory for requests that are kept.
        await self.orders.post("/sleep", query={"level": "2", "mode": "wait"})

    async def _wake(self, part: str) -> bool:
        """Wake a part of it; returns whether it is wholly awake."""
        answer = await self.orders.post("/wake_up", query={"tags": part})
        return self.orders.decode("/wake_up", answer, _Awake).status == "awake"

    async def _load(self, seen: str) -> None:
        order = {"method": "reload_weights", "kwargs": {"weights_path": seen}}
        with explain_load_failure(seen):
            await self.orders.post("/collective_rpc", order)

    async def _load_adapter(self, seen: str) -> None:
        order = {"lora_name": self._adapter, "lora_path": seen, "load_inplace": True}
        try:
            await self.orders.post("/v1/load_lora_adapter", order, missing="")
        except BackendError as error:
            # The old adapter is untouched.
            await self.orders.post("/resume")
            # An adapter that is not found is a 404 as well.
            if error.status in (404, 405) and b"adapter" not in error.body:
                raise ConfigError(f"{error}; {self.missing_lora}") from error
            raise BackendError(
                f"{error}. The server reads {seen} itself: has it that path, and is --max-lora-rank large enough?",
                status=error.status,
                body=error.body,
            ) from error

    async def _name(self, version: str) -> None:
        await self.orders.post("/update_weight_version", {"new_version": version})


class EmbeddedPublisher(VLLMPublisher):
    """Has the embedded model's server load a directory in place (see Publisher)."""

    ways = ("disk", "lora")
    missing = "start the embedded model's server with --weights: scripted policies have none"
    missing_lora = missing


class _CommandResult(Struct):
    success: bool
    message: str = ""
    error_message: str | None = None


class _Card(Struct):
    id: str
    parent: str | None = None


class _Cards(Struct):
    data: list[_Card] = field(default_factory=list[_Card])


class SGLangPublisher(DiskPublisher):
    """Has an SGLang server read weights from a disk that it shares with us (see Publisher).

    The method "disk" loads whole weights in place, between a pause and its end; "lora" loads an adapter in
    place of the one before. SGLang takes `lora:ADAPTER` for the name of a model with it.
    """

    ways = ("disk", "lora")
    version_path = "/model_info"
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
        order = {"model_path": seen, "weight_version": version, "flush_cache": True, "abort_all_requests": False}
        with explain_load_failure(seen):
            await self._order("/update_weights_from_disk", order)
        await self.orders.post("/continue_generation", {})

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
            raise BackendError(
                f"POST {self.orders.base}{path}: the server refused: {reason}; see its log for the cause",
                status=200,
            )
