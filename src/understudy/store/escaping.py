"""Texts that PostgreSQL cannot store: with NUL, or invalid Unicode (which is then bytes, as with SQLite).

Such characters are escaped with `_ESCAPE`, which ordinary texts do not contain, and unescaped when read.
"""

from __future__ import annotations

import re

_ESCAPE = "\U0010ffff"
_ESCAPED = re.compile(f"{_ESCAPE}([0-9a-f]{{4}})")
_NEEDS_ESCAPE = re.compile(f"[\0\ud800-\udfff{_ESCAPE}]")
_MARK = "ffff"


def escape_text(value: str | bytes) -> str:
    """Escape a text for PostgreSQL. Raises UnicodeEncodeError for a text that should be bytes (`TextOrBytes`)."""
    if isinstance(value, bytes):
        value = value.decode(errors="surrogatepass")
    elif value.isascii():
        return value.replace("\0", f"{_ESCAPE}0000") if "\0" in value else value
    else:
        value.encode()
    return _NEEDS_ESCAPE.sub(_escaped, value)


def _escaped(match: re.Match[str]) -> str:
    return _ESCAPE + (_MARK if match[0] == _ESCAPE else f"{ord(match[0]):04x}")


def unescape_text(text: str) -> str | bytes:
    """Return the text that was escaped, or bytes if it is not valid Unicode."""
    if _ESCAPE not in text:
        return text
    text = _ESCAPED.sub(lambda match: _ESCAPE if match[1] == _MARK else chr(int(match[1], 16)), text)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")
    return text
