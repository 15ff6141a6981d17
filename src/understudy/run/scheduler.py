"""Many rollouts at once: workers, retries of infrastructure failures, heartbeats, a clean stop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from understudy.errors import AgentError, StoreError, UnderstudyError
from understudy.store.store import Store
from understudy.types import Attempt, ErrorInfo, Rollout, Verdict, info_of

MAX_ATTEMPTS = 3
HEARTBEAT_S = 5.0

_log = logging.getLogger(__name__)

Execute = Callable[[Rollout, Attempt, bool, Callable[[], None]], Awaitable[Verdict]]
"""Carries out an attempt; told whether it is the rollout's last one, and what to call when its agent is done."""

Ahead = Callable[[Rollout], Awaitable[None]]
"""Makes ready what a rollout will need, while it waits for its turn; may raise, for the attempt meets it again."""


async def _nothing(rollout: Rollout) -> None:
    pass


@dataclass
class Progress:
    """Where a run stands. `done` counts rollouts that ended, those of an earlier start of the run included."""

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

    An agent that is done gives its place to the next rollout while its patch is graded; as many rollouts as there
    are places are graded, or made ready, beside them. A place is free again `cooldown_s` seconds after its agent.
    `places` are those that it shares with other schedulers.

    When attempt after attempt fails at one boundary, of more rollouts than one and with none ending well in
    between, what they need is broken: the run stops with that error and leaves the rest queued.
    """

    store: Store
    run_id: str
    execute: Execute
    concurrency: int
    progress: Progress
    retry_pause_s: float = 1.0
    cooldown_s: float = 0.0
    ahead: Ahead = _nothing
    places: asyncio.Semaphore | None = None
    _queue: deque[str] = field(default_factory=deque[str])
    _active: set[str] = field(default_factory=set[str])
    _draining: bool = False
    _failed_in_a_row: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def __post_init__(self) -> None:
        self._places = self.places or asyncio.Semaphore(self.concurrency)

    def drain(self) -> None:
        """Start nothing new; rollouts that run are let finish."""
        self._draining = True

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining

    async def run(self) -> None:
        """Run until nothing is left to do or `drain` was called.

        Raises StoreError at once when the store cannot take an attempt's end, and the last UnderstudyError when
        failures in a row show that going on is useless.
        """
        open_statuses = ("queuing", "requeuing")
        self._queue.extend(r.id for r in self.store.rollouts(self.run_id) if r.status in open_statuses)
        heartbeat = asyncio.create_task(self._heartbeat())
        workers = [asyncio.create_task(self._worker()) for _ in range(2 * self.concurrency)]
        work = asyncio.gather(*workers)
        try:
            # A heartbeat that cannot be written ends the run as any other failure of the store does.
            done, _ = await asyncio.wait((work, heartbeat), return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            # A worker that raised leaves the others running: they are stopped, and their sandboxes closed.
            for task in (heartbeat, *workers):
                task.cancel()
            await asyncio.gather(heartbeat, work, *workers, return_exceptions=True)

    async def _worker(self) -> None:
        while self._queue and not self._draining:
            await self._rollout(self._queue.popleft())

    async def _rollout(self, rollout_id: str) -> None:
        """Give a rollout its attempts until it ends or they are used up."""
        place = _Place(self._places, self.progress, self.cooldown_s)
        if self._places.locked():
            await self._make_ready(rollout_id)
        try:
            for tries_left in range(MAX_ATTEMPTS - 1, -1, -1):
                await place.take()
                if self._draining:
                    return
                attempt = await asyncio.wrap_future(self.store.start_attempt(rollout_id))
                error = await self._attempt(rollout_id, attempt, place.leave, final=tries_left == 0)
                if error is None:
                    self._failed_in_a_row.clear()
                    return
                if tries_left == 0 or not error.retryable:
                    self.progress.done += 1
                    self.progress.failed += 1
                self._give_up_when_useless(rollout_id, error)
                if tries_left == 0 or not error.retryable:
                    return
                self.progress.retried += 1
                if self._draining:
                    return
                await asyncio.sleep(self.retry_pause_s * (MAX_ATTEMPTS - tries_left))
        except BaseException:
            self._draining = True  # the run ends here: nothing new may begin in this one's place
            raise
        finally:
            place.leave()

    async def _make_ready(self, rollout_id: str) -> None:
        """Have made ready what a rollout will need; an attempt meets again what goes wrong, and stores it."""
        try:
            await self.ahead(self.store.rollout(rollout_id))
        except StoreError:
            raise
        except Exception as fault:  # noqa: BLE001 - what is wrong with one rollout does not end the others
            _log.debug("rollout %s cannot be made ready ahead: %s", rollout_id, fault)

    async def _attempt(
        self, rollout_id: str, attempt: Attempt, leave: Callable[[], None], *, final: bool
    ) -> UnderstudyError | None:
        """Execute one attempt; returns the error when it was an infrastructure failure, after storing it."""
        self._active.add(attempt.id)
        try:
            verdict = await self.execute(self.store.rollout(rollout_id), attempt, final, leave)
        except StoreError:
            raise
        except Exception as fault:  # noqa: BLE001 - what is wrong with one attempt does not end the others
            error = fault if isinstance(fault, UnderstudyError) else _unforeseen(fault)
            info = info_of(error)
            ended = "failed" if final or not error.retryable else "requeuing"
            await asyncio.wrap_future(self.store.finish_attempt(attempt.id, "failed", ended, error=info))
            self.progress.last_error = info
            return error
        finally:
            self._active.discard(attempt.id)
        self.progress.done += 1
        self.progress.solved += verdict.reward == 1.0
        return None

    def _give_up_when_useless(self, rollout_id: str, error: UnderstudyError) -> None:
        """Raise the error when the last attempts all failed where this one did."""
        row = self._failed_in_a_row
        telling = error.retryable and not (isinstance(error, AgentError) and error.had_answers)
        if not telling or (row and row[-1][0] != error.boundary):
            row.clear()
        if telling:
            row.append((error.boundary, rollout_id))
        if len(row) > max(MAX_ATTEMPTS, self.concurrency + 1) and len({rollout for _, rollout in row}) > 1:
            raise type(error)(
                f"{len(row)} attempts in a row failed at the {error.boundary}; the rest is left queued. "
                f"Mend this and give the same command again: {error}"
            )

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._active:
                await asyncio.wrap_future(self.store.heartbeat(sorted(self._active)))


class _Place:
    """One of the places for agents, as one rollout holds it or not."""

    def __init__(self, places: asyncio.Semaphore, progress: Progress, cooldown_s: float) -> None:
        self._places = places
        self._progress = progress
        self._cooldown_s = cooldown_s
        self._held = False

    async def take(self) -> None:
        """Wait for a place, unless it is held."""
        if not self._held:
            await self._places.acquire()
            self._held = True
            self._progress.running += 1

    def leave(self) -> None:
        """Give the place to another, if it is held, once it has cooled down."""
        if self._held:
            self._held = False
            self._progress.running -= 1
            asyncio.get_running_loop().call_later(self._cooldown_s, self._places.release)


def _unforeseen(fault: Exception) -> UnderstudyError:
    """A fault of our own as an error that can be stored; trying again does not mend it."""
    _log.error("an attempt met a fault of Understudy's own", exc_info=fault)
    return UnderstudyError(
        f"{type(fault).__name__}: {fault}; this is a fault of Understudy's own, please report it"
    )
