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
from urllib.parse import urlsplit

import pytest
from msgspec import Struct
from playwright.sync_api import Browser, Page, expect, sync_playwright

from understudy.store.address import StoreLocation

from support import UNDERSTUDY

ROOT = Path(__file__).parents[2]
TIMEOUT_MS = 60_000
expect.set_options(timeout=TIMEOUT_MS)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def serving(location: StoreLocation, *options: str) -> Iterator[str]:
    """The address of a viewer of the stores below a directory, or of a database; it ends with the context."""
    command = [str(UNDERSTUDY), "view", str(location), "--port", "0", "--no-browser", "--json", *options]
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


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's chromium; it ends with the context. Skips the test where there is none."""
    path = browser_path()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class Watched:
    """A page of the viewer, and what it did that it must not: errors, dialogs, requests to other hosts."""

    def __init__(self, browser: Browser, url: str, width: int = 1280) -> None:
        self.url = url
        self.faults: list[str] = []
        self.page: Page = browser.new_page(viewport={"width": width, "height": 800})
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("pageerror", lambda error: self.faults.append(f"error {error}"))
        self.page.on("console", self._log)
        self.page.on("dialog", self._dismiss)
        self.page.on("request", self._request)

    def _log(self, message) -> None:
        if message.type == "error":
            self.faults.append(f"console {message.text}")

    def _dismiss(self, dialog) -> None:
        self.faults.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def _request(self, request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws") and parts.netloc != urlsplit(self.url).netloc:
            self.faults.append(f"request {request.url}")

    def open(self, path: str) -> Page:
        self.page.goto(self.url + path)
        expect(self.page.locator("h1")).to_be_visible()
        expect(self.page.get_by_text("Loading…")).to_have_count(0)
        return self.page

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


@pytest.fixture(scope="module")
def url(stores: Path) -> Iterator[str]:
    """The address of a viewer of the stores that a module makes in its fixture `stores`."""
    with serving(stores) as address:
        yield address


@pytest.fixture(scope="module")
def ids(url: str) -> dict[str, str]:
    """The stores' ids by name."""
    return store_ids(url)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One chromium for a module."""
    with chromium() as started:
        yield started


@pytest.fixture
def watched(browser: Browser, url: str) -> Iterator[Watched]:
    """A page of the viewer, which must have done nothing that it must not."""
    viewer = Watched(browser, url)
    yield viewer
    viewer.page.close()
    assert not viewer.faults


class ScrollFigures(Struct, frozen=True, kw_only=True):
    """What a scroll cost: the most elements in the document, MB of heap, and CPU milliseconds of long tasks."""

    elements: int
    heap_mb: float
    tasks_ms: tuple[float, ...]


_SCROLL = """async (steps) => {
  const box = document.querySelector('[aria-label=Transcript]');
  const next = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  let elements = 0;
  for (let step = 1; step <= steps; step += 1) {
    box.scrollTop = (box.scrollHeight - box.clientHeight) * step / steps;
    await next();
    while (box.querySelector('[data-index] article') === null) await next();
    elements = Math.max(elements, document.querySelectorAll('*').length);
  }
  return elements;
}"""


def scroll_through(page: Page, steps: int, *, traced: bool = False) -> ScrollFigures:
    """Scroll a transcript from its beginning to its end; at each step turns are shown before the next.

    `tasks_ms` are those of over 10 ms; they are known of a scroll that is `traced`, which takes much longer.
    """
    browser = page.context.browser
    assert browser is not None
    if traced:
        browser.start_tracing(page=page, categories=["toplevel"])
    elements = page.evaluate(_SCROLL, steps)
    events = json.loads(browser.stop_tracing())["traceEvents"] if traced else []
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    session.send("HeapProfiler.collectGarbage")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    main = {
        (each["pid"], each["tid"])
        for each in events
        if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"
    }
    tasks = (
        each.get("tdur", 0) / 1e3
        for each in events
        if each["name"].endswith("RunTask") and (each["pid"], each["tid"]) in main
    )
    return ScrollFigures(
        elements=elements,
        heap_mb=metrics["JSHeapUsedSize"] / 1e6,
        tasks_ms=tuple(sorted(each for each in tasks if each > 10)),
    )
