"""Makes connections to other machines time out in a network namespace, as behind a firewall that drops packets.

In a namespace without routes such a connection fails at once, which makes tests of connection timeouts fail. With
a default route on the loopback interface, packets arrive there and are dropped, because they are addressed to
others.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading

_CLONE_NEWNET = 0x40000000
_LOOPBACK = 1
"""The number of the loopback interface, which is the first of every network namespace."""

_NEW_ROUTE, _REQUEST_CREATE_ACK = 24, 0x405
_MAIN_TABLE, _BOOT, _SCOPE_LINK, _UNICAST, _OUT_INTERFACE = 254, 3, 253, 1, 4


def drop_packets(namespace: str) -> None:
    """Make connections to other machines time out in the network namespace at this path in /proc.

    Raises OSError when the namespace is gone, or this process has no root rights over it.
    """
    failed: list[OSError] = []

    def work() -> None:
        try:
            _enter(namespace)
            add_default_route()
        except OSError as error:
            failed.append(error)

    # setns changes only the calling thread, so a new thread enters the namespace and ends there.
    thread = threading.Thread(target=work, name="network")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _enter(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the network namespace: {os.strerror(code)}", namespace)
    finally:
        os.close(descriptor)


def add_default_route() -> None:
    """Add the route in this thread's network namespace; an existing one stays. Raises OSError."""
    route = struct.pack("=8BI", socket.AF_INET, 0, 0, 0, _MAIN_TABLE, _BOOT, _SCOPE_LINK, _UNICAST, 0)
    attribute = struct.pack("=HHI", 8, _OUT_INTERFACE, _LOOPBACK)
    head = struct.pack("=IHHII", 16 + len(route) + len(attribute), _NEW_ROUTE, _REQUEST_CREATE_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(head + route + attribute)
        (code,) = struct.unpack_from("=i", netlink.recv(4096), 16)
    if code:
        raise OSError(-code, f"cannot add the default route of the sandbox: {os.strerror(-code)}")


if __name__ == "__main__":
    add_default_route()
