"""The search for secrets: one pass over the text, in windows."""

from random import Random

import pytest

from understudy.redact import tokens
from understudy.redact.betterleaks import token_lines
from understudy.redact.redactor import Redactor
from understudy.redact.search import find_secrets, search_again, search_texts
from understudy.redact.tokens import DOTS, FORMS, LONG_RUN, lead_before, token_starts

from support.secrets import KINDS, clean, drawn, planted

TOKEN = "ghp_" + "k7Qd2mXz9RtLw4Vb8NcY3hPf6JsG1aTe5UoW"


@pytest.mark.parametrize("moved", range(-44, 12, 4))
def test_a_secret_is_found_once_wherever_it_lies_between_windows(moved: int) -> None:
    before = "lorem ipsum " * ((1 << 18) // 12 + 1)
    text = before[: (1 << 18) + moved] + " " + TOKEN + " dolor"
    start = text.index(TOKEN)
    assert [(hit.start, hit.end) for hit in find_secrets(text)] == [(start, start + len(TOKEN))]


def test_non_ascii_text_before_a_secret_does_not_shift_the_match() -> None:
    text = "ключ доступа 🔑 ıİ " + TOKEN
    assert [hit.value for hit in find_secrets(text)] == [TOKEN]


def test_every_secret_form_has_a_searched_prefix_or_contains_a_dot() -> None:
    assert LONG_RUN <= 20
    for form in FORMS:
        starts = [
            any(start.startswith(prefix.lower()) for start in token_starts())
            for prefix in form.prefixes
            if prefix.isascii() and "/" not in prefix
        ]
        dotted = any(dot in form.pattern for dot in DOTS)
        assert all(starts) and (starts or dotted or "1//0" in form.prefixes), form


@pytest.mark.parametrize(
    ("line", "searched"),
    [
        ("key abcdefgh1jklmnop", True),
        ("key abcdefgh1jklmno", False),  # fifteen characters
        ("key abcdefghijklmnop", False),  # sixteen without a digit
        ("key abcdefghijklmnopqrstuvwxyzabcd", True),  # thirty
        ("src/a/very/long/path/without/any/run/of/thirty", False),
        ("é abcdefgh1jklmnopé", True),
        ("aaaaaaaaaaaaaaaa abcdefgh1jklmnop", True),  # the second run of the line
    ],
)
def test_only_lines_that_could_hold_a_token_are_searched(line: str, searched: bool) -> None:
    assert token_lines(line) == (line if searched else "")
    assert token_lines(f"short\n{line}\n\nlast") == (line if searched else "")
    assert token_lines(f"{line}\n{line}") == (f"{line}\n{line}" if searched else "")


def texts_with_secrets(seed: int) -> list[str]:
    dice = Random(seed)
    places = [one.text for one in planted(seed=seed, each=2)]
    talk = clean(40_000, seed=seed).split("\n\n")
    texts: list[str] = []
    for _ in range(40):
        some = dice.sample(places, dice.randrange(4)) + dice.sample(talk, dice.randrange(1, 5))
        dice.shuffle(some)
        texts.append(dice.choice(("\n", "\n\n", " ", "\\n", "\r\n", "ł")).join(some))
    return [*texts, "", "key", *places]


@pytest.mark.parametrize("seed", range(4))
def test_texts_that_are_searched_together_have_the_secrets_that_each_has_alone(seed: int) -> None:
    texts = texts_with_secrets(seed)
    texts.insert(3, "/home/zuzanna/a\n" * 40_000)  # longer than what is searched at once
    together = [matches for matches, _ in search_texts(texts)]
    assert together == [find_secrets(text) for text in texts]
    assert sum(map(bool, together)) > len(KINDS)


@pytest.mark.parametrize("seed", range(4))
def test_a_search_after_edits_finds_what_a_search_of_the_whole_text_finds(seed: int) -> None:
    dice = Random(seed)
    pieces = [
        "",
        "[SECRET_12ab34]",
        "user_12ab34",
        "x",
        " = ",
        "password=",
        "://",
        " ghp_",
        "\n",
        "s.",
        "eyJ",
        "'",
    ]
    matched = 0
    texts = texts_with_secrets(seed)
    for text, (matches, candidates) in zip(texts, search_texts(texts), strict=True):
        for _ in range(3):  # edits of what was edited
            if candidates is None:
                break
            # At some secrets, as redaction edits, and anywhere else.
            places = [match[:2] for match in matches if dice.random() < 0.3]
            places += [(start := dice.randrange(len(text) + 1), start + 9) for _ in range(dice.randrange(4))]
            edits: list[tuple[int, int, int]] = []
            new: list[str] = []
            last = 0
            for start, end in sorted(places):
                if start >= last:
                    piece = dice.choice(pieces)
                    new += (text[last:start], piece)
                    last = min(end, len(text))
                    edits.append((start, last, len(piece)))
            text = "".join(new) + text[last:]
            matches, candidates = search_again(text, candidates, edits)
            assert sorted(matches) == sorted(find_secrets(text)), (text, edits)
            matched += bool(edits) and bool(matches)
    assert matched > 20


def test_what_is_replaced_does_not_depend_on_the_texts_that_are_redacted_with_it() -> None:
    # Both end where the value ends: another text behind it must not count as what follows it.
    texts = ["\"sonar.login', '826de5590c75919a8317fdface58206eebe7ebbc", "nothing to see"]
    together = Redactor(b"key" * 11, betterleaks=False).value(texts)
    assert together == [Redactor(b"key" * 11, betterleaks=False).text(text) for text in texts]
    assert "826de5590c75" not in together[0]


LEADS = """
SG ya29 hvs hvx dp.pt dp.pt.dev_us dt0c01 sl sl.u pat sat hawk st 1000 xoxe amzn.mws amzn1.oa2-cs.v1 mlsn
VF VF.DM VF.WS s t1 sk pk v1 snyk_api.0123abcd 12345678 123456789012345 sha256 a.atlasv1
"""


def test_the_lead_of_a_token_reads_the_same_from_both_ends() -> None:
    dice = Random(3)
    parts = LEADS.split()
    seen = 0
    for _ in range(20_000):
        text = drawn(dice, "abZ09_-. /", dice.randrange(16)) + dice.choice(parts)
        text += drawn(dice, "a9", dice.choice((0, 0, 1, 14))) + dice.choice((".", ".", ":", "|", "~", "x"))
        lead = tokens._lead.search(text[-48:])
        assert lead_before(text, len(text)) == (len(lead.group()) if lead else 0), text
        seen += lead is not None
    assert 2_000 < seen < 18_000
