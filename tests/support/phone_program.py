"""Runs an agent in a network namespace whose only hosts are ours, and prints whom it tried to reach, as JSON.

    unshare --net --mount python -m support.phone_program AGENT DIRECTORY

Every name resolves to an address of the loopback interface, where connections are noted and closed. A control is
noted first. The agent reads, edits and runs a command in a sandbox without isolation, so that the network is this
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import socket
import struct
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

from understudy.config import cache_dir
from understudy.sandbox.base import Sandbox, SandboxSpec
from understudy.sandbox.unsafe import UnsafeSandboxes
from understudy.tasks.environment import python_environment

from fakes.vllm import Say
from support.agents import FILE, AgentRig

HOST = "127.0.0.2"
PORTS = (80, 443)
SET_FLAGS, UP, BIND = 0x8914, 0x1, 4096

contacts: list[str] = []


def prepare_network(directory: Path) -> None:
    """Bring the loopback interface up, and make this machine's own name server the one that is asked."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
    names = directory / "resolv.conf"
    names.write_text("nameserver 127.0.0.1\n")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(bytes(names), b"/etc/resolv.conf", None, BIND, None) != 0:
        raise OSError(ctypes.get_errno(), "cannot mount over /etc/resolv.conf")


def answer_names(server: socket.socket) -> None:
    """Note every name that is asked for, and answer with `HOST`."""
    while True:
        query, client = server.recvfrom(4096)
        labels, end = list[str](), 12
        while length := query[end]:
            labels.append(query[end + 1 : end + 1 + length].decode("latin-1"))
            end += length + 1
        contacts.append(f"name {'.'.join(labels)}")
        (kind,) = struct.unpack(">H", query[end + 1 : end + 3])
        address = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 5, 4) + socket.inet_aton(HOST) if kind == 1 else b""
        counts = struct.pack(">HHHH", 1, 1 if address else 0, 0, 0)
        server.sendto(query[:2] + b"\x81\x80" + counts + query[12 : end + 5] + address, client)


def take_connections(server: socket.socket, port: int) -> None:
    """Note every connection, then close it: the client may go on at once."""
    while True:
        connection = server.accept()[0]
        contacts.append(f"connection to port {port}")
        connection.close()


def listen() -> None:
    """Start the name server and the hosts."""
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind(("127.0.0.1", 53))
    threading.Thread(target=answer_names, args=(names,), daemon=True).start()
    for port in PORTS:
        server = socket.create_server((HOST, port))
        threading.Thread(target=take_connections, args=(server, port), daemon=True).start()


class LinkedSandboxes(UnsafeSandboxes):
    """Sandboxes whose trees are found at a path that is known before."""

    def __init__(self, link: Path) -> None:
        super().__init__()
        self._link = link

    async def open(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().open(spec)
        self._link.symlink_to(sandbox.workdir)
        return sandbox


async def work(agent: str, directory: Path) -> dict[str, object]:
    """Let the agent work; returns how it ended."""
    link = directory / "link"
    rig = AgentRig(agent, directory, LinkedSandboxes(link), python_environment(cache_dir()))
    tools = [rig.tools.read(f"{link}/{FILE}"), rig.tools.edit(f"{link}/{FILE}"), rig.tools.shell("echo hello")]
    steps = [Say(text="So.", tools=[rig.call(str(number), tool)]) for number, tool in enumerate(tools)]
    run = await rig.run(*steps, rig.done())
    return {"outcome": run.result.outcome, "message": run.result.message, "file": run.file}


def main(agent: str, directory: Path) -> None:
    """Print the contacts of the control, how the agent ended, and the agent's contacts."""
    prepare_network(directory)
    listen()
    with contextlib.suppress(urllib.error.URLError, OSError):
        urllib.request.urlopen("https://control.invalid/", timeout=5)
    control = list(contacts)
    end = asyncio.run(work(agent, directory))
    sys.stdout.write(json.dumps({**end, "control": control, "contacts": contacts[len(control) :]}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
