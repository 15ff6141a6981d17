"""A model server whose answers depend on its weights, the seed and the prompt, and a trainer for such weights.

The server has vLLM's tokens in, tokens out, and its control endpoints. Weights are a text. The trainer's new ones
are a digest of the old ones and of the groups that it was given, so that equal weights mean equal histories.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import tokenizers
from aiohttp import web

from understudy.store.training import TokenValues
from understudy.train.algorithms.updater import UpdateReport
from understudy.train.groups import read_groups, write_token_values
from understudy.train.options import GRPOOptions

from fakes.control import FakeVLLMControl, weights_in

Die = Callable[[str], None]
Waits = Callable[[], bool]
ANSWERS = ("yes", "no")

# An agent in plain Python: asks once, and mends calc.py when the answer says yes. It waits while there is a file
# beside it with the name of the function's step, as "hold 3"; the second of a task's agents to come does.
AGENT = """
import http.client, json, os, re, socket, sys, time

instruction = sys.stdin.read()
held = os.path.join(os.path.dirname(__file__), "hold " + re.search("return x [+] ([0-9]+)", instruction)[1])
try:
    os.mkdir(held + " met")
except OSError:
    while os.path.exists(held):
        time.sleep(0.02)

class Gateway(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["UNDERSTUDY_GATEWAY_SOCKET"])

body = {"model": os.environ["UNDERSTUDY_MODEL"], "max_tokens": 8,
        "messages": [{"role": "user", "content": instruction}]}
gateway = Gateway("localhost")
gateway.request("POST", "/v1/messages", json.dumps(body), {
    "authorization": "Bearer " + os.environ["UNDERSTUDY_API_KEY"], "anthropic-version": "2023-06-01"})
response = gateway.getresponse()
answer = response.read().decode()
if response.status != 200:
    sys.exit(answer)
answer = json.dumps(json.loads(answer)["content"])
if "yes" in answer:
    source = open("calc.py").read().replace("return x -", "return x +")
    open("calc.py", "w").write(source)
"""


class FakePolicy(FakeVLLMControl):
    """vLLM with tokens in and out; `requests` counts the prompts by the weights that answered them."""

    routes: ClassVar[dict[tuple[str, str], str]] = FakeVLLMControl.routes | {
        ("POST", "/inference/v1/generate"): "_generate",
        ("GET", "/v1/models"): "_models",
    }

    def __init__(self, tokenizer: Path, weights: str) -> None:
        super().__init__(weights)
        self.encoder = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self.requests = Counter[str]()
        self.slow_s = 0.0
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self.answer: Callable[[str], str] = lambda prompt: ""
        """What it says to a prompt; "": what it draws."""
        self.begun = asyncio.Event()
        """Set once something was asked."""
        self.in_flight = 0
        self.cut = 0
        """How many calls were in flight when it was paused."""

    async def _generate(self, _: web.Request, body: Any) -> web.Response:
        self.in_flight += 1
        self.begun.set()
        try:
            await asyncio.sleep(self.slow_s)
        finally:
            self.in_flight -= 1
        await self._goes_on.wait()
        weights, version = self.sample()
        self.requests[weights] += 1
        seed = body["sampling_params"].get("seed")
        drawn = hashlib.sha256(msgspec.json.encode([weights, seed, body["token_ids"]])).digest()
        answer = self.answer(self.encoder.decode(body["token_ids"])) or ANSWERS[drawn[0] % 2]
        ids = self.encoder.encode(f"{answer} {drawn.hex()[:4]}", add_special_tokens=False).ids
        ids.append(self.encoder.token_to_id("<|im_end|>"))
        span = {"version": version, "start": 0, "end": len(ids)}
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": id_, "logprob": -id_ / 1000, "rank": 1} for id_ in ids]},
            "finish_reason": "stop",
            "weight_versions": [span] if version != "default" else None,
        }
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def _pause(self, request: web.Request, body: Any) -> web.Response:
        self.cut += self.in_flight
        self._goes_on.clear()
        return await super()._pause(request, body)

    async def _resume(self, *arguments: Any) -> web.Response:
        answer = await super()._resume(*arguments)
        self._goes_on.set()
        return answer

    async def _models(self, *_: Any) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


class FakeTrainer:
    """Learns by hashing. `die` is told each moment it passes, and may end the process there.

    With `always` it also learns from groups without a signal.
    """

    def __init__(
        self, weights: str, die: Die, slow_s: float = 0.0, *, always: bool = False, waits: Waits = lambda: False
    ) -> None:
        self._weights = weights
        self._die = die
        self._slow_s = slow_s
        self._always = always
        self._waits = waits

    async def update(
        self, groups: Path, step: int, version: str, weights: Path, token_values: Path | None = None
    ) -> UpdateReport:
        """See Trainer."""
        self._die(f"before update {step}")
        await asyncio.sleep(self._slow_s)
        while self._waits():  # noqa: ASYNC110 - what is waited for is in a store
            await asyncio.sleep(0.02)
        received = read_groups(groups)
        telling = [
            group for group in received if self._always or len({rollout.reward for rollout in group.rollouts}) > 1
        ]
        if telling:
            # Of what was said, not of whose it is: ids follow from where a test's files are, chance from weights.
            # By fields: another field of a sequence must not change the weights, and with them every draw after.
            fields = ("token_ids", "loss_mask", "logprobs", "policy_versions")
            learned = [
                [
                    (each.reward, [{name: getattr(part, name) for name in fields} for part in each.sequences])
                    for each in group.rollouts
                ]
                for group in received
            ]
            self._weights = hashlib.sha256(self._weights.encode() + msgspec.json.encode(learned)).hexdigest()
        write_weights(weights, self._weights, lambda: self._die(f"during update {step}"))
        if token_values is not None:
            sequences = [part for group in telling for each in group.rollouts for part in each.sequences]
            write_token_values(
                token_values,
                [
                    TokenValues(call_id=call, logprobs=(-1.0,) * n, ratios=(1.0,) * n, advantages=(0.5,) * n)
                    for part in sequences
                    for call, start, end in part.calls
                    for n in [end - start]
                ],
            )
        self._die(f"after update {step}")
        skipped = {"groups whose rewards are all equal": len(received) - len(telling)}
        return UpdateReport(
            step=step,
            version=version,
            updated=bool(telling),
            groups=len(telling),
            skipped={why: count for why, count in skipped.items() if count},
        )


def write_weights(directory: Path, weights: str, halfway: Callable[[], None] = lambda: None) -> None:
    """A model's directory, as the fakes have it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    halfway()
    (directory / "model.safetensors").write_text(weights)


def opener(
    die: Die = lambda _: None, slow_s: float = 0.0, *, always: bool = False, waits: Waits = lambda: False
) -> Any:
    """What opens such a trainer (see TrainerFactory)."""

    @asynccontextmanager
    async def open_policy(
        model: Path, options: GRPOOptions, *, resume: Path | None, threads: int
    ) -> AsyncIterator[FakeTrainer]:
        yield FakeTrainer(weights_in(resume or model), die, slow_s, always=always, waits=waits)

    return open_policy


def dying_at(moment: str | None) -> Die:
    """What kills this process, as kill -9 does, at one moment."""

    def die(now: str) -> None:
        if now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return die
