"""The commands of a demonstration, each run in a process of its own, as a user would start it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import typer

from understudy.errors import ConfigError


class DemoSteps:
    """Runs commands one after another, prints each before it begins, and passes on its progress."""

    def __init__(self, directory: Path, agent: str = "claude-code") -> None:
        """`directory` is created for the files of the demonstration. What a run of the agent needs is fetched."""
        self.directory = directory
        self._began = time.monotonic()
        directory.mkdir(parents=True, exist_ok=True)
        self._run("setup", "--agent", agent)

    def command(self, *arguments: str | Path) -> dict[str, Any]:
        """Run a command with `--json`, and return the decoded output.

        Raises ConfigError if it ends with an error.
        """
        return json.loads(self._run(*arguments, "--json"))

    def say(self, text: str) -> None:
        """Print a line with the time since the demonstration began."""
        typer.echo(f"[{time.monotonic() - self._began:4.0f} s] {text}")

    def _run(self, *arguments: str | Path) -> str:
        texts = [str(argument) for argument in arguments]
        typer.echo(f"\n$ understudy {shlex.join(texts)}")
        completed = subprocess.run(
            [sys.executable, "-m", "understudy", *texts], stdout=subprocess.PIPE, text=True, check=False
        )
        if completed.returncode != 0:
            raise ConfigError(
                f"the command above ended with exit code {completed.returncode}, expected 0; correct what its "
                "message reports, then run the same demo again, which continues from here\n"
                f"{completed.stdout}".rstrip()
            )
        return completed.stdout
