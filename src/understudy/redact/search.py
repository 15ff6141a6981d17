"""Looks for secrets in a text: by their surroundings (`rules`) and by their form (`tokens`).

A rule is tried only where one of its needles stands, and one pass over the text finds all needles; so the time is
linear in the text, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import cast

from ahocorasick_rs import BytesAhoCorasick, Implementation

from understudy.redact.heuristics import looks_random
from understudy.redact.rules import RULES, Hits, SecretMatch, secret_at
from understudy.redact.tokens import DOTS, LONG_RUN, TOKEN_STARTS, lead_before, tokens_in_run

_TOKENS = len(RULES)


def _literals() -> tuple[list[bytes], list[list[tuple[int, Callable[[str, int], object]]]]]:
    """The literals that something is tried at, and for each the numbers of the rules, and what they look with.

    `_TOKENS` is the number of what begins a token.
    """
    tried: dict[bytes, list[tuple[int, Callable[[str, int], object]]]] = {}
    for number, rule in enumerate(RULES):
        for needle in rule.needles:
            tried.setdefault(needle, []).append((number, rule.look))
    for start, pattern in TOKEN_STARTS.items():
        tried.setdefault(start.encode(), []).append((_TOKENS, pattern.match))
    return list(tried), list(tried.values())


_NEEDLES, _LOOKS = _literals()
_OVERLAP = max(map(len, _NEEDLES)) - 1
_WINDOW = 1 << 18
"""Bytes that are searched at once, so that a text of nothing but needles takes no memory without bounds."""


@cache
def _automaton() -> BytesAhoCorasick:
    """Finds all needles in one pass. A search for each of them took most of the time of redaction."""
    return BytesAhoCorasick(_NEEDLES, implementation=Implementation.DFA)


_RUN = bytes(
    ord("w") if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "_-") else ord(".")
    for byte in range(256)
)
_AFTER_DOT = b"." + b"w" * LONG_RUN


def find_secrets(text: str) -> list[SecretMatch]:
    """Everything that the rules match in a text, in no order; matches may overlap."""
    if len(text) < 6:
        return []
    # One byte a character, so that places are the same.
    small = text.encode("latin-1", "replace").lower()
    search = _automaton().find_matches_as_indexes
    found: dict[int, list[SecretMatch]] = {}
    starts: list[int] = []
    for window in range(0, len(small), _WINDOW):
        piece = small if len(small) <= _WINDOW else small[window : window + _WINDOW + _OVERLAP]
        for needle, start, _ in search(piece, overlapping=True):
            if start >= _WINDOW:
                continue  # it begins in the next window
            position = window + start
            for number, look in _LOOKS[needle]:
                if result := look(text, position):
                    if number == _TOKENS:
                        starts.append(position)
                    else:
                        found.setdefault(number, []).extend(cast(Hits, result))
    hits = [hit for number in sorted(found) for hit in found[number]]
    hits += _tokens(text, small.translate(_RUN), starts)
    if hits:
        hits += _beside_ids(text, hits)
    return hits


def _tokens(text: str, runs: bytes, starts: list[int]) -> Iterator[SecretMatch]:
    """The tokens in runs of letters, digits, `_` and `-` in which something begins one, or that follow a dot."""
    dot = runs.find(_AFTER_DOT)
    while dot >= 0:
        if text[dot] in DOTS:
            if lead_before(text, dot + 1):
                starts.append(dot + 1)
            # The third part of a Discord token; the first one is as long.
            if dot > 7 and runs[dot - 7 : dot - 6] == b"." == runs[dot - 7 : dot].replace(b"w", b""):
                starts.append(dot - 8)
        dot = runs.find(_AFTER_DOT, dot + LONG_RUN)
    end = -1
    for at in sorted(starts):
        if at < end:
            continue
        start = runs.rfind(b".", 0, at) + 1
        end = runs.find(b".", at)
        end = len(runs) if end < 0 else end
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
    """Secrets without a form of their own, near the ids that they belong to."""
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
