"""The tokenizer of the embedded model: byte-level BPE, exact both ways, incremental over a growing prompt.

Text comes in two forms. *Plain* text is what people and tools write. *Marked* text is what the chat template
renders: in it a special token is a special token, and whatever merely looks like one carries a mark (see
`mark`), so that no message can smuggle in a turn of its own.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from functools import cache
from importlib import resources

import tokenizers

from understudy.errors import BackendError
from understudy.model.vocabulary import SPECIAL_TOKENS, byte_level_bytes

_MARK = "\ue000"
_SPECIAL = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
# A turn's header is a piece of its own: a completion is encoded without it, so no merge may cross its end.
_PIECES = re.compile(rf"(<\|im_start\|>(?:system|user|assistant)\n|{_SPECIAL.pattern})")
_MARKS = re.compile(f"{_MARK}({_MARK}?)")

_CACHE_CHARACTERS = 48 << 20


def mark(text: str) -> str:
    """Plain text as marked text that encodes to ordinary tokens: each look-alike gets a mark after its `<`."""
    if _MARK in text:
        text = text.replace(_MARK, _MARK + _MARK)
    return _SPECIAL.sub(lambda match: match[0][0] + _MARK + match[0][1:], text)


def unmark(text: str) -> str:
    """Marked text as people see it: the inverse of `mark`."""
    return _MARKS.sub(r"\1", text) if _MARK in text else text


class ScriptedTokenizer:
    """Encodes and decodes; `decode(encode(s)) == s` for every string without lone surrogates."""

    def __init__(self, definition: str) -> None:
        self._bpe = tokenizers.Tokenizer.from_str(definition)
        self._bpe.encode_special_tokens = True  # what looks special is split by us, or is ordinary
        vocabulary = self._bpe.get_vocab(with_added_tokens=True)
        self.special_ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}
        self.special_texts = {id_: token for token, id_ in self.special_ids.items()}
        self.end_id = self.special_ids["<|im_end|>"]
        self.token_bytes = byte_level_bytes(vocabulary, self.special_texts)
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._cached_characters = 0

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, special tokens counting as such. Raises BackendError on a lone surrogate."""
        return self.encode_marked(text.replace(_MARK, _MARK + _MARK))[0]

    def encode_marked(self, text: str) -> tuple[list[int], int]:
        """Token ids of marked text, and how many of the first of them were known from earlier texts."""
        ids: list[int] = []
        cached = 0
        all_cached = True
        for piece in _PIECES.split(text):
            if not piece:
                continue
            special = self.special_ids.get(piece)
            if special is not None:
                ids.append(special)
            else:
                piece_ids = self._pieces.get(piece)
                if piece_ids is None:
                    all_cached = False
                    piece_ids = self._encode_piece(piece)
                else:
                    self._pieces.move_to_end(piece)
                ids.extend(piece_ids)
            if all_cached:
                cached = len(ids)
        return ids, cached

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens included; bytes that are no UTF-8 become U+FFFD.

        Raises BackendError for an id outside the vocabulary.
        """
        table = self.token_bytes
        try:
            return b"".join([table[id_] for id_ in ids if id_ >= 0 or _outside(id_)]).decode("utf-8", "replace")
        except IndexError:
            raise BackendError(
                f"a token id is not in the vocabulary; expected 0 to {len(table) - 1}", status=400
            ) from None

    def _encode_piece(self, piece: str) -> array[int]:
        if piece.startswith("<|im_start|>"):
            ids = array(
                "i", [self.special_ids["<|im_start|>"], *self._bpe_ids(piece.removeprefix("<|im_start|>"))]
            )
        else:
            ids = array("i", self._bpe_ids(unmark(piece)))
        self._pieces[piece] = ids
        self._cached_characters += len(piece)
        while self._cached_characters > _CACHE_CHARACTERS:
            old, _ = self._pieces.popitem(last=False)
            self._cached_characters -= len(old)
        return ids

    def _bpe_ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BackendError(
                f"the text has a lone surrogate at character {error.start}; it is not valid Unicode, remove it",
                status=400,
            ) from None
        return self._bpe.encode(text, add_special_tokens=False).ids


def _outside(id_: int) -> bool:
    raise IndexError(id_)  # Python would count a negative id from the end


@cache
def scripted_tokenizer() -> ScriptedTokenizer:
    """The tokenizer that comes with the package, loaded once."""
    return ScriptedTokenizer(
        resources.files("understudy.model").joinpath("assets/tokenizer.json").read_text("utf-8")
    )
