"""The `harbor` kind of sandbox: a local sandbox in an environment of the package harbor, which has many providers.

    understudy run … --sandbox 'harbor:daytona?image=understudy:0.1.0&python=harbor/bin/python'

For each sandbox, a program (`harbor_program.py`) starts an environment of the provider and a worker (`worker.py`)
in it, and stops the environment with the connection.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from understudy.config import cache_dir
from understudy.errors import ConfigError
from understudy.sandbox.base import OpenSandbox, sandbox_labels
from understudy.sandbox.remote import relay
from understudy.sandbox.remote.connection import ConnectionOptions, WorkerConnection, connect
from understudy.sandbox.remote.registry import SandboxRegistry
from understudy.sandbox.remote.sandboxes import (
    DEADLINE_S,
    START_S,
    STARTING,
    WORKER_COMMAND,
    WorkerSandboxes,
    positive_seconds,
)

_PROGRAM = Path(__file__).with_name("harbor_program.py")
_STOP_S = 120.0
_ADVICE = (
    "check that `python` names a Python of at least 3.12 that has harbor with the provider's extra, that the "
    "provider's credentials are set, and that the image has the same release of Understudy"
)


class HarborSandboxes(WorkerSandboxes):
    """Opens sandboxes in environments of `target`: a provider of harbor, or MODULE:CLASS of an environment.

    `image` is the environments' container image, `options` a JSON file with the arguments of harbor's environment
    (what `harbor run --ek` takes), `python` a Python that has harbor. `command` starts the worker; an environment
    may take `start_s` seconds to start. See WorkerSandboxes for the others.
    """

    name: ClassVar[str] = "harbor"

    def __init__(
        self,
        target: str = "",
        *,
        image: str = "",
        options: str = "",
        python: str = "",
        command: str = WORKER_COMMAND,
        deadline_s: str | float = DEADLINE_S,
        starting: str | int = STARTING,
        start_s: str | float = START_S,
    ) -> None:
        if not target:
            raise ConfigError(
                "--sandbox harbor: no provider; give one of harbor's, such as harbor:daytona?image=IMAGE"
            )
        address = f"harbor:{target}"
        super().__init__(address, deadline_s=deadline_s, starting=starting)
        self._start_s = positive_seconds(address, "start_s", start_s)
        self._settings = {
            "provider": target,
            "image": image,
            "options": _options(options) if options else {},
            "command": command,
            "start_s": self._start_s,
        }
        self._python = python or sys.executable
        self._registry = SandboxRegistry(cache_dir() / "remote" / "harbor", signal.SIGTERM)

    async def _connect(self, sockets: Sequence[Path] = ()) -> WorkerConnection:
        python = shutil.which(self._python)
        if python is None:
            raise ConfigError(
                f"--sandbox {self._address}: python={self._python}: no such program; give the path of a Python "
                "3.12 or later that has the package harbor"
            )
        name = f"understudy-{uuid.uuid4().hex[:12]}"
        settings = msgspec.json.encode({**self._settings, "session": name}).decode()
        now = time.time()
        sandbox = OpenSandbox(id=name, labels=sandbox_labels(), opened=now, deadline=now + self._deadline_s)

        async def unregister() -> None:
            self._registry.remove(name)

        options = ConnectionOptions(
            advice=_ADVICE,
            start_s=self._start_s + relay.START_S,
            end_s=_STOP_S,
            on_start=lambda pid: self._registry.add(sandbox, pid),
            on_close=unregister,
        )
        return await connect(
            (python, "-P", str(_PROGRAM), settings), f"{self._address}: environment {name}", sockets, options
        )

    async def sandboxes(self) -> list[OpenSandbox]:
        """Return the sandboxes that processes of this machine and cache have open, the oldest first."""
        return self._registry.sandboxes()

    async def reap(self, ids: Sequence[str]) -> list[str]:
        """End these sandboxes, and those past their deadline, among those that this machine has open; return the
        ids of the ended ones.
        """
        return self._registry.reap(list(ids))


def _options(path: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:  # msgspec's errors, and those of text that is not UTF-8
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--sandbox harbor: options={path}: cannot be read: {reason}; give the path of a file with a JSON "
            "object, the options of harbor's environment"
        ) from error
