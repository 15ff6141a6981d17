"""Whether a value is a secret: how random it looks, whether it is a placeholder or code, what name it is given.

Names that say so: `password=…`, `"api_key": "…"`, `--token …`, `<secret>…`.
"""

from __future__ import annotations

import re
from math import log2

PSEUDONYM = re.compile(r"\[[A-Z][A-Z0-9_]*_[0-9a-f]{6}\]|user_[0-9a-f]{6}(?:@example\.com)?")
"""A pseudonym of ours."""

ANSI = r"(?:\x1b|\\{1,8}(?:u001b|x1b|033|e))\[[\d;]{0,16}m"
"""What colours the text of a terminal, as it is and as strings write it: a pattern."""

_DUMMY = re.compile(
    r"example|placeholder|your[_-]|xxxx|\*\*\*|\.\.\.|dummy|0{8}|1234567890?abc|abcdefgh|redacted|insert[_-]|"
    r"change[_-]?(?:me|this|it)|replace[_-]?(?:me|this|with)",
    re.I,
)
_REFERENCE = re.compile(
    r"""(?xi) \$ | <.*>?$ | \{ | %[({sdv] | \[ | \.{2} | \*{2} | x{3,}$ | -+$ | @ [a-z]
    | (?:process|os|env|self|this|config|settings|secrets?|vars?|args|options|opts|props|req|request|ctx|params|
        data|user|state|response|res|json|body|event|process\.env|import\.meta|app|client|session|ssm|vault|var|local|
        module|github|inputs|steps|needs|matrix|values|input|form|payload|creds?|credentials?)\b [.\[(]
    | \w+:x:\d | https?:// | / | ~/ | \./ | [a-z]:\\ | file: | arn: | ssm: | op://"""
)
_CODE = re.compile(
    r"[A-Za-z_][\w.:]*(?:\(|\[|->|\?\.|::)|[a-z]\w*\.[A-Z]\w*\{|[^\"']{0,40}[)}\]][,;][^\"']*[({:=]|!?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+[,;)]*$|.*(?:=>|===|\+=|\{\{|\)\)|\(\))"
)
_WORDS = re.compile(
    r"""(?xi)
    p[a4@]ss(?:w[o0]r[dt]|w[dt]|phrase)?s? | secrets? | tokens? | keys? | tests?(?:ing)? | examples?
    | admin(?:istrator)? | users? | changeme | change | default | foo | bar | baz | qux | hunter2?
    | letmein | welcome | qwert[yz](?:uiop)? | asdf | dummy | fake | mock | sample | demo | my | your
    | the | new | old | wrong | right | correct | valid | invalid | bad | good | some | any | here | value
    | string | str | none | null | undefined | true | false | required | optional | root | postgres
    | mysql | redis | mongo(?:db)? | database | db | api | auth | access | private | public | client
    | server | local | host | dev(?:elopment)? | prod(?:uction)? | staging | super | login | hash(?:ed)?
    | strong | weak | abc | xyz | \d{0,3}123(?:4(?:5(?:6(?:7(?:89?0?)?)?)?)?)? | [-_.!@#$%^&*?~+:/=]+
    """
)
_SMALL, _CAPITAL, _DIGIT = re.compile(r"[^\W\d_A-Z]"), re.compile(r"[A-Z]"), re.compile(r"\d")
_SIGN = re.compile(r"[^\w./:,()*-]")
_CHUNKS = re.compile(r"[A-Za-z0-9]+")
_SWITCHES = re.compile(r"(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")
_CLUSTER = re.compile(r"(?i)[bcdfghjklmnpqrstvwxz]{5}")
_HEX = re.compile(r"[0-9a-fA-F]+")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

_GENERIC_PASSWORDS_TEXT = """
password passwd pass pwd secret root admin user username changeme test tests testing example guest postgres
postgresql mysql mariadb mongo mongodb redis rabbitmq guest default docker dev development local localhost
prod production db database app api token key none null undefined true false empty string str xxx foo bar
baz pw p x y z u yourpassword your_password mypassword my_password db_password dbpassword rootpassword
userpassword hunter2
"""
GENERIC_PASSWORDS = frozenset(_GENERIC_PASSWORDS_TEXT.split())


def entropy(value: str) -> float:
    """Bits a character, by how often each occurs in the value."""
    size = len(value)
    return -sum((count := value.count(one)) / size * log2(count / size) for one in set(value)) if size else 0.0


def is_placeholder(value: str) -> bool:
    """Whether a value with the form of a secret is one of the documentation's, or a row of a few letters."""
    return _DUMMY.search(value) is not None or len(set(value[-16:])) < 5


def is_reference(value: str) -> bool:
    """Whether it is a pseudonym, a placeholder, a variable, a path, a call: something that is no value itself."""
    value = value[:256]
    return (
        _REFERENCE.match(value) is not None
        or _CODE.match(value) is not None
        or "://" in value
        or PSEUDONYM.search(value) is not None
        or _DUMMY.search(value) is not None
        or value.lower() in GENERIC_PASSWORDS
    )


def looks_random(value: str) -> bool:
    """Whether its letters and digits look drawn by lot: at least ten of them where no word would be so."""
    if len(value) < 12:
        return False
    value = value[:200]
    if _HEX.fullmatch(value):
        return len(value) >= 32 and entropy(value) > 2.8
    if _UUID.fullmatch(value):
        return True
    mixed = 0
    for chunk in _CHUNKS.findall(value):
        if len(_SWITCHES.findall(chunk)) >= 2 or (
            len(chunk) >= 8 and _CLUSTER.search(chunk) and not chunk.isupper()
        ):
            mixed += len(chunk)
    return mixed >= 10 and entropy(value) > 2.9


def count_character_classes(value: str) -> int:
    """How many sorts of characters are in the value: small letters, capitals, digits, signs."""
    return sum(sort.search(value) is not None for sort in (_SMALL, _CAPITAL, _DIGIT, _SIGN))


def is_password(value: str, quoted: bool) -> bool:
    """Whether a value that is said to be a secret is one: of two sorts of characters, and no mere words."""
    if looks_random(value):
        return True
    value = value[:80]
    several = count_character_classes(value)
    if several < 2 or len(value) < (6 if quoted else 8):
        return False
    # Letters of two cases, and no more: a name in code more often than not.
    if not (_DIGIT.search(value) or _SIGN.search(value)) or not (_SMALL.search(value) or _CAPITAL.search(value)):
        return False
    if not quoted and several < 3 and not _DIGIT.search(value):
        return False
    return len(_WORDS.sub("", value)) >= 4


def is_distinctive(value: str) -> bool:
    """Whether a value, once found, can be looked for wherever it stands without hitting ordinary words."""
    if len(value) < 8:
        return False
    return looks_random(value) or (
        not value.isdigit()
        and _DIGIT.search(value) is not None
        and len(set(value[:200])) >= 5
        and len(_WORDS.sub("", value[:200])) >= 4
    )


# --- values that are assigned to a name ----------------------------------------------------------------

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
    """Where the secret lies that is assigned to a name in which a word for secrets stands at `position`."""
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
