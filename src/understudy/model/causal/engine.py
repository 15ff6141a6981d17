"""The engine: a thread that reads prompts and samples completions, several at a time."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import groupby
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Struct

from understudy.errors import BackendError
from understudy.model.causal.cache import Ids, PrefixCache, SlotCache, common_prefix_length
from understudy.model.causal.checkpoint import forward
from understudy.model.causal.sampling import SamplingSettings, random_source, sample_tokens
from understudy.model.responses import ModelVersionSpan

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


_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_SHUTTING_DOWN = "the server ends"
_UNLOADED = "the adapter was unloaded"

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests under way: they end with what they have, or as ever, or wait in their place."""


class ModelWeights(Struct, frozen=True):
    """A module and the version that it samples under."""

    module: Any
    version: str


class EngineLimits(Struct, frozen=True, kw_only=True):
    """Requests decoded at once, and waiting; prompt tokens read in one go; bytes of remembered sequences."""

    slots: int = 8
    queue: int = 1024
    chunk: int = 512
    cache_bytes: int = 512 << 20


class CausalEngine:
    """Samples for whoever asks, from any thread. `token_bytes` are those of the tokens that may be sampled.

    A request's tokens depend on its prompt, parameters, seed and weights, and not on what is decoded beside it.
    """

    def __init__(
        self, weights: dict[str, ModelWeights], token_bytes: Sequence[bytes], *, limits: EngineLimits | None = None
    ) -> None:
        self._weights = dict(weights)
        self._bytes = token_bytes
        self._limits = limits or EngineLimits()
        self._slots = SlotCache()
        self._prefixes = PrefixCache(self._limits.cache_bytes)
        self._waiting: deque[SamplingJob] = deque()
        self._active: list[SamplingJob] = []  # the index is the slot
        self._pending_actions: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._paused: PauseMode | None = None
        self._drained: list[Future[None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="understudy-engine", daemon=True)
        self._thread.start()

    @property
    def paused(self) -> bool:
        """Whether new requests wait until `resume`."""
        return self._paused is not None

    def version(self, model: str) -> str:
        """The version of the weights that are called so. Raises KeyError."""
        return self._weights[model].version

    def submit(self, request: SamplingRequest) -> Future[SamplingResult]:
        """Ask; to cancel the future is to ask no more. Raises BackendError when too many wait already."""
        job = SamplingJob(request)
        with self._wake:
            if self._closing:
                raise BackendError(_SHUTTING_DOWN, status=503)
            if len(self._waiting) >= self._limits.queue:
                self._waiting = deque(job for job in self._waiting if not job.cancelled)
            if len(self._waiting) >= self._limits.queue:
                raise BackendError(f"{len(self._waiting)} requests wait already; try again later", status=503)
            self._waiting.append(job)
            self._wake.notify()
        return job.future

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Begin nothing any more; done when what is under way is as `mode` says."""

        def order() -> None:
            self._drained.append(drained)
            self._paused = mode
            if mode == "wait":
                with self._wake:
                    for job in self._waiting:
                        job.start_despite_pause = True
            if mode == "abort":
                with self._wake:  # what is submitted meanwhile waits for the end of the pause
                    ended = [*self._active, *self._waiting]
                    self._active.clear()
                    self._waiting.clear()
                for job in ended:
                    _set_result(job.future, job.result("abort"))
            if clear_cache:
                self._clear_cache()

        drained: Future[None] = Future()
        self._run_between_steps(order)
        return drained

    def resume(self) -> Future[None]:
        """Go on after a pause."""

        def order() -> None:
            self._paused = None
            self._complete_drained()  # nobody need wait for the end of a pause that is over

        return self._run_between_steps(order)

    def set_weights(self, model: str, weights: ModelWeights | None, *, clear_cache: bool = True) -> Future[None]:
        """Sample from other weights from the next token on; None removes them, and what is under way ends.

        With `clear_cache`, what the old ones read is read again. Requests that wait or are decoded go on.
        """

        def order() -> None:
            if weights is None:
                self._weights.pop(model, None)
                self._fail_jobs([job for job in self._active if job.request.model == model], _UNLOADED)
            else:
                self._weights[model] = weights
            if clear_cache or weights is None:
                self._clear_cache(model)

        return self._run_between_steps(order)

    def clear_cache(self) -> Future[None]:
        """Forget what was read, of finished requests and of those under way."""
        return self._run_between_steps(self._clear_cache)

    def close(self) -> None:
        """End; what is under way fails."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------

    def _run_between_steps(self, action: Callable[[], None]) -> Future[None]:
        """Have the thread do something between two steps."""
        done: Future[None] = Future()

        def execute() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - who gave it is told; the thread goes on
                _set_error(done, BackendError(f"the engine met a fault: {error}", status=500))
            else:
                _set_result(done, None)

        with self._wake:
            if self._closing:
                raise BackendError(_SHUTTING_DOWN, status=503)
            self._pending_actions.append(execute)
            self._wake.notify()
        return done

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._pending_actions or self._has_work()):
                    self._wake.wait()
                orders = list(self._pending_actions)
                self._pending_actions.clear()
                closing = self._closing
            for order in orders:
                order()
            if closing:
                break
            try:
                self._step()
            except Exception as error:  # noqa: BLE001 - those under way end, and those that wait are served
                _log.exception("a step of the engine failed")
                # Whatever it was, what was computed is not to be gone on from; memory may have run out, too.
                self._prefixes.clear()
                self._slots.clear()
                self._fail_jobs(list(self._active), f"the engine met a fault: {error}")
            if self._paused == "keep" or not (self._active or self._waits_despite_pause()):
                self._complete_drained()
        self._fail_jobs([*self._active, *self._waiting], _SHUTTING_DOWN, status=503)
        self._complete_drained()

    def _complete_drained(self) -> None:
        for drained in self._drained:
            _set_result(drained, None)
        self._drained.clear()

    def _has_work(self) -> bool:
        frozen = self._paused == "keep"
        gone = any(job.cancelled for job in (*self._active, *self._waiting))
        begins = bool(self._waiting) and (self._paused is None or self._waits_despite_pause())
        return gone or (not frozen and (begins or bool(self._active)))

    def _waits_despite_pause(self) -> bool:
        """Whether requests wait that came before the pause which waits for them."""
        with self._wake:
            return bool(self._waiting) and self._waiting[0].start_despite_pause

    def _step(self) -> None:
        for job in [job for job in self._active if job.cancelled]:
            self._free_slot(job)
        with self._wake:
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
        if self._paused != "keep":
            self._admit()
            reading = next((job for job in self._active if len(job.tokens) - job.computed > 1), None)
            if reading is not None:
                self._prefill(reading)
            ready = [job for job in self._active if len(job.tokens) - job.computed == 1]
            for _, jobs in groupby(
                sorted(ready, key=lambda job: job.request.model), key=lambda job: job.request.model
            ):
                self._decode(list(jobs))

    def _admit(self) -> None:
        with self._wake:
            while self._waiting and len(self._active) < self._limits.slots:
                if self._paused is not None and not self._waiting[0].start_despite_pause:
                    break
                job = self._waiting.popleft()
                if job.request.model in self._weights:
                    self._active.append(job)
                else:
                    self._fail_jobs([job], _UNLOADED)

    def _prefill(self, job: SamplingJob) -> None:
        """Read the next part of what a request has behind its `fed` tokens."""
        row = self._active.index(job)
        if job.computed == 0:
            self._load_cached_prefix(job, row)
        part = job.tokens[job.computed : job.computed + self._limits.chunk]
        whole = job.computed + len(part) == len(job.tokens)
        self._slots.reserve(len(self._active), job.computed + len(part))
        logits = forward(self._weights[job.request.model].module, self._slots, [part], [row], [job.computed])
        job.computed += len(part)
        if whole:
            self._add_tokens([job], logits)

    def _load_cached_prefix(self, job: SamplingJob, row: int) -> None:
        """Begin with what another sequence has in common with this one, leaving at least a token to read."""
        ids: Ids = np.array(job.tokens[:-1], dtype=np.int32)
        cached, length = self._prefixes.find(job.request.model, ids)
        neighbour = None
        for other in self._active:
            if other is not job and other.request.model == job.request.model and other.computed > length:
                shared = common_prefix_length(np.array(other.tokens[: other.computed], dtype=np.int32), ids)
                if shared > length:
                    neighbour, length = other, shared
        self._slots.reserve(len(self._active), length)
        if neighbour is not None:
            self._slots.move(self._active.index(neighbour), row, length)
        elif cached is not None:
            self._slots.load(row, cached, length)
        job.computed = length
        if not job.started:
            job.started, job.cached = True, min(length, len(job.request.prompt) - 1)

    def _decode(self, jobs: list[SamplingJob]) -> None:
        """One token for each of some requests of the same weights."""
        rows = [self._active.index(job) for job in jobs]
        starts = [job.computed for job in jobs]
        self._slots.reserve(len(self._active), max(starts) + 1)
        module = self._weights[jobs[0].request.model].module
        logits = forward(module, self._slots, [job.tokens[-1:] for job in jobs], rows, starts)
        for job in jobs:
            job.computed += 1
            job.started = True
        self._add_tokens(jobs, logits)

    def _add_tokens(self, jobs: list[SamplingJob], logits: Any) -> None:
        """Draw a token for each of the requests, which may be their last."""
        logits = logits[:, : len(self._bytes)]
        settings = [job.request.sampling for job in jobs]
        histories = [
            (job.request.prompt, job.completion if job.request.sampling.changes_logits else ()) for job in jobs
        ]
        sampled = sample_tokens(logits, settings, [job.random.random() for job in jobs], histories)
        for job, (token, logprob) in zip(jobs, sampled, strict=True):
            if not math.isfinite(logprob):
                self._fail_jobs([job], "the model's weights give no finite probabilities; load others")
                continue
            result = job.add(token, self._bytes[token], logprob, self._weights[job.request.model].version)
            if result is not None:
                _set_result(job.future, result)
                self._free_slot(job)

    def _free_slot(self, job: SamplingJob) -> None:
        """Free a request's slot, and remember what stood there; the last slot's sequence takes its place."""
        row = self._active.index(job)
        if job.computed:
            ids: Ids = np.array(job.tokens[: job.computed], dtype=np.int32)
            self._prefixes.add(self._slots.save(row, job.request.model, ids))
        last = self._active.pop()
        if last is not job:
            self._active[row] = last
            self._slots.move(len(self._active), row, last.computed)

    def _clear_cache(self, model: str | None = None) -> None:
        for job in self._active:
            if model is None or job.request.model == model:
                job.computed = 0
        self._prefixes.clear(model)
        if model is None or all(job.computed == 0 for job in self._active):
            self._slots.clear()

    def _fail_jobs(self, jobs: Sequence[SamplingJob], message: str, *, status: int = 500) -> None:
        """Have requests fail. What stood in their slots is not remembered."""
        for job in jobs:
            _set_error(job.future, BackendError(message, status=status))
            if job in self._active:
                # What is behind a sequence's end is masked, but what is no number shows through a mask.
                self._slots.zero(self._active.index(job))
                job.computed = 0
                self._free_slot(job)


def _set_result(future: Future[_T], result: _T) -> None:
    with suppress(InvalidStateError):  # nobody waits any more
        future.set_result(result)


def _set_error(future: Future[_T], error: BackendError) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
