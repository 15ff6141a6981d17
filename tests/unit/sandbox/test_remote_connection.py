"""A worker that hangs is given up: one that is silent, and one that answers everything but what it was asked."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from understudy.errors import ConfigError, SandboxLost
from understudy.sandbox.remote import messages
from understudy.sandbox.remote.connection import ConnectionOptions, connect
from understudy.sandbox.remote.ssh import SshSandboxes

from support import UNDERSTUDY


def command(pid_file: Path) -> list[str]:
    return ["sh", "-c", f"echo $$ > {pid_file}; exec {UNDERSTUDY} sandboxes serve"]


async def test_a_worker_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    connection = await connect(command(tmp_path / "pid"), "there", options=ConnectionOptions(silence_s=8.0))
    try:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)
        with pytest.raises(SandboxLost, match=r"there: .* was lost: nothing was heard of it for 8 s"):
            await connection.ask(messages.PingRequest(), type(None))
        assert not connection.alive
    finally:
        await connection.close()


async def test_a_request_that_is_not_answered_in_time_is_given_up(tmp_path: Path) -> None:
    connection = await connect(command(tmp_path / "pid"), "there")
    try:
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, signal.SIGSTOP)
        late = asyncio.create_task(connection.ask(messages.ListRequest(), list[object], within_s=0.2))
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGCONT)
        with pytest.raises(SandboxLost, match=r"there: no response to a ListRequest within 0\.2 s"):
            await late
        assert await connection.ask(messages.ListRequest(), list[object]) == []
    finally:
        await connection.close()


async def test_an_error_of_the_worker_names_its_machine(tmp_path: Path) -> None:
    connection = await connect(command(tmp_path / "pid"), "there")
    try:
        with pytest.raises(
            ConfigError, match=r"^there: this worker has Understudy .*, but the caller has 0\.0\.0"
        ):
            await connection.ask(messages.HelloRequest("0.0.0"), messages.HelloReply)
    finally:
        await connection.close()


def test_what_a_remote_machine_lacks_names_the_machine() -> None:
    kind = SshSandboxes("me@there")
    kind._hello = messages.HelloReply(["`bwrap` is missing"], ["memory is bounded"], messages.RemoteEnvironment())
    assert kind.problems() == ["ssh:me@there: `bwrap` is missing"]
    assert kind.warnings() == ["ssh:me@there: memory is bounded"]
