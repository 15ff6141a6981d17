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
from understudy.checks.twins.twin_decoding import (
    Foreign,
    Structure,
    decode,
    equals_anything,
    has_own_equality,
    hashable,
)
from understudy.util.python_syntax import parse_literal

Observation = list[Any]
Judgement = Literal["agrees", "unclear", "contradicts"]
"""`unclear` is an observation that is not the expected one, or cannot be read, but that honest code may make."""

_OTHER_EXCEPTIONS = 2  # base classes that an exception may have in addition to the gold patch's
_MAX_EXCEPTIONS = 4  # more additional base classes than this are not honest
_MAX_UNPAIRED = 200  # limit for comparing observations in any order, which is quadratic
_COMMON = frozenset({"object", "BaseException", "Exception"})
_EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_RELATIVE, _ABSOLUTE = 1e-6, 1e-12  # the tolerances of pytest.approx
_ARRAY_RELATIVE = 1e-5  # the relative tolerance of arrays
_MAX_SEARCHED_CHARS = 20_000  # characters of a text that a pattern is searched in


def _method(name: str) -> Callable[[Any, Any], bool]:
    return lambda actual, expected: bool(getattr(actual, name)(expected))


def _pattern(search: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    return lambda actual, expected: search(expected, actual[:_MAX_SEARCHED_CHARS]) is not None


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
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


class Raised(Struct, frozen=True):
    """The classes of exceptions that a task's tests expect, and those of each exception of the gold patch."""

    expected: frozenset[str] = frozenset()
    gold: frozenset[frozenset[str]] = frozenset()

    def combines(self, kinds: Iterable[str]) -> bool:
        """Return whether an exception is of several expected classes that none of the gold patch is of together.

        It would pass whichever of them a test expects.
        """
        matched = self.expected.intersection(kinds)
        return len(matched) > 1 and not any(matched <= classes for classes in self.gold)


def raised_by_gold(observed: Iterable[tuple[TwinSite, Sequence[Observation]]]) -> Raised:
    """Return the exceptions that a task's sites expect and the gold patch raises there."""
    sites = [(site, gold) for site, gold in observed if site.operation == "raises"]
    return Raised(
        frozenset(name for site, _ in sites for name in _class_names(site)),
        frozenset(frozenset(map(str, observation[1])) for _, gold in sites for observation in without_rest(gold)),
    )


DIGESTED = frozenset({"equal", "same", "count"})
"""The operations for which a digest of observations suffices: those that expect what the gold patch sent."""


def is_rest(observation: Observation) -> bool:
    """Return whether an observation is a digest of those that were too many to send."""
    return observation[0] == "rest"


def without_rest(observations: Sequence[Observation]) -> list[Observation]:
    """Return the observations that were sent in full."""
    return [observation for observation in observations if not is_rest(observation)]


_NO_EXCEPTIONS = Raised()


def judge(
    site: TwinSite,
    gold: Sequence[Observation],
    observations: Sequence[Observation],
    raised: Raised = _NO_EXCEPTIONS,
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
            return _worst(_result(site, observation) for observation in observations) if observations else "agrees"
        gold_sent, sent = without_rest(gold), without_rest(observations)
        (gold_count, gold_digest), (count, digest) = _sum_of_rest(gold), _sum_of_rest(observations)
        complete = len(sent) >= len(gold_sent) and gold_count == count
        same = complete and (site.operation not in DIGESTED or gold_digest == digest)
        same = same and not (
            site.operation == "raises" and any(raised.combines(observation[1]) for observation in sent)
        )
        return _worst([_judge(site, gold_sent, sent) if sent else "unclear", "agrees" if same else "unclear"])
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError, OverflowError, re.error):
        return "unclear"  # the observation does not have the form that the operation needs


def _sum_of_rest(observations: Sequence[Observation]) -> tuple[int, int]:
    """Return how many observations were not sent, and the sum of their digests, which does not depend on their
    order.
    """
    counts_and_digests = [
        (int(observation[1]), int(observation[2], 16)) for observation in observations if is_rest(observation)
    ]
    return sum(count for count, _ in counts_and_digests), sum(digest for _, digest in counts_and_digests) % (
        1 << 64
    )


def holds(site: TwinSite, gold: Sequence[Observation], observations: Sequence[Observation]) -> bool:
    """Return whether all observations of a site agree with what it expects."""
    return judge(site, gold, observations) == "agrees"


def _judge(site: TwinSite, gold: Sequence[Observation], observations: Sequence[Observation]) -> Judgement:
    match site.operation:
        case "equal" | "same" | "count" | "approx":
            return _values(site, gold, observations)
        case "calls":
            return _calls(site, gold, observations)
        case "compare":
            expected = parse_literal(site.expected)
            return _worst(_compared(site, observation, expected) for observation in observations)
        case "truth":
            return _verdict(
                all(
                    observation[0] == "truth" and bool(observation[1]) is site.want for observation in observations
                )
            )
        case "pair":
            sent = bool(gold) and all(_is_readable_pair(observation) for observation in gold)
            return _worst(_paired(site, observation, sent=sent) for observation in observations)
        case "isinstance":
            names = set(parse_literal(site.expected))
            names |= {kind.__name__ for name in names if isinstance(kind := getattr(builtins, name, None), type)}
            # Other classes that a proxy claims by `__class__` count only if the gold patch has no object of it.
            claims = not site.want or any(names.isdisjoint(observation[1]) for observation in gold)
            kinds = ({*observation[1], *(observation[2] if claims else ())} for observation in observations)
            same = all((not names.isdisjoint(class_names)) is site.want for class_names in kinds)
            return "agrees" if same else "unclear"  # not a contradiction, because a class may have several names
        case "raises":
            return _worst(_raised(site, gold, observation) for observation in observations)
        case "warns":
            same = all(
                any(_is_kind(site, warning[0], warning[1]) for warning in observation[1])
                for observation in observations
            )
            return "agrees" if same else "unclear"
        case "end" | "result" | "own":
            return "agrees"


def _verdict(holds: bool) -> Judgement:
    return "agrees" if holds else "contradicts"


def _worst(judgements: Iterable[Judgement]) -> Judgement:
    """Return the worst of some judgements; `unclear` if there are none, because nothing proves nothing."""
    distinct = set(judgements)
    return "contradicts" if "contradicts" in distinct else "agrees" if distinct == {"agrees"} else "unclear"


# --- values


def _values(site: TwinSite, gold: Sequence[Observation], observations: Sequence[Observation]) -> Judgement:
    """Judge whether the values of a site are those of the gold patch.

    A correct solution may return results in another order, and a test's loop over them may run a different number
    of times. Then all expected values must have been observed, and no others.
    """
    expected = [decode(observation[1]) for observation in gold]
    if any(observation[0] != "value" or equals_anything(observation[1]) for observation in observations):
        return "contradicts"
    actual: list[Any] = []
    for observation in observations:
        try:
            actual.append(decode(observation[1]))
        except ValueError:
            return "unclear"
    same_count = len(actual) == len(expected)
    if same_count and all(
        _agree(site, gold_value, value) for gold_value, value in zip(expected, actual, strict=True)
    ):
        return "agrees"
    if max(len(actual), len(expected)) > _MAX_UNPAIRED:
        return "unclear"
    unexpected = [
        n for n, value in enumerate(actual) if not any(_agree(site, gold_value, value) for gold_value in expected)
    ]
    if unexpected:
        comparable = any(not has_own_equality(observations[n][1]) for n in unexpected)
        return "contradicts" if same_count and comparable else "unclear"
    if same_count:
        unmatched = list(expected)
        for value in actual:
            position = next((n for n, gold_value in enumerate(unmatched) if _agree(site, gold_value, value)), None)
            if position is None:
                return "unclear"
            del unmatched[position]
        return "agrees"
    return (
        "agrees"
        if all(any(_agree(site, gold_value, value) for value in actual) for gold_value in expected)
        else "unclear"
    )


_VALUES = DIGESTED | {"approx"}


def is_reordered(site: TwinSite, gold: Sequence[Observation], observations: Sequence[Observation]) -> bool:
    """Return whether values that agree came in another order, or more often, than with the gold patch.

    Tested code that knows which values a loop expects, but not which of them belongs to which input, has them in
    another order.
    """
    if site.operation not in _VALUES:
        return False
    expected, actual = (
        [decode(observation[1]) for observation in without_rest(observed)] for observed in (gold, observations)
    )
    one_value = bool(expected) and all(_agree(site, expected[0], value) for value in (*expected, *actual))
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
    if len(expected) > _MAX_UNPAIRED:
        return Counter(map(hashable, expected)) == Counter(map(hashable, actual))
    for item in actual:
        position = next((n for n, expected_item in enumerate(expected) if _equal(expected_item, item)), None)
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
            list(cast("Iterable[Any]", value))
            if isinstance(value, range) and len(value) <= _MAX_UNPAIRED
            else value
            for value in (expected, actual)
        )
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        expected_items, actual_items = cast("Sequence[Any]", expected), cast("Sequence[Any]", actual)
        return len(expected_items) == len(actual_items) and all(
            _near(first, second, tolerances) for first, second in zip(expected_items, actual_items, strict=True)
        )
    if isinstance(expected, dict) and isinstance(actual, dict):
        expected_items, actual_items = cast("dict[Any, Any]", expected), cast("dict[Any, Any]", actual)
        return expected_items.keys() == actual_items.keys() and all(
            _near(expected_items[key], actual_items[key], tolerances) for key in expected_items
        )
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


def _compared(site: TwinSite, observation: Observation, expected: Any) -> Judgement:
    if equals_anything(observation[1]):
        return "contradicts"
    try:
        holds = bool(_OPERATORS[site.operator](decode(observation[1]), expected)) is site.want
    except (ValueError, TypeError, AttributeError):
        return "unclear"
    return "agrees" if holds else "unclear" if has_own_equality(observation[1]) else "contradicts"


# --- pairs


def _is_readable_pair(observation: Observation) -> bool:
    try:
        decode(observation[1])
        decode(observation[2])
    except ValueError:
        return False
    return not has_own_equality(observation[1:3])


def _paired(site: TwinSite, observation: Observation, *, sent: bool) -> Judgement:
    """Judge a comparison that was evaluated in the tested process, by its values if they could be sent.

    `sent` says that they could be sent with the gold patch; then a patch that hides its values proves nothing.
    """
    kind, left, right, holds = observation
    want = site.want and not site.changed
    if kind != "pair":
        return "contradicts"
    if bool(holds) is not want and not site.want:
        return "contradicts"
    try:
        actual, expected = decode(left), decode(right)
    except ValueError:
        anything = equals_anything(left) or equals_anything(right)
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
    if _is_readable_pair(observation):
        return "contradicts"
    return "unclear" if sent or bool(holds) is not want else "agrees"


def _result(site: TwinSite, observation: Observation) -> Judgement:
    """Judge a comparison that is no assertion: values that are said to be equal must be.

    Whether they should be equal is not known, and an honest patch may come to other comparisons than the gold
    patch.
    """
    kind, left, right, holds = observation
    if kind != "result" or equals_anything(left) or equals_anything(right):
        return "contradicts"
    actual, expected = decode(left), decode(right)
    if bool(holds) is site.operator.startswith(("!", "not")) or "a" in (left[0], right[0]):
        return "agrees"
    if site.operator in ("==", "!="):
        same = _equal(actual, expected)
    elif isinstance(expected, list | tuple | frozenset | dict):
        same = any(_equal(actual, member) for member in cast("Iterable[Any]", expected))
    else:
        same = isinstance(expected, Foreign | Structure) or actual in expected
    return "agrees" if same else "unclear"


# --- calls of mocks


def _calls(site: TwinSite, gold: Sequence[Observation], observations: Sequence[Observation]) -> Judgement:
    """Judge whether a mock was called as with the gold patch, as far as the assertion checks that."""
    if len(gold) != len(observations):
        return "unclear"
    return _worst(
        _called(site, gold_calls[1], calls[1]) for gold_calls, calls in zip(gold, observations, strict=True)
    )


def _called(site: TwinSite, gold_calls: list[Any], calls: list[Any]) -> Judgement:
    match site.operator:
        case "once" | "never":
            return _verdict(len(calls) == (site.operator == "once"))
        case "last":
            same = _same_call(gold_calls[-1], calls[-1])
        case "some":
            same = all(any(_same_call(gold_call, call) for call in calls) for gold_call in gold_calls)
        case _:
            if len(calls) != 1:
                return "contradicts"
            same = _same_call(gold_calls[0], calls[0])
    return "agrees" if same else "unclear"


def _same_call(gold_call: list[Any], call: list[Any]) -> bool:
    """Return whether two calls have equal arguments, as far as these could be sent with the gold patch."""
    (gold_positional, gold_named), (positional, named) = gold_call, call
    if len(gold_positional) != len(positional) or gold_named.keys() != named.keys():
        return False
    pairs = [*zip(gold_positional, positional, strict=True)]
    pairs += [(gold_named[name], named[name]) for name in gold_named]
    return all(_same_argument(gold_argument, argument) for gold_argument, argument in pairs)


def _same_argument(gold: Any, argument: Any) -> bool:
    try:
        expected = decode(gold)
    except ValueError:
        return True
    return _equal(expected, decode(argument))


# --- exceptions


def _raised(site: TwinSite, gold: Sequence[Observation], raised: Observation) -> Judgement:
    """Judge whether an exception is of an expected class. One that is of many other classes too proves nothing."""
    kinds = [str(kind) for kind in raised[1]]
    if not kinds:
        return "contradicts"
    unexpected = {kind for kind in kinds if kind in _EXCEPTIONS} - _COMMON
    unexpected -= {kind for observation in gold for kind in observation[1]} | set(parse_literal(site.expected))
    leaves = [
        kind
        for kind in unexpected
        if not any(
            kind != subclass and issubclass(_EXCEPTIONS[subclass], _EXCEPTIONS[kind]) for subclass in unexpected
        )
    ]
    if len(leaves) > _MAX_EXCEPTIONS:
        return "contradicts"
    return "agrees" if len(leaves) <= _OTHER_EXCEPTIONS and _is_kind(site, kinds, str(raised[2])) else "unclear"


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
    return not site.operator or re.search(parse_literal(site.operator), text[:_MAX_SEARCHED_CHARS]) is not None


def load_observations(raw: bytes) -> dict[str, dict[int, list[Observation]]]:
    """Return the observations in a report's lines, by test and site; lines of another form are left out."""
    by_node: dict[str, dict[int, list[Observation]]] = {}
    for line in report_lines(raw, json.loads):
        match line:
            case {"node": str(node), "site": int(site), "saw": [str(), *_] as saw}:
                by_node.setdefault(node, {}).setdefault(site, []).append(cast("Observation", saw))
            case _:
                pass
    return by_node
