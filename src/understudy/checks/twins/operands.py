"""Observes whose code decides what the arithmetic of a test file yields.

A test may compute with what it checks before it asserts anything: `abs(f(x) - e) / e < t`, helpers that return a
difference, `text.count(w) == 1`. If the value is of a class that the tested code defines, that class's methods
decide the result. Operands are therefore passed through `_own_`, which reports those of such classes. A patch that
has them where the gold patch has none is not protected by the assertions that follow.
"""

from __future__ import annotations

import ast
from typing import Any, cast

from understudy.checks.twins.comparisons import FIRST_OPERAND
from understudy.checks.twins.names import name_of

_MAX_OPERANDS = 10_000
NUMBERS_PER_FILE = FIRST_OPERAND + _MAX_OPERANDS
"""How many numbers the assertions, comparisons and operands of one file have."""
_ARITHMETIC_FUNCTIONS = frozenset((
    "abs", "complex", "divmod", "fabs", "float", "frozenset", "fsum", "int", "isclose", "len", "list", "max",
    "min", "pow", "round", "set", "sorted", "sum", "tuple",
))  # fmt: skip
"""Functions whose arguments are operands."""
_BUILTIN_METHODS = frozenset(
    name
    for kind in (str, bytes, list, dict, set, float, int)
    for name in dir(kind)
    if not name.startswith("_") and name not in ("append", "add", "format")
)
"""Methods of builtin values: what they are called on is an operand."""
# The kinds of nodes that are observed. A sum of operands is not: its operands are, and a sum of hundreds would be
# nested too deeply.
_OBSERVED_NODES = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.IfExp, ast.Await)


def number_operands(tree: ast.Module) -> None:
    """Number all operands of a file, before anything is rewritten: versions of it must agree in the numbers."""
    number = 0
    # A call in an f-string cannot always be written as source, so operands there are left alone.
    f_strings = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    in_f_strings = {id(node) for f_string in f_strings for node in ast.walk(f_string)}
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    nodes = (node for function in functions for statement in function.body for node in ast.walk(statement))
    for operand, method in (pair for node in nodes for pair in _operands(node)):
        is_new = not hasattr(operand, "operand_number") and id(operand) not in in_f_strings
        if is_new and number < _MAX_OPERANDS:
            cast("Any", operand).operand_number = (number, method)
            number += 1


def _operands(node: ast.AST) -> list[tuple[ast.expr, str]]:
    """Return the operands of a node, each with the method that is called on it, if one is."""
    match node:
        case ast.BinOp(left=left, right=right):
            operands = [(left, ""), (right, "")]
        case ast.AugAssign(value=value):
            operands = [(value, "")]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Invert(), operand=value):
            operands = [(value, "")]
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _BUILTIN_METHODS:
            operands = [(value, name)]
        case ast.Call(args=arguments) if name_of(node) in _ARITHMETIC_FUNCTIONS:
            operands = [(argument, "") for argument in arguments]
        case _:
            return []
    return [(operand, method) for operand, method in operands if isinstance(operand, _OBSERVED_NODES)]


def observe_operands(tree: ast.Module, first: int) -> frozenset[int]:
    """Pass the numbered operands that are left through `_own_`; return their numbers."""
    observer = _OperandObserver(first + FIRST_OPERAND)
    observer.visit(tree)
    return frozenset(observer.numbers)


class _OperandObserver(ast.NodeTransformer):
    def __init__(self, first: int) -> None:
        self.numbers: list[int] = []
        self._first = first

    def visit(self, node: ast.AST) -> Any:
        match node:
            case ast.Call(func=ast.Name(id=name), args=arguments) if name.startswith("_") and name.endswith("_"):
                # The call reports its arguments as values already, so they are not reported as operands too.
                for argument in arguments:
                    vars(argument).pop("operand_number", None)
            case _:
                pass
        self.generic_visit(node)
        number, method = getattr(node, "operand_number", (None, ""))
        is_read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if number is None or not isinstance(node, ast.expr) or not is_read:
            return node
        self.numbers.append(self._first + number)
        arguments: list[ast.expr] = [ast.Constant(self._first + number), node]
        return ast.Call(
            ast.Name("_own_", ast.Load()), [*arguments, *([ast.Constant(method)] if method else [])], []
        )
