"""Makes a gateway from its configuration: the models with their backends, and everything that is closed with
it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec import Struct

from understudy.errors import BackendError, ConfigError
from understudy.gateway.backends.anthropic import BASE_URL, AnthropicRelay
from understudy.gateway.backends.base import Backend, Relay, RestorableBackend
from understudy.gateway.backends.chat import EmbeddedBackend, OpenAIBackend, SGLangBackend, VLLMBackend
from understudy.gateway.backends.http import HttpClient
from understudy.gateway.backends.pool import BackendPool, RelayPool, RememberingPool
from understudy.gateway.config import OWN_SERVERS, GatewayConfig, ModelConfig, check_config
from understudy.gateway.control import GenerationControl
from understudy.gateway.exact.backend import ExactBackend
from understudy.gateway.exact.codec import LocalCodec, ServerCodec
from understudy.gateway.exact.parsers import format_named
from understudy.gateway.exact.token_servers import SERVERS
from understudy.gateway.exact.tree import TokenForest
from understudy.gateway.fair_slots import FairSlots
from understudy.gateway.keys import KeyRing
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.capture import CallObserver, CallSink
from understudy.gateway.telemetry.agent_exports import AgentTelemetry
from understudy.gateway.telemetry.metrics import GatewayMetrics

_log = logging.getLogger(__name__)


class _Provider(Struct, frozen=True):
    """A provider's address, and the environment variable of its key, used if the configuration gives none."""

    url: str
    key_env: str


_PROVIDERS = {
    "openai": _Provider("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "anthropic": _Provider(BASE_URL, "ANTHROPIC_API_KEY"),
}


async def build_models(config: GatewayConfig) -> ModelRouter:
    """Return the models of a configuration, ready to answer.

    Self-hosted servers are asked whether they have the model; if there are several endpoints, some may be down.
    Raises ConfigError for contradictions, a missing key, or a model that a server does not have, and BackendError
    if no endpoint of a model answers.
    """
    check_config(config)
    built: dict[str, Backend | Relay] = {}
    try:
        for role, model in config.models.by_role().items():
            built[role] = await _model(f"models.{role}", model)
    except BaseException:
        for server in built.values():
            await server.close()
        raise
    slots = {
        role: FairSlots(model.concurrency, model.queue)
        for role, model in config.models.by_role().items()
        if model.concurrency is not None
    }
    return ModelRouter(built["high"], built.get("low"), config.names, slots=slots)


async def _model(key: str, model: ModelConfig) -> Backend | Relay:
    secret, urls = secret_of(key, model), model.urls
    if model.backend == "embedded" and not urls:
        raise ConfigError(
            f"{key}.base_url: missing, expected the address of a running embedded server (only `understudy run` "
            "starts one itself); start one with `python -m understudy.model.server --weights DIR --port 8000` and "
            'give base_url = "http://127.0.0.1:8000/v1"'
        )
    urls = urls or (_PROVIDERS[model.backend].url,)
    client: dict[str, Any] = {"timeout_s": model.timeout_s, "resend": model.resend}
    options: dict[str, Any] = client | {"price": model.effective_price}
    if model.backend == "anthropic":
        return RelayPool([AnthropicRelay(url, model.model, secret, **options) for url in urls])
    name = model.model or ""
    if model.tokens == "exact":
        says_remedies = model.backend == "embedded"
        clients = [HttpClient(url, secret, says_remedies=says_remedies, **client) for url in urls]
        backends: Sequence[Backend] = await _exact(model, clients)
    elif model.backend == "openai":
        backends = [OpenAIBackend(url, name, secret, **options) for url in urls]
    else:
        server = _SERVERS[model.backend]
        backends = [server(url, name, secret, template_args=model.template_args, **options) for url in urls]
    try:
        if model.backend in OWN_SERVERS:
            await _check_served(key, name, urls, backends)
    except BaseException:
        for backend in backends:
            await backend.close()
        raise
    first = backends[0]
    return RememberingPool(backends, first) if isinstance(first, RestorableBackend) else BackendPool(backends)


_SERVERS = {"vllm": VLLMBackend, "sglang": SGLangBackend, "embedded": EmbeddedBackend}


def secret_of(key: str, model: ModelConfig) -> str | None:
    """Return the API key for a model's servers from the environment; None if they need none.

    Errors begin with `key`, the setting's name, such as models.high. Raises ConfigError if the API key is required
    and missing.
    """
    provider = _PROVIDERS.get(model.backend)
    name = model.api_key_env or (provider.key_env if provider else None)
    secret = os.environ.get(name) if name else None
    needed = model.api_key_env is not None or (provider is not None and not model.urls)
    if needed and not secret:
        raise ConfigError(
            f"{key}: missing API key: the environment variable {name} is not set; set it, or name another in "
            "api_key_env"
        )
    return secret or None


async def _exact(model: ModelConfig, clients: Sequence[HttpClient]) -> list[Backend]:
    """Return exact backends for a model's endpoints, which share its tokenizer and its conversations."""
    name, memory = model.model or "", TokenForest()
    format_ = format_named(model.tool_format or "")
    # Reading or downloading a tokenizer takes time, so it runs in a thread.
    codec = await asyncio.to_thread(LocalCodec.load, model.tokenizer) if model.tokenizer else None
    return [
        ExactBackend(
            model.backend,
            SERVERS[model.backend](client, name),
            codec or ServerCodec(client, name),
            format_,
            price=model.effective_price,
            memory=memory,
        )
        for client in clients
    ]


async def _check_served(key: str, name: str, urls: Sequence[str], backends: Sequence[Backend]) -> None:
    answers = await asyncio.gather(*(backend.models() for backend in backends), return_exceptions=True)
    down: list[BackendError] = []
    for url, answer in zip(urls, answers, strict=True):
        if isinstance(answer, BackendError):
            _log.warning("%s: an endpoint does not answer, so the others are used: %s", key, answer)
            down.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        elif name not in answer:
            remedy = (
                f"give one of: {', '.join(answer)}" if answer else "start the server with a model: it lists none"
            )
            raise ConfigError(f"{key}.model: the server at {url} has no model {name!r}; {remedy}")
    if len(down) == len(backends):
        raise down[0]


_K = TypeVar("_K", bound=KeyRing)


@dataclass(frozen=True)
class OpenedGateway(Generic[_K]):
    """A gateway that does not listen yet, with its key ring and what controls and observes it."""

    gateway: Gateway
    keys: _K
    control: GenerationControl
    metrics: GatewayMetrics


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig,
    sink: CallSink,
    keys: Callable[[ModelRouter], _K],
    *,
    version: str | None = None,
    control: GenerationControl | None = None,
) -> AsyncGenerator[OpenedGateway[_K]]:
    """Open the gateway of a configuration. It is stopped and closed with the context.

    `keys` makes its key ring. `version` is the policy version that answers at first. `control` is a switch that
    several gateways share and that knows the version. Raises like `build_models`.
    """
    async with AsyncExitStack() as stack:
        models = await build_models(config)
        stack.push_async_callback(models.close)
        control = control or GenerationControl(version)
        metrics = GatewayMetrics(control)
        telemetry = AgentTelemetry(config.telemetry)
        stack.push_async_callback(telemetry.close)

        observers: list[CallObserver] = [metrics.observe]
        if config.telemetry is not None:
            from understudy.gateway.telemetry.otlp import CallSpans  # this needs the extra `otel`

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
        yield OpenedGateway(gateway, ring, control, metrics)
