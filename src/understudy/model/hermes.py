"""Completion tokens as what a chat client sees: reasoning, content and tool calls, in Hermes' form.

Parsing goes by tokens, not by text: a `</tool_call>` inside a string of the arguments is ordinary tokens and ends
nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from understudy.errors import BackendError

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


def check_unicode(text: str) -> None:
    """Raise BackendError for a lone surrogate, which has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the text has a lone surrogate at character {error.start}; it is not valid Unicode, remove it"
        raise BackendError(message, status=400) from None


def decode_tokens(token_bytes: Sequence[bytes], ids: Iterable[int]) -> str:
    """See `Vocabulary.decode`."""
    ids, size = list(ids), len(token_bytes)
    if ids and not (min(ids) >= 0 and max(ids) < size):
        raise BackendError(f"a token id is not in the vocabulary; expected 0 to {size - 1}", status=400)
    return b"".join([token_bytes[id_] for id_ in ids]).decode("utf-8", "replace")


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


Kind = Literal["reasoning", "content", "tool_call", "silent"]


class CompletionSegment(Struct, frozen=True):
    """A stretch of the completion: `ids` are its tokens, `text` is what it says (a tool call's arguments).

    A `silent` segment says nothing: the end of the turn, the newline between calls. The ids of all segments
    together are the completion.
    """

    kind: Kind
    text: str
    ids: list[int]
    name: str = ""


class _HermesCall(Struct):
    name: str
    arguments: msgspec.Raw


def parse_completion(
    tokenizer: Vocabulary, ids: Sequence[int], *, tools: bool = True, byte_limit: int | None = None
) -> list[CompletionSegment]:
    """The segments of a completion.

    Without `tools`, a tool call is content. `byte_limit` cuts the text (not the tokens) as a stop string does.
    When a tool call cannot be read, because it was cut off or is no JSON, everything after the reasoning is
    content.
    """
    runs = _runs(tokenizer, ids, byte_limit)
    segments, position = _reasoning(runs)
    rest = runs[position:]
    called = _with_calls(rest) if tools else None
    return segments + (called if called is not None else _as_content(rest))


class _TokenRun(Struct, frozen=True):
    """Tokens between special ones, or one special token, which then is named by `special`."""

    special: str | None
    ids: list[int]
    data: bytes


_TURN_ENDS = ("<|im_end|>", "<|endoftext|>")


def _runs(tokenizer: Vocabulary, ids: Sequence[int], byte_limit: int | None) -> list[_TokenRun]:
    tokens: list[_TokenRun] = []
    left = byte_limit
    for id_ in ids:
        data = tokenizer.token_bytes[id_][:left]
        left = None if left is None else left - len(data)
        special = tokenizer.special_texts.get(id_)
        # A special token of which a stop string cut a part off is text.
        tokens.append(
            _TokenRun(special if special is not None and len(data) == len(special) else None, [id_], data)
        )
    runs: list[_TokenRun] = []
    for special, members in groupby(tokens, key=lambda token: token.special):
        group = list(members)
        runs += group if special else [_TokenRun(None, _ids(group), b"".join(token.data for token in group))]
    return runs


def _reasoning(runs: Sequence[_TokenRun]) -> tuple[list[CompletionSegment], int]:
    """The reasoning at the start, if any, and where it ends; one that is not closed goes to the turn's end."""
    if not runs or runs[0].special != "<think>":
        return [], 0
    end = _find(runs, 1, "</think>", *_TURN_ENDS)
    closed = end < len(runs) and runs[end].special == "</think>"
    thoughts = runs[: end + closed]
    return [CompletionSegment("reasoning", _text(runs[1:end]), _ids(thoughts))], len(thoughts)


def _with_calls(runs: Sequence[_TokenRun]) -> list[CompletionSegment] | None:
    """Content, then tool calls; None when one of them cannot be read. Text after the first call is not told."""
    start = _find(runs, 0, "<tool_call>")
    if start == len(runs):
        return _as_content(runs)
    segments = _as_content(runs[:start])
    while start < len(runs):
        if runs[start].special != "<tool_call>":
            segments.append(CompletionSegment("silent", "", runs[start].ids))
            start += 1
            continue
        end = _find(runs, start + 1, "</tool_call>")
        if end == len(runs):
            return None
        try:
            call = msgspec.json.decode(_text(runs[start + 1 : end]), type=_HermesCall)
        except (msgspec.DecodeError, RecursionError):
            return None
        arguments = bytes(call.arguments).decode()
        segments.append(CompletionSegment("tool_call", arguments, _ids(runs[start : end + 1]), call.name))
        start = end + 1
    return segments


def _as_content(runs: Sequence[_TokenRun]) -> list[CompletionSegment]:
    end = _find(runs, 0, *_TURN_ENDS)
    content = [CompletionSegment("content", _text(runs[:end]), _ids(runs[:end]))] if end else []
    return content + ([CompletionSegment("silent", "", _ids(runs[end:]))] if end < len(runs) else [])


def _find(runs: Sequence[_TokenRun], start: int, *specials: str) -> int:
    return next((index for index in range(start, len(runs)) if runs[index].special in specials), len(runs))


def _text(runs: Sequence[_TokenRun]) -> str:
    # A character that the end of the completion cut off is not told, as a stream would not have told it.
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(run.data for run in runs))


def _ids(runs: Sequence[_TokenRun]) -> list[int]:
    return [id_ for run in runs for id_ in run.ids]
