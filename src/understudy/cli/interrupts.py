"""Work that a person can stop: the first Ctrl-C or SIGTERM lets what runs finish, the second stops at once.

A signal that was ignored when the command started stays ignored, as POSIX has it: a shell starts a job in the
background (`nohup understudy run … &`) with SIGINT ignored, so that Ctrl-C in the foreground does not reach it.
SIGTERM still stops such a command.
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
    """Run `work` in an event loop of its own; what it returns.

    `drain` is called at each signal: it has `work` start nothing more, or returns False where there is nothing to
    wait for, as when it was called before. Then `work` is cancelled, and so it is `drain_timeout_s` seconds after
    it began to drain. Raises typer.Exit when it was cancelled.
    """

    async def main() -> T:
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(work)

        def stop_draining() -> None:
            typer.echo(f"understudy: stopping what still runs after {drain_timeout_s:g} s", err=True)
            running.cancel()

        def interrupt() -> None:
            if not drain():
                running.cancel()
            elif math.isfinite(drain_timeout_s):
                loop.call_later(drain_timeout_s, stop_draining)

        for number in heeded(signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        return await running

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise interrupted() from None


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those of the signals that were not ignored when this process started."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def interrupt_on_termination() -> None:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does."""
    for number in heeded(signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def interrupted() -> typer.Exit:
    """The end of a command that was stopped before its own; says how to continue."""
    typer.echo("understudy: interrupted; run the same command again to continue", err=True)
    return typer.Exit(EXIT_INTERRUPTED)
