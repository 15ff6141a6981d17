"""What progress draws: news at once, lines that stay, and an end that waits for nothing."""

from __future__ import annotations

import io
import os
import pty
import time
from collections.abc import Callable
from functools import partial

import pytest

from understudy.cli.commands.loop import LoopDisplay
from understudy.cli.progress import LiveStatus, live
from understudy.train.loop.state import Evaluation


class Told(LiveStatus):
    plain_s = 600.0

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.lines, self.asked = "starting", ["before"], 0

    def line(self) -> str:
        self.asked += 1
        return self.stage

    def new_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def said_on(terminal: int) -> bytes:
    """What comes next out of a terminal; nothing when its other end is closed and all was read."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def until(holds: Callable[[], bool]) -> None:
    ending = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ending
        time.sleep(0.005)


def test_without_a_terminal_each_change_is_printed_once_and_immediately():
    stream, display = io.StringIO(), Told()
    began = time.monotonic()
    with live(display, stream):
        until(lambda: stream.getvalue() == "before\n")
        for count in (1, 2):  # the same again is no news
            display.changed.set()
            until(lambda count=count: display.asked == count)
        until(lambda: stream.getvalue() == "before\nstarting\n")
        display.lines = ["one", "two"]
        display.changed.set()
        until(lambda: stream.getvalue().endswith("two\n"))
        display.lines = ["at the end"]
    assert stream.getvalue() == "before\nstarting\none\ntwo\nat the end\n"
    assert time.monotonic() - began < 60


def test_on_a_terminal_earlier_output_stays_above_the_live_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = pty.openpty()
    display = Told()
    with os.fdopen(terminal, "w") as stream, live(display, stream):
        until(lambda: not display.lines)
        display.lines = ["at the end"]
    output = b"".join(iter(partial(said_on, master), b"")).decode()
    os.close(master)
    assert output.index("before\r\n") < output.index("starting") < output.index("at the end\r\n")


def test_a_loop_prints_a_line_for_each_evaluation_and_step():
    """Before, the hook had another name than `live` calls, and these lines were never printed."""
    stream, display = io.StringIO(), LoopDisplay()
    with live(display, stream):
        display.evaluated(Evaluation(step=0, version="v0", run="r", solved=3, total=4))
    assert "held out after step 0: 3/4 solved, 0.750" in stream.getvalue()
