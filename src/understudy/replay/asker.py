"""Asks a teacher: reserves the cost, stores the ask, sends it, settles the cost, and retries if that may help.

Besides `Asker` this has the cost budget of a replay, the interpretation of the gateway's replies, and the state of
a teacher.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import msgspec
from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.gateway.backends.http import NotConnectedError
from understudy.gateway.errors import Abandoned
from understudy.replay.gateways import AskReply, TeacherConnection
from understudy.replay.requests import TeacherRequest, worst_cost
from understudy.replay.teachers import Teacher
from understudy.store.asks import AskRepository, AskStatus, StoredAsk
from understudy.types import Call, ErrorInfo
from understudy.wire.errors import ContextOverflow, InvalidRequest

_MAX_USD = 1e9
UNITS = 1_000_000_000
"""Amounts are integers of a billionth of a dollar, rounded up, so that adding them is exact."""


def to_units(usd: float) -> int:
    """Return dollars as units, rounded up (except for errors of the float)."""
    return math.ceil(round(usd * UNITS, 3))


def to_dollars(amount: int) -> float:
    """Return units as dollars."""
    return amount / UNITS


class CostBudget:
    """The budget of a replay (`limit_usd`, None: unlimited), the amount `spent`, and the amount `held` for running
    requests.

    `spent` starts with `before`, which earlier invocations spent or may have spent. It counts real costs where
    they are known, otherwise the highest possible cost. `spent` + `held` never exceeds the limit, unless a teacher
    bills for more than was requested.
    """

    def __init__(self, limit_usd: float | None, before: float = 0.0) -> None:
        if limit_usd is not None and not 0 < limit_usd < _MAX_USD:
            raise ConfigError(
                f"--max-cost is {limit_usd}; expected more than 0 and less than {_MAX_USD:,.0f} US dollars: give "
                "such a number, or leave it out"
            )
        self.limit = None if limit_usd is None else math.floor(round(limit_usd * UNITS, 3))
        self.spent = to_units(before)
        self.held = 0
        self._changed = asyncio.Event()

    def fits(self, amount: int) -> bool:
        """Return whether this amount can be reserved now."""
        return self.limit is None or self.spent + self.held + amount <= self.limit

    def can_never_fit(self, amount: int) -> bool:
        """Return whether this amount can never be reserved, even if all running requests turn out to cost
        nothing.
        """
        return self.limit is not None and self.spent + amount > self.limit

    async def reserve(self, amount: int, stopped: asyncio.Event) -> bool:
        """Reserve an amount; waits while it does not fit only because of running requests.

        Returns False if it does not fit, or `stopped` is set meanwhile (see `wake`).
        """
        while not stopped.is_set() and not self.can_never_fit(amount):
            if self.fits(amount):
                self.held += amount
                return True
            await self._changed.wait()
        return False

    def settle(self, amount: int, spent: int) -> None:
        """Release a reservation of `amount`, of which `spent` was really spent."""
        self.held -= amount
        self.spent += spent
        self.wake()

    def wake(self) -> None:
        """Make all that wait in `reserve` check again."""
        self._changed.set()
        self._changed = asyncio.Event()


NextStep = Literal["answered", "retry", "refused", "unclear", "stop_teacher"]
"""What to do after a try.

"answered": nothing. "retry": try again. "refused": nothing, this ask would fail again. "stop_teacher": ask the
teacher nothing more, all its asks would fail. "unclear": "refused" or "stop_teacher", it is unknown which.
"""

_HTTP_STATUS = re.compile(r"\S+ \S+: status (\d{3}):")
_BROKE_OFF = re.compile(r"\S+ \S+: (?:no response|the response broke off|the stream broke off)")
_RETRY_STATUSES = frozenset({409, 425, 429, 529})
_REQUEST_TIMEOUT = 408
_STOP_STATUSES = frozenset({401, 402})
_UNCLEAR_STATUSES = frozenset({403, 404})
"""Statuses that may be due to a wrong key or model, or to this prompt only: routers return 404 if no model can
read its images, and 403 if a filter rejects it.
"""
_NOT_CONNECTED_ERROR = NotConnectedError.__name__
_UNSENT_ERRORS = frozenset({_NOT_CONNECTED_ERROR, InvalidRequest.__name__, ContextOverflow.__name__})


class AskOutcome(Struct, frozen=True):
    """The result of one try. `billed` is False if certainly nothing was billed; `call` is set if it was
    answered.
    """

    next_step: NextStep
    billed: bool
    error: ErrorInfo | None = None
    call: Call | None = None
    retry_after_s: float | None = None


def outcome_of(reply: AskReply) -> AskOutcome:
    """Return what a reply of the gateway means."""
    call = reply.call
    if call is None:
        # The gateway refused the request before making a call, so nothing was sent to the teacher.
        error = ErrorInfo("gateway", "GatewayError", f"status {reply.status}: {reply.text}")
        retry = reply.status in (_REQUEST_TIMEOUT, 429) or reply.status >= 500
        return AskOutcome("retry" if retry else "refused", False, error, retry_after_s=reply.retry_after_s)
    if call.error is None:
        return AskOutcome("answered", True, call=call)
    next_step, billed = _after_failure(call, call.error)
    return AskOutcome(next_step, billed, call.error, call, reply.retry_after_s)


def _after_failure(call: Call, error: ErrorInfo) -> tuple[NextStep, bool]:
    """Return what to do after a call that failed, and whether it may have been billed."""
    if call.usage.prompt_tokens or call.usage.completion_tokens:
        return "refused", True  # there was a response, but it could not be read
    if error.type in _UNSENT_ERRORS:
        return ("retry" if error.type == _NOT_CONNECTED_ERROR else "refused"), False
    match = _HTTP_STATUS.match(error.message)
    status = int(match[1]) if match else None
    if status is None:
        # The connection broke: the teacher may have generated an answer, or still be generating one.
        retry = error.type == Abandoned.__name__ or _BROKE_OFF.match(error.message) is not None
        return ("retry" if retry else "refused"), True
    if status in _STOP_STATUSES:
        return "stop_teacher", False
    if status in _UNCLEAR_STATUSES:
        return "unclear", False
    if status in _RETRY_STATUSES:
        return "retry", False
    if status >= 500 or status == _REQUEST_TIMEOUT:
        return "retry", True  # the server may have generated, and billed, a part of the answer
    return "refused", False


DISMISSED_AFTER = 5
"""A teacher is no longer asked in this invocation after this many failed asks in a row."""

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""The pause between two tries of an ask doubles each time, within these bounds, unless the teacher requests a
pause.
"""

MAX_REQUESTED_PAUSE_S = 600.0
"""A teacher that requests a longer pause than this is no longer asked in this invocation."""


class AskCounts(Struct):
    """How the asks of one teacher ended in this invocation."""

    answered: int = 0
    recovered: int = 0
    """Asks that had been answered before, and are only recorded now."""
    failed: int = 0
    lost: int = 0
    """Asks that were running when a process died: they count with their highest possible cost, and are not sent
    again.
    """
    refused_before: int = 0
    """Asks that ended in earlier invocations and are not sent again; `answered_before` likewise."""
    answered_before: int = 0
    unaffordable: int = 0
    """Asks that did not fit in the budget."""
    tries: int = 0
    """Requests, of which an ask may need several."""
    overruns: int = 0
    """Answers billed for more tokens than requested."""
    prompt_tokens: int = 0
    """The tokens billed for answers; `completion_tokens` likewise."""
    completion_tokens: int = 0
    dismissed: str | None = None
    """Why the teacher is no longer asked; None while it is."""
    failure_messages: Counter[str] = field(default_factory=Counter[str], name="why")
    """Failed asks by error message."""


class TeacherState:
    """One teacher, or the judge."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.connection: TeacherConnection | None = None
        self.slots = asyncio.Semaphore(teacher.config.concurrency)
        self.counts = AskCounts()
        self._failures = 0
        self._not_before = 0.0

    @property
    def dismissed(self) -> str | None:
        """Why the teacher is no longer asked; None while it is."""
        return self.counts.dismissed

    @property
    def is_paused(self) -> bool:
        """Whether the teacher requested a pause that is not over yet."""
        return time.monotonic() < self._not_before

    def dismiss(self, why: str) -> None:
        """Stop asking the teacher; the first reason is kept."""
        self.counts.dismissed = self.counts.dismissed or why

    def pause(self, tried: int, retry_after_s: float | None) -> None:
        """Pause requests to the teacher for a while; `tried` is the number of tries of the ask."""
        wait = min(FIRST_PAUSE_S * 2 ** (tried - 1), MAX_PAUSE_S) if retry_after_s is None else retry_after_s
        if wait > MAX_REQUESTED_PAUSE_S:
            self.dismiss(
                f"it asks for a pause of {wait:.0f} s, longer than the {MAX_REQUESTED_PAUSE_S:.0f} s that are "
                "waited"
            )
            return
        self._not_before = max(self._not_before, time.monotonic() + wait)

    async def wait_for_pause(self, stopped: asyncio.Event) -> None:
        """Wait until the teacher may be asked again, or until `stopped` is set."""
        while not stopped.is_set() and (seconds_left := self._not_before - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds_left):
                    await stopped.wait()

    def record_end(self, result: AskOutcome) -> None:
        """Record how an ask ended; dismiss the teacher after too many failures in a row."""
        error_message = result.error.message if result.error else ""
        if result.next_step == "stop_teacher":
            self.dismiss(error_message)
        self._failures = self._failures + 1 if result.next_step in ("retry", "unclear") else 0
        if self._failures >= DISMISSED_AFTER:
            self.dismiss(f"{self._failures} asks in a row failed, the last because of: {error_message}")


REFUSED = "Refused"
"""The error type of an ask that would fail again: it is repeated only with --again."""

BILLED_TRIES = 2
"""The most tries of an ask that may have been billed: a broken server must not use up the whole budget."""

_ERROR_TYPES = {"refused": REFUSED, "retry": "Unavailable", "stop_teacher": "Dismissed", "unclear": "Dismissed"}
"""The error types that are stored with failed asks."""


class AskProgress(Struct):
    """The progress of a replay. `total` is the estimated number of asks to send, without the judge's."""

    total: int = 0
    ended: int = 0
    under_way: int = 0
    cost_usd: float = 0.0
    held_usd: float = 0.0
    stopping: bool = False


class Asker:
    """Sends asks, at most `concurrency` at a time and within the budget, until `stopped` is set."""

    def __init__(
        self,
        asks: AskRepository,
        budget: CostBudget,
        concurrency: int,
        stopped: asyncio.Event,
        progress: AskProgress,
    ) -> None:
        self.budget = budget
        self._asks = asks
        self._slots = asyncio.Semaphore(concurrency)
        self._stopped = stopped
        self._progress = progress

    async def ask(
        self, ask: StoredAsk, make_request: Callable[[], TeacherRequest], teacher_state: TeacherState
    ) -> Call | None:
        """Send an ask, with retries where these may help. Returns the call that answered it, or None."""
        tries = teacher_state.teacher.config.tries
        result: AskOutcome | None = None
        async with teacher_state.slots:
            for tried in range(1, tries + 1):
                await self._wait_for_slot(teacher_state)
                try:
                    if self._stopped.is_set() or teacher_state.dismissed is not None:
                        break
                    request = make_request()
                    amount = self._highest_cost(teacher_state.teacher, request)
                    if not await self.budget.reserve(amount, self._stopped):
                        # An ask that was tried already counts as failed, not as unaffordable.
                        teacher_state.counts.unaffordable += result is None and not self._stopped.is_set()
                        break
                    ask, result = await self._try(ask, request, amount, teacher_state)
                finally:
                    self._slots.release()
                if result.next_step != "retry" or tried >= (min(tries, BILLED_TRIES) if result.billed else tries):
                    break
                teacher_state.pause(tried, result.retry_after_s)
        if result is None:
            return None
        self._count_result(ask, result, teacher_state)
        return result.call if result.next_step == "answered" else None

    async def _wait_for_slot(self, teacher_state: TeacherState) -> None:
        """Wait for a free slot, and until the teacher may be asked again."""
        while True:
            await teacher_state.wait_for_pause(self._stopped)
            await self._slots.acquire()
            if not teacher_state.is_paused or self._stopped.is_set():
                return
            self._slots.release()

    def _highest_cost(self, teacher: Teacher, request: TeacherRequest) -> int:
        price = teacher.price
        return (
            0
            if price is None
            else to_units(worst_cost(price, request.size.most_tokens, teacher.config.max_tokens))
        )

    async def _try(
        self, ask: StoredAsk, request: TeacherRequest, amount: int, teacher_state: TeacherState
    ) -> tuple[StoredAsk, AskOutcome]:
        """Send an ask once, at a cost within the reserved amount."""
        assert teacher_state.connection is not None
        # If an earlier process died during a try, the amount that it held counts as spent.
        cost_before = (ask.cost_usd or 0.0) + (ask.reserved_usd or 0.0)
        priced = teacher_state.teacher.price is not None
        ask = msgspec.structs.replace(
            ask,
            status="asked",
            asked_at=time.time(),
            cost_usd=cost_before if priced else None,
            reserved_usd=to_dollars(amount) if priced else None,
            error=None,
            ended_at=None,
        )
        self._under_way(1)
        spent = amount
        try:
            await asyncio.wrap_future(self._asks.add(ask))
            teacher_state.counts.tries += 1
            result = outcome_of(await teacher_state.connection.send(ask.id, request.path, request.body))
            spent = billed_cost(result.call, amount) if result.billed else 0
            if result.next_step == "answered":
                ask = await self.store_result(ask, "answered", spent, call=result.call)
            else:
                ask = await self.store_result(ask, "failed", spent, failure=result)
        finally:
            self.budget.settle(amount, spent)
            self._under_way(-1)
        self._check_overrun(result.call, request, teacher_state)
        return ask, result

    async def store_result(
        self,
        ask: StoredAsk,
        status: AskStatus,
        spent: int,
        *,
        call: Call | None = None,
        failure: AskOutcome | None = None,
    ) -> StoredAsk:
        """Store how a try of an ask ended, and what it cost."""
        priced = ask.reserved_usd is not None
        error = None
        if failure is not None and failure.error is not None:
            error = ErrorInfo(failure.error.boundary, _ERROR_TYPES[failure.next_step], failure.error.message)
        ask = msgspec.structs.replace(
            ask,
            status=status,
            reserved_usd=0.0 if priced else None,
            cost_usd=(ask.cost_usd or 0.0) + to_dollars(spent) if priced else None,
            call_id=None if call is None else call.id,
            error=error,
            ended_at=time.time(),
        )
        await asyncio.wrap_future(self._asks.add(ask))
        return ask

    def _check_overrun(self, call: Call | None, request: TeacherRequest, teacher_state: TeacherState) -> None:
        """Count an overrun if a teacher billed for more than was requested: its highest possible cost is unknown
        then.
        """
        if call is None:
            return
        usage, limit = call.usage, teacher_state.teacher.config.max_tokens
        if usage.completion_tokens <= limit and usage.prompt_tokens <= request.size.most_tokens:
            return
        teacher_state.counts.overruns += 1
        if self.budget.limit is not None:
            teacher_state.dismiss(
                f"it billed {usage.prompt_tokens}+{usage.completion_tokens} tokens, where "
                f"{request.size.most_tokens}+{limit} were the most it was asked for, so its costs cannot be kept "
                "below a budget"
            )

    def _count_result(self, ask: StoredAsk, result: AskOutcome, teacher_state: TeacherState) -> None:
        counts = teacher_state.counts
        teacher_state.record_end(result)
        if ask.kind == "teacher":
            self._progress.ended += 1
        if result.next_step == "answered" and result.call is not None:
            counts.answered += 1
            counts.prompt_tokens += result.call.usage.prompt_tokens
            counts.completion_tokens += result.call.usage.completion_tokens
        else:
            counts.failed += 1
            counts.failure_messages[result.error.message[:200] if result.error else "unknown"] += 1

    def _under_way(self, change: int) -> None:
        self._progress.under_way += change
        self._progress.cost_usd = to_dollars(self.budget.spent)
        self._progress.held_usd = to_dollars(self.budget.held)


def billed_cost(call: Call | None, amount: int) -> int:
    """Return the cost of a try: by its usage if known, otherwise the highest possible cost."""
    has_usage = call is not None and (call.usage.prompt_tokens > 0 and call.usage.completion_tokens > 0)
    if call is None or call.cost_usd is None or not has_usage:
        return amount
    return to_units(call.cost_usd)
