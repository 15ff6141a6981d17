"""Progress on stderr: a line that is redrawn on a terminal, plain lines now and then elsewhere.

`live` draws a status from a thread, for work that does not report; a `ProgressLine` is for work that does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO, TypeVar

import typer
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
        """Where it stands; while that is empty, nothing is written elsewhere than on a terminal."""
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
            lines, last = [now] if now else [], now
        for line in lines:
            stream.write(f"{line}\n")
        stream.flush()
        if ending:
            return
        status.changed.wait(status.plain_s)


class ProgressLine:
    """A line that the work itself changes: redrawn on a terminal, elsewhere written every `plain_s` seconds."""

    def __init__(self, plain_s: float = LiveStatus.plain_s) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause_s = 0.1 if self._terminal else plain_s
        self._next = time.monotonic() + (0 if self._terminal else plain_s)
        self._drawn = False

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Show where the work stands, unless it was shown a moment before and this need not be shown `at_once`."""
        now = time.monotonic()
        if now >= self._next or at_once:
            self._next = now + self._pause_s
            self._drawn = self._terminal
            typer.echo(f"\r{text}\x1b[K" if self._terminal else text, err=True, nl=not self._terminal)

    def end(self, *, keep: bool = True) -> None:
        """Leave the last line standing on the terminal, or take it away."""
        if self._drawn:
            typer.echo("" if keep else "\r\x1b[K", err=True, nl=keep)
            self._drawn = False


def short(count: int) -> str:
    """A count in a few characters: 12.3k, 4.5M."""
    for size, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def time_left(seconds: float) -> str:
    """How long it will still take, in words."""
    return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"
