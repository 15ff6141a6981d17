"""Capture: every model request becomes one call, and its response is released only once that call is durable."""

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

from understudy.errors import GatewayError, StoreError, UnderstudyError
from understudy.gateway.backends.base import Backend, Relay, is_relay
from understudy.gateway.budget import Reservation
from understudy.gateway.control import GenerationControl, RunningCall, policy_spans
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
"""Called with each stored call, and the headers of its request."""


class CallSink(Protocol):
    """Where calls are stored: the part of the store that the gateway uses."""

    def append(self, call: Call) -> Future[None]:
        """Store a call.

        The future is done once it is durable, and fails with StoreError if it cannot be stored.
        """
        ...


class CapturedResponse(Struct, frozen=True):
    """A response whose call is durable: its JSON body, and the events of its stream that were not sent yet.

    `remaining_events` is None if no event was sent: all of them can then be made from the body.
    """

    body: bytes
    remaining_events: bytes | None = None


class InFlightCall:
    """One generation and its call, from the request until the response is durable.

    `task` ends with a CapturedResponse or a Fault, and raises no expected error. `events` may be sent before it
    ends. Each subscriber, one per HTTP request that waits for this call, is woken for new events and at the end.
    """

    def __init__(self, capture: Capture, request: PreparedRequest) -> None:
        agent_request = request.agent_request
        self.session = agent_request.session
        self.events: list[bytes] = []
        self.subscribers: list[Callable[..., None]] = []
        self.abandoned = False
        self._idempotency_key = agent_request.idempotency_key
        self._retry_count = agent_request.retry_count
        self._sealed = False  # the call is being committed, so nothing can stop it any more
        self._generating = False
        self._recorder = recorder = _CallRecorder(
            capture, agent_request, request.server, request.model, request.sampling
        )
        self.message_id = recorder.message_id
        self.task = asyncio.get_running_loop().create_task(self._run(capture, request, recorder))

    def abandon(self) -> None:
        """Stop generating, unless the generation is complete: then it is committed, whether or not anybody
        still waits.
        """
        if not self._sealed:
            self._sealed = self.abandoned = True
            self.task.cancel()

    def state(self) -> RunningCall:
        """Return how far the call is."""
        return self._recorder.running(self._generating, sum(map(len, self.events)))

    def is_retried_by(self, request: AgentRequest) -> bool:
        """Return whether an identical request is a retry of the one that this call answers, rather than a request
        for another sample.

        Idempotency keys decide if there are any. Otherwise it is a retry if it has a higher retry count than those
        that wait here, or if nobody waits here any more. The latter only happens while the answer is being
        committed: before that, the disconnection of the last client abandons the call, and a later try gets a call
        of its own. (This is the case for Claude Code, which always sends a retry count of 0.) Agents that want
        several samples at once send identical requests too, and each of them must get a generation of its own.
        """
        if self.abandoned:
            return False
        if self._idempotency_key or request.idempotency_key:
            return self._idempotency_key == request.idempotency_key
        return not self.subscribers or request.retry_count > self._retry_count

    def subscribe(self, request: AgentRequest, wake: Callable[..., None]) -> None:
        """Have `wake` called at each progress of this call, and at its end."""
        # Each retry replaces one earlier try. A second retry with this count belongs to another call.
        self._retry_count = max(self._retry_count, request.retry_count)
        self.subscribers.append(wake)
        self.task.add_done_callback(wake)

    def _push(self, events: bytes) -> None:
        if events:
            self.events.append(events)
            for wake in self.subscribers:
                wake()

    async def _run(
        self, capture: Capture, request: PreparedRequest, recorder: _CallRecorder
    ) -> CapturedResponse | Fault:
        outcome: ResponseDraft | UnderstudyError
        try:
            outcome = await self._generate(capture, request, recorder)
        except asyncio.CancelledError:
            # Only `abandon` cancels this task, and nobody awaits the cancellation itself.
            outcome = Abandoned(
                "the client disconnected, or the gateway stopped, before there was a response; send the "
                "request again"
            )
        except BudgetExceeded as error:
            self._sealed = True
            return await recorder.commit_budget_exceeded(request, error)
        except UnderstudyError as error:
            outcome = error
        except RecursionError:
            outcome = too_deep()
        except Exception as error:  # noqa: BLE001 - see below
            # A bug of the gateway must not lose a call: what there is of it is stored, and a fault is reported.
            _log.exception(
                "internal error of the gateway in a call of attempt %s; please report it", self.session.attempt_id
            )
            outcome = GatewayError(
                f"internal error of the gateway: {type(error).__name__}; please report it with the traceback "
                "in the gateway's log"
            )
        self._sealed = True
        return await recorder.commit(outcome)

    async def _generate(
        self, capture: Capture, request: PreparedRequest, recorder: _CallRecorder
    ) -> ResponseDraft:
        session = request.agent_request.session
        reservation = await session.spending.reserve(
            len(request.agent_request.body),
            request.max_tokens,
            request.server.price,
            adjustable=request.can_limit_tokens,
        )
        recorder.reservation = reservation  # settled when the call is stored, however it ends
        if session.ceiling is not None:
            most = reservation.max_tokens or request.max_tokens
            recorder.under_ceiling = await session.ceiling.reserve(
                len(request.agent_request.body), most, request.server.price
            )
        if reservation.max_tokens is not None:
            request.sampling["max_tokens"] = reservation.max_tokens
        push = self._push if capture.streaming and request.stream else None
        control = capture.control
        slots = capture.models.slots_of(request.server)
        # The slot comes first, so that a request that gets a slot during a pause waits for the end of the pause.
        async with nullcontext() if slots is None else slots.hold(session.attempt_id):
            await control.wait_until_open()
            with control.generating():
                self._generating = True
                version_before = control.version
                generation = await request.generate(recorder.message_id, push)
                recorder.generation = generation
                recorder.policy_spans = policy_spans(
                    version_before, control.version, generation.policy_spans, generation.usage.completion_tokens
                )
        return request.draft(generation, recorder.message_id)


class _CallRecorder:
    """Builds the record of one call, and stores it when the call has ended."""

    def __init__(
        self,
        capture: Capture,
        agent_request: AgentRequest,
        server: Backend | Relay,
        model: str,
        sampling: dict[str, object],
    ) -> None:
        self.generation: Generation | None = None
        self.policy_spans: tuple[PolicySpan, ...] = ()
        self.reservation: Reservation | None = None
        self.under_ceiling: Reservation | None = None
        self._capture = capture
        self._request = agent_request
        self._server = server
        self._model = model
        self._sampling = sampling
        self._id = secrets.token_hex(12)
        self._parent_id = agent_request.session.last_call_id(agent_request.branch)
        self._started_at = time.time()

    @property
    def message_id(self) -> str:
        """The id that the agent sees, by which its own log can be matched with the calls."""
        return f"msg_{self._id}"

    def running(self, generating: bool, sent_bytes: int) -> RunningCall:
        """Return what is known of the call before it has ended."""
        branch = self._request.branch
        return RunningCall(
            id=f"call_{self._id}",
            attempt_id=self._request.session.attempt_id,
            session_id=branch.session_id,
            agent_id=branch.agent_id,
            model=self._model,
            backend=self._server.name,
            started_at=self._started_at,
            generating=generating,
            request_bytes=len(self._request.body),
            sent_bytes=sent_bytes,
        )

    async def commit(self, outcome: ResponseDraft | UnderstudyError) -> CapturedResponse | Fault:
        """Store the call durably, then return what the agent may see.

        A failure to store it is returned as a Fault.
        """
        if isinstance(outcome, UnderstudyError):
            fault = fault_of(outcome, self._request.session.retry_after_limit_s)
            return await self._store(self._request.dialect.error(fault).body, outcome) or fault
        response = outcome.response
        if failure := await self._store(response.body, None):
            return failure
        self._request.session.record_response(self._request.branch, f"call_{self._id}", response.sampled)
        return CapturedResponse(response.body, outcome.remaining_events)

    async def commit_budget_exceeded(
        self, request: PreparedRequest, error: BudgetExceeded
    ) -> CapturedResponse | Fault:
        """Store the refusal, and return it as the model's final message, after which the agent ends by itself."""
        self._request.session.budget_message = str(error)
        response = request.final_message(f"{error}. This attempt ends here.", self.message_id)
        return await self._store(response.body, error) or CapturedResponse(response.body)

    async def _store(self, response: bytes, error: UnderstudyError | None) -> Fault | None:
        """Store the call durably. Returns the fault for the agent if that fails."""
        call = self._call(response, error)
        try:
            await asyncio.wrap_future(self._capture.sink.append(call))
        except UnderstudyError as failure:
            _log.error(
                "call %s of attempt %s could not be stored, so its response is withheld: %s",
                call.id,
                call.attempt_id,
                failure,
            )
            if isinstance(failure, StoreError):
                self._request.session.store_error = failure
            return fault_of(failure)
        finally:
            spending = self._request.session.spending
            if self.reservation is not None:
                spending.settle(self.reservation, call.usage, call.cost_usd)
            elif not isinstance(error, BudgetExceeded):
                spending.add(call.usage, call.cost_usd)
            ceiling = self._request.session.ceiling
            if ceiling is not None and self.under_ceiling is not None:
                lost = isinstance(error, Abandoned)
                ceiling.settle(self.under_ceiling, call.usage, call.cost_usd, lost=lost)
        self._request.session.store_error = None
        for observe in self._capture.observers:
            try:
                observe(call, self._request.headers)
            except Exception:  # noqa: BLE001 - see below
                # The call is stored, so a failing metric must not cost the agent its response.
                _log.exception("call %s was stored, but its metrics or spans failed; please report it", call.id)
        return None

    def _call(self, response: bytes, error: UnderstudyError | None) -> Call:
        request, generation = self._request, self.generation
        usage = generation.usage if generation else Usage()
        price = self._server.price
        return Call(
            id=f"call_{self._id}",
            attempt_id=request.session.attempt_id,
            sequence=request.session.next_sequence(),
            dialect=request.dialect.name,
            requested_model=self._model,
            backend=self._server.name,
            backend_model=generation.model if generation else self._server.model,
            request=request.body,
            response=response,
            status=_status(error),
            started_at=self._started_at,
            ended_at=time.time(),
            parent_id=self._parent_id,
            session_id=request.branch.session_id,
            agent_id=request.branch.agent_id,
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


_RequestKey = tuple[str, Branch, str, str, bytes]
"""Attempt, branch, dialect, target and body. Requests that agree in these are identical."""


class Capture:
    """The calls in flight in one gateway."""

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
        self._in_flight: dict[_RequestKey, list[InFlightCall]] = {}
        self._tasks: set[asyncio.Task[CapturedResponse | Fault]] = set()

    def prepare(self, request: AgentRequest) -> PreparedRequest:
        """Return the request with the server that is to answer it. Raises InvalidRequest."""
        if self.models.has_relay:
            model, stream = request.dialect.peek(request.body, request.target)
            server = self.models.server_for(model)
            if is_relay(server):
                return RelayedRequest(request, model, stream, server)
        dialect_request = request.dialect.parse(request.body, request.session, request.branch, request.target)
        server = self.models.server_for(dialect_request.model)
        assert not is_relay(server)
        return TranslatedRequest(request, dialect_request, server)

    def running(self) -> list[RunningCall]:
        """Return the calls that have no answer yet, the oldest first."""
        calls = [call.state() for identical in self._in_flight.values() for call in identical]
        return sorted(calls, key=lambda call: call.started_at)

    def subscribe(self, request: PreparedRequest, wake: Callable[..., None]) -> InFlightCall:
        """Return the call that answers a request: the call in flight that it retries, or a new one.

        `wake` is called whenever there are new events, and at the end. Every subscription must be ended by
        `unsubscribe`.
        """
        agent_request = request.agent_request
        session = agent_request.session
        dialect, target = agent_request.dialect.name, agent_request.target
        key = (session.attempt_id, agent_request.branch, dialect, target, agent_request.body)
        identical = self._in_flight.setdefault(key, [])
        retried = [call for call in identical if call.is_retried_by(agent_request)]
        if retried:
            # Of several candidates, prefer a call whose client has disconnected.
            call = min(retried, key=lambda candidate: len(candidate.subscribers))
        else:
            session.calls_started += 1
            session.in_flight += 1
            call = InFlightCall(self, request)
            identical.append(call)
            self._tasks.add(call.task)
            call.task.add_done_callback(functools.partial(self._ended, key, call))
        call.subscribe(agent_request, wake)
        return call

    def unsubscribe(self, call: InFlightCall, wake: Callable[..., None]) -> None:
        """End a subscription, because the request was answered or its client disconnected.

        The last one stops the generation.
        """
        call.subscribers.remove(wake)
        if not call.subscribers:
            call.abandon()

    def _ended(self, key: _RequestKey, call: InFlightCall, task: asyncio.Task[CapturedResponse | Fault]) -> None:
        self._tasks.discard(task)
        call.session.in_flight -= 1
        identical = self._in_flight[key]
        identical.remove(call)
        if not identical:
            del self._in_flight[key]

    async def record_invalid(self, request: AgentRequest, error: InvalidRequest) -> Fault:
        """Store an invalid request as a failed call. Returns the fault for the agent."""
        try:
            model, _ = request.dialect.peek(request.body, request.target)
        except InvalidRequest:
            model = ""  # not even the model name can be read
        recorder = _CallRecorder(self, request, self.models.server_for(model), model, {})
        fault = await recorder.commit(error)
        assert isinstance(fault, Fault)
        return fault

    async def drain(self, timeout_s: float) -> None:
        """Wait for the calls in flight, then abandon the rest. All of them are committed when this returns.

        If it is cancelled, it abandons the rest at once.
        """
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=timeout_s)
        finally:
            for identical in list(self._in_flight.values()):
                for call in identical:
                    call.abandon()
            if self._tasks:
                await asyncio.wait(self._tasks)
