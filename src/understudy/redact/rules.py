"""Our own rules: what is looked for in a text, where, and what of it is replaced.

A rule is tried only where one of its needles stands, which a search through memory finds; so the time is linear in
the text, whatever is in it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote

from understudy.redact import headers, pem
from understudy.redact.assignments import find_assigned
from understudy.redact.commands import AFTER, find_argument, find_piped
from understudy.redact.forms import tokens_in_run
from understudy.redact.heuristics import GENERIC_PASSWORDS, PSEUDONYM, is_reference, looks_random
from understudy.redact.personal import find_email, find_home_user
from understudy.redact.pseudonyms import SecretKind


class SecretMatch(NamedTuple):
    """A secret in a text: its span, the rule, the kind of its pseudonym, and its value."""

    start: int
    end: int
    rule: str
    kind: SecretKind
    value: str


class RedactionRule(NamedTuple):
    """A rule that is tried wherever one of its needles (in lower case) occurs; `look` gets text and position."""

    needles: tuple[bytes, ...]
    look: Callable[[str, int], Sequence[SecretMatch]]


_URL = re.compile(r"""://([^\s/?#@:"'<>`\\\0]{0,128})(?::([^\s/"'<>`\\\0]{1,256}))?@(?=[\w\[.$%{-])""")
_SCHEME = re.compile(
    r"(?i)(?:postgres|mysql|mariadb|mongo|redis|amqp|mssql|sqlserver|oracle|clickhouse|cassandra|couchdb|"
    r"cockroach|neo4j|bolt|nats|kafka|influx|elastic|ldap|jdbc|snowflake|redshift|rediss|memcached)[\w+:.-]*$"
)
_LOOSE_URL = re.compile(r"""://([\w.-]{1,64}):(?!\d{1,5}/)([^\s"'<>`\\\0@]{4,256})@(?=[\w.-]{1,255}[:/])""")
_BEARER = re.compile(r"earer[ \t:=]{1,4}(?:\\{0,7}[\"'])?([\w.~+/=-]{16,4096})", re.ASCII)
_BASIC = re.compile(r"(?i:basic)[ \t]{1,4}([A-Za-z0-9+/=_-]{8,1024})", re.ASCII)
_CURL = re.compile(
    r"""(?<![\w-])(?:-u|--user)[ \t=]{0,4}\\{0,7}["']?([^\s:"'\\$\0]{1,256}):([^\s"'\\\0]{4,256})?"""
)
_CURL_COOKIES = re.compile(r"""(?<![\w-])-b[ \t]{0,4}\\{0,7}["']?(?=[\w.%-]{1,80}=)""")
_WEBHOOK = re.compile(
    r"hooks(?:\.slack\.com/(?:services|workflows|triggers)/([A-Za-z0-9_/]{20,120})|/(\d{15,22}/[\w-]{40,100}))",
    re.ASCII,
)
_BESIDE = {
    "aws-key-id": (
        "aws-secret",
        re.compile(
            r"(?<![A-Za-z0-9+/])(?=[^a-z]{0,39}[a-z])(?=[^A-Z]{0,39}[A-Z])[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=])"
        ),
        400,
    ),
    "twilio-account": ("twilio-secret", re.compile(r"(?<![A-Za-z0-9])[0-9a-f]{32}(?![A-Za-z0-9])"), 120),
}
"""Secrets near an id: by the rule of the id, the rule and form of the secret, and the distance in characters."""

_GENERIC_USERS_TEXT = """
postgres postgresql root admin administrator user username app mysql mariadb mongo mongodb redis guest
default sa dbuser db database test api token git oauth2 x-access-token x-token-auth __token__ oauth me
myuser dbadmin service rabbitmq
"""
GENERIC_USERS = frozenset(_GENERIC_USERS_TEXT.split())


Hits = Sequence[SecretMatch]
_NONE: Hits = ()


def _pem(text: str, position: int) -> Hits:
    start = text.rfind("-----", max(position - 48, 0), position)
    if start < 0:
        return _NONE
    if text.startswith("-----BEGIN ", start):
        end = pem.key_from(text, start)
        span = None if end is None else (start, end)
    else:
        span = pem.key_until(text, start)
    if span is None:
        return _NONE
    return (SecretMatch(*span, "private-key", "private-key", pem.bare(text[slice(*span)])),)


def _url(text: str, position: int) -> Hits:
    scheme = _SCHEME.search(text[max(position - 24, 0) : position])
    match = _URL.match(text, position)
    if match is None and scheme is not None:
        # A password of a database may have been written with a slash in it, though it should not.
        match = _LOOSE_URL.match(text, position)
    if match is None:
        return _NONE
    user, secret = match.groups()
    rule = "database-url" if scheme else "url-login"
    if secret is not None and is_reference(secret) and not _odd(secret):
        return _NONE
    hits = [] if secret is None else [SecretMatch(match.start(2), match.end(2), rule, "secret", unquote(secret))]
    if user and user.lower() not in GENERIC_USERS and not is_reference(user):
        # https://TOKEN@host, or a person's name
        hits.append(SecretMatch(*match.span(1), rule, "secret" if looks_random(user) else "user", unquote(user)))
    return hits


def _odd(secret: str) -> bool:
    """Whether a password in a URL is one although it looks like code or a path."""
    return (
        PSEUDONYM.search(secret) is None
        and secret.lower() not in GENERIC_PASSWORDS
        and not re.match(r"[$<{%*\[.]|x{3,}|(?:your|my)[-_]", secret, re.I)
        and not re.search(r"[${}<>]", secret)
        and any(one.isdigit() for one in secret)
    )


def _bearer(text: str, position: int) -> Hits:
    match = _BEARER.match(text, position)
    if match is None or is_reference(match[1]) or not looks_random(match[1]):
        return _NONE
    return (SecretMatch(*match.span(1), "bearer", "secret", match[1]),)


def _basic(text: str, position: int) -> Hits:
    match = _BASIC.match(text, position)
    if match is None:
        return _NONE
    try:
        decoded = base64.b64decode(match[1] + "=" * (-len(match[1]) % 4), validate=True)
    except (binascii.Error, ValueError):
        return _NONE
    if b":" not in decoded[1:] or not all(32 <= byte < 127 for byte in decoded):
        return _NONE
    return (SecretMatch(*match.span(1), "basic-auth", "secret", match[1]),)


def _curl(text: str, position: int) -> Hits:
    hits: list[SecretMatch] = []
    match = _CURL.search(text, position, position + 600)
    if match is not None:
        for group in (1, 2):
            value = match[group]
            if value and not is_reference(value) and (group == 2 or looks_random(value)):
                hits.append(SecretMatch(*match.span(group), "basic-auth", "secret", value))
    match = _CURL_COOKIES.search(text, position, position + 600)
    if match is not None:
        end = text.find("\n", match.end(), match.end() + 4096)
        end = match.end() + 4096 if end < 0 else end
        hits += _secrets(text, headers.pairs(text, match.end(), end, "curl"), "cookie")
    return hits


def _webhook(text: str, position: int) -> Hits:
    match = _WEBHOOK.match(text, position)
    value = match and (match[1] or match[2])
    if not match or not value or is_reference(value) or not looks_random(value):
        return _NONE
    return (SecretMatch(*match.span(1 if match[1] else 2), "webhook", "secret", value),)


def _assigned(text: str, position: int) -> Hits:
    span = find_assigned(text, position)
    return (SecretMatch(*span, "assignment", "secret", text[slice(*span)]),) if span else _NONE


def _secrets(text: str, spans: Iterator[tuple[int, int]], rule: str) -> Hits:
    return [SecretMatch(start, end, rule, "secret", text[start:end]) for start, end in spans]


def _spans(look: Callable[[str, int], Iterator[tuple[int, int]]], rule: str) -> Callable[[str, int], Hits]:
    return lambda text, position: _secrets(text, look(text, position), rule)


def _argument(needle: bytes, text: str, position: int) -> Hits:
    span = find_argument(text, position, needle)
    return (SecretMatch(*span, "command-line", "secret", text[slice(*span)]),) if span else _NONE


def _piped(text: str, position: int) -> Hits:
    span = find_piped(text, position)
    return (SecretMatch(*span, "command-line", "secret", text[slice(*span)]),) if span else _NONE


def _email(text: str, position: int) -> Hits:
    span = find_email(text, position)
    return (SecretMatch(*span, "email", "email", text[slice(*span)]),) if span else _NONE


def _home(text: str, position: int) -> Hits:
    span = find_home_user(text, position) if position else None
    return (SecretMatch(*span, "home-path", "user", text[slice(*span)]),) if span else _NONE


RULES = (
    RedactionRule((b"private key",), _pem),
    RedactionRule((b"://",), _url),
    RedactionRule((b"earer",), _bearer),
    RedactionRule((b"basic ",), _basic),
    RedactionRule((b"curl",), _curl),
    RedactionRule((b"hooks",), _webhook),
    RedactionRule((b"uthorization",), _spans(headers.authorization, "authorization")),
    RedactionRule((b"ookie",), _spans(headers.cookies, "cookie")),
    RedactionRule((b"\ttrue\t",), _spans(headers.jar, "cookie")),
    RedactionRule((b"sig=",), _spans(headers.signed, "signed-url")),
    RedactionRule((b"q~",), _spans(headers.joined, "azure-secret")),
    *(RedactionRule((needle,), partial(_argument, needle)) for needle in AFTER),
    RedactionRule((b"chpasswd",), _piped),
    RedactionRule(
        (b"pass", b"pwd", b"secret", b"token", b"key", b"credential", b"auth", b"identified by", b"dockerc"),
        _assigned,
    ),
    RedactionRule((b"@", b"%40"), _email),
    RedactionRule((b"home", b"users"), _home),
)
"""What is looked for by its surroundings; what has a form is looked for in `forms`."""

_RUN = bytes(
    ord("w") if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "_-") else ord(".")
    for byte in range(256)
)
_LONG = b"w" * 20


def find_secrets(text: str) -> list[SecretMatch]:
    """Everything that the rules match in a text, in no order; matches may overlap."""
    if len(text) < 6:
        return []
    # One byte a character, so that places are the same.
    small = text.encode("latin-1", "replace").lower()
    find = small.find
    hits: list[SecretMatch] = []
    for needles, look in RULES:
        for needle in needles:
            position = find(needle)
            while position >= 0:
                hits += look(text, position)
                position = find(needle, position + 1)
    runs = small.translate(_RUN)
    start = runs.find(_LONG)
    while start >= 0:
        end = runs.find(b".", start)
        end = len(runs) if end < 0 else end
        hits += [
            SecretMatch(one, two, rule, "secret", text[one:two])
            for one, two, rule in tokens_in_run(text, start, end)
        ]
        start = runs.find(_LONG, end)
    if hits:
        hits += _beside_ids(text, hits)
    return hits


def _beside_ids(text: str, hits: list[SecretMatch]) -> list[SecretMatch]:
    """Secrets without a form of their own, near the ids that they belong to."""
    near: list[SecretMatch] = []
    for of, (rule, pattern, around) in _BESIDE.items():
        reached = 0
        for hit in sorted(hit for hit in hits if hit.rule == of):
            begin = max(hit.start - around, reached)
            for match in pattern.finditer(text, begin, min(hit.end + around, len(text))):
                if looks_random(match.group()):
                    near.append(SecretMatch(match.start(), match.end(), rule, "secret", match.group()))
            reached = max(reached, hit.end)
    return near
