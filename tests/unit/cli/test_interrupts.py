"""Signals to a command: draining, its bound, and signals that were ignored when the command started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import asyncio, os, sys
from understudy.cli.interrupts import run_stoppable
import typer
stop = asyncio.Event()
async def work():
    print("started", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.sleep(float(sys.argv[1]))
    return "drained"
def drain():
    if stop.is_set():
        return False
    stop.set()
    return True
try:
    print(run_stoppable(work(), drain, drain_timeout_s=float(sys.argv[2])), flush=True)
except typer.Exit as ended:
    sys.exit(ended.exit_code)
"""


def start(work_s: float, timeout_s: float, *, ignored: bool = False) -> subprocess.Popen[str]:
    """The program, once it waits; with SIGINT ignored from the start, as a shell starts a background job."""
    command = [sys.executable, "-c", PROGRAM, str(work_s), str(timeout_s)]
    if ignored:
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_running_work(number: signal.Signals):
    process = start(0.1, 60)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "draining\ndrained\n")


def test_the_second_signal_stops_at_once():
    process = start(100, 100)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "draining\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command again to continue" in err


def test_draining_stops_after_its_time_limit():
    process = start(100, 0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the drain timeout of 0.2 s has passed" in err
    assert "run the same command again to continue" in err


def test_an_ignored_sigint_stays_ignored_and_sigterm_still_drains():
    process = start(0.1, 60, ignored=True)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "draining\ndrained\n")
