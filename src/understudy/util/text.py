"""Text that others wrote, made harmless to show: nothing in it steers what shows it, and nothing hides."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """`text` with every character that steers a terminal, or hides, replaced by one that shows it.

    Line ends and tabs stay. CRLF becomes a plain line end.
    """
    return _UNSAFE.sub(lambda match: _picture(ord(match[0])), text.replace("\r\n", "\n"))


def visible_line(text: str) -> str:
    """The first line of `text`, made visible."""
    return visible(text.strip()).partition("\n")[0]


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return f"\\u{code:04x}"
