"""Observes the comparisons that a test file evaluates itself, outside of what `twins` rewrites as assertions.

A test may compare first and decide later: `a == 1 or b == 2`, `failed += got != wanted`, helpers that return a
comparison. The expected value then stays in the tested process, but the compared values are observed. So an object
that only claims to be equal is noticed, because the gold patch has a builtin value in its place.
"""

from __future__ import annotations

import ast
from typing import Any, cast

from understudy.checks.twins.assertions import COMPARISONS

_MAX_ASSERTIONS = 10_000  # the numbers of a file's assertions are below this one
_MAX_COMPARISONS = 10_000
FIRST_OPERAND = _MAX_ASSERTIONS + _MAX_COMPARISONS
"""The first number of operands: those before it are of the assertions and comparisons of a file."""
_OBSERVED_OPERATORS = frozenset({"==", "!=", "in", "not in"})


def number_comparisons(tree: ast.Module) -> None:
    """Number all comparisons of a file, before anything is rewritten: versions of it must agree in the numbers."""
    comparisons = (node for node in ast.walk(tree) if isinstance(node, ast.Compare) and len(node.ops) == 1)
    observed = (node for node in comparisons if COMPARISONS[type(node.ops[0])] in _OBSERVED_OPERATORS)
    for number, node in enumerate(observed):
        cast("Any", node).number = number


def observe_comparisons(tree: ast.Module, first: int) -> dict[int, str]:
    """Replace the numbered comparisons that are left by calls of `_result_`; return their operators by number."""
    observer = _ComparisonObserver(first + _MAX_ASSERTIONS)
    observer.visit(tree)
    return observer.operators


class _ComparisonObserver(ast.NodeTransformer):
    def __init__(self, first: int) -> None:
        self.operators: dict[int, str] = {}
        self._first = first

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        number = getattr(node, "number", _MAX_COMPARISONS)
        if number >= _MAX_COMPARISONS:
            return node
        operator = self.operators[self._first + number] = COMPARISONS[type(node.ops[0])]
        arguments = [ast.Constant(self._first + number), ast.Constant(operator), node.left, node.comparators[0]]
        return ast.Call(ast.Name("_result_", ast.Load()), arguments, [])
