"""A provider of the real package harbor that runs commands as processes here."""

from __future__ import annotations

import json
import os
from pathlib import Path

from msgspec import Struct

ENVIRONMENT = Path(__file__).with_name("harbor_environment.py")
HARBOR_PYTHON = os.environ.get("UNDERSTUDY_HARBOR_PYTHON", "")


def problems() -> list[str]:
    """Why there is no such provider here; empty if there is one."""
    return [] if HARBOR_PYTHON else ["UNDERSTUDY_HARBOR_PYTHON names no Python with harbor"]


class HarborProvider(Struct):
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
            "python": HARBOR_PYTHON,
            "command": self.command,
        }
