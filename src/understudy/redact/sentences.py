"""Finds secrets in sentences, prompts, output of commands, and columns of tables.

`the password for X is …`, `Enter password for me: …`, `$ terraform output -raw password` and the next line, and a
table with a column `password`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from understudy.redact.calls import is_passed
from understudy.redact.commands import is_generated, place
from understudy.redact.heuristics import count_character_classes, is_example, is_reference, looks_random

_NAME_OR_VERSION = re.compile(
    r"(?i)[a-z]*[-.]?v?\d+(?:[.:/_-]\d+)+\w{0,3}|\d+[a-z]+|[a-z]+/[\w/.-]+|[a-z_-]+(?:\.[a-z_]\w*)+|[A-Z][a-z]+\d"
    r"|[a-z]+(?:-[a-z]+)*|[a-z]*#[a-z]\w+|\w+:?=[a-z]*|-.*|[\w-]+\(.*|.*['’](?:s|t|re|ll)"
)
_MANY_DIGITS = re.compile(r"[A-Za-z].*\d{2}|\d.*[a-z].*\d|[a-z]\d[a-z]")


def is_password_in_sentence(value: str) -> bool:
    """Return whether a word in a sentence about a password is it, and no other word, name or version."""
    if len(value) < 6 or _NAME_OR_VERSION.fullmatch(value) or not is_passed(value):
        return False
    return looks_random(value) or count_character_classes(value) > 2 or _MANY_DIGITS.search(value) is not None


def _is_strange(value: str) -> bool:
    """Return whether a value is surely no word: random and of both cases, or of all classes of characters."""
    value = value.rstrip(".!?")
    classes = count_character_classes(value)
    return (
        is_password_in_sentence(value)
        and any(map(str.isdigit, value))
        and (classes > 3 or (classes > 2 and looks_random(value)))
    )


_LINK = (
    r"(?:[ ](?:is|to|was|be|now|currently|ist|lautet|est|es|è|é|är|er|on|este|jest|je)(?:[ ]now)?:?[ ]+"
    r"|[ ]?(?:->|=>|→|—|–|-)[ ]|[ ]?[.]{2,}:?[ ]|\t+|[ ](?=\\{0,7}[\"'`“]))"
)
_OPEN = r"""(?:\*\*|__)?\\{0,7}["'`“„«‘]{0,1}"""
_WORD = r"""(?=[^\s]{0,80}[0-9!#%^*=~+])([^\s"'`\\,;(){}<>“”»|\0]{6,128})"""
_END = r"""(?=[\s"'`\\,;)“”»’|]|\Z)"""
_NAME = (
    r"(?i:passw(?:or)?ds?|passwrod|passphrase|passcode|pass(?=[ ](?:is|for)[ ]|:)|pwd?|kennwort|passwort|"
    r"wachtwoord|contrase(?:ñ|n)[ay]|clave|senha|"
    r"mot de passe|parol[ae](?: d'ordine)?|heslo|has[łl]o|l(?:ö|o)senord(?:et)?|adgangskoden?|passordet|"
    r"salasana|jelsz[óo]|sifresi?|"
    r"kata sandi)"
)
_BETWEEN = r"(?:[ ]\[?[^\W\d_][\w'@.-]{0,24}\]?)"

SENTENCES = (
    # the password for X is …, passphrase `…`, Password for me: …
    place(
        "passw|passphr|passcode|pass is|pass |pwd |pw |kennwort|wachtwoord|contrase|clave|senha|"
        "mot de passe|parola|"
        "heslo|haslo|has?o|senord|adgangskode|salasana|jelsz|sifre|kata sandi",
        rf"{_NAME}(?:\*\*|__)?(?:{_BETWEEN}{{0,8}}?{_LINK}|{_BETWEEN}{{1,8}}?[ ]?[:：][ ]{{1,4}}|:(?:\*\*|__)[ ]"
        rf"|(?<=[*_])[:：][ ]{{1,4}}|[ ]?[:：][ ]{{0,4}}(?=\\{{0,7}}[\"'`“「]))"
        rf"{_OPEN}{_WORD}{_END}",
        is_password_in_sentence,
        "sentence",
    ),
    # the password Xq7…
    place(
        "passw|passphr|pwd ",
        rf"(?i:passw(?:or)?d|passphrase|pwd)[ ]{_OPEN}{_WORD}{_END}",
        _is_strange,
        "sentence",
    ),
    # credentials: admin / …
    place(
        "credential|creds:|login: |login |identifiant|zugangsdaten|admin /|admin` /",
        rf"(?i:credentials?|creds|login|identifiants|zugangsdaten|admin)\b[^\n/=|]{{0,40}}?[\w`'\"][ ]?/[ ]"
        rf"{_OPEN}{_WORD}{_END}",
        is_password_in_sentence,
        "sentence",
    ),
    # <key>Password</key><string>…</string>, <property name="password"><value>…
    place(
        "|".join(
            word + sign
            for word in ("password", "passwd", "secret", "token", "apikey", "api_key")
            for sign in ("</", '">', "'>", '\\">', "><")
        ),
        r"""(?i:password|passwd|secret|token|api_?key)(?:[\w ]{0,20}["']?[^<>\n"']{0,40}>|"""
        r"""</[\w.:-]{1,40}>)\s{0,40}"""
        r"""(?:</?[\w.:-]{1,40}(?:\s[^<>]{0,80})?>\s{0,40}){0,3}(?:<!\[CDATA\[)?([^<>\s\0]{6,4096}?)(?:\]\]>)?</""",
        lambda value: is_password_in_sentence(value) or is_generated(value),
        "assignment",
    ),
    # passphrase: "correct horse battery staple"
    place(
        "passphrase",
        r"""(?i:passphrase)\\{0,7}["']?[ ]?[:=]{1,2}[ ]?\\{0,7}["']"""
        r"""((?:[a-z]{4,9}[ ]){3,7}[a-z]{4,9})\\{0,7}["']""",
        lambda value: not any(map(is_example, value.split())),
        "assignment",
    ),
    # --admin-password, and the value in the next entry of a list
    place(
        'password\n|password"\n|password\',\n|password",\n|passwd\n|passphrase\n',
        rf"""(?i:password|passwd|passphrase)["']?,?\s{{0,2}}\n[ \t]{{0,24}}-[ ]["']?{_WORD}["']?(?=\s|\Z)""",
        is_passed,
        "assignment",
    ),
    # "passwords": ["…", "…"]
    place(
        "passwords",
        r"""passwords\\{0,7}["']?[ ]?[:=][ ]?[\[(]\s{0,20}\\{0,7}["']([^"'\\\s]{6,128})\\{0,7}["']"""
        r"""(?:,\s{0,20}\\{0,7}["']([^"'\\\s]{6,128})\\{0,7}["'])?(?:,\s{0,20}\\{0,7}["']([^"'\\\s]{6,128})\\{0,7}["'])?""",
        is_passed,
        "assignment",
    ),
)
"""Places in sentences and lists."""

_PROMPT = re.compile(
    r"(?:[ \t]{0,8}\d{1,6}[→:|\t][ \t]?)?[ \t]{0,8}(?:[\w@.~/:\[\]() -]{0,60})?(?:[$%>❯➜]|(?<=\S)#)[ \t]+\S"
)
_ALONE = re.compile(
    r"""(?:(?:\r?\n|"""
    r"""\\{1,7}n)(?:[ \t]{0,8}\d{1,6}[→:|\t])?[ \t]{0,12}){1,2}(?P<value>[^\s\\"'`]{6,4096})"""
    r"""(?=[ \t]*(?:[\r\n\\"'`]|\Z))"""
)
_LINE_END = re.compile(r"[^\n\r\\]{0,160}")
_REQUEST = re.compile(r"[ \t\w'\"-]{0,60}(?:passw(?:or)?d|passphrase)[ \w'()-]{0,40}:?[ \t]*", re.I)
_FOLLOWING = re.compile(r"(?:following|generated|initial|temporary)[^\n]{0,80}$", re.I)
_PRINTED_NEEDLES = (
    b"passw",
    b"secret",
    b"openssl rand",
    b"pwgen",
    b"master.key",
    b"printenv ",
    b"echo $",
    b"passphr",
)
_PRINTED_AHEAD = re.compile(
    r"""[^\n\r\\]{0,160}+(?:[\r\n]|\\{1,7}n){1,4}+[ \t\d→:|]{0,24}+[^\s\\"'`;{}<>()\[\]]{6,4096}+"""
    r"""[^\s\\"'`]{0,80}+[ \t]{0,4}(?:[\n\r\\"'`]|\Z)"""
)
_NAMES_SECRET = re.compile(
    r"(?i)passw|secret|token|rand\b|pwgen|master\.key|(?:printenv|echo)[ ]\"?\$?\{?\w*(?:pass|pw|secret|"
    r"token|key|cred)"
)


def _find_printed(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Yield the span of a value alone in the line below a command that shows a secret, or a request for one."""
    end = _LINE_END.match(text, position)
    value = _ALONE.match(text, end.end()) if end else None
    if end is None or value is None:
        return
    earliest = max(position - 160, 0)
    escaped = text.rfind("\\n", earliest, position)
    start = max(text.rfind("\n", earliest, position) + 1, escaped + 2 if escaped >= 0 else 0)
    line = text[start : end.end()]
    secret = value["value"]
    if _PROMPT.match(line) and _NAMES_SECRET.search(line):
        accepted = is_password_in_sentence(secret) or is_generated(secret)
    elif _REQUEST.fullmatch(line) or _FOLLOWING.search(line[: position - start + 80]):
        accepted = (is_password_in_sentence(secret) or is_generated(secret)) and not is_reference(secret)
    else:
        return
    if accepted:
        yield value.span("value")


_COLUMN = re.compile(
    r"(?i)(?:user_?|login_?|api_?|client_?|access_?|db_?)?(?:password|passwd|pwd|pass|secret|token|api_?key|secret_?key|passwort|contraseña)s?"
)
_RULER = re.compile(r"[\s|│┼├┤+:=─━-]*")
_SIMPLE = re.compile(r"[\w \"'.-]{1,40}")
_TABLE_NEEDLES = (b"passw", b"secret", b"token", b"api_key", b"api key", b"pwd")
_TABLE_AHEAD = re.compile(
    r"(?i)[a-z]{3,8}+[ _]?\w{0,8}+[\"*`]{0,2}[ \t]{0,60}+"
    r"(?:[|│]|[,\t](?=[\w\" ]{1,24}(?:[,\t\n]|\Z))|\r?\n(?=[|│├+:-]|[^\n,\t]{1,80}[,\t]))"
)
_ROWS = 40


def _find_column(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of the values in a column of a table whose heading at `position` names secrets."""
    start = text.rfind("\n", max(position - 400, 0), position) + 1
    end = text.find("\n", position, position + 400)
    if end < 0:
        return
    header = text[start:end]
    sign = next((character for character in "│|\t," if character in header), None)
    if sign is None:
        return
    names = [name.strip(" \t*`\"'") for name in header.split(sign)]
    if sign in ",\t" and (len(names) < 3 or not all(_SIMPLE.fullmatch(name) for name in names)):
        return
    column = text.count(sign, start, position)
    if column >= len(names) or _COLUMN.fullmatch(names[column]) is None:
        return
    for _ in range(_ROWS):
        start, end = end + 1, text.find("\n", end + 1, end + 4096)
        if end < 0:
            end = min(len(text), start + 4096)
        row = text[start:end]
        if _RULER.fullmatch(row) and row:
            continue
        cells = row.split(sign)
        if len(cells) != len(names):
            return
        cell, cell_start = cells[column], start + sum(len(other) + 1 for other in cells[:column])
        value = cell.strip(" \t*`\"'\r")
        if value and (is_password_in_sentence(value) or is_generated(value)):
            value_start = cell_start + cell.index(value)
            yield value_start, value_start + len(value)


_FOREIGN_SENTENCE = re.compile(
    r"(?i)(?:парол[ьая]|κωδικός|密码|密碼|口令|パスワード|비밀번호|암호|पासवर्ड|รหัสผ่าน|mật khẩu|סיסמה|كلمة المرور)"
    r"[^\W\d_ ]{0,6}(?:[ ][^\W\d_]{1,12}){0,3}?"
    r"(?:[ ]?[:：=＝—–][ ]{0,4}|是[：:]?[ ]?|は[「『]?|[는은이][ ]|[ ](?:είναι|это|є)[ ])[\"'`「『“]?$"
)
_FOREIGN_VALUE = re.compile(r"[!#-&*+./0-9=?@A-Z^_a-z~-]{6,128}")
_FOREIGN_SENTENCE_NEEDLES = (
    b"?? ",
    b"? ? ",
    *(b"??" + bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz0123456789"),
)
_FOREIGN_SENTENCE_AHEAD = re.compile(r"[^\x00-\xff][ ]?[^\x00-\xff][ ]{0,4}(?=[!-~]{0,60}[0-9])[!#-~]{6}")


def _find_in_foreign_sentence(text: str, position: int) -> Iterator[tuple[int, int]]:
    """Yield the span of the password that a sentence in a language with other letters tells."""
    start = position + 1
    while not text[start].isascii() or text[start] == " ":
        start += 1
    value = _FOREIGN_VALUE.match(text, start)
    if value is None or _FOREIGN_SENTENCE.search(text[max(position - 48, 0) : start]) is None:
        return
    secret = value.group().rstrip(".!?")
    if is_password_in_sentence(secret):
        yield start, start + len(secret)


FINDERS = (
    ("sentence", _FOREIGN_SENTENCE_NEEDLES, _find_in_foreign_sentence, _FOREIGN_SENTENCE_AHEAD),
    ("printed", _PRINTED_NEEDLES, _find_printed, _PRINTED_AHEAD),
    ("table", _TABLE_NEEDLES, _find_column, _TABLE_AHEAD),
)
"""What one pattern cannot find: the rule, its needles, the function, and the pattern that must match first."""
