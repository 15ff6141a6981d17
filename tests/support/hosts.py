"""Hosts on one machine, each in a network namespace, with a network between them that delays, loses and is cut."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from support import network_program

DELAY_S = (0.0025, 0.01)
JITTER_S = 0.0025
LOSS = 0.01


def problems() -> list[str]:
    """What is not installed that such a network needs."""
    missing = [name for name in ("ip", "nsenter", "unshare", "setpriv") if shutil.which(name) is None]
    return [f"{', '.join(missing)} is missing (Debian's packages are iproute2 and util-linux)"] if missing else []


def unsupported() -> str:
    """Why this machine can have no such network, whatever is installed; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    probe = f"usprobe-{uuid.uuid4().hex[:8]}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return f"network namespaces cannot be made: {done.stderr.strip()}" if done.returncode else ""


class Host:
    """A host: its name, the address that others reach it by, and the namespace that its processes live in."""

    def __init__(self, name: str, namespace: str, address: str) -> None:
        self.name = name
        self.address = address
        self._namespace = namespace

    @property
    def enter(self) -> list[str]:
        """What comes before a command to run it on this host, under this host's name and as the same process."""
        as_host = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["nsenter", f"--net=/run/netns/{self._namespace}", *as_host]

    def enter_with(self, source: Path, target: Path) -> list[str]:
        """The same, with the directory `source` in the place of `target`."""
        mounted = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
        return [*self.enter, *mounted, f"{source}", f"{target}"]

    def set_link(self, state: str) -> None:
        """Take the interface `down`, so that the host has no route any more, or `up`."""
        network_program.ip("-n", self._namespace, "link", "set", "eth0", state)
        if state == "up":
            network_program.ip("-n", self._namespace, "route", "add", "default", "dev", "eth0")


class HostNetwork:
    """Hosts, by name, and what happens to the network between them."""

    def __init__(self, process: subprocess.Popen[str], prefix: str, names: tuple[str, ...]) -> None:
        self._process = process
        self._cut: set[str] = set()
        self._lock = threading.Lock()
        self.packets: Counter[str] = Counter()
        """How many packets were sent, lost and cut, when the network was last changed or asked."""
        self.hosts = {
            name: Host(name, f"{prefix}-{name}", f"{network_program.NETWORK}.{number + 1}")
            for number, name in enumerate(names)
        }

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut(self, name: str) -> None:
        """Drop every packet from and to a host. Nobody is told."""
        self._cut.add(name)
        self.count()

    def mend(self, name: str) -> None:
        """Carry a host's packets again."""
        self._cut.discard(name)
        self.count()

    def count(self) -> Counter[str]:
        """Count the packets."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"cut": sorted(self._cut)}) + "\n")
            self._process.stdin.flush()
            self.packets = Counter(json.loads(self._process.stdout.readline()))
        return self.packets


@contextmanager
def running_network(*names: str, seed: int) -> Generator[HostNetwork]:
    """A network with these hosts, gone afterwards with all that runs on them."""
    prefix = f"us{uuid.uuid4().hex[:8]}"
    order = {
        "prefix": prefix,
        "hosts": names,
        "seed": seed,
        "delay_s": DELAY_S,
        "jitter_s": JITTER_S,
        "loss": LOSS,
    }
    process = subprocess.Popen(
        [sys.executable, "-P", network_program.__file__, json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal to the tests does not end it before it has cleaned up
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "{}\n", "the network did not start"
        yield HostNetwork(process, prefix, names)
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


class RandomCuts:
    """Cuts hosts off for some seconds, one after the other, by a seed, while the context lasts."""

    def __init__(
        self, network: HostNetwork, seed: int, hosts: Mapping[str, float], pause_s: tuple[float, float]
    ) -> None:
        """`hosts`: for how many seconds each may be cut off at most. Between cuts are pauses of `pause_s`."""
        self._network = network
        self._random = random.Random(seed)
        self._hosts = hosts
        self._pause_s = pause_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._cut, daemon=True)
        self.made: Counter[str] = Counter()
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _cut(self) -> None:
        try:
            while not self._ending.wait(self._random.uniform(*self._pause_s)):
                name = self._random.choice(sorted(self._hosts))
                seconds = self._random.uniform(0.3, self._hosts[name])
                if self._random.random() < 0.5:
                    self._network.cut(name)
                    self._ending.wait(seconds)
                    self._network.mend(name)
                    self.made[f"{name} silent"] += 1
                else:
                    self._network[name].set_link("down")
                    self._ending.wait(seconds)
                    self._network[name].set_link("up")
                    self.made[f"{name} down"] += 1
        except Exception as error:  # noqa: BLE001 - raised at the end of the context
            self.error = error
