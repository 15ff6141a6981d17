"""A real sshd on loopback with keys of its own, and a configuration by which ssh gets there without a question."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from msgspec import Struct

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class SshMachine(Struct, frozen=True):
    """What ssh knows as `machine` by the file `config`; `command` is our worker there, with its own cache."""

    config: Path
    command: str
    cache: Path
    log: Path

    @property
    def options(self) -> dict[str, str]:
        """The options of a kind of sandbox on it."""
        return {"target": "machine", "config": str(self.config), "command": self.command}

    @property
    def name(self) -> str:
        """The same as one name, for `--sandbox`."""
        return f"ssh:machine?config={self.config}&command={self.command.replace(' ', '%20')}"


def problems() -> list[str]:
    """Why there can be no sshd here."""
    missing = [name for name, path in (("sshd", SSHD), ("ssh", shutil.which("ssh"))) if path is None]
    return [f"there is no {name} here; apt-get install openssh-server openssh-client" for name in missing]


@contextlib.contextmanager
def ssh_machine(directory: Path) -> Generator[SshMachine]:
    """Start an sshd that takes one key, as whoever runs the tests."""
    assert SSHD is not None
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(command, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (directory / "authorized").write_bytes((directory / "user.pub").read_bytes())
    (directory / "known").write_text(f"[127.0.0.1]:{port} {(directory / 'host.pub').read_text()}")
    (directory / "sshd.conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {directory}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {directory}/authorized\nPasswordAuthentication no\nStrictModes no\n"
        "PermitRootLogin prohibit-password\nMaxStartups 100\n"
    )
    config = directory / "ssh.conf"
    config.write_text(
        f"Host machine\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {directory}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {directory}/known\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    log = directory / "sshd.log"
    process = subprocess.Popen([SSHD, "-D", "-f", str(directory / "sshd.conf"), "-E", str(log)])
    cache = directory / "cache"
    cache.mkdir()
    command = f"env UNDERSTUDY_CACHE={cache} {Path(sys.executable).with_name('understudy')} sandboxes serve"
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield SshMachine(config, command, cache, log)
    finally:
        process.kill()
        process.wait()
