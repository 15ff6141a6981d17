"""Tokens that are recognised by their form alone: a prefix that their provider publishes, and what follows it.

Tokens that name themselves (`acme_live_…`, `acme-key-…`) are found whoever issued them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from understudy.redact.heuristics import count_random_characters, is_placeholder, looks_random


class TokenForm(NamedTuple):
    """A kind of token: the name of its rule, the word in its pseudonym, and its pattern.

    A token is searched for where one of its `prefixes` occurs (`search.find_secrets`), in upper or lower case. A
    form without prefixes is dotted: its token is several runs of letters, digits, `_` and `-` with dots between
    them, and is searched for where such a run of 20 or more characters follows a dot.

    To add a form with a fixed prefix, add a row to `_PREFIXED_TEXT`. To add a dotted one, add an entry to
    `_DOTTED`, and to `_lead` and `_lead_backwards` what comes before its first long run. Any other token is found
    only by its surroundings, as after `token=`.
    """

    rule: str
    label: str
    pattern: str
    prefixes: tuple[str, ...] = ()


_PREFIXED_TEXT = r"""
aws-key-id         AKIA|ASIA|ABIA|ACCA                            [A-Z0-9]{16}(?![A-Za-z0-9])
aws-key-id         A3T                                            [A-Z0-9]{17}(?![A-Za-z0-9])
github-token       ghp_|gho_|ghu_|ghs_|ghr_                       [A-Za-z0-9]{30,255}
github-token       github_pat_                                    [A-Za-z0-9_]{22,255}
gitlab-token glpat-|glptt-|gldt-|glrt-|glcbt-|gloas-|glsoat-|glft-|glimt-|glagent-|glffct-|GR1348941 [\w-]{20,200}
slack-token        xoxa-|xoxb-|xoxc-|xoxe-|xoxo-|xoxp-|xoxr-|xoxs- [A-Za-z0-9-]{15,250}
slack-token        xapp-                                          \d{1,3}-[\w-]{20,250}
stripe-key sk_live_|sk_test_|sk_prod_|rk_live_|rk_test_|rk_prod_ [A-Za-z0-9]{12,250}
stripe-key         whsec_                                         [A-Za-z0-9+/]{20,100}={0,2}
anthropic-key      sk-ant-                                        [a-z]+\d*-[\w-]{20,250}
openrouter-key     sk-or-v1-                                      [0-9a-f]{40,80}
langfuse-key       sk-lf-|pk-lf-                                  [0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}
openai-key         sk-                                  (?:proj-|svcacct-|admin-|None-)?[A-Za-z0-9][\w-]{18,250}
google-key         AIza                                           [\w-]{35}(?![\w-])
google-key         GOCSPX-                                        [\w-]{20,40}
npm-token          npm_                                           [A-Za-z0-9]{36,64}
pypi-token         pypi-                                          [A-Za-z0-9_-]{50,1000}
huggingface-token  hf_|api_org_                                   [A-Za-z0-9]{30,80}
twilio-key SK0|SK1|SK2|SK3|SK4|SK5|SK6|SK7|SK8|SK9|SKa|SKb|SKc|SKd|SKe|SKf [0-9a-fA-F]{31}(?![A-Za-z0-9])
twilio-key SKA|SKB|SKC|SKD|SKE|SKF [0-9a-fA-F]{31}(?![A-Za-z0-9])
twilio-account AC0|AC1|AC2|AC3|AC4|AC5|AC6|AC7|AC8|AC9|ACa|ACb|ACc|ACd|ACe|ACf [0-9a-f]{31}(?![A-Za-z0-9])
digitalocean-token doo_v1_|dop_v1_|dor_v1_|dot_v1_                [0-9a-f]{64}
shopify-token      shpat_|shpca_|shppa_|shpss_|shptka_            [0-9a-fA-F]{32}
databricks-token   dapi                                           [0-9a-f]{32}(?:-\d)?(?![A-Za-z0-9])
linear-key         lin_api_|lin_oauth_                            [A-Za-z0-9]{32,64}
notion-token       ntn_|secret_                                   [A-Za-z0-9]{40,50}(?![A-Za-z0-9])
atlassian-token    ATATT3|ATCTT3|ATBTT3                           [\w-]{20,250}
square-token       sq0atp-|sq0csp-|sq0idp-                        [\w-]{22,60}
square-token       EAAA                                           [\w-]{60,64}(?![\w-])
sendinblue-key     xkeysib-                                       [0-9a-f]{64}-[A-Za-z0-9]{16}
mailgun-key        key-                                           [0-9a-z]{32}(?![A-Za-z0-9])
groq-key           gsk_                                           [A-Za-z0-9]{40,64}
xai-key            xai-                                           [A-Za-z0-9_-]{60,100}
perplexity-key     pplx-                                          [A-Za-z0-9]{32,64}
supabase-token     sbp_|sb_secret_|sb_service_                    [\w-]{30,64}
docker-token       dckr_pat_|dckr_oat_                            [\w-]{24,64}
langsmith-key      lsv2_pt_|lsv2_sk_                              [0-9a-f]{32}_[0-9a-f]{10}
figma-token        figd_|figu_|figo_|figdr_|figur_|figor_         [\w-]{38,64}
rubygems-key       rubygems_                                      [0-9a-f]{48}
tailscale-key      tskey-                                         [a-z]+-[A-Za-z0-9-]{16,100}
age-key            AGE-SECRET-KEY-1                               [A-Z0-9]{58}
pulumi-token       pul-                                           [0-9a-z]{40}
heroku-key         HRKU-                                          [\w-]{36,64}
netlify-token      nfp_                                           [A-Za-z0-9]{36,64}
render-key         rnd_                                           [A-Za-z0-9]{26,40}
posthog-key        phc_|phx_                                      \w{40,64}
nvidia-key         nvapi-                                         [\w-]{40,100}
tavily-key         tvly-                                          (?:dev-|prod-)?[A-Za-z0-9]{28,64}
sonar-token        sqp_|squ_|sqa_                                 [0-9a-z]{40}
1password-token    ops_eyJ                                        [\w+/=-]{60,2000}
1password-key A3- [A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}
adobe-secret       p8e-                                           [A-Za-z0-9_-]{32}
adafruit-key       aio_                                           [A-Za-z0-9]{28}(?![A-Za-z0-9])
alibaba-key        LTAI                                           [A-Za-z0-9]{16,24}(?![A-Za-z0-9])
artifactory-key    AKC                                            [A-Za-z0-9]{61,81}(?![A-Za-z0-9])
artifactory-token  cmVmd                                          [A-Za-z0-9]{59}(?![A-Za-z0-9])
artifactory-token  cmVmdGtu                                       [A-Za-z0-9]{50,64}(?![A-Za-z0-9])
authress-key sc_|ext_|scauth_|authress_ [a-z0-9]{5,30}\.[a-z0-9]{4,6}\.acc[_-][a-z0-9-]{10,32}\.[\w+/=-]{30,120}
aws-bedrock-key    ABSK|bedrock-api-key-                          [A-Za-z0-9+/]{60,300}={0,2}
buildkite-token    bkua_|bkaj_|bkct_|bkpt_                        [A-Za-z0-9]{30,64}
cerebras-key       csk-                                           [a-z0-9]{40,64}
circleci-token     CCIPAT_|CCIPRJ_                                [A-Za-z0-9_-]{40,100}
clickup-token      pk_                                            \d{5,10}_[A-Z0-9]{32}(?![A-Za-z0-9])
clickhouse-key     4b1d                                           [A-Za-z0-9]{38}(?![A-Za-z0-9])
clojars-token      CLOJARS_                                       [a-z0-9]{50,64}
cloudflare-token   cfk_|cfut_|cfat_                               [A-Za-z0-9_-]{36,64}
contentful-token   CFPAT-                                         [\w-]{40,64}
crates-token       cio                                            [A-Za-z0-9]{32}(?![A-Za-z0-9])
defined-key        dnkey-                                         [\w-]{20,30}-[\w-]{40,60}
dependency-track-key odt_ (?:[A-Za-z0-9]{8}_)?[A-Za-z0-9]{32,44}(?![A-Za-z0-9])
duffel-token       duffel_live_|duffel_test_                      [\w=-]{40,48}
e2b-key            e2b_                                           [0-9a-f]{36,48}
easypost-key       EZAK|EZTK                                      [A-Za-z0-9]{50,60}(?![A-Za-z0-9])
facebook-token     EAAC|EAAM|EAAG|EAAB|EAAJ|EAAE|EAAF|EAAI        [A-Za-z0-9]{60,300}
facebook-token     EAACEdEose0cBA                                 [A-Za-z0-9]{20,60}(?![A-Za-z0-9])
firecrawl-key      fc-                                            [0-9a-f]{32}(?![A-Za-z0-9])
fireworks-key      fw_                                            [A-Za-z0-9]{22,30}(?![A-Za-z0-9])
flutterwave-key    FLWSECK_TEST-|FLWSECK-|FLWPUBK_TEST-|FLWPUBK-  [A-Za-z0-9]{12,40}(?:-X)?
fly-token          fo1_|fm1a_|fm1r_|fm2_                          [\w+/=-]{40,600}
facebook-token     EAA                                            [A-Za-z0-9]{120,300}
frameio-token      fio-u-                                         [\w=-]{60,68}
freemius-key       sk_                                            [\w-]{29}(?![\w-])
google-refresh     1//0                                           [\w-]{40,120}
grafana-key        eyJrIjoi                                       [A-Za-z0-9+/]{60,400}={0,2}
grafana-token      glsa_|glc_                                     [\w+/=-]{32,250}
hubspot-token pat-na1-|pat-na2-|pat-eu1-|pat-ap1- [0-9A-Za-z]{8}(?:-[0-9A-Za-z]{4}){3}-[0-9A-Za-z]{12}
infracost-key      ico-                                           [A-Za-z0-9]{32}(?![A-Za-z0-9])
intra42-secret     s-s4t2ud-|s-s4t2af-                            [0-9a-f]{64}
ionic-token        ion_                                           [a-z0-9]{42}(?![A-Za-z0-9])
jina-key           jina_                                          [A-Za-z0-9_-]{50,70}
klaviyo-key pk_ (?:[A-Za-z0-9]{6}_)?[0-9a-f]{34}(?![A-Za-z0-9])
launchdarkly-key sdk-|mob-|api- [0-9a-z]{8}(?:-[0-9a-z]{4}){3}-[0-9a-z]{12}(?![\w-])
lob-key            live_|test_                                    [0-9a-f]{35}(?![A-Za-z0-9])
neon-key           napi_                                          [a-z0-9]{50,70}
newrelic-key       NRAK-|NRAA-|NRIQ-|NRBR-|NRJS-|NRII-|NRRA-|NRAL-      [A-Za-z0-9_-]{16,50}
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
salesforce-token   00D                                            [A-Za-z0-9]{12}![\w.]{80,200}
scalingo-token     tk-us-                                         [\w-]{40,56}
sentry-token       sntrys_|sntryu_                                [\w+/=-]{40,250}
settlemint-token   sm_aat_|sm_pat_|sm_sat_                        [A-Za-z0-9]{16}
shippo-token       shippo_live_|shippo_test_                      [0-9a-f]{40}
shopify-token      shltm_|shpltm_                                 [\w-]{30,44}
slack-token        xoxe-|xwfp-                                    [A-Za-z0-9-]{20,250}
slack-token        xoxd-                                          [\w%+/=-]{20,300}
sourcegraph-token  sgp_                                           (?:[0-9a-fA-F]{16}_)?(?:local_)?[0-9a-fA-F]{40}
segment-token      sgp_                                           [A-Za-z0-9]{64}(?![A-Za-z0-9])
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
anyscale-key       esecret_                                       [A-Za-z0-9]{20,60}
apify-token        apify_api_                                     [A-Za-z0-9]{30,60}
atlassian-token    ATBB                                           [A-Za-z0-9]{24,40}(?![A-Za-z0-9])
besttime-key       pri_                                           [0-9a-f]{32}(?![A-Za-z0-9])
cursor-key         crsr_                                          [0-9a-f]{64}(?![A-Za-z0-9])
deno-token         ddp_|ddw_                                      [A-Za-z0-9]{36}(?![A-Za-z0-9])
docker-swarm-token SWMTKN-1-                                      [0-9a-z]{40,60}-[0-9a-z]{20,30}
elastic-key        essu_                                          [A-Za-z0-9+/]{40,160}={0,2}
elevenlabs-key     sk_                                            [0-9a-f]{48}(?![A-Za-z0-9])
fernet-token       gAAAAA                                         [\w-]{60,400}={0,2}
intercom-token     dG9rO                                          [A-Za-z0-9+/]{50,60}={0,2}
kaggle-token       KGAT_                                          [0-9a-f]{32}(?![A-Za-z0-9])
nylas-key          nyk_v0_                                        [A-Za-z0-9]{40,80}
paddle-key         pdl_live_apikey_|pdl_sdbx_apikey_              \w{40,80}
pganalyze-key      pgar_|pgaw_                                    [A-Za-z0-9]{27,40}
photoroom-key      sk_pr_                                         [\w-]{1,30}_[0-9a-f]{40}(?![A-Za-z0-9])
polar-token        polar_oat_|polar_pat_                          [\w-]{30,80}
portainer-token    ptr_                                           [A-Za-z0-9+/]{40,44}={0,2}
runpod-key         rpa_                                           [A-Z0-9]{36,60}(?![A-Za-z0-9])
saladcloud-key     salad_cloud_user_                              [A-Za-z0-9]{40,60}
spectral-key       spu-                                           [0-9a-f]{32}(?![A-Za-z0-9])
twitch-key         live_                                          \d{8,10}_[A-Za-z0-9]{30}(?![A-Za-z0-9])
trigger-key        tr_dev_|tr_prod_|tr_stg_|tr_pat_               [A-Za-z0-9]{18,48}(?![A-Za-z0-9])
wandb-key          wandb_v1_                                      [\w-]{40,120}
coderabbit-key     cr-                                            [0-9a-f]{58}(?![A-Za-z0-9])
friendli-token     flp_                                           [A-Za-z0-9]{46}(?![A-Za-z0-9])
runway-key         key_                                           [0-9a-f]{128}(?![A-Za-z0-9])
zuplo-key          zpka_                                          [a-z0-9]{32}_[0-9a-f]{8}(?![A-Za-z0-9])
sendinblue-key     xsmtpsib-                                      [0-9a-f]{64}-[A-Za-z0-9]{16}
telnyx-key         KEY0                                           [0-9A-F]{31}_[\w-]{22}(?![\w-])
africastalking-key atsk_                                          [0-9a-f]{64}
dingtalk-secret    SEC                                            [0-9a-f]{64}(?![A-Za-z0-9])
honeycomb-key      hcaik_|hcbik_|hcxik_|hcxlk_                    [a-z0-9]{50,64}
k3s-token          K10                                            [0-9a-f]{64}::[a-z]{4,12}:[\w.]{16,64}
onesignal-key      os_v2_app_|os_v2_org_                          [a-z2-7]{60,110}
payment-key        live_                                          (?:[A-Za-z0-9]{30}|[\w-]{40}|[\w-]{43})(?![\w-])
porkbun-key        sk1_|pk1_                                      [0-9a-f]{64}
yandex-token       y0_                                            [\w-]{50,70}
mercadopago-token  APP_USR-                                       \d{10,20}-\d{6}-[0-9a-f]{32}-\d{6,12}
openssh-key        b3BlbnNzaC1rZXktdjEA                           [A-Za-z0-9+/]{40,8000}={0,2}
nostr-key          nsec1                                          [a-z0-9]{58}(?![A-Za-z0-9])
mandrill-key       md-                                            [A-Za-z0-9_-]{22}(?![\w-])
nightfall-key      NF-                                            (?:[0-9a-f]{32}|[0-9A-F]{32})(?![A-Za-z0-9])
"""
"""Forms with a fixed prefix, a line each: the rule, the prefixes, and a pattern of the rest, separated by blanks.
"""
_LABELS = {
    "aws-key-id": "AWS_KEY",
    "sendinblue-key": "BREVO_KEY",
    "1password-token": "ONEPASSWORD_TOKEN",
    "1password-key": "ONEPASSWORD_KEY",
}
"""The words in pseudonyms that are not the name of the rule in capitals."""


def _prefixed(row: str) -> TokenForm:
    rule, prefixes, body = row.split()
    label = _LABELS.get(rule) or rule.upper().replace("-", "_")
    return TokenForm(rule, label, f"(?:{prefixes}){body}", tuple(prefixes.split("|")))


_PREFIXED = tuple(map(_prefixed, _PREFIXED_TEXT.strip().splitlines()))
_DOTTED = (
    TokenForm("discord-token", "DISCORD_TOKEN", r"[MNO][\w-]{22,28}\.[\w-]{6}\.[\w-]{27,40}"),
    TokenForm("telegram-token", "TELEGRAM_TOKEN", r"\d{8,10}:AA[\w-]{32,35}(?![\w-])"),
    TokenForm("sendgrid-key", "SENDGRID_KEY", r"SG\.[\w-]{20,32}\.[\w-]{16,64}|SG\.[\w=.-]{66}"),
    TokenForm(
        "jwt",
        "JWT",
        r"eyJ[\w-]{17,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?|eyJ[\w-]{17,}\.[\w-]*\.[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}",
    ),
    TokenForm("google-token", "GOOGLE_TOKEN", r"ya29\.[\w-]{20,1000}"),
    TokenForm("vault-token", "VAULT_TOKEN", r"hv[sbr]\.[\w-]{20,300}|s\.[A-Za-z0-9]{24}(?![\w-])"),
    TokenForm("facebook-token", "FACEBOOK_TOKEN", r"\d{15,17}\|(?=[\w-]{0,39}[0-9])[\w-]{27,40}(?![\w-])"),
    TokenForm(
        "doppler-token",
        "DOPPLER_TOKEN",
        r"dp\.(?:pt|st|ct|sa|scim|audit)\.(?:[a-z0-9_-]{2,35}\.)?[A-Za-z0-9]{40,44}",
    ),
    TokenForm("dynatrace-token", "DYNATRACE_TOKEN", r"dt0[a-z]\d\d\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{64}"),
    TokenForm("dropbox-token", "DROPBOX_TOKEN", r"sl\.(?:u\.)?[\w-]{60,1500}"),
    TokenForm("terraform-token", "TERRAFORM_TOKEN", r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,70}"),
    TokenForm("airtable-token", "AIRTABLE_TOKEN", r"pat[A-Za-z0-9]{14}\.[0-9a-z]{64}"),
    TokenForm("harness-token", "HARNESS_TOKEN", r"(?:pat|sat)\.[\w-]{22}\.[0-9A-Za-z]{24}\.[A-Za-z0-9]{20}"),
    TokenForm("mapbox-token", "MAPBOX_TOKEN", r"[sp]k\.eyJ[\w-]{40,120}\.[\w-]{20,30}"),
    TokenForm("infisical-token", "INFISICAL_TOKEN", r"st\.[0-9a-f]{24}\.[0-9a-f]{32}\.[0-9a-f]{32}"),
    TokenForm("stackhawk-key", "STACKHAWK_KEY", r"hawk\.[\w-]{20}\.[\w-]{20}(?![\w-])"),
    TokenForm("zoho-token", "ZOHO_TOKEN", r"1000\.[0-9a-f]{32}\.[0-9a-f]{32}"),
    TokenForm("slack-token", "SLACK_TOKEN", r"xoxe\.xox[bp]-\d-[A-Za-z0-9-]{60,250}"),
    TokenForm("openshift-token", "OPENSHIFT_TOKEN", r"sha256~[\w-]{43}(?![\w-])"),
    TokenForm("amazon-mws-token", "AMAZON_MWS_TOKEN", r"amzn\.mws\.[0-9a-f]{8}-[0-9a-f-]{27}"),
    TokenForm("yandex-token", "YANDEX_TOKEN", r"t1\.[\w-]{20,300}={0,2}\.[\w-]{60,120}={0,2}"),
    TokenForm("cloudflare-key", "CLOUDFLARE_KEY", r"v1\.0-[0-9a-f]{24}-[0-9a-f]{146}"),
    TokenForm("voiceflow-key", "VOICEFLOW_KEY", r"VF\.(?:DM\.|WS\.)?[0-9a-f]{24}\.[A-Za-z0-9]{16}(?![\w-])"),
    TokenForm("amazon-oauth-secret", "AMAZON_OAUTH_SECRET", r"amzn1\.oa2-cs\.v1\.[0-9a-f]{64}"),
    TokenForm("teamwork-token", "TEAMWORK_TOKEN", r"tkn\.v1_[\w-]{40,120}={0,2}"),
    TokenForm("mailersend-token", "MAILERSEND_TOKEN", r"mlsn\.[0-9a-f]{64}"),
    TokenForm("snyk-token", "SNYK_TOKEN", r"snyk_[a-z]{2,6}\.[0-9a-f]{8}\.[\w-]{40,120}"),
)
FORMS = (*_PREFIXED, *_DOTTED)
"""All forms. `TokenForm` says how to add one. If two match, the first one names the token."""

BEFORE = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbf])|(?<=%[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})"
    r"|(?<=\[[0-9]m)|(?<=\[[0-9]{2}m))"
)
"""What may precede a token: no letter or digit, unless it ends an escape of JSON, a URL or a terminal."""


def _any(before: str, forms: tuple[TokenForm, ...]) -> re.Pattern[str]:
    return re.compile(before + "(?:" + "|".join(f"({form.pattern})" for form in forms) + ")", re.ASCII)


class _Patterns(NamedTuple):
    """The forms as patterns. To compile them takes longer than most commands, so it is done at first use."""

    in_run: re.Pattern[str]
    in_escaped: re.Pattern[str]
    dotted: re.Pattern[str]


@cache
def _patterns() -> _Patterns:
    return _Patterns(
        in_run=_any("(?<![A-Za-z0-9])", _PREFIXED),
        in_escaped=_any(BEFORE, _PREFIXED),
        dotted=_any(BEFORE, _DOTTED),
    )


_lead = re.compile(
    r"(?:SG|ya29|hv[sbr]|dp\.[a-z]{2,5}(?:\.[a-z0-9_-]{2,35})?|dt0[a-z]\d\d|sl|sl\.u|[A-Za-z0-9]{14}\.atlasv1|pat[A-Za-z0-9]{14}|[ps]at|hawk|st|1000|xoxe|"
    r"amzn\.mws|amzn1\.oa2-cs\.v1|mlsn|tkn|VF(?:\.DM|\.WS)?|s|t1|snyk_[a-z]{2,6}\.[0-9a-f]{8}|[ps]k|v1)\.$"
    r"|[0-9]{8,10}:$|[0-9]{15,17}\|$|sha256~$",
    re.ASCII,
)
"""The part of a dotted form before its first long run."""
_lead_backwards = re.compile(
    r"\.(?:GS|92ay|[sbr]vh|(?:[a-z0-9_-]{2,35}\.)?[a-z]{2,5}\.pd|\d\d[a-z]0td|ls|u\.ls|1vsalta\.[A-Za-z0-9]{14}|[A-Za-z0-9]{14}tap|"
    r"ta[ps]|kwah|ts|0001|exox|swm\.nzma|1v\.sc-2ao\.1nzma|nslm|nkt|(?:MD\.|SW\.)?FV|s|1t|[0-9a-f]{8}\.[a-z]{2,6}_kyns|k[ps]|1v)"
    r"|:[0-9]{8}|\|[0-9]{15}|~652ahs",
    re.ASCII,
)
"""What `_lead` matches, read from its end: most dots are rejected by it in a tenth of the time of a search."""
_turn = re.compile(r"(?<=[a-z])[A-Z]|(?<=[A-Z])[a-z]")
_LEAD_LENGTH = 48
_LIKE_NAMES = ("payment-key", "openai-key", "freemius-key", "crates-token", "vault-token", "stackhawk-key")
"""Rules whose tokens must look random, because names begin like them."""
_DIGEST = re.compile(r"(?:[a-z]{2,20}[_-]){0,8}[0-9a-f]{1,31}")
_LONG_DIGEST = re.compile(r"[0-9a-f]{32,64}")
_OF_SECRET = re.compile(r"(?i)[_-](?:secret|token)[_-]$")
_RESTRICTED = re.compile(r"[_-](?:access|private)[_-]$")
"""The end of a name of a resource, to which digests may be joined: `registry-access-`."""
_POD = re.compile(r"(?:.{0,80}-)?[bcdfghjklmnpqrstvwxz2456789]{8,10}-[bcdfghjklmnpqrstvwxz2456789]{5}")
"""A name of a Kubernetes pod: the name of its set, a hash of the template, five random characters."""
_NAMING = ("live", "test", "prod", "secret", "key", "token", "pat", "sk", "api", "access", "private")
_named = re.compile(
    rf"(?i)(?<![A-Za-z0-9])[a-z][a-z0-9]{{1,15}}(?:[_-][a-z]{{2,8}})?[_-](?:{'|'.join(_NAMING)})[_-]([\w-]{{16,120}})",
    re.ASCII,
)


@cache
def token_starts() -> dict[str, re.Pattern[str]]:
    """Return literals in lower case, and what must match at one of them in a run for `tokens_in_run` to examine
    the run.
    """
    bodies: dict[str, list[str]] = {}
    for form in _PREFIXED:
        # `ace` is in many words, `ace0` to `acef` are in few.
        following = "0123456789abcdef" if ")[0-9a-f" in form.pattern else ("",)
        for prefix in form.prefixes:
            # Only `broken_token_at` can find a token whose prefix is more than one run.
            if re.fullmatch(r"[\w-]+", prefix):
                for digit in following:
                    bodies.setdefault(prefix.lower() + digit, []).append(form.pattern)
    starts = {
        start: re.compile(f"{BEFORE}(?:{'|'.join(patterns)})", re.ASCII) for start, patterns in bodies.items()
    }
    names = re.compile(rf"(?i)[_-](?:{'|'.join(_NAMING)})[_-](?=[\w-]{{0,119}}[0-9])[\w-]{{16}}", re.ASCII)
    starts |= {f"{left}{name}{right}": names for name in _NAMING for left in "_-" for right in "_-"}
    starts["eyj"] = re.compile(r"eyJ[\w-]{17}", re.ASCII)  # a JSON Web Token begins with {" in base64
    return starts


LONG_RUN = 20
"""The minimum length of a run that is examined: one part of each token has this length."""


@cache
def _whole() -> re.Pattern[str]:
    return re.compile("|".join(f"({form.pattern})" for form in FORMS), re.ASCII)


DOTS = ".:~|"
"""The separator of the runs of a dotted token."""


def lead_before(text: str, start: int) -> int:
    """Return the length of the first runs of a dotted token that end at `start`; 0 if there are none."""
    before = text[max(start - _LEAD_LENGTH, 0) : start]
    lead = _lead.search(before) if _lead_backwards.match(before[::-1]) else None
    return 0 if lead is None else lead.end() - lead.start()


def tokens_in_run(text: str, start: int, end: int, begins: Sequence[int]) -> list[tuple[int, int, str]]:
    """Return the tokens in a run of letters, digits, `_` and `-`, as (start, end, rule).

    Tokens of several runs with dots between them are found by the first long run. `begins` are the places in the
    run, in order, at which `token_starts` match; a token with a prefix begins nowhere else.
    """
    before = text[start - 1 : start] if start else ""
    spans: list[tuple[int, int, str]] = []
    if before and before in DOTS and (lead := lead_before(text, start)):
        _dotted_at(text, start - lead, spans)
    if 22 < end - start < 30 and text[start] in "MNO" and text[end : end + 1] == ".":
        _dotted_at(text, start, spans)
    at = text.find("eyJ", start, end)
    if at >= 0:
        _dotted_at(text, at, spans)
    if not spans and any(text[at] in "_-" for at in begins):
        _named_token(text, start, end, spans)
    pattern = _patterns().in_escaped if before in ("\\", "%", "[") else _patterns().in_run
    reached = start
    for at in begins:
        match = pattern.match(text, at, end) if at >= reached and text[at] not in "_-" else None
        if match is None:
            continue
        reached = match.end()
        # The part after the prefix may contain characters that end a run, such as / or +: match beyond `end`.
        match = pattern.match(text, match.start()) or match
        rule, token = _PREFIXED[(match.lastindex or 1) - 1].rule, match.group()
        # `sk-` begins names of CSS classes too, `sk_` names in code, `pypi-` file names.
        is_generated = (
            any(map(str.isdigit, token)) or len(_turn.findall(token)) > 6
            if len(token) < 40
            else count_random_characters(token) >= 8
        )
        if not is_placeholder(token) and (looks_random(token) or (is_generated and rule not in _LIKE_NAMES)):
            spans.append((match.start(), match.end(), rule))
    return spans


def _named_token(text: str, start: int, end: int, spans: list[tuple[int, int, str]]) -> None:
    """Add a token that names itself (`acme_live_…`), if what follows the name is random."""
    match = _named.search(text, start, end)
    if match is not None and not is_placeholder(match[1]) and any(map(str.isdigit, match[1])):
        random, name = count_random_characters(match[1]), text[match.start() : match.start(1)]
        digest = _LONG_DIGEST.fullmatch(match[1]) is not None
        # Names of packages end in digests: `log4j-api-c404b33d3a8ce0d8`.
        if (
            ((random >= 14 and random * 3 >= len(match[1]) * 2) or (digest and _OF_SECRET.search(name)))
            and not (_DIGEST.fullmatch(match[1]) or _POD.fullmatch(match[1]))
            and not (digest and _RESTRICTED.search(name))
        ):
            spans.append((match.start(), match.end(), "api-token"))


def _dotted_at(text: str, at: int, spans: list[tuple[int, int, str]]) -> None:
    match = _patterns().dotted.match(text, at)
    if match is None or is_placeholder(match.group()):
        return
    rule = _DOTTED[(match.lastindex or 1) - 1].rule
    if rule not in _LIKE_NAMES or looks_random(match.group()):
        spans.append((match.start(), match.end(), rule))


_BROKEN = tuple(row.split() for row in _PREFIXED_TEXT.strip().splitlines() if re.search(r"//|\[[^]]*[=+/.]", row))
BROKEN_PREFIXES = tuple(sorted({prefix.lower().encode() for row in _BROKEN for prefix in row[1].split("|")}))
"""Prefixes, in lower case, of tokens in which `/`, `+`, `=` or `.` may end a run before it is long."""


@cache
def _broken() -> re.Pattern[str]:
    return re.compile(BEFORE + "(?:" + "|".join(f"((?:{row[1]}){row[2]})" for row in _BROKEN) + ")", re.ASCII)


def broken_token_at(text: str, position: int) -> tuple[int, int, str] | None:
    """Return where such a token is that begins at `position`, and its rule."""
    match = _broken().match(text, position)
    if match is None or is_placeholder(match.group()) or not looks_random(match.group()):
        return None
    return match.start(), match.end(), _BROKEN[(match.lastindex or 1) - 1][0]


def pseudonym_label(value: str) -> str:
    """Return the word for a value's pseudonym: that of its form, otherwise SECRET."""
    match = _whole().fullmatch(value)
    return "SECRET" if match is None else FORMS[(match.lastindex or 1) - 1].label


def has_token_form(value: str) -> bool:
    """Return whether the whole value has one of the forms."""
    return _whole().fullmatch(value) is not None
