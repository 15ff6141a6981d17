"""Values that are said to be secrets: `password=…`, `"api_key": "…"`, `--token …`, `<secret>…`."""

from __future__ import annotations

import re

from understudy.redact.heuristics import (
    ANSI,
    count_character_classes,
    is_password,
    is_placeholder,
    is_reference,
    looks_random,
)

_STRONG = re.compile(r"(?i)passw|pwd|passphr|secret|identified")
_AFTER = re.compile(
    r"""(?x)
    [\w-]{0,40}+                                      # the rest of the name
    (?: ANSI ){0,3}+
    (?: \\{0,7}+ ["'`] )?+ \]?+ [ \t]{0,20}+
    (?:
        :[ \t]{0,4} [A-Za-z_][\w.]{0,30} (?: \[ [\w.]{1,30} \] )? (?: [ ]?\|[ ]?\w{1,20} )? [ \t]{0,4} =[ \t]
      | (?: := | ={1,3}>? | :(?!:) | -> | > | (?P<prose> (?<=[ \t])is:? (?=[ ]) ) )
      | (?: ["',\s] | \\{1,7}[nr"'] ){0,24} \b value \\{0,7} ["']? [ \t]{0,4} [:=]   # {name: …, value: …}
      | (?P<comma> (?<=["'`]) ,[ ]{0,2} (?= \\{0,7} ["'`] ) )   # getenv("API_KEY", "…")
      | (?P<space> (?: (?<=[ ]) | (?<=\t) | (?<==) ) )
    )
    [ \t]{0,12} (?: ANSI ){0,3} (?: \*\* )? (?: [fbruFBRU]{1,2} (?=["']) )?
    (?: \\{0,7} (?P<quote> ["'`] ) )?
    """.replace("ANSI", ANSI)
)
_VALUES = {
    '"': re.compile(r'[^"\\\s\0]{6,512}'),
    "'": re.compile(r"[^'\\\s\0]{6,512}"),
    "`": re.compile(r"[^`\\\s\0]{6,512}"),
    "": re.compile(r"""[^\s"'`\\;<>|\0\x1b]{6,512}"""),
}
_LONG = 500
_MORE = re.compile(r"""[^\s"'`\\;<>|\0]{1,8192}""")
_KEY = re.compile(
    r"(?i)(?:api|apps?|access|secret|private|auth|encrypt(?:ion)?|signing|sign|master|account|storage|service|client|licen[cs]e|"
    r"session|deploy|webhook|admin|subscription|root|jwt|hmac|shared|crypto?|decrypt(?:ion)?|ssh|cookie|host|host_|ingest|write|server|"
    r"bot|user|rest|live|prod|aws|azure|gcp|openai|anthropic|stripe|google|maps|sendgrid|twilio|datadog|dd)"
    r"[_\- .]?$"
)
_BASE64 = re.compile(r"[A-Za-z0-9+/]{40,8192}={0,2}")  # which may begin as a path does
_PUBLIC = re.compile(r"(?i)public[_\- .]?$")
_NAMES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
_LOGIN = re.compile(r"\blogin[ \t]{1,4}\S{1,40}[ \t]{1,4}$")
_LINE = re.compile(r"(?:^|[\n\r]|\\{1,7}[nr])(?:[ \t]{0,8}\d{1,6}[→:\t])?[ \t+-]{0,12}$")
_SET = re.compile(r"(?:\bENV|\bsetx|\bset|\bARG)[ \t]{1,4}$")
_COOKIE = re.compile(r"sessionid$|SESSIONID|SESSID|sessid$|connect\.sid$|^sid$|_session$")
_WORD = re.compile(
    r"(?i)passphrase|passw(?:or)?d|(?:(?<![a-z])|(?-i:(?<=[a-z])(?=P)))pass(?=\\{0,7}[\"'`]?\]?[ \t]{0,4}[:=])|"
    r"pwd|dockerc(?:fg|onfigjson)|secret|token|key|credential|auth(?![b-np-z]|or(?!iz))|identified by"
)
_REST = re.compile(r"[\w-]{0,60}", re.ASCII)
_NAME = re.compile(
    r"(?i)passw(?:or)?d|(?:^|_|-|(?-i:(?<=[a-z])(?=P)))pass$|pwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?key|"
    r"(?:encryption|signing|master|account|storage|client)[_-]?key|credential|^auth$|authorization"
)
_NOT = re.compile(
    r"(?i)(?:tokens|tokeniz\w*|_?count|_?type|_?len\w*|_?limit|_?name|_?id|_?url|_?path|_?file|_?uri|_?format|_?regex|"
    r"_?pattern|fingerprint|secretsmanager|secret-manager|extension|"
    r"[_-]?(?:stdin|input|field|form|rules?|label|hint|message|error|title|text|prompt|placeholder|ref|selector))$"
)


def find_assigned(text: str, position: int) -> tuple[int, int] | None:
    """Where the secret lies that is assigned to a name in which a word for secrets stands at `place`."""
    word = _WORD.match(text, position)
    match = _AFTER.match(text, word.end()) if word else None
    if word is None or match is None:
        return None
    quote = match["quote"] or ""
    before = text[max(position - 48, 0) : position].rpartition("\0")[2]
    value = _VALUES[quote].match(text, match.end())
    if value is None:
        return None
    start, secret = value.start(), value.group()
    if quote:
        behind = text[value.end() : value.end() + 1]
        if behind not in (quote, "\\", "", "\n") and len(secret) < _LONG:
            return None
    else:
        cut = secret.find("&")
        if cut >= 0 and ("=" in secret[cut:] or "?" in before or "&" in before):
            secret = secret[:cut]
        secret = secret.rstrip("*,.;:)}]!?" if not secret.endswith("]") else ",")
    if match["space"] is not None:
        behind = text[start + len(secret) : start + len(secret) + 1]
        if not _spaced(word.group(), before, quote) and not _netrc(word.group(), before, secret, behind):
            return None
    if match["comma"] is not None and not looks_random(secret):
        return None
    name = word.group().lower()
    if len(secret) < 6 or _PUBLIC.search(before):
        return None
    if is_reference(secret) and (is_placeholder(secret) or not _BASE64.fullmatch(secret)):
        return None
    if name == "key" and _KEY.search(before) is None:
        return None
    rest = _REST.match(text, position)
    if rest is None or _NOT.search(rest.group()) or not is_secret_value(name, secret, quoted=bool(quote)):
        return None
    if match["prose"] is not None and not any(one.isdigit() for one in secret):
        return None
    if len(secret) >= _LONG:
        more = _MORE.match(text, start + len(secret))
        return start, more.end() if more else start + len(secret)
    return start, start + len(secret)


def _spaced(word: str, before: str, quote: str) -> bool:
    """Whether only a space parts a name from its value: an option, SQL, a line of .netrc, Docker's ENV."""
    if word.lower().startswith("identified"):
        return True
    rest = before.rstrip(_NAMES)
    if before[len(rest) :].startswith("-") and (not rest or rest[-1] in " \t\n\"'("):
        return True
    if _SET.search(rest) is not None or (bool(quote) and word == "PASSWORD"):
        return True
    return "login" in before and _LOGIN.search(before) is not None


def _netrc(word: str, before: str, value: str, behind: str) -> bool:
    """Whether a line says nothing but `password` and a value, as those of .netrc may."""
    return (
        word == "password"
        and behind in ("", "\n", "\r", "\\")
        and _LINE.search(before) is not None
        and (looks_random(value) or count_character_classes(value) > 2)
    )


def is_secret_value(name: str, value: str, *, quoted: bool) -> bool:
    """Whether a value is a secret, under a name that says so: a password may be simple, a token looks random."""
    if name == "pass":
        return is_password(value, quoted) and (looks_random(value) or count_character_classes(value) > 2)
    if _STRONG.search(name):
        return is_password(value, quoted)
    return len(value) >= 16 and looks_random(value)


def is_secret_field(name: str, value: str) -> bool:
    """Whether a value is a secret that stands in a field of this name."""
    if len(value) < 6 or len(value) > 4096 or len(name) > 100 or any(one.isspace() for one in value):
        return False
    if _COOKIE.search(name) is not None:
        return len(value) >= 16 and looks_random(value)
    if _NAME.search(name) is None or _NOT.search(name) or "public" in name.lower() or is_reference(value):
        return False
    return is_secret_value(name, value, quoted=True)
