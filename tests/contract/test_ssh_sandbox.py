"""Sandboxes on another machine over a real sshd: what gets there, when they end, who may ask."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from understudy.errors import ConfigError, SandboxError, SandboxLost
from understudy.sandbox.base import Mount, SandboxSpec, labelled, load_sandboxes, open_kind
from understudy.sandbox.remote import messages
from understudy.sandbox.remote.ssh import SshSandboxes

from support import ssh_server

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("isolation")]


async def test_a_sandbox_sees_our_files_and_has_no_network(machine: ssh_server.SshMachine, tree: Path) -> None:
    (tree.parent / "mount").mkdir()
    (tree.parent / "mount" / "tool").write_text("#!/bin/sh\necho the tool\n")
    (tree.parent / "mount" / "tool").chmod(0o755)
    (tree.parent / "secret").write_text("hidden")
    mounts = (
        Mount(tree.parent / "mount", "/opt/mount"),
        Mount(tree.parent / "secret", "/opt/secret", private=True),
    )
    sandbox = await SshSandboxes(**machine.options).open(SandboxSpec(tree=tree, mounts=mounts))
    try:
        script = "cat README; /opt/mount/tool; cat /opt/secret; ls /sys/class/net 2>/dev/null; cat /proc/net/dev"
        done = await sandbox.run(["sh", "-c", script], timeout_s=30)
        lines = done.stdout.decode().splitlines()
        assert lines[:2] == ["as it was", "the tool"]
        assert b"/opt/secret" in done.stderr
        assert {line.split(":")[0].strip() for line in lines if ":" in line} == {"lo"}
        assert (await sandbox.run(["cat", "/opt/secret"], timeout_s=30, reveal=True)).stdout == b"hidden"
    finally:
        await sandbox.close()


async def test_files_go_there_once(machine: ssh_server.SshMachine, tree: Path) -> None:
    (tree / "only here").write_text(os.urandom(8).hex())
    trees = machine.cache / "remote" / f"trees-{os.geteuid()}"
    before = set(trees.glob("*/content")) if trees.exists() else set()
    for _ in range(2):
        sandbox = await SshSandboxes(**machine.options).open(SandboxSpec(tree=tree))
        assert (await sandbox.read("only here")).decode() == (tree / "only here").read_text()
        await sandbox.close()
        assert len(set(trees.glob("*/content")) - before) == 1


async def test_a_file_that_is_too_long_for_a_message_is_refused_and_the_sandbox_goes_on(
    machine: ssh_server.SshMachine, tree: Path
) -> None:
    sandbox = await SshSandboxes(**machine.options).open(SandboxSpec(tree=tree))
    try:
        size = messages.MESSAGE_BYTES + 1
        await sandbox.run(["truncate", "-s", str(size), "long"], timeout_s=30)
        with pytest.raises(SandboxError, match="expected at most 160 MiB in one message"):
            await sandbox.read("long", limit=size)
        assert await sandbox.read("README") == b"as it was\n"
    finally:
        await sandbox.close()


async def test_it_ends_with_our_process_at_its_deadline_or_when_it_is_reaped(
    machine: ssh_server.SshMachine, tree: Path
) -> None:
    kind = SshSandboxes(**machine.options)
    with labelled(run="one", attempt="one.1"):
        first = await kind.open(SandboxSpec(tree=tree))
    second = await SshSandboxes(**machine.options, deadline_s="4").open(SandboxSpec(tree=tree))
    listed = await kind.sandboxes()
    assert [each.labels for each in listed] == [{"run": "one", "attempt": "one.1"}, {}]
    assert 3 < listed[1].deadline - listed[1].opened < 5 < listed[0].deadline - time.time()
    running = asyncio.ensure_future(second.run(["sleep", "100"], timeout_s=200))
    with pytest.raises(SandboxLost, match="deadline"):
        await asyncio.wait_for(running, 60)
    assert [each.id for each in await kind.sandboxes()] == [listed[0].id]
    running = asyncio.ensure_future(first.run(["sleep", "100"], timeout_s=200))
    assert await kind.reap([listed[0].id]) == [listed[0].id]
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(running, 60)
    assert await kind.sandboxes() == []
    third = await kind.open(SandboxSpec(tree=tree))
    process = third._connection._process  # type: ignore[attr-defined]  # as if we were killed
    os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(SandboxError):
        await third.run(["true"], timeout_s=10)
    async with asyncio.timeout(60):
        while await kind.sandboxes():  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    for sandbox in (first, second, third):
        await sandbox.close()


async def test_a_cancelled_command_is_dead_when_the_caller_goes_on(
    machine: ssh_server.SshMachine, tree: Path
) -> None:
    sandbox = await SshSandboxes(**machine.options).open(SandboxSpec(tree=tree))
    running = asyncio.ensure_future(sandbox.run(["sh", "-c", "sleep 3; touch alive"], timeout_s=60))
    await asyncio.sleep(0.5)
    running.cancel()
    await asyncio.wait([running])
    await asyncio.sleep(3.5)
    with pytest.raises(FileNotFoundError):
        await sandbox.read("alive")
    await sandbox.close()


def test_what_does_not_work_is_said(machine: ssh_server.SshMachine, tmp_path: Path) -> None:
    assert SshSandboxes(**machine.options).problems() == []
    other = tmp_path / "ssh.conf"
    other.write_text(machine.config.read_text().replace("/known\n", "/unknown\n"))
    for options, message in (({"config": str(other)}, "Host key verification failed"),):
        with pytest.raises(SandboxError, match=message):
            load_sandboxes("ssh", {**machine.options, **options})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ssh", "give one in ssh's form"),
        ("ssh:-oProxyCommand=x", "give one in ssh's form"),
        ("local:machine", "have no options target"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_kind(name)
