"""What a killed worker leaves: its sandboxes end, of whatever kind, and another worker makes its attempts."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from understudy.store import Store
from understudy.tasks.records import dump

from support import calc_task, understudy, wait_for
from support.grading import calc_instance
from support.workers import LEASE_S, enqueue, worker

pytestmark = [
    pytest.mark.services,
    pytest.mark.e2e,
    pytest.mark.usefixtures("isolation"),
    pytest.mark.timeout(500),
]

LATEST_S = 60.0
"""When nothing of the attempt may be left, in seconds after the kill, on a machine that is busy."""

BEGINS_S = 200.0
"""How long a worker may take until an agent runs: other machines get all files and an environment first."""


def harbor_name(provider: Any) -> str:
    options = dict(provider.options())
    rest = "&".join(f"{name}={quote(value, safe='/')}" for name, value in options.items() if name != "target")
    return f"harbor:{options['target']}?{rest}"


KINDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "local": ("isolation", lambda _: "local"),
    "docker": ("engine", lambda _: "docker"),
    "ssh": ("machine", lambda machine: machine.name),
    "kubernetes": ("cluster", lambda cluster: cluster.name),
    "harbor": ("provider", harbor_name),
}
"""The fixture that each kind needs, and its name on the command line."""


def processes(*argv: str) -> set[int]:
    """The processes with these arguments, also those in sandboxes on this machine."""
    wanted = b"".join(each.encode() + b"\0" for each in argv)
    pids: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == wanted:
                pids.add(int(path.parent.name))
        except OSError:
            continue
    return pids


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_killed_workers_sandbox_ends_and_its_attempt_is_made_by_another(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    fixture, named = KINDS[kind]
    machine = request.getfixturevalue(fixture)
    name, location = named(machine), tmp_path / "store"
    agent = ("sleep", f"3600.{secrets.randbelow(10**9):09}")
    dump([calc_instance(machine, 0) if kind == "docker" else calc_task(0)], tmp_path / "tasks.jsonl")
    queued = enqueue(
        tmp_path, location, "--engine", "detached", "--sandbox", name, samples=1, command=" ".join(agent)
    )
    assert queued.returncode == 0, queued.stderr
    with worker(location, "-j", "1") as first:
        wait_for(lambda: bool(processes(*agent)), first, BEGINS_S)
        old = processes(*agent)
        os.kill(first.pid, signal.SIGKILL)
        killed = time.monotonic()
        with worker(location, "-j", "1") as second:
            wait_for(lambda: not processes(*agent) & old, second)
            ended_s = time.monotonic() - killed
            wait_for(lambda: bool(processes(*agent)), second, BEGINS_S)
            again_s = time.monotonic() - killed
            sys.stdout.write(f"{kind}: the old agent ended after {ended_s:.1f} s, another at {again_s:.1f} s\n")
            assert ended_s < LATEST_S and again_s > LEASE_S / 2
            with Store.open(location, create=False) as store:
                attempts = store.runs.attempts(store.runs.rollouts()[0].id)
            assert [each.status for each in attempts] == ["unresponsive", "running"]
            if fixture in ("machine", "cluster", "provider"):
                listed = understudy("sandboxes", "list", "--sandbox", name, "--json")
                assert listed.returncode == 0, listed.stderr
                labels = [each["labels"] for each in json.loads(listed.stdout)]
                assert [each.get("attempt") for each in labels] == [attempts[1].id]
            # The second signal requeues what runs at once.
            for _ in range(2):
                second.send_signal(signal.SIGTERM)
                time.sleep(0.5)
            assert second.wait(60) is not None
    assert processes(*agent) == set()
