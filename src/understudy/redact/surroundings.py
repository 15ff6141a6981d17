"""Tables of places outside assignments and commands in which secrets stand.

Headers, parameters and paths of URLs, lists of recovery codes, seed phrases, JSON Web Keys, names of passwords in
languages other than English.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from understudy.redact.commands import Place, is_chosen, is_generated, is_varied, place
from understudy.redact.heuristics import (
    count_character_classes,
    count_random_characters,
    entropy,
    is_chosen_password,
    is_encoded_example,
    is_placeholder,
    is_reference,
    looks_random,
)

_NO_CREDENTIAL = (
    r"(?:[\w-]{0,60}(?:[_-]ids?|hash|sha-?\d*|e-?tags?|checksum|md5|crc32c?|traces?|parent|span|nonce|digest|"
    r"cache|version|context|state|revision|build|commit|timer|served-by|-id-2|signature(?:-256)?|cf-ray|location|range|"
    r"policy|agent|kid|jti|x5t)"
    r"|x-(?:amz-(?!security)|goog-(?!api|iam|sig)|cache|served|b3|ms-|envoy|content|vercel|cloud-trace|dns|download|"
    r"powered|aspnet|forwarded|frame|xss|ua|nf-|firefox|webkit|apple|index|axis|large|small)[\w-]{0,60}"
    r"|(?:if|content|accept|sec|access-control|cf|last|idempotency|traceparent|tracestate|digest|etag|want|range|date|"
    r"host|user|referer|origin|link|via|age|vary|server)(?:-[\w-]{1,60})?)"
)
"""Headers with a random value that give no access: ids, hashes, states of caches and traces."""
_HEADER_VALUE = r"""([^\s"'\\,;{}()<>\0]{16,4096})(?=["'\\\s,]|\Z)"""
_HEADER = rf"(?i:(?!{_NO_CREDENTIAL}\\{{0,7}}[\"']?[:,=\]])[a-z][\w-]{{2,60}})"


def is_url_secret(value: str) -> bool:
    """Return whether a parameter's value looks random once its escapes are left out."""
    return is_generated(_ESCAPED.sub("-", value))


def _is_dense(value: str) -> bool:
    return count_character_classes(value) == 4 and entropy(value) > 4.2


def _is_phrase(value: str) -> bool:
    """Return whether words may be a seed phrase: as many as one has, and hardly one of them twice."""
    words = value.split()
    return len(words) in (12, 15, 18, 21, 24, 25) and len(set(words)) >= len(words) - 2


def _is_spaced(value: str) -> bool:
    """Return whether groups of four characters are a password that was made in this form, not words."""
    return looks_random(value.replace(" ", "")) and not is_encoded_example(value.replace(" ", ""))


_ESCAPED = re.compile(r"%[0-9A-Fa-f]{2}")
_WORDS = r"([a-z]{3,8}(?: [a-z]{3,8}){11,24})(?![a-z])"
_BREAK = r"""(?:[\s,"'\[\]:*•·|>_-]|\\{1,7}[nrt"']|\d{1,2}[.)][ ])"""
_CODES = re.compile(
    rf"""{_BREAK}{{1,24}}((?=[\w-]*\d)[0-9A-Za-z]{{4,10}}(?:[ -](?=[0-9A-Za-z]*\d)[0-9A-Za-z]{{3,10}}){{0,3}})"""
    r"""(?=[\s,"'\\\]|]|\Z)""",
    re.ASCII,
)
CODES_NEEDLES = tuple(
    (word + sign + "code").encode()
    for word in ("backup", "recovery", "scratch", "emergency", "2fa", "mfa")
    for sign in ("", " ", "_", "-")
)
CODES_AHEAD = re.compile(
    r"""(?i:(?:backup|recovery|scratch|emergency|2fa|mfa)[ _-]?codes?)\\{0,7}["']?[ \w,.()]{0,80}?:?"""
    r"""(?=[\s"':\[]|\\|\Z)"""
)


def find_codes(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of recovery codes listed behind their heading at `position`: four or more of one length."""
    heading = CODES_AHEAD.match(text, position)
    if heading is None:
        return
    spans: list[tuple[int, int]] = []
    at = heading.end()
    while len(spans) < 32 and (code := _CODES.match(text, at)) is not None:
        if spans and len(code[1]) != spans[0][1] - spans[0][0]:
            break
        spans.append(code.span(1))
        at = code.end()
    if len(spans) >= 4 and len({text[start:end] for start, end in spans}) >= 4:
        yield from spans


def _object_around(text: str, position: int, name: str) -> tuple[int, int]:
    """Return the span of the JSON object around a name, up to the same name before and behind.

    There it is searched again, so that the time stays linear.
    """
    left, right = max(position - 6000, 0), min(position + 6000, len(text))
    for border in ("{", name):
        left = max(left, text.rfind(border, left, position))
    for border in ("}", name):
        at = text.find(border, position + len(name), right)
        right = at if at >= 0 else right
    return left, right


_KEY_MEMBER = re.compile(
    r"""\\{0,7}["'](?:d|p|q|dp|dq|qi|k)\\{0,7}["'][ ]?:[ ]?\\{0,7}["']([\w-]{20,1400})(?=\\{0,7}["'])""", re.ASCII
)


def find_web_key(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of the private members of the JSON Web Key around a `kty` at `position`."""
    for member in _KEY_MEMBER.finditer(text, *_object_around(text, position, "kty")):
        if is_generated(member[1]):
            yield member.span(1)


_COOKIE_VALUE = re.compile(r"""\\{0,7}["']value\\{0,7}["'][ ]?:[ ]?\\{0,7}["']([^\s"'\\]{16,4096})""")


def find_stored_cookie(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Yield the span of the value of the cookie, written as JSON, around `httpOnly` at `position`."""
    for value in _COOKIE_VALUE.finditer(text, *_object_around(text, position, text[position : position + 8])):
        if is_generated(value[1]):
            yield value.span(1)


_ADDRESSES_TEXT = r"""
webhook            (?i:webhook)\w{0,2}/((?:[\w@-]{1,80}/){0,4}[\w-]{16,80})
hooks/|hook/       hooks?/((?:[\w@-]{1,40}/){0,3}[\w@-]{16,120})
loggly.com/inputs/ loggly\.com/inputs/([\w-]{20,60})
/rest/             /rest/\d{1,6}/([a-z0-9]{16})(?=/)
alchemy.com/v2/    alchemy\.com/v2/([\w-]{20,60})
infura.io/v3/      infura\.io/v3/([\w-]{20,60})
anaconda.org/t/    anaconda\.org/t/([\w-]{20,60})(?=/)
ftqq.com/          ftqq\.com/(SCT[\w]{20,60})
render.com/deploy/ render\.com/deploy/[\w-]{1,60}\?key=([\w-]{8,40})
quiknode.pro/      quiknode\.pro/([0-9a-f]{30,60})
/with/key/         /with/key/([\w-]{20,60})
make.com/          make\.com/(\w{20,60})
tions/deploy/      tions/deploy/(prj_\w{20,40}/\w{8,20})
hq.com/v1/input/   hq\.com/v1/input/([0-9a-f]{32})
/bot               /bot(\d{8,10}:AA[\w-]{32,35})(?![\w-])
"""
"""Addresses of which a part of the path is what protects them: the needles, and the pattern."""


def _is_part(value: str) -> bool:
    """Return whether a part of the path of an address that is made for secrets is none of its words."""
    return not is_reference(value) and not is_placeholder(value) and count_random_characters(value) >= 6


def _address(row: str) -> Place:
    needles, pattern = row.split()
    # Files and modules of code are in directories called `hooks` too.
    return place(needles, pattern, is_generated if "hook" in needles else _is_part, "webhook")


_FOREIGN = (
    r"(?:contrase(?:ñ|\\u00f1|n)(?:a|ya)|clave|senha|mot[ _-]?de[ _-]?passe|motdepasse|kennwort|passwort|"
    r"wachtwoord|"
    r"parola(?: d'ordine)?|heslo|salasana|has[łl]o|l(?:ö|o)senord|adgangskode|kata[ _]?sandi|chiave|"
    r"jelsz(?:ó|o)|şifre|sifre|"
    r"schl(?:ü|ue)ssel|geheim\w{0,8}|cl(?:é|e)[ _]api|парол[ьа]|पासवर्ड|รหัสผ่าน|ключ|токен|секрет|密码|"
    r"密碼|密钥|密鑰|口令|令牌|"
    r"パスワード|秘密鍵|비밀번호|암호|mật khẩu|κωδικός|סיסמה|كلمة المرور|كلمة السر)"
)
_FOREIGN_BEFORE = re.compile(rf"(?i)(?<![^\W\d_]){_FOREIGN}[\w ]{{0,12}}$|_{_FOREIGN}[\w ]{{0,12}}$")
_FOREIGN_VALUE = re.compile(
    r"""\\{0,7}["'`*]{0,2}[ ]{0,2}(?::=|[:=]>?|：)[ ]{0,2}\\{0,7}(["'`]?)([^\s"'`\\,;(){}<>\0]{6,256})"""
)


def find_foreign(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Yield the span of the value behind a name of a password or key in another language, which ends before
    `position` or begins at it.
    """
    value = _FOREIGN_VALUE.search(text, position, position + 40)
    if value is None or _FOREIGN_BEFORE.search(text[max(position - 24, 0) : value.start()]) is None:
        return
    secret = value[2].rstrip(".!?")
    chosen = is_chosen(secret) or is_chosen_password(secret)
    if chosen and (value[1] or any(map(str.isdigit, secret))):
        yield value.start(2), value.start(2) + len(secret)


FOREIGN_NEEDLES = tuple(
    word.encode("latin-1")
    for word in [
        "contrase",
        "clave",
        "senha",
        "de passe",
        "de_passe",
        "depasse",
        "kennwort",
        "passwort",
        "wachtwoord",
        "parola",
        "heslo",
        "salasana",
        "haslo",
        "senord",
        "adgangskode",
        "sandi",
        "chiave",
        "jelsz",
        "sifre",
        "?ifre",
        "has?o",
        "m?t kh?u",
        "schlüssel",
        "schluessel",
        "geheim",
        "clé api",
        "cle_api",
        "cle api",
        "?:",
        "?=",
        '?":',
        "?' :",
        "?':",
        "? :",
        "? =",
    ]
)
"""Letters outside Latin-1 are a `?` in what is searched for needles."""
FOREIGN_AHEAD = re.compile(
    r"""[A-Za-zé][^\n:=]{3,24}[:=]|[^\x00-\xff]\\{0,7}["']?[ ]?[:=：]""",
)

SURROUNDINGS = (
    # -H 'X-Team: …', "X-Team": "…", Header.Set("X-Team", "…"): a header that is called nothing like a secret
    place(
        "-h '|-h \"|-h \\|--header|-h x",
        rf"""(?:-H|--header)[ =]?\\{{0,7}}["']?{_HEADER}:[ ]?{_HEADER_VALUE}""",
        is_generated,
        "header",
    ),
    place(
        "x-",
        rf"""(?:(?<![\w/.-])|(?<=\\n)){_HEADER}(?<=\w)\\{{0,7}}["']?[ ]?[:,=][ ]?(?:\\{{0,7}}["'])?"""
        rf"""{_HEADER_VALUE}""",
        is_generated,
        "header",
    ),
    place(
        "headers",
        rf"""headers\\{{0,7}}["']?[ ]?[:=][ ]?\{{\{{?[ ]?(?:[^{{}}\n]{{0,200}}?[,{{ ])?"""
        rf"""\\{{0,7}}["']{_HEADER}\\{{0,7}}["']:[ ]?\\{{0,7}}["']{_HEADER_VALUE}""",
        is_generated,
        "header",
    ),
    place(
        "header.set(|header.add(|setheader(|addheader(|setrequestheader(|.header(|\n> ",
        rf"""(?:[\w.]{{1,20}}\([ ]?\\{{0,7}}["']|\n> ){_HEADER}\\{{0,7}}["']?[:,][ ]?(?:\\{{0,7}}["'])?"""
        rf"""{_HEADER_VALUE}""",
        is_generated,
        "header",
    ),
    # the body of a key of PuTTY or OpenVPN
    place(
        "private-lines: |static key v1---",
        r"(?:(?i:private-lines): \d{1,3}|(?i:static key v1)-----)(?:\r?\n|\\{1,7}n)"
        r"([A-Za-z0-9+/=]{32,64}(?:(?:\r?\n|\\{1,7}n)(?:[A-Za-z0-9+/]{32,64}={0,2}|[A-Za-z0-9+/]{1,63}={1,2})){0,60})",
        lambda value: looks_random(value[:32]),
        "private-key",
    ),
    # WordPress' keys and salts
    place(
        "define(",
        r"""define\([ ]{0,2}["']\w{0,30}(?:KEY|SALT)["'],[ ]{1,20}["']([^"'\n\0]{40,100})["']""",
        _is_dense,
        "assignment",
    ),
    # accounts that Ganache and Anvil print
    place(") 0x", r"\) (0x[0-9a-f]{64})(?![0-9a-f])", is_generated, "printed"),
    place(
        "vk1.a.|v1.local.|v2.local.|v3.local.|v4.local.|v1.public.|v2.public.|v3.public.|v4.public.",
        r"((?<![\w.])v(?:[1-4]\.(?:local|public)|k1\.a)\.[\w-]{40,4000}(?:\.[\w-]+)?)",
        is_generated,
        "paseto",
    ),
    # <password>…</password>
    place(
        "password>|passphrase>|secret>|token>|apikey>|pwd>",
        r"(?i:password|passphrase|secret|token|apikey|pwd)>([^<>\s\0]{6,4096})</",
        is_varied,
        "assignment",
    ),
    place(
        "signature=|sign=|code=|appid=|ak=|sk=|jwt=|sid=|ticket=",
        r"""(?i:(?<=[?&])(?:code|appid|ak|sk|jwt|sid|sign|ticket|signature)|(?<=[&?-])signature)="""
        r"""([\w%.~+/-]{20,4096}={0,2})""",
        is_url_secret,
        "url-parameter",
    ),
    *map(_address, _ADDRESSES_TEXT.strip().splitlines()),
    place(
        "mnemonic|phrase|seed",
        r"""(?i:mnemonic|phrase|seed)(?i:[ _]?(?:words|phrase))?\\{0,7}["']?"""
        r"""[ \t]{0,12}[:=][ \t]{0,12}\\{0,7}["']?"""
        rf"""{_WORDS}""",
        _is_phrase,
        "seed-phrase",
    ),
    place(
        "password",
        r"""(?i:password)(?:[\s:=,{"'\\]|value|default|type|string){1,60}"""
        r"""([A-Za-z0-9]{4}(?: [A-Za-z0-9]{4}){3,5})(?!\w| [A-Za-z0-9]{4}(?!\w))""",
        _is_spaced,
        "assignment",
    ),
    # a hash of a password: bcrypt, SHA-crypt, Apache's MD5, Argon2, scrypt
    place(
        "$2a$|$2b$|$2y$|$5$|$6$|$apr1$|$argon2|$y$",
        r"(\$2[aby]\$\d\d\$[A-Za-z0-9./]{53}|\$[56]\$(?:rounds=\d{1,9}\$)?[A-Za-z0-9./]{1,16}\$[A-Za-z0-9./]{43,86}"
        r"|\$apr1\$[A-Za-z0-9./]{1,8}\$[A-Za-z0-9./]{22}|\$argon2[id]{1,2}\$v=\d\d\$[\w=,]{5,40}"
        r"\$[A-Za-z0-9+/]{8,90}\$[A-Za-z0-9+/]{20,120}"
        r"|\$y\$[A-Za-z0-9./]{1,8}\$[A-Za-z0-9./]{1,32}\$[A-Za-z0-9./]{43})(?![A-Za-z0-9./])",
        lambda value: not is_placeholder(value),
        "password-hash",
    ),
)
"""Places in headers, URLs, and texts."""
