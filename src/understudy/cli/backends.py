"""Who answers for Claude, as the options of a command say it: by flags, or by a configuration file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.gateway.config import GatewayConfig, ModelRole

BACKENDS = ("embedded", "vllm", "sglang", "openai", "anthropic")
FRONTEND_HIGH, FRONTEND_LOW = "claude-sonnet-4-5-20250929", "claude-haiku-4-5-20251001"
"""The names by which Claude Code asks for its models, unless it is told others."""
VLLM_URL = "http://localhost:8000/v1"

_NEEDS_MODEL = ("vllm", "sglang", "openai")
_NEEDS_URL = ("sglang",)


def gateway_config(
    backend: str | None, config: Path | None, base_urls: Sequence[str], high: str | None, low: str | None
) -> GatewayConfig:
    """The configuration that the options name. Raises ConfigError when they contradict each other."""
    from understudy.gateway.config import config_from_flags, read_config

    if config is not None:
        if backend or base_urls or high or low:
            raise ConfigError(
                f"{config} says which models answer: give either --config, or a backend with its options"
            )
        return read_config(config)
    if backend is None:
        raise ConfigError(f"say who answers: a backend ({', '.join(BACKENDS)}), or --config FILE")
    if backend not in BACKENDS:
        raise ConfigError(f"there is no backend {backend!r}; there are: {', '.join(BACKENDS)}")
    if backend == "embedded" and not base_urls:
        if high or low:
            raise ConfigError("the embedded backend takes no model names: its one model is known")
        return config_from_flags(backend, [], None, None)
    urls = [VLLM_URL] if backend == "vllm" and not base_urls else base_urls
    missing = {
        "--base-url, the address of its server": backend in _NEEDS_URL and not urls,
        "--backend-model-high, the name of the model to ask it for": backend in _NEEDS_MODEL and not high,
    }
    if any(missing.values()):
        flags = "; ".join(flag for flag, absent in missing.items() if absent)
        raise ConfigError(f"the {backend} backend needs {flags}")
    return config_from_flags(backend, urls, high, low)


def run_config(
    backend: str | None,
    config: Path | None,
    base_urls: Sequence[str],
    high: str | None,
    low: str | None,
    frontend_high: str | None,
    frontend_low: str | None,
    weights: Path | None = None,
) -> tuple[GatewayConfig, str, str]:
    """The configuration of a run, and the names by which its agent asks for the models; "": the models' own.

    `weights` that the run serves itself are asked in tokens, unless a configuration file says how.

    The names of Claude's models are the default where the models are another's, or have no names of their own:
    Anthropic is asked for what the agent asks. Raises ConfigError.
    """
    from understudy.gateway.config import config_for_weights

    if backend == "anthropic" and config is None:
        high = high or frontend_high or FRONTEND_HIGH
        low = low or frontend_low or FRONTEND_LOW
    settings = gateway_config(backend, config, base_urls, high, low)
    if weights is not None and config is None and backend == "embedded" and not base_urls:
        settings = config_for_weights(str(weights.absolute()))
    own = backend == "embedded" if config is None else settings.models.high.model is not None
    if not own:
        frontend_high, frontend_low = frontend_high or FRONTEND_HIGH, frontend_low or FRONTEND_LOW
    return _routed(settings, frontend_high or "", frontend_low or ""), frontend_high or "", frontend_low or ""


def embedded(
    settings: GatewayConfig, policy: str | None, weights: Path | None, version: str | None
) -> tuple[str | None, str | None, str | None]:
    """The policy, or the directory and the version of the weights, of the server that a run starts; None: none.

    Raises ConfigError where it starts none, or for a directory without weights.
    """
    from understudy.model.directory import fingerprint

    high = settings.models.high
    starts = high.backend == "embedded" and not high.urls
    if weights is None:
        if version is not None:
            raise ConfigError("--weights-version names the weights that are given by --weights")
        return (policy or "oracle" if starts else None), None, None
    if not starts:
        raise ConfigError("--weights is for the embedded backend that the run starts itself, without --base-url")
    if policy is not None:
        raise ConfigError("give either --policy or --weights: the embedded model is the one or the other")
    return None, str(weights.absolute()), version or fingerprint(weights)


def sampled(settings: GatewayConfig, temperature: float | None, max_tokens: int | None) -> GatewayConfig:
    """The configuration with these laid over what agents ask, where they are not None."""
    from msgspec.structs import replace

    wanted = {"temperature": temperature, "max_tokens": max_tokens}
    given = {name: value for name, value in wanted.items() if value is not None}
    sampling = settings.sampling
    return replace(
        settings,
        sampling=replace(
            sampling,
            training=replace(sampling.training, **given),
            evaluation=replace(sampling.evaluation, **given),
        ),
    )


def _routed(settings: GatewayConfig, high: str, low: str) -> GatewayConfig:
    """The configuration with these names standing for the high and the low model."""
    from msgspec.structs import replace

    names: dict[str, ModelRole] = {}
    wanted: tuple[tuple[str, ModelRole], ...] = ((high, "high"), (low, "low"))
    for name, role in wanted:
        if not name:
            continue
        if {**settings.names, **names}.get(name, role) != role:
            raise ConfigError(
                f"the name {name!r} cannot stand for both models; give others with --frontend-model-high and "
                "--frontend-model-low, or correct [names] in the configuration"
            )
        names[name] = role
    return replace(settings, names=settings.names | names)
