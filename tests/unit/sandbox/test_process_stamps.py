"""Whether a process has ended, by its stamp."""

from __future__ import annotations

import os
import subprocess
import sys

from understudy.sandbox.process import has_ended, own_stamp, process_stamp


def test_a_process_that_nobody_waited_for_has_ended() -> None:
    assert not has_ended(process_stamp(os.getpid()))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stamp = process_stamp(process.pid)
    assert not has_ended(stamp)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert has_ended(stamp)
    process.communicate()
    assert has_ended(stamp)


def test_each_process_has_a_stamp_of_its_own() -> None:
    assert own_stamp() == process_stamp(os.getpid())
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writes, own_stamp().encode())
        os._exit(0)
    os.waitpid(child, 0)
    stamp = os.read(reads, 100).decode()
    os.close(reads)
    os.close(writes)
    assert stamp != own_stamp()
    assert stamp.split("-")[1] == str(child)
