"""Whether two actions differ in substance, and in what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from understudy.ingest.trace import TurnAction
from understudy.preference.equivalence import ActionEffect, effect_of, same_effect, similarity
from understudy.preference.normalise import NOWHERE, Doing, Place

_SHOWN = 300
_MOST = 8

Kind = Literal["nothing", "words or tools", "tools", "arguments", "words"]
"""nothing: one of them does nothing. words or tools: one uses tools, the other only speaks. tools: other tools, or
as many of others. arguments: the same tools with other arguments. words: neither uses tools, and they say other
things."""


class Difference(Struct, frozen=True, kw_only=True):
    """What differs between two actions: what only the first (`a`) and only the second (`b`) does, shortened.

    `arguments` names those that differ, where each does one thing with the same tool. `similarity` is that of what
    they say, where neither uses a tool.
    """

    kind: Kind
    a: tuple[str, ...]
    b: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    similarity: float | None = None


def difference_json(difference: Difference) -> dict[str, Any]:
    """A difference as evidence, in the types that JSON has."""
    return msgspec.json.decode(msgspec.json.encode(difference))


def differ(a: TurnAction, b: TurnAction, location: Place = NOWHERE) -> Difference | None:
    """What differs in substance; None where they come to the same.

    What is said before the same tool call, and what of its arguments does not count, is no difference.
    """
    return between(effect_of(a, location), effect_of(b, location))


def between(a: ActionEffect, b: ActionEffect) -> Difference | None:
    """What differs between what two actions come to; None where it is the same."""
    if same_effect(a, b):
        return None
    if not a.doings and not b.doings:
        kind: Kind = "nothing" if a.empty or b.empty else "words"
        share = None if kind == "nothing" else round(similarity(a, b), 4)
        return Difference(kind=kind, a=_words_or_effects(a), b=_words_or_effects(b), similarity=share)
    if not a.doings or not b.doings:
        kind = "nothing" if a.empty or b.empty else "words or tools"
        return Difference(
            kind=kind, a=_done(a.doings) or _words_or_effects(a), b=_done(b.doings) or _words_or_effects(b)
        )
    only_a, only_b = _only(a.doings, b.doings), _only(b.doings, a.doings)
    same_tools = Counter(each.name for each in only_a) == Counter(each.name for each in only_b)
    names = _changed(only_a[0], only_b[0]) if same_tools and len(only_a) == 1 else ()
    return Difference(
        kind="arguments" if same_tools else "tools", a=_done(only_a), b=_done(only_b), arguments=names
    )


def _only(some: Sequence[Doing], others: Sequence[Doing]) -> list[Doing]:
    left = Counter(each.key for each in others)
    only: list[Doing] = []
    for each in some:
        left[each.key] -= 1
        if left[each.key] < 0:
            only.append(each)
    return only


def _changed(a: Doing, b: Doing) -> tuple[str, ...]:
    if not (a.readable and b.readable):
        return ()
    first, second = (cast(dict[str, Any], each.arguments) for each in (a, b))
    changed = (key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
    return tuple(sorted(_short(key) for key in changed)[:_MOST])


def _done(doings: Sequence[Doing]) -> tuple[str, ...]:
    shown = [_short(f"{each.name} {_json(each.arguments)}") for each in doings[:_MOST]]
    more = len(doings) - len(shown)
    return (*shown, f"and {more} more") if more > 0 else tuple(shown)


def _words_or_effects(of: ActionEffect) -> tuple[str, ...]:
    return (_short(of.text),) if of.text else ()


def _json(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.encode(arguments).decode()
    except (ValueError, TypeError, OverflowError, RecursionError):
        return repr(arguments)


def _short(text: str) -> str:
    clean = text.encode(errors="replace").decode()
    return clean if len(clean) <= _SHOWN else f"{clean[: _SHOWN - 1]}…"
