"""The assertions that `twins` replaces: methods of unittest, functions of nose and numpy, and expected
exceptions.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from understudy.checks.twins.names import name_of
from understudy.util.python_syntax import unparse

UNITTEST_METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertSetEqual",
            "assertTupleEqual", "assertSequenceEqual", "assertMultiLineEqual",
        ),
        ("==", ("first", "second")),
    ),
    "assertNotEqual": ("!=", ("first", "second")),
    "assertNotEquals": ("!=", ("first", "second")),
    "assertCountEqual": ("count", ("first", "second")),
    "assertItemsEqual": ("count", ("first", "second")),
    "assertAlmostEqual": ("approx", ("first", "second")),
    "assertAlmostEquals": ("approx", ("first", "second")),
    "assertTrue": ("true", ("expr",)),
    "assert_": ("true", ("expr",)),
    "assertFalse": ("false", ("expr",)),
    "assertIs": ("is", ("expr1", "expr2")),
    "assertIsNot": ("is not", ("expr1", "expr2")),
    "assertIsNone": ("none", ("obj",)),
    "assertIsNotNone": ("not none", ("obj",)),
    "assertIn": ("in", ("member", "container")),
    "assertNotIn": ("not in", ("member", "container")),
    "assertGreater": (">", ("a", "b")),
    "assertGreaterEqual": (">=", ("a", "b")),
    "assertLess": ("<", ("a", "b")),
    "assertLessEqual": ("<=", ("a", "b")),
    "assertIsInstance": ("isinstance", ("obj", "cls")),
    "assertNotIsInstance": ("not isinstance", ("obj", "cls")),
    "assertRegex": ("search", ("text", "expected_regex")),
    "assertRegexpMatches": ("search", ("text", "expected_regex")),
    "assertNotRegex": ("not search", ("text", "unexpected_regex")),
}  # fmt: skip
"""Methods of unittest's test cases: what they assert, and the names of their arguments."""

ASSERTION_FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(("assert_equal", "assert_equals", "eq_", "eq", "assert_eq", "assert_array_equal"), "=="),
    **dict.fromkeys(("assert_allclose", "assert_almost_equal", "assert_array_almost_equal"), "approx"),
    "ok_": "true",
    "assert_true": "true",
    "assert_false": "false",
}
"""Functions of nose and numpy, where the file does not define its own."""

ASSERTION_PREFIXES = ("assert", "check", "ensure", "expect", "verify")
"""How the names of functions from elsewhere begin that assert something of their own."""
_MATCHING_METHODS = frozenset(
    {"match", "fnmatch_lines", "fnmatch_lines_random", "re_match_lines", "re_match_lines_random"}
)
"""Methods of pytest's objects that fail a test where nothing matches, so that their results are not used."""

RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp"})
"""Functions that expect an exception."""
WARNS = frozenset({"warns", "assertWarns", "assertWarnsRegex"})
"""Functions that expect a warning."""
MOCK_ASSERTIONS = {
    "assert_called_once": "once",
    "assert_not_called": "never",
    "assert_called_once_with": "only",
    "assert_awaited_once_with": "only",
    "assert_called_with": "last",
    "assert_has_calls": "some",
}
"""Assertions of mocks, and which of its calls they look at."""
COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
"""The comparisons that assertions make, as they are written in sites."""
SWAPPED_OPERATORS = {
    "==": "==",
    "!=": "!=",
    "<": ">",
    "<=": ">=",
    ">": "<",
    ">=": "<=",
    "in": "holds",
    "not in": "lacks",
}
"""The operator that says the same about the operands in the other order."""


def is_evaluable(value: ast.expr) -> bool:
    """Return whether `ast.literal_eval` can evaluate an expression."""
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def may_assert(call: ast.Call) -> bool:
    """Return whether a call whose result is not used may assert something, to judge by its name."""
    name = name_of(call)
    return name.lower().startswith(ASSERTION_PREFIXES) or (
        isinstance(call.func, ast.Attribute) and name in _MATCHING_METHODS
    )


def expects_exception(expression: ast.expr) -> bool:
    """Return whether an expression is a call like `pytest.raises(E)`."""
    return isinstance(expression, ast.Call) and name_of(expression) in RAISES | WARNS and bool(expression.args)


def has_wildcard(call: ast.Call) -> bool:
    """Return whether an argument of a call equals many values: `ANY`, or an approximation."""
    return any(
        (isinstance(node, ast.Call) and name_of(node) == "approx")
        or (isinstance(node, ast.Name) and node.id == "ANY")
        or (isinstance(node, ast.Attribute) and node.attr == "ANY")
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        for node in ast.walk(value)
    )


def class_names(kinds: ast.expr | None) -> tuple[str, ...]:
    """Return the names of classes, without their modules; () if one of them is not a plain name."""
    match kinds:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return (name,)
        case ast.Tuple(elts=elements):
            names = [class_names(element) for element in elements]
            return tuple(name for nested in names for name in nested) if all(names) else ()
        case _:
            return ()


def approximation(value: ast.expr) -> ast.Call | None:
    """Return the `approx(…)` call that a value is; None for other values."""
    return value if isinstance(value, ast.Call) and name_of(value) == "approx" and value.args else None


def tolerances_of(call: ast.Call) -> str:
    """Return the tolerances that a call names, as the source of a dict."""
    tolerances = {keyword.arg or "": keyword.value for keyword in call.keywords}
    if name_of(call) == "approx":
        tolerances |= dict(zip(("rel", "abs"), call.args[1:], strict=False))
    if name_of(call).startswith("assertAlmost") and len(call.args) > 2:
        tolerances["places"] = call.args[2]
    return repr({name: ast.literal_eval(value) for name, value in tolerances.items() if is_evaluable(value)})


def only_fails(statement: ast.stmt) -> bool:
    """Return whether a statement does nothing but fail the test."""
    match statement:
        case ast.Raise(exc=ast.Name(id="AssertionError") | ast.Call(func=ast.Name(id="AssertionError"))):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="pytest" | "self"), attr="fail"))):
            return True
        case ast.Assert(test=ast.Constant(value=False | 0)):
            return True
        case _:
            return False


def is_fixture(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is decorated as a fixture."""
    return any("fixture" in unparse(decorator) for decorator in node.decorator_list)
