"""The engine when something is wrong: wild numbers, weights that fail, clients that leave, pauses that cross."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import BackendError

from support import lazily, optional
from support.causal import ask, assert_logprobs, done, prompts

np: Any = optional("numpy")
torch: Any = optional("torch")
optional("transformers")
CachedSequence, PrefixCache = lazily("understudy.model.causal.cache", "CachedSequence", "PrefixCache")
[load_model] = lazily("understudy.model.causal.checkpoint", "load_model")
CausalEngine, EngineLimits, ModelWeights, SamplingResult = lazily(
    "understudy.model.causal.engine", "CausalEngine", "EngineLimits", "ModelWeights", "SamplingResult"
)
[SamplingSettings] = lazily("understudy.model.causal.sampling", "SamplingSettings")


@pytest.fixture
def engine(module: Any, token_bytes: list[bytes]) -> Iterator[CausalEngine]:
    engine = CausalEngine(
        {"m": ModelWeights(module, "v0")}, token_bytes, limits=EngineLimits(slots=4, queue=3, chunk=16)
    )
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "wild",
    [
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"min_p": 1e-320},
        {"top_p": 1e-320},
        {"top_k": 2**62},
        {"logit_bias": {9: -100.0, 10: 100.0}, "temperature": 1e-9},
    ],
)
def test_extreme_sampling_parameters_affect_neither_their_request_nor_others(
    engine: CausalEngine, module: Any, wild: dict[str, Any]
) -> None:
    tame = ask(prompts(1)[0], 6)
    wild_outcome, outcome = done(engine, ask(prompts(2)[1], 6, sampling=SamplingSettings(**wild)), tame)
    assert len(wild_outcome.ids) == 6 and all(-60 < logprob <= 0 for logprob in wild_outcome.logprobs)
    assert_logprobs(module, tame, outcome)


def test_a_prompt_that_cannot_be_scored_is_an_error_with_its_traceback_in_the_log(
    engine: CausalEngine, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(torch.nn.Linear):
        def forward(self, **_: Any) -> Any:
            raise MemoryError("no room")

    engine.set_weights("failing", ModelWeights(Failing(1, 1), "v0")).result(10)
    with pytest.raises(BackendError, match="has no attribute 'config'; see the traceback in the server's log"):
        engine.score([9, 10, 11], "failing").result(10)
    assert "has no attribute 'config'" in caplog.text
    engine.set_weights("failing", None).result(10)
    with pytest.raises(BackendError, match="the adapter 'failing' was unloaded"):
        engine.score([9, 10, 11], "failing").result(10)


def test_a_failing_forward_pass_fails_running_requests_and_the_engine_continues(
    engine: CausalEngine, module: Any
) -> None:
    class Failing(torch.nn.Linear):
        def forward(self, **_: Any) -> Any:
            raise MemoryError("no room")

    engine.set_weights("failing", ModelWeights(Failing(1, 1), "v0")).result(10)
    engine.pause("keep", clear_cache=False).result(10)
    failing = engine.submit(ask([9, 10, 11], model="failing"))
    drained = engine.pause("wait", clear_cache=False)
    with pytest.raises(BackendError, match="no room; see the traceback in the server's log"):
        failing.result(10)
    drained.result(10)
    engine.resume().result(10)
    one = ask(prompts(1)[0])
    (outcome,) = done(engine, one)
    assert_logprobs(module, one, outcome)


def test_nan_values_left_in_a_cache_slot_do_not_affect_later_requests(
    engine: CausalEngine, model: Path, module: Any
) -> None:
    broken = load_model(model)
    for parameter in broken.parameters():
        parameter.fill_(float("nan"))
    engine.set_weights("broken", ModelWeights(broken, "v0")).result(10)
    long = ask(prompts(1)[0] * 3, 30_000)  # keeps the slots, and has others masked to its length
    future = engine.submit(long)
    done(engine, ask([9, 10], 2))
    with pytest.raises(BackendError, match="no finite probabilities"):
        done(engine, ask([9] * 100, model="broken"))
    short = ask([20, 21, 22], 8)
    (outcome,) = done(engine, short)
    assert not future.done()
    assert_logprobs(module, short, outcome)
    future.cancel()


def test_resuming_ends_the_wait_for_a_pause(engine: CausalEngine) -> None:
    endless = engine.submit(ask([9], 30_000))
    drained = engine.pause("wait", clear_cache=False)
    engine.resume().result(10)
    drained.result(10)
    assert not endless.done() and not engine.paused
    endless.cancel()


def test_cancelled_requests_free_queue_places_during_a_pause(engine: CausalEngine) -> None:
    engine.pause("keep", clear_cache=False).result(10)
    waiting = [engine.submit(ask([9], 2)) for _ in range(3)]
    assert all(one.cancel() for one in waiting)
    late = engine.submit(ask([9], 2))
    engine.resume().result(10)
    assert len(late.result(10).ids) == 2


def test_every_request_completes_under_concurrent_pauses(module: Any, token_bytes: list[bytes]) -> None:
    engine = CausalEngine({"m": ModelWeights(module, "v0")}, token_bytes)
    futures: list[Future[SamplingResult]] = []

    def client() -> None:
        for _ in range(100):
            futures.append(engine.submit(ask([9, 10], 1)))
            time.sleep(0)

    clients = [threading.Thread(target=client) for _ in range(3)]
    for one in clients:
        one.start()
    while any(one.is_alive() for one in clients):
        engine.pause("abort", clear_cache=False).result(30)
        engine.resume().result(30)
    reasons = [future.result(30).finish_reason for future in futures]
    engine.close()
    assert len(reasons) == 300 and set(reasons) <= {"abort", "length"}


def test_a_closed_engine_refuses_control_commands(module: Any, token_bytes: list[bytes]) -> None:
    engine = CausalEngine({"m": ModelWeights(module, "v0")}, token_bytes)
    engine.submit(ask([9], 30_000))
    drained = engine.pause("wait", clear_cache=False)
    engine.close()
    drained.result(10)
    with pytest.raises(BackendError, match="the server is shutting down"):
        engine.resume()


def test_the_prefix_cache_keeps_its_size_limit_and_its_recently_used_entries() -> None:
    def sequence(first: int, length: int) -> CachedSequence:
        ids = np.arange(first, first + length, dtype=np.int32)
        return CachedSequence("m", ids, [(torch.zeros(2, length, 4), torch.zeros(2, length, 4))])

    token = sequence(0, 1).size
    prefixes = PrefixCache(100 * token)
    for number in range(20):
        prefixes.add(sequence(1000 * number, 20))
        assert prefixes.size <= 100 * token
        prefixes.find("m", np.arange(5, dtype=np.int32))
    assert prefixes.find("m", np.arange(30, dtype=np.int32))[1] == 20  # asked for again and again
    assert prefixes.find("m", np.arange(1000, 1030, dtype=np.int32))[1] == 0
    # One that is too long is remembered as far as it fits.
    prefixes.add(sequence(50_000, 300))
    assert prefixes.size <= 100 * token
    assert prefixes.find("m", np.arange(50_000, 50_300, dtype=np.int32))[1] == 100
