"""Progress on stderr: a line that is redrawn on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

_TERMINAL_S = 0.25


class LiveStatus:
    """What is drawn. It is read by another thread; `changed` is set where there is news that shall not wait."""

    plain_s = 10.0
    """Elsewhere than on a terminal, news that can wait is told after so many seconds."""

    def __init__(self) -> None:
        self.changed = threading.Event()

    def line(self) -> str:
        """Where it stands."""
        raise NotImplementedError

    def new_lines(self) -> list[str]:
        """Lines that are to stay, since the last time."""
        return []


D = TypeVar("D", bound=LiveStatus)


@contextmanager
def live(status: D, stream: TextIO) -> Generator[D]:
    """Draw `status` on `stream` while the context is open."""
    stop = threading.Event()
    draw = _draw_live if stream.isatty() else _draw_plain
    thread = threading.Thread(target=draw, args=(status, stream, stop), name="progress", daemon=True)
    thread.start()
    try:
        yield status
    finally:
        stop.set()
        status.changed.set()
        thread.join()


def _draw_live(status: LiveStatus, stream: TextIO, stop: threading.Event) -> None:
    spinner, console = Spinner("dots"), Console(file=stream)
    with Live(spinner, console=console, auto_refresh=False, transient=True) as live:
        while True:
            ending = stop.is_set()
            for line in status.new_lines():
                console.print(Text(line))
            if ending:
                return
            spinner.update(text=Text(status.line()))
            live.refresh()
            stop.wait(_TERMINAL_S)


def _draw_plain(status: LiveStatus, stream: TextIO, stop: threading.Event) -> None:
    last = ""
    while True:
        # Before anything is read: what changes from here on, the end too, is not waited for.
        status.changed.clear()
        ending = stop.is_set()
        lines = status.new_lines()
        if not lines and not ending and (now := status.line()) != last:
            lines, last = [now], now
        for line in lines:
            stream.write(f"{line}\n")
        stream.flush()
        if ending:
            return
        status.changed.wait(status.plain_s)


def short(count: int) -> str:
    """A count in a few characters: 12.3k, 4.5M."""
    for size, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def time_left(seconds: float) -> str:
    """How long it will still take, in words."""
    return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"
