"""Interruptible work: the first Ctrl-C or SIGTERM lets running work finish, the second stops it at once.

A signal that was ignored when the command started stays ignored, as POSIX requires: a shell starts background jobs
(`nohup understudy run … &`) with SIGINT ignored, so that Ctrl-C in the foreground does not reach them. SIGTERM
still stops such a command.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import typer
import uvloop

from understudy.cli import EXIT_INTERRUPTED

T = TypeVar("T")


def run_stoppable(
    work: Coroutine[Any, Any, T], drain: Callable[[], bool], *, drain_timeout_s: float = math.inf
) -> T:
    """Run `work` in an event loop of its own, and return its result.

    At each signal, `drain` is called: it makes `work` start nothing new, or returns False if there is nothing to
    wait for, for example when it was called before. Then `work` is cancelled. It is also cancelled
    `drain_timeout_s` seconds after draining began. Raises typer.Exit if `work` was cancelled.
    """

    async def main() -> T:
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(work)

        def stop_draining() -> None:
            typer.echo(
                f"understudy: the drain timeout of {drain_timeout_s:g} s has passed; stopping what still runs",
                err=True,
            )
            running.cancel()

        def interrupt() -> None:
            if not drain():
                running.cancel()
            elif math.isfinite(drain_timeout_s):
                loop.call_later(drain_timeout_s, stop_draining)

        for number in not_ignored(signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        return await running

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise interrupted() from None


def run_sandboxes(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, which opens sandboxes, in an event loop of its own, and return its result.

    It is uvloop's, which starts every process with the default signal handling. Processes started by asyncio's
    would ignore SIGINT in a background job (`nohup understudy …`): agents, and tests of tasks that send it.
    """
    return uvloop.run(work)


def not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return those of the signals that were not ignored when this process started."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def interrupt_on_termination() -> None:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, like Ctrl-C."""
    for number in not_ignored(signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def interrupted() -> typer.Exit:
    """Return the exit of an interrupted command, and print how to continue it."""
    typer.echo("understudy: interrupted; run the same command again to continue", err=True)
    return typer.Exit(EXIT_INTERRUPTED)
