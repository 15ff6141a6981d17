"""What holds of every kind of sandbox on another machine; each kind's own file has what only it does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from understudy.errors import ConfigError, SandboxError, SandboxLost
from understudy.sandbox.base import Mount, SandboxSpec, labelled, load_sandboxes, open_kind

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("isolation")]


class RemoteKind(Struct):
    """A kind, with options by which it reaches another machine; `name` is how the command line names it."""

    kind: str
    name: str
    options: dict[str, str]

    def load(self, **options: str) -> Any:
        """The sandboxes, checked, with these options besides."""
        return load_sandboxes(self.kind, {**self.options, **options})


KINDS: dict[str, tuple[str, str, Callable[[Any], dict[str, str]]]] = {
    "ssh": ("machine", "ssh:machine", lambda machine: machine.options),
    "kubernetes": ("cluster", "kubernetes:agents", lambda cluster: cluster.options),
    "harbor": ("provider", "harbor:daytona", lambda provider: provider.options()),
}
"""The fixture with a machine of each kind, its name on the command line, and its options."""


@pytest.fixture(params=list(KINDS))
def remote(request: pytest.FixtureRequest) -> RemoteKind:
    fixture, name, options = KINDS[request.param]
    return RemoteKind(request.param, name, options(request.getfixturevalue(fixture)))


async def test_connections_to_the_gateway_come_back_and_there_is_no_other_network(
    remote: RemoteKind, tree: Path
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data.upper())
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, tree.parent / "gateway.sock")
    spec = SandboxSpec(tree=tree, mounts=(Mount(tree.parent / "gateway.sock", "/run/understudy/gateway.sock"),))
    sandbox = await remote.load().open(spec)
    script = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/understudy/gateway.sock');"
        "s.sendall(b'hello' * 100000); s.shutdown(1); print(len(s.makefile().read().replace('HELLO', '1')))"
    )
    try:
        assert await sandbox.read("README") == b"as it was\n"
        done = await sandbox.run(["python3", "-c", script], timeout_s=60)
        assert done.stdout == b"100000\n", done
        devices = (await sandbox.run(["cat", "/proc/net/dev"], timeout_s=30)).stdout.decode()
        assert [line.split(":")[0].strip() for line in devices.splitlines() if ":" in line] == ["lo"]
    finally:
        await sandbox.close()
        server.close()


async def test_it_is_listed_by_its_labels_until_it_is_reaped(remote: RemoteKind, tree: Path) -> None:
    kind = remote.load()
    with labelled(run="one", attempt="one.1"):
        sandbox = await kind.open(SandboxSpec(tree=tree))
    (listed,) = await kind.sandboxes()
    assert listed.labels == {"run": "one", "attempt": "one.1"}
    running = asyncio.ensure_future(sandbox.run(["sleep", "100"], timeout_s=200))
    assert await kind.reap([listed.id]) == [listed.id]
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(running, 60)
    assert await kind.sandboxes() == []
    await sandbox.close()


async def test_it_ends_when_our_process_is_gone(remote: RemoteKind, tree: Path) -> None:
    kind = remote.load()
    sandbox = await kind.open(SandboxSpec(tree=tree))
    process = sandbox._connection._process  # the program that holds the connection, as if we had been ended
    os.kill(process.pid, signal.SIGTERM)
    with pytest.raises(SandboxError):
        await sandbox.run(["true"], timeout_s=30)
    async with asyncio.timeout(60):
        while await kind.sandboxes():  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    await sandbox.close()


def test_a_worker_that_does_not_start_is_named_with_what_was_expected(remote: RemoteKind) -> None:
    assert remote.load().problems() == []
    for command, message in (("echo welcome", "expected the line"), ("no-such-program", "not found")):
        with pytest.raises(SandboxError, match=message):
            remote.load(command=command)


@pytest.mark.parametrize("name", [name for _, name, _ in KINDS.values()])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("deadline_s=soon", "got deadline_s=soon"),
        ("deadline_s=-1", "deadline_s"),
        ("starting=0", "at least 1"),
        ("color=red", "have no options color"),
    ],
)
def test_an_option_that_means_nothing_is_refused(name: str, option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_kind(f"{name}?{option}")
