"""Recognizes assertions that a value is near another one, however they are written: `abs(a - b) / b < 1e-6`.

That arithmetic runs in the tested process, whose code could return a number type that makes any comparison true.
So a version sends the observed value (see `twins`), and whether it is near is judged outside.
"""

from __future__ import annotations

import ast
import math

from msgspec import Struct

from understudy.checks.twins.assertions import is_evaluable
from understudy.checks.twins.names import name_of
from understudy.util.python_syntax import unparse

# With a larger tolerance, two values that are near a third one may be far from each other.
_MAX_RELATIVE_TOLERANCE = 0.5


class NearValues(Struct, frozen=True):
    """Two values that must be near each other. `tolerance` is in the form of `twins.assertions.tolerances_of`."""

    first: ast.expr
    second: ast.expr
    tolerance: str


def near_comparison(operator: str, left: ast.expr, right: ast.expr) -> NearValues | None:
    """Return the values of a comparison that says that they are near each other; None for other relations."""
    if operator == "==":
        return _rounded(left, right) or _rounded(right, left)
    if operator in (">", ">="):
        left, right = right, left
    elif operator not in ("<", "<="):
        return None
    tolerance = _number(right)
    if tolerance is not None:
        return _within(left, tolerance)
    match left, right:
        case (
            ast.Call(args=[ast.BinOp(left=first, op=ast.Sub(), right=second)]),
            ast.BinOp(left=factor, op=ast.Mult(), right=scale),
        ) if _is_magnitude(left):
            factor, scale = (factor, scale) if _number(factor) is not None else (scale, factor)
            return _relative(first, second, scale, _number(factor))
        case _:
            return None


def near_range(low: ast.expr, middle: ast.expr, high: ast.expr) -> NearValues | None:
    """Return the values of `low < first - second < high`; None if this is another relation."""
    lower, upper = _number(low), _number(high)
    match middle:
        case ast.BinOp(left=first, op=ast.Sub(), right=second) if lower is not None and upper is not None:
            # Of unequal bounds the wider one counts, so that nothing that passes the test is too far away.
            return NearValues(first, second, repr({"abs": max(-lower, upper)})) if lower < 0 < upper else None
        case _:
            return None


def _within(measure: ast.expr, tolerance: float) -> NearValues | None:
    """Return the values whose distance a `measure` computes, which must be below a tolerance."""
    match measure:
        case ast.BinOp(
            left=ast.BinOp(left=first, op=ast.Sub(), right=second), op=ast.Pow(), right=ast.Constant(value=2)
        ):
            return NearValues(first, second, repr({"abs": math.sqrt(tolerance)}))
        case ast.BinOp(
            left=ast.Call(args=[ast.BinOp(left=first, op=ast.Sub(), right=second)]) as inner, op=ast.Div()
        ):
            return _relative(first, second, measure.right, tolerance) if _is_magnitude(inner) else None
        case ast.Call(args=[ast.BinOp(left=first, op=ast.Sub(), right=second)]) if _is_magnitude(measure):
            return NearValues(first, second, repr({"abs": tolerance}))
        case ast.Call(
            args=[ast.BinOp(left=ast.BinOp(left=first, op=ast.Sub(), right=second), op=ast.Div(), right=scale)]
        ) if _is_magnitude(measure):
            return _relative(first, second, scale, tolerance)
        case _:
            return None


def _relative(first: ast.expr, second: ast.expr, scale: ast.expr, tolerance: float | None) -> NearValues | None:
    """Return a difference that is compared with a multiple of `scale`, which is a number or one of both values."""
    if tolerance is None:
        return None
    if (factor := _number(scale)) is not None:
        return NearValues(first, second, repr({"abs": tolerance * abs(factor)}))
    inner = scale.args[0] if isinstance(scale, ast.Call) and _is_magnitude(scale) else scale
    if unparse(inner) in (unparse(first), unparse(second)) and tolerance < _MAX_RELATIVE_TOLERANCE:
        return NearValues(first, second, repr({"rel": tolerance / (1 - tolerance)}))
    return None


def _rounded(measure: ast.expr, zero: ast.expr) -> NearValues | None:
    match measure:
        case ast.Call(
            func=ast.Name(id="round"),
            args=[ast.BinOp(left=first, op=ast.Sub(), right=second), *digits],
            keywords=[],
        ) if _number(zero) == 0 and len(digits) <= 1:
            places = _number(digits[0]) if digits else 0
            return None if places is None else NearValues(first, second, repr({"places": int(places)}))
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
