"""Literals in the source of tests: which values are written out, and other values of the same form."""

from __future__ import annotations

import ast
import copy
import math
import random
import string
from types import EllipsisType

_CONSTRUCTORS = frozenset({"list", "tuple", "dict", "set", "frozenset", "date", "datetime", "timedelta"})


def is_literal(value: ast.expr) -> bool:
    """Whether a value is written out in full: a constant, or a display or constructor of such."""
    match value:
        case ast.Constant():
            return True
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return is_literal(operand)
        case ast.BinOp(left=left, right=right):
            return is_literal(left) and is_literal(right)
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return all(is_literal(element) for element in elements)
        case ast.Dict(keys=keys, values=values):
            return all(key is not None and is_literal(key) for key in keys) and all(map(is_literal, values))
        case ast.JoinedStr(values=values):
            return all(isinstance(part, ast.Constant) for part in values)
        case ast.Call(args=arguments, keywords=keywords) if _constructs(value):
            return all(map(is_literal, arguments)) and all(is_literal(keyword.value) for keyword in keywords)
        case _:
            return False


def _constructs(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _CONSTRUCTORS
        case _:
            return False


def has_literal(value: ast.expr, *, compared: bool = False) -> bool:
    """Whether a value has a constant, other than an index, that can be changed; `compared`: one compared."""
    if compared:
        return any(
            any(map(has_literal, (node.left, *node.comparators)))
            for node in ast.walk(value)
            if isinstance(node, ast.Compare)
        )
    return bool(_constants(value))


def _constants(value: ast.expr) -> list[ast.Constant]:
    fixed = [
        node.slice if isinstance(node, ast.Subscript) else node
        for node in ast.walk(value)
        if isinstance(node, ast.JoinedStr | ast.Subscript)
    ]
    inside = {id(part) for node in fixed for part in ast.walk(node)}
    return [
        node
        for node in ast.walk(value)
        if isinstance(node, ast.Constant) and id(node) not in inside and node.value is not Ellipsis
    ]


def change_literal(value: ast.expr, choice: random.Random) -> ast.expr:
    """A copy of a value in which one constant is another one of its kind. Expects that `has_literal(value)`."""
    other = copy.deepcopy(value)
    node = choice.choice(_constants(other))
    node.value = another_constant(node.value, choice)
    node.kind = None
    return other


def another_constant(
    value: str | bytes | bool | int | float | complex | EllipsisType | None, choice: random.Random
) -> str | bytes | bool | int | float | complex | None:
    """Another constant of the same type, near it in look and size: whoever sees one of both cannot tell which."""
    if value is None or isinstance(value, EllipsisType):
        return choice.choice((0, "", True))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = range(7) if 0 <= value <= 3 else range(value - 3, value + 4)
        return choice.choice([number for number in near if number != value])
    if isinstance(value, float):  # by more than a tolerance usually is
        if not math.isfinite(value):
            return 0.0
        return round(value * choice.choice((0.5, 2.0)), 6) or choice.choice((-1.0, 0.5, 1.0, 2.0))
    if isinstance(value, complex):
        return value * 2 or 1j
    if isinstance(value, bytes):
        return _another_text(value.decode("latin-1"), choice).encode("latin-1")
    return _another_text(value, choice)


def _another_text(text: str, choice: random.Random) -> str:
    """A text with one letter or digit changed to another of its kind, where it has one that stands for itself."""
    letters = [
        n for n, c in enumerate(text) if c.isascii() and c.isalnum() and text[max(n - 1, 0) : n] not in ("\\", "%")
    ]
    if not letters:
        return text + choice.choice(string.ascii_lowercase)
    at = choice.choice(letters)
    kind = next(
        kind for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase) if text[at] in kind
    )
    return text[:at] + choice.choice(kind.replace(text[at], "")) + text[at + 1 :]
