"""A loop that publishes adapters goes on with the one that it had: over the base, under the adapter's name."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from understudy.train.algorithms.updater import Updater
from understudy.train.loop.runtime import LoopRuntime, serving
from understudy.train.loop.state import LoopConfig, LoopDirectory
from understudy.train.options import GRPOOptions, LoraOptions

from support import optional
from support.tiny_model import make_model

optional("transformers", "peft")


async def test_the_embedded_server_is_given_the_adapter_that_answered_before(tmp_path: Path):
    model = make_model(tmp_path / "model")
    directory = LoopDirectory(tmp_path / "loop")
    weights = Updater(model, GRPOOptions(lora=LoraOptions(rank=2))).save(directory.weights(2), "step-0002")
    config = LoopConfig(model=str(model), model_digest="d", tasks={}, steps=3, groups=1, samples=2)
    runtime = LoopRuntime(concurrency=1, publish="lora")
    async with serving(config, directory, runtime, weights, "step-0002", fresh=False) as (served, publisher, _):
        assert await publisher.current() == "step-0002"
        async with aiohttp.ClientSession() as session, session.get(f"{served.urls[0]}/models") as answer:
            names = [card["id"] for card in (await answer.json())["data"]]
    assert names == [served.model, publisher.capabilities.model]
