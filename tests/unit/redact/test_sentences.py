"""Passwords that somebody chose, and secrets in calls, sentences, output and tables; and what only looks so."""

from __future__ import annotations

import pytest

from understudy.redact.redactor import Redactor

_T = "q7Rk2mZp9XvLw4Tn8YbC3dHf"  # drawn by lot
_HEX = "8c1f0b9e27d64a35bb7e4d2190ac5f63"
_PASSWORD = "Vt7!kq2Zp9wL"
_CHOSEN = "Falcon-Meadow4711"
_WORDS = "lantern-otter-granite-42"
_PHRASE = "bagel_velvet_harbor_puffin"


def redacted(text: str) -> str:
    return Redactor(b"k" * 32, betterleaks=False).text(text)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        # a password of words and a number, where only values stand
        (f"DB_PASSWORD={_WORDS}\n", _WORDS),
        ("  rootPassword: marble5600\n", "marble5600"),
        ("PASSWORD=Canyon2026!\n", "Canyon2026!"),
        (f"  - name: DB_PASSWORD\n    value: {_WORDS}\n", _WORDS),
        (f"x: ${{DB_PASSWORD:-{_WORDS}}}", _WORDS),
        (f"psql 'host=db user=app password={_CHOSEN}'", _CHOSEN),
        (f"Server=db;User Id=shop;Password={_CHOSEN};Encrypt=True", _CHOSEN),
        (f"java -Ddb.password={_CHOSEN} -jar app.jar", _CHOSEN),
        (f'password => "{_CHOSEN}"', _CHOSEN),
        (f"BACKUP_PASSWORD={_PHRASE}\n", _PHRASE),
        (f"pw={_CHOSEN}\n", _CHOSEN),
        (f"# login: bob\n# password: {_CHOSEN}\n", _CHOSEN),
        (f"[password] => {_CHOSEN}\n", _CHOSEN),
        # a default, and a call around the value
        (f"const s = process.env.JWT_SECRET || '{_T}';", _T),
        (f'token = os.environ.get("TOKEN") or "{_T}"', _T),
        (f'@click.option("--token", default="{_T}")', _T),
        (f'api_token <- "{_T}"', _T),
        (f'password: SecretStr = SecretStr("{_CHOSEN}")', _CHOSEN),
        (f'EncryptionKey = Convert.FromBase64String("{_T}")', _T),
        # calls
        (f'source.setPassword("{_CHOSEN}");', _CHOSEN),
        (f'new UsernamePasswordCredentials("svc", "{_PASSWORD}")', _PASSWORD),
        (f'User.objects.create_superuser("bob", "bob@acme.test", "{_PASSWORD}")', _PASSWORD),
        (f'client.connect("10.0.0.8", 22, "deploy", "{_PASSWORD}")', _PASSWORD),
        (f"new Sequelize('shop', 'app', '{_PASSWORD}', {{ dialect: 'mysql' }})", _PASSWORD),
        (f"cookieParser('{_T}')", _T),
        (f"crypto.createHmac('sha256', '{_HEX}{_HEX}')", _HEX),
        (f"await page.getByLabel('Password').fill('{_PASSWORD}');", _PASSWORD),
        (f"fill_in 'Password', with: '{_CHOSEN}'", _CHOSEN),
        (f"'Basic ' + btoa('bob:{_PASSWORD}')", _PASSWORD),
        # commands
        (f"cqlsh -u bob -p {_PASSWORD} 10.0.0.7", _PASSWORD),
        (f"xfreerdp /v:10.0.0.9 /u:bob /p:{_PASSWORD}", _PASSWORD),
        (f"net user bob {_PASSWORD} /add", _PASSWORD),
        (f"vault secrets put --name db-pass --value '{_PASSWORD}'", _PASSWORD),
        (f"echo -n {_PASSWORD} | gcloud secrets create db --data-file=-", _PASSWORD),
        (f"keytool -genkey -storepass {_T} -keypass {_PASSWORD}", _PASSWORD),
        ("AUTH PLAIN AGJvYgBWdDcha3EyWnA5d0w=\n", "AGJvYgBWdDcha3EyWnA5d0w="),
        # sentences and prompts
        (f"I've set the root password to {_CHOSEN} for now.", _CHOSEN),
        (f"The VPN password is `{_PASSWORD}`, do not share it.", _PASSWORD),
        (f"A temporary password is generated for root@localhost: {_PASSWORD}", _PASSWORD),
        (f"[sudo] password for bob: {_CHOSEN}\n", _CHOSEN),
        (f"- **Password:** {_CHOSEN}\n", _CHOSEN),
        (f"Das Passwort lautet {_CHOSEN}.", _CHOSEN),
        (f"数据库密码是{_CHOSEN}，用户名是root", _CHOSEN),
        (f"Пароль — {_CHOSEN}", _CHOSEN),
        (f"Default credentials: `admin` / `{_PASSWORD}`.", _PASSWORD),
        # output, lists and tables
        (f"$ terraform output -raw admin_password\n{_PASSWORD}\n$ ls\n", _PASSWORD),
        (f"$ openssl rand -hex 16\n{_HEX}\n", _HEX),
        (f"args:\n  - --admin-password\n  - {_PASSWORD}\n  - --listen\n", _PASSWORD),
        (f'"passwords": ["{_CHOSEN}", "{_PASSWORD}"]', _PASSWORD),
        (f"<key>ApiSecret</key>\n<string>{_T}</string>", _T),
        (f'<property name="password"><value>{_CHOSEN}</value></property>', _CHOSEN),
        (f"| Service | User | Password |\n|---|---|---|\n| Grafana | admin | {_CHOSEN} |\n", _CHOSEN),
        (f"username,email,password\nbob,bob@acme.test,{_CHOSEN}\n", _CHOSEN),
        (f" id | name | api_token\n----+------+-----\n  1 | bob  | {_HEX}\n", _HEX),
        ('passphrase: "velvet harbor puffin granite otter"', "velvet harbor puffin granite otter"),
    ],
)
def test_a_password_is_found_where_only_one_can_stand(text: str, secret: str) -> None:
    assert secret not in redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        "pass the option '--exec-prefix=PREFIX' to configure",
        "You can pass two procs to EM#run now.",
        'conn = jaydebeapi.connect("org.hsqldb.jdbcDriver", "jdbc:hsqldb:mem:.")',
        "'n4Detach', 'n4ChgPassword', 'n4CapturePrt', 'n4CaptureGet'",
        'helpers.basic_auth("username", "password", "latin1")',
        "$pwd = &get_this_pwd;",
        "n.user_1=o,this.password_1=s,this.trailingQuery_1=a;",
        '<xref linkend="guc-pool-passwd">を参照してください。',
        "mysql -u root -p shop2024 && docker run -u root -p 8080:80 nginx",
        "The password hash is SHA256 and the password was Base64 encoded.",
        "the password must be at least 12characters; password policy: level2",
        "password = get_password(user2)\npassword: my_secret_password_1\nPASSWORD=changeme123\n",
        "# The password of the broker\nWITH_TLS:=yes\n",
        "| Option | Type | Password |\n|---|---|---|\n| user | string | required |\n",
        "def login(user, password, host):\n    a = one(user, two2, three3)\n",
        'key := bytesFromHex("8c1f0b9e27d64a35bb7e4d2190ac5f63")',
        '"password": "password-field-2", passwordInput: "input-password-1"',
        "should_route 'GET /account/lost_password' => 'account#lost_password'",
        'plaintext_password = "THIS_IS_A_32_BYTES_LONG_PASSWORD"',
        "PGPASSWORD=X$long_password psql -U app",
        "$ kubectl get secrets\nNAME\n$ pwd\n/srv/app2\n",
    ],
)
def test_what_only_stands_near_such_a_word_is_not_redacted(text: str) -> None:
    assert redacted(text) == text
