"""Passwords in the command lines of programs, in .pgpass, and in calls that take a user and a password."""

from __future__ import annotations

import re

from understudy.redact.heuristics import is_password, is_reference

_VALUE = r"""\\{0,7}["']?([^\s"'\\;|&<>\0\x1b]{6,256})"""
_OF = r"[^\n|;&]{0,160}?[ \t]"

AFTER = {
    b"sshpass": re.compile(rf"sshpass[ \t]{{1,4}}-p[ \t]{{0,2}}{_VALUE}"),
    b"mysql": re.compile(rf"mysql(?:dump|admin|import|sh)?{_OF}-p{_VALUE}"),
    b" login ": re.compile(rf" login{_OF}-p[ \t]{{1,4}}{_VALUE}"),
    b"redis-cli": re.compile(rf"redis-cli{_OF}-a[ \t]{{1,4}}{_VALUE}"),
    b"auth=(": re.compile(rf"""(?i)auth=\(\s{{0,20}}["'][^"'\n]{{1,64}}["'],\s{{0,20}}{_VALUE}"""),
    b"basicauth(": re.compile(rf"""(?i)basicauth\(\s{{0,20}}["'][^"'\n]{{1,64}}["'],\s{{0,20}}{_VALUE}"""),
    b":543": re.compile(r"""():543\d(?::[\w*-]{1,64}){2}:([^\s"':\\\0\x1b]{6,128})"""),
    b":*:": re.compile(r"""():\*(?::[\w*-]{1,64}){2}:([^\s"':\\\0\x1b]{6,128})"""),
}
"""What leads to a password, its last group, by the needle (in small letters) at which it begins."""

_PIPED = re.compile(
    r"""[\w.-]{1,32}:([^\s"'\\|:\0]{6,128})\\{0,7}["']?[ \t]{0,4}\|[ \t]{0,4}(?:sudo[ \t]{1,4})?$"""
)


def find_argument(text: str, position: int, needle: bytes) -> tuple[int, int] | None:
    """Where the password lies that is given to a program whose needle stands at `place`."""
    match = AFTER[needle].match(text, position)
    return None if match is None else _judged(*match.span(match.re.groups), text)


def find_piped(text: str, position: int) -> tuple[int, int] | None:
    """Where the password lies that is piped into `chpasswd`, which stands at `place`."""
    left = max(position - 240, 0)
    match = _PIPED.search(text[left:position])
    return None if match is None else _judged(left + match.start(1), left + match.end(1), text)


def _judged(start: int, end: int, text: str) -> tuple[int, int] | None:
    value = text[start:end].rstrip(",.)]}")
    if len(value) < 6 or is_reference(value) or not is_password(value, quoted=False):
        return None
    return start, start + len(value)
