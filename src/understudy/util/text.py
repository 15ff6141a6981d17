"""Text for people: hostile text is made safe to show, errors of libraries are put into one line, and similar names
are found for misspelled ones.
"""

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


_REASON_CHARACTERS = 300


def reason_of(error: BaseException) -> str:
    """Return what an error of a library says, as a part of a message of ours: one line of at most
    _REASON_CHARACTERS characters, or the name of its class if it says nothing.

    Of an error of the operating system it is the cause only, because the message names the file itself.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(visible(str(error)).split()).rstrip(".;")
    if isinstance(error, KeyError):
        text = f"the key {text} is missing"
    if len(text) > _REASON_CHARACTERS:
        text = text[: _REASON_CHARACTERS - 1].rstrip() + "…"
    return text or type(error).__name__


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
