"""Credentials in the headers of HTTP, in cookies, and in signed addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from understudy.redact.heuristics import ANSI, is_reference, looks_random

_AUTHORIZATION = re.compile(
    r"uthorization\\{0,7}[\"']?[ \t]{0,4}[:=,][ \t]{0,4}[fb]?(?:\\{0,7}[\"'`])?(?:" + ANSI + r")?"
    r"(?P<said>[^\"'`\n\r\\\0]{16,4500})"
)
_DIGEST = re.compile(r"uthorization[^\n\0]{1,400}?\bresponse=\\{0,7}\"([0-9a-f]{32})")
_PART = re.compile(r"[\w~+/.-]{16,4096}={0,2}", re.ASCII)
_HEX = re.compile(r"(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{20,}")
_COOKIES = re.compile(r"ookies?\\{0,7}[\"'`\]]?[ \t]{0,4}[:=(]?[ \t]{0,4}(?P<said>[^\n\r\0]{16,8000})")
_PAIR = re.compile(
    r"[\w.$%-]{1,80}\\{0,7}[\"']?(?:=|:[ ]?)\\{0,7}[\"']?([\w.~+/%:!|-]{16,4096}={0,2})(?![\w(\[])", re.ASCII
)
_JAR = re.compile(r"\ttrue\t\d{1,12}\t[^\t\n]{1,100}\t([^\s\0]{16,4096})", re.I)
_SIGNED = re.compile(r"[?&]sig=([A-Za-z0-9%+/_-]{40,200}=?)")
_JOINED = re.compile(r"[A-Za-z0-9_.~-]{3}\dQ~[A-Za-z0-9_.~-]{31,34}(?![\w~-])", re.ASCII)
_ESCAPED = re.compile(r"%[0-9A-Fa-f]{2}")


def authorization(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Where the credentials lie of the header whose name, but for its first letter, stands at `place`."""
    match = _AUTHORIZATION.match(text, position)
    if match is not None:
        start, end = match.span("said")
        for part in _PART.finditer(text, start, _before(text, "uthorization", start, end)):
            value = part.group()
            if not is_reference(value) and (looks_random(value) or _HEX.fullmatch(value)):
                yield part.span()
    digest = _DIGEST.match(text, position)
    if digest is not None:
        yield digest.span(1)


def cookies(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Where the values of cookies lie that look drawn by lot; `ookie` stands at `place`."""
    match = _COOKIES.match(text, position)
    if match is not None:
        yield from pairs(text, match.start("said"), match.end("said"), "ookie")


def pairs(text: str, start: int, end: int, needle: str) -> Iterator[tuple[int, int]]:
    """Where values that look drawn by lot stand behind a name, as far as the next needle, which looks itself."""
    for pair in _PAIR.finditer(text, start, _before(text, needle, start, end)):
        if not is_reference(pair[1]) and looks_random(_ESCAPED.sub("-", pair[1])):
            yield pair.span(1)


def _before(text: str, needle: str, start: int, end: int) -> int:
    at = text.find(needle, start, end)
    return end if at < 0 else at


def jar(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Where the value of a cookie lies in a line of a cookie file, which has a tab and TRUE at `place`."""
    match = _JAR.match(text, position)
    if match is not None and looks_random(match[1]):
        yield match.span(1)


def signed(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Where the signature of an address lies that `sig=` stands in, at `place`."""
    match = _SIGNED.match(text, max(position - 1, 0))
    if match is not None and looks_random(_ESCAPED.sub("-", match[1])):
        yield match.span(1)


def joined(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Where the secret of an application of Azure lies, in which `Q~` stands at `place`."""
    match = _JOINED.match(text, position - 4) if position >= 4 else None
    if match is not None and (position < 5 or not text[position - 5].isalnum()):
        yield match.span()
