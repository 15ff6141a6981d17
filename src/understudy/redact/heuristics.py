"""Judges what a value looks like: random, a password that somebody chose, a placeholder, code."""

from __future__ import annotations

import base64
import binascii
import re
from functools import lru_cache
from math import log2
from unicodedata import normalize
from urllib.parse import unquote

PSEUDONYM = re.compile(r"\[[A-Z][A-Z0-9_]*_[0-9a-f]{6}\]|user_[0-9a-f]{6}(?:@example\.com)?")
"""A pseudonym of ours."""

ANSI = r"(?:\x1b|\\{1,8}(?:u001b|x1b|033|e))\[[\d;]{0,16}m"
"""A pattern of terminal colour codes, as they are and as strings in code write them."""

_DUMMY = re.compile(
    r"example|placeholder|your[_-]|xxxx|\*\*\*|\.\.\.|dummy|0{8}|1234567890?abc|abcdefg|0001020304|8081828384|abcdef01|redacted|insert[_-]|"
    r"change[_-]?(?:me|this|it)|replace[_-]?(?:me|this|with)|[$#]\{|\{\{|%s",
    re.I,
)
_PUBLISHED_TEXT = """
dpf43f3p2l4k3l03 kd94hf93k423kf44 nnch734d00sl2jdk pfkkdhi9sl3r4s00 hh5s93j4hdidpola hdhd0244k9j7ao03
kkk9d7dh3k39sjv7 kllo9940pd9333jh
kAcSOqF21Fu85e7zjz7ZN2U4ZRhfV3WpwPAoE3Z7kBw LswwdoUaIvS8ltyTt5jkRh4J50vUPVVHtR2YPi5kE xvz1evFS4wEEPTGEFPHBog
370773112-GmHxMAgYyLbNEtIKZeRNFsMKPR9EyMZeS9weJAEb 2YotnFZFEjr1zCsicMWpAA tGzv3JOkF0XG5Qx2TlKWIA
SplxlOBeZQQYbYS6WxSbIA mF_9.B5f-4.1JqM gX1fBat3bV czZCaGRSa3F0MzpnWDFmQmF0M2JW
czZCaGRSa3F0Mzo3RmpmcDBaQnIxS3REUmJuZlZkbUl3 7Fjfp0ZBr1KtDRbnfVdmIw
dBjftJeZ4CVP-mBGyDZ7vPSIrxMKXw9b9lkcmR4kmMk E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM
JBSWY3DPEHPK3PXP
dGhlIHNhbXBsZSBub25jZQ== s3pPLMBiTxaQ9kYGzzhZRbK+xOo=
wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY je7MtGbClwBF/2Zp9Utk/h3yCo8nvbEXAMPLEKEY
"""
_PUBLISHED = frozenset(_PUBLISHED_TEXT.split())
"""Secrets in the specifications of OAuth, WebSocket and PKCE, and in the documentation of Twitter and AWS."""
_NAMED = re.compile(r"[A-Z]+(?:[_:-][A-Z]+)+")
"""A placeholder that names the value to put in its place: `API_KEY`."""
_TOKEN = re.compile(r"[\w.~+/=|:-]+", re.ASCII)
_HASH_OF = re.compile(r"(?i)(?:sha-?(?:1|224|256|384|512)|md5|crc32|blake2[bs])[:-]|data:[a-z]{1,20}/")
_FILE_NAME = re.compile(
    r"(?i)[\w.*/-]+\.(?:pem|key|crt|cer|der|p12|pfx|jks|json|ya?ml|toml|txt|env|ini|cfg|conf|properties|xml|md|"
    r"py|rb|php|go|rs|java|kts?|[cm]?[jt]sx?|cs|swift|scala|sh|html?|erb|lock|log|pub|asc|gpg)"
)
_LEET = str.maketrans("013457@$", "oleastas")
_REFERENCE = re.compile(
    r"""(?xi) \$(?!\w{60}) | <.*>?$ | \{ | \( | %[({sdv] | \[ | \.{2} | \*{2} | x{3,}$ | -+$ | @ [a-z]
    | (?:process|os|env|self|this|config|settings|secrets?|vars?|args|options|opts|props|req|request|ctx|params|
        data|user|state|response|res|json|body|event|process\.env|import\.meta|app|client|session|ssm|vault|var|local|
        module|github|inputs|steps|needs|matrix|values|input|form|payload|creds?|credentials?)\b [.\[(]
    | \w+:x:\d | https?:// | / | ~/ | \./ | [a-z]:\\ | file: | arn: | ssm: | op://"""
)
_CODE = re.compile(
    r"[A-Za-z_][\w.:]*(?:\(|\[|->|\?\.|::)|[a-z]\w*\.[A-Z]\w*\{|[^\"']{0,40}[)}\]][,;][^\"']*[({:=]|!?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+[,;)]*$|.*(?:=>|===|\+=|\{\{|\)\)|\(\)|&&\()"
)
_PLAIN_WORDS = re.compile(
    r"""(?xi)
    pwd | p[a4@]ss(?:w[o0]r[dt]|w[dt]|phrase)?s? | secrets? | tokens? | keys? | tests?(?:ing)? | examples?
    | admin(?:istrator)? | users? | changeme | change | default | foo | bar | baz | qux | hunter2?
    | letmein | welcome | qwert[yz](?:uiop)? | asdf | dummy | fake | mock | sample | demo | my | your
    | the | new | old | wrong | right | correct | valid | invalid | bad | good | some | any | here | value
    | string | str | none | null | undefined | true | false | required | optional | root | postgres | proxy
    | mysql | redis | mongo(?:db)? | database | db | api | auth | access | private | public | client
    | server | local | host | dev(?:elopment)? | prod(?:uction)? | staging | super | login | hash(?:ed)?
    | strong | weak | s(?:u|oo)per | top | secure | fake | cert(?:ificate)? | word | abc | xyz
    | hello | world | open[ ]?sesame | x-oauth(?:-basic|-token)?
    | \d{0,3}123(?:4(?:5(?:6(?:7(?:89?0?)?)?)?)?)? | [-_.!@#$%^&*?~+:/=\ ]+
    """
)
_CLAIMS = re.compile(r"eyJ[\w-]+\.(eyJ[\w-]+)", re.ASCII)
_SAMPLE_CLAIMS = re.compile(
    rb'"John Doe"|"some": ?"payload"|"sub": ?"1234567890"|"iss": ?"(?:https?://)?(?:[\w-]{1,63}\.)?example\.(?:com|org|net)'
)
_SMALL, _CAPITAL, _DIGIT = re.compile(r"[^\W\d_A-Z]"), re.compile(r"[A-Z]"), re.compile(r"\d")
_SIGN = re.compile(r"[^\w./:,()*-]")
_CHOSEN = re.compile(r"(?=.*[A-Za-z])[!#-'*-;=?-z~]{6,}", re.ASCII)
"""Letters, digits and signs, but no quotes, brackets or blanks."""
_NUMBERED_WORD = re.compile(r"[A-Za-z]+\d{3,6}\.\w{1,3}")
"""A password with a dot, which looks like an attribute of a name in code."""
_NUMBERED_NAME = re.compile(
    r"[a-z]+(?:[-_][a-z]+)*[-_]?\d|[a-z_/]+#[a-z_]+|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|.*\$[A-Za-z_{(].*"
)
"""A name with a number of one digit, such as that of a field; a route, a constant, a text with a variable."""
_GROUPS = re.compile(r"(?=.*[a-z][A-Z])(?=.*[A-Z][a-z]?[A-Z])[A-Za-z0-9]{4}(?:-[A-Za-z0-9]{4}){2,5}")
"""Groups of four characters, as generators of passwords make them."""
_ALGORITHM = re.compile(r"(?i)(?:sha|md|pbkdf|utf|base|aes|des|rsa|crc|hmac|tls|ssl|rfc|iso|argon|blake)-?\d")
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[A-Z]|[0-9]+")
_FOLLOWS_TEXT = """
abcdfgiklmnprstuvy baeilorsu cacehiklorstu dadeilorsu eabcdefgilmnopqrstvwxy faefilortu gaeghilnorsu haeiortu
iabcdefglmnoprstvxz jaeosu keis ladeilopstuy mabeimopsu nacdefgiklnostuv oabcdfgiklmnoprstuvw paehiloprstu qu
racdegiklmnoprstuvy sacdehiklmopstuy tacdefhiloprstuy uabcefgilmnprst vaei waeinor xaceipt yps ze
"""
_PAIRS = frozenset(row[0] + after for row in _FOLLOWS_TEXT.split() for after in row[1:])
"""The pairs of letters that make up 94 % of the pairs in words of code, and 38 % of those in random letters."""
_BASE64 = re.compile(r"[A-Za-z0-9+/]{12,8192}={0,2}")
_PRINTABLE = re.compile(r"(?:[\t\n\r -~]|[^\W\d_]){8,}")
_WORDS_ALONE = re.compile(r"(?:[A-Za-z]+[ _:./-])*[A-Za-z]+[0-9]{0,2}\n?")
_LETTERS = re.compile(r"[A-Za-z]+")
_KEY_BODY = re.compile(r"^[A-Za-z0-9+/=]{32,}$", re.M)
_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$]*", re.ASCII)
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
    """Return the entropy in bits per character, by how often each character occurs in the value."""
    size = len(value)
    return -sum((count := value.count(one)) / size * log2(count / size) for one in set(value)) if size else 0.0


def is_placeholder(value: str) -> bool:
    """Return whether a value in the form of a secret is a documentation example, or a row of a few letters."""
    return (
        _DUMMY.search(value) is not None
        or len(set(value[-16:])) < 5
        or value in _PUBLISHED
        or is_sample_jwt(value)
    )


def is_sample_jwt(value: str) -> bool:
    """Return whether a value is a JSON Web Token of documentation: John Doe's, or issued by example.com."""
    if not value.startswith("eyJ"):
        return False
    claims = _CLAIMS.match(value)
    if claims is None:
        return False
    try:
        decoded = base64.urlsafe_b64decode(claims[1] + "=" * (-len(claims[1]) % 4))
    except (binascii.Error, ValueError):
        return False
    return _SAMPLE_CLAIMS.search(decoded) is not None


def is_reference(value: str) -> bool:
    """Return whether a value is no literal: a pseudonym, a placeholder, a variable, a path, or a call."""
    value = value[:256]
    return (
        value in _PUBLISHED
        or _REFERENCE.match(value) is not None
        or _NAMED.fullmatch(value) is not None
        or _HASH_OF.match(value) is not None
        or _FILE_NAME.fullmatch(value) is not None
        or (_CODE.match(value) is not None and not (_TOKEN.fullmatch(value) and looks_random(value)))
        or "://" in value
        or PSEUDONYM.search(value) is not None
        or _DUMMY.search(value) is not None
        or value.lower() in GENERIC_PASSWORDS
        or is_sample_jwt(value)
    )


@lru_cache(maxsize=1 << 14)
def is_wordlike(letters: str) -> bool:
    """Return whether a run of letters reads like a word or a part of one: most of its letter pairs are frequent
    ones.
    """
    letters = letters.lower()
    pairs = len(letters) - 1
    if pairs < 2:
        return False
    common = sum(letters[at : at + 2] in _PAIRS for at in range(pairs))
    return common * 3 >= pairs * 2


def count_random_characters(value: str) -> int:
    """Return how many letters and digits of a value belong neither to a word nor to a number of seven digits or
    more.
    """
    count = 0
    for piece in _PIECES.findall(value):
        if len(piece) < 7 if piece.isdigit() else not is_wordlike(piece):
            count += len(piece)
    return count


def is_example(password: str) -> bool:
    """Return whether a password is an example: made of words such as `test`, `my` and `secret`, or of capitals
    only.
    """
    # In a URL, signs are escaped: `p%40ss`. Tests of encodings write `pässword`.
    password = normalize("NFKD", unquote(password)).replace("\N{COMBINING DIAERESIS}", "")
    rest = _PLAIN_WORDS.sub("", password)
    letters = "".join(filter(str.isalnum, password)).lower()
    return (
        len(rest) < 2
        or (rest.isdigit() and len(rest) < 4)
        or not _PLAIN_WORDS.sub("", letters.translate(_LEET))
        or (password.isascii() and password.isalpha() and password.isupper())
    )


def looks_random(value: str) -> bool:
    """Return whether a value looks random: at least ten of its letters and digits, and half of all its characters,
    belong to no word or number.

    Names in code do not look random, however long, because they are made of words.
    """
    if len(value) < 12:
        return False
    value = value[:200]
    if _HEX.fullmatch(value):
        return len(value) >= 32 and entropy(value) > 2.8
    if _UUID.fullmatch(value):
        return True
    random = count_random_characters(value)
    return random >= 10 and random * 2 >= sum(map(str.isalnum, value)) and entropy(value) > 2.9


def count_character_classes(value: str) -> int:
    """Return how many classes of characters a value has: lower case, upper case, digits, symbols."""
    return sum(sort.search(value) is not None for sort in (_SMALL, _CAPITAL, _DIGIT, _SIGN))


def is_password(value: str, quoted: bool) -> bool:
    """Return whether a value that is called a password looks like a real one, not like an example made of words.

    A real one has letters, and digits or symbols, and at least four of its characters belong to no word.
    """
    if looks_random(value):
        return True
    value = unquote(value[:80])
    several = count_character_classes(value)
    if several < 2 or len(value) < (6 if quoted else 8):
        return False
    # Without a digit or sign, a value of upper and lower case letters is usually a name in code.
    if not (_DIGIT.search(value) or _SIGN.search(value)) or not (_SMALL.search(value) or _CAPITAL.search(value)):
        return False
    if not quoted and several < 3 and not _DIGIT.search(value):
        return False
    return _is_made_up(value)


def is_chosen_password(value: str) -> bool:
    """Return whether a value that can only be a password was chosen by somebody: words with a number or a sign.

    Only for places in which nothing else stands, such as `DB_PASSWORD=…`: in code, such values are names.
    """
    value = unquote(value[:80])
    if is_reference(value) and not (_NUMBERED_WORD.fullmatch(value) and not _DUMMY.search(value)):
        return False
    if _CHOSEN.fullmatch(value) is None or is_example(value):
        return False
    words = _PLAIN_WORDS.sub("", value)
    if sum(map(str.isalnum, words)) < 4 or words.isdigit():
        return False
    if len(_PLAIN_WORDS.sub("", value.lower().rstrip("0123456789").translate(_LEET))) < 2:
        return False
    numbered = _DIGIT.search(value) is not None or _SIGN.search(value) is not None
    if _NUMBERED_NAME.fullmatch(value):
        return False
    return (numbered or _GROUPS.fullmatch(value) is not None) and not _ALGORITHM.match(value)


def is_passphrase(value: str) -> bool:
    """Return whether a value is three words or more that somebody joined, of which three are no example's."""
    words = value.replace("_", "-").split("-")
    return (
        len(words) > 2
        and all(len(word) > 2 and word.isalpha() and word.islower() for word in words)
        and sum(not is_example(word) for word in words) > 2
    )


def decoded_base64(value: str) -> str | None:
    """Return the text that a value encodes in base64; None if it is not base64, or encodes no text of letters and
    ASCII characters.
    """
    if _BASE64.fullmatch(value) is None:
        return None
    try:
        decoded = base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None
    try:
        text = decoded.decode()
    except UnicodeDecodeError:
        return None
    return text if _PRINTABLE.fullmatch(text) else None


def is_encoded_example(value: str) -> bool:
    """Return whether a value encodes in base64 a text that is no secret: words, a certificate, a key without its
    body.
    """
    text = decoded_base64(value)
    if text is None:
        return False
    if text.startswith("-----BEGIN "):
        return "PRIVATE KEY-" not in text[:64] or _KEY_BODY.search(text) is None
    if _WORDS_ALONE.fullmatch(text):
        return sum(len(word) for word in _LETTERS.findall(text) if len(word) > 3 and not is_wordlike(word)) < 8
    return not is_password(text.rpartition(":")[2].strip(), quoted=True)


def is_identifier(value: str) -> bool:
    """Return whether a value could be a name in code."""
    return value.isidentifier() or _IDENTIFIER.fullmatch(value) is not None


def is_distinctive(value: str) -> bool:
    """Return whether a secret can be searched for in all texts without matching words or names in code."""
    if len(value) < 8:
        return False
    if _HEX.fullmatch(value) and len(value) >= 20:
        return len(set(value)) >= 8 and not value.isdigit()
    return looks_random(value) or (
        not value.isdigit()
        and not is_identifier(value)
        and _DIGIT.search(value) is not None
        and len(set(value[:200])) >= 5
        and _is_made_up(value[:200])
    )


def _is_made_up(value: str) -> bool:
    left = _PLAIN_WORDS.sub("", value)
    plain = value.lower().translate(_LEET)
    numbered = value.lower().rstrip("0123456789").translate(_LEET)
    if min(len(_PLAIN_WORDS.sub("", plain)), len(_PLAIN_WORDS.sub("", numbered))) < 4 or left.isdigit():
        return False
    return count_random_characters(left) + sum(not one.isalnum() for one in left) >= 4
