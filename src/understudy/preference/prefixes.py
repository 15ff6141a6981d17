"""When two conversations are the same so far: equal after what changes from run to run is taken out.

Taken out are dates and times, durations, universally unique ids and other long hexadecimal numbers, addresses in
memory, process ids, names of temporary files, colours, white space at line ends, and the ids of tool calls. The
rest must be equal to the letter, but for the assistant's turns: those are the same when they come to the same
(`substance.alike`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from understudy.preference.normalise import lines
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
_LONGEST = 400_000
"""Characters of a text in which what changes is looked for; a longer one must be equal to the letter."""


def stable(text: str) -> str:
    """The text without what changes from run to run."""
    if len(text) <= _LONGEST:
        for pattern, name in _VOLATILE:
            text = pattern.sub(name, text)
    return lines(text)


def beginning(conversation: Conversation) -> bytes:
    """A digest of a conversation's system prompt and all that it begins with."""
    return digest([stable(conversation.system), *_contents(conversation.blocks)])


def added(blocks: Sequence[Block], calls: Sequence[str]) -> bytes:
    """A digest of what came after an answer: the results of its calls, and what the user said.

    `calls` are the ids of the answer's tool calls in an order that does not depend on the run.
    """
    places = {id_: number for number, id_ in enumerate(calls)}
    results = sorted(
        (places.get(block.id, len(places)), str(block.is_error), stable(block.text))
        for block in blocks
        if block.kind == "tool_result"
    )
    others = [block for block in blocks if block.kind != "tool_result"]
    return digest(
        [*(part for result in results for part in ("result", str(result[0]), *result[1:])), *_contents(others)]
    )


def _contents(blocks: Iterable[Block]) -> list[str]:
    parts: list[str] = []
    for block in blocks:
        if block.kind != "thinking":
            parts += [block.role, block.kind, block.name, block.arguments, str(block.is_error), stable(block.text)]
    return parts


def digest(parts: Iterable[str]) -> bytes:
    """A digest of texts, 16 bytes."""
    hasher = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "big") + data)
    return hasher.digest()
