"""Random faults of a run's machines, with a seed: every rollout ends once, and no answered call is lost.

UNDERSTUDY_TEST_FAULTS says how many, UNDERSTUDY_TEST_SEED which; `make soak` makes five hundred.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from understudy.store.address import StoreUrl

from support import UNDERSTUDY, postgresql, require
from support.workers import LEASE_S, assert_no_late_writes, check, options, started, worker

pytestmark = [pytest.mark.services, pytest.mark.timeout(3600)]

FAULTS = int(os.environ.get("UNDERSTUDY_TEST_FAULTS", "40"))
SEED = int(os.environ.get("UNDERSTUDY_TEST_SEED", "17"))
WORKERS = 2


class Fleet:
    """Workers on one database, each behind a proxy of its own, and a process that waits for the run."""

    def __init__(
        self, server: postgresql.PostgresqlServer, url: StoreUrl, tmp_path: Path, stack: ExitStack
    ) -> None:
        self._server = server
        self._url = url
        self._stack = stack
        self._proxies = [stack.enter_context(postgresql.LosingProxy(server)) for _ in range(WORKERS)]
        call = f"python3 {tmp_path / 'client.py'} 1 {tmp_path / 'seen'}"
        self._waits = options(
            tmp_path, url, "--engine", "workers", samples=FAULTS // 2, command=f"{call}; sleep 0.7; {call}; {call}"
        )
        self.random = random.Random(SEED)
        self.workers = [self._start(number) for number in range(WORKERS)]
        self.waiting = self._wait()
        self.faults: tuple[Callable[[int], None], ...] = (
            self.kill_worker, self.stop_worker, self.freeze_worker, self.cut, self.lose_commit,
            self.kill_database, self.kill_run,
        )  # fmt: skip

    def _start(self, number: int) -> subprocess.Popen[str]:
        return self._stack.enter_context(worker(self._proxies[number].url(self._url)))

    def _wait(self) -> subprocess.Popen[str]:
        return self._stack.enter_context(started(UNDERSTUDY, *self._waits))

    def kill_worker(self, number: int) -> None:
        """As by a machine that loses its power: the worker and all below it, at once."""
        os.killpg(self.workers[number].pid, signal.SIGKILL)
        self.workers[number] = self._start(number)

    def stop_worker(self, number: int) -> None:
        """In order: it finishes what it has, beside the next one."""
        self.workers[number].send_signal(signal.SIGTERM)
        self.workers[number] = self._start(number)

    def freeze_worker(self, number: int) -> None:
        """It wakes when its attempts are others', and writes what it has."""
        self.workers[number].send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S + self.random.uniform(0, 2))
        self.workers[number].send_signal(signal.SIGCONT)

    def cut(self, number: int) -> None:
        """Its connections to the database break, and no new one is made for a while."""
        self._proxies[number].cut()
        time.sleep(self.random.uniform(0, 2))
        self._proxies[number].mend()

    def lose_commit(self, number: int) -> None:
        """The answer to its next commit is lost."""
        self._proxies[number].lose_next_commit()

    def kill_database(self, number: int) -> None:
        self._server.stop(signal.SIGKILL)
        time.sleep(self.random.uniform(0, 1))
        self._server.start()

    def kill_run(self, number: int) -> None:
        os.killpg(self.waiting.pid, signal.SIGKILL)
        self.waiting = self._wait()

    def replace_dead(self) -> None:
        """Start again what has ended; a worker ends by itself only with a reason."""
        for number, process in enumerate(self.workers):
            if process.poll() is not None:
                _, said = process.communicate()
                assert "Traceback" not in said, said
                self.workers[number] = self._start(number)


def test_random_faults_lose_no_answered_call_and_count_no_rollout_twice(tmp_path: Path) -> None:
    require(postgresql.problems())
    made: Counter[str] = Counter()
    with postgresql.running_server() as server, ExitStack() as stack:
        url = server.new_store()
        fleet = Fleet(server, url, tmp_path, stack)
        while not (tmp_path / "seen").exists():
            assert fleet.waiting.poll() is None, fleet.waiting.communicate()
            time.sleep(0.1)
        for _ in range(FAULTS):
            time.sleep(fleet.random.uniform(0, 1.5))
            fleet.replace_dead()
            fault = fleet.random.choice(fleet.faults)
            fault(fleet.random.randrange(WORKERS))
            made[fault.__name__] += 1
        while fleet.waiting.poll() is None:
            fleet.replace_dead()
            time.sleep(0.5)
        out, said = fleet.waiting.communicate()
        assert fleet.waiting.returncode == 0, said
        summary = json.loads(out)
        assert (summary["pending"], summary["infrastructure_failures"]) == (0, 0)
        ends = check(tmp_path, url, summary["rollouts"])
        assert_no_late_writes(url)
        sys.stderr.write(f"seed {SEED}: {dict(made)}; attempts: {dict(ends)}\n")
