"""Capture: every model request becomes one call, and its answer is let go only when that call is durable."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Protocol

from msgspec import Struct

from understudy.errors import GatewayError, UnderstudyError
from understudy.gateway.backends.base import Backend, Relay, is_relay
from understudy.gateway.control import GenerationControl, spans
from understudy.gateway.errors import Abandoned, BudgetExceeded, fault_of
from understudy.gateway.prices import cost
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.request import (
    AgentRequest,
    PreparedRequest,
    RelayedRequest,
    ResponseDraft,
    TranslatedRequest,
)
from understudy.types import Call, CallStatus, PolicySpan, Usage, info_of
from understudy.wire.dialect import Branch
from understudy.wire.errors import Fault, InvalidRequest, too_deep
from understudy.wire.model import Generation

_log = logging.getLogger(__name__)

CallObserver = Callable[[Call, Mapping[bytes, bytes]], None]
"""Is told a call that was kept, and the headers of its request."""


class CallSink(Protocol):
    """Where calls are kept: the store, as the gateway sees it."""

    def append_call(self, call: Call) -> Future[None]:
        """Keep a call; the future is done when it is durable, and fails with StoreError when it cannot be."""
        ...


class CapturedResponse(Struct, frozen=True):
    """What an agent may see now: the message, and of its stream what was not said yet (None: all of it)."""

    body: bytes
    tail: bytes | None = None


class InFlightCall:
    """One generation and its call, shared by all identical requests that are waiting for it.

    `task` ends with an Answer or with a Fault; it never raises what was foreseen. `said` are the events that may
    be passed on before that; whoever waits is woken at each of them, and at the end.
    """

    def __init__(self, capture: Capture, job: PreparedRequest) -> None:
        self.session = job.asked.session
        self.said: list[bytes] = []
        self.waiting: list[Callable[..., None]] = []
        self.abandoned = False
        self._sealed = False
        record = _CallRecorder(capture, job.asked, job.answerer, job.model, job.sampling)
        self.message_id = record.message_id
        self.task = asyncio.get_running_loop().create_task(self._run(capture, job, record))

    def abandon(self) -> None:
        """Stop generating, unless the answer is there: then it is committed, read or not."""
        if not self._sealed:
            self._sealed = self.abandoned = True
            self.task.cancel()

    def _say(self, events: bytes) -> None:
        if events:
            self.said.append(events)
            for wake in self.waiting:
                wake()

    async def _run(
        self, capture: Capture, job: PreparedRequest, record: _CallRecorder
    ) -> CapturedResponse | Fault:
        outcome: ResponseDraft | UnderstudyError
        try:
            outcome = await self._produce(capture, job, record)
        except asyncio.CancelledError:
            # Only `abandon` cancels this task, and nobody is left who waits for the cancellation itself.
            outcome = Abandoned("the agent left, or the gateway stopped, before there was an answer")
        except BudgetExceeded as error:
            self._sealed = True
            return await record.close(job, error)
        except UnderstudyError as error:
            outcome = error
        except RecursionError:
            outcome = too_deep()
        except Exception as error:  # noqa: BLE001 - see below
            # A call is never lost for a fault of ours: it is kept with what is known, and told in its dialect.
            _log.exception("a fault of the gateway itself")
            outcome = GatewayError(f"a fault of the gateway itself: {type(error).__name__}")
        self._sealed = True
        return await record.commit(outcome)

    async def _produce(self, capture: Capture, job: PreparedRequest, record: _CallRecorder) -> ResponseDraft:
        if over := job.asked.session.spending.exceeded():
            raise BudgetExceeded(over)
        push = self._say if capture.streaming and job.stream else None
        control = capture.control
        slots = capture.models.slots(job.answerer)
        # The slot comes first: what waits for one when generation is paused has to wait for its end too.
        async with nullcontext() if slots is None else slots.hold(job.asked.session.attempt_id):
            await control.enter()
            with control.generating():
                before = control.version
                generation = await job.generate(record.message_id, push)
                told = generation.policy_spans
                count = generation.usage.completion_tokens
                record.generation = generation
                record.policy_spans = spans(before, control.version, told, count)
        return job.produce(generation, record.message_id)


class _CallRecorder:
    """A call in the making: what is known when it begins, then how it ended."""

    def __init__(
        self,
        capture: Capture,
        asked: AgentRequest,
        answerer: Backend | Relay,
        model: str,
        sampling: dict[str, object],
    ) -> None:
        self.generation: Generation | None = None
        self.policy_spans: tuple[PolicySpan, ...] = ()
        self._capture = capture
        self._asked = asked
        self._answerer = answerer
        self._model = model
        self._sampling = sampling
        self._id = secrets.token_hex(12)
        self._parent = asked.session.parent(asked.branch)
        self._started = time.time()

    @property
    def message_id(self) -> str:
        """The id that the agent sees, so that its own log can be laid beside the calls."""
        return f"msg_{self._id}"

    async def commit(self, outcome: ResponseDraft | UnderstudyError) -> CapturedResponse | Fault:
        """Make the call durable, then return what the agent may see. A failed commit is a Fault."""
        if isinstance(outcome, UnderstudyError):
            fault = fault_of(outcome)
            return await self._keep(self._asked.dialect.error(fault).body, outcome) or fault
        session, message = self._asked.session, outcome.message
        if lost := await self._keep(message.body, None):
            return lost
        session.answered(self._asked.branch, f"call_{self._id}", message.sampled)
        return CapturedResponse(message.body, outcome.tail)

    async def close(self, job: PreparedRequest, error: BudgetExceeded) -> CapturedResponse | Fault:
        """Keep the refusal, and tell it as the model's last words: after them the agent ends by itself."""
        self._asked.session.exhausted = str(error)
        message = job.last_words(f"{error}. This attempt ends here.", self.message_id)
        return await self._keep(message.body, error) or CapturedResponse(message.body)

    async def _keep(self, response: bytes, error: UnderstudyError | None) -> Fault | None:
        """Make the call durable; what the agent is told when it cannot be."""
        call = self._call(response, error)
        try:
            await asyncio.wrap_future(self._capture.sink.append_call(call))
        except UnderstudyError as failure:
            _log.error("call %s of attempt %s is lost: %s", call.id, call.attempt_id, failure)
            return fault_of(failure)
        self._asked.session.spending.add(call.usage, call.cost_usd)
        for observe in self._capture.observers:
            try:
                observe(call, self._asked.headers)
            except Exception:  # noqa: BLE001 - see below
                # The call is kept: whoever only counts it must not cost the agent its answer.
                _log.exception("call %s was kept, but not observed", call.id)
        return None

    def _call(self, response: bytes, error: UnderstudyError | None) -> Call:
        asked, generation = self._asked, self.generation
        usage = generation.usage if generation else Usage()
        price = self._answerer.price
        return Call(
            id=f"call_{self._id}",
            attempt_id=asked.session.attempt_id,
            sequence=asked.session.next_sequence(),
            dialect=asked.dialect.name,
            requested_model=self._model,
            backend=self._answerer.name,
            backend_model=generation.model if generation else self._answerer.model,
            request=asked.body,
            response=response,
            status=_status(error),
            started_at=self._started,
            ended_at=time.time(),
            parent_id=self._parent,
            session_id=asked.branch.session_id,
            agent_id=asked.branch.agent_id,
            policy_version=self.policy_spans[-1].version if self.policy_spans else None,
            prompt_token_ids=generation.prompt_token_ids if generation else None,
            completion_token_ids=generation.completion_token_ids if generation else None,
            logprobs=generation.logprobs if generation else None,
            finish_reason=generation.finish_reason if generation else None,
            usage=usage,
            sampling=generation.sampling if generation else self._sampling,
            error=None if error is None else info_of(error),
            policy_spans=self.policy_spans,
            cost_usd=cost(usage, price) if price and generation else None,
            audit=generation.audit if generation else {},
        )


def _status(error: UnderstudyError | None) -> CallStatus:
    if error is None:
        return "ok"
    return "abandoned" if isinstance(error, Abandoned) else "error"


_Key = tuple[str, Branch, str, bytes]


class Capture:
    """The exchanges that are under way in one gateway."""

    def __init__(
        self,
        models: ModelRouter,
        sink: CallSink,
        control: GenerationControl,
        *,
        observers: Sequence[CallObserver],
        streaming: bool,
    ) -> None:
        self.models = models
        self.sink = sink
        self.control = control
        self.observers = observers
        self.streaming = streaming
        self._running: dict[_Key, InFlightCall] = {}
        self._tasks: set[asyncio.Task[CapturedResponse | Fault]] = set()

    def understand(self, asked: AgentRequest) -> PreparedRequest:
        """What a request asks, and who answers it. Raises InvalidRequest."""
        if self.models.relayed:
            model, stream = asked.dialect.peek(asked.body)
            answerer = self.models.choose(model)
            if is_relay(answerer):
                return RelayedRequest(asked, model, stream, answerer)
        incoming = asked.dialect.parse(asked.body, asked.session, asked.branch)
        answerer = self.models.choose(incoming.model)
        assert not is_relay(answerer)
        return TranslatedRequest(asked, incoming, answerer)

    def join(self, job: PreparedRequest, wake: Callable[..., None]) -> InFlightCall:
        """The exchange for a request: the one under way for the same bytes on the same branch, else a new one.

        `wake` is called whenever there is more to say, and at the end. Every join is matched by one `leave`.
        """
        asked = job.asked
        key = (asked.session.attempt_id, asked.branch, asked.dialect.name, asked.body)
        exchange = self._running.get(key)
        if exchange is None or exchange.abandoned:
            asked.session.begun += 1
            asked.session.in_flight += 1
            exchange = self._running[key] = InFlightCall(self, job)
            self._tasks.add(exchange.task)
            exchange.task.add_done_callback(functools.partial(self._ended, key, exchange))
        exchange.waiting.append(wake)
        exchange.task.add_done_callback(wake)
        return exchange

    def leave(self, exchange: InFlightCall, wake: Callable[..., None]) -> None:
        """One request has its answer, or its client is gone; without anyone who waits the generation stops."""
        exchange.waiting.remove(wake)
        if not exchange.waiting:
            exchange.abandon()

    def _ended(self, key: _Key, exchange: InFlightCall, task: asyncio.Task[CapturedResponse | Fault]) -> None:
        self._tasks.discard(task)
        exchange.session.in_flight -= 1
        if self._running.get(key) is exchange:
            del self._running[key]

    async def refuse(self, asked: AgentRequest, error: InvalidRequest) -> Fault:
        """Keep a request that could not be understood as a failed call."""
        try:
            model, _ = asked.dialect.peek(asked.body)
        except InvalidRequest:
            model = ""  # not even that can be read
        record = _CallRecorder(self, asked, self.models.choose(model), model, {})
        answer = await record.commit(error)
        assert isinstance(answer, Fault)
        return answer

    async def drain(self, timeout_s: float) -> None:
        """Wait for what is under way, then abandon the rest; all of it is committed when this returns.

        Cancelled, it abandons the rest at once.
        """
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=timeout_s)
        finally:
            for exchange in list(self._running.values()):
                exchange.abandon()
            if self._tasks:
                await asyncio.wait(self._tasks)
