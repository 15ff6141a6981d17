"""Text for people: hostile text is made safe to show, and similar names are found for misspelled ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return `text` with each character that controls a terminal or is invisible replaced by a visible one.

    Line breaks and tabs stay. CRLF becomes a plain line break.
    """
    return _UNSAFE.sub(lambda match: _visible_form(ord(match[0])), text.replace("\r\n", "\n"))


def visible_line(text: str) -> str:
    """Return the first line of `text`, made visible."""
    return visible(text.strip()).partition("\n")[0]


def closest(name: str, choices: Iterable[str]) -> str | None:
    """Return the most similar of some names, for "did you mean"; None if none is similar. Case does not count."""
    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


def _visible_form(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return f"\\u{code:04x}"
