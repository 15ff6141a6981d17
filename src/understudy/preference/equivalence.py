"""When two actions, or two conversations, are the same: by their effect, not by their text.

The effect of an action is what it does with tools, or what it says where it uses none. Two actions have the same
effect when their tool calls do the same, whatever text comes before; or when both use no tool and their texts are
similar. **Similarity** is Dice's coefficient over words and pairs of neighbouring words, with
their numbers: 2·Σ min(a, b) / (Σ a + Σ b), of words in lower case; from `SIMILAR` on, two texts count as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from understudy.ingest.trace import TurnAction
from understudy.preference.normalise import (
    UNKNOWN_DIRECTORY,
    NormalisedCall,
    WorkingDirectory,
    normalise_calls,
    without_trailing_spaces,
)
from understudy.wire.model import Block, Conversation

_VOLATILE: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), f"<{name}>")
    for pattern, name in (
        (r"\x1b\[[0-9;]{0,40}[A-Za-z]", ""),
        (r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b", "uuid"),
        (r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},? (?=[A-Z0-9])", "day"),
        (
            r"\b\d{4}[-/]\d{2}[-/]\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:Z| ?[+-]\d{2}:?\d{2})?)?",
            "time",
        ),
        (r"\b\d{1,2}/\d{1,2}/\d{4}\b", "time"),
        (r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6} {1,2}\d{1,2}(?:,? \d{4})?\b", "time"),
        (r"\b\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?\b", "time"),
        (r"/tmp/[^\s'\":,;)\]]{1,200}", "tmp"),
        (r"\btmp[\w]{6,12}\b", "tmp"),
        (r"\b0x[0-9a-fA-F]{4,16}\b", "address"),
        (r"\b(?=[0-9a-f]{0,63}\d)(?=[0-9a-f]{0,63}[a-f])[0-9a-f]{7,64}\b", "hex"),
        (r"\b(?:pid|PID|process|shell)[ =:]{1,3}\d{1,10}\b", "pid"),
        (r"\b\d{1,9}(?:\.\d{1,9})?(?= ?(?:ms|µs|us|ns|s|sec|secs|seconds?|minutes?)\b)", "n"),
    )
)
_MAX_CHARS = 400_000
"""The longest text, in characters, whose changing parts are ignored. Longer texts must be equal."""


def without_volatile_parts(text: str) -> str:
    """Return the text without parts that differ between runs, such as times and temporary paths."""
    if len(text) <= _MAX_CHARS:
        for pattern, name in _VOLATILE:
            text = pattern.sub(name, text)
    return without_trailing_spaces(text)


def beginning_digest(conversation: Conversation) -> bytes:
    """Return a digest of a conversation's system prompt and its beginning."""
    return digest([without_volatile_parts(conversation.system), *_contents(conversation.blocks)])


def continuation_digest(blocks: Sequence[Block], calls: Sequence[str]) -> bytes:
    """Return a digest of what follows an answer: the results of its calls, and the user's texts.

    `calls` are the ids of the answer's tool calls, in an order that does not depend on the run.
    """
    places = {id_: number for number, id_ in enumerate(calls)}
    results = sorted(
        (places.get(block.id, len(places)), str(block.is_error), without_volatile_parts(block.text))
        for block in blocks
        if block.kind == "tool_result"
    )
    other_blocks = [block for block in blocks if block.kind != "tool_result"]
    return digest(
        [
            *(part for result in results for part in ("result", str(result[0]), *result[1:])),
            *_contents(other_blocks),
        ]
    )


def _contents(blocks: Iterable[Block]) -> list[str]:
    parts: list[str] = []
    for block in blocks:
        if block.kind != "thinking":
            parts += [
                block.role,
                block.kind,
                block.name,
                block.arguments,
                str(block.is_error),
                without_volatile_parts(block.text),
            ]
    return parts


def digest(parts: Iterable[str]) -> bytes:
    """Return a 16-byte digest of texts."""
    hasher = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "big") + data)
    return hasher.digest()


_EXCERPT_LENGTH = 300
_MAX_SHOWN = 8

Kind = Literal["nothing", "words or tools", "tools", "arguments", "words"]
"""How two actions differ.

nothing: one of them does nothing. words or tools: one uses tools, the other only writes text. tools: they use
different tools, or different numbers of calls. arguments: the same tools with different arguments. words: neither
uses tools, and their texts differ.
"""


class Difference(Struct, frozen=True, kw_only=True):
    """The difference of two actions: what only the first (`a`) and only the second (`b`) does, shortened.

    `arguments` names the differing arguments if both make one call of the same tool. `similarity` is that of their
    texts if neither uses a tool.
    """

    kind: Kind
    a: tuple[str, ...]
    b: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    similarity: float | None = None


def difference_json(difference: Difference) -> dict[str, Any]:
    """Return a difference as evidence, in JSON types."""
    return msgspec.json.decode(msgspec.json.encode(difference))


def difference_of_actions(
    a: TurnAction, b: TurnAction, location: WorkingDirectory = UNKNOWN_DIRECTORY
) -> Difference | None:
    """Return the difference between the effects of two actions; None if they are equal.

    Text before the same tool call, and arguments that do not matter, are no difference.
    """
    return difference_between(effect_of(a, location), effect_of(b, location))


def difference_between(a: ActionEffect, b: ActionEffect) -> Difference | None:
    """Return the difference between two effects; None if they are equal."""
    if same_effect(a, b):
        return None
    if not a.calls and not b.calls:
        kind: Kind = "nothing" if a.empty or b.empty else "words"
        share = None if kind == "nothing" else round(similarity(a, b), 4)
        return Difference(kind=kind, a=_words_or_effects(a), b=_words_or_effects(b), similarity=share)
    if not a.calls or not b.calls:
        kind = "nothing" if a.empty or b.empty else "words or tools"
        return Difference(
            kind=kind,
            a=_shown_calls(a.calls) or _words_or_effects(a),
            b=_shown_calls(b.calls) or _words_or_effects(b),
        )
    only_a, only_b = _unmatched(a.calls, b.calls), _unmatched(b.calls, a.calls)
    same_tools = Counter(call.name for call in only_a) == Counter(call.name for call in only_b)
    names = _changed(only_a[0], only_b[0]) if same_tools and len(only_a) == 1 else ()
    return Difference(
        kind="arguments" if same_tools else "tools",
        a=_shown_calls(only_a),
        b=_shown_calls(only_b),
        arguments=names,
    )


def _changed(a: NormalisedCall, b: NormalisedCall) -> tuple[str, ...]:
    if not (a.readable and b.readable):
        return ()
    first, second = (cast(dict[str, Any], call.arguments) for call in (a, b))
    changed = (key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
    return tuple(sorted(_short(key) for key in changed)[:_MAX_SHOWN])


def _shown_calls(calls: Sequence[NormalisedCall]) -> tuple[str, ...]:
    actions = [_short(f"{call.name} {_json(call.arguments)}") for call in calls[:_MAX_SHOWN]]
    more = len(calls) - len(actions)
    return (*actions, f"and {more} more") if more > 0 else tuple(actions)


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
    return clean if len(clean) <= _EXCERPT_LENGTH else f"{clean[: _EXCERPT_LENGTH - 1]}…"


SIMILAR = 0.6
"""Texts with at least this similarity count as the same."""
MAX_WORDS = 4_000
"""How many words of a text are compared, from its beginning."""

_WORD = re.compile(r"\w{1,200}")
_MAX_ANSWER_CHARS = 100_000
_MAX_CALLS = 64
_EDITS: dict[str, tuple[str, str, str]] = {
    "Edit": ("file_path", "old_string", "new_string"),
    "replace": ("file_path", "old_string", "new_string"),
    "str_replace_editor": ("path", "old_str", "new_str"),
}
"""Tools that replace one text, which must be unique in the file, and the names of their arguments."""


class ActionEffect(Struct, frozen=True):
    """The effect of an action. `word_counts` are counted only if it uses no tool."""

    calls: tuple[NormalisedCall, ...]
    text: str
    word_counts: Counter[tuple[str, ...]]

    @property
    def empty(self) -> bool:
        """Whether the action has neither calls nor text."""
        return not self.calls and not self.text

    @property
    def key(self) -> tuple[object, ...]:
        """Equal keys mean equal effects; effects that are the same may still have different keys."""
        return ("tools", *(call.key for call in self.calls)) if self.calls else ("text", self.text)


def effect_of(action: TurnAction, location: WorkingDirectory = UNKNOWN_DIRECTORY) -> ActionEffect:
    """Return the effect of an action."""
    effects = normalise_calls(action, location)
    if effects:
        return ActionEffect(effects, "", Counter())
    text = " ".join((action.content or "").split())
    return ActionEffect((), text, _count_words(text))


def same_effect(a: ActionEffect, b: ActionEffect) -> bool:
    """Return whether two actions have the same effect. Symmetric, but not transitive, because texts need only be
    similar.
    """
    if a.key == b.key:
        return True
    if a.calls and b.calls:
        return _same_calls(a.calls, b.calls)
    return not (a.calls or b.calls or a.empty or b.empty) and similarity(a, b) >= SIMILAR


def similarity(a: ActionEffect, b: ActionEffect) -> float:
    """Return how similar the texts of two actions are, in [0, 1]."""
    if a.text == b.text:
        return 1.0
    total = a.word_counts.total() + b.word_counts.total()
    if not total:
        return 0.0
    few, many = sorted((a.word_counts, b.word_counts), key=len)
    return 2 * sum(min(count, many[word]) for word, count in few.items()) / total


def _count_words(text: str) -> Counter[tuple[str, ...]]:
    tokens = _WORD.findall(text[:_MAX_ANSWER_CHARS].casefold())[:MAX_WORDS]
    return Counter[tuple[str, ...]]([*((word,) for word in tokens), *pairwise(tokens)])


def _same_calls(a: tuple[NormalisedCall, ...], b: tuple[NormalisedCall, ...]) -> bool:
    """Return whether two sets of calls are equal; edits are compared by their effect."""
    if len(a) != len(b) or len(a) > _MAX_CALLS:
        return False
    rest_a, rest_b = _unmatched(a, b), _unmatched(b, a)
    return _all_match(rest_a, rest_b) or _all_match(rest_b, rest_a)


def _unmatched(calls: Sequence[NormalisedCall], others: Sequence[NormalisedCall]) -> list[NormalisedCall]:
    """Return the calls that are not among the others; a call that is made twice counts twice."""
    unused = Counter(call.key for call in others)
    unmatched: list[NormalisedCall] = []
    for call in calls:
        unused[call.key] -= 1
        if unused[call.key] < 0:
            unmatched.append(call)
    return unmatched


def _all_match(calls: list[NormalisedCall], others: list[NormalisedCall]) -> bool:
    unused = list(others)
    for call in calls:
        match = next((candidate for candidate in unused if _same_edit(call, candidate)), None)
        if match is None:
            return False
        unused.remove(match)
    return not unused


def _same_edit(a: NormalisedCall, b: NormalisedCall) -> bool:
    """Return whether two edits make the same change at the same place, one of them perhaps with more context
    lines.
    """
    names = _EDITS.get(a.name)
    if names is None or a.name != b.name or not (a.readable and b.readable):
        return False
    where, old, new = names
    other_arguments = [
        {key: value for key, value in call.arguments.items() if key not in (old, new)} for call in (a, b)
    ]
    if (
        other_arguments[0] != other_arguments[1]
        or not other_arguments[0].get(where)
        or "replace_all" in other_arguments[0]
    ):
        return False
    (small, to_small), (large, to_large) = sorted(
        ((_text(call.arguments, old), _text(call.arguments, new)) for call in (a, b)),
        key=lambda pair: len(pair[0]),
    )
    return bool(small) and large.count(small) == 1 and large.replace(small, to_small) == to_large


def _text(arguments: Any, key: str) -> str:
    value = arguments.get(key)
    return value if isinstance(value, str) else ""
