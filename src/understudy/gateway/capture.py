"""Capture: every model request becomes one call, and its answer is let go only when that call is durable."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import secrets
import time
from concurrent.futures import Future
from typing import Protocol

from msgspec import Struct

from understudy.errors import UnderstudyError
from understudy.gateway.backends.base import Backend, Generation
from understudy.gateway.dialects.base import Dialect, Incoming, Message
from understudy.gateway.faults import Abandoned, Fault, InvalidRequest, fault_of, too_deep
from understudy.gateway.keys import Branch, Session
from understudy.types import Call, CallStatus, Usage, info_of

_log = logging.getLogger(__name__)


class CallSink(Protocol):
    """Where calls are kept: the store, as the gateway sees it."""

    def append_call(self, call: Call) -> Future[None]:
        """Keep a call; the future is done when it is durable, and fails with StoreError when it cannot be."""
        ...


class Asked(Struct, frozen=True):
    """A request with everything that decides its call."""

    session: Session
    branch: Branch
    dialect: Dialect
    body: bytes


class Exchange:
    """One generation and its call, shared by all identical requests that are waiting for it.

    `task` ends with the message's JSON or with a Fault; it never raises what was foreseen.
    """

    def __init__(self, capture: Capture, asked: Asked, incoming: Incoming) -> None:
        self.waiting = 0
        self.abandoned = False
        self._sealed = False
        self.task = asyncio.get_running_loop().create_task(self._run(capture, asked, incoming))

    def abandon(self) -> None:
        """Stop generating, unless the answer is there: then it is committed, read or not."""
        if not self._sealed:
            self._sealed = self.abandoned = True
            self.task.cancel()

    async def _run(self, capture: Capture, asked: Asked, incoming: Incoming) -> bytes | Fault:
        record = _Record(asked, capture.backend, incoming.model, sampling=incoming.chat.sampling)
        outcome: Message | UnderstudyError
        generation: Generation | None = None
        try:
            generation = await capture.backend.generate(incoming.chat)
            outcome = asked.dialect.message(generation, incoming, asked.session, record.message_id)
        except asyncio.CancelledError:
            # Only `abandon` cancels this task, and nobody is left who waits for the cancellation itself.
            outcome = Abandoned("the agent left, or the gateway stopped, before there was an answer")
        except UnderstudyError as error:
            outcome = error
        except RecursionError:
            outcome = too_deep()
        self._sealed = True
        return await record.commit(capture.sink, outcome, generation)


class _Record:
    """A call in the making: what is known when it begins, then how it ended."""

    def __init__(self, asked: Asked, backend: Backend, model: str, *, sampling: dict[str, object]) -> None:
        self._asked = asked
        self._backend = backend
        self._model = model
        self._sampling = sampling
        self._id = secrets.token_hex(12)
        self._parent = asked.session.parent(asked.branch)
        self._started = time.time()

    @property
    def message_id(self) -> str:
        """The id that the agent sees, so that its own log can be laid beside the calls."""
        return f"msg_{self._id}"

    async def commit(
        self, sink: CallSink, outcome: Message | UnderstudyError, generation: Generation | None
    ) -> bytes | Fault:
        """Make the call durable, then return what the agent may see. A failed commit is a Fault."""
        session, branch = self._asked.session, self._asked.branch
        call = self._call(outcome, generation)
        try:
            await asyncio.wrap_future(sink.append_call(call))
        except UnderstudyError as error:
            _log.error("call %s of attempt %s is lost: %s", call.id, call.attempt_id, error)
            return fault_of(error)
        if isinstance(outcome, UnderstudyError):
            return fault_of(outcome)
        session.answered(branch, call.id, outcome.sampled)
        return outcome.body

    def _call(self, outcome: Message | UnderstudyError, generation: Generation | None) -> Call:
        asked = self._asked
        failed = isinstance(outcome, UnderstudyError)
        return Call(
            id=f"call_{self._id}",
            attempt_id=asked.session.attempt_id,
            sequence=asked.session.next_sequence(),
            dialect=asked.dialect.name,
            requested_model=self._model,
            backend=self._backend.name,
            backend_model=generation.model if generation else self._backend.model,
            request=asked.body,
            response=asked.dialect.error(fault_of(outcome)).body if failed else outcome.body,
            status=_status(outcome),
            started_at=self._started,
            ended_at=time.time(),
            parent_id=self._parent,
            session_id=asked.branch.session_id,
            agent_id=asked.branch.agent_id,
            policy_version=generation.policy_version if generation else None,
            prompt_token_ids=generation.prompt_token_ids if generation else None,
            completion_token_ids=generation.completion_token_ids if generation else None,
            logprobs=generation.logprobs if generation else None,
            finish_reason=generation.finish_reason if generation else None,
            usage=generation.usage if generation else Usage(),
            sampling=generation.sampling if generation else self._sampling,
            error=info_of(outcome) if failed else None,
        )


def _status(outcome: Message | UnderstudyError) -> CallStatus:
    match outcome:
        case Abandoned():
            return "abandoned"
        case UnderstudyError():
            return "error"
        case _:
            return "ok"


_Key = tuple[str, Branch, bytes]


class Capture:
    """The exchanges that are under way in one gateway."""

    def __init__(self, backend: Backend, sink: CallSink) -> None:
        self.backend = backend
        self.sink = sink
        self._running: dict[_Key, Exchange] = {}
        self._tasks: set[asyncio.Task[bytes | Fault]] = set()

    def join(self, asked: Asked, incoming: Incoming) -> Exchange:
        """The exchange for a request: the one under way for the same bytes on the same branch, else a new one.

        Every join is matched by one `leave`.
        """
        key = (asked.session.attempt_id, asked.branch, hashlib.sha256(asked.body).digest())
        exchange = self._running.get(key)
        if exchange is None or exchange.abandoned:
            asked.session.begun += 1
            exchange = self._running[key] = Exchange(self, asked, incoming)
            self._tasks.add(exchange.task)
            exchange.task.add_done_callback(functools.partial(self._ended, key, exchange))
        exchange.waiting += 1
        return exchange

    def leave(self, exchange: Exchange) -> None:
        """One request has its answer, or its client is gone; without anyone who waits the generation stops."""
        exchange.waiting -= 1
        if exchange.waiting == 0:
            exchange.abandon()

    def _ended(self, key: _Key, exchange: Exchange, task: asyncio.Task[bytes | Fault]) -> None:
        self._tasks.discard(task)
        if self._running.get(key) is exchange:
            del self._running[key]

    async def refuse(self, asked: Asked, error: InvalidRequest) -> Fault:
        """Keep a request that could not be understood as a failed call."""
        record = _Record(asked, self.backend, "", sampling={})
        answer = await record.commit(self.sink, error, None)
        assert isinstance(answer, Fault)
        return answer

    async def drain(self, timeout_s: float) -> None:
        """Wait for what is under way, then abandon the rest; all of it is committed when this returns."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for exchange in list(self._running.values()):
            exchange.abandon()
        if self._tasks:
            await asyncio.wait(self._tasks)
