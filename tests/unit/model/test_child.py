"""What is said of a server whose process ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from understudy.errors import BackendError
from understudy.model.process import ServerProcess

NOISY = """
import sys
sys.stderr.write("#" * (3 << 20) + "\\n" + "".join(f"line {n}\\n" for n in range(60)))
sys.exit(3)
"""


async def test_a_failed_start_reports_the_last_lines_of_output_whatever_their_length(tmp_path: Path):
    (tmp_path / "noisy.py").write_text(NOISY)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(BackendError, match="did not start, it ended with exit code 3") as caught:
        async with ServerProcess.running("noisy", [], environment) as server:
            await server.start()
    lines = str(caught.value).rpartition(": ")[2].partition(". Correct")[0].splitlines()
    assert lines == [f"line {n}" for n in range(10, 60)]
