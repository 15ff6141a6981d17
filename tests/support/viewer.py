"""`understudy view` as a process of its own, and Debian's chromium that looks at it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import UNDERSTUDY

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[str]:
    """The address of a viewer of the stores below a directory; it ends with the context."""
    command = [str(UNDERSTUDY), "view", str(directory), "--port", "0", "--no-browser", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"].rstrip("/")
        finally:
            process.terminate()
            process.wait(60)


def read(url: str, path: str) -> Any:
    """What the API answers at a path."""
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return json.load(answer)


def store_ids(url: str) -> dict[str, str]:
    """The stores' ids by the last part of their names; a loop's waves are left out."""
    stores = read(url, "/api/stores")["stores"]
    return {store["name"].rpartition("/")[2]: store["id"] for store in stores if store["parent_id"] is None}


def browser_path() -> str:
    """Where chromium is; skips the test where there is none."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium here; install it, as: apt-get install chromium")
        pytest.skip("there is no chromium here")
    return path


def axe_source() -> str:
    """The script of axe-core, as npm installs it for the page's sources; skips the test where there is no npm."""
    script = ROOT / "ui/node_modules/axe-core/axe.min.js"
    if not script.exists():
        if shutil.which("npm") is None and not os.environ.get("CI"):
            pytest.skip("there is no npm here to install axe-core with")
        subprocess.run(["npm", "ci", "--silent"], cwd=ROOT / "ui", check=True, capture_output=True, timeout=600)
    return script.read_text(encoding="utf-8")
