"""Tables of places in calls, and between an option for a user and one for a password.

`client.connect(host, user, "…")`, `createHmac("sha256", "…")`, `page.fill("#password", "…")`, `btoa("me:…")`,
`cqlsh -u me -p …`. What stands in such a place has no name of its own, so its form must tell that it is a secret.
"""

from __future__ import annotations

import base64
import binascii
import re

from understudy.redact.assignments import is_token
from understudy.redact.commands import is_generated, is_varied, place
from understudy.redact.heuristics import (
    count_character_classes,
    is_chosen_password,
    is_placeholder,
    is_reference,
    looks_random,
)

_NO_PASSWORD = re.compile(
    r"[a-z0-9-]+(?:\.[a-z0-9-]+)*\.[a-z]{2,}(?::\d+)?|[a-z]+[_-]?\d{1,2}|.*@.*\.[A-Za-z]{2,}|.*::.*|.*[=;].*[=;].*"
    r"|(?:[A-Za-z_]+\.)+[A-Za-z_]+|(?:jdbc|dbi|mysql|pgsql|sqlite|odbc):.*|.*\s.*|[A-Z0-9_]+|[a-z_]+\d?"
    r"|(?i:(?:hmac|x)?-?(?:sha|md|aes|rsa|utf|iso|latin|cp|windows|http|oauth|sql|ipv|ed|p)[-_/]?\d.*)",
    re.ASCII,
)
"""Names of machines, addresses, algorithms, encodings and constants, which are passed to such calls too."""


def is_passed(value: str) -> bool:
    """Return whether a string that is passed to a call which takes a password is one."""
    return (
        _NO_PASSWORD.fullmatch(value) is None
        and (not is_reference(value) or is_chosen_password(value))
        and not is_placeholder(value)
        and (is_varied(value) or is_chosen_password(value))
    )


def is_passed_among_others(value: str) -> bool:
    """Return whether a string that is passed to a call together with hosts and names is a password."""
    return is_passed(value) and (looks_random(value) or count_character_classes(value) > 2 or value[-2:].isdigit())


def is_mixed(value: str) -> bool:
    """Return whether a value is random and no hash or id: it has letters of both cases and digits."""
    return is_generated(value) and count_character_classes(value) > 2 and is_token(value)


def is_key(value: str) -> bool:
    """Return whether a value is random and of both cases, or a number in base32, or in 32 hexadecimal digits."""
    return is_mixed(value) or (_PLAIN_KEY.fullmatch(value) is not None and is_generated(value))


def _has_nul(value: str) -> bool:
    """Return whether a value encodes a user and a password with NULs around, as servers of mail take them."""
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4)).count(0) == 2
    except (binascii.Error, ValueError):
        return False


_WORD_AND_NUMBER = re.compile(r"[a-z]+\d{1,4}")
_PLAIN_KEY = re.compile(r"(?=.*\d)[A-Z2-7]{16,64}|[0-9a-f]{32}")
_Q = r"""\\{0,7}["'`]"""
_STRING = rf"""(?:[bfru@$]{{0,2}}|\[\]byte\(){_Q}([^"'`\\\n\0]{{0,200}}){_Q}\)?"""
_ARGUMENT = rf"""\s{{0,20}}(?:{_STRING}|(?:[a-z]\w{{1,16}}[ ]?[=:][ ]?)?{_STRING}|[\w.&*:$>-]{{1,40}}(?:\(\))?)"""
_ARGUMENTS = rf"{_ARGUMENT}(?:\s?,{_ARGUMENT}(?:\s?,{_ARGUMENT}(?:\s?,{_ARGUMENT})?)?)?\s?[,).\n]"
_SEVERAL = rf"{_ARGUMENT}\s?,{_ARGUMENT}(?:\s?,{_ARGUMENT}(?:\s?,{_ARGUMENT})?)?\s?[,).\n]"
_TAKEN = r"""[ \t]{0,2}\\{0,7}["']?([^\s"'\\;|&<>`\0\x1b]{6,128})(?=[\s"'\\;|&)<>]|\Z)"""

CALLS = (
    # setPassword("…"), PasswordAuthenticator("me", "…"), create_superuser("me", address, "…")
    place(
        "password(|passwordauth|passwordcred|passwd(|passphrase(|superuser(|create_user(|securestring(|userpassw",
        rf"(?i:password|passwd|passphrase|superuser|create_user|securestring|userpass)\w{{0,20}}\({_ARGUMENTS}",
        is_passed,
    ),
    # ConvertTo-SecureString "…", storePassword "…", basic_auth "me", "…"
    place(
        "securestring |storepassword |keypassword |basic_auth ",
        rf"""(?i:securestring|storepassword|keypassword|"""
        rf"""basic_auth)(?:[ ]-String)?[ ](?:{_Q}[\w.-]{{1,40}}{_Q},[ ])?"""
        rf"""{_STRING}""",
        is_passed,
    ),
    # connect(host, port, user, "…"), Sequelize(database, user, "…"), login(user, "…")
    place(
        "connect(|connection(|pdo(|sequelize(|database(|login(|credentials(|credential(|authenticate(|plainauth(|"
        "basicauth(|basic_auth(|clientxmpp(|influxdbclient(|auth = (|auth: (|auth=(",
        rf"(?i:[a-z_]{{3,14}})(?:[ ]?[=:][ ]?)?\({_SEVERAL}",
        is_passed_among_others,
    ),
    # createHmac("sha256", "…"), Fernet("…"), new SecretKeySpec("…"): a call that takes a key
    place(
        "hmac|fernet(|aes.new(|aes.encrypt(|aes.decrypt(|cipheriv(|keyspec(|totp(|from_secret(|cookiestore(|"
        "signedstring(|getbytes(|cookieparser(|wallet(",
        rf"(?i:hmac|fernet|aes\.\w{{3,7}}|cipheriv|keyspec|totp|from_secret|cookiestore|signedstring|getbytes|"
        rf"cookieparser|wallet)\w{{0,16}}(?:\.new)?\({_ARGUMENTS}",
        is_key,
    ),
    place(
        "createhmac(|wallet(|createcipheriv(",
        rf"""(?i:createhmac|wallet|createcipheriv)\((?:{_Q}[\w-]{{1,24}}{_Q},\s?)?(?:Buffer\.from\()?"""
        rf"""{_Q}((?:0x)?[0-9a-f]{{64}}){_Q}""",
        is_generated,
    ),
    place(
        "jwt.sign(|jwt.verify(|jwt.encode(|jwt.decode(",
        rf"(?i:jwt\.\w{{4,6}})\([^\n\"'`]{{1,120}},\s?{_STRING}",
        is_varied,
    ),
    # new Client("…"), the only argument
    place("client(|api(|sdk(", rf"(?i:client|api|sdk)\({_ARGUMENTS}", is_key),
    # fill("#password", "…"), getByLabel("Password").fill("…"), fill_in "Password", with: "…"
    place(
        'password"|password\'|password`|password\\"',
        rf"""(?i:password)["']?(?:\]?{_Q}\)?\.(?:fill|type|send_?keys|set_?value|set)\(|\]{_Q},[ ]?|"""
        rf"""(?<=[#.]password)"""
        rf"""{_Q},[ ]?|{_Q},[ ]with:[ ])"""
        rf"""{_Q}([^\s"'`\\{{}}\0]{{6,128}})(?:\{{enter\}})?{_Q}\)?(?:[;,)\n]|\Z|[ ]?\{{)""",
        is_passed,
    ),
    # btoa("me:…"), CURLOPT_USERPWD, "me:…", -auth me:…, login=me:…
    place(
        "userpwd|btoa(|buffer.from(|auth |login=|digest |creds |-a |--cert |-u ",
        r"""(?:(?i:userpwd|btoa|buffer\.from|(?<=-)auth|(?<=stats )auth|login|digest|creds)(?:=|,[ ]|\(|"""
        r"""[ ])|-[Au][ ]"""
        r"""|--cert[ ])"""
        r"""\\{0,7}["'`]?[\w.@-]{1,40}:(?!//)([^\s"'`\\:;,()<>|\0]{6,128})(?=["'`\\\s]|\Z)""",
        is_passed_among_others,
    ),
    # a program that is given a user and a password
    place(
        " -u | -n |-username |-user |/u:",
        rf"""(?:[ ]-(?:u|U|n)|-user(?:name)?|/u:)[ =]?[\w\\@.-]{{1,60}}[ ](?:[^\n|;&]{{0,80}}?[ ])?"""
        rf"""(?:-(?:p|P|w|pw|pass|password)(?:[ =]|(?=['"]))|/p:){_TAKEN}""",
        lambda value: is_passed(value) and _WORD_AND_NUMBER.fullmatch(value) is None,
    ),
    # other options and words of commands that take a password
    place(
        "openssl enc|unrar |ssh-keygen|xfreerdp |security |schtasks |lftp ",
        rf"""(?:openssl enc[^\n|;&]{{0,120}}?[ ]-k|unrar [a-z] -p|ssh-keygen[^\n|;&]{{0,120}}?[ ]-N|"""
        rf"""security [a-z-]+password[^\n|;&]{{0,120}}?[ ]-w|schtasks[^\n|;&]{{0,160}}?[ ]/rp|"""
        rf"""lftp[^\n|;&]{{0,80}}?[ ]-u [\w.-]{{1,40}},){_TAKEN}""",
        is_passed,
    ),
    place(
        "net user |htpasswd -|set-env |.logon |open -u ",
        rf"""(?i:net user [\w.-]{{1,40}}|htpasswd -\w{{0,6}}b\w{{0,6}} \S{{1,120}} [\w.-]{{1,40}}|"""
        rf"""set-env [\w-]{{1,60}} [A-Z_]{{0,30}}PASS[A-Z_]{{0,20}}|\.logon [\w/.-]{{1,60}},|"""
        rf"""open -u [\w.-]{{1,40}},)"""
        rf"""{_TAKEN}""",
        is_passed,
    ),
    # wpa2-pre-shared-key="…", psk=…
    place(
        "psk=|psk =|psk:|shared-key|shared_key|sharedkey",
        r"""(?i:psk|shared[_-]?key)\\{0,7}["']?[ ]?[:=][ ]?\\{0,7}["']?([^\s"'\\;,\0]{6,128})(?=["'\s\\;,]|\Z)""",
        lambda value: is_passed(value) or is_generated(value),
    ),
    # user:password behind a server, below `chpasswd`, in an option
    place("]:25|]:465|]:587", r"\]:\d{2,5}[ \t]+[\w.@+-]{1,60}:([^\s:\0]{6,128})(?=\s|\Z)", is_passed),
    place(
        "chpasswd",
        r"""chpasswd:?\s{0,12}list:[ ]?\|?\s{1,24}[\w-]{1,32}:([^\s\0]{6,128})"""
        r"""(?:\n\s{1,24}[\w-]{1,32}:([^\s\0]{6,128}))?""",
        is_passed,
    ),
    place(
        "createuser ",
        rf"""(?i:createuser) [\w.-]{{1,40}} \w{{2,12}} {_STRING}(?: \w{{2,12}} {_STRING})?""",
        is_passed,
    ),
    place(
        "--name ",
        rf"--name[ =]\S{{0,60}}(?i:pass|pwd|secret|token|"
        rf"key)\S{{0,40}}[ ](?:[^\n|;&]{{0,80}}?[ ])?--value[ =]{_TAKEN}",
        is_passed,
    ),
    place("_auth=", r"_(?i:auth)=[\w-]{1,32}/([^\s\"'\\/\0]{6,128})(?=[\s\"'\\]|\Z)", is_passed),
    place(
        "sessionid=|sessid=|session_id=",
        r"(?i:sessionid|sessid|session_id)=([\w%.+/-]{16,512})(?=[;\s\"'\\&]|\Z)",
        is_generated,
        "cookie",
    ),
    place(
        'encrypt =|encrypt=|encrypt"|encrypt:',
        r"""encrypt\\{0,7}["']?[ ]?[:=][ ]?\\{0,7}["']([A-Za-z0-9+/]{43}=)\\{0,7}["']""",
        is_generated,
    ),
    place(
        "totp|authenticator",
        r"""(?i:totp|"""
        r"""authenticator)[\w ]{0,16}\\{0,7}["']?[ ]?[:=][ ]?\\{0,7}["']?([A-Z2-7]{16,64})(?![A-Za-z0-9])""",
        lambda value: any(map(str.isdigit, value)),
    ),
    place(
        "x-amz-signature",
        r"""x-amz-signature\\{0,7}["']?[=:][ ]?\\{0,7}["']?([0-9a-f]{64})""",
        is_generated,
        "signed-url",
    ),
    place("auth plain ", r"AUTH PLAIN ([A-Za-z0-9+/]{12,400}={0,2})(?=[\s\\\"]|\Z)", _has_nul),
    place("identified ", rf"""(?i:identified (?:with \w{{1,40}} (?:by|as)|by password)) {_STRING}""", is_passed),
    place(
        "auth |masterauth |rocommunity |rwcommunity |-setcookie ",
        rf"""(?:(?<=> )AUTH|AUTH(?= ["']?\S+["']?\n)|masterauth|r[ow]community|-setcookie){_TAKEN}""",
        is_passed,
    ),
    # dialogues of mail and file servers
    place(
        "pass |login ",
        rf"""(?:(?<=\n)PASS|[a-z]\d{{1,4}} LOGIN \S{{1,60}}|(?<=\d )LOGIN \S{{1,60}})[ ]{_TAKEN}""",
        is_passed,
    ),
)
"""Places in calls and commands."""
