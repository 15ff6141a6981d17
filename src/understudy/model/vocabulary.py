"""What every tokenizer of the embedded server offers, and the special tokens that the shipped ones have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""In the order of their ids, from 0."""


class Vocabulary(Protocol):
    """What a completion is read by: the bytes of each token, and the ids of those that are no text.

    `end_id` is the token that ends a turn.
    """

    token_bytes: list[bytes]
    special_texts: dict[int, str]
    end_id: int

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, special tokens counting as such. Raises BackendError on a lone surrogate."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens included; bytes that are no UTF-8 become U+FFFD.

        Raises BackendError for an id outside the vocabulary.
        """
        ...


def byte_level_bytes(vocabulary: Mapping[str, int], specials: Mapping[int, str]) -> list[bytes]:
    """The bytes of every token by id, b"" where an id has none.

    Byte-level BPE writes each byte as one printable character; `specials` are what they look like.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    to_byte = {chr(byte): byte for byte in printable}
    to_byte.update({chr(0x100 + index): byte for index, byte in enumerate(unprintable)})
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, id_ in vocabulary.items():
        table[id_] = token.encode() if id_ in specials else bytes(to_byte[character] for character in token)
    return table
