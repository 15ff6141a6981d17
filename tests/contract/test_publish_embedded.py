"""The publisher and the embedded model's own server: new weights, while it is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from understudy.errors import BackendError, ConfigError
from understudy.model.process import start_server
from understudy.train.publish.choice import make_publisher

pytest.importorskip("transformers")

from support_tiny_model import make_model

PROMPT = list(range(20, 60))


async def generate(url: str, *, tokens: int = 12, seed: int = 1, model: str | None = None) -> dict[str, Any]:
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": tokens, "seed": seed, "temperature": 1.0, "logprobs": 0},
        "return_token_ids": True,
        "return_weight_versions": True,
        "output_mode": "tokens",
        "stream": False,
    }
    body |= {"model": model} if model else {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/inference/v1/generate", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]


async def test_what_is_published_is_what_samples(tmp_path: Path):
    first, second = (make_model(tmp_path / f"m{seed}", seed=seed) for seed in (1, 2))
    async with start_server(weights=first, version="step-0000") as server, start_server(weights=second) as other:
        publisher = make_publisher("embedded", server.url + "/v1")
        assert await publisher.current() == "step-0000"
        before = await generate(server.url)
        assert [span["version"] for span in before["weight_versions"]] == ["step-0000"]
        for _ in range(2):
            await publisher.publish(second, "step-0001")
            assert await publisher.current() == "step-0001"
            after = await generate(server.url)
            assert [span["version"] for span in after["weight_versions"]] == ["step-0001"]
            # The same tokens as a server has that never knew other weights: nothing of a cache is left.
            assert after["token_ids"] == (await generate(other.url))["token_ids"] != before["token_ids"]


async def test_what_is_in_flight_goes_on_and_says_which_weights_sampled_what(tmp_path: Path):
    first, second = (make_model(tmp_path / f"m{seed}", seed=seed) for seed in (1, 2))
    async with start_server(weights=first, version="step-0000") as server:
        publisher = make_publisher("embedded", server.url)
        under_way = [asyncio.create_task(generate(server.url, tokens=400, seed=seed)) for seed in range(3)]
        await asyncio.sleep(0.3)
        await publisher.publish(second, "step-0001")
        for answer in await asyncio.gather(*under_way):
            spans = answer["weight_versions"]
            assert spans[-1]["end"] == len(answer["token_ids"])
            assert [each["start"] for each in spans[1:]] == [each["end"] for each in spans[:-1]]
            assert {each["version"] for each in spans} <= {"step-0000", "step-0001"}


async def test_a_directory_that_the_server_cannot_use_leaves_it_to_the_next(tmp_path: Path):
    model = make_model(tmp_path / "m")
    async with start_server(weights=model, version="step-0000") as server:
        publisher = make_publisher("embedded", server.url)
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "config.json").write_text((model / "config.json").read_text())
        (broken / "model.safetensors").write_bytes(b"nothing")
        with pytest.raises(BackendError, match="broken"):
            await publisher.publish(broken, "step-0001")
        assert await publisher.current() == "step-0000"
        await publisher.publish(model, "step-0002")
        assert [span["version"] for span in (await generate(server.url))["weight_versions"]] == ["step-0002"]


async def test_a_scripted_policy_has_no_weights(tmp_path: Path):
    model = make_model(tmp_path / "m")
    async with start_server("idle") as server:
        with pytest.raises(ConfigError, match="--weights"):
            await make_publisher("embedded", server.url).publish(model, "v1")
