"""A model's own vocabulary: text to token ids and back, so that no user text can become a special token.

There are two kinds of text. *Plain* text is what people, tools and the model write. *Marked* text is what a chat
template makes of texts that went through `mark`. In marked text, special tokens are recognised, and whatever
merely looks like one is not, so that no tool result can smuggle in a turn of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
import tokenizers
from msgspec import Struct

from understudy.errors import BackendError, ConfigError
from understudy.util.text import reason_of

_MARK = "\ue000"
_MARKS = re.compile(f"{_MARK}({_MARK}?)")

CACHE_CHARACTERS = 16 << 20
"""How many characters of text are cached with their tokens."""
LOOP_CHARACTERS = 8 << 10
"""Up to this many characters are encoded on the event loop, in about 4 ms; longer texts are encoded in a
thread.
"""

_FREE_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Sequence"})
_FREE_SPLITTERS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "Sequence"})


class _Added(Struct):
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class _TokenizerStep(Struct):
    type: str
    add_prefix_space: bool = False
    normalizers: list[_TokenizerStep] = []
    pretokenizers: list[_TokenizerStep] = []

    def kinds(self) -> set[str]:
        """Return its own type and those of the steps inside it.

        A step that depends on its position is `prefix`.
        """
        kinds = {"prefix" if self.add_prefix_space else self.type}
        return kinds.union(*(step.kinds() for step in (*self.normalizers, *self.pretokenizers)))


class _Definition(Struct):
    added_tokens: list[_Added] = []
    normalizer: _TokenizerStep | None = None
    pre_tokenizer: _TokenizerStep | None = None


class TokenizerVocabulary:
    """The tokenizer that a `tokenizer.json` defines. `template` is the source of the chat template, and `where`
    precedes the error of an invalid definition.

    If the text between special tokens can be encoded by itself, which byte-level vocabularies allow, look-alikes
    are told apart from special tokens, and repeated text is not encoded again. Raises ConfigError for an invalid
    definition.
    """

    def __init__(self, definition: str, template: str, *, where: str = "") -> None:
        try:
            parts = msgspec.json.decode(definition, type=_Definition)
            fields = cast("dict[str, Any]", json.loads(definition)) | {"truncation": None, "padding": None}
            self._whole = tokenizers.Tokenizer.from_str(json.dumps(fields))
            plain: dict[str, Any] = fields | {"added_tokens": [], "post_processor": None}
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        except Exception as error:  # `tokenizers` raises no narrower class
            raise ConfigError(
                f"{where}invalid tokenizer.json: {reason_of(error)}; download it from the model again, or upgrade "
                "the package tokenizers"
            ) from error
        vocabulary = self._whole.get_vocab(with_added_tokens=True)
        self._all_ids = frozenset(vocabulary.values())
        self._specials = {token.content: vocabulary[token.content] for token in parts.added_tokens}
        self._piecewise = _is_piecewise(parts)
        # Text that spells a special token gets a mark. Tokens of whitespace only are left out: ordinary text has
        # the same characters, and must become the same token.
        control = [token for token in parts.added_tokens if token.special or token.content in template]
        self._look_alike = _any_of(token.content for token in control if not token.content.isspace())
        self._pieces = re.compile(f"({_any_of(self._specials).pattern})")
        self._cache: OrderedDict[str, array[int]] = OrderedDict()
        self._cached_characters = 0

    def mark(self, text: str) -> str:
        """Convert plain text to marked text by inserting a mark into each look-alike of a special token."""
        if not self._piecewise:
            return text
        if _MARK in text:
            text = text.replace(_MARK, _MARK + _MARK)
        return self._look_alike.sub(lambda match: match[0][0] + _MARK + match[0][1:], text)

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of marked text.

        Unpaired surrogates, which no vocabulary has, become their JSON escapes.
        """
        text = text.encode(errors="backslashreplace").decode()
        if not self._piecewise:
            return (await _encode(self._whole, [text]))[0].tolist()
        pieces = [piece for piece in self._pieces.split(text) if piece]
        ordinary = dict.fromkeys(piece for piece in pieces if piece not in self._specials)
        encoded = {piece: cached for piece in ordinary if (cached := self._cached(piece)) is not None}
        missing = [piece for piece in ordinary if piece not in encoded]
        fresh = await _encode(self._plain, [_MARKS.sub(r"\1", piece) for piece in missing])
        for piece, piece_ids in zip(missing, fresh, strict=True):
            encoded[piece] = piece_ids
            self._cache_piece(piece, piece_ids)
        ids: list[int] = []
        for piece in pieces:
            special = self._specials.get(piece)
            ids.extend(encoded[piece] if special is None else (special,))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises BackendError for an id outside the vocabulary."""
        if not self._all_ids.issuperset(ids):
            wrong = next(id_ for id_ in ids if id_ not in self._all_ids)
            raise BackendError(
                f"invalid token id {wrong} from the model server: expected one of the vocabulary's, up to "
                f"{max(self._all_ids, default=-1)}; check that `tokenizer` is the tokenizer of the served model"
            )
        return self._whole.decode(ids, skip_special_tokens=False)

    def _cached(self, piece: str) -> array[int] | None:
        ids = self._cache.get(piece)
        if ids is not None:
            self._cache.move_to_end(piece)
        return ids

    def _cache_piece(self, piece: str, ids: array[int]) -> None:
        # Another conversation may have added the same piece while this one was encoded in a thread.
        if piece in self._cache:
            return
        self._cache[piece] = ids
        self._cached_characters += len(piece)
        while self._cached_characters > CACHE_CHARACTERS:
            old, _ = self._cache.popitem(last=False)
            self._cached_characters -= len(old)


async def _encode(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[array[int]]:
    def encode() -> list[array[int]]:
        # Only batch encoding releases the interpreter lock.
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", encoding.ids) for encoding in encoded]

    return await asyncio.to_thread(encode) if sum(map(len, texts)) > LOOP_CHARACTERS else encode()


def _is_piecewise(definition: _Definition) -> bool:
    """Return whether a text's ids are those of its pieces between special tokens, because no step looks beyond its
    piece.
    """
    normalizers = definition.normalizer.kinds() if definition.normalizer else set[str]()
    splitters = definition.pre_tokenizer.kinds() if definition.pre_tokenizer else set[str]()
    return (
        normalizers <= _FREE_NORMALIZERS
        and "ByteLevel" in splitters
        and splitters <= _FREE_SPLITTERS
        and not any(token.lstrip or token.rstrip or token.single_word for token in definition.added_tokens)
        and not (normalizers - {"Sequence"} and any(token.normalized for token in definition.added_tokens))
    )


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of the tokens; without tokens, it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
