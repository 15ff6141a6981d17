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

import numpy as np
import torch
from msgspec import Struct

from understudy.errors import BackendError
from understudy.model.causal.cache import Ids, Prefixes, Slots, common
from understudy.model.causal.checkpoint import forward
from understudy.model.causal.jobs import Ask, Job, Outcome
from understudy.model.causal.sampling import draw

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_ENDING = "the server ends"
_UNLOADED = "the adapter was unloaded"

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests under way: they end with what they have, or as ever, or wait in their place."""


class Weights(Struct, frozen=True):
    """A module and the version that it samples under."""

    module: Any
    version: str


class Limits(Struct, frozen=True, kw_only=True):
    """Requests decoded at once, and waiting; prompt tokens read in one go; bytes of remembered sequences."""

    slots: int = 8
    queue: int = 1024
    chunk: int = 512
    remembered: int = 512 << 20


class Engine:
    """Samples for whoever asks, from any thread. `token_bytes` are those of the tokens that may be sampled.

    A request's tokens depend on its prompt, parameters, seed and weights, and not on what is decoded beside it.
    """

    def __init__(
        self, weights: dict[str, Weights], token_bytes: Sequence[bytes], *, limits: Limits | None = None
    ) -> None:
        self._weights = dict(weights)
        self._bytes = token_bytes
        self._limits = limits or Limits()
        self._slots = Slots()
        self._prefixes = Prefixes(self._limits.remembered)
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []  # the index is the slot
        self._orders: deque[Callable[[], None]] = deque()
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

    def submit(self, ask: Ask) -> Future[Outcome]:
        """Ask; to cancel the future is to ask no more. Raises BackendError when too many wait already."""
        job = Job(ask)
        with self._wake:
            if self._closing:
                raise BackendError(_ENDING, status=503)
            if len(self._waiting) >= self._limits.queue:
                self._waiting = deque(job for job in self._waiting if not job.gone)
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
                        job.due = True
            if mode == "abort":
                with self._wake:  # what is submitted meanwhile waits for the end of the pause
                    ended = [*self._active, *self._waiting]
                    self._active.clear()
                    self._waiting.clear()
                for job in ended:
                    _settle(job.future, job.outcome("abort"))
            if clear_cache:
                self._forget()

        drained: Future[None] = Future()
        self._order(order)
        return drained

    def resume(self) -> Future[None]:
        """Go on after a pause."""

        def order() -> None:
            self._paused = None
            self._tell_drained()  # nobody need wait for the end of a pause that is over

        return self._order(order)

    def set_weights(self, model: str, weights: Weights | None, *, clear_cache: bool = True) -> Future[None]:
        """Sample from other weights from the next token on; None removes them, and what is under way ends.

        With `clear_cache`, what the old ones read is read again. Requests that wait or are decoded go on.
        """

        def order() -> None:
            if weights is None:
                self._weights.pop(model, None)
                self._end([job for job in self._active if job.ask.model == model], _UNLOADED)
            else:
                self._weights[model] = weights
            if clear_cache or weights is None:
                self._forget(model)

        return self._order(order)

    def clear_cache(self) -> Future[None]:
        """Forget what was read, of finished requests and of those under way."""
        return self._order(self._forget)

    def close(self) -> None:
        """End; what is under way fails."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> Future[None]:
        """Have the thread do something between two steps."""
        done: Future[None] = Future()

        def carry_out() -> None:
            try:
                order()
            except Exception as error:  # noqa: BLE001 - who gave it is told; the thread goes on
                _fail(done, BackendError(f"the engine met a fault: {error}", status=500))
            else:
                _settle(done, None)

        with self._wake:
            if self._closing:
                raise BackendError(_ENDING, status=503)
            self._orders.append(carry_out)
            self._wake.notify()
        return done

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._orders or self._has_work()):
                    self._wake.wait()
                orders = list(self._orders)
                self._orders.clear()
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
                self._end(list(self._active), f"the engine met a fault: {error}")
            if self._paused == "keep" or not (self._active or self._has_due()):
                self._tell_drained()
        self._end([*self._active, *self._waiting], _ENDING, status=503)
        self._tell_drained()

    def _tell_drained(self) -> None:
        for drained in self._drained:
            _settle(drained, None)
        self._drained.clear()

    def _has_work(self) -> bool:
        frozen = self._paused == "keep"
        gone = any(job.gone for job in (*self._active, *self._waiting))
        begins = bool(self._waiting) and (self._paused is None or self._has_due())
        return gone or (not frozen and (begins or bool(self._active)))

    def _has_due(self) -> bool:
        """Whether requests wait that came before the pause which waits for them."""
        with self._wake:
            return bool(self._waiting) and self._waiting[0].due

    def _step(self) -> None:
        for job in [job for job in self._active if job.gone]:
            self._leave(job)
        with self._wake:
            self._waiting = deque(job for job in self._waiting if not job.gone)
        if self._paused != "keep":
            self._admit()
            reading = next((job for job in self._active if len(job.tokens) - job.fed > 1), None)
            if reading is not None:
                self._read(reading)
            ready = [job for job in self._active if len(job.tokens) - job.fed == 1]
            for _, jobs in groupby(sorted(ready, key=lambda job: job.ask.model), key=lambda job: job.ask.model):
                self._sample(list(jobs))

    def _admit(self) -> None:
        with self._wake:
            while self._waiting and len(self._active) < self._limits.slots:
                if self._paused is not None and not self._waiting[0].due:
                    break
                job = self._waiting.popleft()
                if job.ask.model in self._weights:
                    self._active.append(job)
                else:
                    self._end([job], _UNLOADED)

    def _read(self, job: Job) -> None:
        """Read the next part of what a request has behind its `fed` tokens."""
        row = self._active.index(job)
        if job.fed == 0:
            self._recall(job, row)
        part = job.tokens[job.fed : job.fed + self._limits.chunk]
        whole = job.fed + len(part) == len(job.tokens)
        self._slots.reserve(len(self._active), job.fed + len(part))
        logits = forward(self._weights[job.ask.model].module, self._slots, [part], [row], [job.fed])
        job.fed += len(part)
        if whole:
            self._take([job], logits)

    def _recall(self, job: Job, row: int) -> None:
        """Begin with what another sequence has in common with this one, leaving at least a token to read."""
        ids: Ids = np.array(job.tokens[:-1], dtype=np.int32)
        kept, length = self._prefixes.find(job.ask.model, ids)
        beside = None
        for other in self._active:
            if other is not job and other.ask.model == job.ask.model and other.fed > length:
                same = common(np.array(other.tokens[: other.fed], dtype=np.int32), ids)
                if same > length:
                    beside, length = other, same
        self._slots.reserve(len(self._active), length)
        if beside is not None:
            self._slots.move(self._active.index(beside), row, length)
        elif kept is not None:
            self._slots.put(row, kept, length)
        job.fed = length
        if not job.begun:
            job.begun, job.cached = True, min(length, len(job.ask.prompt) - 1)

    def _sample(self, jobs: list[Job]) -> None:
        """One token for each of some requests of the same weights."""
        rows = [self._active.index(job) for job in jobs]
        starts = [job.fed for job in jobs]
        self._slots.reserve(len(self._active), max(starts) + 1)
        module = self._weights[jobs[0].ask.model].module
        logits = forward(module, self._slots, [job.tokens[-1:] for job in jobs], rows, starts)
        for job in jobs:
            job.fed += 1
            job.begun = True
        self._take(jobs, logits)

    def _take(self, jobs: list[Job], logits: Any) -> None:
        """Draw a token for each of the requests, which may be their last."""
        logits = logits[:, : len(self._bytes)]
        drawings = [job.ask.drawing for job in jobs]
        said = [(job.ask.prompt, job.said if job.ask.drawing.weighs else ()) for job in jobs]
        drawn = draw(logits, drawings, [job.random.random() for job in jobs], said)
        for job, (token, logprob) in zip(jobs, drawn, strict=True):
            if not math.isfinite(logprob):
                self._end([job], "the model's weights give no finite probabilities; load others")
                continue
            outcome = job.add(token, self._bytes[token], logprob, self._weights[job.ask.model].version)
            if outcome is not None:
                _settle(job.future, outcome)
                self._leave(job)

    def _leave(self, job: Job) -> None:
        """Free a request's slot, and remember what stood there; the last slot's sequence takes its place."""
        row = self._active.index(job)
        if job.fed:
            ids: Ids = np.array(job.tokens[: job.fed], dtype=np.int32)
            self._prefixes.keep(self._slots.take(row, job.ask.model, ids))
        last = self._active.pop()
        if last is not job:
            self._active[row] = last
            self._slots.move(len(self._active), row, last.fed)

    def _forget(self, model: str | None = None) -> None:
        for job in self._active:
            if model is None or job.ask.model == model:
                job.fed = 0
        self._prefixes.clear(model)
        if model is None or all(job.fed == 0 for job in self._active):
            self._slots.clear()

    def _end(self, jobs: Sequence[Job], why: str, *, status: int = 500) -> None:
        """Have requests fail. What stood in their slots is not remembered."""
        for job in jobs:
            _fail(job.future, BackendError(why, status=status))
            if job in self._active:
                # What is behind a sequence's end is masked, but what is no number shows through a mask.
                self._slots.wipe(self._active.index(job))
                job.fed = 0
                self._leave(job)


def _settle(future: Future[_T], result: _T) -> None:
    with suppress(InvalidStateError):  # nobody waits any more
        future.set_result(result)


def _fail(future: Future[_T], why: BackendError) -> None:
    with suppress(InvalidStateError):
        future.set_exception(why)
