"""What goes on, drawn on stderr: a line that is redrawn on a terminal, plain lines now and then elsewhere."""

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


class Drawn:
    """What is drawn. It is read by another thread; `changed` is set where there is news that shall not wait."""

    plain_s = 10.0
    """Elsewhere than on a terminal, news that can wait is told after so many seconds."""

    def __init__(self) -> None:
        self.changed = threading.Event()

    def line(self) -> str:
        """Where it stands."""
        raise NotImplementedError

    def said(self) -> list[str]:
        """Lines that are to stay, since the last time."""
        return []


D = TypeVar("D", bound=Drawn)


@contextmanager
def drawn(shown: D, stream: TextIO) -> Generator[D]:
    """Draw `shown` on `stream` while the context is open."""
    stop = threading.Event()
    draw = _draw_live if stream.isatty() else _draw_plain
    thread = threading.Thread(target=draw, args=(shown, stream, stop), name="progress", daemon=True)
    thread.start()
    try:
        yield shown
    finally:
        stop.set()
        shown.changed.set()
        thread.join()


def _draw_live(shown: Drawn, stream: TextIO, stop: threading.Event) -> None:
    spinner, console = Spinner("dots"), Console(file=stream)
    with Live(spinner, console=console, auto_refresh=False, transient=True) as live:
        while True:
            ending = stop.is_set()
            for line in shown.said():
                console.print(Text(line))
            if ending:
                return
            spinner.update(text=Text(shown.line()))
            live.refresh()
            stop.wait(_TERMINAL_S)


def _draw_plain(shown: Drawn, stream: TextIO, stop: threading.Event) -> None:
    last = ""
    while True:
        # Before anything is read: what changes from here on, the end too, is not waited for.
        shown.changed.clear()
        ending = stop.is_set()
        lines = shown.said()
        if not lines and not ending and (now := shown.line()) != last:
            lines, last = [now], now
        for line in lines:
            stream.write(f"{line}\n")
        stream.flush()
        if ending:
            return
        shown.changed.wait(shown.plain_s)
