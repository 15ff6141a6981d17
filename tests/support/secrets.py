"""Fabricated secrets of many kinds in the places where they stand in sessions, and talk about code without any."""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

BASE62 = string.ascii_letters + string.digits
URLSAFE = BASE62 + "-_"
HEX = "0123456789abcdef"
UPPER = string.ascii_uppercase + string.digits


class Planted(NamedTuple):
    """A text with a secret in it, and the parts of which none may be left."""

    kind: str
    text: str
    parts: tuple[str, ...]


class Kind(NamedTuple):
    """A kind of secret: how one is made, and the names that it goes by. `alone`: its form tells what it is."""

    name: str
    make: Callable[[random.Random], str]
    names: tuple[str, ...]
    alone: bool = True


def drawn(dice: random.Random, letters: str, size: int) -> str:
    """So many letters, drawn by lot."""
    return "".join(dice.choice(letters) for _ in range(size))


def password(dice: random.Random) -> str:
    """A password as people and generators make them: 12 to 20 letters, digits and signs."""
    size = dice.randint(12, 20)
    must = [dice.choice(string.ascii_lowercase), dice.choice(string.ascii_uppercase), dice.choice(string.digits)]
    rest = [dice.choice(BASE62 + "!#%^*_+-") for _ in range(size - 3)]
    dice.shuffle(must)
    return must[0] + "".join(rest) + "".join(must[1:])


def pem(dice: random.Random) -> str:
    """A private key in PEM."""
    sort = dice.choice(["RSA PRIVATE KEY", "PRIVATE KEY", "EC PRIVATE KEY", "OPENSSH PRIVATE KEY"])
    body = base64.b64encode(dice.randbytes(dice.choice([120, 610, 1190]))).decode()
    lines = [body[at : at + 64] for at in range(0, len(body), 64)]
    return "\n".join([f"-----BEGIN {sort}-----", *lines, f"-----END {sort}-----"])


def jwt(dice: random.Random) -> str:
    """A signed token."""
    header = {"alg": "HS256", "typ": "JWT"}
    claims = {"sub": drawn(dice, string.digits, 10), "iat": 1700000000 + dice.randrange(10**8)}
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in (header, claims)]
    return ".".join([*parts, drawn(dice, URLSAFE[:-2], 43)])


def database_url(dice: random.Random) -> str:
    """The address of a database with a password."""
    scheme = dice.choice(["postgres", "postgresql", "mysql", "mongodb+srv", "redis", "amqp", "postgresql+asyncpg"])
    user = dice.choice(["app", "svc_orders", "postgres", "readwrite", "ledger"])
    host = dice.choice(["db.internal.acme.io", "10.2.4.8:5432", "localhost:5432", "cluster0.ab1cd.mongodb.net"])
    return f"{scheme}://{user}:{drawn(dice, BASE62, dice.randint(10, 20))}@{host}/prod"


KINDS = (
    Kind("aws key id", lambda d: dice_upper(d, "AKIA", 16), ("AWS_ACCESS_KEY_ID", "aws_access_key_id")),
    Kind(
        "aws secret key",
        lambda d: drawn(d, BASE62 + "+/", 40),
        ("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key"),
        False,
    ),
    Kind(
        "github token", lambda d: d.choice(["ghp_", "gho_", "ghs_"]) + drawn(d, BASE62, 36), ("GITHUB_TOKEN", "gh")
    ),
    Kind("gitlab token", lambda d: "glpat-" + drawn(d, URLSAFE, 20), ("GITLAB_TOKEN", "gitlab")),
    Kind(
        "slack token",
        lambda d: f"xoxb-{drawn(d, string.digits, 12)}-{drawn(d, string.digits, 12)}-{drawn(d, BASE62, 24)}",
        ("SLACK_BOT_TOKEN", "slack"),
    ),
    Kind(
        "stripe key",
        lambda d: d.choice(["sk_live_", "rk_live_", "sk_test_"]) + drawn(d, BASE62, 24),
        ("STRIPE_SECRET_KEY", "stripe"),
    ),
    Kind(
        "openai key",
        lambda d: "sk-proj-" + drawn(d, BASE62, 20) + "T3BlbkFJ" + drawn(d, BASE62, 20),
        ("OPENAI_API_KEY", "key"),
    ),
    Kind("anthropic key", lambda d: "sk-ant-api03-" + drawn(d, URLSAFE, 93) + "AA", ("ANTHROPIC_API_KEY", "key")),
    Kind("google key", lambda d: "AIza" + drawn(d, URLSAFE, 34) + drawn(d, BASE62, 1), ("GOOGLE_API_KEY", "maps")),
    Kind("npm token", lambda d: "npm_" + drawn(d, BASE62, 36), ("NPM_TOKEN", "//registry.npmjs.org/:_authToken")),
    Kind("jwt", jwt, ("SESSION_JWT", "jwt")),
    Kind("private key", pem, ("TLS_KEY", "key")),
    Kind("database url", database_url, ("DATABASE_URL", "url")),
    Kind("password", password, ("DB_PASSWORD", "password", "SMTP_PASSWORD", "api_secret"), False),
)
"""Fourteen kinds, as the project's target counts them."""


def dice_upper(dice: random.Random, prefix: str, size: int) -> str:
    """A prefix and so many capitals and digits."""
    return prefix + drawn(dice, string.ascii_uppercase + "234567", size)


def planted(seed: int = 5, each: int = 30) -> Iterator[Planted]:
    """Each kind so many times, in places of many sorts."""
    for kind in KINDS:
        dice = random.Random(f"{seed} {kind.name}")
        for number in range(each):
            secret = kind.make(dice)
            name = dice.choice(kind.names)
            text = embed(kind, secret, name, number)
            yield Planted(kind.name, text, parts(kind, secret))


def parts(kind: Kind, secret: str) -> tuple[str, ...]:
    """What of a secret may not be left: of a key each line, of an address the password."""
    if kind.name == "private key":
        return tuple(line for line in secret.split("\n")[1:-1] if len(line) >= 16)
    if kind.name == "database url":
        return (secret.partition("://")[2].partition("@")[0].partition(":")[2],)
    return (secret,)


def embed(kind: Kind, secret: str, name: str, number: int) -> str:
    """The secret in one of ten places."""
    lines = secret.split("\n")
    places: list[Callable[[], str]] = [
        lambda: f"# .env\nDEBUG=1\n{name}={secret}\nPORT=8080\n",
        lambda: json.dumps({"service": "api", name: secret, "retries": 3}, indent=2),
        lambda: (
            f'import os\n\n{name.replace("/", "_").replace(":", "_")} = """{secret}"""\nprint("ready")\n'
            if len(lines) > 1
            else f'import os\n\n{name} = "{secret}"\nprint("ready")\n'
        ),
        lambda: f"$ export {name}={secret}\n$ ./deploy.sh --env prod\ndone in 3.2s\n",
        lambda: "\n".join(
            f"{at + 1:>6}→{line}" for at, line in enumerate(f"config:\n{name}: {secret}\nend: 1".split("\n"))
        ),
        lambda: json.dumps({"stdout": f"loaded\n{name}='{secret}'\nok\n", "code": 0}),
        lambda: "\n".join(f"+{line}" for line in f"{name} = '{secret}'".split("\n")),
        lambda: f"The {name} is {secret}\n\nPlease put it into the vault.",
        lambda: json.dumps({"command": json.dumps({name: secret})}),
        lambda: f"env:\n  - name: {name}\n    value: {secret}\n",
    ]
    if kind.alone and number % 3 == 2:
        return f"out:\n{secret}\n" if number % 2 else f"I pasted `{secret}` there, sorry."
    return places[number % len(places)]()


def clean(size: int = 180_000, seed: int = 8) -> str:
    """Talk about code with all that looks random and is no secret: hashes, ids, images, locks, logs."""
    dice = random.Random(seed)
    made: list[str] = []
    length = 0
    while length < size:
        piece = dice.choice(_CLEAN)(dice)
        made.append(piece)
        length += len(piece) + 2
    return "\n\n".join(made)[:size]


def _hex(dice: random.Random, size: int) -> str:
    return drawn(dice, HEX, size)


def _uuid(dice: random.Random) -> str:
    text = _hex(dice, 32)
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _b64(dice: random.Random, size: int) -> str:
    return base64.b64encode(dice.randbytes(size)).decode()


def _git_log(dice: random.Random) -> str:
    says = [
        "Fix the parser",
        "Bump deps",
        "auth: refresh the token before it ends",
        "Key the cache by path",
        "secret santa page",
    ]
    return "\n".join(
        f"commit {_hex(dice, 40)}\nMerge: {_hex(dice, 7)} {_hex(dice, 7)}\n\n    {dice.choice(says)}\n\n"
        "    Co-Authored-By: Claude <noreply@anthropic.com>"
        for _ in range(4)
    )


def _package_lock(dice: random.Random) -> str:
    return ",\n".join(
        f'    "node_modules/{name}": {{\n      "version": "{dice.randrange(9)}.{dice.randrange(30)}.0",\n'
        f'      "resolved": "https://registry.npmjs.org/{name}/-/{name}-1.0.0.tgz",\n'
        f'      "integrity": "sha512-{_b64(dice, 64)}"\n    }}'
        for name in ("js-tokens", "@babel/core", "keyv", "path-key", "normalize-path", "auth-header")
    )


def _poetry_lock(dice: random.Random) -> str:
    return "\n".join(
        f'    {{file = "keyring-{dice.randrange(30)}.0-py3-none-any.whl", hash = "sha256:{_hex(dice, 64)}"}},'
        for _ in range(6)
    )


def _go_sum(dice: random.Random) -> str:
    return "\n".join(
        f"github.com/{one}/{two} v1.{dice.randrange(20)}.0 h1:{_b64(dice, 32)}\n"
        f"github.com/{one}/{two} v1.{dice.randrange(20)}.0/go.mod h1:{_b64(dice, 32)}"
        for one, two in (("golang-jwt", "jwt"), ("hashicorp", "vault"), ("99designs", "keyring"))
    )


def _image(dice: random.Random) -> str:
    return f"![shot](data:image/png;base64,iVBORw0KGgo{_b64(dice, 900)})"


def _tool_ids(dice: random.Random) -> str:
    return "\n".join(
        json.dumps(
            {
                "type": "tool_use",
                "id": "toolu_01" + drawn(dice, BASE62, 22),
                "name": "Bash",
                "uuid": _uuid(dice),
                "session_id": _uuid(dice),
                "signature": _b64(dice, 180),
                "cache_key": _hex(dice, 32),
                "request_id": "req_011C" + drawn(dice, BASE62, 20),
            }
        )
        for _ in range(3)
    )


def _python(dice: random.Random) -> str:
    return f'''```python
@dataclass(frozen=True)
class Session:
    user_id: int
    password_hash: str
    api_key: str = field(default_factory=lambda: os.environ["API_KEY"])
    secret_key: str | None = None
    max_tokens: int = {dice.randrange(1, 9)}096

def login(username: str, password: str) -> Token:
    """Check the password and make a token. Raises AuthError when password = None."""
    if not verify_password(password, user.password_hash):
        raise AuthError("wrong password")
    token = create_access_token(data={{"sub": user.id}}, secret=settings.SECRET_KEY)
    auth_token = response.json()["access_token"]
    client = Client(api_key=config.api_key, token=self.token, password=getpass.getpass())
    return Token(access_token=token, token_type="bearer")

@pytest.mark.parametrize("key", ["primary_key", "foreign_key", "sort_key"])
def test_login_{dice.randrange(99)}(client: TestClient, key: str) -> None:
    response = client.post("/login", data={{"username": "user", "password": "password123"}})
    assert response.json()["token"] == "fake-token" and response.headers["Authorization"] == f"Bearer {{token}}"
    assert hashlib.sha256(b"x").hexdigest() == "{_hex(dice, 64)}"
    etag = "{_hex(dice, 32)}"
    matrix = weights @ inputs.T + bias @ self.scale
```'''


def _javascript(dice: random.Random) -> str:
    return f"""```ts
const token: string = process.env.GITHUB_TOKEN ?? "";
const apiKey = config.get<string>("apiKey");
export const authOptions = {{ secret: process.env.NEXTAUTH_SECRET, session: {{ strategy: "jwt" }} }};
headers: {{ Authorization: `Bearer ${{accessToken}}`, "x-api-key": apiKey }},
const passwordInput = screen.getByLabelText("Password:");
fetch(`https://api.example.com/v1/users?token=${{encodeURIComponent(token)}}&page=2`);
import {{ PasswordField }} from "@/components/forms/password-field";
type Props = {{ keyName: string; tokenCount: number; secretName?: string }};
localStorage.setItem("token", data.token); // key: "token"
const chunk = "/_next/static/chunks/{_hex(dice, 16)}-{_hex(dice, 12)}.js";
<input type="password" name="password" placeholder="Enter your password" autoComplete="current-password" />
.sk-fading-circle-animation-delay-{dice.randrange(99)} {{ color: #{_hex(dice, 6)}; }}
```"""


def _go(dice: random.Random) -> str:
    return f'''```go
func NewClient(apiKey string, secret []byte) (*Client, error) {{
	token := os.Getenv("API_TOKEN")
	key := fmt.Sprintf("user:%d:session:%s", id, sid)
	dsn := fmt.Sprintf("postgres://%s:%s@%s:%d/%s?sslmode=disable", user, password, host, port, name)
	if password == "" || token == nil {{ return nil, ErrNoPassword }}
	want := "{_hex(dice, 40)}"
	db, err := sql.Open("postgres", "postgres://postgres:postgres@localhost:5432/app_test")
```'''


def _tests(dice: random.Random) -> str:
    names = ["test_token_expiry", "test_api_key_rotation", "test_password_reset_flow", "test_secret_is_hidden"]
    return (
        "\n".join(
            f"tests/test_auth.py::TestKeys::{dice.choice(names)}[{_uuid(dice)}] PASSED [{at:>3}%]"
            for at in range(10)
        )
        + f"\n===== {dice.randrange(90)} passed in 1.{dice.randrange(99)}s ====="
    )


def _docker(dice: random.Random) -> str:
    return (
        f"Successfully built {_hex(dice, 12)}\nDigest: sha256:{_hex(dice, 64)}\nStatus: newer image for node:20\n"
        f"-rw-r--r-- 1 root root 4096 Jan  1 00:00 /home/user/app/token.py\n/home/runner/work/secrets.yml\n"
        "env:\n  POSTGRES_PASSWORD: postgres\n  API_KEY: ${{ secrets.API_KEY }}\n  JWT_SECRET: your-secret-key\n"
        "password: <your-password>\nOPENAI_API_KEY=sk-your-key-here\nAWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE\n"
        "git clone git@github.com:acme/shop.git && ssh -T git@gitlab.com\nx@18.2.0 a@2x.png getty@tty1.service\n"
        f"trace {_hex(dice, 32)} span {_hex(dice, 16)} key={_hex(dice, 16)} elapsed=0.{dice.randrange(999)}s\n"
        f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{_b64(dice, 31)[:43]} deploy\nINFO token refreshed in 12ms\n"
    )


def _prose(dice: random.Random) -> str:
    return dice.choice(
        [
            "I look at how the password is checked, then add a token that expires. The key is to keep it secret.",
            "The token: a short-lived JWT. Its secret comes from the environment; the API key is read at start.",
            "Authorization is done by the middleware: Bearer authentication, basic auth for old clients.",
            "Set `password` to a long value. Passwords are hashed by bcrypt, the credentials: never logged.",
        ]
    )


_CLEAN: tuple[Callable[[random.Random], str], ...] = (
    *(_git_log, _package_lock, _poetry_lock, _go_sum, _image, _tool_ids, _tests),
    *(_python, _javascript, _go, _docker, _prose, _prose, _python),
)
