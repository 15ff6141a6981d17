"""Finds observations that agree with the gold patch's, but prove less.

`assertIn(x, output)`, `pytest.warns(W, match=m)` and `raises(E, match=m)` hold for code that emits thousands of
texts, of which one is the right one. Honest code emits more than the gold patch now and then, so that is no
evidence; but a patch that emits far more is not protected by such an assertion. The same holds for a patch whose
own classes decide what the test's arithmetic yields (see `twins.operands`), or whose values come in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from understudy.checks.twins.judge import Observation, is_reordered, is_rest
from understudy.checks.twins.sites import TwinSite
from understudy.util.python_syntax import parse_literal

_FAR_MORE_TIMES = 4
_MORE_MEMBERS, _MORE_CHARACTERS = 10, 100


def weakness(
    sites: Mapping[int, TwinSite],
    gold: Mapping[int, list[Observation]],
    observations: Mapping[int, list[Observation]],
) -> str:
    """Return why observations that agree with the gold patch's prove less than those, as words that follow "the
    tests"; "" if they prove as much.
    """
    if any(number in sites and sites[number].operation == "own" and number not in gold for number in observations):
        return "compute with values of classes that decide the result, which the gold patch's are not"
    shared = [number for number in gold if number in sites and observations.get(number)]
    if any(is_far_more(sites[number], gold[number], observations[number]) for number in shared):
        return "look for something in far more than the gold patch emits"
    if any(is_reordered(sites[number], gold[number], observations[number]) for number in shared):
        return "observed the expected values in another order than with the gold patch"
    return ""


def is_far_more(site: TwinSite, gold: Sequence[Observation], observations: Sequence[Observation]) -> bool:
    """Return whether a patch emitted far more at a site than the gold patch, and so maybe guesses."""
    gold_most, patch_most = _max_amounts(site, gold), _max_amounts(site, observations)
    return (
        patch_most[0] > _FAR_MORE_TIMES * gold_most[0] + _MORE_MEMBERS
        or patch_most[1] > _FAR_MORE_TIMES * gold_most[1] + _MORE_CHARACTERS
    )


def _max_amounts(site: TwinSite, observed: Sequence[Observation]) -> tuple[int, int]:
    """Return the most members, and the most characters, of what a site looks at."""
    amounts = [_amount(site, observation) for observation in observed if not is_rest(observation)]
    return max((members for members, _ in amounts), default=0), max((length for _, length in amounts), default=0)


def _amount(site: TwinSite, observation: Observation) -> tuple[int, int]:
    """Return how many members and how many characters an assertion looks at for something expected."""
    match observation:
        case ["value", encoded] if site.operation == "compare" and site.want:
            if site.operator in ("holds", "search", "match", "fullmatch"):
                return _size(encoded)
            return _size(encoded) if site.operator in (">", ">=") and _expects_set(site) else (0, 0)
        case ["pair", _, encoded, _] if site.operator == "in" and site.want:
            return _size(encoded)
        case ["kind", _, str(text)] if site.operation == "raises" and site.operator:
            return 0, len(text)
        case ["warnings", [*warnings]]:
            return len(warnings), sum(len(str(warning[1])) for warning in warnings) if site.operator else 0
        case _:
            return 0, 0


def _size(encoded: Any) -> tuple[int, int]:
    """Return how many members or characters an encoded value has."""
    match encoded:
        case ["s", str(text)]:
            return 0, len(text)
        case ["y", str(text)]:
            return 0, len(text) // 2
        case ["r", *numbers]:
            begin, end, step = (int(number, 16) for number in numbers)
            return max(0, (end - begin) // step), 0
        case ["o" | "a", inner]:
            return _size(inner)
        case ["l" | "t" | "e" | "d", [*content]]:
            return len(content), 0
        case _:
            return 0, 0


def _expects_set(site: TwinSite) -> bool:
    return isinstance(parse_literal(site.expected), set)
