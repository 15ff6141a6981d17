"""Sandboxes in environments of the real package harbor, whose provider runs commands as processes here."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from msgspec import Struct

from understudy.errors import ConfigError, SandboxError, SandboxLost
from understudy.sandbox.base import Mount, SandboxSpec, labelled, load_sandboxes, open_kind
from understudy.sandbox.remote.harbor import HarborSandboxes

from support import understudy

ENVIRONMENT = Path(__file__).parents[1] / "support" / "harbor_environment.py"
PYTHON = os.environ.get("UNDERSTUDY_HARBOR_PYTHON", "")

pytestmark = [
    pytest.mark.services,
    pytest.mark.usefixtures("isolation"),
    pytest.mark.skipif(not PYTHON, reason="UNDERSTUDY_HARBOR_PYTHON names no Python with harbor"),
]


class Provider(Struct):
    """Our environment for harbor, and the options of a kind of sandbox with it."""

    directory: Path
    command: str

    @property
    def log(self) -> list[str]:
        """What was started and stopped."""
        path = self.directory / "log"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def options(self, **arguments: object) -> dict[str, str]:
        """The options; `arguments` are the environment's."""
        path = self.directory / "options.json"
        path.write_text(json.dumps({"log": str(self.directory / "log"), **arguments}))
        return {
            "target": "harbor_environment:ProcessEnvironment",
            "image": "understudy:0.1.0",
            "options": str(path),
            "python": PYTHON,
            "command": self.command,
        }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the environments, which takes a while to fill."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def provider(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Provider:
    modules = tmp_path / "modules"
    modules.mkdir()
    shutil.copy(ENVIRONMENT, modules)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "own cache"))
    program = Path(sys.executable).with_name("understudy")
    return Provider(tmp_path, f"env UNDERSTUDY_CACHE={cache} PYTHONPATH= {program} sandboxes serve")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    path.mkdir()
    (path / "README").write_text("as it was\n")
    # More than one piece that is an argument of a command.
    (path / "large").write_bytes(os.urandom(300_000))
    return path


async def test_a_sandbox_works_and_its_environment_is_stopped(provider: Provider, tree: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data.upper())
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, tree.parent / "gateway.sock")
    spec = SandboxSpec(tree=tree, mounts=(Mount(tree.parent / "gateway.sock", "/run/understudy/gateway.sock"),))
    kind = HarborSandboxes(**provider.options())
    with labelled(run="one", attempt="one.1"):
        sandbox = await kind.open(spec)
    script = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/understudy/gateway.sock');"
        "s.sendall(b'hello' * 100000); s.shutdown(1); print(len(s.makefile().read().replace('HELLO', '1')))"
    )
    try:
        assert await sandbox.read("large") == (tree / "large").read_bytes()
        done = await sandbox.run(["python3", "-c", script], timeout_s=60)
        assert done.stdout == b"100000\n", done
        (listed,) = await kind.sandboxes()
        assert listed.labels == {"run": "one", "attempt": "one.1"}
    finally:
        await sandbox.close()
        server.close()
    assert (await kind.sandboxes(), provider.log) == ([], ["start", "stop"])


async def test_a_provider_that_fails_now_and_then_costs_nothing(provider: Provider, tree: Path) -> None:
    sandbox = await HarborSandboxes(**provider.options(failing=4)).open(SandboxSpec(tree=tree))
    try:
        for number in range(5):
            done = await sandbox.run(["sh", "-c", f"cat; echo {number}"], stdin=b"in ", timeout_s=60)
            assert done.stdout == b"in %d\n" % number
        assert await sandbox.read("large") == (tree / "large").read_bytes()
    finally:
        await sandbox.close()


async def test_environments_end_when_they_are_reaped_or_we_are_gone(provider: Provider, tree: Path) -> None:
    kind = HarborSandboxes(**provider.options())
    first, second = [await kind.open(SandboxSpec(tree=tree)) for _ in range(2)]
    listed = await kind.sandboxes()
    assert len(listed) == 2
    command = ("sandboxes", "reap", listed[0].id, "--sandbox", "harbor:docker", "--json")
    reaped = understudy(*command)
    assert (reaped.returncode, json.loads(reaped.stdout)) == (0, [listed[0].id]), reaped.stderr
    with pytest.raises(SandboxLost):
        await first.run(["sleep", "100"], timeout_s=200)
    process = second._connection._process  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGTERM)
    with pytest.raises(SandboxError):
        await second.run(["true"], timeout_s=30)
    for sandbox in (first, second):
        await sandbox.close()
    assert sorted(provider.log) == ["start", "start", "stop", "stop"]


def test_errors_say_what_to_do(provider: Provider, tmp_path: Path) -> None:
    options = provider.options()
    assert HarborSandboxes(**options).problems() == []
    broken = tmp_path / "broken.json"
    broken.write_text("[1]")
    for changed, message in (
        ({"image": "no-such-image:1"}, "manifest for no-such-image:1 not found"),
        ({"command": "no-such-program"}, "not found"),
        ({"command": "echo welcome"}, "expected the line"),
        ({"python": sys.executable}, "No module named 'harbor'"),
        ({"python": "/no/python"}, "there is no Python /no/python"),
        ({"target": "no-such-provider"}, "no-such-provider"),
        ({"options": str(broken)}, "expected a JSON object"),
        ({"options": str(tmp_path / "missing")}, "invalid options of harbor's environment"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_sandboxes("harbor", {**options, **changed})
    # An environment that did not start is stopped too.
    assert provider.log.count("start") == provider.log.count("stop") - 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("harbor", "no provider; expected one of harbor's"),
        ("harbor:daytona?start_s=0", "start_s"),
        ("harbor:daytona?template=x", "have no options template"),
    ],
)
def test_invalid_options(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_kind(name)
