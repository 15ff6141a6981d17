"""The gateway's configuration, as the options of a command say it: by flags, or by a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from understudy.cli.settings import COMMAND_TABLES, BackendSettings, ModelSettings
from understudy.errors import ConfigError
from understudy.util.settings import read_toml

if TYPE_CHECKING:
    from understudy.gateway.config import GatewayConfig, ModelRole

BACKENDS = ("embedded", "vllm", "sglang", "openai", "anthropic")
FRONTEND_HIGH, FRONTEND_LOW = "claude-sonnet-4-5-20250929", "claude-haiku-4-5-20251001"
"""The names by which Claude Code asks for its models, unless it is told others."""
VLLM_URL = "http://localhost:8000/v1"

_NEEDS_MODEL = ("vllm", "sglang", "openai")
_NEEDS_URL = ("sglang",)


def gateway_config(settings: BackendSettings, *, backend: str | None) -> GatewayConfig:
    """The gateway's configuration: of the file, where that names models, else of the `backend` and its options.

    Raises ConfigError when the options contradict each other.
    """
    from understudy.gateway.config import config_from_flags, parse_config

    urls, high, low = settings.base_url, settings.backend_model_high, settings.backend_model_low
    if settings.config is not None:
        file = read_toml(settings.config)
        own = {name: value for name, value in file.items() if name not in COMMAND_TABLES}
        if own or not file:
            if settings.backend or urls or high or low:
                raise ConfigError(
                    f"{settings.config} says which models answer: "
                    "give either --config, or a backend with its options"
                )
            return parse_config(own, settings.config)
    if backend is None:
        raise ConfigError(f"say who answers: a backend ({', '.join(BACKENDS)}), or --config FILE")
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "embedded" and not urls:
        if high or low:
            raise ConfigError("the embedded backend takes no model names: its one model is known")
        return config_from_flags(backend, [], None, None)
    if backend == "vllm" and not urls:
        urls = (VLLM_URL,)
    missing = {
        "--base-url, the address of its server": backend in _NEEDS_URL and not urls,
        "--backend-model-high, the name of the model to ask it for": backend in _NEEDS_MODEL and not high,
    }
    if any(missing.values()):
        flags = "; ".join(flag for flag, absent in missing.items() if absent)
        raise ConfigError(f"the {backend} backend needs {flags}")
    return config_from_flags(backend, urls, high, low)


def run_gateway_config(settings: ModelSettings) -> tuple[GatewayConfig, str, str]:
    """The gateway's configuration of a run, and the names by which its agent asks for the models; "": their own.

    Weights that the run serves itself are asked in tokens, unless a configuration file says how.

    The names of Claude's models are the default where the models are another's, or have no names of their own:
    Anthropic is asked for what the agent asks. Raises ConfigError.
    """
    from understudy.gateway.config import config_for_weights

    high, low = settings.frontend_model_high or "", settings.frontend_model_low or ""
    by_file = _names_models(settings.config)
    backend = settings.backend or (None if by_file else "embedded")
    if backend == "anthropic" and not by_file:
        settings = replace(
            settings,
            backend_model_high=settings.backend_model_high or high or FRONTEND_HIGH,
            backend_model_low=settings.backend_model_low or low or FRONTEND_LOW,
        )
    config = gateway_config(settings, backend=backend)
    if settings.weights is not None and not by_file and backend == "embedded" and not settings.base_url:
        config = config_for_weights(str(settings.weights.absolute()))
    own_names = config.models.high.model is not None if by_file else backend == "embedded"
    if not own_names:
        high, low = high or FRONTEND_HIGH, low or FRONTEND_LOW
    return _sampled(_routed(config, high, low), settings), high, low


def _names_models(config: Path | None) -> bool:
    """Whether a configuration file says which models answer, and not only what a command is told."""
    return config is not None and not set(read_toml(config) or ("",)).issubset(COMMAND_TABLES)


def embedded_server(config: GatewayConfig, settings: ModelSettings) -> tuple[str | None, str | None, str | None]:
    """The policy, or the directory and the version of the weights, of the server that a run starts; None: none.

    Raises ConfigError where it starts none, or for a directory without weights.
    """
    from understudy.model.directory import fingerprint

    policy, weights, version = settings.policy, settings.weights, settings.weights_version
    high = config.models.high
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


def _sampled(config: GatewayConfig, settings: ModelSettings) -> GatewayConfig:
    """The configuration with the sampling of the settings laid over what agents ask, where they have any."""
    wanted = {"temperature": settings.temperature, "max_tokens": settings.answer_tokens}
    overrides = {name: value for name, value in wanted.items() if value is not None}
    sampling = config.sampling
    return replace(
        config,
        sampling=replace(
            sampling,
            training=replace(sampling.training, **overrides),
            evaluation=replace(sampling.evaluation, **overrides),
        ),
    )


def _routed(config: GatewayConfig, high: str, low: str) -> GatewayConfig:
    """The configuration with these names standing for the high and the low model."""
    names: dict[str, ModelRole] = {}
    wanted: tuple[tuple[str, ModelRole], ...] = ((high, "high"), (low, "low"))
    for name, role in wanted:
        if not name:
            continue
        if {**config.names, **names}.get(name, role) != role:
            raise ConfigError(
                f"the name {name!r} cannot stand for both models; give others with --frontend-model-high and "
                "--frontend-model-low, or correct [names] in the configuration"
            )
        names[name] = role
    return replace(config, names=config.names | names)
