"""Creates the publisher for a kind of server, and combines publishers for several servers of the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from understudy.errors import BackendError, ConfigError
from understudy.train.publish.base import (
    ADAPTER,
    TIMEOUT_S,
    PathMapping,
    Publisher,
    PublisherCapabilities,
    PublishMethod,
)
from understudy.train.publish.servers import EmbeddedPublisher, SGLangPublisher, VLLMPublisher

_DISK_PUBLISHERS: dict[str, type[VLLMPublisher] | type[SGLangPublisher]] = {
    "embedded": EmbeddedPublisher,
    "vllm": VLLMPublisher,
    "sglang": SGLangPublisher,
}


def make_publisher(
    server: str,
    base_urls: str | Sequence[str],
    *,
    method: str = "disk",
    api_key: str | None = None,
    adapter: str = ADAPTER,
    seen_as: PathMapping | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Publisher:
    """Return a publisher for the servers at `base_urls`, all of the kind `server`: embedded, vllm or sglang.

    `method` is how the weights get there: "disk" or "lora" for all servers, "sleep" or "transfer" for vLLM only.
    Raises ConfigError for an unsupported combination.
    """
    urls = [base_urls] if isinstance(base_urls, str) else list(base_urls)
    kind = _DISK_PUBLISHERS.get(server)
    transfers = (server, method) == ("vllm", "transfer")
    if not urls:
        raise ConfigError("no server to publish weights to; give the address of at least one (--base-url)")
    if kind is None or not (transfers or method in kind.methods):
        methods = [(name, method) for name, kind_ in _DISK_PUBLISHERS.items() for method in kind_.methods]
        ways = sorted([*methods, ("vllm", "transfer")])
        supported = [way for way in ways if way[0] == server] or ways
        raise ConfigError(
            f"--publish {method}: unsupported for --backend {server}, expected one of "
            f"{', '.join(f'{name} by {method}' for name, method in supported)}; give one of these"
        )
    publishers: list[Publisher]
    if transfers:
        from understudy.train.publish.vllm_transfer import TransferPublisher

        if len(urls) > 1:
            raise ConfigError(
                f"--publish transfer supports one server, got {len(urls)}; start one vLLM with "
                "--data-parallel-size for all GPUs"
            )
        publishers = [TransferPublisher(urls[0], api_key=api_key, timeout_s=timeout_s)]
    else:
        method_ = cast("PublishMethod", method)
        publishers = [
            kind(url, api_key=api_key, method=method_, adapter=adapter, seen_as=seen_as, timeout_s=timeout_s)
            for url in urls
        ]
    return publishers[0] if len(publishers) == 1 else MultiPublisher(publishers)


class MultiPublisher:
    """Publishes to several servers of the same model at once (see Publisher)."""

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        self._publishers = list(publishers)

    @property
    def capabilities(self) -> PublisherCapabilities:
        """See Publisher."""
        return self._publishers[0].capabilities

    async def publish(self, weights: Path, version: str) -> None:
        """See Publisher. If one server fails, others may already have the new weights; publishing again fixes
        that.
        """
        await self._gather([publisher.publish(weights, version) for publisher in self._publishers])

    async def current(self) -> str | None:
        """See Publisher. Also None if the servers have different versions."""
        versions = await self._gather([publisher.current() for publisher in self._publishers])
        return versions[0] if len(set(versions)) == 1 else None

    async def release(self) -> None:
        """See Publisher."""
        await self._gather([publisher.release() for publisher in self._publishers])

    async def _gather(self, calls: Sequence[Any]) -> list[Any]:
        """Await all and return their results in order.

        Raises the exception of one that failed; BackendErrors of several servers are joined into one.
        """
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = [outcome for outcome in results if isinstance(outcome, BaseException)]
        if not failed:
            return list(results)
        if len(failed) == 1 or not all(isinstance(error, BackendError) for error in failed):
            raise failed[0]
        raise BackendError("; ".join(map(str, failed))) from failed[0]
