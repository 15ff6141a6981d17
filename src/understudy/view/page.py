"""The built page that is shipped with the package, and how its files are served."""

from __future__ import annotations

import gzip
import mimetypes
import re
from pathlib import Path
from typing import Final

from msgspec import Struct

ASSETS: Final = Path(__file__).with_name("assets")
NOT_BUILT: Final = (
    "The viewer's page is not built: this is a source checkout without src/understudy/view/assets.\n"
    "Build it in ui/ with npm, or install a released wheel. The API is served under /api/stores all the same.\n"
)
_HASHED_NAME: Final = re.compile(r"[-.][A-Za-z0-9_-]{8,}\.\w+$")
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_TEXT_TYPES: Final = ("text/", "application/json", "image/svg")


class PageFile(Struct, frozen=True):
    """A file of the page: its bytes, plain and compressed (None if that saves nothing), and its headers."""

    content: bytes
    compressed: bytes | None
    headers: tuple[tuple[bytes, bytes], ...]


class Page:
    """All files of a built page, read once. No other path is ever looked up on disk."""

    def __init__(self, directory: Path = ASSETS) -> None:
        self.files: dict[str, PageFile] = {}
        if (directory / "index.html").is_file():
            for path in sorted(directory.rglob("*")):
                if path.is_file() and path.suffix != ".py":
                    self.files["/" + path.relative_to(directory).as_posix()] = _page_file(path)

    @property
    def is_built(self) -> bool:
        """Whether the page was built."""
        return "/index.html" in self.files

    def file_at(self, path: str) -> PageFile | None:
        """Return the file at a path; for paths that the page's router handles, the page itself; None for other
        paths, such as the /favicon.ico that browsers and programs ask for.
        """
        if path in self.files:
            return self.files[path]
        is_route = path == "/" or path.startswith(("/s/", "/report"))
        return self.files.get("/index.html") if is_route else None


def _page_file(path: Path) -> PageFile:
    content = path.read_bytes()
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    is_text = kind.startswith(_TEXT_TYPES)
    compressed = gzip.compress(content, 9, mtime=0) if is_text and len(content) > 1_000 else None
    # Vite puts a content digest into the names of all files except the page itself, so those can be cached
    # forever.
    immutable = path.suffix != ".html" and _HASHED_NAME.search(path.name) is not None
    caching = b"public, max-age=31536000, immutable" if immutable else b"no-cache"
    headers = (
        (b"content-type", f"{kind}; charset=utf-8".encode() if is_text else kind.encode()),
        (b"cache-control", caching),
        (b"vary", b"accept-encoding"),
    )
    return PageFile(
        content, compressed if compressed is not None and len(compressed) < len(content) else None, headers
    )
