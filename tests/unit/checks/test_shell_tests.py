"""What a tested program prints is one operand of a check script's tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from understudy.checks.shell_tests import is_shell_script, with_one_word_operands

FORGED = "1 -o 1"
SCRIPTS = {
    "substitution": "[ $(app) = 42 ]",
    "test": "test $(app) = 42",
    "backquotes": "[ `app` = 42 ]",
    "variable": "x=$(app)\n[ $x = 42 ]",
    "braces": "x=$(app); [ ${x} -eq 42 ]",
    "condition": "if ! [ 42 = $(app) ]; then exit 1; fi",
    "loop": "for x in $(app); do :; done; while [ $(app) != 42 ]; do exit 1; done",
    "behind a pipe and a list": "echo a | grep -q a && { [ $(app | cat) = 42 ] || exit 1; }",
    "nested": 'x="a b"; [ $(if [ "$x" ]; then app; fi) = "4""2" ]',
    "positional parameter": 'set -- $(app); f() { [ $1 = 42 ]; }; f "$*"',
    "words around it": "[ x$(app)y = x42y ]",
    "after texts": "cat <<'EOF' >/dev/null\n[ it's $(\nEOF\n# it's\n"
    "echo 'a [ $(b' \"[ $(echo ')')\" >/dev/null\n[ $(app) = 42 ]",
    "continued": "[ \\\n $(app) \\\n = 42 ]",
    "in a function": "check() {\n  [ $(app $1) = $2 ]\n}\ncheck 1 42",
}


def run(script: str, prints: str, directory: Path, shell: str) -> bool:
    program = directory / "app"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{prints}'\n")
    program.chmod(0o755)
    done = subprocess.run(
        [shell, "-c", script],
        cwd=directory,
        env={"PATH": f"{directory}:/usr/bin:/bin"},
        check=False,
        capture_output=True,
    )
    return done.returncode == 0


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_that_a_program_prints_are_no_operators(name: str, shell: str, tmp_path: Path) -> None:
    script = with_one_word_operands(SCRIPTS[name])
    assert run(SCRIPTS[name], "42", tmp_path, shell)
    for right in ("42", " 42", "42  ", "42\n\n"):
        if name != "words around it" or right == "42":
            assert run(script, right, tmp_path, shell), (right, script)
    for wrong in ("41", FORGED, "", "= 42", "42 -o 42 = 42", "! x"):
        assert not run(script, wrong, tmp_path, shell), (wrong, script)


def test_the_unchanged_script_is_forged_this_way(tmp_path: Path) -> None:
    assert run(SCRIPTS["substitution"], FORGED, tmp_path, "bash")


@pytest.mark.parametrize(
    "script",
    [
        '[ "$(app)" = 42 ]',
        "[[ $(app) = 42 ]]",
        "[ $? -eq 0 ] && [ $# -gt 0 ]",
        "make test $(app)\necho [ $x ]",
        "case $x in\n  a) echo [ $x ] ;;\nesac",
        "x=$(app | sed 's/[ $]/_/')",
        "# [ $(app) = 42 ]\ncat <<'EOF'\n[ $(app) = 42 ]\nEOF\n",
        "[ $(app = 42 ]",
        "[ 'a = 42 ]",
        "cat <<EOF\n[ $(app) = 42 ]\n",
    ],
)
def test_everything_else_stays(script: str) -> None:
    assert with_one_word_operands(script) == script


def test_shell_scripts_are_known_by_name_or_first_line() -> None:
    assert is_shell_script(Path("a/test.sh"), b"")
    assert is_shell_script(Path("run"), b"#!/usr/bin/env bash\n")
    assert is_shell_script(Path("run"), b"#! /bin/sh -e\n")
    assert not is_shell_script(Path("run"), b"#!/usr/bin/env python3\n")
    assert not is_shell_script(Path("check.py"), b"")
