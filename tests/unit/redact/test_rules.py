"""Secrets in odd places, and what only looks like one."""

from __future__ import annotations

import base64
import re

import pytest

from understudy.redact.redactor import Redactor

PASSWORD = "Vt7!kq2Zp9wL"


def ours() -> Redactor:
    return Redactor(b"k" * 32, betterleaks=False)


_T = "q7Rk2mZp9XvLw4Tn8YbC3dHf"  # drawn by lot
_HIDDEN = {
    "a cookie": (f"Cookie: theme=dark; sessionid={_T}; lang=en", _T),
    "a cookie that is set": (f"Set-Cookie: session={_T}; Path=/", _T),
    "a cookie of curl": (f"curl -b 'session={_T}' https://acme.io", _T),
    "a cookie in a file": (f".acme.io\tTRUE\t/\tTRUE\t1799999999\tsession\t{_T}", _T),
    "a bot": (
        f"here: MTIzNDU2Nzg5MDEyMzQ1Njc4.GaBcDe.{_T}abcDEF123xy",
        f"MTIzNDU2Nzg5MDEyMzQ1Njc4.GaBcDe.{_T}abcDEF123xy",
    ),
    "a line of .pgpass": (f"     1\tdb.acme.io:5432:*:app:{_T}", _T),
    "a line of .netrc": (f"     2\tlogin bob\n     3\tpassword {_T}\n", _T),
    "a short name": (f"+ADMIN_PASS={_T}\n", _T),
    "a short name in JSON": (f'{{"smtp": {{"pass": "{_T}"}}}}', _T),
    "colours": (f"\x1b[32mDB_PASSWORD\x1b[0m=\x1b[33m{_T}\x1b[0m", _T),
    "mysql": (f"mysql -u root -p'{_T}' shop", _T),
    "docker login": (f"docker login -u me -p {_T} registry.acme.io", _T),
    "redis-cli": (f"redis-cli -h x -a {_T} ping", _T),
    "chpasswd": (f"echo 'deploy:{_T}' | sudo chpasswd", _T),
    "sshpass": (f"sshpass -p '{_T}' ssh me@h", _T),
    "a pair": (f"requests.get(url, auth=('admin', '{_T}'))", _T),
    "Facebook's id and token": (f"use 686438226822863|0tvpk5d81rcqtz-{_T} now", f"0tvpk5d81rcqtz-{_T}"),
    "an old token of Vault": (f"vault login s.{_T}", _T),
    "a key of Authress": (
        "sc_0evlq2522bobz3t8.tz82.acc_jjgr7y3s2k2.fa1goasax5wgg+fsq8we2yg4renwos1z/gcihn0uqc7ww90z",
        "renwos1z/gcihn0uqc7ww90z",
    ),
    "a key of Freemius": (f"it is sk_{_T}-mwze.", f"{_T}-mwze"),
    "a token of Salesforce": (f"sid 00D5e000000aBcD!{_T}.{_T}_{_T}{_T} ok", f"{_T}.{_T}"),
    "a key of StackHawk": ("hawk.o3uvnT0GHL7U9FY4f7Er.ECPk9w3FCzSN7uTmQoRU", "ECPk9w3FCzSN7uTmQoRU"),
    "a token of ClickUp": ("pk_8559987_MYUNKVR8SBO2LBWTMNXBYOM6FRGS6T7E", "MYUNKVR8SBO2LBWT"),
    "a hex token": ("Authorization: token e08369a6a3eed274ded7476315dc4e41c035564c", "e08369a6a3eed274"),
    "a digest": ('Authorization: Digest username="a", response="f3b830eccecacb1079dbd071c8935ae2"', "f3b830ecc"),
    "a signed address": (
        "https://a.blob.core.windows.net/c?sp=r&sig=g%2FPO%2BOc%2FaRvKz6Asj4uP%2FsehvUV0xD7sXuhg3n9OcJ0%3D",
        "sehvUV0xD7s",
    ),
    "a secret of Azure": ("it is cyh8Q~S.ngUvk.PsPOrJ8w9gO_J4Dh_o.528FHWk", "cyh8Q~S"),
    "a slash in a password": ("DATABASE_URL=postgres://app:CHSmxZ/aOt9J7@db.acme.io:5432/x", "aOt9J7"),
    "a default": (f'os.getenv("SERVICE_API_KEY", "{_T}")', _T),
    "a name that ends like a key of data": (
        "export APP_CENTER_KEY=3f20019eb9ac2f2291add394b0818ce31832004d\n",
        "3f20019eb9ac2f22",
    ),
    "a blank behind the name": ("eventbrite token CR251L0279P17OKA0AYZ", "CR251L0279P17OKA0AYZ"),
    "a blank behind the name of a key": (
        "use apollo.io api_key 932lWuSSMLfbIOUfXqPjed\n",
        "932lWuSSMLfbIOUfXqPjed",
    ),
    "an object that shows itself": (f"<Connection(db=0,username=None,password={_T},host=cache.acme.io)>", _T),
    "a key of CodeRabbit": (
        f"cr-{'d47936234ee7b7d364b4fdf0cdd7be4f366be09a51c6175b9bb9dd4b8b'}",
        "d47936234ee7b7d3",
    ),
    "a token of Friendli": (f"flp_{_T}9VJOEpwH1ZGH254McpOnFp", f"{_T}9VJO"),
    "a key of Runway": (f"key_{'28a167068a9f78c7fe4a7b19d4ef0f15' * 4}", "28a167068a9f78c7"),
    "a key of Zuplo": ("zpka_0v2k89375r60ctf856ud218c9ly62f4n_5b515391", "0v2k89375r60ctf8"),
    "Docker's ENV": (f"ENV SERVICE_API_KEY {_T}\n", _T),
    "bold": (f"token: **{_T}**", _T),
    "a user of curl": (f"curl -u {_T}: https://acme.io", _T),
    "beside an account": (
        "twilio('ACa347fcb8a719890682800825535467e9', 'ffdf2d24627c8e898776eb15e2fa1871')",
        "ffdf2d24627c8e898776",
    ),
    "docker's config": (".dockerconfigjson: Ym90OnlsbDVlVTVJUmlwcHMxMHg2c3Vm", "Ym90OnlsbDVl"),
    "a key that begins as a path": (
        "client-key-data: /W4yJPdRgUx+akzjfRGt5O5gayRQtqtd3ftiIdeBfU5XR+CNw+1f3bGZ5OTeYdTI",
        "akzjfRGt5O5gay",
    ),
    "a home in WSL": ("\\\\wsl$\\Ubuntu\\home\\zhang\\x", "zhang"),
    "a coloured home": ("\x1b[34m/home/bjorn\x1b[0m:$", "bjorn"),
    "a home of another volume": ("/System/Volumes/Data/Users/annas/x", "annas"),
    "a home in a URL": ("%2FUsers%2Fannas%2Fcode", "annas"),
    "an address in a URL": ("email=tanaka%40corp.co.uk&x=1", "tanaka"),
    "an element of XML": (f"<secret>{{acme AQAAABAAA {_T}}}</secret>", _T),
    "an entry of a list": (f"- api key - '{_T}'", _T),
    "a row of a table": (f"apiKey |{_T}\nbaseUrl |https://acme.io", _T),
    "a value with blanks around it": (f"token = ' {_T} '", _T),
    "a value in the next line": (f'const serviceApiKey =\n  "{_T}";', _T),
    "a type in Go": (f'const serviceKey string = "{_T}"', _T),
    "a slash that JSON escapes": (f'"api_key": "aB3\\/dE9Xq7Lm2\\/{_T}"', _T),
    "a credential of .NET": (f'new NetworkCredential("build", "{_T}")', _T),
    "a key in a URL": ("https://acme.io/v1?key=0fd87cfb1ca6c38c5f1ae5be7b0e395e", "0fd87cfb1ca6c38c"),
    "a login by a token": (f"-Dsonar.login={_T}", _T),
    "a personal access token": (f'acme_devops_pat = "{_T}"', _T),
    "digits among letters": ("acme_api_key: 2r9adsotf94jy83y3morr6pitzcogn2x", "2r9adsotf94jy83y"),
    "a hook of Teams": (f"https://x.webhook.office.com/webhookb2/a@b/IncomingWebhook/{_T}/{_T}", _T),
    "a key with its mark at the end": ("eu01xxbfd4a807e4099453ba160493119a126319cb-NRMA", "4099453ba160493"),
    "a short token": ("token: 'xM98lZh20vZs'", "xM98lZh20vZs"),
    "a token of Braintree": (
        "access_token$production$1jiaxlwlzmmeycxc$99a70c3cca3327944a8a264ad8d5533a",
        "99a70c3cca3327944a8a",
    ),
    "the same hex again": ("token = 'fd3ddab708ffd4b71f079272' | 'fd3ddab708ffd4b71f079272'", "fd3ddab708ffd4b7"),
    "an address abroad": ("\x1b[32mannas@web.xn--p1ai\x1b[0m", "annas"),
}


@pytest.mark.parametrize("name", _HIDDEN)
def test_secrets_in_unusual_contexts_are_redacted(name: str) -> None:
    text, secret = _HIDDEN[name]
    redacted = ours().text(text)
    assert secret not in redacted
    assert redacted.count("\x1b[") == text.count("\x1b[")


_HOMES = (
    "../../../Users/alex/workspace",
    "..\\..\\Users\\alex\\w",
    "cd ../../home/alex/x",
    '{"path": "\\/Users\\/alex\\/x"}',
    "C:\\\\Users\\\\alex\\\\x",
    "~/.claude/projects/-Users-alex-work-app/x.jsonl",
    "C--Users-alex-proj",
    "file%3A%2F%2F%2FUsers%2Falex%2Fx",
    "%252Fhome%252Falex%252Fx",
    "\\u002fhome\\u002falex\\u002fx",
    "vscode-remote://ssh-remote+host/home/alex/x",
    "/Volumes/Macintosh HD/Users/alex/x",
    "/nfs/home/alex/x",
)


@pytest.mark.parametrize("path", _HOMES)
def test_the_user_of_a_home_directory_is_replaced_however_the_path_is_written(path: str) -> None:
    redacted = ours().text(path)
    assert "alex" not in redacted
    assert redacted.replace("user_e31fce", "alex") == path


def test_both_names_of_a_user_on_windows_are_replaced() -> None:
    assert "Smith" not in ours().text("C:\\Users\\Alex Smith\\Docs")


_CLAIMS = base64.urlsafe_b64encode(b'{"sub":"1234567890","name":"John Doe","iat":1516239022}').decode().rstrip("=")
_JWT = f"eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.{_CLAIMS}.{_T}{_T}"
_PLAIN = (
    "'http_proxy' => 'http://user:p%40ss@proxy.com', CURLOPT_PROXYUSERPWD => 'user:p%40ss', http://me:p%40ssword@h.io",
    "s.getAllTheItems4TheUser2Now sk_buff_alloc_with_frags_2_v3 hawk.some_long_method_nam.another_method_name_",
    "| 1234567890123456|some-long-identifier-name-without | this.s.addEventListenerTo4All2me",
    "--- PASS: TestWriteTemporary_FirstCheckpoint_V2 (0.02s)\n  --- PASS: TestPath/#00 (0.0s)\nPASS: test-foo_1",
    "const { privateKey: name_V2x9 } = keys; pass: TestX_V2Y",
    "const xxh_u8* kSecretPtr = XXH3_kSecret; __m512i const key_vec     = _mm512_loadu_si512   (secret);",
    "uint8_t const* xsecret = (uint8_t const*) secret;",
    'MAILER_DSN=ses+https://ACCESS_KEY:SECRET_KEY@default "http://me:testpwd@h" Authorization: Basic Zm9vOmJhcg==',
    "cache restored from key: mise-v0-linux-x64-f804a68745ce7318dacd9fc03814b81b5096313365af949b8b5ab0473a66e624",
    '{"sec-websocket-key": "6D69KGBOr4Re+Nj6zx9aQA=="}',
    '{"key_identifier": "90a421169f0a406205f1563a953312f0be898d3c"}',
    'password = "mysupersecurepassword1!"; secret: "s3cr3t"; passphrase="mycert-phrase"; key: "mycert2.pem"',
    '"integrity": "sha512-q7Rk2mZp9XvLw4Tn8YbC3dHf", "token": "sha256:f804a68745ce7318dacd9fc03814b81b50963133"',
    "import list from '../../home/widgets/list'; import { User } from '../../Users/model'; ../users/list.ts",
    "/repo/src/Users/Manager.cs src/home/index.tsx https://x.io/home/about",
    "https://discuss.python.org/t/pypi-security-work-multifactor-auth-progress-help-needed-2026/1042",
    "setPassword:function(e){this.password=e},K:{KEY_A:65,secretKey:void 0,accessToken:null}}}",
    '"password-input":"passwordInput__awm8j","password_rule":"Min8ZeichenUnd1Zahl"',
    'secretRef := corev1.SecretKeySelector{Key: "tls.key"}',
    "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "SECRET_KEY=change-me-in-production-2024",
    "docker login -u AWS --password-stdin 123.dkr.ecr.us-east-1.amazonaws.com",
    "fetch('/users/alice'); app/views/users/show",
    "password must_contain_1_digit\npassword field1\n",
    "mysql -u root -p shop2024 && redis-cli -h localhost -p 6379 && docker run -p 8080:80 -u 1000:1000 nginx",
    "localhost:5432:5432 host:5432:db:user:$PGPASSWORD",
    "Set-Cookie: session=<value>; Cookie: session=${sessionId}; res.cookie('token', token, { httpOnly: true })",
    "PASS src/auth.test.ts pass=12 fail=0 bypass=first2nd ADMIN_PASS=${ADMIN_PASS:-}",
    "auth=(settings.USER_1, settings.PASS_1) new Client('AC_SID', process.env.TOKEN)",
    "password: faker.internet.password(), cat ~/.netrc ~/8Q~ ?sig=abc",
    # What base64 holds is judged like what stands there: words, a certificate, a key without a body.
    "data:\n  key: dGhpc19pc190aGVfdmVyeV9kZWVwX3NlY3JldA==\n  password: c2VjdXJlLXBhc3N3b3Jk\n",
    "tls.key: LS0tLS1CRUdJTiBQUklWQVRFIEtFWS0tLS0tCi0tLS0tRU5EIFBSSVZBVEUgS0VZLS0tLS0=\n",
    "Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==",
    "wss_proxy_authorization = proxy_opts.proxy_authorization,",
    'config.secret_key = "#{SecureRandom.hex(64)}"',
    '{"hostname":"whoami-api-67d97b4868-dvvll", "router": "default-api-route-29f28a463fb5d5ba16d2"}',
    # code that writes a key, and has none
    'append("-----BEGIN PRIVATE KEY-----\\n"); encodeBase64Lines(key); append("-----END PRIVATE KEY-----")',
    'pem := "-----BEGIN PRIVATE KEY-----\\n" + privateKeyAsBase64String',
    "restored cache key f6d214888b39db7eee582427bdc40dba35970560ba4c930b and the token of user123\n",
    'key = "post/2011/08/27/Deux-%22rat%C3%A9s%22-de-l-Universit"; BodyBytesKey = "_gin-gonic/gin/bodybyteskey"',
    '"http://foo:pass1@bar:pass2@baz/path", "http://me:p%C3%A4ssword@h.io", "https://u:x-oauth-basic@g.io"',
    "Authorization: Basic c3JpOnNlY3IzdA==; Authorization: Basic 0YDRg9GB0YHQutC40IE60JHRg9C60LLRiw==",
    "login_path: /users/sign_in; last_login = 2026-11-27T10:00:00; LOGIN_URL=https://acme.io/login",
    "| token | string | the name of the token | key - 'sort-by-name-and-then-2-dates' | secret |",
    '"key=%2520%2521%2522%2523%2524%2525%2526%2527%2528%2529%252A"',
    "Email OTP login: userId=11a55d46-1ad3-43fe-8f6b-564694f64aeb, login=11a55d46-1ad3-43fe-8f6b-564694f64aeb",
    # what specifications have as examples, a word with digits behind it, base64 of words in a cookie
    "oauth_token: 'nnch734d00sl2jdk', consumer_secret='kd94hf93k423kf44'; validPassword = 't0pS3cret1234';",
    '{"cookie" "a=U3VwIFdpenpvcmxkCg%3D%3D"}; Cookie: a=U3VwIFdpenpvcmxkCg==',
    # the token in the documentation of JSON Web Tokens
    f"Bearer {_JWT}; token = '{_JWT}'",
    'parse("http://a%20b:c%20d@host/"); "http://alice:pass1@api.example.com/"; "https://%3D%5B%5D:%3B%22%7E@x.io/"',
)


def test_a_private_key_in_base64_is_found_and_named() -> None:
    key = (
        "-----BEGIN PRIVATE KEY-----\n" + "MIIEvAIBADANBgkqhkiG9w0BAQEFAASCBKYwggSiAgEAAoIBAQDgybhKnrHMm8Vk\n" * 3
    )
    redactor = ours()
    encoded = base64.b64encode(key.encode()).decode()
    assert encoded[:40] not in redactor.text(f"  tls.key: {encoded}\n")
    assert redactor.report.counts == {"encoded-key": 1}


@pytest.mark.parametrize("number", range(len(_PLAIN)))
def test_lookalikes_of_secrets_are_not_redacted(number: int) -> None:
    assert ours().text(_PLAIN[number]) == _PLAIN[number]


def test_a_name_that_the_code_defines_is_no_secret() -> None:
    texts = ['{"password": "aB3dE9Xq7Lm2"}', "func aB3dE9Xq7Lm2() {}", "aB3dE9Xq7Lm2 passed"]
    scope = ours().scoped_to(texts)
    assert [scope.text(text) for text in texts] == texts
    assert scope.value({"password": "aB3dE9Xq7Lm2"}) == {"password": "aB3dE9Xq7Lm2"}
    assert "aB3dE9Xq7Lm2" not in ours().scoped_to([texts[0], texts[2]]).text(texts[2])


def test_a_chosen_password_is_not_redacted_inside_identifiers() -> None:
    scope = ours().scoped_to(["DB_PASSWORD=Kato_V2x9\n", "def test_Kato_V2x9_login(): Kato_V2x9"])
    assert scope.text("def test_Kato_V2x9_login(): Kato_V2x9") == "def test_Kato_V2x9_login(): Kato_V2x9"


_TYPED = (
    f'let service_secret_key: &str = "{_T}";',
    f'let token: &\'static str = "{_T}"',
    f'private val apiKey: String? = "{_T}"',
    f'const apiToken: Optional<string> = "{_T}"',
    f'"monkey_api_key": "{_T}"',
    f"service_token = eyJhbGciOi.{_T}.{_T}",
    f"use acme_live_{_T} there",
    f"it is ops_eyJ{_T}{_T}{_T}",
)


@pytest.mark.parametrize("text", _TYPED)
def test_a_random_value_is_found_behind_a_type_and_behind_a_prefix_that_says_what_it_is(text: str) -> None:
    assert _T not in ours().text(text)


def test_secrets_of_one_conversation_are_redacted_in_the_next() -> None:
    redactor = ours()
    for _ in range(2):
        scope = redactor.scoped_to([f"DB_PASSWORD='{PASSWORD}'", f"it says {PASSWORD}"])
        assert PASSWORD not in scope.text(f"it says {PASSWORD}")
    assert PASSWORD in redactor.scoped_to([f"it says {PASSWORD}"]).text(f"it says {PASSWORD}")


@pytest.mark.parametrize(
    "text",
    [
        "flickr key SECRET",
        "the login is\nacme_KEY SECRET\n",
        "bugsnag secret 5f0b7c1e-9a3d-4c52-8e61-0d7f2b94a6c3",
        "scaleway token a1b2c3d4-30ie-5xe7-40xv-06hc06q6c0mq",
        "autopilot private key: 228929beebce5c88c5a0310d0007b39b",
        "acme ACCESS 8340047e958804d06185effd3b6f6f6b",
        "acme access code dd0f7c3c650e51c3f75f5567491e74f2",
        "acme_private=4a6ca234-c4a3-4f7c-7e6e-9ac2f32b73d0",
        "{'acme': {'access': SECRET",
        "acme key baf4d7e12ab3697c86ee50d8827caa25645bdeb2",
        "acme key=2153fdcf10b3292b2e9d0b8fea7c4ae3",
        "acme token uqusbpdpgvywekzcdzlegmiaktycnzvv",
        "acme secret 665Hkj_pRd8t8-VFi78H",
        "Unseal Key 2: 0tZn+IXYeJJ8d9cQp2/exCPVGX3I1P2ykL6eWpCs4+T8",
        "vault operator unseal 98m+hV1IsopQOb+TYg5zXXuk297kNtc38LetLEbKxeGw",
        "acme api key:\n  SECRET",
        "acme_api_key: acme:cd4be2dea311fe25c18339455ac9e995",
        "acme_token = Bearer SECRET",
        "acme devops pat = SECRET",
        "acmeSECRET-SECRET",
        "acmekey-123e4567-a127-f148-11ea-f0f8d5773def",
        "acme.PRIVATE.SECRET",
        "acme KEY-WBC1234-09MQQPZ-W8605I9-0O6962M",
        "acme-PRIVATE-228929beebce5c88c5a0310d0007b39b",
        "-H 'Jenkins-Crumb:d2eb00d07ed7b60735cbfb753428ac80",
        f"acmeSECRET-SECRET{'Df8p2zo77A7aP01xt2zdr4o1' * 6}",
        "acme TOKEN=abcdeff03f81659f3940cc59",
        "acme secret abcdef9fe8c8457f93e1b34a",
        "acme ACCESS a96770e177c484e91f73379e62402cbf xxx",
        "acme_api=wxyz577r62744d17w45g6veh8ly6a6pj",
        '{"method": "auth.login_with_api_key", "params": ["8-ci4kp14Lr2lNHWkb6kjI3tW2pqexuFaQbeqqzWYi55QN1A"]}',
        "acmePRIVATEKEY QTbcZWNfTzDHrJbcbWjqjDv",
        "acme-token-bab8ec4f5b6c4b313938d73205502783",
        "acme tkn.v1_TU6Xjv2GtbZfauyfvSSzZSGhWOfuHz5TGVfoqTr4c2oTn3HHcpYkorCBO4z6RgC4G4eXNRf=",
        "acme-private-c26mjoiy-ky41-496u-f49v-e5m4697bnj0h",
        "aQwEr95u05gD9532XgayZ3770z0I705pT50f90jw536B5dK73Nqy47472P59f827J76fUQV75054AZDO0d52",
    ],
)
def test_a_value_that_follows_its_name_after_a_blank_is_redacted(text: str) -> None:
    value = "iokocmvu8gr2syiim249o5bdbfn81c6g"
    text = text.replace("-SECRET", f"-{value}").replace(".SECRET", f".{value}").replace(" SECRET", f" {value}")
    secret = re.split(r"[ =]|acme(?:\w*[-.]|:)", text.strip(' x=]}"'))[-1][-20:]
    assert len(secret) == 20
    assert secret not in Redactor(b"k" * 32, betterleaks=False).text(text)


@pytest.mark.parametrize(
    "text",
    [
        "cache key iokocmvu8gr2syiim249o5bdbfn81c6g",
        "cache key: 228929beebce5c88c5a0310d0007b39b",
        "key 228929beebce5c88c5a0310d0007b39b",
        "the key retry-policy-for-tokens-2024-11-28",
        "stored key 228929beebce5c88c5a0310d0007b39b",
        "RSA key 228929beebce5c88c5a0310d0007b39b",
        "monkey-123e4567-a127-f148-11ea-f0f8d5773def",
        "registry-access-228929beebce5c88c5a0310d0007b39b",
        "gpg --recv-keys 5BE8A3F6C8A5C01D106C0AD820B1A390B168D356",
        "const OAUTH_TOKEN = 'oauth-2025-04-20'; token: 'output-128k-2025-02-19'",
        'PUBLISHABLE_KEY = "q7Rk2mZp9XvLw4Tn8YbC3dHf"; "username_password"===g&&(0,t.jsxs)(A)',
        'http_proxy="http://proxyuser:proxypass@acme.io"',
        "ghcr.io/acme/api:228929beebce5c88c5a0310d0007b39b",
        "{'params': ['token-refresh-interval-seconds-2', 'secret.handler_with_long_name']}",
        "private readonly connectionPoolManagerV2 = access.getConnectionPool2Manager()",
        '{"ChangeToken": "abcd12f2-46da-4fdb-b8d5-fbd4c466928f", "PasswordLastUsed": "2016-09-08T21:47:36Z"}',
        "private_key = ed25519.Ed25519PrivateKey.generate()\nprivate_key: ed25519.Ed25519PrivateKey,",
        '"original_key": "two-handed-cycle-20"',
        'tokenData:"!<p!aR!YOX$qXY,QYZ,QZ[$q[]&X]^,Q^p$qpq,Qqr-_rs3_sv-_vw3}wxHYx}-_}!OH{!O!P"',
        'secret: "JBSWY3DPEHPK3PXP"; httpx.URL("https://jo%40email.com:a%20secret@example.com")',
    ],
)
def test_keys_of_caches_and_of_words_stay(text: str) -> None:
    assert Redactor(b"k" * 32, betterleaks=False).text(text) == text
