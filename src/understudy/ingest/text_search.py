"""Searches the texts of stored sessions: which turns say some words, and where.

A text belongs to one turn only: what the model answered to that turn, and a message to the first turn that saw it.
Else every later state of a conversation would match. Texts are compressed in the store, each once, and are read as
they are needed: an index would double the store and slow down every ingest for what is asked now and then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.ingest.redaction import redact_trace
from understudy.ingest.trace import Trace, TraceTurn, state_id, text_of
from understudy.ingest.trace_store import traces
from understudy.redact.redactor import Redactor
from understudy.store.sessions import SessionRepository
from understudy.wire.arguments import parse_object

_WORD = re.compile(r'"([^"]+)"|(\S+)')
_AROUND = 60
"""Characters of a snippet on either side of the first word."""

HIDDEN = "(what matches is redacted)"


class TextMatch(Struct, frozen=True, kw_only=True):
    """A state that has the words. `role` is of the text: "assistant" for the answer, else of a new message."""

    state_id: str
    role: str
    snippet: str


def search_words(query: str) -> list[str]:
    """The words and the quoted phrases of a query, folded. Raises ConfigError when there are none."""
    found_words = [(quoted or word).casefold() for quoted, word in _WORD.findall(query)]
    if not found_words:
        raise ConfigError('--text: expected words that a turn must contain, with a phrase in "double quotes"')
    return found_words


def search_texts(
    sessions: SessionRepository, query: str, where: str | None, redactor: Redactor | None
) -> Iterator[TextMatch]:
    """The states that `where` is true of and that have all words of a query in one text, whatever their case.

    Snippets are redacted where a redactor is passed. Raises ConfigError for an empty query, and as
    `SessionRepository.select`.
    """
    words = search_words(query)
    chosen = {row[0] for row in sessions.table(("state_id",), where)}
    for trace in traces(sessions, sessions.whole_conversations(sessions.select(where))):
        ids = [state_id(trace.trace_id, turn.message_id) for turn in trace.turns]
        matches = {index: match for index, match in _matches(trace, words) if ids[index] in chosen}
        if not matches:
            continue
        if redactor is not None:
            clean = dict(_matches(redact_trace(trace, redactor), words))
            matches = {index: clean.get(index, (role, HIDDEN)) for index, (role, _) in matches.items()}
        for index, (role, snippet) in matches.items():
            yield TextMatch(state_id=ids[index], role=role, snippet=snippet)


def _matches(trace: Trace, words: Sequence[str]) -> Iterator[tuple[int, tuple[str, str]]]:
    """The index of each turn that has all words in one of its texts, with the text's role and a snippet."""
    seen: set[int] = set()
    for index, turn in enumerate(trace.turns):
        for role, text in _own_texts(trace, turn, seen):
            folded = text.casefold()
            if all(word in folded for word in words):
                yield index, (role, _snippet(text, words))
                break


def _own_texts(trace: Trace, turn: TraceTurn, seen: set[int]) -> Iterator[tuple[str, str]]:
    """The texts that belong to a turn, each with its role; the nodes that they are of become `seen`."""
    new: list[int] = []
    node = turn.context
    while node >= 0 and node not in seen:
        new.append(node)
        node = trace.nodes[node].parent
    seen.update(new, turn.action)
    action = trace.renderer.action([trace.nodes[node].body for node in turn.action])
    calls = (
        f"{call['function']['name']} {text}"
        for call in action.tool_calls
        for text in _argument_texts(call["function"]["arguments"])
    )
    for text in (action.content, action.thinking, *calls):
        if text:
            yield "assistant", text
    for node in reversed(new):
        for message in trace.renderer.history(trace.nodes[node].body):
            if message["role"] != "assistant":
                yield message["role"], text_of(message.get("content"))


def _argument_texts(arguments: str) -> list[str]:
    """The values of a call's arguments, without the escapes of JSON; the text itself where it is no object."""
    values = parse_object(arguments)
    if values is None:
        return [arguments]
    return [" ".join(value if isinstance(value, str) else str(value) for value in values.values())]


def _snippet(text: str, words: Sequence[str]) -> str:
    """What stands around the first of the words, in one line."""
    at = min(_position(text, word) for word in words)
    first, last = max(at - _AROUND, 0), at + _AROUND
    cut = " ".join(text[first:last].split())
    return ("\u2026" if first else "") + cut + ("\u2026" if last < len(text) else "")


def _position(text: str, word: str) -> int:
    """Where a folded word stands in a text: folding may change lengths, so the text is searched as it is first."""
    match = re.search(re.escape(word), text, re.IGNORECASE)
    return match.start() if match else text.casefold().index(word)
