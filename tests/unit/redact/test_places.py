"""Secrets in commands, calls, headers, addresses and lists, and what only stands in such places."""

from __future__ import annotations

import json

import pytest

from understudy.redact.redactor import Redactor

_T = "q7Rk2mZp9XvLw4Tn8YbC3dHf"  # drawn by lot, as are the others
_HEX = "8c1f0b9e27d64a35bb7e4d2190ac5f63"
_ID = "5f1c9a7e-3b42-4d08-9e6a-71c0d2b8f4a3"
_BASE64 = "tG5qYx0Vb8ZkW2nRj7LcPd4fHs9AuEoM1iQ3vXyT6wB+KzCgDlNrSaFhUeJpOm0K/x7RtYqVbZ2n5Lc8Wj=="
_PASSWORD = "Vt7!kq2Zp9wL"
_CODES = ("7h2k9-x4m1p", "q8w3e-r5t2y", "z1x7c-v4b6n", "m3k8j-h2g5f", "p9l4o-i7u1t")
_WORDS = "zebra orbit mango lumber jungle hazard glove fabric dragon cactus bamboo velvet"

_HIDDEN = {
    "a default of Terraform": (f'variable "pingdom_api_token" {{\n  type = string\n  default = "{_T}"\n}}', _T),
    "an output of Terraform": (
        json.dumps({"outputs": {"grafana_token": {"value": _T, "type": "string"}}}, indent=2),
        _T,
    ),
    "an output in JSON in JSON": (json.dumps(json.dumps({"linear_api_key": {"value": _HEX}})), _HEX),
    "a variable of a cluster": ('- name: RADIUS_ADMIN_PASS\n  value: "Xr6L4ot2ypWkK3"\n', "Xr6L4ot2ypWkK3"),
    "a secret key that is called SK": (f"TENCENT_SK={_T}\n", _T),
    "a password that is called pw": (f"    samba_pw: {_T[:14]}\n", _T[:14]),
    "the seed of a second factor": ('{"otp_seed": "NVQXEZLFNZ2HE33QOFZWK3TUMFXGI43U"}', "NVQXEZLFNZ2HE"),
    "the id that is a secret": (f"APPROLE_SECRET_ID={_ID}\n", _ID),
    "a key of a recorder": (f"export MEETING_RECORD_KEY={_ID}\n", _ID),
    "a variable in a file that was written": (json.dumps({"command": f"echo A=1\nREPLAY_EVENT_KEY={_ID}\n"}), _ID),
    "a key of an account of storage": (f"backup --storage-key {_BASE64} now", _BASE64[:-4]),
    "a name with dots": (f"shop.payment.api.key={_HEX}\n", _HEX),
    "a name and a hash": (f"Webhook salt key: {_ID}\n", _ID),
    "a token with a suffix": (f'TRANSLATOR_KEY = "{_ID}:pro"', _ID),
    "a short token without digits": ('PUSH_TOKEN = "CqRZwhWfTxKjmLd"', "CqRZwhWfTxKjmLd"),
    "a short secret that grep found": ("conf/.env:12:LINE_SECRET=_Xq4suM9Z\n", "_Xq4suM9Z"),
    "a token of GitLab without digits": ("the runner has glcbt-PZgsmUxUscYhegAaMaqu now", "PZgsmUxUscYhegAaMaqu"),
    "an option": ("bsondump --password Lamp7kq!29 x.bson", "Lamp7kq!29"),
    "isql": (f"isql -S db -U sa -P '{_PASSWORD}'", _PASSWORD),
    "ldappasswd": (f"ldappasswd -D cn=admin,dc=acme -w {_T} uid=bob", _T),
    "mosquitto_sub": (f"mosquitto_sub -h mq -u dev -P {_T} -t a", _T),
    "a key store": (f"keytool -list -keystore a.jks -storepass {_T}", _T),
    "a user of RabbitMQ": (f"rabbitmqctl authenticate_user bob {_T[:16]}", _T[:16]),
    "OpenSSL": (f"openssl rsa -in a.pem -passin pass:{_PASSWORD}", _PASSWORD),
    "a login": (f"$ railway login {_ID}\n", _ID),
    "an account": (f"mega authorize-account 0012ab34cd56 {_T}\n", _T),
    "a secret of a repository": (f"glab secret set DB_PASS --body {_T}", _T),
    "a secret of a cloud": (f"aws ssm put-parameter --name /a --type SecureString --value {_T[:14]}", _T[:14]),
    "a password that is piped": (f"echo '{_PASSWORD}' | helm registry login acme.io --password-stdin", _PASSWORD),
    "a call": (f'imap.login("bob@acme.test", "{_T[:14]}")', _T[:14]),
    "a signed token": (f"jwt.encode(claims, '{_PASSWORD}', algorithm='HS256')", _PASSWORD),
    "a key of IPsec": (f'gw.acme.io %any : PSK "{_T}"', _T),
    "a file that is shown": (f"$ cat secret_token.txt\n{_HEX}\n$ ls", _HEX),
    "an account of a test chain": (f"(3) 0x{_HEX}{_HEX[::-1]}\n", _HEX),
    "a header of curl": (f"curl -H 'Acme-Team: {_HEX}' https://acme.io", _HEX),
    "a header in a log": (f"> GET / HTTP/1.1\r\n> X-Acme-Team: {_HEX}\r\n", _HEX),
    "a header in code": (f'req.Header.Set("X-Acme-Workspace", "{_T}")', _T),
    "a header in a dictionary": (f"fetch(url, {{ headers: {{ 'Accept': 'a', 'ACME-TEAM': '{_T}' }} }})", _T),
    "a header in bytes": (f"send: b'GET / HTTP/1.1\\r\\nX-Acme-Team: {_HEX}\\r\\n'", _HEX),
    "a signature": (f"https://acme.io/o?Expires=1700000000&Signature={_T}%2BaB%3D", _T),
    "a code": (f"https://fn.acme.io/api/run?code={_T}{_T}==", _T),
    "an address of a build": (f"curl -X POST https://api.acme.io/build_hooks/{_HEX[:24]}", _HEX[:24]),
    "an address of a chat": (f"https://chat.acme.io/hooks/5f1c9a7e3b424d089/{_T}", _T),
    "recovery codes": ("Recovery codes:\n" + "\n".join(f"  - {code}" for code in _CODES), _CODES[2]),
    "backup codes in JSON": (json.dumps({"backup_codes": _CODES}), _CODES[4]),
    "a seed phrase": (f'SEED_PHRASE="{_WORDS}"', "lumber jungle"),
    "a JSON Web Key": (json.dumps({"kty": "OKP", "crv": "Ed25519", "x": "a", "d": _T * 2}), _T),
    "a stored cookie": (json.dumps({"name": "acme", "value": _T, "httpOnly": True}), _T),
    "a cookie of cookies": (f"Set-Cookie: .Acme.Cookies={_T}; path=/", _T),
    "a password in four groups": ("ACME_APP_PASSWORD='k7Qz x2Vn p9Lw T4bm'", "x2Vn p9Lw"),
    "a hash of a password": ("INSERT INTO u VALUES ('bob', '$2y$10$" + (_T + _T + _T)[:53] + "');", _T),
    "a PASETO": (f"it is v2.public.{_T}{_T}.{_T} now", _T),
    "an element": ("<proxy><password>TS2UzFlWVer6</password></proxy>", "TS2UzFlWVer6"),
    "a name of three words": (f"Acme Setup Key: {_ID.upper()}\n", _ID.upper()),
    "a password under a name of three words": ("Mail Relay Password: Lamp7kq!29\n", "Lamp7kq!29"),
    "a variable of another shell": ("set -Ux ACME_API_KEY NLRILGNTYYWAV5MKNNTIS77XH8RBR6YEGY9O", "YYWAV5MKNN"),
    "a default of Ruby": (f"ENV['ACME_SIGNING_KEY'] ||= '{_T}'\n", _T),
    "a header that a call sets": (f'request.addHeader("ACME-TEAM", "{_HEX}");', _HEX),
    "a header that curl shows": (f"> GET / HTTP/1.1\n> Acme-Team: {_HEX}\n", _HEX),
    "a password in four groups in Terraform": ('"app_password": {"value": "k7Qz x2Vn p9Lw T4bm"}', "x2Vn p9Lw"),
    "a password in quotes of its own": (f"curl -u bob:'{_PASSWORD}' https://acme.io", _PASSWORD),
    "a user of a proxy": (f"curl --proxy-user bob:{_PASSWORD} -x http://p:3128 https://acme.io", _PASSWORD),
    "impdp": (f"impdp scott/{_T[:16]}@db schemas=hr", _T[:16]),
    "a setting of Redis": (f"requirepass {_T[:16]}\n", _T[:16]),
    "a token with colons": (f'JOIN_TOKEN="{_T}::worker:{_HEX}"', _HEX),
    "a token that begins like a variable": (f"ACME_API_KEY='$prod_{_T * 3}'", _T),
    "a bot in a URL": (f"https://api.telegram.org/bot7188015594:AA{_T}bcDEF123x/getMe", _T),
    "a key in a path": (f"https://maker.acme.io/trigger/x/with/key/{_T}", _T),
    "a key of PuTTY": (f"Private-Lines: 1\n{_T}{_T}\nPrivate-MAC: {_HEX}\n", _T),
    "Spanish": (f"contraseña: {_T[:14]}\n", _T[:14]),
    "Czech": (f'heslo = "{_PASSWORD}"', _PASSWORD),
    "Russian": (f"Пароль: {_T[:14]}\n", _T[:14]),
    "Japanese": (f"パスワード：{_T[:14]}\n", _T[:14]),
    "Chinese, in JSON": (json.dumps({"密钥": _T}, ensure_ascii=False), _T),
}


def ours() -> Redactor:
    return Redactor(b"k" * 32, betterleaks=False)


@pytest.mark.parametrize("name", _HIDDEN)
def test_a_secret_in_this_place_is_redacted(name: str) -> None:
    text, secret = _HIDDEN[name]
    assert secret in text.replace('\\\\"', '"')
    assert secret not in ours().text(text)


@pytest.mark.parametrize(
    "text",
    [
        'import { x } from "../src/hooks/useIntersection2Observer"; // hooks/use-media-query-all',
        "x-request-id: 8c1f0b9e27d64a35bb7e4d2190ac5f63\nX-Amz-Cf-Id: q7Rk2mZp9XvLw4Tn8YbC3dHfq7Rk2mZp9XvLw==",
        f"curl -H 'If-None-Match: {_HEX}' -H 'Idempotency-Key: {_ID}' https://acme.io",
        f'jwt.encode(claims, key, headers={{"kid": "{_HEX}"}})',
        "pip install pyVmomi==5.5.0.2014.1.1",
        'let key = "2b7e151628aed2a6abf7158809cf4f3c";',
        "ssh_host_key_ed25519_public: AAAAC3NzaC1lZDI1NTE5AAAAIHv4wovK7u1Est8e1rMvQifupxLPpxtNEJIvKHqiIVFx",
        f'"clientToken": "{_ID}", "Postman-Token": "{_ID}"',
        '"NextContinuationToken": "1w41l63U0xa8q7smH50vCxyTQqdxo69O3EmK28Bi5PcROI4wI/EyIJg=="',
        'SecretID: "fpjqlhnwb19zds35k8wn80lq9"',
        "arn:aws:secretsmanager:eu-west-1:012345678901:secret:myorg/myuser/ALL.SOURCE.ORACLE_12-A1B2C3",
        "challengePassword => 1.2.840.113549.1.9.7",
        "random_seed: 1234567890123456789 and seed = 20240131",
        '{"token": {"type": "string", "default": "accessTokenFromTheSession"}}',
        "The recovery codes are shown once. Keep the 8 codes:\n1. print them\n2. store them",
        'mnemonic = "test test test test test test test test test test test junk"',
        "echo 'done' | sudo -S true; echo hello-world-12 | docker run -i alpine cat",
        "$ cat tokens.txt\nhello world\n$ cat src/keys/index_of_all_the_keys.py\nimport_everything_from_here",
        "git login failed; auth 2024-01-31T10:11:12 user",
        "clave primaria: identificador_de_la_tabla\nпароль: неверный",
        'S3_OBJECT_KEY=5f1c9a7e-3b42-4d08-9e6a-71c0d2b8f4a3\n{"changeKey": "WX+A3vy5K0qqTyPHso1JgAAACfdHfw=="}',
    ],
)
def test_what_only_stands_in_such_a_place_is_not_redacted(text: str) -> None:
    assert ours().text(text) == text


def test_a_name_that_the_code_defines_is_not_redacted_behind_an_option_or_in_a_header() -> None:
    name = "k7Qzx2Vnp9LwT4bmR8sd"
    assert name not in ours().text(f"curl -H 'X-Acme-Team: {name}' https://acme.io")
    text = f"def {name}():\n    ...\n\ncurl -H 'X-Acme-Team: {name}' https://acme.io"
    assert ours().text(text) == text
