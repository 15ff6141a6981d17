"""The gateway's configuration: what a file may say, what is refused and how, and the models that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.errors import BackendError, ConfigError
from understudy.gateway.backends.base import Relay
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.backends.pool import BackendPool
from understudy.gateway.config import EMBEDDED_MODEL, GatewayConfig, config_from_flags, parse_config
from understudy.gateway.factory import build_models
from understudy.gateway.prices import Price
from understudy.gateway.router import ModelRouter
from understudy.util.settings import read_toml

from fakes.vllm import FakeVLLM

FULL = """
streaming = false

[models.high]
backend = "vllm"
model = "qwen"
endpoints = ["http://a:8000/v1", "http://b:8000/v1"]
api_key_env = "QWEN_KEY"
template_args = { effort = "high" }
concurrency = 32
queue = 100
price = { input = 1.0, output = 2.0, cached = 0.1 }
timeout_s = 600

[models.low]
backend = "openai"
model = "gpt-5-mini"

[names]
"claude-haiku-4-5" = "low"

[sampling.training]
temperature = 1.0
top_p = 1.0

[sampling.evaluation]
temperature = 0.0
seed = 7
stop = ["X"]

[budget]
calls = 200
cost_usd = 1.5

[telemetry]
endpoint = "http://collector:4318"
"""


def read(tmp_path: Path, text: str) -> GatewayConfig:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return parse_config(read_toml(path), path)


def test_a_full_config_file_is_parsed_and_survives_json(tmp_path: Path) -> None:
    config = read(tmp_path, FULL)
    high, low = config.models.high, config.models.low
    assert low is not None
    assert high.urls == ("http://a:8000/v1", "http://b:8000/v1")
    assert (high.price, low.effective_price) == (
        Price(input=1, output=2, cached=0.1),
        Price(input=0.25, output=2, cached=0.025),
    )
    assert config.names == {"claude-haiku-4-5": "low"}
    assert config.sampling.training.as_dict() == {"temperature": 1.0, "top_p": 1.0}
    assert config.sampling.evaluation.as_dict() == {"temperature": 0.0, "seed": 7, "stop": ["X"]}
    assert config.budget is not None and (config.budget.calls, config.budget.cost_usd) == (200, 1.5)
    # It is handed to other processes as JSON.
    assert msgspec.json.decode(msgspec.json.encode(config), type=GatewayConfig) == config


def test_a_minimal_config_file_equals_the_config_from_flags(tmp_path: Path) -> None:
    config = read(tmp_path, '[models.high]\nbackend = "anthropic"\n')
    assert config == config_from_flags("anthropic", [], None, None)
    assert config.sampling.training.as_dict() == {}
    assert (config.budget, config.streaming, config.telemetry, config.names) == (None, False, None, {})


def test_the_embedded_model_needs_no_name(tmp_path: Path) -> None:
    config = read(tmp_path, '[models.high]\nbackend = "embedded"\n')
    assert config.models.high.model == EMBEDDED_MODEL
    assert config == config_from_flags("embedded", [], None, None)


def model(**fields: Any) -> str:
    settings = {"backend": "vllm", "model": "m", "base_url": "http://a/v1"} | fields
    lines = [
        f"{key} = {msgspec.json.encode(value).decode()}" for key, value in settings.items() if value is not None
    ]
    return "\n".join(["[models.high]", *lines, ""])


EXACT = {"tokens": "exact", "tool_format": "hermes"}
REFUSED: dict[str, tuple[str, str]] = {
    "no TOML": ("[models", "invalid TOML"),
    "no model": ("", "models"),
    "unknown key": (
        model() + "[sampling.training]\ntemprature = 1\n",
        "sampling.training.temprature: unknown key, expected one of max_tokens, ",
    ),
    "unknown table": (model() + "[prices]\n", "prices"),
    "unknown backend": (model(backend="tgi"), "models.high.backend: .*tgi.*expected one of vllm, sglang, "),
    "wrong type": (
        model(endpoints="http://a/v1", base_url=None),
        "models.high.endpoints: Expected `array`, got `str`",
    ),
    "no concurrency at all": (model(concurrency=0), "models.high.concurrency: Expected `int` >= 1"),
    "temperature below 0": (
        model() + "[sampling.evaluation]\ntemperature = -1\n",
        "sampling.evaluation.temperature",
    ),
    "a name for nothing": (model() + '[names]\nx = "middle"\n', "names.*middle.*expected one of high, low"),
    "a budget of nothing": (model() + "[budget]\ncalls = 0\n", "budget.calls: expected a number above 0, got 0"),
    "two addresses": (model(endpoints=["http://b/v1"]), "models.high.base_url: excludes endpoints"),
    "no address": (model(base_url=None), "models.high.base_url: missing; the vllm backend needs one"),
    "no name": (model(model=None), "models.high.model: missing; the vllm backend needs"),
    "no http": (model(base_url="a:8000"), "models.high.base_url: invalid address 'a:8000'"),
    "no host": (model(base_url="http:///v1"), "invalid address"),
    "no port": (model(base_url="http://a:port/v1"), "invalid address"),
    "one bad endpoint": (
        model(base_url=None, endpoints=["http://a/v1", "ftp://b"]),
        "models.high.endpoints: invalid address",
    ),
    "exact from a provider": (
        model(backend="openai", **EXACT),
        'models.high.tokens: "exact" is unsupported by backend = "openai", expected one of embedded, ',
    ),
    "exact from SGLang without a tokenizer": (model(backend="sglang", **EXACT), "models.high.tokenizer"),
    "exact without a format": (model(tokens="exact"), "models.high.tool_format"),
    "exact in a format of nobody's": (
        model(tokens="exact", tool_format="yaml"),
        "models.high.tool_format: expected one of deepseek, ",
    ),
    "streaming and exact": ("streaming = true\n" + model(**EXACT), "streaming = true and models.high.tokens"),
    "a format that is not used": (model(tool_format="hermes"), "models.high.tool_format"),
    "a tokenizer that is not used": (model(tokenizer="x"), "models.high.tokenizer"),
    "a template that is not ours": (
        model(backend="openai") + "template_args = { a = 1 }\n",
        "models.high.template_args",
    ),
    "dollars without a price": (model() + "[budget]\ncost_usd = 1\n", "models.high.price"),
    "an unknown key": ("bogus = 1\n" + model(), "bogus: unknown key, expected one of models, names, "),
    "an unknown key of a model": (
        model() + "bogus = 1\n",
        "models.high.bogus: unknown key, expected one of backend, model, ",
    ),
    "an unknown key of a price": (
        model() + "[models.high.price]\ninput = 1\noutput = 1\nbogus = 1\n",
        "models.high.price.bogus: unknown key, expected one of input, output",
    ),
    "an unknown key of the budget": (
        model() + "[budget]\nbogus = 1\n",
        "budget.bogus: unknown key, expected one of calls, ",
    ),
    "a collector nowhere": (model() + '[telemetry]\nendpoint = "collector"\n', "telemetry.endpoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_config_is_refused_with_its_file_and_key(tmp_path: Path, name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'gateway.toml'}")


def test_a_password_in_a_url_is_refused_and_not_shown_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_key_env") as error:
        read(tmp_path, model(base_url="https://me:s3cret@host/v1"))
    assert "s3cret" not in str(error.value)


def test_a_missing_config_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_toml(tmp_path / "nowhere.toml")


def test_a_relative_tokenizer_path_resolves_against_the_config_file(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    text = model(tokenizer="tok", **EXACT)
    assert read(tmp_path, text).models.high.tokenizer == str(tmp_path / "tok")
    assert read(tmp_path, text.replace('"tok"', '"Qwen/Qwen3"')).models.high.tokenizer == "Qwen/Qwen3"


def test_flags_make_a_config_and_are_validated_like_a_file(tmp_path: Path) -> None:
    config = config_from_flags("vllm", ["http://a/v1", "http://b/v1"], "big", "small")
    assert (config.models.high.model, config.models.high.urls) == ("big", ("http://a/v1", "http://b/v1"))
    assert config.models.low is not None and config.models.low.model == "small"
    with pytest.raises(ConfigError, match=r"models\.high\.base_url"):
        config_from_flags("vllm", [], "big", None)
    with pytest.raises(ConfigError, match="backend: "):
        config_from_flags("tgi", ["http://a/v1"], "big", None)


# --- names ---------------------------------------------------------------------------------------------


def test_model_names_route_to_the_high_or_low_server() -> None:
    high, low = VLLMBackend("http://a/v1", "big"), VLLMBackend("http://b/v1", "small")
    models = ModelRouter(high, low, {"claude-haiku-4-5": "low", "claude-opus-4-5": "high"})
    names = ["high", "low", "claude-haiku-4-5", "claude-opus-4-5", "small", "big", "gpt-4o", "", "LOW"]
    assert [models.server_for(name).model for name in names] == [
        *("big", "small", "small", "big", "small", "big", "big", "big", "big")
    ]
    assert models.names() == ["big", "claude-haiku-4-5", "claude-opus-4-5", "high", "low", "small"]
    assert models.servers() == [high, low]


def test_without_a_low_model_its_names_route_to_the_high_model() -> None:
    high = VLLMBackend("http://a/v1", "big")
    models = ModelRouter(high, names={"claude-haiku-4-5": "low"})
    assert models.server_for("low") is models.server_for("claude-haiku-4-5") is high
    assert models.servers() == [high]


def test_a_name_mapped_to_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names\.x: got 'middle', expected 'high' or 'low'"):
        ModelRouter(VLLMBackend("http://a/v1", "big"), names={"x": "middle"})


# --- models that answer --------------------------------------------------------------------------------


async def test_models_are_built_with_api_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "s3cret")
    async with FakeVLLM() as server:
        text = model(
            base_url=None, endpoints=[server.url, "http://127.0.0.1:9/v1"], model="fake", api_key_env="THE_KEY"
        )
        config = msgspec.toml.decode(text, type=GatewayConfig)
        models = await build_models(config)
        (pool,) = models.servers()
        assert isinstance(pool, BackendPool)
        assert await pool.models() == ["fake"]
        assert (pool.name, pool.model) == ("vllm", "fake")
        await models.close()
        await models.close()


async def test_exact_endpoints_are_pooled_too() -> None:
    async with FakeVLLM() as server:
        config = msgspec.toml.decode(model(base_url=server.url, model="fake", **EXACT), type=GatewayConfig)
        models = await build_models(config)
        (pool,) = models.servers()
        assert isinstance(pool, BackendPool)
        assert (pool.name, pool.model, await pool.models()) == ("vllm", "fake", ["fake"])
        await models.close()


async def test_a_model_that_the_server_lacks_is_a_config_error_at_build() -> None:
    async with FakeVLLM() as server:
        with pytest.raises(
            ConfigError, match=r"models\.high\.model: the server at .* has no model 'm'; give one of: fake"
        ):
            await build_models(config_from_flags("vllm", [server.url], "m", None))


async def test_unreachable_servers_are_a_backend_error_at_build() -> None:
    with pytest.raises(BackendError, match="no response"):
        await build_models(config_from_flags("sglang", ["http://127.0.0.1:9/v1"], "m", None))


@pytest.mark.parametrize(
    ("backend", "variable"), [("openai", "OPENAI_API_KEY"), ("anthropic", "ANTHROPIC_API_KEY")]
)
async def test_each_provider_has_its_own_default_key_variable(
    monkeypatch: pytest.MonkeyPatch, backend: str, variable: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match=f"models.high: .* the environment variable {variable} is not set"):
        await build_models(config_from_flags(backend, [], "m", None))
    monkeypatch.setenv(variable, "s3cret")
    models = await build_models(config_from_flags(backend, [], "m", None))
    (server,) = models.servers()
    assert (server.name, isinstance(server, Relay)) == (backend, backend == "anthropic")
    await models.close()


async def test_a_configured_key_variable_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THE_KEY", raising=False)
    config = msgspec.toml.decode(model(api_key_env="THE_KEY"), type=GatewayConfig)
    with pytest.raises(ConfigError, match="THE_KEY is not set"):
        await build_models(config)
