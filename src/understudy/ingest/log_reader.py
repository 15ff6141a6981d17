"""Reads JSON documents, JSON lines and texts of logs, however damaged, and counts every loss."""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, BinaryIO, cast

import orjson

from understudy.ingest.json_values import mapping
from understudy.ingest.log_files import LogFile, read_some

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_DOCUMENT_BYTES = 128 * 1024 * 1024
"""Longer lines and larger documents are counted and left out, so that memory stays bounded."""

_CHUNK = 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.DOTALL)
_INSIDE = re.compile(rb'(?:[^{}\[\]"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z))*+', re.DOTALL)
"""What is between two brackets."""
_ROWS_SEEN = 40


@contextmanager
def garbage_collection_paused() -> Generator[None]:
    """Pause the garbage collector: reading creates very many objects but no reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_json(data: bytes, losses: Counter[str]) -> Any:
    """Decode JSON. Malformed JSON gives None, and is counted as `bad_json`.

    Invalid UTF-8 and unpaired surrogates are replaced, which is counted as `bad_text`.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        loose = json.loads(data.decode(errors="replace"), strict=False)
        value = orjson.loads(json.dumps(loose, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        losses["bad_json"] += 1
        return None
    losses["bad_text"] += 1
    return value


def take_losses(losses: Counter[str]) -> Counter[str]:
    """Return a copy of the counts, and clear the counter for the next trace."""
    counts = losses.copy()
    losses.clear()
    return counts


def read_document(file: LogFile, losses: Counter[str]) -> Any:
    """Return the JSON value of a whole file, or None if it is malformed or too large (`large_document`)."""
    data = _read_all(file, losses)
    if not data.strip():
        losses["empty_file"] += 1
        return None
    return parse_json(data.removeprefix(_BOM), losses)


def read_text(file: LogFile, losses: Counter[str]) -> str:
    """Return the text of a file, or "" if it is too large (`large_document`)."""
    data = _read_all(file, losses)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        losses["bad_text"] += 1
        return data.decode("utf-8-sig", errors="replace")


def read_lines(file: LogFile, losses: Counter[str]) -> Iterator[bytes]:
    """Yield the non-blank lines of a file without line ends.

    Overlong lines are counted as `long_line` and skipped.
    """
    unfinished: list[bytes] = []
    size = 0
    skipping = False
    with file.open() as stream:
        for chunk in _chunks(stream, losses):
            *finished, remainder = chunk.split(b"\n")
            for line_end in finished:
                line = line_end if not unfinished else b"".join((*unfinished, line_end))
                unfinished, size = [], 0
                if skipping:
                    skipping = False
                elif line and not line.isspace():
                    yield line
            if skipping:
                continue
            unfinished.append(remainder)
            size += len(remainder)
            if size > MAX_LINE_BYTES:
                losses["long_line"] += 1
                unfinished, size, skipping = [], 0, True
    line = b"".join(unfinished)
    if line and not line.isspace():
        yield line


def _read_all(file: LogFile, losses: Counter[str]) -> bytes:
    data = bytearray()
    with file.open() as stream:
        for chunk in _chunks(stream, losses):
            data += chunk
            if len(data) > MAX_DOCUMENT_BYTES:
                losses["large_document"] += 1
                return b""
    return bytes(data)


def _chunks(stream: BinaryIO, losses: Counter[str]) -> Iterator[bytes]:
    """Yield the stream in chunks. If it breaks off, as in a truncated archive, `unreadable_rest` is counted."""
    try:
        while chunk := read_some(stream, _CHUNK):
            yield chunk
    except OSError:
        losses["unreadable_rest"] += 1


def read_records(file: LogFile, losses: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file. Other values are counted as `not_an_object`."""
    for line in read_lines(file, losses):
        value = parse_json(line.removeprefix(_BOM), losses)
        if isinstance(value, dict):
            yield cast("dict[str, Any]", value)
        elif value is not None:
            losses["not_an_object"] += 1


class LogOutline:
    """The outline of a JSON file, taken from its first bytes, which may be cut off anywhere.

    `kind` is `{` or `[` if the file begins as JSON, else "". `keys` maps the keys of the first object (in a list,
    of its first element) to their values as text, with `{` or `[` standing for nested values.
    """

    def __init__(self, start: bytes) -> None:
        self._start = start
        self.kind = chr(start[0]) if start[:1] in (b"{", b"[") else ""
        self.keys = _keys(start) if self.kind else {}

    @cached_property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """The complete JSON objects among the first lines."""
        lines = self._start.split(b"\n", _ROWS_SEEN)[:_ROWS_SEEN]
        rows = (parse_json(line, Counter()) for line in lines if line.startswith(b"{"))
        return tuple(mapping(row) for row in rows if isinstance(row, dict))


@lru_cache(maxsize=4)
def outline(head: bytes) -> LogOutline:
    """Return the outline of a file. Cached, because every format's detection asks for it."""
    return LogOutline(head.removeprefix(_BOM).lstrip())


def _keys(start: bytes) -> dict[str, str]:
    level = 1 if start[:1] == b"{" else 2
    keys: dict[str, str] = {}
    stack = ""
    key: str | None = None
    previous = ""
    position = 0
    while match := _TOKEN.search(start, position):
        token, position = match.group(), match.end()
        first_character = chr(token[0])
        if first_character in "{[":
            if key is not None and len(stack) == level:
                keys[key], key = first_character, None
            stack += first_character
        elif first_character in "}]":
            stack = stack[:-1]
            if len(stack) < level and keys:
                break
        elif len(stack) == level and stack[-1] == "{" and first_character not in ":,":
            text = token.decode(errors="replace").strip('"')
            if key is None:
                key = text if first_character == '"' else None
            elif previous == ":":
                keys[key], key = text[:200], None
        previous = first_character
        if len(stack) > level and (nested := _INSIDE.match(start, position)):
            position = nested.end()
    if key is not None and previous == ":":
        keys[key] = ""
    return keys


def parent_directory(path: str) -> str:
    """Return the directory part of a log's path, or ""."""
    return path.replace("\\", "/").rpartition("/")[0]


def file_name(path: str) -> str:
    """Return the last part of a log's path, without `.gz`."""
    return path.replace("\\", "/").rpartition("/")[2].removesuffix(".gz")
