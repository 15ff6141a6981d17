"""Finds private keys in PEM by their form alone.

A key may be complete or cut off, and have escaped line breaks, numbered lines, or diff marks before its lines.
"""

from __future__ import annotations

import re

from understudy.redact.heuristics import looks_random

_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_END = re.compile(r"-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_LONGEST = 20_000
_PIECE = re.compile(r"[A-Za-z0-9+/=]{16,}")
_BETWEEN = (
    r"""(?:\\{1,8}[nrt]|\\{1,8}$|[\s"',+>|#*`-]|\d{1,6}[→:|\t]"""
    r"|(?:Proc-Type|DEK-Info|Version|Comment): [^\n\\]{1,80})"
)
_GAP = re.compile(f"{_BETWEEN}{{0,40}}")
_LINE = re.compile(r"[A-Za-z0-9+/]{1,76}={0,2}|[A-Za-z0-9+/]{1,8000}={0,2}")
_NUMBER = re.compile(r"\d{1,6}[→:|]?")
_ESCAPE = re.compile(r"\\{1,8}[nrt]")
_BREAK = re.compile(r"(?:\\{1,8}[nrt]|\s)+")


def key_from(text: str, start: int) -> int | None:
    """Return the end of the private key whose first line begins at `start`, or of the part of it that is there.

    Returns None if no such line begins there, or no key follows it.
    """
    begin = _BEGIN.match(text, start)
    if begin is None:
        return None
    end = _END.search(text, begin.end(), begin.end() + _LONGEST)
    if end is not None and _BEGIN.search(text, begin.end(), end.start()) is None:
        return end.end() if _has_key(text, begin.end(), end.start()) else None
    # The key is cut off: it extends as far as its lines follow each other.
    at = begin.end()
    while True:
        gap = _GAP.match(text, at)
        line = _LINE.match(text, gap.end() if gap else at)
        if line is None or line.end() - begin.end() > _LONGEST:
            break
        if len(line.group()) < 16:
            # The last line may be short, but a plain word is not a line of a key.
            if at > begin.end() and not line.group().isalpha() and (gap is None or gap.end() > at):
                at = line.end()
            break
        at = line.end()
    return at if _has_key(text, begin.end(), at) else None


def _has_key(text: str, start: int, end: int) -> bool:
    """Return whether a part of a text has a line of a key in it, and not only code that writes one."""
    return any(looks_random(piece.group()) for piece in _PIECE.finditer(text, start, end))


def key_until(text: str, end: int) -> tuple[int, int] | None:
    """Return the span of the rest of a private key whose last line begins at `end` and whose first line is
    missing.
    """
    last = _END.match(text, end)
    if last is None:
        return None
    begin = at = end
    while end - at < _LONGEST:
        left = max(at - 200, 0)
        breaks = list(_BREAK.finditer(text, left, at))
        if not breaks or breaks[-1].end() != at:
            break
        if len(breaks) > 1:
            start = breaks[-2].end()
        elif left == 0:
            start = 0
        else:
            break
        line = text[start : breaks[-1].start()].lstrip("+>|#*\"'`-")
        numbered = _NUMBER.fullmatch(line) is not None
        if not numbered and (_LINE.fullmatch(line) is None or (len(line) < 16 and begin < end)):
            break
        if not numbered:
            begin = start
        if start == 0:
            break
        at = start
    return (begin, last.end()) if _has_key(text, begin, end) else None


def key_lines(key: str) -> list[str]:
    """Return the lines of a private key that are long enough to be recognised elsewhere."""
    return [piece for piece in _PIECE.findall(_ESCAPE.sub("\n", key)) if len(piece) >= 32]


def key_body(key: str) -> str:
    """Return the key without line breaks, line numbers and diff marks, which may differ between copies of it."""
    body = _ESCAPE.sub("\n", _END.sub("", _BEGIN.sub("", key, count=1)))
    return "".join(_PIECE.findall(body)) or key
