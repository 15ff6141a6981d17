"""The configuration of a gateway in TOML: models, names, sampling, budget, telemetry. It contains no API keys."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta, Struct, field

from understudy.errors import ConfigError
from understudy.gateway.budget import Budget
from understudy.gateway.errors import streaming_excludes_exact
from understudy.gateway.exact.parsers import FORMATS
from understudy.gateway.prices import Price, list_price
from understudy.util.validation import validation_text

BackendKind = Literal["vllm", "sglang", "openai", "anthropic", "embedded"]
TokenMode = Literal["observe", "exact"]
ModelRole = Literal["high", "low"]
OWN_SERVERS = frozenset({"vllm", "sglang", "embedded"})
"""Self-hosted servers, which apply a chat template. All other backends are providers."""

EMBEDDED_MODEL = "understudy-embedded"
"""The embedded server's default name for its model."""
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
QUEUE = 1024
TIMEOUT_S = 3600.0

_Above0 = Annotated[int, Meta(ge=1)]
_Positive = Annotated[float, Meta(gt=0)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model and its servers: several `endpoints`, or one at `base_url`, or the provider's default address.

    `api_key_env` names the environment variable with the key. `concurrency` is the maximum number of requests at
    once over all endpoints, and `queue` how many more may wait. `tokenizer` (a directory, or a name on the hub)
    and `tool_format` are for `tokens = "exact"`. `price` is in US dollars per million tokens, `timeout_s` in
    seconds. Without `resend`, a request whose connection is lost before its answer begins is not sent again,
    because it may have been billed.
    """

    backend: BackendKind
    model: str | None = None
    base_url: str | None = None
    endpoints: tuple[str, ...] = ()
    api_key_env: str | None = None
    tokens: TokenMode = "observe"
    tokenizer: str | None = None
    tool_format: str | None = None
    template_args: dict[str, Any] = field(default_factory=dict[str, Any])
    concurrency: _Above0 | None = None
    queue: Annotated[int, Meta(ge=0)] = QUEUE
    price: Price | None = None
    timeout_s: _Positive = TIMEOUT_S
    resend: bool = True

    def __post_init__(self) -> None:
        if self.backend == "embedded" and self.model is None:
            msgspec.structs.force_setattr(self, "model", EMBEDDED_MODEL)

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the endpoints; empty for the provider's default address."""
        return (self.base_url,) if self.base_url else self.endpoints

    @property
    def effective_price(self) -> Price | None:
        """The configured price, else the list price of a provider's model."""
        if self.price is not None or self.model is None or self.backend in OWN_SERVERS:
            return self.price
        return list_price(self.model)


class ModelsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The high model, and the low one if small tasks have another."""

    high: ModelConfig
    low: ModelConfig | None = None

    def by_role(self) -> dict[str, ModelConfig]:
        """The models by role."""
        return {"high": self.high} | ({} if self.low is None else {"low": self.low})


class SamplingParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters that override what agents request. None keeps the agent's value."""

    max_tokens: _Above0 | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    seed: int | None = None
    stop: list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: _Positive | None = None
    reasoning_effort: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters that are set, by name."""
        return msgspec.to_builtins(self)


class SamplingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters for attempts that are trained on, and for attempts that are only evaluated."""

    training: SamplingParameters = SamplingParameters()
    evaluation: SamplingParameters = SamplingParameters()


class TelemetryCollector(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where telemetry goes: `endpoint` is the base URL of an OTLP/HTTP collector.

    Headers for it, which may be secret, are in the environment variable OTEL_EXPORTER_OTLP_HEADERS. With
    `contents`, prompts and answers are exported too; otherwise nothing that an agent or a model wrote.
    """

    endpoint: str
    contents: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each export, as `name=value` separated by commas, with URL-encoded values."""
        pairs = (pair.partition("=") for pair in os.environ.get(HEADERS_VARIABLE, "").split(","))
        return {name.strip().lower(): unquote(value.strip()) for name, _, value in pairs if name.strip()}


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The whole configuration.

    `names` maps requested model names to "high" or "low"; `budget` applies to each attempt.
    """

    models: ModelsConfig
    names: dict[str, ModelRole] = field(default_factory=dict[str, ModelRole])
    sampling: SamplingConfig = SamplingConfig()
    budget: Budget | None = None
    streaming: bool = False
    telemetry: TelemetryCollector | None = None


def parse_config(data: dict[str, Any], path: Path) -> GatewayConfig:
    """Parse the content of the TOML file `path`. A `tokenizer` may be a directory relative to the file.

    Raises ConfigError naming the file, the key and what was expected.
    """
    try:
        config = msgspec.convert(data, GatewayConfig)
        check_config(config)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: {_with_key(validation_text(error, GatewayConfig))}; correct this key"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    roles = {role: _with_tokenizer_path(model, path.parent) for role, model in config.models.by_role().items()}
    return msgspec.structs.replace(config, models=ModelsConfig(**roles))


def config_from_flags(backend: str, base_urls: Sequence[str], high: str | None, low: str | None) -> GatewayConfig:
    """Return the configuration of one backend at some addresses, with the names of its models.

    Raises ConfigError.
    """
    try:
        kind = msgspec.convert(backend, BackendKind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"backend: unknown kind {backend[:80]!r}; give one of {', '.join(get_args(BackendKind))}"
        ) from error
    names = {"high": high} | ({"low": low} if low is not None else {})
    models = {
        role: ModelConfig(backend=kind, model=name, endpoints=tuple(base_urls)) for role, name in names.items()
    }
    config = GatewayConfig(models=ModelsConfig(**models))
    check_config(config)
    return config


def config_for_weights(directory: str) -> GatewayConfig:
    """Return the configuration of an embedded server for a directory's weights, with `tokens = "exact"`."""
    high = ModelConfig(backend="embedded", tokens="exact", tokenizer=directory, tool_format="hermes")
    return GatewayConfig(models=ModelsConfig(high=high))


def check_config(config: GatewayConfig) -> None:
    """Raise ConfigError for settings that contradict each other, naming their keys and the remedy."""
    for role, model in config.models.by_role().items():
        _check_model(f"models.{role}", model)
        if config.streaming and model.tokens == "exact":
            raise streaming_excludes_exact(f"models.{role}.")
        if config.budget and config.budget.cost_usd is not None and model.effective_price is None:
            raise ConfigError(
                f"budget.cost_usd needs the price of {model.model or 'every model'}, which is missing; give "
                f"models.{role}.price {{ input, output }} in US dollars per million tokens"
            )
    if config.telemetry is not None:
        _check_url("telemetry.endpoint", config.telemetry.endpoint)


def _check_model(key: str, model: ModelConfig) -> None:
    is_own = model.backend in OWN_SERVERS
    exact = model.tokens == "exact"
    formats = ", ".join(sorted(FORMATS))
    rules = {
        "base_url: excludes endpoints; give only one of them": model.base_url is not None
        and bool(model.endpoints),
        f"model: missing; the {model.backend} backend needs the name of a model": not model.model
        and model.backend != "anthropic",
        f"base_url: missing; the {model.backend} backend needs one, such as http://host:port/v1": is_own
        and model.backend != "embedded"  # a run starts this server itself
        and not model.urls,
        f'tokens: "exact" is unsupported by backend = "{model.backend}", expected one of '
        f'{", ".join(sorted(OWN_SERVERS))}; set another backend, or tokens = "observe"': exact and not is_own,
        'tokenizer: missing; tokens = "exact" with sglang needs one: give a directory or a name on the hub': exact
        and model.backend == "sglang"
        and model.tokenizer is None,
        f'tool_format: missing; tokens = "exact" needs the format of tool calls: give one of {formats}': exact
        and model.tool_format is None,
        f"tool_format: expected one of {formats}, got {model.tool_format!r}; give one": exact
        and model.tool_format is not None
        and model.tool_format not in FORMATS,
        'template_args: unsupported with tokens = "exact"; leave it out': exact and bool(model.template_args),
        'tokenizer: only applies with tokens = "exact"; add that, or leave tokenizer out': not exact
        and model.tokenizer is not None,
        'tool_format: only applies with tokens = "exact"; add that, or leave tool_format out': not exact
        and model.tool_format is not None,
        f"template_args: unsupported by {model.backend}, which applies its own template; leave it out": not is_own
        and bool(model.template_args),
    }
    for fault, violated in rules.items():
        if violated:
            raise ConfigError(f"{key}.{fault}")
    for url in model.urls:
        _check_url(f"{key}.{'base_url' if model.base_url else 'endpoints'}", url)


def _check_url(key: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        parts, valid = None, False
    if parts is not None and "@" in parts.netloc:
        # The address is not repeated in the error, because it contains a password.
        raise ConfigError(
            f"{key}: unsupported: a password in the address; name an environment variable in api_key_env instead"
        )
    if not valid:
        raise ConfigError(f"{key}: invalid address {url!r}; give one like http://host:port/v1 or https://host/v1")


def _with_key(message: str) -> str:
    """Format a validation error as "key: what was expected"."""
    text, _, location = message.partition(" - at `$")
    key = location.rstrip("`").lstrip(".")
    if unknown := _UNKNOWN_FIELD.fullmatch(text):
        name = f"{key}.{unknown[1]}" if key else unknown[1]
        return f"{name}: unknown key, expected one of {', '.join(_keys_of_table(key))}"
    return f"{key}: {text}" if key else text


def _keys_of_table(key: str) -> tuple[str, ...]:
    """Return the keys that the table at `key`, such as models.high, may have."""
    kind: Any = GatewayConfig
    for name in key.split(".") if key else ():
        hint = get_type_hints(kind, include_extras=False)[name]
        kind = next(candidate for candidate in (hint, *get_args(hint)) if hasattr(candidate, "__struct_fields__"))
    return kind.__struct_fields__


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`")


def _with_tokenizer_path(model: ModelConfig, directory: Path) -> ModelConfig:
    if model.tokenizer is None or not (directory / model.tokenizer).is_dir():
        return model
    return msgspec.structs.replace(model, tokenizer=str((directory / model.tokenizer).absolute()))
