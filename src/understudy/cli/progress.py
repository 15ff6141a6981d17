"""Progress on stderr: a line that is redrawn on a terminal; otherwise plain lines from time to time.

`live` polls a status from a thread, for work that does not report progress. `ProgressLine` is for work that does.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO, TypeVar

import typer
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

_REDRAW_PAUSE_S = 0.25


class LiveStatus:
    """The status that `live` draws, which another thread reads. Setting `changed` shows news at once."""

    plain_s = 10.0
    """Off a terminal, news that is not urgent is printed after this many seconds."""

    def __init__(self) -> None:
        self.changed = threading.Event()

    def line(self) -> str:
        """Return the current status. While it is "", nothing is printed off a terminal."""
        raise NotImplementedError

    def new_lines(self) -> list[str]:
        """Return the lines to print above the status, which were added since the last call."""
        return []


D = TypeVar("D", bound=LiveStatus)


@contextmanager
def live(status: D, stream: TextIO) -> Generator[D]:
    """Show `status` on `stream` while the context is open."""
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
            stop.wait(_REDRAW_PAUSE_S)


def _draw_plain(status: LiveStatus, stream: TextIO, stop: threading.Event) -> None:
    last_line = ""
    while True:
        # Clear the event before reading, so that a change from here on, even the end, is shown without delay.
        status.changed.clear()
        ending = stop.is_set()
        lines = status.new_lines()
        if not lines and not ending and (now := status.line()) != last_line:
            lines, last_line = [now] if now else [], now
        for line in lines:
            stream.write(f"{line}\n")
        stream.flush()
        if ending:
            return
        status.changed.wait(status.plain_s)


class ProgressLine:
    """A line that the work itself updates: redrawn on a terminal, otherwise printed every `plain_s` seconds."""

    def __init__(self, plain_s: float = LiveStatus.plain_s) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause_s = 0.1 if self._terminal else plain_s
        self._next = time.monotonic() + (0 if self._terminal else plain_s)
        self._drawn = False

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Show a status, unless one was shown a moment ago and `at_once` is false."""
        now = time.monotonic()
        if now >= self._next or at_once:
            self._next = now + self._pause_s
            self._drawn = self._terminal
            typer.echo(f"\r{text}\x1b[K" if self._terminal else text, err=True, nl=not self._terminal)

    def end(self, *, keep: bool = True) -> None:
        """End the line: leave the last status on the terminal, or erase it."""
        if self._drawn:
            typer.echo("" if keep else "\r\x1b[K", err=True, nl=keep)
            self._drawn = False


def counter(template: str) -> Callable[[int, int], None]:
    """Return a progress callback for stderr: `template` is formatted with two numbers.

    Off a terminal, it is printed when the first number changes.
    """
    line, last_first = ProgressLine(plain_s=math.inf), -1

    def show(first: int, second: int) -> None:
        nonlocal last_first
        line.show(template.format(first, second), at_once=first != last_first)
        last_first = first

    return show


def short(count: int) -> str:
    """Format a count in a few characters: 12.3k, 4.5M."""
    for size, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def time_left(seconds: float) -> str:
    """Return the estimated remaining time as text."""
    return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"
