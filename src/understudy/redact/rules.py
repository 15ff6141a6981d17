"""Our own rules: what is looked for in a text, where, and what of it is replaced.

Credentials in HTTP headers, cookies and URLs; e-mail addresses and home directories; the tables of other modules.
A rule is tried only where one of its needles stands (`search.find_secrets`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple
from urllib.parse import unquote

from understudy.redact.assignments import MAY_BE_ASSIGNED, MAY_BE_NAMED, MAY_BE_SHORT, find_assigned, is_token
from understudy.redact.calls import CALLS
from understudy.redact.commands import COMMANDS, Place
from understudy.redact.heuristics import (
    ANSI,
    GENERIC_PASSWORDS,
    PSEUDONYM,
    is_encoded_example,
    is_example,
    is_reference,
    looks_random,
)
from understudy.redact.private_keys import key_body, key_from, key_until
from understudy.redact.pseudonyms import SecretKind
from understudy.redact.sentences import FINDERS, SENTENCES
from understudy.redact.surroundings import (
    CODES_AHEAD,
    CODES_NEEDLES,
    FOREIGN_AHEAD,
    FOREIGN_NEEDLES,
    SURROUNDINGS,
    find_codes,
    find_foreign,
    find_stored_cookie,
    find_web_key,
)
from understudy.redact.tokens import BROKEN_PREFIXES, broken_token_at


class SecretMatch(NamedTuple):
    """A secret in a text: its span, the rule, the kind of its pseudonym, and its value."""

    start: int
    end: int
    rule: str
    kind: SecretKind
    value: str


Hits = Sequence[SecretMatch]
_NONE: Hits = ()


class RedactionRule(NamedTuple):
    """A rule that is tried wherever one of its needles (in lower case) occurs; `look` gets the text and that
    position.

    `ahead` must match at the needle first: a pattern rejects in a tenth of the time that a function takes. Needles
    and patterns leave out a first letter that may be upper case (`uthorization`), because ignoring case is slow.
    """

    needles: tuple[bytes, ...]
    look: Callable[[str, int], Hits]
    ahead: re.Pattern[str] = re.compile("")


def secret_at(rule: str, text: str, start: int, end: int, kind: SecretKind = "secret") -> SecretMatch:
    """Return the match of the characters from `start` to `end`, with exactly these characters as its value."""
    return SecretMatch(start, end, rule, kind, text[start:end])


# --- HTTP headers, cookies, signed URLs ------------------------------------------------------------------

_AUTHORIZATION = re.compile(
    r"uthorization\\{0,7}[\"']?[ \t]{0,4}[:=,][ \t]{0,4}[fb]?(?:\\{0,7}[\"'`])?(?:" + ANSI + r")?"
    r"(?P<value>[^\"'`\n\r\\\0]{16,4500})"
)
_DIGEST = re.compile(r"uthorization[^\n\0]{1,400}?\bresponse=\\{0,7}\"([0-9a-f]{32})")
_PART = re.compile(r"[\w~+/.-]{16,4096}={0,2}", re.ASCII)
_HEX = re.compile(r"(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{20,}")
_COOKIES = re.compile(r"ookies?\\{0,7}[\"'`\]]?[ \t]{0,4}[:=(]?[ \t]{0,4}(?P<value>[^\n\r\0]{16,8000})")
_COOKIE_PAIR = re.compile(
    r"[\w.$%-]{1,80}\\{0,7}[\"']?(?:=|:[ ]?)\\{0,7}[\"']?([\w.~+/%:!|-]{16,4096}={0,2})(?![\w(\[])", re.ASCII
)
_COOKIE_VALUE = re.compile(r"ookies?=([\w.~+/%:!|-]{16,4096}={0,2})(?![\w(\[=])", re.ASCII)
_JAR = re.compile(r"\ttrue\t\d{1,12}\t[^\t\n]{1,100}\t([^\s\0]{16,4096})", re.I)
_SIGNED = re.compile(r"[?&]sig=([A-Za-z0-9%+/_-]{40,200}=?)")
_AZURE = re.compile(r"[A-Za-z0-9_.~-]{3}\dQ~[A-Za-z0-9_.~-]{31,34}(?![\w~-])", re.ASCII)
_ESCAPED = re.compile(r"%[0-9A-Fa-f]{2}")


def _authorization(text: str, position: int) -> Hits:
    hits: list[SecretMatch] = []
    match = _AUTHORIZATION.match(text, position)
    if match is not None:
        start, end = match.span("value")
        for part in _PART.finditer(text, start, _up_to(text, "uthorization", start, end)):
            # Its end may be the beginning of another name: `proxy_opts.proxy_authorization`.
            part = _PART.match(text, part.start()) or part
            value = part.group()
            random = looks_random(value) and not is_encoded_example(value)
            if not is_reference(value) and (random or _HEX.fullmatch(value)):
                hits.append(secret_at("authorization", text, *part.span()))
    digest = _DIGEST.match(text, position)
    if digest is not None:
        hits.append(secret_at("authorization", text, *digest.span(1)))
    return hits


def _cookies(text: str, position: int) -> Hits:
    match = _COOKIES.match(text, position)
    if match is None:
        return _NONE
    hits = [*_cookie_pairs(text, *match.span("value"), "ookie")]
    own = _COOKIE_VALUE.match(text, position)  # a cookie whose name ends so: `.AspNetCore.Cookies=…`
    if own and not is_reference(own[1]) and looks_random(own[1]) and not is_encoded_example(own[1]):
        hits.append(secret_at("cookie", text, *own.span(1)))
    return hits


def _cookie_pairs(text: str, start: int, end: int, needle: str) -> Iterator[SecretMatch]:
    """Return values behind a name that look random, up to the next needle, where the rule is tried again."""
    for pair in _COOKIE_PAIR.finditer(text, start, _up_to(text, needle, start, end)):
        value = unquote(pair[1])
        if not is_reference(value) and looks_random(_ESCAPED.sub("-", pair[1])) and not is_encoded_example(value):
            yield secret_at("cookie", text, *pair.span(1))


def _up_to(text: str, needle: str, start: int, end: int) -> int:
    at = text.find(needle, start, end)
    return end if at < 0 else at


def _jar_cookie(text: str, position: int) -> Hits:
    """Return the value in a line of a cookie file."""
    match = _JAR.match(text, position)
    return (secret_at("cookie", text, *match.span(1)),) if match and looks_random(match[1]) else _NONE


def _signature(text: str, position: int) -> Hits:
    match = _SIGNED.match(text, max(position - 1, 0))
    if match is None or not looks_random(_ESCAPED.sub("-", match[1])):
        return _NONE
    return (secret_at("signed-url", text, *match.span(1)),)


_MARKED = {
    b"jqqj9": ("azure-key", re.compile(r"[A-Za-z0-9+/]{52}JQQJ9[A-Za-z0-9+/]{20,30}={0,2}")),
    b"azdo": (
        "azure-devops-token",
        re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9]{76}AZDO[A-Za-z0-9]{4}(?![A-Za-z0-9])"),
    ),
    b"_mmk": ("maxmind-key", re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk(?![A-Za-z0-9])")),
    b"nral": ("newrelic-key", re.compile(r"(?<![A-Za-z0-9])(?=[0-9a-z]*\d)[0-9a-fx]{30,42}(?:FFFF)?NRAL")),
    b"-nrma": ("newrelic-key", re.compile(r"(?<![A-Za-z0-9])(?:[a-z]{2}\d\dx{1,2})?[0-9a-f]{34,40}-NRMA")),
    b"-us": ("mailchimp-key", re.compile(r"(?<![A-Za-z0-9])[0-9a-f]{32}-us\d{1,2}(?!\w)")),
    b"access_token$": (
        "braintree-token",
        re.compile(r"access_token\$(?:production|sandbox)\$[0-9a-z]{16}\$[0-9a-f]{32}"),
    ),
    b":apa91b": ("firebase-key", re.compile(r"(?<![\w-])AAAA[\w-]{7}:APA91b[\w-]{100,140}", re.ASCII)),
    b"/telemetry": ("thingsboard-token", re.compile(r"(?<=/api/v1/)[A-Za-z0-9]{20}(?=/telemetry)")),
    b"zapier.com/hooks": ("webhook", re.compile(r"(?<=zapier\.com/hooks/catch/)[\w/]{8,40}", re.ASCII)),
}
"""Secrets with a mark that is not their beginning, by the mark: the rule and the form."""


def _marked(mark: bytes, text: str, position: int) -> Hits:
    rule, pattern = _MARKED[mark]
    left = max(position - 80, 0)
    match = pattern.search(text, left, position + 200)
    return (secret_at(rule, text, *match.span()),) if match and not is_reference(match.group()) else _NONE


_ELEMENT_PART = re.compile(r"[^\s\0]{16,4096}")
_ELEMENT = re.compile(r">\{([^{}<>\n\0]{16,4096})\}</[\w.:-]{0,60}(?i:secret|password|token|key|master)>")


def _element(text: str, position: int) -> Hits:
    """Return the values in an element of XML that is called a secret, such as Jenkins' `<secret>{AQAAABAAA…}`."""
    match = _ELEMENT.match(text, position)
    if match is None:
        return _NONE
    parts = _ELEMENT_PART.finditer(text, *match.span(1))
    return [secret_at("assignment", text, *part.span()) for part in parts if is_token(part.group())]


def _azure_secret(text: str, position: int) -> Hits:
    """Return a client secret of an Azure application, whose fifth and sixth characters are the needle."""
    match = _AZURE.match(text, position - 4) if position >= 4 else None
    if match is None or (position > 4 and text[position - 5].isalnum()):
        return _NONE
    return (secret_at("azure-secret", text, *match.span()),)


# --- commands, calls, headers, addresses: the tables of `commands` and `surroundings` --------------------


def _at_place(place: Place, pattern: re.Pattern[str], text: str, position: int) -> Hits:
    """Return the values of the groups of a place's pattern that are secrets."""
    match = pattern.match(text, position)
    if match is None:
        return _NONE
    hits: list[SecretMatch] = []
    for group in range(1, match.re.groups + 1):
        start, value = match.start(group), (match[group] or "").rstrip(",.)]}")
        if value and place.accepts(value):
            hits.append(secret_at(place.rule, text, start, start + len(value)))
    return hits


def _found(
    rule: str, find: Callable[[str, int], Iterator[tuple[int, int]]], text: str, position: int
) -> list[SecretMatch]:
    return [secret_at(rule, text, *span) for span in find(text, position)]


# --- what names a person ---------------------------------------------------------------------------------

_DOMAIN = re.compile(
    r"(?:@|%40)((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8})(xn--[a-z0-9]{2,30}|[A-Za-z]{2,18})"
    r"(?![\w(]|\.\w|-\w|=)",
    re.ASCII,
)
_COLOUR = re.compile(f".{{0,16}}?{ANSI}", re.S)
_LOCAL = re.compile(r"[A-Za-z0-9_%+=.-]{1,64}", re.ASCII)
_IN_URL = re.compile(r"://[^\s/\0]*$")
_TLDS_TEXT = """
com org net edu gov mil int io dev ai co app me info biz tech xyz cloud email online site name pro mobi jobs
museum aero company group team world agency studio digital systems solutions network software engineering
school university academy google microsoft amazon art blog shop store live life today news media design
global center health care legal bank finance capital consulting ventures foundation science works zone space
run sh fm tv page link one ltd inc llc gmbh corp eu asia africa ad ae af ag al am ao ar at au az ba bd be bg
bh bi bj bm bn bo br bs bt bw by bz ca cd cf cg ch ci cl cm cn cr cu cv cy cz de dj dk dm do dz ec ee eg er
es et fi fj fo fr ga gd ge gg gh gi gl gm gn gr gt gu gy hk hn hr ht hu id ie il im in iq ir is it je jm jo
jp ke kg kh ki km kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md mg mk ml mm mn mo mr mt mu mv mw mx
my mz na ne ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pr ps pt pw py qa re ro rs ru rw sa sb sc sd se
sg si sk sl sm sn so sr st su sv sy sz tc td tg th tj tk tl tm tn to tr tt tw tz ua ug uk us uy uz va vc ve
vg vi vn vu ws ye za zm zw
"""
_TLDS = frozenset(_TLDS_TEXT.split())
_NOBODY_TEXT = """
git noreply no-reply donotreply do-not-reply hg svn you your.email your-email youremail your_email user
username me name someone somebody john.doe jane.doe johndoe janedoe foo bar test example email actions npm
pip
"""
_NOBODY = frozenset(_NOBODY_TEXT.split())
_NOWHERE = re.compile(
    r"(?i)(?:^|\.)(?:example|test|invalid|localhost|local|internal)\.|(?:^|\.)(?:domain|email|yourdomain|your-domain|foo|bar|test|sentry\.io)\."
)

_NAME = r"[^\s\x1b/\\\"'`:;,<>|*?${}()\[\]@!=&#%]{1,64}"
_HOME = re.compile(
    rf"[/\\](?:home|Users|users|USERS)(?:\\{{0,8}}/|\\{{1,8}})"
    rf"({_NAME}(?:(?<=[a-z])(?: [A-Z][\w.-]{{1,24}}){{1,2}}(?=\\))?)"
)
_ESCAPED_HOME = re.compile(
    r"(?:%(?:25){0,2}(?:2F|5C)|\\u00(?:2f|5c))(?:home|Users)(?:%(?:25){0,2}(?:2F|5C)|\\{1,2}u00(?:2f|5c))([\w.~-]{1,64}?)"
    r"(?=%|\\|[^\w.~-]|$)",
    re.I | re.ASCII,
)
_BEFORE_HOMES = re.compile(
    r"(?:wsl(?:\$|\.localhost)[\\/]{1,8}[\w.-]{1,30}|/(?:var|export|usr|private|Data|data|host|hostfs|rootfs)|"
    r"(?<![\w./-])/(?:mnt|media|Volumes|net|nfs|srv|autofs|afs|gpfs|lustre|scratch)(?:/[\w. -]{1,30})?|"
    r"(?i:vscode-remote|ssh|sftp|file|smb)://[\w.+@%:-]{0,40}|" + ANSI + ")$"
)
"""What may stand before `/home/NAME` or `/Users/NAME` in an absolute path."""
_UP = re.compile(r"(?<![\w.])(?:\.{1,2}[\\/]{1,4})*\.{1,2}$")
"""A relative path with `..`, which may lead out of a home directory and into it again."""
_IMPORT = re.compile(r"(?:from|import|require|export|source|include|load|mock|use)[ \t(]{1,3}[\"'`<]$")
_SLUG_DRIVE = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]--$")
_DRIVE = re.compile(r"(?i)(?:^|[^a-z])[a-z]:?$")
_ENCODED = re.compile(r"-(?:home|Users)-([A-Za-z0-9_.]{1,64})(?=[-/\\\s\"'`.,)\]]|$)", re.ASCII)
_FILE = re.compile(
    r"(?i)\.(?:sh|py|txt|jsonl?|html?|php|[jt]sx?|md|ya?ml|toml|css|png|jpe?g|svg|xml|log|conf|cfg|ini|lock|zip|gz|vue|aspx?)$"
)
_NOT_PERSONS_TEXT = """
root runner runneradmin user users username your-username your_username yourname your-name your_name name me
you ubuntu debian fedora centos admin administrator ec2-user vscode node app codespace jovyan dev developer
circleci gitpod git shared public default guest test tester vagrant docker linuxbrew coder sandbox agent
containeradministrator containeruser nonroot nobody appuser someone somebody example home workspace x xxx
foo bar www-data postgres jenkins travis builder build github travisbuilds kubernetes nginx python work
worker service all project projects index.html index.js index.ts index.tsx index page page.tsx login
dashboard node_modules dist staging
"""
_NOT_PERSONS = frozenset(_NOT_PERSONS_TEXT.split())
"""Names below /home and /Users that are no person's and stay: system users, placeholders, and file names."""


def _email(text: str, position: int) -> Hits:
    """Return the e-mail address whose `@` is at `position`, unless it is not a person's."""
    domain = _DOMAIN.match(text, position)
    if domain is None or _NOWHERE.search(domain[1]):
        return _NONE
    if domain[2].lower() not in _TLDS and not domain[2].startswith("xn--"):
        return _NONE
    local = _LOCAL.match(text[max(position - 64, 0) : position][::-1])
    if local is None:
        return _NONE
    start = position - local.end()
    # The end of an escape, as in `\nme@…`, is no part of the name.
    if start > 0 and text[start - 1] == "\\" and text[start] in "nrt":
        start += 1
    if start > 0 and text[start - 1] in "[;" and (colour := _COLOUR.match(text, max(start - 16, 0), position)):
        start = max(start, colour.end())
    escaped = re.match(r"%[0-9A-Fa-f]{2}|[=.%-]+|u00[0-9a-f]{2}(?<=\\.....)", text[start:position])
    while escaped:
        start += escaped.end()
        escaped = re.match(r"%[0-9A-Fa-f]{2}|[=.%-]+", text[start:position])
    name = text[start:position].rpartition("=")[2]
    start = position - len(name)
    if not name or name.lower() in _NOBODY or PSEUDONYM.fullmatch(name):
        return _NONE
    if _IN_URL.search(text[max(start - 256, 0) : start]):
        return _NONE
    return (secret_at("email", text, start, domain.end(), "email"),)


def _home_user(text: str, position: int) -> Hits:
    """Return the user's name in the path of a home directory, where `home` or `Users` is at `position`.

    Also as Claude Code writes one directory into the name of another, `-home-NAME-project`, and as URLs do.
    """
    if not position:
        return _NONE
    sign = text[position - 1]
    if sign in "/\\" and (
        _inner(text, position - 1) or (text[position] == "u" and not _windows(text, position - 1))
    ):
        return _NONE
    # `C--Users-NAME` is `C:\\Users\\NAME`.
    if (
        sign == "-"
        and position > 1
        and (text[position - 2].isalnum() or text[position - 2] in "_.~)}]-")
        and _SLUG_DRIVE.search(text, max(position - 4, 0), position) is None
    ):
        return _NONE
    if sign == "-":
        match = _ENCODED.match(text, position - 1)
    elif sign in "/\\":
        match = _HOME.match(text, position - 1)
    else:
        start = max(
            text.rfind("%", max(position - 7, 0), position), text.rfind("\\", max(position - 6, 0), position)
        )
        match = _ESCAPED_HOME.match(text, start) if start >= 0 else None
    if match is None:
        return _NONE
    name = match[1].rstrip(".")
    if (
        not name
        or name.lower() in _NOT_PERSONS
        or PSEUDONYM.fullmatch(name)
        or not any(one.isalnum() for one in name)
    ):
        return _NONE
    if name[0] == "." or _FILE.search(name):
        return _NONE
    return (secret_at("home-path", text, match.start(1), match.start(1) + len(name), "user"),)


def _inner(text: str, position: int) -> bool:
    """Return whether the path at `position` is the continuation of one in which no home directories are."""
    if not position or not (text[position - 1].isalnum() or text[position - 1] in "_.~)}]-"):
        return False
    # /c/Users and /mnt/c/Users have the letter of a drive before, and `\n` may stand there.
    if text[position - 1].isalpha() and (position < 2 or not text[position - 2].isalnum()):
        return False
    left = text[max(position - 48, 0) : position]
    up = _UP.search(left)
    # `../home` may also be a module of a package.
    if up is not None and (up.group().count("..") > 1 or text[position + 1] == "U"):
        return _IMPORT.search(text[max(position - 64, 0) : position - len(up.group())]) is not None
    return _BEFORE_HOMES.search(left) is None


def _windows(text: str, position: int) -> bool:
    return text[position] == "\\" or _DRIVE.search(text[max(position - 3, 0) : position]) is not None


# --- the rules -------------------------------------------------------------------------------------------

_ENCODED_BEGIN = "LS0tLS1CRUdJTi"
"""`-----BEGIN ` in base64."""
_URL = re.compile(r"""://([^\s/?#@:"'<>`\\\0]{0,128}+)(?::([^\s/"'<>`\\\0]{1,256}))?@(?=[\w\[.$%{-])""")
_SCHEME = re.compile(
    r"(?i)(?:postgres|mysql|mariadb|mongo|redis|amqp|mssql|sqlserver|oracle|clickhouse|cassandra|couchdb|"
    r"cockroach|neo4j|bolt|nats|kafka|influx|elastic|ldap|jdbc|snowflake|redshift|rediss|memcached)[\w+:.-]*$"
)
_LOOSE_URL = re.compile(r"""://([\w.-]{1,64}+):(?!\d{1,5}/)([^\s"'<>`\\\0@]{4,256})@(?=[\w.-]{1,255}[:/])""")
_USER = re.compile(r"[\w.+~@-]*\w{2}")
_RESERVED_HOST = re.compile(
    r"(?:[\w-]{1,63}\.){0,8}(?:example(?:\.(?:com|org|net))?|test|invalid|host(?:name)?)(?![\w.-])"
)
"""Hosts in documentation and tests: passwords for them are examples, unless they look random."""
_BEARER = re.compile(r"(?i:earer)[ \t:=]{1,4}(?:\\{0,7}[\"'])?([\w.~+/=-]{16,4096})", re.ASCII)
_BASIC = re.compile(r"(?i:basic)[ \t]{1,4}([A-Za-z0-9+/=_-]{8,1024})", re.ASCII)
_CURL = re.compile(
    r"""(?<![\w-])(?:-u|--user|--proxy-user|-U)[ \t=]{0,4}\\{0,7}["']?([^\s:"'\\$\0]{1,256}):"""
    r"""(?:\\{0,7}["'])?([^\s"'\\\0]{4,256})?"""
)
_CURL_USERS = ("-u", "--proxy-u", "-U")
_CURL_COOKIES = re.compile(r"""(?<![\w-])-b[ \t]{0,4}\\{0,7}["']?(?=[\w.%-]{1,80}=)""")
_WEBHOOK = re.compile(
    r"hooks(?:\.slack\.com/(?:services|workflows|triggers)/([A-Za-z0-9_/]{20,120})|/(\d{15,22}/[\w-]{40,100}))",
    re.ASCII,
)
_GENERIC_USERS_TEXT = """
postgres postgresql root admin administrator user username app mysql mariadb mongo mongodb redis guest
default sa dbuser db database test api token git oauth2 x-access-token x-token-auth __token__ oauth me
myuser dbadmin service rabbitmq
"""
GENERIC_USERS = frozenset(_GENERIC_USERS_TEXT.split())


def _pem(text: str, position: int) -> Hits:
    start = text.rfind("-----", max(position - 48, 0), position)
    if start < 0:
        return _NONE
    if text.startswith("-----BEGIN ", start):
        end = key_from(text, start)
        span = None if end is None else (start, end)
    else:
        span = key_until(text, start)
    if span is None:
        return _NONE
    return (SecretMatch(*span, "private-key", "private-key", key_body(text[slice(*span)])),)


def _url(text: str, position: int) -> Hits:
    match = _URL.match(text, position) or _LOOSE_URL.match(text, position)
    if match is None:
        return _NONE
    scheme = _SCHEME.search(text[max(position - 24, 0) : position])
    # A password of a database may have been written with a slash in it, though it should not.
    if scheme is None and match.re is _LOOSE_URL:
        return _NONE
    user, secret = match.groups()
    rule = "database-url" if scheme else "url-login"
    if secret is not None and ((is_reference(secret) and not _odd(secret)) or is_example(secret)):
        return _NONE
    reserved = scheme is None and _RESERVED_HOST.match(text, match.end()) is not None
    hits: list[SecretMatch] = []
    # A password of punctuation only is an example, as in tests of URL parsers.
    signs = secret is not None and sum(map(str.isalnum, unquote(secret))) < 3
    if secret is not None and not signs and not (reserved and not looks_random(unquote(secret))):
        hits.append(SecretMatch(match.start(2), match.end(2), rule, "secret", unquote(secret)))
    if user and user.lower() not in GENERIC_USERS and not is_reference(user):
        # a token, as in https://TOKEN@host, or a person's user name
        if looks_random(unquote(user)):
            hits.append(SecretMatch(*match.span(1), rule, "secret", unquote(user)))
        elif not reserved and _USER.fullmatch(unquote(user)):
            hits.append(SecretMatch(*match.span(1), "url-user", "user", unquote(user)))
    return hits


def _odd(secret: str) -> bool:
    """Return whether a password in a URL is real although it looks like code or a path."""
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
    return (secret_at("bearer", text, *match.span(1)),)


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
    if is_example(decoded.rpartition(b":")[2].decode()):
        return _NONE
    return (secret_at("basic-auth", text, *match.span(1)),)


def _curl(text: str, position: int) -> Hits:
    hits: list[SecretMatch] = []
    options = [at for at in (text.find(one, position, position + 600) for one in _CURL_USERS) if at >= 0]
    match = _CURL.search(text, max(min(options) - 2, 0), position + 600) if options else None
    if match is not None:
        for group in (1, 2):
            value = match[group]
            if (
                value
                and not is_reference(value)
                and (looks_random(value) or (group == 2 and not is_example(value)))
            ):
                hits.append(secret_at("basic-auth", text, *match.span(group)))
    option = text.find("-b", position, position + 600)
    match = _CURL_COOKIES.search(text, option, position + 600) if option >= 0 else None
    if match is not None:
        end = _up_to(text, "\n", match.end(), match.end() + 4096)
        hits += _cookie_pairs(text, match.end(), end, "curl")
    return hits


def _webhook(text: str, position: int) -> Hits:
    match = _WEBHOOK.match(text, position)
    value = match and (match[1] or match[2])
    if not match or not value or is_reference(value) or not looks_random(value):
        return _NONE
    return (secret_at("webhook", text, *match.span(1 if match[1] else 2)),)


def _assigned(text: str, position: int) -> Hits:
    span = find_assigned(text, position)
    if span is None:
        return _NONE
    rule = "encoded-key" if text.startswith(_ENCODED_BEGIN, span[0]) else "assignment"
    return (secret_at(rule, text, *span),)


def _short_name(text: str, position: int) -> Hits:
    return _assigned(text, position + (text[position] in "_-"))


def _broken_token(text: str, position: int) -> Hits:
    token = broken_token_at(text, position)
    return _NONE if token is None else (secret_at(token[2], text, token[0], token[1]),)


RULES = (
    RedactionRule(BROKEN_PREFIXES, _broken_token, re.compile(r"[\w%+/=.!-]{20}", re.ASCII)),
    RedactionRule((b"private key",), _pem),
    RedactionRule((b"://",), _url, re.compile(r"""://[^\s/?#@:"'<>`\\\0]*+[:@]""")),
    RedactionRule((b"earer",), _bearer),
    RedactionRule((b"basic ",), _basic),
    RedactionRule((b"curl",), _curl, re.compile("curl(?![a-z_])", re.I)),
    RedactionRule((b"hooks",), _webhook, re.compile(r"hooks[./]")),
    RedactionRule((b"uthorization",), _authorization),
    RedactionRule((b"ookie",), _cookies),
    RedactionRule((b"\ttrue\t",), _jar_cookie),
    RedactionRule((b"sig=",), _signature),
    RedactionRule((b"q~",), _azure_secret),
    *(
        RedactionRule((mark,), partial(_marked, mark), re.compile(r"-us\d" if mark == b"-us" else ""))
        for mark in _MARKED
    ),
    RedactionRule((b">{",), _element),
    RedactionRule(CODES_NEEDLES, partial(_found, "recovery-code", find_codes), CODES_AHEAD),
    RedactionRule((b"httponly",), partial(_found, "cookie", find_stored_cookie)),
    RedactionRule((b"kty",), partial(_found, "private-key", find_web_key)),
    RedactionRule(FOREIGN_NEEDLES, partial(_found, "assignment", find_foreign), FOREIGN_AHEAD),
    *(RedactionRule(needles, partial(_found, rule, find), ahead) for rule, needles, find, ahead in FINDERS),
    RedactionRule(
        (b"pass", b"pwd", b"secret", b"token", b"key", b"credential", b"auth", b"identified by", b"dockerc"),
        _assigned,
        MAY_BE_ASSIGNED,
    ),
    RedactionRule(
        (b"access", b"private", b" pat ", b" pat=", b" pat:", b"api=", b"api:", b"api =", b"crumb:", b"crumb="),
        _assigned,
        MAY_BE_NAMED,
    ),
    RedactionRule((b"_sk", b"-sk", b"_pw", b"-pw", b"pw=", b"pw =", b"pw:", b"seed"), _short_name, MAY_BE_SHORT),
    RedactionRule(
        (b"login", b"_pat"),
        _assigned,
        re.compile(r"""(?:(?i:login)\w{0,20}+|_(?i:pat)\d*+)["'`]?+(?:[ \t]*+[:=]|,[ ]["'])"""),
    ),
    RedactionRule((b"@", b"%40"), _email, re.compile(r"(?<=[A-Za-z0-9_%+=.-])(?:@|%40)[A-Za-z0-9-]++\.")),
    # `home` must follow a separator of a path, or the end of an escaped one, as in `%2Fhome`.
    RedactionRule((b"home", b"users"), _home_user, re.compile(r"(?<=[/\\\-FCfc])")),
)
"""The rules for secrets that are recognised by their context; more are in `place_rules`, others in `tokens`."""


@cache
def place_rules() -> tuple[RedactionRule, ...]:
    """Return a rule for each place of the tables of `commands` and `surroundings`.

    Their patterns are compiled when they are first needed, so that commands start sooner.
    """
    places = ((place, re.compile(place.pattern)) for place in (*COMMANDS, *SURROUNDINGS, *CALLS, *SENTENCES))
    return tuple(
        RedactionRule(place.needles, partial(_at_place, place, pattern), pattern) for place, pattern in places
    )
