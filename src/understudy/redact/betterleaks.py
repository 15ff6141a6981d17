"""Uses the rules of Betterleaks, some hundreds more than ours, if `pybetterleaks` is installed (the extra
`redact`).

Its validation, which would send secrets over the network, is off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec

from understudy.errors import ConfigError
from understudy.util.text import reason_of

_BATCH = 48_000  # its time grows faster than linearly with the text, and each call costs 10 ms
_OVERLAP = 4_000
_GAP = "\n\n\n"
_GUESS = "generic-api-key"
_HEX = re.compile(r"[0-9a-fA-F-]+")
_RUN = 16
_SORTS = bytes(ord("w" if re.match(rb"[\w+/=~.-]", bytes((sign,))) else " ") for sign in range(256))
"""The class of each byte: `w` for characters of tokens, a space for all others."""
_LONG = re.compile(r"[0-9]|[\w+=~-]{30}", re.ASCII)
"""A run of sixteen or more characters must match this to be a token."""
_WITHOUT = "pip uninstall pybetterleaks (without it, only Understudy's own rules apply)"
_PUBLIC = re.compile(
    r"(?i)websocket|public|fingerprint|sha(?:1|256|384|512)|md5|\bid\b|checksum|digest|integrity|commit|\bkeys: "
)


@cache
def is_installed() -> bool:
    """Return whether `pybetterleaks` is installed."""
    return find_spec("pybetterleaks") is not None


def find_leaks(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the rule and the secret of each finding in the texts. Raises ConfigError when the library fails.

    The library is slow, so it gets only lines that could hold a token: a run of sixteen characters with a digit,
    or of thirty characters. Secrets of several lines, such as private keys, are left to our own rules.
    """
    for batch in _batches(filter(None, map(token_lines, texts))):
        yield from _scanned(batch)


def token_lines(text: str) -> str:
    """Return the lines that could contain a token. A search for long runs skips all others."""
    sorts = text.encode("latin-1", "replace").translate(_SORTS)
    lines: list[str] = []
    run = sorts.find(b"w" * _RUN)
    while run >= 0:
        end = sorts.find(b" ", run)
        end = len(text) if end < 0 else end
        if _LONG.search(text, run, end) is not None:
            start = text.rfind("\n", 0, run) + 1
            end = text.find("\n", end)
            end = len(text) if end < 0 else end
            lines.append(text[start:end])
        run = sorts.find(b"w" * _RUN, end)
    return "\n".join(lines)


def _batches(texts: Iterable[str]) -> Iterator[str]:
    batch: list[str] = []
    size = 0
    for text in texts:
        for start in range(0, max(len(text), 1), _BATCH - _OVERLAP):
            piece = text[start : start + _BATCH]
            if size and size + len(piece) > _BATCH:
                yield _GAP.join(batch)
                batch, size = [], 0
            batch.append(piece)
            size += len(piece) + len(_GAP)
            if start + _BATCH >= len(text):
                break
    if batch:
        yield _GAP.join(batch)


def _scanned(text: str) -> Iterator[tuple[str, str]]:
    try:
        from pybetterleaks import scan_text
        from pybetterleaks.exceptions import PyBetterleaksError
    except ImportError as error:
        raise ConfigError(
            f"pybetterleaks cannot be imported: {error}; install it again: pip install --force-reinstall "
            f"pybetterleaks, or uninstall it: {_WITHOUT}"
        ) from error
    try:
        # The library accepts neither halves of surrogate pairs nor NUL.
        result = scan_text(
            text.encode(errors="replace").decode().replace("\0", "\n"), validation=False, redact=False
        )
    except PyBetterleaksError as error:
        raise ConfigError(
            f"pybetterleaks does not run on this system: {reason_of(error)}; uninstall it: {_WITHOUT}"
        ) from error
    if result.errors:
        raise ConfigError(
            f"pybetterleaks failed: {result.errors[0].message[:300]}; install another version, or uninstall it: "
            f"{_WITHOUT}"
        )
    for finding in result.findings:
        match = finding.match or ""
        if not finding.secret:
            continue
        guessed = finding.rule_id == _GUESS
        if not (
            guessed
            and (
                _HEX.fullmatch(finding.secret)
                or "\n" in match.partition(finding.secret)[0]
                or _PUBLIC.search(_before(text, match))
            )
        ):
            yield finding.rule_id, finding.secret


def _before(text: str, match: str) -> str:
    """Return the match with the 24 characters before it."""
    position = text.find(match)
    return text[max(position - 24, 0) : max(position, 0)] + match
