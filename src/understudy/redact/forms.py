"""Secrets that are recognised by their form alone: private keys in PEM, and tokens with prefixes of their own.

A private key may be whole or cut off, with line breaks escaped, lines numbered, or led by the signs of a diff.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from understudy.redact.heuristics import is_placeholder, looks_random

_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_END = re.compile(r"-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_LONGEST = 20_000
_PIECE = re.compile(r"[A-Za-z0-9+/=]{16,}")
_BETWEEN = (
    r"""(?:\\{1,8}[nrt]|\\{1,8}$|[\s"',+>|#*`-]|\d{1,6}[→:|\t]"""
    r"|(?:Proc-Type|DEK-Info|Version|Comment): [^\n\\]{1,80})"
)
_GAP = re.compile(f"{_BETWEEN}{{0,40}}")
_LINE = re.compile(r"[A-Za-z0-9+/]{1,76}={0,2}|[A-Za-z0-9+/]{1,8000}={0,2}")
_NUMBER = re.compile(r"\d{1,6}[→:|]?")
_ESCAPE = re.compile(r"\\{1,8}[nrt]")
_BREAK = re.compile(r"(?:\\{1,8}[nrt]|\s)+")


def key_from(text: str, start: int) -> int | None:
    """Where the private key ends whose first line begins at `start`, or the part of it that is there.

    None where no such line begins there, or no key follows it.
    """
    begin = _BEGIN.match(text, start)
    if begin is None:
        return None
    end = _END.search(text, begin.end(), begin.end() + _LONGEST)
    if end is not None and _BEGIN.search(text, begin.end(), end.start()) is None:
        return end.end() if _PIECE.search(text, begin.end(), end.start()) else None
    # Cut off: as far as lines of it follow each other.
    at = begin.end()
    while True:
        gap = _GAP.match(text, at)
        line = _LINE.match(text, gap.end() if gap else at)
        if line is None or line.end() - begin.end() > _LONGEST:
            break
        if len(line.group()) < 16:
            # The last line may be short, but a word is no line.
            if at > begin.end() and not line.group().isalpha() and (gap is None or gap.end() > at):
                at = line.end()
            break
        at = line.end()
    return at if at > begin.end() else None


def key_until(text: str, end: int) -> tuple[int, int] | None:
    """Where the rest of a private key lies whose last line begins at `end` and whose first one is not there."""
    last = _END.match(text, end)
    if last is None:
        return None
    begin = at = end
    while end - at < _LONGEST:
        left = max(at - 200, 0)
        breaks = list(_BREAK.finditer(text, left, at))
        if not breaks or breaks[-1].end() != at:
            break
        if len(breaks) > 1:
            start = breaks[-2].end()
        elif left == 0:
            start = 0
        else:
            break
        line = text[start : breaks[-1].start()].lstrip("+>|#*\"'`-")
        numbered = _NUMBER.fullmatch(line) is not None
        if not numbered and (_LINE.fullmatch(line) is None or (len(line) < 16 and begin < end)):
            break
        if not numbered:
            begin = start
        if start == 0:
            break
        at = start
    return (begin, last.end()) if _PIECE.search(text, begin, end) else None


def key_lines(key: str) -> list[str]:
    """The lines of a private key that are long enough to be told from anything else."""
    return [piece for piece in _PIECE.findall(_ESCAPE.sub("\n", key)) if len(piece) >= 32]


def key_body(key: str) -> str:
    """The key without what may differ from one place to another: line breaks, numbers, signs."""
    body = _ESCAPE.sub("\n", _END.sub("", _BEGIN.sub("", key, count=1)))
    return "".join(_PIECE.findall(body)) or key


class TokenForm(NamedTuple):
    """A kind of token: the name of its rule, the word in its pseudonym, and what it looks like.

    `dotted` says that a token is more than one run of letters, digits, `_` and `-`. Only runs of 20 or more are
    looked at (`rules.find_secrets`), so one part of a token must be that long.

    What has to follow a new form: without dots, its first letters in `_STARTS_TEXT`, for a run of which no part
    begins with any of these is not searched; with dots, a way to its beginning in `tokens_in_run`, as `_dot` for
    a short part before a long one. Else it is only found where its surroundings tell, as behind `token=`.
    """

    rule: str
    label: str
    pattern: str
    dotted: bool = False


FORMS = (
    TokenForm("aws-key-id", "AWS_KEY", r"(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}(?![A-Za-z0-9])"),
    TokenForm("github-token", "GITHUB_TOKEN", r"gh[pousr]_[A-Za-z0-9]{30,255}|github_pat_[A-Za-z0-9_]{22,255}"),
    TokenForm(
        "gitlab-token",
        "GITLAB_TOKEN",
        r"(?:gl(?:pat|ptt|dt|rt|cbt|oas|soat|ft|imt|agent|ffct)-|GR1348941)[\w-]{20,200}",
    ),
    TokenForm("slack-token", "SLACK_TOKEN", r"xox[abceoprs]-[A-Za-z0-9-]{15,250}|xapp-\d-[A-Za-z0-9-]{20,250}"),
    TokenForm(
        "stripe-key", "STRIPE_KEY", r"[sr]k_(?:live|test|prod)_[A-Za-z0-9]{12,250}|whsec_[A-Za-z0-9]{20,100}"
    ),
    TokenForm("anthropic-key", "ANTHROPIC_KEY", r"sk-ant-[a-z]+\d*-[\w-]{20,250}"),
    TokenForm("openrouter-key", "OPENROUTER_KEY", r"sk-or-v1-[0-9a-f]{40,80}"),
    TokenForm("openai-key", "OPENAI_KEY", r"sk-(?:proj-|svcacct-|admin-|None-)?[A-Za-z0-9][\w-]{18,250}"),
    TokenForm("google-key", "GOOGLE_KEY", r"AIza[\w-]{35}(?![\w-])|GOCSPX-[\w-]{20,40}"),
    TokenForm("npm-token", "NPM_TOKEN", r"npm_[A-Za-z0-9]{36,64}"),
    TokenForm("pypi-token", "PYPI_TOKEN", r"pypi-[A-Za-z0-9_-]{50,1000}"),
    TokenForm("huggingface-token", "HUGGINGFACE_TOKEN", r"(?:hf_|api_org_)[A-Za-z0-9]{30,80}"),
    TokenForm("twilio-key", "TWILIO_KEY", r"SK[0-9a-f]{32}(?![A-Za-z0-9])"),
    TokenForm("twilio-account", "TWILIO_ACCOUNT", r"AC[0-9a-f]{32}(?![A-Za-z0-9])"),
    TokenForm("digitalocean-token", "DIGITALOCEAN_TOKEN", r"do[oprt]_v1_[0-9a-f]{64}"),
    TokenForm("shopify-token", "SHOPIFY_TOKEN", r"shp(?:at|ca|pa|ss|tka)_[0-9a-fA-F]{32}"),
    TokenForm("databricks-token", "DATABRICKS_TOKEN", r"dapi[0-9a-f]{32}(?:-\d)?(?![A-Za-z0-9])"),
    TokenForm("linear-key", "LINEAR_KEY", r"lin_(?:api|oauth)_[A-Za-z0-9]{32,64}"),
    TokenForm("notion-token", "NOTION_TOKEN", r"(?:ntn_|secret_)[A-Za-z0-9]{40,50}(?![A-Za-z0-9])"),
    TokenForm("atlassian-token", "ATLASSIAN_TOKEN", r"AT[ACB]TT3[\w-]{20,250}"),
    TokenForm("square-token", "SQUARE_TOKEN", r"sq0(?:atp|csp|idp)-[\w-]{22,60}|EAAA[\w-]{60}(?![\w-])"),
    TokenForm("sendinblue-key", "BREVO_KEY", r"xkeysib-[0-9a-f]{64}-[A-Za-z0-9]{16}"),
    TokenForm("mailgun-key", "MAILGUN_KEY", r"key-[0-9a-z]{32}(?![A-Za-z0-9])"),
    TokenForm("groq-key", "GROQ_KEY", r"gsk_[A-Za-z0-9]{40,64}"),
    TokenForm("xai-key", "XAI_KEY", r"xai-[A-Za-z0-9_-]{60,100}"),
    TokenForm("perplexity-key", "PERPLEXITY_KEY", r"pplx-[A-Za-z0-9]{32,64}"),
    TokenForm("replicate-token", "REPLICATE_TOKEN", r"r8_[A-Za-z0-9]{36,42}"),
    TokenForm("supabase-token", "SUPABASE_TOKEN", r"sb(?:p|_secret|_service)_[\w-]{30,64}"),
    TokenForm("docker-token", "DOCKER_TOKEN", r"dckr_(?:pat|oat)_[\w-]{24,64}"),
    TokenForm("grafana-token", "GRAFANA_TOKEN", r"gl(?:sa|c)_[\w+/=-]{32,250}"),
    TokenForm("newrelic-key", "NEWRELIC_KEY", r"NR(?:AK|JS|II|RA)-[A-Za-z0-9-]{20,50}"),
    TokenForm("sentry-token", "SENTRY_TOKEN", r"sntry[su]_[\w+/=-]{40,250}"),
    TokenForm("postman-key", "POSTMAN_KEY", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}"),
    TokenForm("langsmith-key", "LANGSMITH_KEY", r"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}"),
    TokenForm("figma-token", "FIGMA_TOKEN", r"fig[duo]r?_[\w-]{38,64}"),
    TokenForm("planetscale-token", "PLANETSCALE_TOKEN", r"pscale_(?:tkn|pw|oauth)_[\w=.-]{32,64}"),
    TokenForm("rubygems-key", "RUBYGEMS_KEY", r"rubygems_[0-9a-f]{48}"),
    TokenForm("tailscale-key", "TAILSCALE_KEY", r"tskey-[a-z]+-[A-Za-z0-9-]{16,100}"),
    TokenForm("age-key", "AGE_KEY", r"AGE-SECRET-KEY-1[A-Z0-9]{58}"),
    TokenForm("pulumi-token", "PULUMI_TOKEN", r"pul-[0-9a-f]{40}"),
    TokenForm("heroku-key", "HEROKU_KEY", r"HRKU-[\w-]{36,64}"),
    TokenForm("netlify-token", "NETLIFY_TOKEN", r"nfp_[A-Za-z0-9]{36,64}"),
    TokenForm("circleci-token", "CIRCLECI_TOKEN", r"CCI(?:PAT|PRJ)_[A-Za-z0-9_]{40,100}"),
    TokenForm("render-key", "RENDER_KEY", r"rnd_[A-Za-z0-9]{26,40}"),
    TokenForm("posthog-key", "POSTHOG_KEY", r"ph[cx]_[A-Za-z0-9]{40,64}"),
    TokenForm("nvidia-key", "NVIDIA_KEY", r"nvapi-[\w-]{40,100}"),
    TokenForm("tavily-key", "TAVILY_KEY", r"tvly-(?:dev-|prod-)?[A-Za-z0-9]{28,64}"),
    TokenForm("sonar-token", "SONAR_TOKEN", r"sq[pua]_[0-9a-f]{40}"),
    TokenForm("discord-token", "DISCORD_TOKEN", r"[MNO][\w-]{22,28}\.[\w-]{6}\.[\w-]{27,40}", dotted=True),
    TokenForm("telegram-token", "TELEGRAM_TOKEN", r"\d{8,10}:AA[\w-]{33}(?![\w-])", dotted=True),
    TokenForm("sendgrid-key", "SENDGRID_KEY", r"SG\.[\w-]{16,32}\.[\w-]{16,64}", dotted=True),
    TokenForm(
        "jwt",
        "JWT",
        r"eyJ[\w-]{10,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?|eyJ[\w-]{10,}\.[\w-]*\.[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}",
        dotted=True,
    ),
    TokenForm("google-token", "GOOGLE_TOKEN", r"ya29\.[\w-]{20,1000}", dotted=True),
    TokenForm("vault-token", "VAULT_TOKEN", r"hv[sbr]\.[\w-]{20,300}", dotted=True),
    TokenForm("doppler-token", "DOPPLER_TOKEN", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{30,64}", dotted=True),
)
"""All of them; `TokenForm` says what has to follow a new one. Where two fit, the first names the token."""

BEFORE = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbf])|(?<=%[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})"
    r"|(?<=\[[0-9]m)|(?<=\[[0-9]{2}m))"
)
"""What a token may stand behind: no letter or digit, unless it ends an escape of JSON, a URL or a terminal."""

_STARTS_TEXT = """
aki asi abi acc aiz eaa goc gr1 hrk nra nrj nri nrr pma api dap dck dop doo dor dot fig ghp gho ghu ghs ghr
git glp gld glr glc glo gls glf gli gla gsk hf key lin lsv npm ntn ppl psc pul pyp r8 sk rk rub sbp sb sec shp
snt sq0 tsk whs xai xap xke xox age a3t ata atb atc sk0 sk1 sk2 sk3 sk4 sk5 sk6 sk7 sk8 sk9 ska skb skc skd
ske skf nfp cci rnd phc phx nva tvl sqp squ sqa ac0 ac1 ac2 ac3 ac4 ac5 ac6 ac7 ac8 ac9 aca acb acd ace acf
"""
_STARTS = frozenset(_STARTS_TEXT.split())
"""The first three letters, in lower case, of each form without dots; fewer where `_` or `-` comes sooner."""


def _any(before: str, forms: tuple[TokenForm, ...]) -> re.Pattern[str]:
    return re.compile(before + "(?:" + "|".join(f"({form.pattern})" for form in forms) + ")", re.ASCII)


_IN_RUN = tuple(form for form in FORMS if not form.dotted)
_in_run = _any("(?<![A-Za-z0-9])", _IN_RUN)
_in_escaped = _any(BEFORE, _IN_RUN)
_DOTTED = tuple(form for form in FORMS if form.dotted)
_dotted = _any(BEFORE, _DOTTED)
_dot = re.compile(r"(?:SG|ya29|hv[sbr]|dp\.[a-z]{2,5})\.$|[0-9]{8,10}:$", re.ASCII)
"""What a dotted form begins with, before its first long run; at most 11 characters."""
_whole = re.compile("|".join(f"({form.pattern})" for form in FORMS), re.ASCII)


def tokens_in_run(text: str, start: int, end: int) -> list[tuple[int, int, str]]:
    """The tokens in a run of letters, digits, `_` and `-`: where they begin and end, and their rule.

    Tokens of several runs, with dots between, are found by the first run that is long.
    """
    before = text[start - 1 : start] if start else ""
    spans: list[tuple[int, int, str]] = []
    if before in (".", ":") and (lead := _dot.search(text[max(start - 11, 0) : start])):
        _dotted_at(text, start - (lead.end() - lead.start()), spans)
    if 22 < end - start < 30 and text[start] in "MNO" and text[end : end + 1] == ".":
        _dotted_at(text, start, spans)
    at = text.find("eyJ", start, end)
    if at >= 0:
        _dotted_at(text, at, spans)
    escaped = before in ("\\", "%", "[")
    if not escaped and _STARTS.isdisjoint(
        [piece[:3] for piece in text[start:end].lower().replace("-", "_").split("_")]
    ):
        return spans
    pattern = _in_escaped if escaped else _in_run
    for match in pattern.finditer(text, start, end):
        rule = _IN_RUN[(match.lastindex or 1) - 1].rule
        # `sk-` begins names of CSS classes too.
        if not is_placeholder(match.group()) and (rule != "openai-key" or looks_random(match.group())):
            spans.append((match.start(), match.end(), rule))
    return spans


def _dotted_at(text: str, at: int, spans: list[tuple[int, int, str]]) -> None:
    match = _dotted.match(text, at)
    if match is not None and not is_placeholder(match.group()):
        spans.append((match.start(), match.end(), _DOTTED[(match.lastindex or 1) - 1].rule))


def pseudonym_label(value: str) -> str:
    """The word for a value's pseudonym: that of its form, else SECRET."""
    match = _whole.fullmatch(value)
    return "SECRET" if match is None else FORMS[(match.lastindex or 1) - 1].label


def has_token_form(value: str) -> bool:
    """Whether the whole value has one of the forms."""
    return _whole.fullmatch(value) is not None
