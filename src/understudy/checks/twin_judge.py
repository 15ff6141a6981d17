"""Whether what a version of a test observed is what its assertions expect. Nothing here runs in a sandbox.

An observation is a line of the report, `[kind, …]` (see `twin_driver`). It is compared with what the gold patch
sent at the same place, by Python's equality of builtin types, or with a literal of the test's source.
"""

from __future__ import annotations

import builtins
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, cast

from msgspec import Struct

from understudy.checks.base import report_lines
from understudy.checks.twins import TwinSite
from understudy.util.python_syntax import parse_literal

Observation = list[Any]

_OTHER_EXCEPTIONS = 1  # that the class of an exception may have among its bases, beside those of the gold patch's
_COMMON = frozenset({"object", "BaseException", "Exception"})
_EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_RELATIVE, _ABSOLUTE = 1e-6, 1e-12  # the tolerances of pytest.approx
_ARRAY_RELATIVE = 1e-5  # and of arrays
_MOST_PATTERN = 20_000  # characters that a pattern is matched with


def _method(name: str) -> Callable[[Any, Any], bool]:
    return lambda actual, expected: bool(getattr(actual, name)(expected))


def _pattern(search: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    return lambda actual, expected: search(expected, actual[:_MOST_PATTERN]) is not None


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda actual, expected: actual in expected,
    "not in": lambda actual, expected: actual not in expected,
    "holds": lambda actual, expected: expected in actual,
    "lacks": lambda actual, expected: expected not in actual,
    "is": lambda actual, expected: type(actual) is type(expected) and actual == expected,
    "startswith": _method("startswith"),
    "endswith": _method("endswith"),
    "search": _pattern(re.search),
    "match": _pattern(re.match),
    "fullmatch": _pattern(re.fullmatch),
}


class Foreign(Struct, frozen=True):
    """A value of a type that is no builtin, by its text. Only another such is equal to it."""

    text: str


def decode(encoded: Any) -> Any:
    """The value that `twin_driver.encode` wrote. Raises ValueError for anything else, also for what is opaque."""
    try:
        return _decode(encoded)
    except (
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        RecursionError,
        OverflowError,
        ZeroDivisionError,
    ) as error:
        raise ValueError(f"no value: {error}") from error


def _decode(encoded: Any) -> Any:  # a table of types
    match encoded:
        case ["n"]:
            return None
        case ["b", content]:
            return bool(content)
        case ["i", content]:
            return int(content, 16)
        case ["f", content]:
            return float.fromhex(content)
        case ["c", real, imaginary]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["q", top, bottom]:
            return Fraction(int(top, 16), int(bottom, 16))
        case ["s", str(content)]:
            return content
        case ["y", content]:
            return bytes.fromhex(content)
        case ["l", items]:
            return [_decode(item) for item in items]
        case ["a", inner]:
            return _decode(inner)
        case ["t", items]:
            return tuple(_decode(item) for item in items)
        case ["e", items]:
            return frozenset(_hashable(_decode(item)) for item in items)
        case ["d", pairs]:
            return {_hashable(_decode(key)): _decode(value) for key, value in pairs}
        case ["z", str(text)]:
            return Foreign(text)
        case _:
            raise ValueError("opaque")


def _hashable(value: Any) -> Any:
    hash(value)
    return value


def holds(site: TwinSite, gold: Sequence[Observation], seen: Sequence[Observation]) -> bool:
    """Whether all that a site observed is what it expects, `gold` being what it observed with the gold patch."""
    try:
        return _holds(site, gold, seen)
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError, OverflowError, re.error):
        return False  # it is not of the form that the operation needs


def _holds(site: TwinSite, gold: Sequence[Observation], seen: Sequence[Observation]) -> bool:
    if not seen:
        return False
    match site.operation:
        case "equal" | "same" | "count" | "calls" | "approx":
            return len(seen) == len(gold) and all(
                _agree(site, decode(then[1]), decode(now[1])) for then, now in zip(gold, seen, strict=True)
            )
        case "compare":
            expected = parse_literal(site.expected)
            compare = _COMPARE[site.operator]
            return all(bool(compare(decode(each[1]), expected)) is site.want for each in seen)
        case "truth":
            return all(each[0] == "truth" and bool(each[1]) is site.want for each in seen)
        case "pair":
            sent = bool(gold) and all(_is_readable_pair(each) for each in gold)
            return all(
                (_is_readable_pair(each) or not sent) and _paired(site, each) is (site.want and not site.changed)
                for each in seen
            )
        case "isinstance":
            names = set(parse_literal(site.expected))
            return all((not names.isdisjoint(each[1])) is site.want for each in seen)
        case "raises":
            return len(seen) == len(gold) and all(
                _raised(site, then, now) for then, now in zip(gold, seen, strict=True)
            )
        case "warns":
            return all(any(_is_kind(site, found[0], found[1]) for found in each[1]) for each in seen)
        case "end":
            return True


def _agree(site: TwinSite, expected: Any, actual: Any) -> bool:
    match site.operation:
        case "same":
            return type(expected) is type(actual) and expected == actual
        case "count":
            return Counter(map(repr, expected)) == Counter(map(repr, actual))
        case "approx":
            return _near(expected, actual, parse_literal(site.expected))
        case _:
            return bool(expected == actual)


def _near(expected: Any, actual: Any, tolerances: dict[str, Any]) -> bool:
    """Whether two values that are both near a third, which is not known here, can be so."""
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        pairs = zip(cast("list[Any]", expected), cast("list[Any]", actual), strict=True)
        return all(_near(then, now, tolerances) for then, now in pairs)
    if isinstance(expected, dict) and isinstance(actual, dict):
        then, now = cast("dict[Any, Any]", expected), cast("dict[Any, Any]", actual)
        return then.keys() == now.keys() and all(_near(then[key], now[key], tolerances) for key in then)
    if not isinstance(expected, int | float | complex | Fraction) or isinstance(expected, bool):
        return bool(expected == actual)
    if isinstance(expected, float) and math.isnan(expected):
        return actual != actual
    if expected == actual:
        return True
    absolute = tolerances.get("abs", tolerances.get("atol", tolerances.get("delta", tolerances.get("abs_tol"))))
    relative = tolerances.get("rel", tolerances.get("rtol", tolerances.get("rel_tol")))
    if "places" in tolerances:
        absolute = 0.6 * 10 ** -int(tolerances["places"])
    if absolute is None and relative is None:
        absolute, relative = 1e-7, _ARRAY_RELATIVE
    margin = max(float(absolute or _ABSOLUTE), float(relative or 0) * abs(expected), _RELATIVE * abs(expected))
    return abs(actual - expected) <= 2 * margin


def _is_readable_pair(seen: Observation) -> bool:
    try:
        decode(seen[1])
        decode(seen[2])
    except ValueError:
        return False
    return True


def _paired(site: TwinSite, seen: Observation) -> bool:
    """Whether a comparison held that was evaluated in the process: by its values, where they could be sent."""
    kind, left, right, held = seen
    if kind != "pair":
        return False
    try:
        actual, expected = decode(left), decode(right)
    except ValueError:
        return bool(held)
    if site.operator == "approx":
        tolerances: dict[str, Any] = parse_literal(site.expected) if site.expected else {}
        return bool(held) and _near(expected, actual, tolerances)
    if site.operator in ("==", "!=") and left[0] != "a" and right[0] != "a":
        return bool(held) and bool(_COMPARE[site.operator](actual, expected))
    return bool(held)


def _raised(site: TwinSite, gold: Observation, seen: Observation) -> bool:
    """Whether an exception is of an expected class, and of few others: one of all classes shows nothing."""
    kinds = [str(kind) for kind in seen[1]]
    if not _is_kind(site, kinds, str(seen[2])):
        return False
    others = {kind for kind in kinds if kind in _EXCEPTIONS} - set(gold[1]) - _COMMON
    leaves = [
        kind
        for kind in others
        if not any(kind != other and issubclass(_EXCEPTIONS[other], _EXCEPTIONS[kind]) for other in others)
    ]
    return len(leaves) <= _OTHER_EXCEPTIONS


def _is_kind(site: TwinSite, kinds: Sequence[str], text: str) -> bool:
    names = {getattr(builtins, name, None) for name in parse_literal(site.expected)}
    aliases = {kind.__name__ for kind in names if isinstance(kind, type)}  # IOError is OSError
    wanted = aliases | set(parse_literal(site.expected))
    if wanted.isdisjoint(kinds):
        return False
    return not site.operator or re.search(parse_literal(site.operator), text[:_MOST_PATTERN]) is not None


def secret_bits(observed: Iterable[tuple[TwinSite, Sequence[Observation]]]) -> float:
    """The binary logarithm of how many guesses there are at what sites expect, of somebody who forces them.

    What is expected twice is guessed once. Of conditions only those tell something that are not as most are.
    """
    secrets: dict[str, float] = {}
    conditions: Counter[bool] = Counter()
    for site, gold in observed:
        if site.changeable:
            secrets[f"changed {len(secrets)}"] = 1.0
        elif not site.withheld:
            continue
        elif site.operation in ("truth", "isinstance"):
            conditions[site.want] += 1
        elif site.operation in ("equal", "same", "count", "approx", "calls"):
            secrets |= {json.dumps(each[1]): _value_bits(each[1]) for each in gold}
        elif site.operation == "compare":
            text = site.operator in ("holds", "startswith", "endswith", "search", "match", "fullmatch")
            secrets[f"{site.operator} {site.expected}"] = 4.0 if text else 0.5
        elif site.operation in ("raises", "warns"):
            secrets[f"{site.operation} {site.expected}"] = 2.0
            secrets[f"match {site.operator}"] = 4.0 if site.operator else 0.0
    return sum(secrets.values()) + min(conditions[True], conditions[False])


def _value_bits(encoded: Any) -> float:
    match encoded:
        case ["i", str(text)]:
            return min(1.0 + 2.0 * math.log2(abs(int(text, 16)) + 1), 24.0)
        case ["f" | "q" | "c", *_]:
            return 8.0
        case ["s" | "y" | "z", content]:
            return min(1.0 + len(content), 16.0)
        case ["l" | "t" | "e" | "d", content]:
            return min(1.0 + sum(_value_bits(part) for part in _flat(content)), 32.0)
        case ["a", inner]:
            return _value_bits(inner)
        case _:
            return 1.0


def _flat(content: list[Any]) -> list[Any]:
    return [part for each in content[:32] for part in (each if each and isinstance(each[0], list) else [each])]


def load(raw: bytes) -> dict[str, dict[int, list[Observation]]]:
    """What was observed, by test and site, of the lines of a report; lines of another form are left out."""
    seen: dict[str, dict[int, list[Observation]]] = {}
    for line in report_lines(raw, json.loads):
        match line:
            case {"node": str(node), "site": int(site), "saw": [str(), *_] as saw}:
                seen.setdefault(node, {}).setdefault(site, []).append(cast("Observation", saw))
            case _:
                pass
    return seen
