"""The search for secrets: one pass over the text, in windows."""

import pytest

from understudy.redact.betterleaks import token_lines
from understudy.redact.search import find_secrets
from understudy.redact.tokens import DOTS, FORMS, LONG_RUN, token_starts

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
            prefix.lower() in token_starts() for prefix in form.prefixes if prefix.isascii() and "/" not in prefix
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
