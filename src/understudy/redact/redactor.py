"""Removes secrets, e-mail addresses and home directories from texts and JSON values."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, Self, cast
from urllib.parse import quote

import msgspec
from ahocorasick_rs import BytesAhoCorasick

from understudy.redact.assignments import defined_identifiers, is_secret_field
from understudy.redact.betterleaks import find_leaks, is_installed
from understudy.redact.heuristics import PSEUDONYM, is_distinctive, is_identifier, is_reference
from understudy.redact.private_keys import key_lines
from understudy.redact.pseudonyms import Pseudonyms, load_key
from understudy.redact.report import RedactionReport
from understudy.redact.rules import SecretMatch
from understudy.redact.search import Candidates, search_again, search_texts
from understudy.redact.tokens import has_token_form

_SHORTEST = 8

_Replaced = tuple[str | None, dict[tuple[str, str], int]]
"""A text with its secrets replaced (None if it has none), and how often each was replaced, by rule and pseudonym.
"""
_UNCHANGED: _Replaced = (None, {})
_Searched = tuple[list[SecretMatch], Candidates | None]
"""What the rules match in a text, and its candidates; None if they are not remembered."""
_NOTHING: _Searched = ([], None)


class KnownSecrets:
    """Known values of eight characters or more, each with the secret that it is a part of."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._listed: list[tuple[str, str]] = []
        self._automaton: BytesAhoCorasick | None = None

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> Iterable[tuple[str, str]]:
        """Yield the values, each with the secret that it is a part of."""
        return self._values.items()

    def add(self, value: str, secret: str | None = None) -> None:
        """Add a value, also as JSON and URLs write it. `secret` is the secret that the value is a part of."""
        once = json.dumps(value)[1:-1]
        forms = {value, once, json.dumps(once)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        forms.add(quote(value, safe="", errors="replace"))
        for form in forms:
            if len(form) >= _SHORTEST and form not in self._values:
                self._values[form] = secret or value
                self._automaton = None

    def find(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield the spans of known values in the text, which may overlap, with the secrets that they are
        parts of.
        """
        if not self._values or len(text) < _SHORTEST:
            return
        for number, start, end in self._prepared().find_matches_as_indexes(_bytes(text), overlapping=True):
            value, whole = self._listed[number]
            if text.startswith(value, start):
                yield start, end, whole

    def without(self, texts: Iterable[str]) -> set[int]:
        """Return the hashes of the texts in which no value stands. One pass over many texts is quicker than one
        over each.
        """
        marks: set[int] = set()
        for some in _batches(texts):
            begins = [*accumulate((len(text) + 1 for text in some), initial=0)]
            # Matches that overlap others may be left out: they are in the same text.
            matches = self._prepared().find_matches_as_indexes(_bytes("\0".join(some)))
            touched = {
                number
                for _, start, end in matches
                for number in range(bisect_right(begins, start) - 1, bisect_left(begins, end))
            }
            marks.update(hash(text) for number, text in enumerate(some) if number not in touched)
        return marks

    def _prepared(self) -> BytesAhoCorasick:
        if self._automaton is None:
            # One pass for all of them, so that the time does not grow with their number.
            self._listed = list(self._values.items())
            self._automaton = BytesAhoCorasick([_bytes(value) for value, _ in self._listed])
        return self._automaton


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size > _BATCH:
            yield some
            some, size = [], 0
    if some:
        yield some


def _bytes(text: str) -> bytes:
    """Return the text as one byte per character; all characters outside Latin-1 become the same byte."""
    return text.encode("latin-1", "replace")


_ASSIGNED = frozenset(("assignment", "field", "command-line", "header", "printed", "sentence", "table"))
"""Rules whose values have no form of their own, so that they may be names in code."""
_ROUNDS = 6
_NESTED = 6
_BATCH = 1 << 18
_SEEN = 1 << 20
_LOOKED = 1 << 14
_IDS_TEXT = """
id uuid tool_call_id call_id message_id messageId session_id sessionId trace_id state_id request_id
requestId parent_id parentUuid tool_use_id toolUseId source_call_id agent_id agentId response_id signature
thought_signature hash sha sha256 digest checksum integrity commit
"""
_IDS = frozenset(_IDS_TEXT.split())
_ID = re.compile(
    r"(?:toolu|srvtoolu|call|msg|req|chatcmpl|cmpl|resp|run|thread|asst|item|fc|rs|evt|gen|step|agent|tool|functions)"
    r"(?:[_.:-][\w.:-]{1,120})|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-fA-F]{1,64}|sha(?:1|256|384|512)-[\w+/=]{20,100}"
    r"|[A-Za-z0-9_-]{1,40}",
    re.ASCII,
)
_SIGNATURE = re.compile(r"[A-Za-z0-9+/_=-]{40,}", re.ASCII)


class Redactor:
    """Replaces secrets, e-mail addresses and home directories by stable pseudonyms derived from `key`.

    With `betterleaks` the rules of that library are used in addition to ours; None means if it is installed.
    `report` says what was replaced where; redactors made by `scoped_to` share it.
    """

    def __init__(
        self, key: bytes, *, betterleaks: bool | None = None, report: RedactionReport | None = None
    ) -> None:
        self.report = report if report is not None else RedactionReport()
        self._names = Pseudonyms(key)
        self._betterleaks = is_installed() if betterleaks is None else betterleaks
        self._secrets: KnownSecrets | None = None
        self._unknown: set[int] | None = None
        self._sources: dict[str, str] = {}
        self._identifiers: frozenset[str] = frozenset()
        # Texts that were searched before are not searched again, because conversations share texts.
        self._clean: set[int] = set()
        self._leaked: dict[int, tuple[tuple[str, str], ...]] = {}
        self._looked: dict[int, _Searched] = {}
        # Cached, because a text occurs in a conversation twice: as an answer, and in the history of later turns.
        self._replaced: dict[int, _Replaced] = {}

    @classmethod
    def from_user_key(cls) -> Self:
        """Return a redactor under the user's own key, which is created if there is none. Raises ConfigError."""
        return cls(load_key())

    def scoped_to(self, values: Iterable[Any]) -> Redactor:
        """Return a redactor for values that belong together, such as those of one conversation.

        It replaces the secrets found in `values` wherever they occur, also where the surrounding text does not
        show that they are secrets. Pass all texts and JSON values that are to be redacted with it; their order
        does not matter then.
        """
        if len(self._clean) + len(self._leaked) > _SEEN:
            self._clean, self._leaked = set(), {}
        if len(self._looked) > _LOOKED:
            self._looked = {}
        scoped = copy(self)  # shares the report and the texts that were searched before
        scoped._secrets, scoped._sources, scoped._identifiers = KnownSecrets(), {}, frozenset()
        scoped._replaced = {}
        values = values if isinstance(values, Sequence) else list(values)
        texts = scoped._learn(values)
        # A name in code is no secret although it is assigned: `password = V2_login` before `def V2_login(`.
        names = [value for value, rule in scoped._sources.items() if rule in _ASSIGNED and is_identifier(value)]
        if names:
            scoped._forget(defined_identifiers(names, texts))
        # Most texts have neither a secret nor a value that is known to be one.
        scoped._unknown = scoped._secrets.without(texts) if scoped._secrets else None
        return scoped

    def text(self, text: str, where: str = "") -> str:
        """Return the text without secrets; `where` is its name in the report."""
        scope = self if self._secrets is not None else self.scoped_to([text])
        return scope._text(text, where)

    def value(self, value: Any, where: str = "") -> Any:
        """Return the JSON value without secrets: in its strings, in its keys, and in JSON text under `arguments`.

        Ids, hashes and signatures are not changed where they have the form of such.
        """
        scope = self if self._secrets is not None else self.scoped_to([value])
        return scope._value(value, where)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of characters that `text` would replace, sorted by start; some may overlap."""
        scope = self if self._secrets is not None else self.scoped_to([text])
        spans: list[tuple[int, int]] = []
        rest = list(text)
        for _ in range(_ROUNDS):
            text_left = "".join(rest)
            hits = _without_overlaps(text_left, scope._hits(text_left, scope._search(text_left)[0]))
            if not hits:
                break
            for hit in hits:
                spans.append((hit.start, hit.end))
                rest[hit.start : hit.end] = "\0" * (hit.end - hit.start)
        return sorted(spans)

    def name(self, value: str, where: str = "") -> str:
        """Return an id or a name, unchanged unless it contains a secret."""
        scope = self if self._secrets is not None else self.scoped_to([])
        return scope._text(value, where)

    # --- looking

    def _learn(self, values: Iterable[Any]) -> list[str]:
        """Look for secrets in the strings of values. Returns the different strings."""
        texts: dict[int, str] = {}
        for value in values:
            for text, name in json_strings(value):
                if name is not None and is_secret_field(name, text):
                    self._remember(text, "field")
                texts.setdefault(hash(text), text)
        for some in _batches(texts.values()):
            self._look(some)
        return [*texts.values()]

    def _look(self, texts: list[str]) -> None:
        """Search texts for secrets, and cache by the text's hash what was found, or that nothing was."""
        for plain in (True, False):
            # Texts of one kind together, because one that is not ASCII makes all that are joined with it slower.
            some = [text for text in texts if text.isascii() is plain and hash(text) not in self._clean]
            new = [text for text in some if hash(text) not in self._looked]
            for text, searched in zip(new, search_texts(new), strict=True):
                if searched[0]:
                    self._looked[hash(text)] = searched
                else:
                    self._clean.add(hash(text))
            for text in some:
                for hit in self._looked.get(hash(text), _NOTHING)[0]:
                    self._note(text, hit)
        if self._betterleaks:
            new = [text for text in texts if hash(text) not in self._leaked and not _idlike(text)]
            leaked = [*find_leaks(new)]
            for text in new:
                self._leaked[hash(text)] = tuple(one for one in leaked if one[1] in text)
            for text in texts:
                for rule, secret in self._leaked.get(hash(text), ()):
                    secret = secret.strip()
                    if secret and not is_reference(secret):
                        self._remember(secret, f"betterleaks:{rule}")

    def _note(self, text: str, hit: SecretMatch) -> None:
        if hit.kind == "private-key":
            self._sources.setdefault(hit.value, hit.rule)
            for piece in key_lines(text[hit.start : hit.end]):
                cast(KnownSecrets, self._secrets).add(piece, hit.value)
        elif hit.kind == "secret":
            self._remember(hit.value, hit.rule)

    def _forget(self, identifiers: frozenset[str]) -> None:
        """Treat these values as names in code, not as secrets, although they were assigned like secrets."""
        self._identifiers = identifiers
        sources = {value: rule for value, rule in self._sources.items() if value not in identifiers}
        if len(sources) < len(self._sources):
            known_secrets, self._secrets, self._sources = self._secrets, KnownSecrets(), sources
            for value, whole in cast(KnownSecrets, known_secrets).items():
                if whole not in identifiers:
                    self._secrets.add(value, whole)

    def _remember(self, value: str, rule: str) -> None:
        if is_distinctive(value) or (
            len(value) >= 8 and (has_token_form(value) or rule.startswith("betterleaks:"))
        ):
            self._sources.setdefault(value, rule)
            cast(KnownSecrets, self._secrets).add(value)

    def _search(self, text: str) -> _Searched:
        mark = hash(text)
        return _NOTHING if mark in self._clean else self._looked.get(mark) or next(search_texts([text]))

    def _hits(self, text: str, hits: list[SecretMatch]) -> list[SecretMatch]:
        """Return what is to be replaced in a text, by what the rules match in it."""
        hits = [*hits]
        if self._identifiers:
            hits = [hit for hit in hits if hit.rule not in _ASSIGNED or hit.value not in self._identifiers]
        for start, end, whole in self._secrets.find(text) if self._secrets else ():
            rule = self._sources.get(whole, "known")
            hits.append(SecretMatch(start, end, rule, "private-key" if rule == "private-key" else "secret", whole))
        return hits

    # --- replacing

    def _text(self, text: str, where: str) -> str:
        mark = hash(text)
        if mark in self._clean and (self._unknown is None or mark in self._unknown):
            return text
        replaced = self._replaced.get(mark)
        if replaced is None:
            replaced = self._replaced[mark] = self._replace(text)
        new, counts = replaced
        for (rule, pseudonym), times in counts.items():
            self.report.add(where, rule, pseudonym, times)
        return text if new is None else new

    def _replace(self, text: str) -> _Replaced:
        counts: dict[tuple[str, str], int] = {}
        matches, candidates = self._search(text)
        for _ in range(_ROUNDS):
            hits = _without_overlaps(text, self._hits(text, matches))
            if not hits:
                break
            done: list[str] = []
            edits: list[tuple[int, int, int]] = []
            last = 0
            for hit in hits:
                pseudonym = self._names.name(hit.kind, hit.value)
                done += (text[last : hit.start], pseudonym)
                counts[hit.rule, pseudonym] = counts.get((hit.rule, pseudonym), 0) + 1
                edits.append((hit.start, hit.end, len(pseudonym)))
                last = hit.end
            text = "".join(done) + text[last:]
            matches, candidates = (
                self._search(text) if candidates is None else search_again(text, candidates, edits)
            )
        return (text, counts) if counts else _UNCHANGED

    def _value(self, value: Any, where: str, nested: int = 0) -> Any:
        holder: list[Any] = [None]
        # Without recursion, because a hostile value may be nested deeper than the stack.
        waiting: list[tuple[Any, Any, Any, str | None]] = [(holder, 0, value, None)]
        while waiting:
            into, at, item, name = waiting.pop()
            whole: Any = item  # not narrowed by isinstance: a cast would cost as much as a step
            if isinstance(item, str):
                into[at] = self._string(item, name, where, nested)
            elif isinstance(item, list | tuple):
                items: list[Any] | tuple[Any, ...] = whole
                into[at] = elements = [None] * len(items)
                waiting += [(elements, index, one, name) for index, one in enumerate(items)]
            elif isinstance(item, dict):
                fields: dict[Any, Any] = whole
                mapping: dict[Any, Any] = {}
                into[at] = mapping
                value_name = _named_beside(fields)
                for key, one in fields.items():
                    new = self._text(key, where) if isinstance(key, str) else key
                    while new in mapping or (new != key and new in fields):
                        new = f"{new}~"
                    mapping[new] = None
                    waiting.append((mapping, new, one, value_name if key == "value" and value_name else key))
            else:
                into[at] = item
        return holder[0]

    def _string(self, text: str, name: str | None, where: str, nested: int) -> str:
        if name == "arguments" and text[:1] in ("{", "[") and nested < _NESTED:
            try:
                value = msgspec.json.decode(text)
                changed = self._value(value, where, nested + 1)
                if changed != value:
                    text = msgspec.json.encode(changed).decode()
            except (ValueError, RecursionError):
                pass
        new = self._text(text, where)
        if (
            new == text
            and name is not None
            and text not in self._identifiers
            and is_secret_field(name, text)
            and PSEUDONYM.search(text) is None
        ):
            pseudonym = self._names.name("secret", text)
            self.report.add(where, "field", pseudonym)
            return pseudonym
        return new


def json_strings(value: Any, nested: int = 0) -> Iterator[tuple[str, str | None]]:
    """Yield each string in a JSON value, including keys, with the name of the field that contains it."""
    waiting: list[tuple[Any, str | None]] = [(value, None)]
    while waiting:
        item, name = waiting.pop()
        whole: Any = item
        if isinstance(item, str):
            yield item, name
            if name == "arguments" and item[:1] in ("{", "[") and nested < _NESTED:
                try:
                    yield from json_strings(msgspec.json.decode(item), nested + 1)
                except (ValueError, RecursionError):
                    continue
        elif isinstance(item, list | tuple):
            items: list[Any] | tuple[Any, ...] = whole
            waiting += [(one, name) for one in items]
        elif isinstance(item, dict):
            fields: dict[Any, Any] = whole
            value_name = _named_beside(fields)
            for key, one in fields.items():
                if isinstance(key, str):
                    yield key, None
                waiting.append((one, value_name if key == "value" and value_name else key))


def _named_beside(fields: dict[Any, Any]) -> str | None:
    """Return the name given in the same object as a value, as in {"name": "DB_PASSWORD", "value": …}."""
    name = fields.get("name") or fields.get("key") if "value" in fields else None
    return name if isinstance(name, str) else None


def _idlike(text: str) -> bool:
    return _ID.fullmatch(text) is not None or _SIGNATURE.fullmatch(text) is not None


def _without_overlaps(text: str, hits: list[SecretMatch]) -> list[SecretMatch]:
    """Return the matches in order, with overlapping ones merged into one, named by the most specific rule."""
    if len(hits) < 2:
        return hits
    apart: list[SecretMatch] = []
    for hit in sorted(hits, key=lambda one: (one.start, -one.end)):
        last = apart[-1] if apart else None
        if last is None or hit.start >= last.end:
            apart.append(hit)
            continue
        # A token in a longer match: keep only the token, unless the rest may be secret too.
        inside = hit.end <= last.end
        if (
            inside
            and last.rule in ("assignment", "url-login")
            and hit.rule != last.rule
            and has_token_form(hit.value)
        ):
            left = len(text[last.start : hit.start]) + len(text[hit.end : last.end])
            if left < 8:
                apart[-1] = hit
                continue
        first = last if inside or last.end - last.start >= hit.end - hit.start else hit
        apart[-1] = first._replace(start=last.start, end=max(last.end, hit.end))
    return apart
