"""Searches a text for secrets, by their surroundings (`rules`) and by their form (`tokens`).

A rule is tried only where one of its needles occurs, and one pass over the text finds all needles. So the time is
linear in the length of the text, whatever the text is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from ahocorasick_rs import BytesAhoCorasick, Implementation

from understudy.redact.heuristics import looks_random
from understudy.redact.rules import RULES, Hits, SecretMatch, secret_at
from understudy.redact.tokens import DOTS, LONG_RUN, lead_before, token_starts, tokens_in_run

_TOKENS = len(RULES)


class _Trial(NamedTuple):
    """What to try at a needle: the number of the rule, or `_TOKENS`; the pattern that must match; the function to
    call.
    """

    number: int
    matches: Callable[[str, int], object]
    look: Callable[[str, int], Hits]


def _trials() -> dict[bytes, list[_Trial]]:
    trials: dict[bytes, list[_Trial]] = {}
    for number, rule in enumerate(RULES):
        for needle in rule.needles:
            trials.setdefault(needle, []).append(_Trial(number, rule.ahead.match, rule.look))
    for start, pattern in token_starts().items():
        trials.setdefault(start.encode(), []).append(_Trial(_TOKENS, pattern.match, _no_look))
    return trials


def _no_look(text: str, position: int) -> Hits:
    """Return nothing, because the beginning of a token is only recorded; its run is examined later."""
    return ()


_WINDOW = 1 << 18
"""How many bytes are searched at once, so that memory stays bounded even for a text that consists of needles."""


class _Needles(NamedTuple):
    """The automaton that finds all needles in one pass, what to try at each of them by its number, and how far two
    windows overlap.

    Searching for each needle alone took most of redaction's time.
    """

    automaton: BytesAhoCorasick
    trials: list[list[_Trial]]
    overlap: int


@cache
def _needles() -> _Needles:
    trials = _trials()
    return _Needles(
        BytesAhoCorasick(list(trials), implementation=Implementation.DFA),
        list(trials.values()),
        max(map(len, trials)) - 1,
    )


def _sort(sign: str) -> int:
    return ord("w" if sign.isascii() and (sign.isalnum() or sign in "_-") else "." if sign in DOTS else " ")


_SORTS = bytes(_sort(chr(byte)) for byte in range(256))
"""The class of each byte: `w` for a run, `.` between the runs of a dotted token, a space for all others."""
_AFTER_DOT = b"." + b"w" * LONG_RUN
_RUN = re.compile(r"[\w-]+", re.ASCII)


def find_secrets(text: str) -> list[SecretMatch]:
    """Return all matches of the rules in a text, in no particular order; matches may overlap."""
    if len(text) < 6:
        return []
    # One byte a character, so that places are the same.
    small = text.encode("latin-1", "replace").lower()
    automaton, tried, overlap = _needles()
    search = automaton.find_matches_as_indexes
    matches_by_text: dict[int, list[SecretMatch]] = {}
    starts: list[int] = []
    for window in range(0, len(small), _WINDOW):
        piece = small if len(small) <= _WINDOW else small[window : window + _WINDOW + overlap]
        for needle, start, _ in search(piece, overlapping=True):
            if start >= _WINDOW:
                continue  # it begins in the next window
            position = window + start
            for number, matches, look in tried[needle]:
                if matches(text, position) is None:
                    continue
                if number == _TOKENS:
                    starts.append(position)
                elif result := look(text, position):
                    matches_by_text.setdefault(number, []).extend(result)
    hits = [hit for number in sorted(matches_by_text) for hit in matches_by_text[number]]
    hits += _tokens(text, small.translate(_SORTS), starts)
    if hits:
        hits += _beside_ids(text, hits)
    return hits


def _tokens(text: str, sorts: bytes, starts: list[int]) -> Iterator[SecretMatch]:
    """Return the tokens in runs of letters, digits, `_` and `-` that contain the beginning of one, or that follow
    a dot.
    """
    dot = sorts.find(_AFTER_DOT)
    while dot >= 0:
        if lead_before(text, dot + 1):
            starts.append(dot + 1)
        # The third part of a Discord token; the first one is as long.
        if sorts.startswith(b".wwwwww", max(dot - 7, 0)):
            starts.append(max(dot - 8, 0))
        dot = sorts.find(_AFTER_DOT, dot + LONG_RUN)
    end = 0
    for at in sorted(starts):
        run = _RUN.match(text, at) if at >= end else None
        if run is None:
            continue
        start = max(sorts.rfind(b".", end, at), sorts.rfind(b" ", end, at), end - 1) + 1
        end = run.end()
        if end - start >= LONG_RUN:
            yield from (
                secret_at(rule, text, first, last) for first, last, rule in tokens_in_run(text, start, end)
            )


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
