"""The engine: a thread that computes prompts and samples completions for several requests in one batch."""

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
from understudy.model.causal.checkpoint import forward, prompt_logprobs
from understudy.model.causal.sampling import SamplingSettings, random_source, sample_tokens
from understudy.model.responses import ModelVersionSpan
from understudy.util.text import reason_of

FinishReason = Literal["stop", "length", "abort"]


class SamplingRequest(Struct, frozen=True, kw_only=True):
    """A prompt (token ids) and how to sample its completion from the weights named `model`.

    Sampling ends at one of the strings `stops`, at a token of `end_tokens`, or after `limit` tokens.
    """

    prompt: list[int]
    limit: int
    model: str
    sampling: SamplingSettings = SamplingSettings()
    seed: int | None = None
    stops: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()


class SamplingResult(Struct, frozen=True, kw_only=True):
    """A completion. `logprobs[i]` is the logprob of `ids[i]` (natural log).

    `stop` is the stop string that ended it, if one did, and `stop_start` the byte offset in the completion where
    it begins. `spans` are the model versions that sampled the tokens. `cached` counts the prompt tokens that were
    taken from the prefix cache.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stop: str | None = None
    stop_start: int = 0
    spans: tuple[ModelVersionSpan, ...] = ()
    cached: int = 0


class SamplingJob:
    """A request in progress. `tokens` are prompt and completion; the KV cache holds the first `computed`."""

    def __init__(self, request: SamplingRequest) -> None:
        self.request = request
        self.future: Future[SamplingResult] = Future()
        self.tokens = list(request.prompt)
        self.logprobs: list[float] = []
        self.spans: list[ModelVersionSpan] = []
        self.computed = 0
        self.started = False
        self.start_despite_pause = False  # it was submitted before a pause that waits for it
        self.cached = 0
        self.random = random_source(request.seed, request.prompt)
        self._stops = [stop.encode() for stop in request.stops]
        self._text = b""

    @property
    def completion(self) -> list[int]:
        """The token ids sampled so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def cancelled(self) -> bool:
        """Whether the caller cancelled its future."""
        return self.future.cancelled()

    def add(self, token: int, data: bytes, logprob: float, version: str) -> SamplingResult | None:
        """Append a token sampled by the weights `version`; return the result if it was the last, else None."""
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
        """Return a result of what was sampled so far."""
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
        """Return the stop string that these bytes complete first, and its byte offset; None if there is none."""
        if not self._stops:
            return None
        max_stop_bytes = max(map(len, self._stops))
        search_start = max(0, len(self._text) - max_stop_bytes + 1)
        self._text += data
        matches = [
            (start + len(stop), start, text)
            for stop, text in zip(self._stops, self.request.stops, strict=True)
            if (start := self._text.find(stop, search_start)) >= 0
        ]
        if not matches:
            return None
        _, start, text = min(matches)
        return text, start


_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_SHUTTING_DOWN = "the server is shutting down; send the request again when it runs"

PauseMode = Literal["abort", "wait", "keep"]
"""What a pause does with requests in progress: end them with what they have so far, let them finish, or suspend
them.
"""


class ModelWeights(Struct, frozen=True):
    """A module and the version recorded for the tokens that it samples."""

    module: Any
    version: str


class EngineLimits(Struct, frozen=True, kw_only=True):
    """Requests decoded at once (`slots`) and queued, prompt tokens per forward, bytes of the prefix cache."""

    slots: int = 32
    queue: int = 1024
    chunk: int = 512
    cache_bytes: int = 512 << 20


class CausalEngine:
    """Samples completions; safe to call from any thread. `token_bytes[i]` is the text of token i, as bytes.

    A request's tokens depend on its prompt, parameters, seed and weights only, never on what shares its batch.
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
        """Return the version of the weights named `model`. Raises KeyError if there are none."""
        return self._weights[model].version

    def submit(self, request: SamplingRequest) -> Future[SamplingResult]:
        """Queue a request; cancelling the future cancels it. Raises BackendError (503) when the queue is full."""
        job = SamplingJob(request)
        with self._wake:
            if self._closing:
                raise BackendError(_SHUTTING_DOWN, status=503)
            if len(self._waiting) >= self._limits.queue:
                self._waiting = deque(job for job in self._waiting if not job.cancelled)
            if len(self._waiting) >= self._limits.queue:
                raise BackendError(
                    f"overloaded: {len(self._waiting)} requests are waiting, the maximum; send this one again "
                    "later, or fewer at a time",
                    status=503,
                )
            self._waiting.append(job)
            self._wake.notify()
        return job.future

    def score(self, prompt: Sequence[int], model: str) -> Future[list[float]]:
        """Return a future of the logprobs of a prompt's tokens but the first, at temperature 1, each given all
        before it.

        Nothing is sampled while a prompt is computed. Raises BackendError (503) after `close`.
        """
        scored: Future[list[float]] = Future()

        def compute() -> None:
            if model not in self._weights:
                _set_error(scored, BackendError(_unloaded_message(model), status=500))
                return
            try:
                module = self._weights[model].module
                _set_result(scored, prompt_logprobs(module, prompt, self._limits.chunk))
            except Exception as error:  # noqa: BLE001 - the caller gets the error; the thread must go on
                _log.exception("the engine failed to score a prompt of %d tokens", len(prompt))
                _set_error(scored, BackendError(_failure(error), status=500))

        self._run_between_steps(compute)
        return scored

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Stop starting requests; the future is done when the running ones have been treated as `mode` says."""

        def apply_pause() -> None:
            self._drained.append(drained)
            self._paused = mode
            if mode == "wait":
                with self._wake:
                    for job in self._waiting:
                        job.start_despite_pause = True
            if mode == "abort":
                with self._wake:  # requests submitted from here on wait until `resume`
                    ended = [*self._active, *self._waiting]
                    self._active.clear()
                    self._waiting.clear()
                for job in ended:
                    _set_result(job.future, job.result("abort"))
            if clear_cache:
                self._clear_cache()

        drained: Future[None] = Future()
        self._run_between_steps(apply_pause)
        return drained

    def resume(self) -> Future[None]:
        """End a pause."""

        def end_pause() -> None:
            self._paused = None
            self._complete_drained()  # callers that wait for this pause must not wait for the next one

        return self._run_between_steps(end_pause)

    def set_weights(self, model: str, weights: ModelWeights | None, *, clear_cache: bool = True) -> Future[None]:
        """Replace the weights of `model` from the next token on; None removes them and fails its requests.

        With `clear_cache`, keys and values of the old weights are dropped and computed again. Queued and active
        requests continue.
        """

        def exchange() -> None:
            if weights is None:
                self._weights.pop(model, None)
                self._fail_jobs(
                    [job for job in self._active if job.request.model == model], _unloaded_message(model)
                )
            else:
                self._weights[model] = weights
            if clear_cache or weights is None:
                self._clear_cache(model)

        return self._run_between_steps(exchange)

    def clear_cache(self) -> Future[None]:
        """Drop the cached keys and values of finished and of active requests."""
        return self._run_between_steps(self._clear_cache)

    def close(self) -> None:
        """Stop the thread; requests in progress fail with a BackendError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------

    def _run_between_steps(self, action: Callable[[], None]) -> Future[None]:
        """Run `action` on the engine's thread between two steps. Raises BackendError (503) after `close`."""
        done: Future[None] = Future()

        def execute() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - the caller gets the error; the thread must go on
                _log.exception("the engine failed between two steps")
                _set_error(done, BackendError(_failure(error), status=500))
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
                actions = list(self._pending_actions)
                self._pending_actions.clear()
                closing = self._closing
            for action in actions:
                action()
            if closing:
                break
            try:
                self._step()
            except Exception as error:  # noqa: BLE001 - active requests fail; queued ones must still be served
                _log.exception("a step of the engine failed, and its %d requests with it", len(self._active))
                # The cached values may be incomplete, or memory may have run out, so drop them all.
                self._prefixes.clear()
                self._slots.clear()
                self._fail_jobs(list(self._active), _failure(error))
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
        any_cancelled = any(job.cancelled for job in (*self._active, *self._waiting))
        begins = bool(self._waiting) and (self._paused is None or self._waits_despite_pause())
        return any_cancelled or (not frozen and (begins or bool(self._active)))

    def _waits_despite_pause(self) -> bool:
        """Return whether requests are queued that were submitted before a pause in mode `wait`."""
        with self._wake:
            return bool(self._waiting) and self._waiting[0].start_despite_pause

    def _step(self) -> None:
        for job in [job for job in self._active if job.cancelled]:
            self._free_slot(job)
        with self._wake:
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
        if self._paused != "keep":
            self._admit()
            prefilling = next((job for job in self._active if len(job.tokens) - job.computed > 1), None)
            if prefilling is not None:
                self._prefill(prefilling)
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
                    self._fail_jobs([job], _unloaded_message(job.request.model))

    def _prefill(self, job: SamplingJob) -> None:
        """Compute the next chunk of a request's tokens that are not in the KV cache."""
        row = self._active.index(job)
        if job.computed == 0:
            self._load_cached_prefix(job, row)
        token_ids = job.tokens[job.computed : job.computed + self._limits.chunk]
        is_complete = job.computed + len(token_ids) == len(job.tokens)
        self._slots.reserve(len(self._active), job.computed + len(token_ids))
        logits = forward(self._weights[job.request.model].module, self._slots, [token_ids], [row], [job.computed])
        job.computed += len(token_ids)
        if is_complete:
            self._add_tokens([job], logits)

    def _load_cached_prefix(self, job: SamplingJob, row: int) -> None:
        """Copy the longest prefix shared with a cached or active sequence; one token at least stays to compute."""
        ids: Ids = np.array(job.tokens[:-1], dtype=np.int32)
        cached, length = self._prefixes.find(job.request.model, ids)
        neighbour = None
        for candidate in self._active:
            if (
                candidate is not job
                and candidate.request.model == job.request.model
                and candidate.computed > length
            ):
                shared = common_prefix_length(
                    np.array(candidate.tokens[: candidate.computed], dtype=np.int32), ids
                )
                if shared > length:
                    neighbour, length = candidate, shared
        self._slots.reserve(len(self._active), length)
        if neighbour is not None:
            self._slots.move(self._active.index(neighbour), row, length)
        elif cached is not None:
            self._slots.load(row, cached, length)
        job.computed = length
        if not job.started:
            job.started, job.cached = True, min(length, len(job.request.prompt) - 1)

    def _decode(self, jobs: list[SamplingJob]) -> None:
        """Sample one token for each of some requests of the same weights, in one forward pass."""
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
        """Sample a token for each request from its logits, and finish the requests that it ends."""
        logits = logits[:, : len(self._bytes)]
        settings = [job.request.sampling for job in jobs]
        histories = [
            (job.request.prompt, job.completion if job.request.sampling.changes_logits else ()) for job in jobs
        ]
        sampled = sample_tokens(logits, settings, [job.random.random() for job in jobs], histories)
        for job, (token, logprob) in zip(jobs, sampled, strict=True):
            if not math.isfinite(logprob):
                message = (
                    f"the weights of {job.request.model!r} give no finite probabilities (NaN or infinity); load "
                    "weights from before the training diverged, or download damaged ones again"
                )
                self._fail_jobs([job], message)
                continue
            result = job.add(token, self._bytes[token], logprob, self._weights[job.request.model].version)
            if result is not None:
                _set_result(job.future, result)
                self._free_slot(job)

    def _free_slot(self, job: SamplingJob) -> None:
        """Free a request's slot, adding its sequence to the prefix cache; the last slot moves into it."""
        row = self._active.index(job)
        if job.computed:
            ids: Ids = np.array(job.tokens[: job.computed], dtype=np.int32)
            self._prefixes.add(self._slots.save(row, job.request.model, ids))
        last_job = self._active.pop()
        if last_job is not job:
            self._active[row] = last_job
            self._slots.move(len(self._active), row, last_job.computed)

    def _clear_cache(self, model: str | None = None) -> None:
        for job in self._active:
            if model is None or job.request.model == model:
                job.computed = 0
        self._prefixes.clear(model)
        if model is None or all(job.computed == 0 for job in self._active):
            self._slots.clear()

    def _fail_jobs(self, jobs: Sequence[SamplingJob], message: str, *, status: int = 500) -> None:
        """Fail requests. Their sequences are not added to the prefix cache."""
        for job in jobs:
            _set_error(job.future, BackendError(message, status=status))
            if job in self._active:
                # Stale values are masked, but a NaN passes through a mask and would spoil the next sequence.
                self._slots.zero(self._active.index(job))
                job.computed = 0
                self._free_slot(job)


def _failure(error: Exception) -> str:
    """Return the message for requests that an unexpected error of the engine ended."""
    return (
        f"the engine failed: {reason_of(error)}; see the traceback in the server's log, or restart the server "
        "with a lower --max-num-seqs if memory ran out"
    )


def _unloaded_message(model: str) -> str:
    return (
        f"the adapter {model!r} was unloaded before this request was complete; load it again with POST "
        "/v1/load_lora_adapter, or name another model"
    )


def _set_result(future: Future[_T], result: _T) -> None:
    with suppress(InvalidStateError):  # the caller cancelled it
        future.set_result(result)


def _set_error(future: Future[_T], error: BackendError) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
