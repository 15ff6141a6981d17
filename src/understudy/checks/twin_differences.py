"""Recognizes assertions that a value is near another one, however they are written: `abs(a - b) / b < 1e-6`.

What they compute from the two values runs in the tested process, and a number of a class of its own decides that.
A version sends the observed value instead (see `twins`), and whether it is near is judged outside.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from understudy.checks.twin_assertions import is_evaluable
from understudy.checks.twin_names import name_of
from understudy.util.python_syntax import unparse

_LARGEST_RELATIVE = 0.5  # with a larger tolerance two values that are near a third one may be far from each other


def difference(operator: str, left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr, str] | None:
    """Return both values of a comparison that says that they are near each other, and the tolerance in the form of
    `twin_assertions.tolerances_of`; None for other relations.
    """
    if operator == "==":
        return _rounded(left, right) or _rounded(right, left)
    if operator in (">", ">="):
        left, right = right, left
    elif operator not in ("<", "<="):
        return None
    tolerance = _number(right)
    if tolerance is not None:
        return next(_within(left, tolerance), None)
    match left, right:
        case (
            ast.Call(args=[ast.BinOp(left=one, op=ast.Sub(), right=other)]),
            ast.BinOp(left=factor, op=ast.Mult(), right=scale),
        ) if _is_magnitude(left):
            factor, scale = (factor, scale) if _number(factor) is not None else (scale, factor)
            return _scaled(one, other, scale, _number(factor))
        case _:
            return None


def between(low: ast.expr, middle: ast.expr, high: ast.expr) -> tuple[ast.expr, ast.expr, str] | None:
    """Return what `difference` does, of `low < middle < high`."""
    least, most = _number(low), _number(high)
    match middle:
        case ast.BinOp(left=one, op=ast.Sub(), right=other) if least is not None and most is not None:
            return (one, other, repr({"abs": max(-least, most)})) if least < 0 < most else None
        case _:
            return None


def _within(measure: ast.expr, tolerance: float) -> Iterator[tuple[ast.expr, ast.expr, str]]:
    match measure:
        case ast.BinOp(
            left=ast.BinOp(left=one, op=ast.Sub(), right=other), op=ast.Pow(), right=ast.Constant(value=2)
        ):
            yield one, other, repr({"abs": math.sqrt(tolerance)})
        case ast.BinOp(
            left=ast.Call(args=[ast.BinOp(left=one, op=ast.Sub(), right=other)]) as inner, op=ast.Div()
        ):
            if _is_magnitude(inner) and (near := _scaled(one, other, measure.right, tolerance)) is not None:
                yield near
        case ast.Call(args=[ast.BinOp(left=one, op=ast.Sub(), right=other)]) if _is_magnitude(measure):
            yield one, other, repr({"abs": tolerance})
        case ast.Call(
            args=[ast.BinOp(left=ast.BinOp(left=one, op=ast.Sub(), right=other), op=ast.Div(), right=scale)]
        ) if _is_magnitude(measure):
            if (near := _scaled(one, other, scale, tolerance)) is not None:
                yield near
        case _:
            return


def _scaled(
    one: ast.expr, other: ast.expr, scale: ast.expr, tolerance: float | None
) -> tuple[ast.expr, ast.expr, str] | None:
    """Return a difference that is compared with a multiple of `scale`, which is a number or one of both values."""
    if tolerance is None:
        return None
    if (factor := _number(scale)) is not None:
        return one, other, repr({"abs": tolerance * abs(factor)})
    inner = scale.args[0] if isinstance(scale, ast.Call) and _is_magnitude(scale) else scale
    if unparse(inner) in (unparse(one), unparse(other)) and tolerance < _LARGEST_RELATIVE:
        return one, other, repr({"rel": tolerance / (1 - tolerance)})
    return None


def _rounded(measure: ast.expr, zero: ast.expr) -> tuple[ast.expr, ast.expr, str] | None:
    match measure:
        case ast.Call(
            func=ast.Name(id="round"), args=[ast.BinOp(left=one, op=ast.Sub(), right=other), *digits], keywords=[]
        ) if _number(zero) == 0 and len(digits) <= 1:
            places = _number(digits[0]) if digits else 0
            return None if places is None else (one, other, repr({"places": int(places)}))
        case _:
            return None


def _is_magnitude(value: ast.expr) -> bool:
    """Return whether a value is a call of `abs` or `math.fabs` with one argument."""
    return isinstance(value, ast.Call) and name_of(value) in ("abs", "fabs") and len(value.args) == 1


def _number(value: ast.expr) -> float | None:
    if not is_evaluable(value):
        return None
    number = ast.literal_eval(value)
    return number if isinstance(number, int | float) else None
