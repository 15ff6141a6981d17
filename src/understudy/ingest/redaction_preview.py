"""Previews a redaction without writing anything: counts by rule, and samples with the secrets masked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.ingest.formats.registry import group_batches
from understudy.ingest.log_files import walk_logs
from understudy.ingest.redaction import trace_texts
from understudy.ingest.trace import Trace
from understudy.redact.heuristics import PSEUDONYM
from understudy.redact.redactor import Redactor, json_strings

Conversation = tuple[str, list[Any]]
"""A name, and the texts and JSON values that belong together."""

_AROUND = 40


class RedactionSample(Struct, frozen=True):
    """One replacement: its rule, its conversation, and the redacted text around the pseudonym on one line."""

    rule: str
    where: str
    context: str


class RedactionPreview(Struct, frozen=True, kw_only=True):
    """What would be replaced. By rule, `replaced` counts replacements and `values` counts distinct secrets."""

    conversations: int
    characters: int
    replaced: dict[str, int]
    values: dict[str, int]
    samples: list[RedactionSample]


class RedactionSearch:
    """Redacts conversations as an export does, and counts what was replaced. Nothing is written.

    There are at most `samples` samples per rule, each of a different secret.
    """

    def __init__(self, redactor: Redactor, samples: int = 3) -> None:
        self._redactor = redactor
        self._most_samples = samples
        self._conversations = self._characters = 0
        self._rules: dict[str, str] = {}
        self._samples: list[RedactionSample] = []
        self._replaced, self._values, self._sampled = Counter[str](), Counter[str](), Counter[str]()

    def add(self, conversation: Conversation) -> None:
        """Redact one more conversation."""
        name, items = conversation
        self._conversations += 1
        scope = self._redactor.scoped_to(items)
        redacted = [scope.value(item, f"{name} {index}") for index, item in enumerate(items)]
        name = scope.name(name)
        self._characters += sum(len(text) for text, _ in json_strings(items))
        new_pseudonyms: set[str] = set()
        for _, rule, pseudonym, times in self._redactor.report.drain():
            self._replaced[rule] += times
            if pseudonym not in self._rules:
                self._rules[pseudonym] = rule
                self._values[rule] += 1
                new_pseudonyms.add(pseudonym)
        for text, _ in json_strings(redacted) if new_pseudonyms else ():
            for match in PSEUDONYM.finditer(text):
                rule = self._rules.get(match.group(), "")
                if match.group() in new_pseudonyms and self._sampled[rule] < self._most_samples:
                    new_pseudonyms.discard(match.group())
                    self._sampled[rule] += 1
                    self._samples.append(RedactionSample(rule, name, _context(text, match)))

    def preview(self) -> RedactionPreview:
        """Return what was replaced so far."""
        return RedactionPreview(
            conversations=self._conversations,
            characters=self._characters,
            replaced=dict(self._replaced.most_common()),
            values=dict(self._values.most_common()),
            samples=sorted(self._samples, key=lambda sample: sample.rule),
        )


def preview_redaction(
    conversations: Iterable[Conversation], redactor: Redactor, *, samples: int = 3
) -> RedactionPreview:
    """Return what is replaced in some conversations (see `RedactionSearch`)."""
    search = RedactionSearch(redactor, samples)
    for conversation in conversations:
        search.add(conversation)
    return search.preview()


def _context(text: str, match: re.Match[str]) -> str:
    """Return the text around a pseudonym on one line."""
    before, after = (
        text[max(match.start() - _AROUND, 0) : match.start()],
        text[match.end() : match.end() + _AROUND],
    )
    return " ".join(f"{before}{match.group()}{after}".split())


def trace_conversations(traces: Iterable[Trace]) -> Iterator[Conversation]:
    """Yield the texts of traces as their states would show them."""
    for trace in traces:
        yield trace.trace_id, list(trace_texts(trace))


def file_conversations(path: Path) -> Iterator[Conversation]:
    """Yield the sessions in a log, or in a directory or archive of logs; for any other file, its text.

    Raises ConfigError if there is nothing to read at the path.
    """
    skipped: Counter[str] = Counter()
    has_any = False
    for batch in group_batches(walk_logs([path], skipped), skipped):
        for conversation in trace_conversations(batch.format.read(batch.files)):
            has_any = True
            yield conversation
    if not has_any:
        try:
            yield path.name, [path.read_text("utf-8", "replace")]
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read: {error.strerror}; give a run, a store, session logs or a text file"
            ) from error
