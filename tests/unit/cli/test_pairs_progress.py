"""What `understudy pairs` shows while it compares."""

from __future__ import annotations

import os
import pty
import tty

import pytest

from understudy.cli.commands.pairs import PairProgress
from understudy.cli.progress import live
from understudy.preference.checks import PairCounts


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_counts_comparisons_before_the_first_pair(terminal: bool, monkeypatch: pytest.MonkeyPatch):
    reading, writing = pty.openpty() if terminal else os.pipe()
    monkeypatch.setenv("TERM", "xterm")
    if terminal:
        tty.setraw(writing)
    tallies = {"replay": PairCounts(compared=3), "rollouts": PairCounts(compared=4)}
    with os.fdopen(writing, "w") as stderr, os.fdopen(reading, "rb", buffering=0) as output:
        with live(PairProgress(tallies), stderr):
            first = b""
            while b"compared 7, 0 pairs" not in first:
                first += output.read(200)
        if terminal:
            assert b"\n" not in first
            # The line is taken away at the end.
            assert b"\x1b[2K" in output.read(1 << 16)
