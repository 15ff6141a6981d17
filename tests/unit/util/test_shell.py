"""Shell text in tokens: words without their quotes, operators, here-documents, and broken text."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.util.shell import ShellSyntaxError, command_text, shell_tokens


def tokens(text: str) -> list[tuple[str, str]]:
    return [(token.kind, token.value) for token in shell_tokens(text)]


def test_words_operators_and_redirections():
    assert tokens("a 'b c'\"d\"\\ e 2>&1 >f && g # h\n| i") == [
        *(("word", "a"), ("word", "b cd e"), ("redirect", "2>&"), ("word", "1"), ("redirect", ">"), ("word", "f")),
        *(("operator", "&&"), ("word", "g"), ("operator", "\n"), ("operator", "|"), ("word", "i")),
    ]


def test_a_here_document_comes_behind_its_line():
    assert tokens("cat <<'A' <<-B; x\none $y\nA\n two\n\tB\nz") == [
        *(
            ("word", "cat"),
            ("redirect", "<<"),
            ("word", "A"),
            ("redirect", "<<-"),
            ("word", "B"),
            ("operator", ";"),
        ),
        *(("word", "x"), ("operator", "\n"), ("document", "one $y\n"), ("document", " two\n"), ("word", "z")),
    ]


def test_substitutions_stay_in_their_word():
    (first, second) = shell_tokens("a$(b 'c)' $(d))`e f` \"$(g)\"")
    assert first.value == first.raw == "a$(b 'c)' $(d))`e f`"
    assert first.substitutions == ("b 'c)' $(d)", "e f")
    assert (second.value, second.substitutions, second.literal) == ("$(g)", (), False)


@pytest.mark.parametrize("text", ["a 'b", 'a "b', "a $(b", "a `b", "a\\", "$(" * 50 + ")" * 50])
def test_what_is_not_closed(text: str):
    with pytest.raises(ShellSyntaxError):
        list(shell_tokens(text, strict=True))
    assert tokens(text)


@given(st.lists(st.text(st.characters(exclude_characters="\r"))))
def test_quoted_words_come_back(arguments: list[str]):
    assert [token.value for token in shell_tokens(shlex.join(arguments), strict=True)] == arguments


def test_a_command_as_a_list():
    assert command_text(["/bin/bash", "-lc", "a | b"]) == "a | b"
    assert command_text(["a", "b c"]) == "a 'b c'"
