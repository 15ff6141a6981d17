"""Work that a person can stop: the first Ctrl-C or SIGTERM lets what runs finish, the second stops at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import typer

from understudy.cli.exit_codes import EXIT_INTERRUPTED

T = TypeVar("T")


def run_stoppable(work: Coroutine[Any, Any, T], drain: Callable[[], bool]) -> T:
    """Run `work` in a loop of its own; what it returns.

    `drain` is called at each signal: it has `work` begin nothing more, or returns False where there is nothing to
    wait for, as when it was called before. Then `work` is cancelled. Raises typer.Exit when it was.
    """
    import uvloop

    async def main() -> T:
        running = asyncio.ensure_future(work)

        def interrupt() -> None:
            if not drain():
                running.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupt)
        return await running

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise interrupted() from None


def interrupted() -> typer.Exit:
    """The end of a command that was stopped before its own; says how to go on."""
    typer.echo("understudy: interrupted; give the same command again to continue", err=True)
    return typer.Exit(EXIT_INTERRUPTED)
