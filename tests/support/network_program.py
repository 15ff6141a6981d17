"""A network of hosts on one machine: namespaces of Linux, and a switch in this process that carries their packets.

Each host has a namespace with a TUN interface whose other end is here. So every packet can be delayed, lost, or
dropped while its host is cut off: as on a bad network, connections meet silence in place of resets.
It works on kernels without netem, too. Needs root, `ip` of iproute2 and /dev/net/tun.

The argument is an object in JSON: `prefix` (of the namespaces' names), `hosts` (their names), `seed`,
`delay_s` (the least and the most that a packet takes, by the pair of hosts), `jitter_s` (the most that is
added to it), `loss` (the share of packets that is lost). Prints a line when the network is up. Each line of
stdin is then an object with the names of the hosts that are `cut` off from now on; the answer is a line with
the packets so far. At the end of stdin, also when the parent is gone, all processes in the namespaces are
killed and the namespaces removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

NETWORK = "10.77.0"
_PREFIX = bytes(map(int, NETWORK.split(".")))
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_LARGEST = 1 << 16


def ip(*arguments: str) -> str:
    """Run `ip`; return what it prints. Raises CalledProcessError."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def add_host(namespace: str, interface: str, address: str) -> int:
    """Make a namespace with loopback and an interface. Returns the descriptor of the interface's other end."""
    ip("netns", "add", namespace)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _TUN_WITHOUT_HEADER))
    ip("link", "set", interface, "netns", namespace)
    ip("-n", namespace, "link", "set", interface, "name", "eth0")
    ip("-n", namespace, "link", "set", "lo", "up")
    ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
    ip("-n", namespace, "link", "set", "eth0", "mtu", "1500", "txqueuelen", "5000", "up")
    # Programs learn their own address by asking for the way to some host of the internet.
    ip("-n", namespace, "route", "add", "default", "dev", "eth0")
    return end


def remove_host(namespace: str) -> None:
    """End what runs in a namespace, and remove it."""
    with contextlib.suppress(subprocess.CalledProcessError):
        for process in ip("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        ip("netns", "delete", namespace)


class Switch:
    """Carries packets between the interfaces, in order between each two of them."""

    def __init__(self, ends: list[int], order: Mapping[str, Any]) -> None:
        self._ends = ends
        self._random = random.Random(order["seed"])
        self._jitter_s: float = order["jitter_s"]
        self._loss: float = order["loss"]
        pairs = [(one, other) for one in range(len(ends)) for other in range(one)]
        delays = {pair: self._random.uniform(*order["delay_s"]) for pair in pairs}
        self._delay_s = delays | {(other, one): delay for (one, other), delay in delays.items()}
        self._latest: dict[tuple[int, int], float] = {}
        self._due: list[tuple[float, int, int, int, bytes]] = []
        self.cut: frozenset[int] = frozenset()
        self.packets: Counter[str] = Counter()

    def take(self, source: int) -> None:
        """Read what a host has sent."""
        with contextlib.suppress(OSError):  # nothing more to read, or the interface is down
            while packet := os.read(self._ends[source], _LARGEST):
                is_ours = packet[0] >> 4 == 4 and packet[16:19] == _PREFIX
                if is_ours and 0 <= (target := packet[19] - 1) < len(self._ends):
                    self._send(source, target, packet)

    def _send(self, source: int, target: int, packet: bytes) -> None:
        if source in self.cut or target in self.cut:
            self.packets["cut"] += 1
        elif self._random.random() < self._loss:
            self.packets["lost"] += 1
        else:
            pair = source, target
            due = time.monotonic() + self._delay_s[pair] + self._random.uniform(0, self._jitter_s)
            due = self._latest[pair] = max(due, self._latest.get(pair, 0.0))
            self.packets["sent"] += 1
            heapq.heappush(self._due, (due, self.packets["sent"], source, target, packet))

    def deliver(self) -> float | None:
        """Hand over what is due. Returns in how many seconds the next packet is; None if there is none."""
        while self._due:
            if (left := self._due[0][0] - time.monotonic()) > 0:
                return left
            _, _, source, target, packet = heapq.heappop(self._due)
            if source in self.cut or target in self.cut:
                self.packets["cut"] += 1
                continue
            with contextlib.suppress(OSError):  # the interface is down
                os.write(self._ends[target], packet)
        return None


def serve(order: Mapping[str, Any], ends: list[int]) -> None:
    """Carry packets until stdin ends."""
    names: list[str] = order["hosts"]
    switch = Switch(ends, order)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        for number, end in enumerate(ends):
            selector.register(end, selectors.EVENT_READ, number)
        wait_s: float | None = None
        while True:
            for key, _ in selector.select(wait_s):
                if key.fileobj is not sys.stdin:
                    switch.take(key.data)
                elif line := sys.stdin.readline():
                    switch.cut = frozenset(names.index(name) for name in json.loads(line)["cut"])
                    sys.stdout.write(json.dumps(switch.packets) + "\n")
                    sys.stdout.flush()
                else:
                    return
            wait_s = switch.deliver()


def main() -> None:
    """Make the hosts, carry their packets, and remove them."""
    order = json.loads(sys.argv[1])
    namespaces = [f"{order['prefix']}-{name}" for name in order["hosts"]]
    try:
        ends = [
            add_host(namespace, f"us{os.getpid()}n{number}", f"{NETWORK}.{number + 1}")
            for number, namespace in enumerate(namespaces)
        ]
        sys.stdout.write("{}\n")
        sys.stdout.flush()
        serve(order, ends)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)}: {error.stderr}")
    finally:
        for namespace in namespaces:
            remove_host(namespace)


if __name__ == "__main__":
    main()
