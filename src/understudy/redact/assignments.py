"""Finds values assigned to a name for secrets: `password=…`, `"api_key": "…"`, `--token …`, `<secret>…`.

The name alone is not enough: in code such a name is mostly assigned another name, a call or a type. So a value
without quotes is taken only if it looks random, or is alone in a line as in configuration files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from understudy.redact.heuristics import (
    ANSI,
    count_character_classes,
    count_random_characters,
    is_chosen_password,
    is_encoded_example,
    is_identifier,
    is_passphrase,
    is_password,
    is_placeholder,
    is_reference,
    is_wordlike,
    looks_random,
)

_STRONG = re.compile(r"(?i)passw|pwd|passphr|secret|identified|^pw$")
_PASSWORD = re.compile(r"(?i)passw|pwd|passphr|passc|pass$|pw$|identified")
"""The words for what somebody chooses."""
_PASSWORD_NAME = re.compile(
    r"(?i)(?:identified by|passw(?:or)?ds?|pwd|pass(?:phrase|code)?|pw)"
    r"(?:[_-]?\d{1,2}|[_-](?:prod|dev|test|staging|old|new|confirm(?:ation)?|again|admin|root|db)|confirm(?:ation)?)?"
)
_IN_LIST = re.compile(
    r"(?:[;&?{:][ ]?|[\w\]][=:][^\s;=]{1,60}[ ,][ ]?|[ \t\"'](?:--?(?:D|P)?)|"
    r"[ ])(?:[\w.-]{1,60}[_.-])?[\w ]{0,20}$"
)
"""What stands before a name in a connection string, in a query, behind another name with a value, in an option."""
_FIRST_OF_CALL = re.compile(r"\([ ]?\\{0,7}[\"'][\w.-]{0,60}$")
_AFTER = re.compile(
    r"""(?x)
    [\w-]{0,40}+ (?: [ ]\d{1,2} (?=:) )?+             # the rest of the name, and a number: `Unseal Key 2:`
    (?: ANSI ){0,3}+
    (?: \\{0,7}+ ["'`] )?+ \]?+ [ \t]{0,20}+
    (?:
        # in the next line
        (?P<alone> :?+ [ \t]{0,4} \r?\n [ \t]{0,12} (?= [\w.=+/-]{20,512}+ (?: [\r\n] | \Z ) ) )
      # "token": { "type": "string", "value": …, and variable "token" { default = …, as Terraform writes them
      | :?[ ]?\{ (?: \s | \\{1,7}[nrt] ){0,24}
            (?: \\{0,7}["']? \b (?: type | sensitive | description | nullable ) \b [^\n\\{}]{1,120}
                (?: \s | \\{1,7}[nrt] | , ){1,24} ){0,3}
            \\{0,7}["']? \b (?P<inside> value | default ) \\{0,7} ["']? [ \t]{0,12} [:=]
      | :[ \t]{0,4} &?(?:'\w{1,20}[ ])?[A-Za-z_][\w.:]{0,30} (?: [\[<] [\w.&,' ]{1,30} [\]>] )? [?!]?
            (?: [ ]?\|[ ]?\w{1,20} )? [ \t]{0,4} =[ \t]
      | (?<=[ \t]) (?: As[ ]String | \[\]byte | [Ss]tring | str ) [ \t]{0,4} =[ \t]
      # process.env.SECRET || "…", ENV["TOKEN"] or "…"
      | (?: \)[ ] | (?<=[ ]) ) (?P<otherwise> \|\| | \?\? | or ) (?=[ ] \\{0,7} ["'`])
      # "--token", default="…"
      | ,[ ]? default[ ]?= (?=[ ]? \\{0,7} ["'])
      | (?: := | [|?]{0,2}={1,3}>? | :-(?=[^\s-]) | :(?!:) | -> | <- | > | (?P<prose> (?<=[ \t])is:? (?=[ ]) ) )
      # {name: …, value: …}
      | (?: ["',\s] | \\{1,7}[nr"'] ){0,24}
          (?: \\{0,7}["']? [Tt]ype \\{0,7}["'] [ ]?:[ ]? [^\n,{}]{1,40} ,\s{0,8} \\{0,7}["']? )?
          \b (?P<beside> [Vv]alue | content ) \\{0,7} ["']? [ \t]{0,4} [:=]
      # {method: "login_with_api_key", params: [ … ]}
      | ,[ ]? \\{0,7} ["'] params \\{0,7} ["'] [ ]? : [ ]? (?P<params> \[ )
      | (?P<comma> (?: (?<=["'`]) | (?<=_PASSWORD) ) ,[ ]{0,2} (?= \\{0,7} ["'`] ) )   # getenv("API_KEY", "…")
      | (?P<loose> \| | (?<=[ \t]) - (?= [ ]{1,4} \\{0,7} ["'`] ) )   # a row of a table, an entry of a list
      | (?P<space> (?: (?<=[ ]) | (?<=\t) | (?<==) ) )
    )
    [ \t]{0,12}
    # a word before the value, such as `Bearer`
    (?P<scheme> (?<=[=:][ ]) [A-Za-z]{3,12} [ ] (?= [\w.=+/-]{20,512}+ (?: [\r\n"'`\\] | \Z ) ) )?
    (?P<broken> \(? (?: \r?\n | \\{1,7}n ) [ \t]{1,60}+ (?= ["'`] ) )?
    (?: ANSI ){0,3} (?: \*\* )?
    # a call that wraps the value: SecretStr("…"), Convert.FromBase64String("…")
    (?: (?: Secret\w* | Field\( default=? ) \(? (?=["']) | (?P<wrapped> [A-Za-z_][\w.]{1,40} \( ) (?=["']) )?
    (?: (?: [fbruFBRU]{1,2} | @ ) (?=["']) )?
    (?: \\{0,7} (?P<quote> ["'`] ) (?P<spaced> [ ]{1,2} (?=\S) )? )?
    """.replace("ANSI", ANSI)
)
# A word of a few letters that ends a line, clause or list is no secret, whatever it is assigned to.
_DULL = r"(?:[A-Za-z]{0,11}(?:[,.;:)}!?*]*+[ \t]*+(?:[\r\n]|\Z)|[,;)}][\s,;)}])|[{(\[])"
_SIGN = (
    r"(?: :(?!:) | [=>] | [|?]{1,2}= ) [=>]*+ [ \t]*+"
    r"(?! (?! \r?\n (?: [ \t]++ [\"'`] | [ \t]*+ [\w.=+/-]{20} ) ) DULL )"
)
MAY_BE_ASSIGNED = re.compile(
    r"""(?x) [A-Za-z]{3,24}+ [0-9]{0,3} [.-] [A-Za-z0-9_-]{20}
    | [\w-]*+ (?i:[ ]by)?+
    (?: [ \t]*+ SIGN
      | [ \t]++ (?: As[ ]String | \[\]byte | [Ss]tring | str ) [ \t]*+ =
      | [ \t]++ (?: -> [ \t]*+ (?!DULL) | [\x1b\\"'`\],\n\r] | is | value
          | (?! :(?!:) | [=>] | -> | [A-Za-z]{0,11}[,.;:)}!?*]*+(?:\s|\Z) | [{(\[] ) )
      | [\x1b\\\],\n\r]
      | ["'`]\)[ ](?: \|\| | \?\? | or )[ ]
      | ["'`] [ ]?:?[ ]?\{ (?: \s | \\{1,7}[nrt] )*+ \\*+["']?+ (?: value | default | type | sensitive | descr )
      | ["'`] \]?+ (?: [ \t]*+ SIGN | (?! [ \t]*+ (?: :(?!:) | [=>] ) | [.()a-uw-zA-Z0-9_;+*/&|{}\[@\#!?%$^~<] ) )
    )""".replace("SIGN", _SIGN).replace("DULL", _DULL)
)
"""The pattern that must match after a word for secrets before `find_assigned` is called; it rejects most words."""
MAY_BE_SHORT = re.compile(
    r"""(?:[_-](?i:sk|pw)|(?<![A-Za-z0-9])(?i:pw)|(?i:seed))(?![A-Za-z])\\{0,7}["'`]?\]?"""
    r"""(?:[ \t]{0,4}[:=]|[ ,]|\\{0,7}[ \n\\]|[ ]?\{)"""
)
"""The same for short names of secrets: `QINIU_SK`, `bind_pw`, `MFA_SEED`."""
MAY_BE_NAMED = re.compile(
    r"""(?:(?i:access|private)[A-Za-z]{0,12}+\d{0,2}[.-][A-Za-z0-9_-]{20}"""
    r"""|(?i:access(?: code)?|private)["'`]?+(?:[ \t]{0,4}(?:[:=]>?|->)|[ \t](?:is )?)"""
    r"""[ \t]{0,4}["'`]?+[\w.=+/-]{16}"""
    r"""|(?:[ ](?i:pat)|(?i:api|crumb))[ \t]{0,4}[:=][ \t]{0,4}["'`]?+[\w.=+/-]{16})""",
    re.ASCII,
)
"""The same for words that name a secret only before a long value, because code is full of them: `private int`."""
_VALUES = {
    '"': re.compile(r'[^"\\\s\0]{1,512}+(?:\\{1,7}/[^"\\\s\0]{1,256}+){0,16}'),
    "'": re.compile(r"[^'\\\s\0]{1,512}+(?:\\{1,7}/[^'\\\s\0]{1,256}+){0,16}"),
    "`": re.compile(r"[^`\\\s\0]{1,512}+(?:\\{1,7}/[^`\\\s\0]{1,256}+){0,16}"),
    "": re.compile(r"""[^\s"'`\\;<>|\0\x1b]{6,512}"""),
}
_LONG = 500
_UNSURE = ("params", "loose", "broken", "spaced", "wrapped")
"""Groups of `_AFTER` after which a value must look random, because other things stand there too."""
_LOOSELY = ("space", "alone", "scheme")
"""Groups of `_AFTER` in which no sign assigns the value, so that it must be long and random."""
_MORE = re.compile(r"""[^\s"'`\\;<>|\0]{1,8192}""")
_KEY_OF_DATA = re.compile(
    r"(?i)(?:(?<![a-z])|(?-i:(?<=[a-z])(?=[A-Z])))(?:public|primary|foreign|sort(?:ing)?|cache|caching|partition|index|group(?:ing)?|order|map|dict|hash|lookup|unique|"
    r"idempotency|dedup\w*|row|column|object|translation|i18n|registry|event|query|item|field|state|route|node|entity|record|"
    r"shard|bucket|composite|natural|surrogate|range|list|array|config|settings?|header|metadata|param|prop|attr\w*|tag|label|"
    r"hot|short|websocket|arrow|modifier|press|home|end|tab|enter|escape|delete|pub|gpg|recv|pgp|fingerprint|distribution|content|parent|"
    r"change|storage|form|s3|blob|image|file|path|commit|build|artifact|lock|source|version|trace|span|request|correlation|message)"
    r"[_\- .]?$"
)
"""Words before `key` with which it identifies data and protects nothing, such as `primary`."""
_ENVIRONMENT_KEY = re.compile(r"(?:(?<![A-Za-z0-9_])|(?<=\\n))[A-Z][A-Z0-9]+_(?:[A-Z0-9]+_)+$")
_DATA_ONLY = re.compile(
    r"(?:PUBLIC|PRIMARY|FOREIGN|SORT|CACHE|CACHING|PARTITION|INDEX|IDEMPOTENCY|DEDUP\w*|HASH|LOOKUP|OBJECT|S3|PUB|GPG|"
    r"PGP|RECV|HOST|FINGERPRINT|BLOB|FILE|PATH|COMMIT|BUILD|ARTIFACT|LOCK|SOURCE|VERSION|IMAGE|REGISTRY|TRANSLATION|"
    r"CONTENT|STATE)[_ .-]?$"
)
_BASE64 = re.compile(r"[A-Za-z0-9+/]{40,8192}={0,2}")  # may begin with a slash, like a path
_STEP_TOKEN = re.compile(
    r"(?i)(?:(?<![a-z])|(?-i:(?<=[a-z])(?=[A-Z])))"
    r"(?:change|client|postman|request|next|page|pagination|continuation|idempoten\w{1,3}|cursor|sync|lock|cancel(?:lation)?)"
    r"[_\- .]?$"
)
"""Words before `token` with which it names a step of a protocol and protects nothing, such as `next`."""
_PAGE_TOKEN = re.compile(r"(?i)(?:next|continuation|pagination|page)[_\- .]?$")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_PUBLIC = re.compile(r"(?i)(?:public|publishable)[_\- .]?$")
_DOTTED_NAME = re.compile(r"(?:[A-Za-z_]\w*\.)+(?P<last>[A-Za-z_]\w*)", re.ASCII)
_SLUG = re.compile(r"(?:[a-z]{2,16}[-_])+(?:[a-z]{2,16}|[0-9]{1,3})")
_DAY = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_NOT_IN_TOKENS = re.compile(r"[^\w.~+/=:|%-]")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[T ].{0,30})?")
_NUMBERS = re.compile(r"[\d.]+")
_PLAIN = re.compile(r"[\w.~+/=-]+(?::[\w.~+/=-]+){0,3}", re.ASCII)
_TIGHT = re.compile(r"[^()\[\]{},<>?;]+")
"""A value directly after `=`: a password with punctuation, but no call or list."""
_OF_ACCESS = re.compile(
    r"(?i)(?:api|access|private|secret|auth|salt|signing|encryption|master|deploy|licen[cs]e|webhook|admin|app)"
    r"[ ._-]?$"
)
_JOINED = re.compile(
    r"[A-Za-z]{0,12}+\d{0,2}[.-](?P<value>[A-Za-z0-9_-]{20,512}+(?:\.[A-Za-z0-9_-]{20,512}+){0,2})(?![\w./(\[]|=[^=])",
    re.ASCII,
)
"""A value that is joined to its name: `acmeSECRET-8Xq…`."""
_LIKE_KEY = re.compile(r"(?i)(?:mon|don|tur|whis|hoc|joc|fluk|stic|ris|fres)$")
"""What makes another word of `key`."""
_NAMED_HASH = re.compile(r"(?:[a-z]{2,20}[_-]){0,8}(?:[0-9a-f]{7,64}[_-]?){1,8}")
_JOINABLE = ("token", "secret", "key", "access", "private")
_BEFORE_JOINED = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-. "
_GENERATED = re.compile(r"[\w.=+/-]{16,512}", re.ASCII)
_SHORT_HEX = re.compile(r"(?=[a-fA-F]*[0-9])(?=[0-9]*[a-fA-F])(?:[0-9a-f]{20,31}|[0-9A-F]{20,31})")
_ONE_CASE = re.compile(r"[a-z]{20,}|[A-Z]{20,}")
"""Letters of one case only; names in code that consist of letters have several words."""
_LABEL = re.compile(
    r"(?:^|[\n\r\"'`]|\\{1,7}[nr])[ \t]{0,12}(?P<owner>[A-Za-z][\w.-]{1,30}?)[ _-]"
    r"(?:(?i:api|access|secret|private|auth)[ _-]|[A-Z][a-z]{1,20} ){0,2}\Z",
    re.ASCII,
)
"""The beginning of a line up to a word for secrets: the name of whom the secret is for."""
_NO_OWNER = re.compile(
    r"(?i)(?:\w*(?:ed|ing|[0-9])|an?|the|this|that|your|my|our|its?|no|not|new|old|with|for|by|of|to|on|in|at|from|and|or|same|each|"
    r"any|every|some|one|next|last|first|current|previous|duplicate|bad|wrong|invalid|valid|long|random|raw|full|"
    r"[rd]sa|e[cd](?:dsa|dh)?|gpg|pgp|ssh|hmac|aes|hex|get|set|put|del|delete|add|remove|drop|use|create|host|peer|node|"
    r"session|memo|redis|sub|super|symmetric|master|root|let|const|var|val|auto|static|final|mut|def|self|type|local)"
)
"""Words before `key` of which none is the name of a service: `the key`, `stored key`, `RSA key`."""
_NEXT_IN_LIST = re.compile(r",[a-z_]{2,30}=")
"""The next name in a list without blanks, as objects show themselves: `password=…,host=…`."""
_CALLED = re.compile(r"[ \t]*[(\[{]")
_DIGIT = re.compile(r"\d")
_HEX = re.compile(r"[0-9a-fA-F]+")
_URL_ESCAPE = re.compile(r"%(?:25){0,2}[0-9A-Fa-f]{2}")
_ACCESS_TOKEN = re.compile(r"[\w.-]+", re.ASCII)
_SHORT = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9]+")
_MIXED = re.compile(r"(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9._-]+")
_TURN = re.compile(r"(?<=[a-z])[A-Z0-9]|(?<=[A-Z])[a-z0-9]|(?<=[0-9])[A-Za-z]")
_SEPARATORS = re.compile(r"[-_./:]+")
_PATH_OF_WORDS = re.compile(r"[a-z]*[-_./:][-_./:a-z]*")
_SWITCH = re.compile(r"(?<=[A-Za-z])[0-9]|(?<=[0-9])[A-Za-z]")
"""A change between letters and digits: names have few of them, because they are made of words."""
_DIGEST_OR_ID = re.compile(
    r"(?:[\w.-]{1,80}[-_])?[0-9a-fA-F]{32,128}|[0-9a-fA-F]+|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
)
_ENDS = ("", "\n", "\r", "\0", "\\", '"', "'", "`", "\x1b", "&", " ", "\t", ";")
_CONFIG_NAME = re.compile(
    r"(?:^|[\n\r\0\"'`]|\\{1,8}[nrt]|\x1b\[[\d;]{0,16}m|(?<=[ \t])-e |--env[ =])"
    r"(?:[ \t]{0,8}(?:[\w./-]{1,120}:)?\d{1,6}[→:|\t])?[ \t+>$:@-]{0,40}\[?(?:\d{1,2}[.)][ ]|(?:#|//|--|;|"
    r"\*)[ ]{0,2})?"
    r"(?:(?:export|set|setx|ENV|ARG|declare -x)[ \t]{1,4})?"
    r"(?:[A-Z][\w-]{0,30} (?:[A-Za-z][\w-]{0,30} ){0,3})?[\w.-]{0,60}$"
)
_ENVIRONMENT_NAME = re.compile(r"(?:.*[ \t;&|(])?[A-Z][A-Z0-9_]*$", re.S)
"""A variable in front of a command."""
_NAMES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
_LOGIN = re.compile(r"\blogin[ \t]{1,4}\S{1,40}[ \t]{1,4}$")
_LINE = re.compile(r"(?:^|[\n\r]|\\{1,7}[nr])(?:[ \t]{0,8}\d{1,6}[→:\t])?[ \t+-]{0,12}$")
_SET = re.compile(r"(?:\bENV|\bsetx|\bset(?: -[a-zA-Z]{1,3})?|\bARG)[ \t]{1,4}$")
_COOKIE = re.compile(r"sessionid$|SESSIONID|SESSID|sessid$|connect\.sid$|^sid$|_session$")
_WORD = re.compile(
    r"(?i)passphrase|passw(?:or)?d|(?:(?<![a-z])|"
    r"(?-i:(?<=[a-z])(?=P)))pass(?=\\{0,7}[\"'`]?\]?[ \t]{0,4}[:=|?]|\\{0,7}[\"'],[ ]?\\{0,7}[\"']"
    r"|(?:[\s,\"']|\\{1,7}[nr]){1,30}value)|"
    r"pwd|dockerc(?:fg|onfigjson)|secret|token|key|credential|auth(?![b-np-z]|or(?!iz))|identified by|login|"
    r"[_ ]pat(?![a-z])|(?<=[_-])sk(?![a-z])|(?<![A-Za-z0-9])pw(?![a-z])|seed(?![a-z])|"
    r"access(?: code)?|private|(?:api|crumb)(?=[ \t]{0,4}[:=])"
)
_REST = re.compile(r"[\w-]{0,60}", re.ASCII)
_NAME = re.compile(
    r"(?i)passw(?:or)?d|(?:^|_|-|(?-i:(?<=[a-z])(?=P)))pass$|pwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?key|"
    r"(?:encryption|signing|master|account|storage|client)[_-]?key|[_-](?:sk|pw)$|credential|^auth$|authorization"
)
_NOT = re.compile(
    r"(?i)(?:tokens|tokeniz\w*|_?sha\d*|_?hash|_?digest|_?version|_?class|_?size|_?index|_?kind|_?prefix|_?suffix|(?<!p)_?at|_?count|_?type|_?len\w*|_?limit|_?name|(?<!secret)(?<!secret[_-])[_-]?id|_?public|_?url|_?path|_?file|_?identifier|_?uri|_?format|_?regex|"
    r"_?pattern|fingerprint|secretsmanager|secret-manager|extension|"
    r"[_-]?(?:stdin|input|field|form|rules?|label|hint|message|error|title|text|prompt|placeholder|ref|selector))$"
)


def find_assigned(text: str, position: int) -> tuple[int, int] | None:
    """Return the span of the secret that is assigned to a name containing a word for secrets at `position`."""
    word = _WORD.match(text, position)
    rest = _REST.match(text, position)
    if word is None or rest is None or _names_no_secret(rest.group()):
        return None
    if (joined := _JOINED.match(text, word.end())) is not None and _is_joined(
        text, position, word.group(), joined
    ):
        return joined.span("value")
    match = _AFTER.match(text, word.end())
    value = _VALUES[match["quote"] or ""].match(text, match.end()) if match else None
    if match is None or value is None:
        return None
    name = word.group().lower()
    # The cheapest check comes first, because it rejects most: a token has twelve characters or more.
    if value.end() - value.start() < (6 if name == "pass" or _STRONG.search(name) else 12):
        return None
    quote = match["quote"] or ""
    before = text[max(position - 48, 0) : position].rpartition("\0")[2]
    start, secret = value.start(), value.group()
    if quote:
        behind = text[value.end() : value.end() + 1]
        if behind == " " and looks_random(secret):
            behind = text[value.end() : value.end() + 3].lstrip(" ")[:1]
        if behind not in (quote, "\\", "", "\n", "\r") and len(secret) < _LONG:
            return None
    else:
        cut = secret.find("&")
        if cut >= 0 and ("=" in secret[cut:] or "?" in before or "&" in before):
            secret = secret[:cut]
        if (list_ends := _NEXT_IN_LIST.search(secret)) is not None:
            secret = secret[: list_ends.start()]
        whole = secret
        secret = secret.rstrip("*,.;:)}]!?" if not secret.endswith("]") else ",")
        # No sentence ends behind a name with a sign: `PASSWORD=…!`
        if whole[len(secret) :] in ("!", "*") and match["prose"] is None and _PASSWORD.match(word.group()):
            secret = whole
    named = False
    if any(match[sign] is not None for sign in _LOOSELY):
        behind = text[start + len(secret) : start + len(secret) + 1]
        named = _spaced(word.group(), before, quote) or _netrc(word.group(), before, secret, behind)
        if not named and not _follows_name(word.group(), secret, behind):
            return None
    if len(secret) < 6:
        return None
    known = is_secret_value(name, secret, quoted=bool(quote))
    chosen = (
        (not known or not quote)
        and _is_chosen(name, rest.group(), secret)
        and (named or _is_data(text, position, match, start, secret))
    )
    if not (known or chosen):
        return None
    unsure = any(match[sign] is not None for sign in _UNSURE)
    if match["comma"] is not None and _PASSWORD.match(name) is None:
        unsure = True
    if unsure and (not looks_random(secret) or (match["wrapped"] is not None and _HEX.fullmatch(secret))):
        return None
    if _PUBLIC.search(before):
        return None
    if is_reference(secret) and (is_placeholder(secret) or not _BASE64.fullmatch(secret)):
        return None
    if name == "key" and _KEY_OF_DATA.search(before) and not _of_environment(word.group(), before, secret):
        return None
    if name == "token" and _is_hash(secret) and _STEP_TOKEN.search(before):
        return None
    if name == "token" and _PAGE_TOKEN.search(before):
        return None
    if name == "secret" and ((_is_id(rest.group()) and _UUID.fullmatch(secret) is None) or "arn:" in before):
        return None  # the id of an object that holds a secret
    # Keys of caches are hashes too, but not in a URL's query (`?key=…`), or in `your key is …`.
    of_service = before[-1:] in ("?", "&") or match["prose"] is not None
    bare = name == "key" and not of_service and _is_bare(before, rest.group())
    if bare and _is_hash(secret.rpartition(":")[2]) and not _is_labelled(text, position):
        return None
    if name == "api" and _is_hash(secret) and text[start - 1] == ":":
        return None  # the tag of an image: `acme/api:3f2a…`
    if name == "login" and ((_is_hash(secret) and "-" in secret) or not _ACCESS_TOKEN.fullmatch(secret)):
        return None  # an id in a log: `login: userId=…`
    if word.group() == "PASS" and not before.endswith("_"):
        return None  # the output of tests, such as `--- PASS: TestLogin_V2 (0.02s)`
    config = (
        chosen
        or bool(quote)
        or _is_config_line(text, position - len(before), position, match, start + len(secret))
    )
    # an option of a command takes a password that somebody chose: `--db-password …`
    taken = match["space"] is not None and _STRONG.search(name) and count_character_classes(secret) > 2
    if not config and not (
        (_is_random(secret) or taken) and (_TIGHT if taken or text[start - 1] == "=" else _PLAIN).fullmatch(secret)
    ):
        return None
    if not quote and is_identifier(secret) and _CALLED.match(text, start + len(secret)):
        return None
    may_be_name = not (config and _DIGIT.search(secret)) and not (chosen and word.group().isupper())
    if not quote and may_be_name and is_identifier(secret) and not _is_random(secret):
        return None
    if not quote and (dotted := _DOTTED_NAME.fullmatch(secret)) is not None and not looks_random(dotted["last"]):
        return None
    if match["prose"] is not None and not any(one.isdigit() for one in secret):
        return None
    if len(secret) >= _LONG:
        more = _MORE.match(text, start + len(secret))
        return start, more.end() if more else start + len(secret)
    return start, start + len(secret)


def _is_chosen(name: str, rest: str, value: str) -> bool:
    """Return whether a value may be a password that somebody chose, given a name that says no more than that."""
    return (
        _PASSWORD.match(name) is not None
        and _PASSWORD_NAME.fullmatch(rest) is not None
        and not is_encoded_example(value)
        and (is_chosen_password(value) or (is_passphrase(value) and not is_reference(value)))
    )


def _is_data(text: str, position: int, match: re.Match[str], start: int, value: str) -> bool:
    """Return whether a value stands where only literal values do: in quotes, in a line of configuration, in an
    option of a command, or in a list of names with values.
    """
    if any(match[group] is not None for group in (*_UNSURE, *_LOOSELY, "prose")):
        return False
    if match["comma"] is not None and _FIRST_OF_CALL.search(text, max(position - 80, 0), position) is None:
        return False
    if match["quote"]:
        return match["quote"] != "`" and not is_passphrase(value)
    if not value[0].isalnum() or text[start - 1] == ">" or "," in value:
        return False
    left = max(position - 120, 0)
    if text[start - 1] in "=-:" and not is_passphrase(value) and _IN_LIST.search(text, left, position) is not None:
        return True
    return _is_config_line(text, left, position, match, start + len(value))


@lru_cache(maxsize=4096)
def _names_no_secret(name: str) -> bool:
    """Return whether a name with a word for secrets has a value of another kind, such as `token_count`."""
    return _NOT.search(name) is not None


def _is_id(name: str) -> bool:
    return name.lower().endswith("id")


def _is_bare(before: str, rest: str) -> bool:
    """Return whether a name consists of the word for secrets only, such as `key`; `private key` is more."""
    alone = not before or before[-1] not in _NAMES
    return alone and rest.lower() == "key" and _OF_ACCESS.search(before) is None


def _of_environment(word: str, before: str, value: str) -> bool:
    """Return whether a key protects something although its name ends like that of a key of data.

    So it does in a variable of the environment that names a program and its key, `CYPRESS_RECORD_KEY`, and if it
    is a long number in base64, as accounts of storage have one.
    """
    if _DATA_ONLY.search(before.upper()) is not None:
        return False
    if word == "KEY" and _ENVIRONMENT_KEY.search(before) is not None:
        return True
    return len(value) >= 64 and _BASE64.fullmatch(value) is not None and not _is_hash(value)


def _is_hash(value: str) -> bool:
    """Return whether a value has the form of a digest or an id."""
    return _DIGEST_OR_ID.fullmatch(value) is not None


def _is_config_line(text: str, left: int, position: int, match: re.Match[str], end: int) -> bool:
    """Return whether a line, or the text, has only a name and an unquoted value, as in .env files and YAML.

    `left` is where to search for the beginning of the line, `match` the match after the word in the name.
    """
    if match["beside"] is not None or match["inside"] is not None:
        return True
    if text[end : end + 1] not in _ENDS or match["prose"] is not None or match["comma"] is not None:
        return match["space"] is not None or match["prose"] is not None
    if _ENVIRONMENT_NAME.match(text, left, position) and text[position : match.start()].isupper():
        return True
    return _CONFIG_NAME.search(text, left, position) is not None or text[left:position].rstrip(_NAMES)[-1:] in (
        "&",
        "?",
    )


def _spaced(word: str, before: str, quote: str) -> bool:
    """Return whether a space alone may separate this name from its value, as in an option of a command, SQL,
    .netrc or Docker's ENV.
    """
    if word.lower().startswith("identified"):
        return True
    rest = before.rstrip(_NAMES)
    if before[len(rest) :].startswith("-") and (not rest or rest[-1] in " \t\n\"'("):
        return True
    if _SET.search(rest) is not None or (bool(quote) and word == "PASSWORD"):
        return True
    return "login" in before and _LOGIN.search(before) is not None


def _is_joined(text: str, position: int, word: str, joined: re.Match[str]) -> bool:
    """Return whether the value that a dash or dot joins to a name is a secret.

    Hashes and ids are joined to the names of files and resources too, so they are secrets only if the word for
    secrets is not a word of its own in the name: `acmekey-3f2a…`, but not `cache-key-3f2a…`.
    """
    value, name = joined["value"], word.lower()
    before = text[max(position - 48, 0) : position]
    if name not in _JOINABLE or not before or before[-1] not in _BEFORE_JOINED or is_placeholder(value):
        return False
    if before[-1] == " " and not _is_labelled(text, position):
        return False
    if name == "key" and (_KEY_OF_DATA.search(before) or _LIKE_KEY.search(before)):
        return False
    if _PUBLIC.search(before) or not looks_random(value) or not _is_generated(value):
        return False
    return before[-1].isalnum() or not (_is_hash(value) or _NAMED_HASH.fullmatch(value))


def _is_labelled(text: str, position: int) -> bool:
    """Return whether a line begins with the name of whom a key is for, and the word for it at `position`."""
    label = _LABEL.search(text, max(position - 64, 0), position)
    return label is not None and _NO_OWNER.fullmatch(label["owner"]) is None


def _follows_name(word: str, value: str, behind: str) -> bool:
    """Return whether a text names a credential and its value with a blank between: `acme api_key 8Xq…`."""
    return (
        word.lower().removesuffix(" code") in _JOINABLE
        and (behind in ("", "\n", "\r", '"', "'", "`", "\\") or (behind == " " and len(value) >= 32))
        and _GENERATED.fullmatch(value) is not None
        and _is_generated(value)
        and _is_random(value)
    )


def _is_generated(value: str) -> bool:
    """Return whether a value has digits, or letters that no name has: of one case only, or of no words at all."""
    return (
        len(_DIGIT.findall(value)) > (1 if len(value) >= 20 else 2)
        or _ONE_CASE.fullmatch(value) is not None
        or (len(value) >= 20 and count_random_characters(value) * 10 >= sum(map(str.isalnum, value)) * 8)
    )


def _is_random(value: str) -> bool:
    """Return whether a value looks random, or is a hexadecimal number of twenty digits or more."""
    return looks_random(value) or _SHORT_HEX.fullmatch(value) is not None


def _netrc(word: str, before: str, value: str, behind: str) -> bool:
    """Return whether a line has only `password` and a value, as lines of .netrc may."""
    return (
        word == "password"
        and behind in ("", "\n", "\r", "\\")
        and _LINE.search(before) is not None
        and (looks_random(value) or count_character_classes(value) > 2)
    )


def is_secret_value(name: str, value: str, *, quoted: bool) -> bool:
    """Return whether a value is a secret, given a name that says so: a password may be simple, a token must look
    random.
    """
    if (len(value) < 12 and value.isalpha()) or is_encoded_example(value) or _DATE.fullmatch(value):
        return False
    if _NUMBERS.fullmatch(value):
        return False  # a version, or an OID
    if name == "pass":
        return is_password(value, quoted) and (looks_random(value) or count_character_classes(value) > 2)
    if _STRONG.search(name):
        return is_password(value, quoted)
    return is_token(value)


def is_token(value: str) -> bool:
    """Return whether a value named as a token or key was generated: half of it is random, and it has digits."""
    last = value.rpartition(":")[2]
    # `acme:8Xq…`, of which the first part names the service, or `8Xq…:fx`
    value = _DAY.sub("", last if len(last) >= 8 else value.partition(":")[0])
    if "%" in value:
        value = _URL_ESCAPE.sub("-", value)
        if not any(map(str.isalpha, value)):
            return False
    if _SLUG.fullmatch(value) and all(len(one) < 6 or is_wordlike(one) for one in _SEPARATORS.split(value)):
        return False  # words, as in `two-handed-cycle-20`
    if len(_NOT_IN_TOKENS.findall(value)) * 3 > len(value):
        return False  # a table of a parser
    if "/" in value and max(map(len, _SEPARATORS.split(value))) < 12:
        return False  # a path
    if 12 <= len(value) < 16 and _SHORT.fullmatch(value) and count_random_characters(value) == len(value):
        return len(_SWITCH.findall(value)) > 2
    if 14 <= len(value) < 24 and _MIXED.fullmatch(value) and len(_TURN.findall(value)) > 4:
        letters = count_random_characters(value)
        return letters >= len(value) - 3 or _has_token_form(value)
    return _has_token_form(value)


def _has_token_form(value: str) -> bool:
    if len(value) < 16 or not _DIGIT.search(value):
        return len(value) >= 20 and looks_random(value) and _PATH_OF_WORDS.fullmatch(value) is None
    if _HEX.fullmatch(value):
        return len(set(value)) >= 8 and not value.isdigit()
    random = count_random_characters(value[:200])
    if looks_random(value) or (random >= 8 and random * 2 >= min(len(value), 200)):
        return True
    return value.isalnum() and len(_SWITCH.findall(value)) >= 6


def is_secret_field(name: str, value: str) -> bool:
    """Return whether a value in a field of this name is a secret."""
    if len(value) < 6 or len(value) > 4096 or len(name) > 100:
        return False
    cookie, secret = _field_names(name)
    if not (cookie or secret) or any(map(str.isspace, value)):
        return False
    if cookie:
        return len(value) >= 16 and looks_random(value)
    return not is_reference(value) and is_secret_value(name, value, quoted=True)


@lru_cache(maxsize=4096)
def _field_names(name: str) -> tuple[bool, bool]:
    """Return whether a field of this name holds a cookie, and whether it holds a secret."""
    secret = _NAME.search(name) is not None and not _names_no_secret(name) and "public" not in name.lower()
    return _COOKIE.search(name) is not None, secret


_DEFINED = (
    r"(?<![\w$])(?:(?:def|class|func|fn|fun|function|struct|enum|union|trait|type|typedef|interface|protocol|record|object|"
    r"module|namespace|package|let|const|var|val|mut|define|import|use|sub|RUN|goto)[ \t]+"
    r"(?:\([^()\n]{0,80}\)[ \t]*)?NAME(?![\w$])"
    r"|NAME[ \t]*(?:[(\[]|[-+*/|&^%]?=(?![=\w])|:=|\.[A-Za-z_])|(?<=[\w)\]])\.NAME(?![\w$]))"
)


def defined_identifiers(names: Sequence[str], texts: Iterable[str]) -> frozenset[str]:
    """Return the names that code in the texts defines, calls, or assigns to."""
    identifiers: set[str] = set()
    patterns = {name: re.compile(_DEFINED.replace("NAME", re.escape(name))) for name in names}
    for text in texts:
        identifiers.update(
            name
            for name, pattern in patterns.items()
            if name not in identifiers and name in text and pattern.search(text) is not None
        )
    return frozenset(identifiers)
