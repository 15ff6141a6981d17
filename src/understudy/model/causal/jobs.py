"""What the engine is asked, what it answers, and where a request stands in between."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal

import msgspec
from msgspec import Struct

from understudy.model.causal.sampling import Drawing, chance
from understudy.model.interface import WeightSpan

FinishReason = Literal["stop", "length", "abort"]


class Ask(Struct, frozen=True, kw_only=True):
    """A prompt and how to go on from it: at most `limit` tokens, of the weights that are called `model`.

    It ends at one of the strings `stops`, at a token of `ends`, or at its limit.
    """

    prompt: list[int]
    limit: int
    model: str
    drawing: Drawing = Drawing()
    seed: int | None = None
    stops: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()


class Outcome(Struct, frozen=True, kw_only=True):
    """What was sampled. `logprobs[i]` is that of `ids[i]`.

    `stop` is the string that was met, `stop_start` the byte of the completion at which it begins. `spans` are the
    versions that sampled it. `cached` prompt tokens did not have to be computed.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stop: str | None = None
    stop_start: int = 0
    spans: tuple[WeightSpan, ...] = ()
    cached: int = 0


class Job:
    """A request under way. Of its `tokens`, prompt and completion, `fed` have keys and values in a slot."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.future: Future[Outcome] = Future()
        self.tokens = list(ask.prompt)
        self.logprobs: list[float] = []
        self.spans: list[WeightSpan] = []
        self.fed = 0
        self.begun = False
        self.due = False  # to be begun although the engine pauses
        self.cached = 0
        self.random = chance(ask.seed, ask.prompt)
        self._stops = [stop.encode() for stop in ask.stops]
        self._text = b""

    @property
    def said(self) -> list[int]:
        """What was sampled so far."""
        return self.tokens[len(self.ask.prompt) :]

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future.cancelled()

    def add(self, token: int, data: bytes, logprob: float, version: str) -> Outcome | None:
        """Take up a token that the weights of `version` sampled; the outcome, where it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        count = len(self.logprobs)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = msgspec.structs.replace(self.spans[-1], end=count)
        else:
            self.spans.append(WeightSpan(version, count - 1, count))
        if token in self.ask.ends:
            return self.outcome("stop")
        if met := self._met(data):
            return self.outcome("stop", *met)
        return self.outcome("length") if count >= self.ask.limit else None

    def outcome(self, reason: FinishReason, stop: str | None = None, start: int = 0) -> Outcome:
        """What was sampled so far, as the end of it."""
        return Outcome(
            ids=self.said,
            logprobs=self.logprobs,
            finish_reason=reason,
            stop=stop,
            stop_start=start,
            spans=tuple(self.spans),
            cached=self.cached,
        )

    def _met(self, data: bytes) -> tuple[str, int] | None:
        """The stop string that is complete first with these bytes, and where it begins."""
        if not self._stops:
            return None
        longest = max(map(len, self._stops))
        search = max(0, len(self._text) - longest + 1)
        self._text += data
        found = [
            (start + len(stop), start, text)
            for stop, text in zip(self._stops, self.ask.stops, strict=True)
            if (start := self._text.find(stop, search)) >= 0
        ]
        if not found:
            return None
        _, start, text = min(found)
        return text, start
