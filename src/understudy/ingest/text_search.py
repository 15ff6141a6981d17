"""Searches the texts of stored sessions for words.

Each text belongs to one turn: an answer to the turn that gave it, a message to the first turn that saw it.
Otherwise every later state of the conversation would match too. Texts are decompressed as they are searched; an
index would double the size of the store and slow down every ingest, for a search that is seldom used.
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
"""Characters of a snippet before and after the first word."""

HIDDEN = "(what matches is redacted)"


class TextMatch(Struct, frozen=True, kw_only=True):
    """A state that contains the words.

    `role` is the role of the text: "assistant" for the answer, else of a new message.
    """

    state_id: str
    role: str
    snippet: str


def search_words(query: str) -> list[str]:
    """Return the words and quoted phrases of a query, case-folded. Raises ConfigError if there are none."""
    found_words = [(quoted or word).casefold() for quoted, word in _WORD.findall(query)]
    if not found_words:
        raise ConfigError(
            f'--text: no word to search for in {query!r:.40}; give at least one, or a phrase in "double quotes"'
        )
    return found_words


def search_texts(
    sessions: SessionRepository, query: str, where: str | None, redactor: Redactor | None
) -> Iterator[TextMatch]:
    """Yield the states that match `where` and have one text with all words of the query, ignoring case.

    Snippets are redacted if a redactor is given. Raises ConfigError for an empty query, and whatever
    `SessionRepository.select` raises.
    """
    words = search_words(query)
    selected_ids = {row[0] for row in sessions.table(("state_id",), where)}
    for trace in traces(sessions, sessions.whole_conversations(sessions.select(where))):
        ids = [state_id(trace.trace_id, turn.message_id) for turn in trace.turns]
        matches = {index: match for index, match in _matches(trace, words) if ids[index] in selected_ids}
        if not matches:
            continue
        if redactor is not None:
            redacted_matches = dict(_matches(redact_trace(trace, redactor), words))
            matches = {index: redacted_matches.get(index, (role, HIDDEN)) for index, (role, _) in matches.items()}
        for index, (role, snippet) in matches.items():
            yield TextMatch(state_id=ids[index], role=role, snippet=snippet)


def _matches(trace: Trace, words: Sequence[str]) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield the index of each turn with all words in one of its texts, with that text's role and a snippet."""
    visited_nodes: set[int] = set()
    for index, turn in enumerate(trace.turns):
        for role, text in _texts_of_turn(trace, turn, visited_nodes):
            folded = text.casefold()
            if all(word in folded for word in words):
                yield index, (role, _snippet(text, words))
                break


def _texts_of_turn(trace: Trace, turn: TraceTurn, visited_nodes: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the texts that belong to a turn, each with its role, and add their nodes to `visited_nodes`."""
    new_nodes: list[int] = []
    node = turn.context
    while node >= 0 and node not in visited_nodes:
        new_nodes.append(node)
        node = trace.nodes[node].parent
    visited_nodes.update(new_nodes, turn.action)
    action = trace.renderer.action([trace.nodes[node].body for node in turn.action])
    calls = (
        f"{call['function']['name']} {text}"
        for call in action.tool_calls
        for text in _argument_texts(call["function"]["arguments"])
    )
    for text in (action.content, action.thinking, *calls):
        if text:
            yield "assistant", text
    for node in reversed(new_nodes):
        for message in trace.renderer.history(trace.nodes[node].body):
            if message["role"] != "assistant":
                yield message["role"], text_of(message.get("content"))


def _argument_texts(arguments: str) -> list[str]:
    """Return the values of a call's arguments without JSON escapes, or the raw text if it is not a JSON object."""
    values = parse_object(arguments)
    if values is None:
        return [arguments]
    return [" ".join(value if isinstance(value, str) else str(value) for value in values.values())]


def _snippet(text: str, words: Sequence[str]) -> str:
    """Return the text around the first of the words, on one line."""
    position = min(_position(text, word) for word in words)
    start, end = max(position - _AROUND, 0), position + _AROUND
    snippet = " ".join(text[start:end].split())
    return ("\u2026" if start else "") + snippet + ("\u2026" if end < len(text) else "")


def _position(text: str, word: str) -> int:
    """Return the position of a case-folded word in a text.

    Case folding may change lengths, so the original text is searched first.
    """
    match = re.search(re.escape(word), text, re.IGNORECASE)
    return match.start() if match else text.casefold().index(word)
