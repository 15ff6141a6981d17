"""Searches a text for secrets, by their surroundings (`rules`) and by their form (`tokens`).

A rule is tried only where one of its needles occurs, and one pass over the text finds all needles. So the time is
linear in the length of the text, whatever the text is.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from ahocorasick_rs import BytesAhoCorasick, Implementation

from understudy.redact.heuristics import looks_random
from understudy.redact.rules import RULES, Hits, SecretMatch, place_rules, secret_at
from understudy.redact.tokens import DOTS, LONG_RUN, lead_before, token_starts, tokens_in_run

_TOKENS = 1 << 16


class _Trial(NamedTuple):
    """What to try at a needle: the number of the rule, or `_TOKENS`; the pattern that must match; the function to
    call.
    """

    number: int
    matches: Callable[[str, int], object]
    look: Callable[[str, int], Hits]


def _trials() -> dict[bytes, list[_Trial]]:
    trials: dict[bytes, list[_Trial]] = {}
    for number, rule in enumerate((*RULES, *place_rules())):
        for needle in rule.needles:
            trials.setdefault(needle, []).append(_Trial(number, rule.ahead.match, rule.look))
    for start, pattern in token_starts().items():
        trials.setdefault(start.encode(), []).append(_Trial(_TOKENS, pattern.match, _no_look))
    return trials


def _no_look(text: str, position: int) -> Hits:
    """Return nothing, because the beginning of a token is only recorded; its run is examined later."""
    return ()


_WINDOW = 1 << 18
"""How many characters are searched at once, so that memory stays bounded even for a text that consists of needles.
"""
_SHORTEST = 6
_SPARSE = 64
"""For how many characters one candidate is remembered, so that they never take more memory than the text."""


class _Needles(NamedTuple):
    """The automaton that finds all needles in one pass, what to try at each of them by its number, and how many
    characters must be searched behind the last place at which something may begin.

    Searching for each needle alone took most of redaction's time.
    """

    automaton: BytesAhoCorasick
    trials: list[list[_Trial]]
    reach: int


@cache
def _needles() -> _Needles:
    trials = _trials()
    return _Needles(
        BytesAhoCorasick(list(trials), implementation=Implementation.DFA),
        list(trials.values()),
        max(*map(len, trials), LONG_RUN),
    )


def _sort(sign: str) -> int:
    return ord("w" if sign.isascii() and (sign.isalnum() or sign in "_-") else "." if sign in DOTS else " ")


_SORTS = bytes(_sort(chr(byte)) for byte in range(256))
"""The class of each byte: `w` for a run, `.` between the runs of a dotted token, a space for all others."""
_AFTER_DOT = b"." + b"w" * LONG_RUN
_RUN = re.compile(r"[\w-]+", re.ASCII)
_MIDDLE = re.compile(r"[.:~|][\w-]{6}", re.ASCII)
"""The second part of a Discord token, of which the first one is a long run too."""
_BEHIND = 64
"""More characters than what stands before a needle or a dot is looked at."""


class Candidates(NamedTuple):
    """Where a text may have secrets: the needles at which the pattern of a trial matches, as (start, end, trial),
    and the dots behind which a long run may be a part of a token.
    """

    needles: list[tuple[int, int, _Trial]]
    dots: list[int]


Edits = Sequence[tuple[int, int, int]]
"""Parts of a text that were replaced, in order and apart: start, end, and the length of what is there now."""


def find_secrets(text: str) -> list[SecretMatch]:
    """Return all matches of the rules in a text, in no particular order; matches may overlap."""
    windows = ((text, start, min(start + _WINDOW, len(text))) for start in range(0, len(text), _WINDOW))
    return _examine(text, (_candidates([window])[0] for window in windows))


def search_texts(texts: Iterable[str]) -> Iterator[tuple[list[SecretMatch], Candidates | None]]:
    """Yield for each text what `find_secrets` returns, and its candidates for `search_again` unless they are too
    many.

    One pass over many texts is quicker than one over each.
    """
    some: list[str] = []
    size = 0
    for text in texts:
        if size + len(text) > _WINDOW:
            yield from _together(some)
            some, size = [], 0
        if len(text) > _WINDOW:
            yield find_secrets(text), None
        else:
            some.append(text)
            size += len(text)
    yield from _together(some)


def _together(texts: list[str]) -> Iterator[tuple[list[SecretMatch], Candidates | None]]:
    for text, candidates in zip(texts, _candidates([(text, 0, len(text)) for text in texts]), strict=True):
        many = len(candidates.needles) > 8 + len(text) // _SPARSE
        yield _examine(text, (candidates,)), None if many else candidates


def search_again(text: str, before: Candidates, edits: Edits) -> tuple[list[SecretMatch], Candidates]:
    """Return what `find_secrets` returns for a text of which parts were replaced, and its candidates.

    `before` are the candidates before that. Others are looked for around the edits only; all are examined again.
    """
    candidates = _moved(text, before, edits)
    return _examine(text, (candidates,)), candidates


def _candidates(pieces: Sequence[tuple[str, int, int]]) -> list[Candidates]:
    """Return the candidates in each piece of a text: those that begin in text[start:end]."""
    automaton, tried, reach = _needles()
    every = [Candidates([], []) for _ in pieces]
    slices = [text[start : end + reach] for text, start, end in pieces]
    begins = [*accumulate((len(one) + 1 for one in slices), initial=0)]
    # One byte a character, so that places are the same. No needle and no run has a NUL in it.
    small = "\0".join(slices).replace("：", ":").encode("latin-1", "replace").lower()
    needles: list[tuple[int, int, _Trial]] = []
    text, moved, limit, last = "", 0, 0, 0
    for needle, start, end in automaton.find_matches_as_indexes(small, overlapping=True):
        if start >= limit:
            number = bisect_right(begins, start) - 1
            text, first, last = pieces[number]
            needles, moved, limit = every[number].needles, first - begins[number], begins[number + 1]
        position = start + moved
        if position < last:
            for trial in tried[needle]:
                if trial[1](text, position) is not None:
                    needles.append((position, end + moved, trial))
    sorts = small.translate(_SORTS)
    dot = sorts.find(_AFTER_DOT)
    while dot >= 0:
        number = bisect_right(begins, dot) - 1
        text, first, last = pieces[number]
        position = dot + first - begins[number]
        if position < last and (lead_before(text, position + 1) or _after_middle(text, position)):
            every[number].dots.append(position)
        dot = sorts.find(_AFTER_DOT, dot + LONG_RUN)
    return every


def _after_middle(text: str, dot: int) -> bool:
    return dot > 7 and _MIDDLE.match(text, dot - 7) is not None


def _moved(text: str, before: Candidates, edits: Edits) -> Candidates:
    """Return the candidates of a text after edits, by those before them."""
    pieces: list[tuple[str, int, int]] = []
    ends: list[int] = []
    shifts = [0]
    for start, end, length in edits:
        begin = start + shifts[-1]
        # What is read behind a needle ends on the next line at the latest.
        left = text.rfind("\n", 0, max(text.rfind("\n", 0, begin), 0)) + 1
        right = min(begin + length + _BEHIND, len(text))
        if pieces and left <= pieces[-1][2]:
            left = pieces.pop()[1]
        pieces.append((text, left, right))
        ends.append(end)
        shifts.append(shifts[-1] + length - (end - start))
    around = _candidates(pieces)
    needles = [one for piece in around for one in piece.needles]
    dots = [dot for piece in around for dot in piece.dots]
    lefts, rights = [left for _, left, _ in pieces], [right for _, _, right in pieces]

    def shift(position: int) -> int | None:
        """How far a place has moved; None for one that was replaced or is in a piece."""
        edit = bisect_right(ends, position)
        if edit < len(edits) and position >= edits[edit][0]:
            return None
        moved = position + shifts[edit]
        piece = bisect_right(lefts, moved) - 1
        return shifts[edit] if piece < 0 or moved >= rights[piece] else None

    for start, end, trial in before.needles:
        moved = shift(start)
        if moved is not None:
            needles.append((start + moved, end + moved, trial))
    for dot in before.dots:
        moved = shift(dot)
        if moved is not None:
            dots.append(dot + moved)
    return Candidates(sorted(needles, key=itemgetter(1)), dots)


def _examine(text: str, parts: Iterable[Candidates]) -> list[SecretMatch]:
    """Return the secrets at the candidates in the parts of a text."""
    matches_by_rule: dict[int, list[SecretMatch]] = {}
    starts: list[int] = []
    dotted: list[int] = []
    for needles, dots in parts:
        for position, _, (number, _, look) in needles:
            if number == _TOKENS:
                starts.append(position)
            elif result := look(text, position):
                matches_by_rule.setdefault(number, []).extend(result)
        for dot in dots:
            if lead_before(text, dot + 1):
                dotted.append(dot + 1)
            if _after_middle(text, dot):
                dotted.append(dot - 8)
    if not (matches_by_rule or starts or dotted) or len(text) < _SHORTEST:
        return []
    hits = [hit for number in sorted(matches_by_rule) for hit in matches_by_rule[number]]
    if starts or dotted:
        hits += _tokens(text, sorted(starts), dotted)
    if hits:
        hits += _beside_ids(text, hits)
    return hits


def _tokens(text: str, starts: list[int], dotted: list[int]) -> Iterator[SecretMatch]:
    """Return the tokens in the runs of letters, digits, `_` and `-` in which one starts, or a part of a dotted one
    does.
    """
    sorts = text.encode("latin-1", "replace").translate(_SORTS)
    end = 0
    for at in sorted([*starts, *dotted]):
        run = _RUN.match(text, at) if at >= end else None
        if run is None:
            continue
        start = max(sorts.rfind(b".", end, at), sorts.rfind(b" ", end, at), end - 1) + 1
        end = run.end()
        if end - start >= LONG_RUN:
            begins = starts[bisect_left(starts, start) : bisect_left(starts, end)]
            for first, last, rule in tokens_in_run(text, start, end, begins):
                yield secret_at(rule, text, first, last)


_BESIDE = {
    "aws-key-id": (
        "aws-secret",
        re.compile(
            r"(?<![A-Za-z0-9+/])(?=[^a-z]{0,39}[a-z])(?=[^A-Z]{0,39}[A-Z])[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=])"
        ),
        400,
    ),
    "twilio-account": ("twilio-secret", re.compile(r"(?<![A-Za-z0-9])[0-9a-f]{32}(?![A-Za-z0-9])"), 120),
}
"""Secrets near an id: by the rule of the id, the rule and form of the secret, and the distance in characters."""


def _beside_ids(text: str, hits: list[SecretMatch]) -> list[SecretMatch]:
    """Return secrets without a form of their own that are near the ids to which they belong."""
    near: list[SecretMatch] = []
    for of, (rule, pattern, around) in _BESIDE.items():
        reached = 0
        for hit in sorted(hit for hit in hits if hit.rule == of):
            begin = max(hit.start - around, reached)
            for match in pattern.finditer(text, begin, min(hit.end + around, len(text))):
                if looks_random(match.group()):
                    near.append(secret_at(rule, text, *match.span()))
            reached = max(reached, hit.end)
    return near
