"""Publishes weights to vLLM and to the embedded server, through vLLM's development endpoints, and to SGLang.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL …                        full weights
    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-sleep-mode …    trainer on the same GPU
    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora …    a LoRA

vLLM's development endpoints require no key, whatever `--api-key` says, so the server must not be reachable by
others. The embedded server has the same endpoints.
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
    """Makes a vLLM server read weights from a disk that it shares with this machine (see Publisher).

    The method "disk" pauses the server, loads whole weights in place, and resumes. "sleep" loads them while waking
    the server, which `release` has put to sleep. "lora" loads an adapter in place, served under the name
    `adapter`.
    """

    methods = ("disk", "sleep", "lora")
    version_path = "/weight_info"
    missing = "start vLLM, of version 0.32 or later, with VLLM_SERVER_DEV_MODE=1 in its environment"
    missing_lora = "start vLLM with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"

    @property
    def capabilities(self) -> PublisherCapabilities:
        """See Publisher."""
        if self._method == "lora":
            return PublisherCapabilities(kind="lora", model=self._adapter)
        # A sleeping server has no memory for the KV cache of calls in flight, so none may be in flight.
        return PublisherCapabilities(drained=self._method == "sleep", releases=self._method == "sleep")

    async def publish(self, weights: Path, version: str) -> None:
        """See Publisher."""
        seen = self._server_path(weights)
        if self._method == "sleep":
            await self._load_while_waking(seen, version)
            return
        await self.pause()
        if self._method == "lora":
            await self._load_adapter(seen)
        else:
            await self._load(seen)
        await self.resume(version)

    async def release(self) -> None:
        """See Publisher."""
        if self._method == "sleep" and not (await self.control.get("/is_sleeping", _Sleeping)).is_sleeping:
            await self._sleep()

    # --- helpers -----------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Pause sampling until `resume`, which continues the calls in flight."""
        await self.control.post("/pause", query={"mode": "keep", "clear_cache": "true"})

    async def resume(self, version: str) -> None:
        """Clear what was computed with the old weights, set the version, and resume sampling."""
        for _ in range(_RESET_TRIES):
            response = await self.control.post("/reset_prefix_cache", query={"reset_running_requests": "true"})
            if self.control.decode("/reset_prefix_cache", response, _Reset).success:
                break
            await asyncio.sleep(_RESET_PAUSE_S)
        else:
            raise BackendError(
                f"{self.control.base}: /reset_prefix_cache failed, so the cache still holds values of the "
                "old weights; the server stays paused. Run the same command again"
            )
        await self._set_version(version)
        await self.control.post("/resume")

    async def _load_while_waking(self, seen: str, version: str) -> None:
        await self.release()
        if await self._wake("weights"):
            # It was only paused, which /is_sleeping reports as sleeping too, so /wake_up has resumed it.
            await self._sleep()
            await self._wake("weights")
        await self._load(seen)
        # The version is set before the last part wakes, because the server samples from then on.
        await self._set_version(version)
        if not await self._wake("kv_cache"):
            raise BackendError(
                f"{self.control.base}: the server is still asleep after /wake_up; see its log, "
                "restart it, and run the same command again"
            )

    async def _sleep(self) -> None:
        # A sleeping server has no memory for calls in flight, so it waits until they have ended.
        await self.control.post("/sleep", query={"level": "2", "mode": "wait"})

    async def _wake(self, part: str) -> bool:
        """Wake a part of the server; return whether all of it is awake."""
        response = await self.control.post("/wake_up", query={"tags": part})
        return self.control.decode("/wake_up", response, _Awake).status == "awake"

    async def _load(self, seen: str) -> None:
        request = {"method": "reload_weights", "kwargs": {"weights_path": seen}}
        with explain_load_failure(seen):
            await self.control.post("/collective_rpc", request)

    async def _load_adapter(self, seen: str) -> None:
        request = {"lora_name": self._adapter, "lora_path": seen, "load_inplace": True}
        try:
            await self.control.post("/v1/load_lora_adapter", request, missing="")
        except BackendError as error:
            # The old adapter is unchanged, so sampling may continue.
            await self.control.post("/resume")
            # vLLM also answers 404 for an adapter directory that it does not find.
            if error.status in (404, 405) and b"adapter" not in error.body:
                raise ConfigError(f"{error}; {self.missing_lora}") from error
            raise BackendError(
                f"{error}. The server reads {seen} from its own disk: check that it has that path, and that "
                "its --max-lora-rank is at least the adapter's rank",
                status=error.status,
                body=error.body,
            ) from error

    async def _set_version(self, version: str) -> None:
        await self.control.post("/update_weight_version", {"new_version": version})


class EmbeddedPublisher(VLLMPublisher):
    """Makes the embedded model's server load a directory in place (see Publisher)."""

    methods = ("disk", "lora")
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
    """Makes an SGLang server read weights from a disk that it shares with this machine (see Publisher).

    The method "disk" pauses the server, loads whole weights in place, and resumes; "lora" replaces the adapter.
    SGLang's model name for requests with the adapter is `lora:ADAPTER`.
    """

    methods = ("disk", "lora")
    version_path = "/model_info"
    missing = "check that it is an SGLang server, of version 0.5.20 or later"

    @property
    def capabilities(self) -> PublisherCapabilities:
        """See Publisher."""
        if self._method == "lora":
            # SGLang unloads the old adapter, which waits for its calls, before it loads the new one.
            return PublisherCapabilities(kind="lora", drained=True, model=f"lora:{self._adapter}")
        return PublisherCapabilities()

    async def publish(self, weights: Path, version: str) -> None:
        """See Publisher."""
        seen = self._server_path(weights)
        if self._method == "lora":
            await self._load_adapter(seen, version)
            return
        # "retract" drops the cache of calls in flight; they are recomputed with the new weights after the flush.
        await self.control.post("/pause_generation", {"mode": "retract"})
        request = {"model_path": seen, "weight_version": version, "flush_cache": True, "abort_all_requests": False}
        with explain_load_failure(seen):
            await self._post_command("/update_weights_from_disk", request)
        await self.control.post("/continue_generation", {})

    async def _load_adapter(self, seen: str, version: str) -> None:
        loaded = await self.control.get("/v1/models", _Cards)
        if any(card.id == self._adapter and card.parent is not None for card in loaded.data):
            await self._post_command("/unload_lora_adapter", {"lora_name": self._adapter})
        # No flush is needed: SGLang's cache key contains an id that is new with each load of an adapter.
        await self._post_command("/load_lora_adapter", {"lora_name": self._adapter, "lora_path": seen})
        await self._post_command("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def _post_command(self, path: str, request: object) -> None:
        result = self.control.decode(path, await self.control.post(path, request), _CommandResult)
        if not result.success:
            reason = result.error_message or result.message or "no reason given"
            raise BackendError(
                f"POST {self.control.base}{path}: the server refused: {reason}; see the server's log, then "
                "run the same command again",
                status=200,
            )
