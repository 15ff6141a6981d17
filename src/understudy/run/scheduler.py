"""Runs many rollouts at once: concurrency, retries of infrastructure failures, heartbeats, a clean stop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from understudy.errors import AgentError, StoreError, UnderstudyError
from understudy.run.engine_load import AgentSlots
from understudy.run.store_reads import read_stored
from understudy.store import Store
from understudy.store.runs import Lease
from understudy.types import Attempt, ErrorInfo, Rollout, Verdict, info_of, is_solved

MAX_ATTEMPTS = 3
HEARTBEAT_S = 5.0

_log = logging.getLogger(__name__)

ExecuteAttempt = Callable[[Rollout, Attempt, bool, Callable[[], None]], Awaitable[Verdict]]
"""Executes an attempt.

It is told whether this is the rollout's last one, and what to call when its agent is done.
"""

PrepareRollout = Callable[[Rollout], Awaitable[None]]
"""Prepares what a rollout needs while it waits. Errors are ignored, because the attempt would raise them again."""


async def _no_preparation(rollout: Rollout) -> None:
    pass


@dataclass
class RunProgress:
    """A run's progress. `done` counts finished rollouts, including those of earlier invocations."""

    total: int
    done: int = 0
    solved: int = 0
    failed: int = 0
    running: int = 0
    retried: int = 0
    last_error: ErrorInfo | None = None


@dataclass
class Scheduler:
    """Runs every open rollout of a run to its end, with `concurrency` agents at a time.

    When an agent is done, the next rollout gets its slot while its patch is graded; besides the agents, as many
    rollouts as there are slots are being graded or prepared. A slot is free again `cooldown_s` seconds after its
    agent is done. `shared_slots` are slots shared with other schedulers, or of which there may be fewer for a
    while. With a `lease`, other processes can see
    who works on the run.

    An attempt with an infrastructure failure is retried, up to `MAX_ATTEMPTS` attempts in all. If many attempts in
    a row, of more than one rollout, fail at the same boundary (sandbox, backend, ...), something that all need is
    broken: the run stops with that error and leaves the rest queued.
    """

    store: Store
    run_id: str
    execute: ExecuteAttempt
    concurrency: int
    progress: RunProgress
    retry_pause_s: float = 1.0
    cooldown_s: float = 0.0
    prepare: PrepareRollout = _no_preparation
    shared_slots: AgentSlots | None = None
    lease: Lease | None = None
    _queue: deque[str] = field(default_factory=deque[str])
    _active: set[str] = field(default_factory=set[str])
    _draining: bool = False

    def __post_init__(self) -> None:
        self._slots = self.shared_slots or AgentSlots(self.concurrency)
        self._streak = FailureStreak(self.concurrency)

    def drain(self) -> None:
        """Start nothing new. Running rollouts are finished."""
        self._draining = True

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining

    async def run(self) -> None:
        """Run until nothing is left to do, or `drain` was called and running rollouts ended.

        Raises StoreError at once if an attempt's result cannot be stored, and the last UnderstudyError if failures
        in a row show that continuing is pointless.
        """
        open_statuses = ("queuing", "requeuing")
        rollouts = await read_stored(self.store.runs.rollouts, self.run_id)
        self._queue.extend(rollout.id for rollout in rollouts if rollout.status in open_statuses)
        heartbeat = asyncio.create_task(self._heartbeat())
        workers = [asyncio.create_task(self._worker()) for _ in range(2 * self.concurrency)]
        work = asyncio.gather(*workers)
        try:
            # A heartbeat that cannot be written ends the run, like any other failure of the store.
            done, _ = await asyncio.wait((work, heartbeat), return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                finished.result()
        finally:
            # gather() lets other workers continue when one raises, so cancel them to close their sandboxes.
            for task in (heartbeat, *workers):
                task.cancel()
            await asyncio.gather(heartbeat, work, *workers, return_exceptions=True)

    async def _worker(self) -> None:
        while self._queue and not self._draining:
            await self._run_rollout(self._queue.popleft())

    async def _run_rollout(self, rollout_id: str) -> None:
        """Start attempts of a rollout until one succeeds or none is left."""
        slot = AgentSlot(self._slots, self.progress, self.cooldown_s)
        if self._slots.locked():
            await self._prepare(rollout_id)
        try:
            for tries_left in range(MAX_ATTEMPTS - 1, -1, -1):
                await slot.acquire()
                if self._draining:
                    return
                attempt = await asyncio.wrap_future(self.store.runs.start_attempt(rollout_id, self.lease))
                error = await self._run_attempt(rollout_id, attempt, slot.release, final=tries_left == 0)
                if error is None:
                    self._streak.clear()
                    return
                if tries_left == 0 or not error.retryable:
                    self.progress.done += 1
                    self.progress.failed += 1
                if self._streak.add(rollout_id, error):
                    raise type(error)(
                        f"{self._streak}: {error}; the rest is left queued. Correct what the error names, then "
                        "run the same command again; finished rollouts are not repeated"
                    )
                if tries_left == 0 or not error.retryable:
                    return
                self.progress.retried += 1
                if self._draining:
                    return
                await asyncio.sleep(self.retry_pause_s * (MAX_ATTEMPTS - tries_left))
        except BaseException:
            self._draining = True  # the whole run ends here, so no other worker may start anything new
            raise
        finally:
            slot.release()

    async def _prepare(self, rollout_id: str) -> None:
        """Prepare what a rollout needs.

        Errors are only logged, because the attempt will raise and store them again.
        """
        try:
            await self.prepare(await read_stored(self.store.runs.rollout, rollout_id))
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of one rollout must not end the others
            _log.debug("rollout %s cannot be prepared ahead of its turn: %s", rollout_id, error)

    async def _run_attempt(
        self, rollout_id: str, attempt: Attempt, release_slot: Callable[[], None], *, final: bool
    ) -> UnderstudyError | None:
        """Execute one attempt. An infrastructure failure is stored and returned."""
        self._active.add(attempt.id)
        try:
            rollout = await read_stored(self.store.runs.rollout, rollout_id)
            verdict = await self.execute(rollout, attempt, final, release_slot)
        except StoreError:
            raise
        except Exception as raised:  # noqa: BLE001 - an error of one attempt must not end the others
            error = raised if isinstance(raised, UnderstudyError) else internal_error(raised)
            info = info_of(error)
            rollout_status = "failed" if final or not error.retryable else "requeuing"
            await asyncio.wrap_future(
                self.store.runs.finish_attempt(attempt.id, "failed", rollout_status, error=info, logs=error.logs)
            )
            self.progress.last_error = info
            return error
        finally:
            self._active.discard(attempt.id)
        self.progress.done += 1
        self.progress.solved += is_solved(verdict.reward)
        return None

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._active and self.lease is None:
                await asyncio.wrap_future(self.store.runs.heartbeat(sorted(self._active)))
            elif self._active and self.lease is not None:
                await asyncio.wrap_future(self.store.leases.renew(self.lease, sorted(self._active)))


class FailureStreak:
    """Consecutive attempts that failed at the same boundary. Its text says how many, and where."""

    def __init__(self, concurrency: int) -> None:
        self._max_failures = max(MAX_ATTEMPTS, concurrency + 1)
        self._failures: list[tuple[str, str]] = []

    def add(self, rollout_id: str, error: UnderstudyError) -> bool:
        """Count a failure.

        Returns whether there are so many, of more than one rollout, that continuing is pointless.
        """
        failures = self._failures
        counts = error.retryable and not (isinstance(error, AgentError) and error.had_answers)
        if not counts or (failures and failures[-1][0] != error.boundary):
            failures.clear()
        if counts:
            failures.append((error.boundary, rollout_id))
        return len(failures) > self._max_failures and len({rollout for _, rollout in failures}) > 1

    def clear(self) -> None:
        """Reset the count, because an attempt succeeded."""
        self._failures.clear()

    def __str__(self) -> str:
        return f"{len(self._failures)} attempts in a row failed at the {self._failures[-1][0]}"


class AgentSlot:
    """A slot for an agent. A rollout holds it while its agent works."""

    def __init__(self, slots: AgentSlots, progress: RunProgress, cooldown_s: float) -> None:
        self._slots = slots
        self._progress = progress
        self._cooldown_s = cooldown_s
        self._held = False

    async def acquire(self) -> None:
        """Wait for a slot, unless this rollout already holds one."""
        if not self._held:
            await self._slots.acquire()
            self._held = True
            self._progress.running += 1

    def release(self) -> None:
        """Release the slot after the cooldown, if it is held."""
        if self._held:
            self._held = False
            self._progress.running -= 1
            asyncio.get_running_loop().call_later(self._cooldown_s, self._slots.release)


def internal_error(raised: Exception) -> UnderstudyError:
    """Convert an unexpected exception to an error that can be stored. A retry would not help."""
    _log.error("internal error of Understudy, which ends an attempt; please report it", exc_info=raised)
    return UnderstudyError(
        f"internal error: {type(raised).__name__}: {raised}; this is a bug in Understudy: please report it. The "
        "rollout has failed, without a reward"
    )
