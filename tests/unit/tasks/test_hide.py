"""Hiding tests: the named ones go, whole, and nothing else changes."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import TaskError
from understudy.tasks.generate.mutations import function_of, hide_tests

TEXT = """\
import pytest


@pytest.mark.parametrize("n", [1,
                               2])
def test_one(n):
    assert n


# why there is a second one
# on two lines
def test_two():
    assert "é" == 'é'  # end


class TestThings:
    def test_three(self):
        assert 3

    def test_four(self): assert 4


class TestAlone:

    async def test_five(self):
        pass


if True:
    def test_six():
        pass

X = 1
def test_last(): pass"""


def test_hiding_one_parameter_removes_the_whole_function() -> None:
    hidden = hide_tests(TEXT, ["t.py::test_one[2]"])
    assert hidden == TEXT[: TEXT.index("@pytest")] + TEXT[TEXT.index("# why") :]


def test_comments_above_a_hidden_function_are_removed() -> None:
    hidden = hide_tests(TEXT, ["t.py::test_two"])
    assert hidden == TEXT[: TEXT.index("# why")] + TEXT[TEXT.index("class TestThings") :]


def test_a_hidden_method_is_removed_and_others_stay() -> None:
    hidden = hide_tests(TEXT, ["t.py::TestThings::test_three"])
    assert "test_three" not in hidden
    assert "test_four" in hidden


@pytest.mark.parametrize(
    "hidden_tests", [["TestAlone::test_five"], ["TestThings::test_three", "TestThings::test_four"]]
)
def test_a_class_left_empty_stays_valid_python(hidden_tests: list[str]) -> None:
    hidden = hide_tests(TEXT, [f"t.py::{name}" for name in hidden_tests])
    assert hidden_tests[0].split("::")[1] not in hidden
    assert f"class {hidden_tests[0].split('::')[0]}" in hidden
    ast.parse(hidden)


def test_an_emptied_branch_gets_pass_and_the_last_function_is_removed() -> None:
    hidden = hide_tests(TEXT, ["t.py::test_six", "t.py::test_last"])
    assert hidden.endswith("if True:\n    pass\nX = 1\n")


@given(st.sets(st.sampled_from(["one[1]", "two", "six", "last", "T3", "T4", "T5"])))
def test_exactly_the_named_functions_are_removed(chosen: set[str]) -> None:
    names = {"T3": "TestThings::test_three", "T4": "TestThings::test_four", "T5": "TestAlone::test_five"}
    ids = {f"t.py::{names.get(name, f'test_{name}')}" for name in chosen}

    def functions(text: str) -> set[str]:
        return {
            node.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    hidden_names = {function_of(id).split("::")[-1] for id in ids}
    assert functions(hide_tests(TEXT, ids)) == functions(TEXT) - hidden_names


def test_crlf_is_kept() -> None:
    text = "def test_a():\r\n    pass\r\n\r\ndef test_b():\r\n    pass\r\n"
    assert hide_tests(text, ["t.py::test_a"]) == "def test_b():\r\n    pass\r\n"


def test_functions_that_use_a_hidden_test_are_removed() -> None:
    text = "def test_x(): pass\n\ndef test_y():\n    test_x()\n\ndef test_z():\n    test_y\n\ndef test_w(): pass\n"
    assert hide_tests(text, ["t.py::test_x"]) == "def test_w(): pass\n"


def test_an_inherited_test_is_removed_where_it_is_defined() -> None:
    text = "class A:\n    def test_x(self): pass\n    y = 1\n\n\nclass B(A, C): pass\n\n\nclass D(B, D): pass\n"
    assert hide_tests(text, ["t.py::D::test_x"]) == text.replace("    def test_x(self): pass\n", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class A(B):\n    pass\n", "no such test function"),
        ("def test_x(): pass\n\n\nif main:\n    test_x()\n", "outside of functions uses"),
        ("a = 1\ndef test_x():\n    pass\n", None),
        ("class A: \n    def test_x(self): pass\n", "no such test function"),
    ],
)
def test_tests_that_cannot_be_hidden_are_refused(text: str, message: str | None) -> None:
    if message is None:
        assert hide_tests(text, ["t.py::test_x"]) == "a = 1\n"
    else:
        with pytest.raises(TaskError, match=message):
            hide_tests(text, ["t.py::test_x"])
