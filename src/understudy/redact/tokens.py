"""Tokens that are recognised by their form alone: a prefix that its provider publishes, and what follows it.

Tokens that name themselves (`acme_live_…`, `acme-key-…`) are found whoever issued them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from understudy.redact.heuristics import count_random_characters, is_placeholder, looks_random


class TokenForm(NamedTuple):
    """A kind of token: the name of its rule, the word in its pseudonym, and what it looks like.

    `dotted` says that a token is more than one run of letters, digits, `_` and `-`. Only runs of 20 or more are
    looked at (`rules.find_secrets`), so one part of a token must be that long.

    A new form without dots needs a row in `_PREFIXED_TEXT`, or an entry in `_FORMS` with its first letters in
    `_STARTS_TEXT`: runs of which no part begins with any of these are not searched. One with dots needs what leads
    to its first long run in `_lead`. Else it is only found where its surroundings tell, as behind `token=`.
    """

    rule: str
    label: str
    pattern: str
    dotted: bool = False


_FORMS = (
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
    TokenForm("supabase-token", "SUPABASE_TOKEN", r"sb(?:p|_secret|_service)_[\w-]{30,64}"),
    TokenForm("docker-token", "DOCKER_TOKEN", r"dckr_(?:pat|oat)_[\w-]{24,64}"),
    TokenForm("langsmith-key", "LANGSMITH_KEY", r"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}"),
    TokenForm("figma-token", "FIGMA_TOKEN", r"fig[duo]r?_[\w-]{38,64}"),
    TokenForm("rubygems-key", "RUBYGEMS_KEY", r"rubygems_[0-9a-f]{48}"),
    TokenForm("tailscale-key", "TAILSCALE_KEY", r"tskey-[a-z]+-[A-Za-z0-9-]{16,100}"),
    TokenForm("age-key", "AGE_KEY", r"AGE-SECRET-KEY-1[A-Z0-9]{58}"),
    TokenForm("pulumi-token", "PULUMI_TOKEN", r"pul-[0-9a-f]{40}"),
    TokenForm("heroku-key", "HEROKU_KEY", r"HRKU-[\w-]{36,64}"),
    TokenForm("netlify-token", "NETLIFY_TOKEN", r"nfp_[A-Za-z0-9]{36,64}"),
    TokenForm("render-key", "RENDER_KEY", r"rnd_[A-Za-z0-9]{26,40}"),
    TokenForm("posthog-key", "POSTHOG_KEY", r"ph[cx]_[A-Za-z0-9]{40,64}"),
    TokenForm("nvidia-key", "NVIDIA_KEY", r"nvapi-[\w-]{40,100}"),
    TokenForm("tavily-key", "TAVILY_KEY", r"tvly-(?:dev-|prod-)?[A-Za-z0-9]{28,64}"),
    TokenForm("sonar-token", "SONAR_TOKEN", r"sq[pua]_[0-9a-f]{40}"),
    TokenForm("discord-token", "DISCORD_TOKEN", r"[MNO][\w-]{22,28}\.[\w-]{6}\.[\w-]{27,40}", dotted=True),
    TokenForm("telegram-token", "TELEGRAM_TOKEN", r"\d{8,10}:AA[\w-]{33}(?![\w-])", dotted=True),
    TokenForm("sendgrid-key", "SENDGRID_KEY", r"SG\.[\w-]{20,32}\.[\w-]{16,64}", dotted=True),
    TokenForm(
        "jwt",
        "JWT",
        r"eyJ[\w-]{17,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?|eyJ[\w-]{17,}\.[\w-]*\.[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}",
        dotted=True,
    ),
    TokenForm("google-token", "GOOGLE_TOKEN", r"ya29\.[\w-]{20,1000}", dotted=True),
    TokenForm("vault-token", "VAULT_TOKEN", r"hv[sbr]\.[\w-]{20,300}", dotted=True),
    TokenForm(
        "doppler-token",
        "DOPPLER_TOKEN",
        r"dp\.(?:pt|st|ct|sa|scim|audit)\.(?:[a-z0-9_-]{2,35}\.)?[A-Za-z0-9]{40,44}",
        dotted=True,
    ),
    TokenForm(
        "dynatrace-token", "DYNATRACE_TOKEN", r"dt0[a-z]\d\d\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{64}", dotted=True
    ),
    TokenForm("dropbox-token", "DROPBOX_TOKEN", r"sl\.(?:u\.)?[\w-]{60,1500}", dotted=True),
    TokenForm("terraform-token", "TERRAFORM_TOKEN", r"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,70}", dotted=True),
    TokenForm("airtable-token", "AIRTABLE_TOKEN", r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}", dotted=True),
    TokenForm(
        "harness-token", "HARNESS_TOKEN", r"(?:pat|sat)\.[\w-]{22}\.[0-9a-f]{24}\.[A-Za-z0-9]{20}", dotted=True
    ),
    TokenForm("mapbox-token", "MAPBOX_TOKEN", r"[sp]k\.eyJ[\w-]{40,120}\.[\w-]{20,30}", dotted=True),
    TokenForm("infisical-token", "INFISICAL_TOKEN", r"st\.[0-9a-f]{24}\.[0-9a-f]{32}\.[0-9a-f]{32}", dotted=True),
    TokenForm("zoho-token", "ZOHO_TOKEN", r"1000\.[0-9a-f]{32}\.[0-9a-f]{32}", dotted=True),
    TokenForm("slack-token", "SLACK_TOKEN", r"xoxe\.xox[bp]-\d-[A-Za-z0-9-]{60,250}", dotted=True),
    TokenForm("openshift-token", "OPENSHIFT_TOKEN", r"sha256~[\w-]{43}(?![\w-])", dotted=True),
    TokenForm("amazon-mws-token", "AMAZON_MWS_TOKEN", r"amzn\.mws\.[0-9a-f]{8}-[0-9a-f-]{27}", dotted=True),
    TokenForm("yandex-token", "YANDEX_TOKEN", r"t1\.[\w-]{20,300}={0,2}\.[\w-]{60,120}={0,2}", dotted=True),
    TokenForm("cloudflare-key", "CLOUDFLARE_KEY", r"v1\.0-[0-9a-f]{24}-[0-9a-f]{146}", dotted=True),
    TokenForm("snyk-token", "SNYK_TOKEN", r"snyk_[a-z]{2,6}\.[0-9a-f]{8}\.[\w-]{40,120}", dotted=True),
)

_PREFIXED_TEXT = r"""
1password-token    ops_eyJ                                        [\w+/=-]{60,2000}
1password-key A3- [A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}
adobe-secret       p8e-                                           [A-Za-z0-9_-]{32}
alibaba-key        LTAI                                           [A-Za-z0-9]{16,24}(?![A-Za-z0-9])
artifactory-key    AKCp                                           [A-Za-z0-9]{60,80}(?![A-Za-z0-9])
artifactory-token  cmVmdGtu                                       [A-Za-z0-9]{50,64}(?![A-Za-z0-9])
aws-bedrock-key    ABSK|bedrock-api-key-                          [A-Za-z0-9+/]{60,300}={0,2}
buildkite-token    bkua_|bkaj_|bkct_|bkpt_                        [A-Za-z0-9]{30,64}
cerebras-key       csk-                                           [a-z0-9]{40,64}
circleci-token     CCIPAT_|CCIPRJ_                                [A-Za-z0-9_-]{40,100}
clickhouse-key     4b1d                                           [A-Za-z0-9]{38}(?![A-Za-z0-9])
clojars-token      CLOJARS_                                       [a-z0-9]{50,64}
cloudflare-token   cfk_|cfut_|cfat_                               [A-Za-z0-9_-]{36,64}
contentful-token   CFPAT-                                         [\w-]{40,64}
defined-key        dnkey-                                         [\w-]{20,30}-[\w-]{40,60}
duffel-token       duffel_live_|duffel_test_                      [\w-]{40,48}
e2b-key            e2b_                                           [0-9a-f]{36,48}
easypost-key       EZAK|EZTK                                      [A-Za-z0-9]{50,60}(?![A-Za-z0-9])
facebook-token     EAAC|EAAM|EAAG|EAAB|EAAJ|EAAE|EAAF|EAAI        [A-Za-z0-9]{60,300}
firecrawl-key      fc-                                            [0-9a-f]{32}(?![A-Za-z0-9])
fireworks-key      fw_                                            [A-Za-z0-9]{22,30}(?![A-Za-z0-9])
flutterwave-key    FLWSECK_TEST-|FLWSECK-|FLWPUBK_TEST-|FLWPUBK-  [A-Za-z0-9]{12,40}(?:-X)?
fly-token          fo1_|fm1a_|fm1r_|fm2_                          [\w+/=-]{40,600}
frameio-token      fio-u-                                         [\w-]{60,68}
google-refresh     1//0                                           [\w-]{40,120}
grafana-key        eyJrIjoi                                       [A-Za-z0-9+/]{60,400}={0,2}
grafana-token      glsa_|glc_                                     [\w+/=-]{32,250}
hubspot-token pat-na1-|pat-na2-|pat-eu1-|pat-ap1- [0-9A-Za-z]{8}(?:-[0-9A-Za-z]{4}){3}-[0-9A-Za-z]{12}
infracost-key      ico-                                           [A-Za-z0-9]{32}(?![A-Za-z0-9])
intra42-secret     s-s4t2ud-|s-s4t2af-                            [0-9a-f]{64}
jina-key           jina_                                          [A-Za-z0-9_-]{50,70}
klaviyo-key pk_ (?:[A-Za-z0-9]{6}_)?[0-9a-f]{34}(?![A-Za-z0-9])
langfuse-key       sk-lf-|pk-lf-                                  [0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}
launchdarkly-key sdk-|mob-|api- [0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![\w-])
lob-key            live_|test_                                    [0-9a-f]{35}(?![A-Za-z0-9])
neon-key           napi_                                          [a-z0-9]{50,70}
newrelic-key       NRAK-|NRIQ-|NRBR-|NRJS-|NRII-|NRRA-|NRAL-      [A-Za-z0-9_-]{16,50}
nuget-key          oy2                                            [a-z0-9]{43}(?![A-Za-z0-9])
octopus-key        API-                                           [A-Z0-9]{26,32}(?![A-Za-z0-9])
pinecone-key       pcsk_                                          [A-Za-z0-9_]{50,80}
plaid-token access-sandbox-|access-development-|access-production- [0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}
postman-key        PMAK-                                          [A-Za-z0-9]{24}-[A-Za-z0-9]{34}
planetscale-token  pscale_tkn_|pscale_pw_|pscale_oauth_           [\w=.-]{32,64}
prefect-key        pnu_|pnb_                                      [A-Za-z0-9]{30,40}
pubnub-key sec-c-|pub-c-|sub-c- [0-9A-Za-z]{8}(?:-[0-9A-Za-z]{4}){3}-[0-9A-Za-z]{12}
razorpay-key       rzp_live_|rzp_test_                            [A-Za-z0-9]{14,24}
readme-key         rdme_                                          [a-z0-9]{60,80}
replicate-token    r8_                                            [\w-]{36,42}
resend-key         re_                                            [A-Za-z0-9]{8}_[A-Za-z0-9]{24}(?![A-Za-z0-9])
robinhood-key      rh-api-                                        [0-9A-Fa-f]{8}-[0-9A-Fa-f-]{27}
rootly-token       rootly_                                        [0-9a-f]{64}
scalingo-token     tk-us-                                         [\w-]{40,56}
sentry-token       sntrys_|sntryu_                                [\w+/=-]{40,250}
settlemint-token   sm_aat_|sm_pat_|sm_sat_                        [A-Za-z0-9]{16}
shippo-token       shippo_live_|shippo_test_                      [0-9a-f]{40}
shopify-token      shltm_|shpltm_                                 [\w-]{30,44}
slack-token        xoxe-|xwfp-                                    [A-Za-z0-9-]{20,250}
sourcegraph-token  sgp_                                           (?:(?:[0-9a-fA-F]{16}|local)_)?[0-9a-fA-F]{40}
sourcegraph-token  slk_                                           [0-9a-f]{64}
stripe-secret      pi_|seti_                                      [A-Za-z0-9]{20,30}_secret_[A-Za-z0-9]{20,30}
together-key       tgp_v1_                                        [\w-]{40,60}
trello-token       ATTA                                           [0-9a-fA-F]{64,80}
trufflehog-key     thog-key-                                      [0-9a-f]{16,40}
typeform-token     tfp_                                           [\w=.-]{40,80}
ubidots-token      BBFF-|BBUS-                                    [A-Za-z0-9]{28,36}
vercel-token       vcp_|vck_|vci_|vca_|vcr_                       [A-Za-z0-9]{24,64}
voyage-key         pa-                                            [\w-]{40,50}(?![\w-])
wakatime-key       waka_                                          [0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}
yandex-key         AQVN                                           [\w-]{35,38}(?![\w-])
sendinblue-key     xsmtpsib-                                      [0-9a-f]{64}-[A-Za-z0-9]{16}
"""
"""Forms whose prefix is fixed: the rule, prefixes, and a pattern of what follows, apart by blanks."""


def _prefixed(row: str) -> tuple[TokenForm, set[str]]:
    """The form of a row, and the first three letters of the parts of a run by which its tokens are found."""
    rule, prefixes, body = row.split()
    form = TokenForm(
        rule, rule.upper().replace("-", "_").replace("1PASSWORD", "ONEPASSWORD"), f"(?:{prefixes}){body}"
    )
    starts = {re.split("[_-]", prefix.lower())[0][:3] for prefix in prefixes.split("|")}
    return form, starts


_ROWS = [_prefixed(row) for row in _PREFIXED_TEXT.strip().splitlines()]
FORMS = (*_FORMS, *(form for form, _ in _ROWS))
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
_STARTS = frozenset(_STARTS_TEXT.split()).union(*(starts for _, starts in _ROWS))
"""The first three letters, in lower case, of each form without dots; fewer where `_` or `-` comes sooner."""


def _any(before: str, forms: tuple[TokenForm, ...]) -> re.Pattern[str]:
    return re.compile(before + "(?:" + "|".join(f"({form.pattern})" for form in forms) + ")", re.ASCII)


_IN_RUN = tuple(form for form in FORMS if not form.dotted)
_in_run = _any("(?<![A-Za-z0-9])", _IN_RUN)
_in_escaped = _any(BEFORE, _IN_RUN)
_DOTTED = tuple(form for form in FORMS if form.dotted)
_dotted = _any(BEFORE, _DOTTED)
_lead = re.compile(
    r"(?:SG|ya29|hv[sbr]|dp\.[a-z]{2,5}(?:\.[a-z0-9_-]{2,35})?|dt0[a-z]\d\d|sl|sl\.u|[A-Za-z0-9]{14}\.atlasv1|pat[A-Za-z0-9]{14}|[ps]at|st|1000|xoxe|"
    r"amzn\.mws|t1|snyk_[a-z]{2,6}\.[0-9a-f]{8}|[ps]k|v1)\.$"
    r"|[0-9]{8,10}:$|sha256~$",
    re.ASCII,
)
"""What a dotted form begins with, before its first long run."""
_LEAD_LENGTH = 48
_DIGEST = re.compile(r"[0-9a-f]{1,31}")
_named = re.compile(
    r"(?i)(?<![A-Za-z0-9])[a-z][a-z0-9]{1,15}(?:[_-][a-z]{2,8})?[_-](?:live|test|prod|secret|key|token|pat|sk|api)[_-]([\w-]{16,120})",
    re.ASCII,
)
_whole = re.compile("|".join(f"({form.pattern})" for form in FORMS), re.ASCII)


def tokens_in_run(text: str, start: int, end: int) -> list[tuple[int, int, str]]:
    """The tokens in a run of letters, digits, `_` and `-`: where they begin and end, and their rule.

    Tokens of several runs, with dots between, are found by the first run that is long.
    """
    before = text[start - 1 : start] if start else ""
    spans: list[tuple[int, int, str]] = []
    if before in (".", ":", "~") and (lead := _lead.search(text[max(start - _LEAD_LENGTH, 0) : start])):
        _dotted_at(text, start - (lead.end() - lead.start()), spans)
    if 22 < end - start < 30 and text[start] in "MNO" and text[end : end + 1] == ".":
        _dotted_at(text, start, spans)
    at = text.find("eyJ", start, end)  # a JSON Web Token begins with {" in base64
    if at >= 0:
        _dotted_at(text, at, spans)
    if not spans:
        _named_token(text, start, end, spans)
    escaped = before in ("\\", "%", "[")
    if not escaped and _STARTS.isdisjoint(
        [piece[:3] for piece in text[start:end].lower().replace("-", "_").split("_")]
    ):
        return spans
    pattern = _in_escaped if escaped else _in_run
    for match in pattern.finditer(text, start, end):
        # What follows a prefix may have signs that end the run.
        match = pattern.match(text, match.start()) or match
        rule, token = _IN_RUN[(match.lastindex or 1) - 1].rule, match.group()
        # `sk-` begins names of CSS classes too, `pypi-` file names.
        made = any(map(str.isdigit, token)) if len(token) < 40 else count_random_characters(token) >= 8
        if not is_placeholder(token) and (looks_random(token) or (made and rule != "openai-key")):
            spans.append((match.start(), match.end(), rule))
    return spans


def _named_token(text: str, start: int, end: int, spans: list[tuple[int, int, str]]) -> None:
    """Add a token that says of itself that it is one (`acme_live_…`), if what follows is random."""
    match = _named.search(text, start, end)
    if match is not None and not is_placeholder(match[1]) and any(map(str.isdigit, match[1])):
        random = count_random_characters(match[1])
        # Names of packages end in digests: `log4j-api-c404b33d3a8ce0d8`.
        if random >= 14 and random * 3 >= len(match[1]) * 2 and not _DIGEST.fullmatch(match[1]):
            spans.append((match.start(), match.end(), "api-token"))


def _dotted_at(text: str, at: int, spans: list[tuple[int, int, str]]) -> None:
    match = _dotted.match(text, at)
    if match is not None and not is_placeholder(match.group()):
        spans.append((match.start(), match.end(), _DOTTED[(match.lastindex or 1) - 1].rule))


_BROKEN = tuple(row.split() for row in _PREFIXED_TEXT.strip().splitlines() if re.search(r"//|\[[^]]*[=+/.]", row))
_broken = re.compile(BEFORE + "(?:" + "|".join(f"((?:{row[1]}){row[2]})" for row in _BROKEN) + ")", re.ASCII)
BROKEN_PREFIXES = tuple(sorted({prefix.lower().encode() for row in _BROKEN for prefix in row[1].split("|")}))
"""Prefixes, in lower case, of tokens in which `/`, `+`, `=` or `.` may end a run before it is long."""


def broken_token_at(text: str, position: int) -> tuple[int, int, str] | None:
    """Where such a token lies that begins at `position`, and its rule."""
    match = _broken.match(text, position)
    if match is None or is_placeholder(match.group()) or not looks_random(match.group()):
        return None
    return match.start(), match.end(), _BROKEN[(match.lastindex or 1) - 1][0]


def pseudonym_label(value: str) -> str:
    """The word for a value's pseudonym: that of its form, else SECRET."""
    match = _whole.fullmatch(value)
    return "SECRET" if match is None else FORMS[(match.lastindex or 1) - 1].label


def has_token_form(value: str) -> bool:
    """Whether the whole value has one of the forms."""
    return _whole.fullmatch(value) is not None
