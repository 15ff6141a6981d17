"""Publishers by the kind of server, and one for several servers of the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from understudy.errors import BackendError, ConfigError
from understudy.train.publish.base import ADAPTER, TIMEOUT_S, PathMapping, Publisher, PublisherCapabilities
from understudy.train.publish.servers import EmbeddedPublisher, SGLangPublisher, VLLMPublisher


def _transfer(base_url: str, **options: Any) -> Publisher:
    from understudy.train.publish.vllm_transfer import TransferPublisher

    options.pop("adapter")
    options.pop("seen_as")
    return TransferPublisher(base_url, **options)


_MAKERS: dict[tuple[str, str], Callable[..., Publisher]] = {
    ("embedded", "disk"): EmbeddedPublisher,
    ("embedded", "lora"): EmbeddedPublisher,
    ("vllm", "disk"): VLLMPublisher,
    ("vllm", "sleep"): VLLMPublisher,
    ("vllm", "lora"): VLLMPublisher,
    ("vllm", "transfer"): _transfer,
    ("sglang", "disk"): SGLangPublisher,
    ("sglang", "lora"): SGLangPublisher,
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
    """A publisher for the servers at `base_urls`, all of the kind `server`: embedded, vllm or sglang.

    `way` is how weights get there: "disk" and "lora" for all, "sleep" and "transfer" for vLLM. Raises ConfigError
    for a combination that there is not.
    """
    urls = [base_urls] if isinstance(base_urls, str) else list(base_urls)
    make = _MAKERS.get((server, method))
    if make is None or not urls:
        supported = ", ".join(f"{name} by {how}" for name, how in sorted(_MAKERS))
        raise ConfigError(f"cannot publish weights to {len(urls)} × {server} by {method}; supported: {supported}")
    if method == "transfer" and len(urls) > 1:
        raise ConfigError("a transfer goes to one server; give it all its GPUs by --data-parallel-size")
    options: dict[str, Any] = {"api_key": api_key, "adapter": adapter, "seen_as": seen_as, "timeout_s": timeout_s}
    options |= {} if method == "transfer" else {"method": method}
    publishers = [make(url, **options) for url in urls]
    return publishers[0] if len(publishers) == 1 else MultiPublisher(publishers)


class MultiPublisher:
    """Publishes to several servers of the same model at once (see Publisher)."""

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        self._all = list(publishers)

    @property
    def capabilities(self) -> PublisherCapabilities:
        """See Publisher."""
        return self._all[0].capabilities

    async def publish(self, weights: Path, version: str) -> None:
        """See Publisher. Where one server fails, others may have the new weights: publishing again ends that."""
        await self._each([each.publish(weights, version) for each in self._all])

    async def current(self) -> str | None:
        """See Publisher. None also where the servers do not agree."""
        versions = await self._each([each.current() for each in self._all])
        return versions[0] if len(set(versions)) == 1 else None

    async def release(self) -> None:
        """See Publisher."""
        await self._each([each.release() for each in self._all])

    async def _each(self, orders: Sequence[Any]) -> list[Any]:
        """All answers, once all have come. Raises what was raised, of several servers as one BackendError."""
        done = await asyncio.gather(*orders, return_exceptions=True)
        failed = [each for each in done if isinstance(each, BaseException)]
        if not failed:
            return list(done)
        if len(failed) == 1 or not all(isinstance(each, BackendError) for each in failed):
            raise failed[0]
        raise BackendError("; ".join(map(str, failed))) from failed[0]
