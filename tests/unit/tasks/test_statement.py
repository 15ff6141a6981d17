"""The statement of a mutated task, and the diffs it comes with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.tasks.generate.package_instruction import FailedCheck, compose, leaks_fault, normalise_message
from understudy.util.diffs import unified

from support import example_count

MESSAGE = """\
    def test_add():
        a = 1
>       assert add(a,
                   2) == 3
E       assert 4 == 3
E        +  where 4 = add(1, 2)
"""


def test_a_statement_shows_the_call_the_result_and_the_expectation() -> None:
    text = compose("pkg", "1.0", "pkg.core", [FailedCheck("t.py::test_add[1]", MESSAGE)])
    assert "`pkg.core`" in text
    assert "pkg 1.0" in text
    assert "def test_add():\n    a = 1\n    assert add(a,\n               2) == 3\n" in text
    assert "assert 4 == 3\n +  where 4 = add(1, 2)" in text


def test_each_function_is_shown_once_and_the_rest_counted() -> None:
    failures = [FailedCheck(f"t.py::test_{name}[{n}]", MESSAGE) for name in "abcdef" for n in range(3)]
    text = compose("pkg", "1.0", "pkg.core", failures)
    assert "6 checks" in text
    assert text.count("```python") == 4
    assert "2 further checks" in text


def test_a_failure_outside_the_test_file_shows_only_the_error() -> None:
    text = compose("pkg", "1.0", "pkg.core", [FailedCheck("t.py::A::test_x", "E   TypeError: no")])
    assert "`test_x` gets\n\n```text\nTypeError: no\n```" in text


def test_code_fences_are_longer_than_those_in_quoted_text() -> None:
    text = compose("pkg", "1.0", "pkg", [FailedCheck("t.py::test_x", "E   ```` and ```")])
    assert "`````text\n```` and ```\n`````" in text


def test_leaks_are_found_despite_whitespace_differences() -> None:
    assert leaks_fault("so it says\n  return   a + b, always", ["    return a + b"])
    assert not leaks_fault("so it says return a - b", ["    return a + b", "", "  pass", "else:", "return"])


def test_addresses_and_paths_in_messages_are_normalised() -> None:
    normalised = normalise_message("<f at 0x7f00aa11> in /work/x.py and /tmp/pytest-1/a.txt", "/work")
    assert normalised == "<f at 0x…> in ./x.py and /…"


LINES = st.text(st.sampled_from("ab \t\r\x0c\u2028é\\"), max_size=6)
TEXTS = st.tuples(st.lists(LINES, max_size=12), st.booleans()).map(
    lambda parts: "\n".join(parts[0]) + ("\n" if parts[1] else "")
)


@settings(max_examples=example_count(60), deadline=None)
@given(old=TEXTS, new=TEXTS)
def test_diffs_apply_byte_for_byte(old: str, new: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not old or not new or old == new:
        return
    directory: Path = tmp_path_factory.mktemp("diff")
    (directory / "f.py").write_bytes(old.encode())
    patch = unified({"f.py": old}, {"f.py": new})
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=directory, input=patch.encode(), check=True)
    assert (directory / "f.py").read_bytes() == new.encode()


def test_equal_files_have_no_diff() -> None:
    assert unified({"a": "x\n", "b": "y"}, {"a": "x\n", "b": "y"}) == ""
