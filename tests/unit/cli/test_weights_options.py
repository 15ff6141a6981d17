"""`--weights` beside the options that it excludes."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.cli.settings import ModelSettings, embedded_server, run_gateway_config
from understudy.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "urls", "policy", "message"),
    [
        ("embedded", ["http://127.0.0.1:9/v1"], None, "without --base-url"),
        ("vllm", ["http://127.0.0.1:9/v1"], None, "without --base-url"),
        ("embedded", [], "oracle", "--policy and --weights exclude each other"),
    ],
)
def test_weights_are_for_the_server_that_the_run_starts(
    tmp_path: Path, backend: str, urls: list[str], policy: str | None, message: str
) -> None:
    model = ModelSettings(
        backend=backend,
        base_url=tuple(urls),
        backend_model_high="m" if urls else None,
        weights=tmp_path,
        weights_version="v1",
        policy=policy,
    )
    settings, _, _ = run_gateway_config(model)
    with pytest.raises(ConfigError, match=message):
        embedded_server(settings, model)


def test_served_weights_use_exact_tokens_and_their_own_tokenizer(tmp_path: Path) -> None:
    model = ModelSettings(weights=tmp_path, weights_version="v1")
    settings, _, _ = run_gateway_config(model)
    high = settings.models.high
    assert (high.tokens, high.tokenizer, high.tool_format) == ("exact", str(tmp_path), "hermes")
    assert embedded_server(settings, model) == (None, str(tmp_path), "v1")
