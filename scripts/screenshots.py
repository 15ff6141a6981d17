"""Pictures of the viewer's pages for the documentation: `make screenshots`, after `make demo`.

Takes the directory whose stores are shown, and writes PNGs to docs/images. Needs chromium.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

UNDERSTUDY = Path(sys.executable).with_name("understudy")
IMAGES = Path(__file__).parents[1] / "docs/images"
SIZE = {"width": 1280, "height": 760}


def read(url: str, path: str) -> Any:
    """What the API of the viewer answers at a path."""
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return json.load(answer)


def pages(url: str) -> Iterator[tuple[str, str, str]]:
    """Name, address and theme of each picture that the stores have something for."""
    stores = read(url, "/api/stores")["stores"]
    yield "runs", "/", "light"
    runs = [store for store in stores if store["kind"] == "run" and store["graded"]]
    if runs:
        # One with solved and unsolved rollouts shows more than one in which all are alike.
        run = max(
            runs, key=lambda run: (run["parent_id"] is None, min(run["solved"], run["graded"] - run["solved"]))
        )
        yield "run", f"/s/{run['id']}", "light"
        listed = read(url, f"/api/stores/{run['id']}/rollouts?outcome=unsolved")["rollouts"]
        listed = listed or read(url, f"/api/stores/{run['id']}/rollouts")["rollouts"]
        rollout = max(listed, key=lambda row: row["turns"])
        yield "transcript", f"/s/{run['id']}/r/{rollout['id']}?turn=2", "light"
        yield "tokens", f"/s/{run['id']}/r/{rollout['id']}?view=tokens", "dark"
        yield "patch", f"/s/{run['id']}/r/{rollout['id']}?view=patch", "light"
    for loop in [store for store in stores if store["kind"] == "loop"][:1]:
        yield "loop", f"/s/{loop['id']}", "dark"


def main() -> None:
    """Write the pictures; exits with a message where there is no chromium."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("screenshots: no chromium here; install it, as: apt-get install chromium")
    IMAGES.mkdir(parents=True, exist_ok=True)
    command = [UNDERSTUDY, "view", str(directory), "--port", "0", "--no-browser", "--read-only", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"].rstrip("/")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, path, theme in pages(url):
                page = browser.new_page(viewport=SIZE, color_scheme=theme)
                page.goto(url + path)
                # The stream of events never ends, so the page is whole when nothing of it says that it is loading.
                expect(page.locator("h1")).to_be_visible(timeout=60_000)
                expect(page.get_by_text("Loading…")).to_have_count(0, timeout=60_000)
                page.wait_for_timeout(500)
                if name == "tokens":
                    # The second call is the first one that edits.
                    page.keyboard.press("j")
                    page.wait_for_timeout(500)
                    page.keyboard.press("n")
                    page.wait_for_timeout(200)
                page.screenshot(path=IMAGES / f"{name}.png")
                page.close()
                print(f"{name}: docs/images/{name}.png")
            browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
