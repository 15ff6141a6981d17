"""Copies of a check script's directory, in which versions of its Python files stand."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from understudy.checks.twins.run import WrittenVersion
from understudy.checks.twins.script import placed_version

PLACES_AND_WAITS = """\
import signal, sys
from pathlib import Path
from understudy.checks.twins.run import WrittenVersion
from understudy.checks.twins.script import placed_version
with placed_version(Path(sys.argv[1]), WrittenVersion({}, {})) as placed:
    print(placed, flush=True)
    signal.pause()
"""


def test_copies_of_killed_graders_are_removed_and_those_of_running_ones_stay(tmp_path: Path):
    hidden = tmp_path / "checks" / "digest" / "files"
    hidden.mkdir(parents=True)
    (hidden / "check.py").write_text("assert 1 == 1\n")

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", PLACES_AND_WAITS, str(hidden)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    (killed, of_killed), (running, of_running) = start(), start()
    try:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert (of_killed / "check.py").exists()
        with placed_version(hidden, WrittenVersion({}, {})) as ours:
            assert (ours / "check.py").exists()
            assert not of_killed.parent.parent.exists()
            assert (of_running / "check.py").exists()
    finally:
        running.kill()
        running.communicate()
    with placed_version(hidden, WrittenVersion({}, {})):
        assert not of_running.exists()
    assert [path.name for path in hidden.parent.parent.iterdir()] == ["digest"]
