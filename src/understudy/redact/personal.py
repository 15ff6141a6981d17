"""What names a person: e-mail addresses and home directories."""

from __future__ import annotations

import re

from understudy.redact.heuristics import ANSI, PSEUDONYM

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

_HOME = re.compile(r"[/\\](?:home|Users|users|USERS)(?:/|\\{1,8})([^\s\x1b/\\\"'`:;,<>|*?${}()\[\]@!=&#%]{1,64})")
_ESCAPED = re.compile(r"(?:%2F|%5C)(?:home|Users)(?:%2F|%5C)([\w.~-]{1,64})", re.I | re.ASCII)
_HOMES_IN = re.compile(
    r"(?:wsl(?:\$|\.localhost)[\\/]{1,8}[\w.-]{1,30}|/(?:var|export|usr|private|Data|data|host|hostfs|rootfs)|"
    + ANSI
    + ")$"
)
_DRIVE = re.compile(r"(?i)(?:^|[^a-z])[a-z]:?$")
_ENCODED = re.compile(r"-(?:home|Users)-([A-Za-z0-9_.]{1,64})(?=[-/\\\s\"'`.,)\]]|$)", re.ASCII)
_FILE = re.compile(
    r"(?i)\.(?:sh|py|txt|jsonl?|html?|php|[jt]sx?|md|ya?ml|toml|css|png|jpe?g|svg|xml|log|conf|cfg|ini|lock|zip|gz|vue|aspx?)$"
)
_HOMES_TEXT = """
root runner runneradmin user users username your-username your_username yourname your-name your_name name me
you ubuntu debian fedora centos admin administrator ec2-user vscode node app codespace jovyan dev developer
circleci gitpod git shared public default guest test tester vagrant docker linuxbrew coder sandbox agent
containeradministrator containeruser nonroot nobody appuser someone somebody example home workspace x xxx
foo bar www-data postgres jenkins travis builder build github travisbuilds kubernetes nginx python work
worker service all project projects index.html index.js index.ts index.tsx index page page.tsx login
dashboard node_modules dist staging
"""
_HOMES = frozenset(_HOMES_TEXT.split())


def find_email(text: str, position: int) -> tuple[int, int] | None:
    """Where the address lies whose `@` is at `place`; None where there is none, or one that names nobody."""
    domain = _DOMAIN.match(text, position)
    if domain is None or _NOWHERE.search(domain[1]):
        return None
    if domain[2].lower() not in _TLDS and not domain[2].startswith("xn--"):
        return None
    local = _LOCAL.match(text[max(position - 64, 0) : position][::-1])
    if local is None:
        return None
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
        return None
    if _IN_URL.search(text[max(start - 256, 0) : start]):
        return None
    return start, domain.end()


def find_home_user(text: str, position: int) -> tuple[int, int] | None:
    """Where the user's name lies in the path of a home directory in which `home` or `Users` stands at `place`.

    Also as Claude Code writes a directory into the name of another, `-home-NAME-project`, and as URLs do.
    """
    sign = text[position - 1]
    if sign in "/\\" and (
        _inner(text, position - 1) or (text[position] == "u" and not _windows(text, position - 1))
    ):
        return None
    if sign == "-" and position > 1 and (text[position - 2].isalnum() or text[position - 2] in "_.~)}]-"):
        return None
    if sign == "-":
        match = _ENCODED.match(text, position - 1)
    elif sign in "/\\":
        match = _HOME.match(text, position - 1)
    else:
        match = _ESCAPED.match(text, position - 3) if position >= 3 else None
    if match is None:
        return None
    name = match[1].rstrip(".")
    if not name or name.lower() in _HOMES or PSEUDONYM.fullmatch(name) or not any(one.isalnum() for one in name):
        return None
    if name[0] == "." or _FILE.search(name):
        return None
    return match.start(1), match.start(1) + len(name)


def _inner(text: str, position: int) -> bool:
    """Whether the path that goes on at `place` began before it, in a place where no homes are."""
    if not position or not (text[position - 1].isalnum() or text[position - 1] in "_.~)}]-"):
        return False
    # /c/Users and /mnt/c/Users have the letter of a drive before, and `\n` may stand there.
    if text[position - 1].isalpha() and (position < 2 or not text[position - 2].isalnum()):
        return False
    return _HOMES_IN.search(text[max(position - 48, 0) : position]) is None


def _windows(text: str, position: int) -> bool:
    return text[position] == "\\" or _DRIVE.search(text[max(position - 3, 0) : position]) is not None
