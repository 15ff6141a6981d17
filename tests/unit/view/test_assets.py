"""The built page: its size, that it is what its sources build to, and that it names nothing outside."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from understudy.view.openapi import document

ROOT = Path(__file__).parents[3]
ASSETS = ROOT / "src/understudy/view/assets"
FIRST_PAGE_BYTES = 400_000
"""The most bytes, gzipped, that the first page may take."""


def test_the_first_page_is_small():
    files = [file for file in ASSETS.rglob("*") if file.is_file()]
    assert {"index.html", "viewer.js", "viewer.css"} <= {file.name for file in files}
    assert sum(len(gzip.compress(file.read_bytes(), mtime=0)) for file in files) <= FIRST_PAGE_BYTES


def test_the_page_has_no_inline_script_or_style_which_its_policy_forbids():
    page = (ASSETS / "index.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    assert scripts
    for attributes, content in scripts:
        assert 'src="/assets/' in attributes
        assert content.strip() == ""
    assert "<style" not in page and " style=" not in page and not re.search(r"\son\w+=", page)


def test_the_page_loads_nothing_from_elsewhere():
    addresses = re.findall(r'(?:src|href)="([^"]*)"', (ASSETS / "index.html").read_text(encoding="utf-8"))
    assert addresses
    assert all(address.startswith("/") and not address.startswith("//") for address in addresses)
    assert not re.search(r"url\((?!\))|@import", (ASSETS / "assets/viewer.css").read_text(encoding="utf-8"))


def test_nothing_of_the_sources_writes_html():
    sources = [*(ROOT / "ui/src").rglob("*.ts"), *(ROOT / "ui/src").rglob("*.tsx")]
    assert sources
    for source in sources:
        text = source.read_text(encoding="utf-8")
        assert not re.search(r"dangerouslySetInnerHTML|\.innerHTML|outerHTML|insertAdjacentHTML|\beval\(", text), (
            source
        )


def test_the_lock_names_no_registry():
    lock = (ROOT / "ui/package-lock.json").read_text(encoding="utf-8")
    assert '"integrity"' in lock
    assert '"resolved"' not in lock


def without_comments(file: Path) -> list[str]:
    """The lines of types without their docstrings, which may change for other readers."""
    text = re.sub(r"/\*\*.*?\*/", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.services
def test_the_page_and_its_types_are_what_their_sources_make(tmp_path: Path):
    if shutil.which("npm") is None and not os.environ.get("CI"):
        pytest.skip("there is no npm here")
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("node_modules")
    shutil.copytree(ROOT / "ui", copy / "ui", ignore=ignored)
    subprocess.run(["npm", "ci", "--silent"], cwd=copy / "ui", check=True, capture_output=True, timeout=600)
    types = tmp_path / "schema.d.ts"
    (tmp_path / "openapi.json").write_bytes(msgspec.json.encode(document()))
    make_types = ["npm", "exec", "--", "openapi-typescript", str(tmp_path / "openapi.json"), "-o", str(types)]
    subprocess.run(make_types, cwd=copy / "ui", check=True, capture_output=True, timeout=600)
    committed = ROOT / "ui/src/api/schema.d.ts"
    assert without_comments(types) == without_comments(committed), (
        "the types of the API changed: run `make view` and commit ui/src/api/schema.d.ts"
    )
    build = ["npm", "exec", "--", "vite", "build"]
    subprocess.run(build, cwd=copy / "ui", check=True, capture_output=True, timeout=600)
    built = copy / "src/understudy/view/assets"
    names = sorted(file.relative_to(built) for file in built.rglob("*") if file.is_file())
    assert names == sorted(file.relative_to(ASSETS) for file in ASSETS.rglob("*") if file.is_file())
    for name in names:
        assert (built / name).read_bytes() == (ASSETS / name).read_bytes(), (
            f"{name}: run `make view` and commit it"
        )
