"""What tests ask an engine, and what a plain forward of its module says to the answer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from support import LazyModule

if TYPE_CHECKING:
    from understudy.model.causal.engine import CausalEngine, SamplingRequest, SamplingResult

torch: Any = LazyModule("torch")
served: Any = LazyModule("understudy.model.causal.engine")


def ask(prompt: list[int], limit: int = 24, **more: Any) -> SamplingRequest:
    return served.SamplingRequest(prompt=prompt, limit=limit, **({"model": "m", "seed": 5} | more))


def prompts(count: int, longest: int = 70) -> list[list[int]]:
    choose = random.Random(3)
    return [[choose.randrange(9, 265) for _ in range(choose.randint(1, longest))] for _ in range(count)]


def done(engine: CausalEngine, *asks: SamplingRequest) -> list[SamplingResult]:
    return [future.result(60) for future in [engine.submit(one) for one in asks]]


def plain_logits(module: Any, prompt: list[int], ids: list[int]) -> Any:
    """The logits that each of `ids` was drawn from, of one forward over all."""
    with torch.inference_mode():
        logits = module(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1]


def assert_logprobs(module: Any, one: SamplingRequest, outcome: SamplingResult, temperature: float = 1.0) -> None:
    logits = plain_logits(module, one.prompt, outcome.ids)
    expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(outcome.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(outcome.logprobs), expected, atol=1e-4, rtol=0)
