"""What an action comes to: what it does with tools, or what it says where it uses none.

Two actions are alike when they do the same with tools, whatever they say before it; or when both use none and
what they say is similar. **Similarity** is Dice's coefficient over words and pairs of neighbouring words, with
their numbers: 2·Σ min(a, b) / (Σ a + Σ b), of words in lower case; from `SIMILAR` on, two texts count as one.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Any

from msgspec import Struct

from understudy.ingest.trace import TurnAction
from understudy.preference.normalise import NOWHERE, Doing, Place, doings

SIMILAR = 0.6
"""From here on two texts say the same."""
MOST_WORDS = 4_000
"""Words of a text that are compared, from its beginning."""

_WORD = re.compile(r"\w{1,200}")
_LONGEST = 100_000
_MOST_CALLS = 64
_EDITS: dict[str, tuple[str, str, str]] = {
    "Edit": ("file_path", "old_string", "new_string"),
    "replace": ("file_path", "old_string", "new_string"),
    "str_replace_editor": ("path", "old_str", "new_str"),
}
"""Tools that put one text in the place of another that must be unique, and their arguments."""


class ActionEffect(Struct, frozen=True):
    """What an action comes to. `words` are counted only where it uses no tool."""

    doings: tuple[Doing, ...]
    text: str
    word_counts: Counter[tuple[str, ...]]

    @property
    def empty(self) -> bool:
        """Whether it does nothing and says nothing."""
        return not self.doings and not self.text

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal substances; alike ones may have different keys."""
        return ("tools", *(each.key for each in self.doings)) if self.doings else ("text", self.text)


def effect_of(action: TurnAction, location: Place = NOWHERE) -> ActionEffect:
    """What an action comes to."""
    effects = doings(action, location)
    if effects:
        return ActionEffect(effects, "", Counter())
    text = " ".join((action.content or "").split())
    return ActionEffect((), text, _counted(text))


def same_effect(a: ActionEffect, b: ActionEffect) -> bool:
    """Whether two actions come to the same. Symmetric, but not transitive."""
    if a.key == b.key:
        return True
    if a.doings and b.doings:
        return _same_doings(a.doings, b.doings)
    return not (a.doings or b.doings or a.empty or b.empty) and similarity(a, b) >= SIMILAR


def similarity(a: ActionEffect, b: ActionEffect) -> float:
    """How similar what two actions say is, in [0, 1]."""
    if a.text == b.text:
        return 1.0
    total = a.word_counts.total() + b.word_counts.total()
    if not total:
        return 0.0
    few, many = sorted((a.word_counts, b.word_counts), key=len)
    return 2 * sum(min(count, many[word]) for word, count in few.items()) / total


def _counted(text: str) -> Counter[tuple[str, ...]]:
    tokens = _WORD.findall(text[:_LONGEST].casefold())[:MOST_WORDS]
    return Counter[tuple[str, ...]]([*((word,) for word in tokens), *pairwise(tokens)])


def _same_doings(a: tuple[Doing, ...], b: tuple[Doing, ...]) -> bool:
    """Whether two sets of calls are the same, edits compared by their effect."""
    if len(a) != len(b) or len(a) > _MOST_CALLS:
        return False
    rest_a, rest_b = _without(a, b), _without(b, a)
    return _matched(rest_a, rest_b) or _matched(rest_b, rest_a)


def _without(some: tuple[Doing, ...], others: tuple[Doing, ...]) -> list[Doing]:
    """The calls that are not among the others."""
    left = Counter(each.key for each in others)
    rest: list[Doing] = []
    for each in some:
        if left[each.key]:
            left[each.key] -= 1
        else:
            rest.append(each)
    return rest


def _matched(some: list[Doing], others: list[Doing]) -> bool:
    left = list(others)
    for each in some:
        match = next((other for other in left if _same_effect(each, other)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _same_effect(a: Doing, b: Doing) -> bool:
    """Whether one edit is the other with more lines around it: then it changes the same in the same place."""
    names = _EDITS.get(a.name)
    if names is None or a.name != b.name or not (a.readable and b.readable):
        return False
    where, old, new = names
    rest = [{key: value for key, value in each.arguments.items() if key not in (old, new)} for each in (a, b)]
    if rest[0] != rest[1] or not rest[0].get(where) or "replace_all" in rest[0]:
        return False
    (small, to_small), (large, to_large) = sorted(
        ((_text(each.arguments, old), _text(each.arguments, new)) for each in (a, b)),
        key=lambda pair: len(pair[0]),
    )
    return bool(small) and large.count(small) == 1 and large.replace(small, to_small) == to_large


def _text(arguments: Any, key: str) -> str:
    value = arguments.get(key)
    return value if isinstance(value, str) else ""
