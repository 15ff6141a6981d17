"""What counts against a command's time limit, with a fake clock; and once with real processes on one processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from understudy.sandbox import time_limit
from understudy.sandbox.process import run_process, run_to_completion
from understudy.sandbox.time_limit import WALL_CLOCK_FACTOR, ThreadTimes, TimeLimit, longest_s

LIMIT_S = 60.0
Usage = Callable[[float], tuple[float, float]]
"""Returns for a time how many seconds the command's threads have run and waited by then, each of them."""


def ended_after(usage: Usage, threads: int = 1) -> float:
    """Return after how many seconds of a fake clock a command that behaves like this is ended."""
    now = 0.0

    def read(_: Iterable[int]) -> dict[str, ThreadTimes]:
        return {str(thread): ThreadTimes(*usage(now)) for thread in range(threads)}

    limit = TimeLimit(LIMIT_S, clock=lambda: now, read=read)
    while (pause_s := limit.pause_s()) > 0:
        now += pause_s
        limit.count([1])
    return now


@pytest.mark.parametrize(
    ("usage", "threads", "expected_s"),
    [
        pytest.param(lambda now: (0.0, 0.0), 1, LIMIT_S, id="it sleeps"),
        pytest.param(lambda now: (now, 0.0), 1, LIMIT_S, id="it computes"),
        pytest.param(lambda now: (now / 50, now * 49 / 50), 100, LIMIT_S, id="100 threads on two processors"),
        pytest.param(lambda now: (now / 4, now * 3 / 4), 1, 4 * LIMIT_S, id="it has a quarter of a processor"),
        pytest.param(lambda now: (now / 4, now * 3 / 4), 2, 2 * LIMIT_S, id="two threads have a quarter each"),
        pytest.param(lambda now: (now / 8, now / 8), 1, LIMIT_S * 8 / 7, id="it mostly sleeps and seldom waits"),
        pytest.param(lambda now: (now / 999, now), 1, longest_s(LIMIT_S), id="it has next to nothing, for ever"),
        pytest.param(lambda now: (0.0, now * 512), 512, longest_s(LIMIT_S), id="many wait, and nothing runs"),
    ],
)
def test_time_in_which_a_command_only_waits_for_a_processor_is_not_counted(
    usage: Usage, threads: int, expected_s: float
) -> None:
    assert ended_after(usage, threads) == pytest.approx(expected_s, rel=0.01)


def test_threads_that_end_give_nothing_back() -> None:
    """A new thread of an old number has run less than the old one; that neither adds time nor takes some."""
    assert ended_after(lambda now: (now % 7, 0.0)) == pytest.approx(LIMIT_S, rel=0.01)


def test_without_times_of_the_kernel_all_time_counts() -> None:
    assert ended_after(lambda now: (0.0, 0.0), threads=0) == pytest.approx(LIMIT_S, rel=0.01)


def test_a_limit_of_no_time_is_over_at_once() -> None:
    assert TimeLimit(0.0).pause_s() == 0.0


def test_the_kernel_keeps_the_times_of_this_process_and_of_its_descendants() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as child:
        try:
            while sum(times.ran_s > 0 for times in time_limit.read_threads([child.pid]).values()) < 2:
                assert child.poll() is None
            assert str(child.pid) in time_limit.read_threads([child.pid])
        finally:
            child.kill()
            assert child.stdin is not None
            child.stdin.close()
    assert time_limit.read_threads([child.pid]) == {}


def test_a_command_of_very_many_processes_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, sys\nfor _ in range(9):\n    os.fork() or (sys.stdin.read(), os._exit(0))\nprint(flush=True)\n"
    )
    script += "sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        monkeypatch.setattr(time_limit, "MAX_THREADS", 10)
        assert len(time_limit.read_threads([child.pid])) == 10
        monkeypatch.setattr(time_limit, "MAX_THREADS", 9)
        assert time_limit.read_threads([child.pid]) == {}
        child.stdin.close()


SPIN = "import os; os.sched_setaffinity(0, {%d}); print(flush=True)\nwhile True: pass"
WORK = "import os, time; os.sched_setaffinity(0, {%d})\nwhile time.process_time() < 0.4: pass"
CHILD_WORKS = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-S', '-c', sys.argv[1]]))"


@contextmanager
def busy(processor: int, others: int) -> Generator[None]:
    """Keep other processes busy on one processor, each in a session of its own, as gradings are."""
    argv = [sys.executable, "-S", "-c", SPIN % processor]
    children = [subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) for _ in range(others)]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()


async def test_a_busy_machine_does_not_take_the_time_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs 0.4 s of a processor that it shares with five others: 2 s or more. Its limit is 1 s."""
    monkeypatch.setattr(
        time_limit, "WALL_CLOCK_FACTOR", 100 * WALL_CLOCK_FACTOR
    )  # the machine may be busy with other tests as well
    processor = min(os.sched_getaffinity(0))

    async def run(*argv: str, timeout_s: float = 1.0) -> tuple[bool, float]:
        settings: dict[str, Any] = {"output_bytes": 1000, "stdin": b"", "env": {"PATH": "/usr/bin:/bin"}}
        done = await run_to_completion(partial(run_process, argv, timeout_s=timeout_s, **settings))
        assert done.timed_out or (done.exit_code, done.stderr) == (0, b"")
        return done.timed_out, done.duration_s

    with busy(processor, others=5):
        for argv in (["-c", WORK % processor], ["-c", CHILD_WORKS, WORK % processor]):
            timed_out, duration_s = await run(sys.executable, "-S", *argv)
            assert not timed_out and duration_s > 1.0
        # One that never ends is ended all the same, whether it sleeps or computes.
        assert (await run("sleep", "600"))[0]
        assert (await run(sys.executable, "-S", "-c", SPIN % processor, timeout_s=0.3))[0]
