"""Judges whether what a version of a test observed is what its assertions expect. Nothing here runs in a sandbox.

An observation is a line of the report, `[kind, …]` (see `twin_driver`). It is compared with what the gold patch
sent at the same site, or with a literal of the test's source. Whatever the test treats as equal must be equal here
too, so this comparison is coarser than Python's: a `list` equals a `tuple`, a float equals a near one. That is
safe because the unmodified tests have passed already. Only observations that no correct solution can make are
contradictions.
"""

from __future__ import annotations

import builtins
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, cast

from msgspec import Struct

from understudy.checks.base import report_lines
from understudy.checks.twins.sites import TwinSite
from understudy.util.python_syntax import parse_literal

Observation = list[Any]
Judgement = Literal["agrees", "unclear", "contradicts"]
"""`unclear` is an observation that is not the expected one, or cannot be read, but that honest code may make."""

_OTHER_EXCEPTIONS = 2  # base classes that an exception may have in addition to the gold patch's
_MOST_EXCEPTIONS = 4  # more additional base classes than this are not honest
_MOST_UNPAIRED = 200  # limit for comparing observations in any order, which is quadratic
_COMMON = frozenset({"object", "BaseException", "Exception"})
_EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_RELATIVE, _ABSOLUTE = 1e-6, 1e-12  # the tolerances of pytest.approx
_ARRAY_RELATIVE = 1e-5  # the relative tolerance of arrays
_MOST_PATTERN = 20_000  # characters of a text that a pattern is searched in


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
    """A value of a type that is not builtin, by its text. It equals only another one with the same text."""

    text: str


class Structure(Struct, frozen=True):
    """An object that is compared by its fields."""

    name: str
    fields: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self.fields)))


class Raised(Struct, frozen=True):
    """The classes of exceptions that a task's tests expect, and those of each exception of the gold patch."""

    expected: frozenset[str] = frozenset()
    gold: frozenset[frozenset[str]] = frozenset()

    def combines(self, kinds: Iterable[str]) -> bool:
        """Return whether an exception is of several expected classes that none of the gold patch is of together.

        It would pass whichever of them a test expects.
        """
        met = self.expected.intersection(kinds)
        return len(met) > 1 and not any(met <= each for each in self.gold)


def raised_by_gold(observed: Iterable[tuple[TwinSite, Sequence[Observation]]]) -> Raised:
    """Return the exceptions that a task's sites expect and the gold patch raises there."""
    sites = [(site, gold) for site, gold in observed if site.operation == "raises"]
    return Raised(
        frozenset(name for site, _ in sites for name in _class_names(site)),
        frozenset(frozenset(map(str, each[1])) for _, gold in sites for each in without_rest(gold)),
    )


def decode(encoded: Any) -> Any:
    """Return the value that `twin_encoding.encode` encoded. Raises ValueError for anything else, and for opaque
    values.
    """
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
        raise ValueError(f"expected a value as twin_encoding.encode writes it: {error}") from error


def _decode(encoded: Any) -> Any:  # one case per encoded type
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
            return frozenset(map(_hashable, map(_decode, items)))
        case ["d", pairs]:
            return {_decode(key): _decode(value) for key, value in pairs}
        case ["r", start, stop, step]:
            return range(int(start, 16), int(stop, 16), int(step, 16))
        case ["k", str(name), fields]:
            return Structure(name, {str(field): _decode(value) for field, value in fields.items()})
        case ["o", inner]:
            return _decode(inner)
        case ["z", str(text)]:
            return Foreign(text)
        case _:
            raise ValueError("opaque: expected a value that could be encoded")


def _hashable(value: Any) -> Any:
    """Return the value if it is hashable; otherwise a hashable one that is the same for equal values (dicts as
    items).
    """
    try:
        hash(value)
    except TypeError:
        if isinstance(value, dict):
            return frozenset((key, _hashable(each)) for key, each in cast("dict[Any, Any]", value).items())
        return tuple(map(_hashable, cast("list[Any]", value)))
    return value


def _has_own_equality(encoded: Any) -> bool:
    """Return whether an encoded value contains an object with its own comparison, which may differ from its
    encoding's.
    """
    if isinstance(encoded, dict):
        return any(map(_has_own_equality, cast("dict[str, Any]", encoded).values()))
    if not isinstance(encoded, list):
        return False
    parts = cast("list[Any]", encoded)
    return parts[:1] == ["o"] or any(map(_has_own_equality, parts))


def _is_equal_to_anything(encoded: Any) -> bool:
    return encoded == ["!"]


DIGESTED = frozenset({"equal", "same", "count"})
"""The operations for which a digest of observations suffices: those that expect what the gold patch sent."""


def is_rest(seen: Observation) -> bool:
    """Return whether an observation is a digest of those that were too many to send."""
    return seen[0] == "rest"


def without_rest(seen: Sequence[Observation]) -> list[Observation]:
    """Return the observations that were sent in full."""
    return [each for each in seen if not is_rest(each)]


_NO_OTHERS = Raised()


def judge(
    site: TwinSite, gold: Sequence[Observation], seen: Sequence[Observation], raised: Raised = _NO_OTHERS
) -> Judgement:
    """Return whether all observations of a site are as expected; `gold` are those made with the gold patch.

    `raised` are the exceptions of all sites of the task.

    The report comes from the tested process, which can leave observations out or say that they were too many to
    send. So observations that are missing prove nothing: as many must have been sent in full as with the gold
    patch, and as many as a digest.
    """
    try:
        if site.operation == "own":
            return "agrees"
        if site.operation == "result":
            return _worst(_result(site, each) for each in seen) if seen else "agrees"
        then, now = without_rest(gold), without_rest(seen)
        (then_rest, then_digest), (now_rest, now_digest) = _sum_of_rest(gold), _sum_of_rest(seen)
        complete = len(now) >= len(then) and then_rest == now_rest
        same = complete and (site.operation not in DIGESTED or then_digest == now_digest)
        same = same and not (site.operation == "raises" and any(raised.combines(each[1]) for each in now))
        return _worst([_judge(site, then, now) if now else "unclear", "agrees" if same else "unclear"])
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError, OverflowError, re.error):
        return "unclear"  # the observation does not have the form that the operation needs


def _sum_of_rest(seen: Sequence[Observation]) -> tuple[int, int]:
    """Return how many observations were not sent, and the sum of their digests, which does not depend on their
    order.
    """
    rest = [(int(each[1]), int(each[2], 16)) for each in seen if is_rest(each)]
    return sum(count for count, _ in rest), sum(digest for _, digest in rest) % (1 << 64)


def holds(site: TwinSite, gold: Sequence[Observation], seen: Sequence[Observation]) -> bool:
    """Return whether all observations of a site agree with what it expects."""
    return judge(site, gold, seen) == "agrees"


def _judge(site: TwinSite, gold: Sequence[Observation], seen: Sequence[Observation]) -> Judgement:
    match site.operation:
        case "equal" | "same" | "count" | "approx":
            return _values(site, gold, seen)
        case "calls":
            return _calls(site, gold, seen)
        case "compare":
            expected = parse_literal(site.expected)
            return _worst(_compared(site, each, expected) for each in seen)
        case "truth":
            return _verdict(all(each[0] == "truth" and bool(each[1]) is site.want for each in seen))
        case "pair":
            sent = bool(gold) and all(_is_readable_pair(each) for each in gold)
            return _worst(_paired(site, each, sent=sent) for each in seen)
        case "isinstance":
            names = set(parse_literal(site.expected))
            names |= {kind.__name__ for name in names if isinstance(kind := getattr(builtins, name, None), type)}
            # Other classes that a proxy claims by `__class__` count only if the gold patch has no object of it.
            claims = not site.want or any(names.isdisjoint(each[1]) for each in gold)
            kinds = ({*each[1], *(each[2] if claims else ())} for each in seen)
            same = all((not names.isdisjoint(each)) is site.want for each in kinds)
            return "agrees" if same else "unclear"  # not a contradiction, because a class may have several names
        case "raises":
            return _worst(_raised(site, gold, each) for each in seen)
        case "warns":
            same = all(
                any(_is_kind(site, observation[0], observation[1]) for observation in each[1]) for each in seen
            )
            return "agrees" if same else "unclear"
        case "end" | "result" | "own":
            return "agrees"


def _verdict(holds: bool) -> Judgement:
    return "agrees" if holds else "contradicts"


def _worst(judgements: Iterable[Judgement]) -> Judgement:
    """Return the worst of some judgements; `unclear` if there are none, because nothing proves nothing."""
    all_of_them = set(judgements)
    return "contradicts" if "contradicts" in all_of_them else "agrees" if all_of_them == {"agrees"} else "unclear"


# --- values


def _values(site: TwinSite, gold: Sequence[Observation], seen: Sequence[Observation]) -> Judgement:
    """Judge whether the values of a site are those of the gold patch.

    A correct solution may return results in another order, and a test's loop over them may run a different number
    of times. Then all expected values must have been observed, and no others.
    """
    expected = [decode(each[1]) for each in gold]
    if any(each[0] != "value" or _is_equal_to_anything(each[1]) for each in seen):
        return "contradicts"
    actual: list[Any] = []
    for each in seen:
        try:
            actual.append(decode(each[1]))
        except ValueError:
            return "unclear"
    same_count = len(actual) == len(expected)
    if same_count and all(_agree(site, then, now) for then, now in zip(expected, actual, strict=True)):
        return "agrees"
    if max(len(actual), len(expected)) > _MOST_UNPAIRED:
        return "unclear"
    strange = [n for n, now in enumerate(actual) if not any(_agree(site, then, now) for then in expected)]
    if strange:
        comparable = any(not _has_own_equality(seen[n][1]) for n in strange)
        return "contradicts" if same_count and comparable else "unclear"
    if same_count:
        left = list(expected)
        for now in actual:
            position = next((n for n, then in enumerate(left) if _agree(site, then, now)), None)
            if position is None:
                return "unclear"
            del left[position]
        return "agrees"
    return "agrees" if all(any(_agree(site, then, now) for now in actual) for then in expected) else "unclear"


_VALUES = DIGESTED | {"approx"}


def is_reordered(site: TwinSite, gold: Sequence[Observation], seen: Sequence[Observation]) -> bool:
    """Return whether values that agree came in another order, or more often, than with the gold patch.

    Tested code that knows which values a loop expects, but not which of them belongs to which input, has them in
    another order.
    """
    if site.operation not in _VALUES:
        return False
    expected, actual = ([decode(each[1]) for each in without_rest(observed)] for observed in (gold, seen))
    one_value = bool(expected) and all(_agree(site, expected[0], each) for each in (*expected, *actual))
    pairs = zip(expected, actual, strict=False)
    return not one_value and (len(actual) != len(expected) or not all(_agree(site, *pair) for pair in pairs))


def _agree(site: TwinSite, expected: Any, actual: Any) -> bool:
    match site.operation:
        case "same":
            return type(expected) is type(actual) and expected == actual
        case "count":
            return _same_elements(list(expected), list(actual))
        case "approx":
            return _near(expected, actual, parse_literal(site.expected))
        case _:
            return _equal(expected, actual)


def _same_elements(expected: list[Any], actual: list[Any]) -> bool:
    if len(expected) != len(actual):
        return False
    if len(expected) > _MOST_UNPAIRED:
        return Counter(map(_hashable, expected)) == Counter(map(_hashable, actual))
    for now in actual:
        position = next((n for n, then in enumerate(expected) if _equal(then, now)), None)
        if position is None:
            return False
        del expected[position]
    return True


def _equal(expected: Any, actual: Any) -> bool:
    """Return whether two values may both equal a third one, which is not known here."""
    if isinstance(expected, Structure) and isinstance(actual, Structure):
        return expected.name == actual.name and _equal(expected.fields, actual.fields)
    return _near(expected, actual, None)


def _near(expected: Any, actual: Any, tolerances: dict[str, Any] | None) -> bool:
    """Return whether two values may both be near a third one, which is not known here.

    Without `tolerances` both must equal it; only floats may differ a little, because a name may stand for an
    `approx`.
    """
    if isinstance(expected, range) or isinstance(actual, range):
        expected, actual = (
            list(cast("Iterable[Any]", each)) if isinstance(each, range) and len(each) <= _MOST_UNPAIRED else each
            for each in (expected, actual)
        )
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        then, now = cast("Sequence[Any]", expected), cast("Sequence[Any]", actual)
        return len(then) == len(now) and all(
            _near(one, other, tolerances) for one, other in zip(then, now, strict=True)
        )
    if isinstance(expected, dict) and isinstance(actual, dict):
        then, now = cast("dict[Any, Any]", expected), cast("dict[Any, Any]", actual)
        return then.keys() == now.keys() and all(_near(then[key], now[key], tolerances) for key in then)
    if not isinstance(expected, int | float | complex | Fraction) or isinstance(expected, bool):
        return bool(expected == actual)
    if isinstance(expected, float) and math.isnan(expected):
        return bool(actual != actual)
    if expected == actual:
        return True
    if tolerances is None:
        if not isinstance(expected, float | complex) and not isinstance(actual, float | complex):
            return False
        tolerances = {"rel": _RELATIVE}
    return bool(abs(actual - expected) <= 2 * margin(expected, tolerances))


def margin(expected: Any, tolerances: Mapping[str, Any]) -> float:
    """Return how far a value may be from an expected number; tolerances have the names of their arguments."""
    absolute = tolerances.get("abs", tolerances.get("atol", tolerances.get("delta", tolerances.get("abs_tol"))))
    relative = tolerances.get("rel", tolerances.get("rtol", tolerances.get("rel_tol")))
    if "places" in tolerances:
        absolute = 0.6 * 10 ** -int(tolerances["places"])
    if absolute is None and relative is None:
        absolute, relative = 1e-7, _ARRAY_RELATIVE
    return max(float(absolute or _ABSOLUTE), float(relative or 0) * abs(expected), _RELATIVE * abs(expected))


def _compared(site: TwinSite, seen: Observation, expected: Any) -> Judgement:
    if _is_equal_to_anything(seen[1]):
        return "contradicts"
    try:
        holds = bool(_COMPARE[site.operator](decode(seen[1]), expected)) is site.want
    except (ValueError, TypeError, AttributeError):
        return "unclear"
    return "agrees" if holds else "unclear" if _has_own_equality(seen[1]) else "contradicts"


# --- pairs


def _is_readable_pair(seen: Observation) -> bool:
    try:
        decode(seen[1])
        decode(seen[2])
    except ValueError:
        return False
    return not _has_own_equality(seen[1:3])


def _paired(site: TwinSite, seen: Observation, *, sent: bool) -> Judgement:
    """Judge a comparison that was evaluated in the tested process, by its values if they could be sent.

    `sent` says that they could be sent with the gold patch; then a patch that hides its values proves nothing.
    """
    kind, left, right, holds = seen
    want = site.want and not site.changed
    if kind != "pair":
        return "contradicts"
    if bool(holds) is not want and not site.want:
        return "contradicts"
    try:
        actual, expected = decode(left), decode(right)
    except ValueError:
        anything = _is_equal_to_anything(left) or _is_equal_to_anything(right)
        if bool(holds) is not want:
            return "contradicts"
        return "agrees" if not sent else "contradicts" if anything else "unclear"
    is_true = bool(holds)
    if site.operator == "approx":
        tolerances: dict[str, Any] = parse_literal(site.expected) if site.expected else {}
        is_true = is_true and _near(expected, actual, tolerances)
    elif site.operator == "==" and left[0] != "a" and right[0] != "a":
        is_true = is_true and _equal(expected, actual)
    elif site.operator == "!=" and left == right and not isinstance(actual, Foreign | Structure):
        return "unclear"  # values of different types may be encoded alike
    if is_true is want:
        return "agrees"
    if _is_readable_pair(seen):
        return "contradicts"
    return "unclear" if sent or bool(holds) is not want else "agrees"


def _result(site: TwinSite, seen: Observation) -> Judgement:
    """Judge a comparison that is no assertion: values that are said to be equal must be.

    Whether they should be equal is not known, and an honest patch may come to other comparisons than the gold
    patch.
    """
    kind, left, right, holds = seen
    if kind != "result" or _is_equal_to_anything(left) or _is_equal_to_anything(right):
        return "contradicts"
    actual, expected = decode(left), decode(right)
    if bool(holds) is site.operator.startswith(("!", "not")) or "a" in (left[0], right[0]):
        return "agrees"
    if site.operator in ("==", "!="):
        same = _equal(actual, expected)
    elif isinstance(expected, list | tuple | frozenset | dict):
        same = any(_equal(actual, each) for each in cast("Iterable[Any]", expected))
    else:
        same = isinstance(expected, Foreign | Structure) or actual in expected
    return "agrees" if same else "unclear"


# --- calls of mocks


def _calls(site: TwinSite, gold: Sequence[Observation], seen: Sequence[Observation]) -> Judgement:
    """Judge whether a mock was called as with the gold patch, as far as the assertion checks that."""
    if len(gold) != len(seen):
        return "unclear"
    return _worst(_called(site, then[1], now[1]) for then, now in zip(gold, seen, strict=True))


def _called(site: TwinSite, gold: list[Any], seen: list[Any]) -> Judgement:
    match site.operator:
        case "once" | "never":
            return _verdict(len(seen) == (site.operator == "once"))
        case "last":
            same = _same_call(gold[-1], seen[-1])
        case "some":
            same = all(any(_same_call(then, now) for now in seen) for then in gold)
        case _:
            if len(seen) != 1:
                return "contradicts"
            same = _same_call(gold[0], seen[0])
    return "agrees" if same else "unclear"


def _same_call(gold: list[Any], seen: list[Any]) -> bool:
    """Return whether two calls have equal arguments, as far as these could be sent with the gold patch."""
    (then_positional, then_named), (now_positional, now_named) = gold, seen
    if len(then_positional) != len(now_positional) or then_named.keys() != now_named.keys():
        return False
    pairs = [*zip(then_positional, now_positional, strict=True)]
    pairs += [(then_named[name], now_named[name]) for name in then_named]
    return all(_same_argument(then, now) for then, now in pairs)


def _same_argument(gold: Any, seen: Any) -> bool:
    try:
        expected = decode(gold)
    except ValueError:
        return True
    return _equal(expected, decode(seen))


# --- exceptions


def _raised(site: TwinSite, gold: Sequence[Observation], seen: Observation) -> Judgement:
    """Judge whether an exception is of an expected class. One that is of many other classes too proves nothing."""
    kinds = [str(kind) for kind in seen[1]]
    if not kinds:
        return "contradicts"
    others = {kind for kind in kinds if kind in _EXCEPTIONS} - _COMMON
    others -= {kind for each in gold for kind in each[1]} | set(parse_literal(site.expected))
    leaves = [
        kind
        for kind in others
        if not any(kind != other and issubclass(_EXCEPTIONS[other], _EXCEPTIONS[kind]) for other in others)
    ]
    if len(leaves) > _MOST_EXCEPTIONS:
        return "contradicts"
    return "agrees" if len(leaves) <= _OTHER_EXCEPTIONS and _is_kind(site, kinds, str(seen[2])) else "unclear"


def _class_names(site: TwinSite) -> set[str]:
    """Return the names of the classes that a site expects."""
    names: list[str] = parse_literal(site.expected)
    # two names may be the same class, such as IOError and OSError
    return {*names, *(kind.__name__ for name in names if isinstance(kind := getattr(builtins, name, None), type))}


def satisfies(site: TwinSite, kinds: Iterable[str]) -> bool:
    """Return whether an exception of these classes is one that a site expects, whatever its message."""
    return not _class_names(site).isdisjoint(kinds)


def _is_kind(site: TwinSite, kinds: Sequence[str], text: str) -> bool:
    if not satisfies(site, kinds):
        return False
    return not site.operator or re.search(parse_literal(site.operator), text[:_MOST_PATTERN]) is not None


def load(raw: bytes) -> dict[str, dict[int, list[Observation]]]:
    """Return the observations in a report's lines, by test and site; lines of another form are left out."""
    seen: dict[str, dict[int, list[Observation]]] = {}
    for line in report_lines(raw, json.loads):
        match line:
            case {"node": str(node), "site": int(site), "saw": [str(), *_] as saw}:
                seen.setdefault(node, {}).setdefault(site, []).append(cast("Observation", saw))
            case _:
                pass
    return seen
