"""What `understudy pairs` shows while it compares."""

from __future__ import annotations

import os
import pty
import sys
import tty

import pytest

from understudy.cli.commands.pairs import PairProgress
from understudy.preference.checks import PairCounts


@pytest.mark.parametrize("terminal", [False, True])
def test_what_was_compared_is_shown_before_there_is_a_pair(terminal: bool, monkeypatch: pytest.MonkeyPatch):
    reading, writing = pty.openpty() if terminal else os.pipe()
    if terminal:
        tty.setraw(writing)
    tallies = {"replay": PairCounts(compared=3), "rollouts": PairCounts(compared=4)}
    with os.fdopen(writing, "w") as stderr, os.fdopen(reading, "rb", buffering=0) as seen:
        monkeypatch.setattr(sys, "stderr", stderr)
        with PairProgress(tallies, every_s=0.01):
            first = seen.read(200)
        assert b"compared 7, 0 pairs" in first
        if terminal:
            assert first.startswith(b"\r") and b"\n" not in first
            # The line is taken away at the end.
            assert seen.read(1 << 16).endswith(b"\r\x1b[K")
