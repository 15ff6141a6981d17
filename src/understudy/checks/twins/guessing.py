"""Estimates how hard it is for tested code that computes nothing to guess what a version's sites expect (see
`twins`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

from understudy.checks.twins.clues import MAX_FRACTION_BITS, MAX_TEXT_BITS, Clues, plain_bits
from understudy.checks.twins.judge import Observation, holds, margin, satisfies
from understudy.checks.twins.sites import TwinSite
from understudy.checks.twins.twin_decoding import decode
from understudy.checks.twins.twin_encoding import encode
from understudy.util.python_syntax import parse_literal

_SEARCHED_BITS = 6.0  # values with fewer bits than this are not searched for in the rest of a version
_READABLE_BITS = 2.0  # such a value counts as readable if fewer bits than this are left
_MIN_RUN = 3  # that many numbers with equal differences are yielded by a counter
_MAX_CONTENT_BITS = 32.0
_LONG_NEEDLE = 8  # minimum characters for searching an expected substring likewise
_TEXT_OPERATORS = frozenset({"holds", "startswith", "endswith", "search", "match", "fullmatch"})
_MOMENT = re.compile(r"(date|datetime|instant|timedelta) (-?[0-9]{1,18})")
_COMMON_ANSWERS: tuple[Any, ...] = (None, True, False, 0, 1, -1, math.inf, -math.inf, "", "a", b"", [], {})
"""Common answers, one of which often satisfies all expectations of a function."""


def secret_bits(observed: Iterable[tuple[TwinSite, Sequence[Observation]]], clues: Clues) -> float:
    """Return the binary logarithm of the number of guesses at what sites expect, for code that forces the results.

    Equal expectations are guessed once, and numbers with equal differences by their first one and the difference,
    because a function that counts its calls returns them. A truth value counts only where a function must return
    both values, and then once; a relation counts only where no single return value of the function satisfies all
    relations, and an exception only where no single one satisfies all sites that expect one.
    """
    changed = 0.0
    values: dict[str, float] = {}
    returned: dict[str, list[Any]] = {}
    outcomes: dict[str, set[str]] = {}
    relations: dict[str, list[TwinSite]] = {}
    exception_sites: dict[str, TwinSite] = {}
    gold_exceptions: list[list[str]] = []
    for site, gold in observed:
        if site.changeable:
            changed += 1.0
        elif not site.withheld:
            continue
        elif site.operation in ("truth", "isinstance"):
            outcomes.setdefault(f"{site.operation} {site.subject}", set()).add(str(site.want))
        elif site.operation == "approx":
            values |= {
                f"{observation[1]} {site.expected}": _near_bits(observation[1], site.expected, clues)
                for observation in gold
            }
        elif site.operation in ("equal", "same", "count", "calls"):
            for observation in gold:
                text = json.dumps(observation[1])
                if observation[1][0] in ("b", "n"):
                    outcomes.setdefault(f"value {site.subject}", set()).add(text)
                else:
                    returned.setdefault(site.subject, []).append(observation[1])
        elif site.operation == "compare":
            relations.setdefault(site.subject, []).append(site)
        elif site.operation in ("raises", "warns"):  # any number of warnings may be emitted, but one exception
            if site.operation == "raises":
                exception_sites[site.expected] = site
                gold_exceptions += [observation[1] for observation in gold]
            values[f"match {site.operator}"] = _needle_bits(site.operator, clues)
    for encoded_values in returned.values():
        values |= _sequence_bits(encoded_values, clues)
    truth_bits = sum(len(results) > 1 for results in outcomes.values())
    one_suffices = any(
        all(satisfies(site, kinds) for site in exception_sites.values()) for kinds in gold_exceptions
    )
    return (
        changed
        + sum(values.values())
        + truth_bits
        + (0.0 if one_suffices else float(len(exception_sites)))
        + sum(_relation_bits(sites, clues) for sites in relations.values())
    )


def is_readable_elsewhere(site: TwinSite, gold: Sequence[Observation], clues: Clues) -> bool:
    """Return whether tested code can read elsewhere in a version what is withheld at a site."""
    if site.operation in ("equal", "same", "count", "approx", "calls"):
        return any(
            value_bits(observation[1]) >= _SEARCHED_BITS and value_bits(observation[1], clues) < _READABLE_BITS
            for observation in gold
        )
    if site.operation == "compare" and site.operator in _TEXT_OPERATORS and site.want:
        needle = _literal(site.expected)
        return (
            isinstance(needle, str) and len(needle) >= _LONG_NEEDLE and not clues.readable.guessed_length(needle)
        )
    return False


def value_bits(encoded: Any, clues: Clues | None = None) -> float:
    """Return how many bits of a value must be guessed by code that has these clues, or none."""
    number_bits = clues.number_bits if clues else plain_bits
    match encoded:
        case ["i", str(text)]:
            return number_bits(int(text, 16))
        case ["f", str(text)]:
            return number_bits(float.fromhex(text))
        case ["q", str(top), "0x1"]:
            return number_bits(int(top, 16))
        case ["q", *parts]:
            return min(sum(number_bits(int(part, 16)) for part in parts), MAX_FRACTION_BITS)
        case ["c", *parts]:
            return min(sum(number_bits(float.fromhex(part)) for part in parts), MAX_FRACTION_BITS)
        case ["s", str(text)]:
            return _text_bits(text, clues)
        case ["y", str(text)]:
            return _text_bits(bytes.fromhex(text).decode("latin-1"), clues)
        case ["z", str(text)] if clues and (moment := _MOMENT.fullmatch(text)):
            return clues.moment_bits(moment[1], int(moment[2]))
        case ["z", str(text)]:
            return _text_bits(text.partition(" ")[2] or text, clues)
        case ["a" | "o", inner]:
            return value_bits(inner, clues)
        case ["r", *numbers]:
            return max(value_bits(["i", number], clues) for number in numbers)
        case ["k", str(), _]:
            return _content_bits(_leaves([encoded]), clues)
        case ["l" | "t" | "e" | "d", [*content]]:
            least = clues.literal_bits(encoded) if clues else math.inf
            return min(least, _content_bits(_leaves(content), clues) + _order_bits(encoded, clues))
        case _:
            return 0.0


def _text_bits(text: str, clues: Clues | None) -> float:
    if clues:
        return clues.text_bits(text)
    return min(1.0 + len(text), MAX_TEXT_BITS) if text else 0.0


def _order_bits(encoded: Any, clues: Clues | None) -> float:
    """Return the bits of the order of a sequence of texts that can be read elsewhere."""
    match encoded:
        case ["l" | "t", [*content]] if clues and all(item[0] == "s" for item in content):
            return clues.order_bits([str(item[1]) for item in content])
        case _:
            return 0.0


def _content_bits(leaves: list[Any], clues: Clues | None) -> float:
    """Return the bits of a container: each distinct value counts once, truth values only if they differ from the
    most frequent one.
    """
    truths = Counter(json.dumps(leaf) for leaf in leaves if leaf[0] in ("b", "n"))
    rare = sum(truths.values()) - max(truths.values(), default=0)
    return min(1.0 + rare + sum(_sequence_bits(leaves, clues).values()), _MAX_CONTENT_BITS)


def _sequence_bits(values: Sequence[Any], clues: Clues | None) -> dict[str, float]:
    """Return the bits of encoded values in the order in which they are expected, by what is guessed at once: a
    value, or numbers with equal differences.
    """
    bits: dict[str, float] = {}
    begin = 0
    while begin < len(values):
        text, count, step = json.dumps(values[begin]), *_arithmetic_run(values, begin)
        bits[text] = value_bits(values[begin], clues)
        if count >= _MIN_RUN and step:
            text = f"{text} and on by {step}"
            bits[text] = value_bits(["i", hex(step)], clues)
            begin += count
        else:
            begin += 1
    return bits


def _arithmetic_run(values: Sequence[Any], begin: int) -> tuple[int, int]:
    """Return how many values from `begin` on are whole numbers with equal differences, and that difference."""
    numbers = (
        int(encoded[1], 16) for encoded in itertools.takewhile(_is_integer, itertools.islice(values, begin, None))
    )
    pairs = itertools.pairwise(numbers)
    step = next((after - before for before, after in pairs), 0)
    return 2 + sum(1 for _ in itertools.takewhile(lambda pair: pair[1] - pair[0] == step, pairs)), step


def _is_integer(encoded: Any) -> bool:
    return encoded[0] == "i"


def _leaves(content: list[Any]) -> list[Any]:
    """Return the values in an encoded container that are not containers, at most the first thousand."""
    leaves: list[Any] = []
    pending = list(reversed(content))
    while pending and len(leaves) < 1000:
        part = cast("list[Any]", pending.pop())
        if not part:
            continue
        if isinstance(part[0], list):  # a key and value of a dict
            pending += reversed(part)
        elif part[0] in ("l", "t", "e", "d"):
            pending += reversed(cast("list[Any]", part[1]))
        elif part[0] in ("a", "o"):
            pending.append(part[1])
        elif part[0] == "k":
            pending += cast("dict[str, Any]", part[2]).values()
        else:
            leaves.append(part)
    return leaves


def _near_bits(encoded: Any, tolerances: str, clues: Clues) -> float:
    """Return the bits of a value to which an answer must be near: the wider the tolerances, the fewer."""
    within = _literal(tolerances)
    leaves = _leaves([encoded]) if encoded[0] in ("l", "t", "d", "a", "k") else [encoded]
    bits = 0.0
    for leaf in leaves:
        try:
            number = abs(decode(leaf))
            tolerance_bits = math.log2(1 + number / (2 * margin(number, within or {})))
        except (ValueError, TypeError, AttributeError, OverflowError):
            tolerance_bits = math.inf
        bits += min(value_bits(leaf, clues), tolerance_bits)
    return min(bits, _MAX_CONTENT_BITS)


def _relation_bits(sites: Sequence[TwinSite], clues: Clues) -> float:
    """Return the bits that remain to be guessed with the best single answer to all relations that a function must
    satisfy.
    """
    bits = {f"{site.operator} {site.expected} {site.want}": (site, _site_bits(site, clues)) for site in sites}
    answers = [*((answer, 0.0) for answer in _COMMON_ANSWERS)]
    # an expected literal as the answer, which must be guessed itself
    answers += [(_literal(site.expected), site_bits) for site, site_bits in bits.values()]
    return min(
        cost
        + sum(site_bits for site, site_bits in bits.values() if not holds(site, [], [["value", encode(answer)]]))
        for answer, cost in answers
    )


def _site_bits(site: TwinSite, clues: Clues) -> float:
    if site.operator in _TEXT_OPERATORS and site.want:
        return _needle_bits(site.expected, clues)
    return 1.0


def _needle_bits(expected: str, clues: Clues) -> float:
    """Return the bits of a text that must be contained in a longer one, which may contain many guesses."""
    needle = _literal(expected)
    if not isinstance(needle, str | bytes):
        return 0.0
    text = needle if isinstance(needle, str) else needle.decode("latin-1")
    return min(max(0.0, 1.5 * (clues.guessed_length(text) - 3)), 8.0)


def _literal(text: str) -> Any:
    try:
        return parse_literal(text)
    except (ValueError, SyntaxError):
        return None
