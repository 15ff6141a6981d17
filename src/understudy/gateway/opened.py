"""A whole gateway from its configuration: models, control, metrics and telemetry, opened and closed together."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from understudy.gateway.app import Gateway
from understudy.gateway.build import build_models
from understudy.gateway.capture import CallSink, Observer
from understudy.gateway.config import GatewayConfig
from understudy.gateway.control import Control
from understudy.gateway.keys import KeyRing
from understudy.gateway.models import Models
from understudy.gateway.telemetry.agents import AgentTelemetry
from understudy.gateway.telemetry.metrics import Metrics

_K = TypeVar("_K", bound=KeyRing)


@dataclass(frozen=True)
class Opened(Generic[_K]):
    """A gateway that listens nowhere yet, its key ring, and what it is steered and watched by."""

    gateway: Gateway
    keys: _K
    control: Control
    metrics: Metrics


@asynccontextmanager
async def opened(
    config: GatewayConfig,
    sink: CallSink,
    keys: Callable[[Models], _K],
    *,
    version: str | None = None,
    control: Control | None = None,
) -> AsyncGenerator[Opened[_K]]:
    """The gateway of a configuration, which is stopped and closed with the context. `keys` makes its key ring.

    `version` is the policy version that answers at first; `control` the one that this gateway shares with others,
    which knows it. Raises as `build_models` does.
    """
    async with AsyncExitStack() as stack:
        models = await build_models(config)
        stack.push_async_callback(models.close)
        control = control or Control(version)
        metrics = Metrics(control)
        telemetry = AgentTelemetry(config.telemetry)
        stack.push_async_callback(telemetry.close)

        observers: list[Observer] = [metrics.observe]
        if config.telemetry is not None:
            from understudy.gateway.telemetry.otlp import CallSpans  # the extra `otel`

            spans = CallSpans(config.telemetry)
            stack.push_async_callback(spans.close)
            observers.append(spans.observe)
        ring = keys(models)
        gateway = Gateway(
            models,
            sink,
            ring,
            control=control,
            observers=observers,
            agent_telemetry=telemetry,
            streaming=config.streaming,
        )
        stack.push_async_callback(gateway.stop)
        yield Opened(gateway, ring, control, metrics)
