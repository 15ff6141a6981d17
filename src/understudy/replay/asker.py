"""One ask: reserved, written down, sent, settled; and sent again where that helps and may be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from understudy.replay.budget import CostBudget, to_dollars, to_units
from understudy.replay.outcome import AskOutcome, outcome_of
from understudy.replay.requests import TeacherRequest, worst_cost
from understudy.replay.teacher_state import TeacherState
from understudy.replay.teachers import Teacher
from understudy.store.asks import AskRepository, AskStatus, StoredAsk
from understudy.types import Call, ErrorInfo

REFUSED = "Refused"
"""The type of the error of an ask that would fail as well another time: it is not sent again by itself."""

BILLED_TRIES = 2
"""How often an ask is sent at the most whose tries may have been billed: what is broken must not use up all."""

_WORDS = {"never": REFUSED, "again": "Unavailable", "dismiss": "Dismissed", "doubt": "Dismissed"}


class AskProgress(Struct):
    """Where a replay stands. `total` asks are to be sent, as it was estimated; the judge's are not in it."""

    total: int = 0
    ended: int = 0
    under_way: int = 0
    cost_usd: float = 0.0
    held_usd: float = 0.0
    stopping: bool = False


class Asker:
    """Asks, at most `concurrency` of them at a time and within a ceiling, until `stopped` is set."""

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
        self, ask: StoredAsk, make: Callable[[], TeacherRequest], teacher_state: TeacherState
    ) -> Call | None:
        """Have an ask answered, in several tries where that helps. The call that answered it, None: none did."""
        tries = teacher_state.teacher.config.tries
        result: AskOutcome | None = None
        async with teacher_state.slots:
            for tried in range(1, tries + 1):
                await self._wait_for_slot(teacher_state)
                try:
                    if self._stopped.is_set() or teacher_state.dismissed is not None:
                        break
                    request = make()
                    amount = self._worst(teacher_state.teacher, request)
                    if not await self.budget.reserve(amount, self._stopped):
                        # One that was tried before has failed, and is counted as that.
                        teacher_state.tally.unaffordable += result is None and not self._stopped.is_set()
                        break
                    ask, result = await self._try(ask, request, amount, teacher_state)
                finally:
                    self._slots.release()
                if result.then != "again" or tried >= (min(tries, BILLED_TRIES) if result.billed else tries):
                    break
                teacher_state.pause(tried, result.retry_after_s)
        if result is None:
            return None
        self._end(ask, result, teacher_state)
        return result.call if result.then == "none" else None

    async def _wait_for_slot(self, teacher_state: TeacherState) -> None:
        """Returns with a place among the asks under way, when the teacher is not to be left alone."""
        while True:
            await teacher_state.rested(self._stopped)
            await self._slots.acquire()
            if not teacher_state.resting or self._stopped.is_set():
                return
            self._slots.release()

    def _worst(self, teacher: Teacher, request: TeacherRequest) -> int:
        price = teacher.price
        return 0 if price is None else to_units(worst_cost(price, request.most_tokens, teacher.config.max_tokens))

    async def _try(
        self, ask: StoredAsk, request: TeacherRequest, amount: int, teacher_state: TeacherState
    ) -> tuple[StoredAsk, AskOutcome]:
        """Send an ask once, within what was reserved for it."""
        assert teacher_state.line is not None
        # What an earlier process held for a try whose end it did not see counts as spent.
        before = (ask.cost_usd or 0.0) + (ask.reserved_usd or 0.0)
        priced = teacher_state.teacher.price is not None
        ask = msgspec.structs.replace(
            ask,
            status="asked",
            asked_at=time.time(),
            cost_usd=before if priced else None,
            reserved_usd=to_dollars(amount) if priced else None,
            error=None,
            ended_at=None,
        )
        self._under_way(1)
        spent = amount
        try:
            await asyncio.wrap_future(self._asks.add(ask))
            teacher_state.tally.tries += 1
            result = outcome_of(await teacher_state.line.send(ask.id, request.path, request.body))
            spent = billed_cost(result.call, amount) if result.billed else 0
            if result.then == "none":
                ask = await self.keep(ask, "answered", spent, call=result.call)
            else:
                ask = await self.keep(ask, "failed", spent, error=result)
        finally:
            self.budget.settle(amount, spent)
            self._under_way(-1)
        self._check(result.call, request, teacher_state)
        return ask, result

    async def keep(
        self,
        ask: StoredAsk,
        status: AskStatus,
        spent: int,
        *,
        call: Call | None = None,
        error: AskOutcome | None = None,
    ) -> StoredAsk:
        """Write down how a try of an ask ended, and what it cost."""
        priced = ask.reserved_usd is not None
        info = None
        if error is not None and error.error is not None:
            info = ErrorInfo(error.error.boundary, _WORDS[error.then], error.error.message)
        ask = msgspec.structs.replace(
            ask,
            status=status,
            reserved_usd=0.0 if priced else None,
            cost_usd=(ask.cost_usd or 0.0) + to_dollars(spent) if priced else None,
            call_id=None if call is None else call.id,
            error=info,
            ended_at=time.time(),
        )
        await asyncio.wrap_future(self._asks.add(ask))
        return ask

    def _check(self, call: Call | None, request: TeacherRequest, teacher_state: TeacherState) -> None:
        """Notice a teacher that bills more than it was asked for: what it can cost is not known any more."""
        if call is None:
            return
        usage, limit = call.usage, teacher_state.teacher.config.max_tokens
        if usage.completion_tokens <= limit and usage.prompt_tokens <= request.most_tokens:
            return
        teacher_state.tally.overruns += 1
        if self.budget.limit is not None:
            teacher_state.dismiss(
                f"it billed {usage.prompt_tokens}+{usage.completion_tokens} tokens, where {request.most_tokens}+"
                f"{limit} were the most it was asked for, so its costs cannot be kept below a budget"
            )

    def _end(self, ask: StoredAsk, result: AskOutcome, teacher_state: TeacherState) -> None:
        tally = teacher_state.tally
        teacher_state.note(result)
        if ask.kind == "teacher":
            self._progress.ended += 1
        if result.then == "none" and result.call is not None:
            tally.answered += 1
            tally.prompt_tokens += result.call.usage.prompt_tokens
            tally.completion_tokens += result.call.usage.completion_tokens
        else:
            tally.failed += 1
            tally.why[result.error.message[:200] if result.error else "unknown"] += 1

    def _under_way(self, change: int) -> None:
        self._progress.under_way += change
        self._progress.cost_usd = to_dollars(self.budget.spent)
        self._progress.held_usd = to_dollars(self.budget.held)


def billed_cost(call: Call | None, amount: int) -> int:
    """What a try cost: as its usage tells, else the most that it can have been."""
    has_usage = call is not None and (call.usage.prompt_tokens > 0 and call.usage.completion_tokens > 0)
    if call is None or call.cost_usd is None or not has_usage:
        return amount
    return to_units(call.cost_usd)
