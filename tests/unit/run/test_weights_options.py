"""`--weights` beside the options that it excludes."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.cli.backends import embedded, run_config
from understudy.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "urls", "policy", "words"),
    [
        ("embedded", ["http://127.0.0.1:9/v1"], None, "without --base-url"),
        ("vllm", ["http://127.0.0.1:9/v1"], None, "without --base-url"),
        ("embedded", [], "oracle", "either --policy or --weights"),
    ],
)
def test_weights_are_for_the_server_that_the_run_starts(
    tmp_path: Path, backend: str, urls: list[str], policy: str | None, words: str
) -> None:
    settings, _, _ = run_config(backend, None, urls, "m" if urls else None, None, None, None, tmp_path)
    with pytest.raises(ConfigError, match=words):
        embedded(settings, policy, tmp_path, "v1")


def test_weights_are_asked_in_tokens_by_their_own_tokenizer(tmp_path: Path) -> None:
    settings, _, _ = run_config("embedded", None, [], None, None, None, None, tmp_path)
    high = settings.models.high
    assert (high.tokens, high.tokenizer, high.tool_format) == ("exact", str(tmp_path), "hermes")
    assert embedded(settings, None, tmp_path, "v1") == (None, str(tmp_path), "v1")
