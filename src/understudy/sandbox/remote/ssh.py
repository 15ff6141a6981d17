"""The `ssh` kind of sandbox: a local sandbox on another machine that has the same release of Understudy.

    understudy run … --sandbox 'ssh:user@machine'

For each sandbox, ssh starts a worker (`worker.py`) there, which ends with its connection.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from understudy.errors import ConfigError
from understudy.sandbox.base import OpenSandbox
from understudy.sandbox.remote import messages
from understudy.sandbox.remote.connection import ConnectionOptions, WorkerConnection, connect
from understudy.sandbox.remote.sandboxes import DEADLINE_S, STARTING, WORKER_COMMAND, WorkerSandboxes

_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-o", "ClearAllForwardings=yes"),
    *("-o", "ForwardAgent=no", "-o", "PermitLocalCommand=no", "-o", "ControlMaster=no"),
)
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:\[\]-]*")
_ADVICE = (
    "check that ssh connects without asking anything, so the host's key must be known, that the same release of "
    "Understudy is installed there, and that the login shell prints nothing"
)
_VARIABLES = ("HOME", "PATH", "USER", "LOGNAME", "SSH_AUTH_SOCK", "LANG")
"""The environment variables that ssh needs to find its keys; no others are passed on."""


class SshSandboxes(WorkerSandboxes):
    """Opens sandboxes on the machine `target`, a destination for ssh.

    `config` is a file for `ssh -F`; `command` starts the worker there. See WorkerSandboxes for the others.
    """

    name: ClassVar[str] = "ssh"

    def __init__(
        self,
        target: str = "",
        *,
        config: str = "",
        command: str = WORKER_COMMAND,
        deadline_s: str | float = DEADLINE_S,
        starting: str | int = STARTING,
    ) -> None:
        if _HOST.fullmatch(target) is None:
            raise ConfigError(
                f"--sandbox: invalid machine {target!r} behind ssh:; give one in ssh's form, such as "
                "ssh:user@machine"
            )
        super().__init__(f"ssh:{target}", deadline_s=deadline_s, starting=starting)
        options = ["-F", config] if config else []
        self._argv = [*_SSH, *options, "--", target, command]
        self._name = f"ssh {target}"

    async def _connect(self, sockets: Sequence[Path] = ()) -> WorkerConnection:
        env = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        return await connect(self._argv, self._name, sockets, ConnectionOptions(env=env, advice=_ADVICE))

    async def sandboxes(self) -> list[OpenSandbox]:
        """Return the sandboxes that are open on the other machine, the oldest first. Raises SandboxError."""
        return await self._ask(messages.ListRequest(), list[OpenSandbox])

    async def reap(self, ids: Sequence[str]) -> list[str]:
        """End these sandboxes, and those past their deadline; return the ids of the ended ones. Raises
        SandboxError.
        """
        return await self._ask(messages.ReapRequest(list(ids)), list[str])
