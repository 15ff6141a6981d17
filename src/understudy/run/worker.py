"""A worker: claims rollouts of runs in a store, and executes them with sandboxes and gateways of its own.

Any number of workers on any number of machines may work on a run; each rollout belongs to one worker at a time
(`store.leases`). If a worker dies, its leases expire, and other workers continue with its rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from understudy import __version__
from understudy.agents.registry import make_agent
from understudy.config import cache_dir
from understudy.errors import ConfigError, LeaseLost, SandboxError, StoreError, StoreUnavailable, UnderstudyError
from understudy.run.attempt import RunContext, execute_attempt
from understudy.run.config import RunConfig
from understudy.run.executors import WORKERS_POLL_S, WatchServer
from understudy.run.runner import open_run, validate_tasks
from understudy.run.scheduler import MAX_ATTEMPTS, FailureStreak, internal_error
from understudy.run.store_reads import read_stored
from understudy.sandbox.base import Sandboxes, load_sandboxes
from understudy.store import Store
from understudy.store.leases import ClaimedRollout, OpenRun
from understudy.store.runs import Lease
from understudy.tasks.environment import environment_for
from understudy.types import Rollout, Task, info_of
from understudy.util.text import visible_line

_LEASE_CHECK_PERIOD_S = 3.0
_REOPEN_PAUSE_S = 30.0
"""After how many seconds a run is tried again that could not be opened, for example because its model server
was down.
"""
_RESOLVE_TIMEOUT_S = 120.0
"""For how many seconds a worker that ends when it is idle tries to resolve a host's name."""

_FIRST_PAUSE_S, _MAX_REST_S = 30.0, 600.0
"""How many seconds a run rests after attempts fail in a row: at first, and at most. The time doubles each time."""

_log = logging.getLogger(__name__)


@dataclass
class _OpenedRun:
    """What this worker has opened for a run. `served` names the model servers that answer it; `watch` raises when
    a server ends.
    """

    context: RunContext
    served: str | None
    stack: AsyncExitStack
    watch: asyncio.Task[None] | None = None
    validated: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])

    async def close(self) -> None:
        """Stop its gateway and its server."""
        if self.watch is not None:
            self.watch.cancel()
            await asyncio.gather(self.watch, return_exceptions=True)
        await self.stack.aclose()


class RunWorker:
    """Executes rollouts of some runs, or of any, `capacity` at a time, until it is told to stop.

    `report` gets messages for the user, one line at a time. Belongs to one event loop.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        *,
        capacity: int,
        lease: Lease,
        run_ids: Sequence[str] = (),
        loop: str = "",
        stop_when_idle: bool = False,
        max_starting: int | None = None,
        report: Callable[[str], None] = _log.info,
    ) -> None:
        """`directory` is for sockets and temporary files; its path must be short, since a socket's path has at
        most 107 bytes.

        Only runs with these `run_ids`, or only those of a training `loop`, are executed, if any are given.
        Nothing is claimed while `max_starting` attempts of all workers together wait for their sandbox.
        """
        self._store = store
        self._directory = directory
        self._capacity = capacity
        self._lease = lease
        self._run_ids = frozenset(run_ids)
        self._loop = loop
        self._stop_when_idle = stop_when_idle
        self._max_starting = max_starting
        self._claims_later = False
        """Whether something is left to claim once a run or a rollout has rested, or fewer sandboxes start."""
        self._report = report
        self._opened: dict[str, _OpenedRun] = {}
        self._reasons_not_to_claim: dict[str, str] = {}
        self._retry_at: dict[str, float] = {}
        self._refused: dict[str, str | None] = {}
        """Runs that this worker cannot execute → the release that had enqueued them then."""
        self.unresolved: dict[str, str] = {}
        """Runs that were given up because a host's name did not resolve → the error."""
        self._unresolved_since: dict[str, float] = {}
        self._streaks: dict[str, FailureStreak] = {}
        self._rest_seconds: dict[str, float] = {}
        self._store_fault: StoreError | None = None
        self._sandboxes: dict[str, Sandboxes] = {}
        self._active: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._stopping = asyncio.Event()
        self._change: asyncio.Task[None] | None = None
        """Waits for a change of the store, also while rollouts are claimed for slots that became free."""
        self.executed = 0

    def drain(self) -> bool:
        """Claim nothing more; running rollouts are finished. Returns False if it was called before."""
        first = not self._stopping.is_set()
        self._stopping.set()
        return first

    async def run(self) -> int:
        """Work until `drain` was called and nothing runs. Returns how many attempts ended here.

        If it is cancelled, running rollouts are requeued for other workers. Raises StoreError if the store cannot
        be written any more, and the error of a model server that ended.
        """
        await self._announce()
        leases = asyncio.create_task(self._keep_leases())
        try:
            while not (self._stopping.is_set() and not self._active):
                claimed = 0 if self._stopping.is_set() else await self._claim()
                for task in (leases, *(opened.watch for opened in self._opened.values())):
                    if task is not None and task.done():
                        task.result()
                if self._store_fault is not None:
                    raise self._store_fault
                if not claimed:
                    if self._stop_when_idle and not self._active and not self._claims_later:
                        break
                    await self._wait_for_change()
        finally:
            tasks = (leases, *self._tasks())
            for task in tasks:
                task.cancel()
            # Whoever waits for a change is in a thread, which nothing cancels, and reads the store.
            changes = () if self._change is None else (self._change,)
            await asyncio.gather(*tasks, *changes, return_exceptions=True)
            try:
                await asyncio.wrap_future(self._store.leases.give_back(self._lease))
            except StoreError as error:
                _log.warning(
                    "the leases of this worker could not be given back, so its attempts are made again once they "
                    "have expired, in %g s: %s",
                    self._lease.seconds,
                    error,
                )
            finally:
                for run_id in list(self._opened):
                    await self._opened.pop(run_id).close()
                for sandboxes in self._sandboxes.values():
                    await sandboxes.aclose()
        return self.executed

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self._active.values()]

    async def _wait_for_change(self) -> None:
        if self._change is None or self._change.done():
            self._change = asyncio.create_task(asyncio.to_thread(self._store.wait_for_change, WORKERS_POLL_S))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            stop_waiters = (stopping,) if not self._stopping.is_set() else ()
            await asyncio.wait((self._change, *stop_waiters, *self._tasks()), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._change.done():
            self._change.result()

    async def _claim(self) -> int:
        """Claim as many rollouts as there is room for, and start them. Returns how many."""
        if (room := self._capacity - len(self._active)) <= 0:
            return 0
        open_runs = await read_stored(self._store.leases.open_runs)
        open_runs = [run for run in open_runs if self._is_mine(run)]
        for run in open_runs:
            if self._refused.get(run.id, run.release) != run.release:
                del self._refused[run.id]  # the run was enqueued again
                await self._allow_claims(run.id)
            if run.release != __version__ and run.id not in self._refused:
                await self._refuse(
                    run,
                    f"it was enqueued by Understudy {run.release}, this is {__version__}; start workers of that "
                    "release, or enqueue the run again with this one",
                )
        open_runs = [run for run in open_runs if run.id not in self._refused]
        resting = [run.id for run in open_runs if not self._has_rested(run.id)]
        open_runs = [run for run in open_runs if run.id not in resting]
        for run in open_runs:
            if run.id not in self._opened or self._is_outdated(run):
                await self._close_idle({run.id for run in open_runs if not self._is_outdated(run)})
                if run.id not in self._opened:
                    await self._open(run)
        ready = [run.id for run in open_runs if run.id in self._opened and not self._is_outdated(run)]
        resting += [run.id for run in open_runs if not self._has_rested(run.id)]  # they could not be opened now
        # What is ready and cannot be claimed was just tried, or waits until fewer sandboxes are starting.
        self._claims_later = bool(resting or ready)
        if not ready:
            return 0
        claims: list[ClaimedRollout] = []
        for run_id in [run_id for run_id in ready if run_id in self._rest_seconds]:
            ready.remove(run_id)
            if not self._is_active(run_id) and len(claims) < room:
                claims += await self._take([run_id], 1)  # only one, to test whether the cause is fixed
        if ready and len(claims) < room:
            claims += await self._take(ready, room - len(claims))
        return len(claims)

    async def _take(self, run_ids: Sequence[str], limit: int) -> list[ClaimedRollout]:
        """Claim rollouts of runs, and start them."""
        claim = self._store.leases.claim(self._lease, run_ids, limit, self._max_starting)
        claims = await asyncio.wrap_future(claim)
        for claim in claims:
            run_id = claim.rollout.run_id
            task = asyncio.create_task(self._execute(self._opened[run_id], claim))
            self._active[claim.attempt.id] = run_id, task
            task.add_done_callback(lambda _, key=claim.attempt.id: self._active.pop(key, None))
        return claims

    def _is_mine(self, run: OpenRun) -> bool:
        if self._loop:
            return (run.wave or "").startswith(f"{self._loop}/")
        return not self._run_ids or run.id in self._run_ids

    def _is_active(self, run_id: str) -> bool:
        return any(run == run_id for run, _ in self._active.values())

    def _is_outdated(self, run: OpenRun) -> bool:
        """Return whether an open run is served by other servers by now."""
        return run.id in self._opened and self._opened[run.id].served != run.served

    async def _close_idle(self, needed: Set[str]) -> None:
        """Close runs without attempts in progress here, unless they are needed. A loop creates new runs all the
        time.
        """
        for run_id in [opened for opened in self._opened if opened not in needed and not self._is_active(opened)]:
            await self._opened.pop(run_id).close()

    def _has_rested(self, run_id: str) -> bool:
        return time.monotonic() >= self._retry_at.get(run_id, 0.0)

    async def _refuse(self, run: OpenRun, reason: str) -> None:
        """Claim nothing of a run, unless another release enqueues it again."""
        self._refused[run.id] = run.release
        await self._stop_claims(run.id, reason, 0.0, f"run {run.id} is left to other workers: {reason}")

    async def _stop_claims(self, run_id: str, reason: str, seconds: float, line: str) -> None:
        """Claim nothing of a run for this many seconds, and report why, here and to anybody who looks at the
        workers.

        The reason may contain an agent's output, so only its first line is shown, without control characters.
        """
        self._retry_at[run_id] = time.monotonic() + seconds
        self._reasons_not_to_claim[run_id] = visible_line(reason)
        self._report(visible_line(line))
        await self._announce()

    async def _announce(self) -> None:
        announced = self._store.leases.announce(
            self._lease, __version__, self._capacity, dict(self._reasons_not_to_claim)
        )
        await asyncio.wrap_future(announced)

    async def _failed(self, run_id: str, rollout_id: str, error: UnderstudyError) -> None:
        """Count a failure of an attempt. After many in a row, the run rests here."""
        streak = self._streaks.setdefault(run_id, FailureStreak(self._capacity))
        if streak.add(rollout_id, error) and self._has_rested(run_id):
            rest_s = self._rest_seconds[run_id] = min(
                2 * self._rest_seconds.get(run_id, _FIRST_PAUSE_S / 2), _MAX_REST_S
            )
            line = f"run {run_id} rests for {rest_s:.0f} s, then one rollout is tried: {streak}: {error}"
            await self._stop_claims(run_id, f"{streak}: {error}", rest_s, line)

    async def _end_failures(self, run_id: str) -> None:
        if (streak := self._streaks.get(run_id)) is not None:
            streak.clear()
        if self._rest_seconds.pop(run_id, None) is not None:
            self._retry_at.pop(run_id, None)
            await self._allow_claims(run_id)

    async def _allow_claims(self, run_id: str) -> None:
        """Allow claims of a run again, unless the run was refused meanwhile."""
        if run_id not in self._refused and self._reasons_not_to_claim.pop(run_id, None) is not None:
            await self._announce()

    async def _open(self, run: OpenRun) -> None:
        """Open what the attempts of a run need. A run that cannot be executed here is left to other workers."""
        stack = AsyncExitStack()
        try:
            stored = await read_stored(self._store.runs.all)
            record = next(stored_run.config for stored_run in stored if stored_run.id == run.id)
            config = msgspec.convert(record, RunConfig)
            agent = make_agent(config.agent, config.agent_options)
            if problems := agent.problems():
                raise ConfigError("; ".join(problems))
            sandboxes = self._sandboxes.get(config.sandbox)
            if sandboxes is None:
                sandboxes = await asyncio.to_thread(load_sandboxes, config.sandbox)
            self._sandboxes[config.sandbox] = sandboxes
            environment = await asyncio.to_thread(environment_for, sandboxes, cache_dir())
            tasks = await read_stored(_tasks_of, self._store, run.id)
            directory = self._directory / run.id
            directory.mkdir(exist_ok=True)
            context, watch = await stack.enter_async_context(
                open_run(
                    config,
                    self._store,
                    tasks,
                    directory,
                    agent=agent,
                    sandboxes=sandboxes,
                    environment=environment,
                )
            )
        except (UnderstudyError, msgspec.ValidationError) as error:
            if self._never_resolves(run.id, error):
                self.unresolved[run.id] = str(error)
                await self._refuse(run, str(error))
            elif isinstance(error, StoreUnavailable) or (isinstance(error, UnderstudyError) and error.retryable):
                line = f"run {run.id} cannot be begun yet, next try in {_REOPEN_PAUSE_S:.0f} s: {error}"
                await self._stop_claims(run.id, str(error), _REOPEN_PAUSE_S, line)
            else:
                await self._refuse(run, str(error))
            return
        watching = None if watch is None else asyncio.create_task(_raise_at_end(watch))
        self._opened[run.id] = _OpenedRun(context, run.served, stack, watching)
        await self._allow_claims(run.id)

    def _never_resolves(self, run_id: str, error: Exception) -> bool:
        """Return whether a worker that ends when it is idle should not wait any more for a host's name to resolve.

        A server that is away has a name, and may be back.
        """
        if not self._stop_when_idle or not _is_unresolved(error):
            self._unresolved_since.pop(run_id, None)
            return False
        since = self._unresolved_since.setdefault(run_id, time.monotonic())
        return time.monotonic() - since >= _RESOLVE_TIMEOUT_S

    async def _execute(self, opened: _OpenedRun, claim: ClaimedRollout) -> None:
        """Make an attempt, and store how it ended."""
        runs, attempt = self._store.runs, claim.attempt
        final = claim.failures % MAX_ATTEMPTS == MAX_ATTEMPTS - 1
        try:
            await self._validate(opened, claim)
            await execute_attempt(opened.context, claim.rollout, attempt, final, lambda: None)
        except LeaseLost as error:
            _log.warning("attempt %s is stopped: %s", attempt.id, error)
            return
        except Exception as raised:  # noqa: BLE001 - an error of one attempt must not end the others
            error = raised if isinstance(raised, UnderstudyError) else internal_error(raised)
            # That the store was unavailable says nothing about the rollout.
            is_retried = error.retryable or isinstance(error, StoreError)
            status = "requeuing" if is_retried and not final else "failed"
            try:
                finish = runs.finish_attempt(attempt.id, "failed", status, error=info_of(error), logs=error.logs)
                await asyncio.wrap_future(finish)
                await self._failed(claim.rollout.run_id, claim.rollout.id, error)
            except LeaseLost as late:
                _log.warning("the end of attempt %s is not stored: %s", attempt.id, late)
                return
            except StoreError as gone:
                self._store_fault = gone  # the error ends this worker; its leases expire by themselves
                return
        else:
            try:
                await self._end_failures(claim.rollout.run_id)
            except StoreError as gone:
                self._store_fault = gone
        self.executed += 1

    async def _validate(self, opened: _OpenedRun, claim: ClaimedRollout) -> None:
        """Validate a task unless this machine has done so, which also finds out how it has to be graded."""
        task_id = claim.rollout.task_id
        if task_id not in opened.validated:
            validating = _validate(opened.context, claim.rollout)
            opened.validated[task_id] = asyncio.create_task(validating)
        validation = opened.validated[task_id]
        try:
            await asyncio.shield(validation)
        except UnderstudyError:
            opened.validated.pop(task_id, None)  # the fault may be temporary, so the next attempt validates again
            raise

    async def _keep_leases(self) -> None:
        """Renew the leases of running attempts, stop attempts that were taken away, and requeue those of dead
        workers.
        """
        while True:
            await asyncio.sleep(min(self._lease.seconds / 4, _LEASE_CHECK_PERIOD_S))
            active = dict(self._active)
            renewed = await asyncio.wrap_future(self._store.leases.renew(self._lease, list(active)))
            for attempt_id, (_, task) in active.items():
                if attempt_id not in renewed and not task.done():
                    _log.warning(
                        "attempt %s is stopped, because its lease was not renewed in time; another worker makes "
                        "it again",
                        attempt_id,
                    )
                    task.cancel()
            await asyncio.wrap_future(self._store.leases.requeue_expired(self._lease.seconds))


async def _raise_at_end(watch: WatchServer) -> None:
    await watch()


def _tasks_of(store: Store, run_id: str) -> list[Task]:
    """Return the tasks of a run's rollouts."""
    names = dict.fromkeys(rollout.task_id for rollout in store.runs.rollouts(run_id))
    return [store.runs.task(run_id, name) for name in names]


async def _validate(context: RunContext, rollout: Rollout) -> None:
    task = await context.task_of(rollout)
    validated = await validate_tasks(
        [task],
        cache=context.cache,
        sandboxes=context.sandboxes,
        environment=context.environment,
        concurrency=1,
    )
    if reason := validated.refused.get(task.instance_id):
        # The task was valid where the run was enqueued, so another machine, or a later attempt, may succeed.
        raise SandboxError(
            f"{task.instance_id} cannot be validated on {socket.gethostname()}: {reason}; "
            "for details, run `understudy tasks check TASKS` there with the run's tasks"
        )


def _is_unresolved(error: BaseException | None) -> bool:
    """Return whether an error was caused by a host's name that does not resolve, here or for the program ssh."""
    while error is not None:
        if isinstance(error, socket.gaierror) or "Could not resolve hostname" in str(error):
            return True
        error = error.__cause__
    return False
