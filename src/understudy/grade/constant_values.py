"""Constants that are folded when a patch is read: their type, the limit of their size, and what makes others of
them.

A patch decides how long a constant would get, so that must be known before it is made.
"""

from __future__ import annotations

import base64
import codecs

Constant = str | bytes | int | float | None

MAX_CONSTANT = 1 << 16
"""The length of the longest constant that folding produces."""
_ROTATIONS = frozenset({"rot13", "rot_13", "rot-13"})


def fits(*parts: Constant, times: int = 1) -> bool:
    """Return whether a text in which each part is so many times is short enough.

    That must be known before the text is made, because a patch decides how long it gets.
    """
    sizes = (len(part) if isinstance(part, str | bytes) else len(hex(int(part or 0))) for part in parts)
    return times * sum(sizes) <= MAX_CONSTANT


def join(separator: str, parts: list[str]) -> Constant:
    """Return the joined text; None if it would be too long."""
    return separator.join(parts) if fits(*parts) and fits(separator, times=len(parts)) else None


def bounded(value: Constant) -> Constant:
    """Return a text that is short enough; None for any other constant."""
    return value if isinstance(value, str | bytes) and len(value) <= MAX_CONSTANT else None


def are_bounds(bounds: list[Constant]) -> bool:
    """Return whether three constants can be the start, stop and step of a slice."""
    return all(bound is None or type(bound) is int for bound in bounds) and bounds[2] != 0


def recode(value: str | bytes, arguments: list[Constant]) -> Constant:
    """Return a string in another encoding, for the codecs that only replace characters."""
    name = str(arguments[0]).lower() if arguments else "utf-8"
    if name in _ROTATIONS and isinstance(value, str):
        return codecs.encode(value, "rot13")
    if name in ("hex", "hex_codec"):
        return bytes.fromhex(value if isinstance(value, str) else value.decode())
    if name in ("base64", "base64_codec"):
        return base64.b64decode(value)
    if name not in ("utf-8", "utf8", "ascii", "latin-1", "latin1", "utf-16", "utf-32", "unicode_escape", "utf-7"):
        return None
    return value.encode(name) if isinstance(value, str) else value.decode(name)
