"""Sandboxes in environments of the real package harbor, whose provider runs commands as processes here."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from understudy.errors import ConfigError, SandboxError, SandboxLost
from understudy.sandbox.base import SandboxSpec, load_sandboxes, open_kind
from understudy.sandbox.remote.harbor import HarborSandboxes

from support import understudy
from support.harbor_provider import HarborProvider

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("isolation")]


async def test_large_files_get_there_and_the_environment_is_stopped(provider: HarborProvider, tree: Path) -> None:
    # More than one piece that is an argument of a command.
    (tree / "large").write_bytes(os.urandom(300_000))
    kind = HarborSandboxes(**provider.options())
    sandbox = await kind.open(SandboxSpec(tree=tree))
    try:
        assert await sandbox.read("large") == (tree / "large").read_bytes()
    finally:
        await sandbox.close()
    assert (await kind.sandboxes(), provider.log) == ([], ["start", "stop"])


async def test_a_provider_that_fails_now_and_then_costs_nothing(provider: HarborProvider, tree: Path) -> None:
    (tree / "large").write_bytes(os.urandom(300_000))
    sandbox = await HarborSandboxes(**provider.options(failing=4)).open(SandboxSpec(tree=tree))
    try:
        for number in range(5):
            done = await sandbox.run(["sh", "-c", f"cat; echo {number}"], stdin=b"in ", timeout_s=60)
            assert done.stdout == b"in %d\n" % number
        assert await sandbox.read("large") == (tree / "large").read_bytes()
    finally:
        await sandbox.close()


async def test_environments_end_when_they_are_reaped_or_we_are_gone(provider: HarborProvider, tree: Path) -> None:
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


def test_errors_say_what_to_do(provider: HarborProvider, tmp_path: Path) -> None:
    options = provider.options()
    assert HarborSandboxes(**options).problems() == []
    broken = tmp_path / "broken.json"
    broken.write_text("[1]")
    not_utf8 = tmp_path / "not-utf-8.json"
    not_utf8.write_bytes(b'{"a": "\xff"}')
    for changed, message in (
        ({"image": "no-such-image:1"}, "manifest for no-such-image:1 not found"),
        ({"python": sys.executable}, "No module named 'harbor'"),
        ({"python": "/no/python"}, "python=/no/python: no such program"),
        ({"target": "no-such-provider"}, "no-such-provider"),
        ({"options": str(broken)}, "give the path of a file with a JSON object"),
        ({"options": str(not_utf8)}, "give the path of a file with a JSON object"),
        ({"options": str(tmp_path / "missing")}, "give the path of a file with a JSON object"),
    ):
        with pytest.raises((ConfigError, SandboxError), match=message):
            load_sandboxes("harbor", {**options, **changed})
    # An environment that did not start is stopped too.
    assert provider.log.count("start") == provider.log.count("stop") - 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("harbor", "no provider; give one of harbor's"),
        ("harbor:daytona?start_s=0", "start_s"),
    ],
)
def test_invalid_options(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_kind(name)
