"""What the engine is asked, what it answers, and where a request stands in between."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal

import msgspec
from msgspec import Struct

from understudy.model.causal.sampling import SamplingSettings, random_source
from understudy.model.interface import ModelVersionSpan

FinishReason = Literal["stop", "length", "abort"]


class SamplingRequest(Struct, frozen=True, kw_only=True):
    """A prompt and how to go on from it: at most `limit` tokens, of the weights that are called `model`.

    It ends at one of the strings `stops`, at a token of `ends`, or at its limit.
    """

    prompt: list[int]
    limit: int
    model: str
    sampling: SamplingSettings = SamplingSettings()
    seed: int | None = None
    stops: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()


class SamplingResult(Struct, frozen=True, kw_only=True):
    """What was sampled. `logprobs[i]` is that of `ids[i]`.

    `stop` is the string that was met, `stop_start` the byte of the completion at which it begins. `spans` are the
    versions that sampled it. `cached` prompt tokens did not have to be computed.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stop: str | None = None
    stop_start: int = 0
    spans: tuple[ModelVersionSpan, ...] = ()
    cached: int = 0


class SamplingJob:
    """A request under way. Of its `tokens`, prompt and completion, `fed` have keys and values in a slot."""

    def __init__(self, request: SamplingRequest) -> None:
        self.request = request
        self.future: Future[SamplingResult] = Future()
        self.tokens = list(request.prompt)
        self.logprobs: list[float] = []
        self.spans: list[ModelVersionSpan] = []
        self.computed = 0
        self.started = False
        self.start_despite_pause = False  # to be begun although the engine pauses
        self.cached = 0
        self.random = random_source(request.seed, request.prompt)
        self._stops = [stop.encode() for stop in request.stops]
        self._text = b""

    @property
    def completion(self) -> list[int]:
        """What was sampled so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future.cancelled()

    def add(self, token: int, data: bytes, logprob: float, version: str) -> SamplingResult | None:
        """Take up a token that the weights of `version` sampled; the outcome, where it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        count = len(self.logprobs)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = msgspec.structs.replace(self.spans[-1], end=count)
        else:
            self.spans.append(ModelVersionSpan(version, count - 1, count))
        if token in self.request.end_tokens:
            return self.result("stop")
        if match := self._matched_stop(data):
            return self.result("stop", *match)
        return self.result("length") if count >= self.request.limit else None

    def result(self, reason: FinishReason, stop: str | None = None, start: int = 0) -> SamplingResult:
        """What was sampled so far, as the end of it."""
        return SamplingResult(
            ids=self.completion,
            logprobs=self.logprobs,
            finish_reason=reason,
            stop=stop,
            stop_start=start,
            spans=tuple(self.spans),
            cached=self.cached,
        )

    def _matched_stop(self, data: bytes) -> tuple[str, int] | None:
        """The stop string that is complete first with these bytes, and where it begins."""
        if not self._stops:
            return None
        longest = max(map(len, self._stops))
        search = max(0, len(self._text) - longest + 1)
        self._text += data
        matches = [
            (start + len(stop), start, text)
            for stop, text in zip(self._stops, self.request.stops, strict=True)
            if (start := self._text.find(stop, search)) >= 0
        ]
        if not matches:
            return None
        _, start, text = min(matches)
        return text, start
