"""Here-documents of shell scripts: which are found, and how their texts are replaced."""

from __future__ import annotations

import subprocess

import pytest

from understudy.checks.here_documents import here_documents, with_texts

SCRIPT = """\
set -e
x=$((1 << 2))
cat <<< EOF
python - "$x" <<EOF
assert 1 << 2 == 4
EOF
if true; then
\tpython3 - <<-'END' && echo "ok"
\tassert r"$x`\\d" != '<<EOF'
\tEND
fi
cat <<A <<'B C' >/dev/null
first
A
second $x
B C
cat <<EOF
$x
EOF
"""


def test_texts_that_the_shell_does_not_change_are_found():
    assert [each.text for each in here_documents(SCRIPT)] == [
        "assert 1 << 2 == 4\n",
        "assert r\"$x`\\d\" != '<<EOF'\n",
        "first\n",
        "second $x\n",
    ]


@pytest.mark.parametrize("script", ["", "cat <<EOF", "cat <<EOF\nno end\n", "cat <<EOF\nx\n EOF\n", "x=1<<2\n"])
def test_without_an_end_there_is_none(script: str):
    assert here_documents(script) == []


def test_the_shell_passes_on_replaced_texts_unchanged():
    script = "cat <<EOF\nold\nEOF\nif true; then\n\tcat <<-B\n\told\n\tB\nfi\n"
    replaced = with_texts(script, {0: "$(false) `x` \\\\ 'a'\n", 1: "if x:\n    <<EOF\n"})
    shown = subprocess.run(["sh", "-c", replaced], capture_output=True, text=True, check=True)
    assert shown.stdout == "$(false) `x` \\\\ 'a'\nif x:\n    <<EOF\n"
    assert [each.text for each in here_documents(replaced)] == ["$(false) `x` \\\\ 'a'\n", "if x:\n    <<EOF\n"]


def test_a_text_with_the_delimiter_in_it_is_left_out():
    script = "cat <<EOF\nold\nEOF\n"
    assert with_texts(script, {0: "a\nEOF\nb\n"}) == script
