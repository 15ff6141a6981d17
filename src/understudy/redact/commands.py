"""Tables of places in commands, calls and their output in which a password or token stands without a name.

`sqlcmd -P …`, `snyk auth …`, `smtp.login("me", "…")`, `echo … | docker login --password-stdin`, and what
`cat token.txt` prints.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from understudy.redact.assignments import is_token
from understudy.redact.heuristics import (
    count_character_classes,
    is_chosen_password,
    is_encoded_example,
    is_password,
    is_placeholder,
    is_reference,
    looks_random,
)


class Place(NamedTuple):
    """A place for secrets: the rule, the needles (in lower case) at which the pattern begins, the pattern, whose
    groups are the values, and the function that says of a value whether it is a secret.
    """

    rule: str
    needles: tuple[bytes, ...]
    pattern: str
    accepts: Callable[[str], bool]


_SHORT_HEX = re.compile(r"(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{20,}")


def is_generated(value: str) -> bool:
    """Return whether a value looks random or is a hexadecimal number of twenty digits or more, and no example."""
    return (
        not is_reference(value)
        and not is_placeholder(value)
        and (looks_random(value) or _SHORT_HEX.fullmatch(value) is not None)
        and not is_encoded_example(value)
    )


def is_chosen(value: str) -> bool:
    """Return whether a value is a password or a token, where a command or call takes one."""
    return (
        len(value) >= 6
        and (not is_reference(value) or is_chosen_password(value))
        and not is_placeholder(value)
        and (
            is_password(value, quoted=False)
            or is_chosen_password(value)
            or _SHORT_HEX.fullmatch(value) is not None
        )
    )


def is_varied(value: str) -> bool:
    """Return whether a value is a password of three classes of characters, or a token."""
    return is_chosen(value) and (count_character_classes(value) > 2 or is_token(value))


_Q = r"""\\{0,7}["']?"""
_VALUE = rf"""{_Q}([^\s"'\\;|&<>`\0\x1b]{{6,256}})"""
_OF = r"[^\n|;&]{0,160}?[ \t]"
_STRING = r"""\\{0,7}["']([^"'\\\n\0]{6,256})\\{0,7}["']"""
_FIRST = r"""\(\s{0,20}(?:\\{0,7}["'][^"'\\\n]{1,64}\\{0,7}["']|[\w.\[\]]{1,40}),\s{0,20}"""

_OPTIONS_TEXT = r"""
sshpass   -p      [ \t]{0,2}
mysql     -p
redis-cli -a      [ \t]{1,4}
ldap      -w      [ \t]{0,2}
sqlcmd    -P      [ \t]{0,2}
isql      -P      [ \t]{0,2}
mosquitto -P      [ \t]{1,4}
cypher-   -p      [ \t]{1,4}
mongo     -p      [ \t]{1,4}
smbmap    -p      [ \t]{1,4}
snmp      -[AX]   [ \t]{1,4}
keychain  -p      [ \t]{1,4}
unzip     -P      [ \t]{0,2}
oathtool  -b      [ \t]{1,4}
codecov   -t      [ \t]{1,4}
vercel    -t      [ \t]{1,4}
secretsmanager --secret-string [ \t=]{1,4}
securestring --value [ \t=]{1,4}
"""
"""Options that take a password: how the name of the program begins, the option, and what is between them and the
value. Names of programs end in letters and `_` or `-`: `ldapsearch`, `mosquitto_pub`.
"""


def _option(row: str) -> Place:
    program, option, *blank = row.split(maxsplit=2)
    pattern = rf"(?i:{program})[\w-]{{0,20}}{_OF}{option}{''.join(blank)}(?!-){_VALUE}"
    return Place("command-line", (program.encode(),), pattern, is_chosen)


def place(
    needles: str, pattern: str, accepts: Callable[[str], bool] = is_chosen, rule: str = "command-line"
) -> Place:
    """Return a place, with its needles separated by `|`."""
    return Place(rule, tuple(needles.encode("latin-1").split(b"|")), pattern, accepts)


COMMANDS = (
    *map(_option, _OPTIONS_TEXT.strip().splitlines()),
    place(" login ", rf" login{_OF}-p[ \t]{{1,4}}{_VALUE}"),
    place("operator unseal", rf"operator unseal[ \t]{{1,4}}{_VALUE}"),
    # rabbitmqctl add_user NAME PASSWORD, net use … /user:NAME PASSWORD, nmcli … password PASSWORD
    place(
        "add_user|change_password|authenticate_user",
        rf"\w{{8,17}}[ \t]{{1,4}}[\w.@-]{{1,64}}[ \t]{{1,4}}{_VALUE}",
        is_varied,
    ),
    # sqlplus NAME/PASSWORD@HOST
    place(
        "sqlplus |expdp |impdp |oracle:thin:",
        r"""(?:(?:sqlplus|expdp|impdp)(?:[ \t]-\S{1,3})?[ \t]{1,4}["']?|oracle:thin:)"""
        r"""\w{1,30}/([^\s"'/@\\]{6,128})@""",
    ),
    place("storepass|keypass", rf"(?:store|key)pass[ \t]{{1,4}}(?!-){_VALUE}"),
    place("requirepass ", rf"requirepass[ \t]{{1,4}}{_VALUE}"),
    place("/user:", rf"(?i:/user):[\w\\.@-]{{1,64}}[ \t]{{1,4}}{_VALUE}"),
    place("nmcli ", rf"nmcli{_OF}password[ \t]{{1,4}}{_VALUE}"),
    place("smbclient ", rf"smbclient{_OF}-U[ \t]{{0,2}}{_Q}[\w\\./@-]{{1,64}}%{_VALUE}"),
    place(" pass:", rf" pass:{_VALUE}"),
    place(
        "mc alias set ",
        rf"mc alias set[ \t]{{1,4}}\S{{1,64}}[ \t]{{1,4}}\S{{1,200}}[ \t]{{1,4}}\S{{1,64}}[ \t]{{1,4}}{_VALUE}",
    ),
    place("secret set ", rf"secret set[ \t]{{1,4}}[^\n|;&]{{1,160}}?(?:--body|-b)[ \t=]{{1,4}}{_VALUE}"),
    # snyk auth TOKEN, b2 authorize-account ID KEY: a program, a word for logging in, and a random value
    place(
        " auth |login |authtoken |authorize-|service install |set api-key ",
        r"""(?i:[ ]?(?:auth|login|(?:add-)?authtoken|authorize[\w-]{0,20}|service[ ]install|set[ ]api-key))"""
        r"""[ \t]{1,4}"""
        rf"""(?:[\w.@-]{{1,40}}[ \t]{{1,4}})?{_Q}([\w.=+/-]{{20,800}})(?=[\s"'\\]|\Z)""",
        is_generated,
    ),
    # echo PASSWORD | docker login --password-stdin
    place(
        "echo |printf ",
        rf"""(?:echo|printf)[ \t]{{1,4}}(?:-n[ \t]{{1,4}})?{_Q}(?:[\w.-]{{1,32}}:)?([^\s"'\\|:\0]{{6,256}}?)"""
        rf"""(?:\\n)?{_Q}[ \t]{{0,4}}\|[ \t]{{0,4}}"""
        r"(?:sudo[ \t]{1,4}-S|(?:sudo[ \t]{1,4})?"
        r"(?:chpasswd|passwd|docker|podman|helm|gh|glab|oras|skopeo|nerdctl|kinit|vncpasswd|cryptsetup)\b"
        r"|[\w.-]{1,20}[ ][^\n|]{0,60}?\b(?:secrets?|login|passw\w*|passphrase))",
    ),
    # calls that take a user and a password, or a payload and a key
    place(
        "auth=(|networkcredential(|basicauth(|basic_auth(|.auth(|.login(|.authenticate(|usernamepassword(|basic(",
        rf"""[^(]{{0,24}}{_FIRST}{_STRING}""",
    ),
    place(
        "jwt.sign(|jwt.encode(|jwt.verify(|jwt.decode(", rf"""(?i:jwt\.\w{{4,6}}){_FIRST}{_STRING}""", is_varied
    ),
    # .pgpass
    place(":543", r"""(?<![\d:]):543\d(?::[\w*-]{1,64}){2}:([^\s"':\\\0\x1b]{6,128})"""),
    place(":*:", r""":\*(?::[\w*-]{1,64}){2}:([^\s"':\\\0\x1b]{6,128})"""),
    # strongSwan's ipsec.secrets
    place(": psk ", rf"(?i:: psk)[ \t]{{1,4}}{_STRING}"),
    # what a command prints that shows or makes a secret, alone in the next line
    place(
        "cat |gh auth token|genkey|print-access-token|head |tail ",
        r"""(?:(?:cat|head|tail)[ \t]{1,4}(?:-\S{1,6}[ \t]{1,4})?"""
        r"""(?![^\s|;&"'`]{0,120}(?:\.pub|public|config))[^\s|;&"'`]{0,80}"""
        r"""(?i:token|secret|key|passw|credential|pat)[\w.-]{0,30}|gh auth token|genkey|print-access-token)"""
        r"""[ \t]{0,4}(?:\r?\n|\\{1,7}n)[ \t]{0,8}([\w.=+/:~|%-]{16,4096})(?=[ \t]{0,4}(?:[\r\n\\"']|\Z))""",
        is_generated,
        "printed",
    ),
)
"""Places in commands, calls and their output."""
