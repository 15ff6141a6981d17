"""Parses completion tokens into what a chat client sees: reasoning, content and tool calls, in Hermes format.

Parsing works on tokens, not on text, because a `</tool_call>` inside a string of the arguments consists of
ordinary tokens and ends nothing.
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
    """What is needed to read a completion: the bytes of each token, and the ids of special tokens.

    `end_id` is the token that ends a turn.
    """

    token_bytes: list[bytes]
    special_texts: dict[int, str]
    end_id: int

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, in which special tokens are recognised. Raises BackendError for a lone
        surrogate.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, with special tokens; bytes that are not valid UTF-8 become U+FFFD.

        Raises BackendError for an id outside the vocabulary.
        """
        ...


def check_unicode(text: str) -> None:
    """Raise BackendError for a lone surrogate, which has no UTF-8 encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the text has a lone surrogate at character {error.start}; it is not valid Unicode, remove it"
        raise BackendError(message, status=400) from None


def decode_tokens(token_bytes: Sequence[bytes], ids: Iterable[int]) -> str:
    """See `Vocabulary.decode`."""
    ids, size = list(ids), len(token_bytes)
    if ids and not (min(ids) >= 0 and max(ids) < size):
        wrong = next(id_ for id_ in ids if not 0 <= id_ < size)
        raise BackendError(
            f"invalid token id {wrong}; expected 0 to {size - 1}: encode with this model's tokenizer", status=400
        )
    return b"".join(map(token_bytes.__getitem__, ids)).decode("utf-8", "replace")


def byte_level_bytes(vocabulary: Mapping[str, int], specials: Mapping[int, str]) -> list[bytes]:
    """Return the bytes of every token by id; b"" for an id without a token.

    Byte-level BPE spells each byte as one printable character; `specials` are spelled as they are.
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
    """A part of the completion: `ids` are its tokens, `text` is its text (for a tool call, the arguments).

    A `silent` segment has no text for the client: the end of the turn, or the newline between calls. The ids of
    all segments together are the completion.
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
    """Return the segments of a completion.

    Without `tools`, tool calls are content. `byte_limit` truncates the text (not the tokens), as a stop string
    does. If a tool call is cut off or is not valid JSON, everything after the reasoning is content.
    """
    runs = _runs(tokenizer, ids, byte_limit)
    segments, position = _reasoning(runs)
    after_reasoning = runs[position:]
    called = _with_calls(after_reasoning) if tools else None
    return segments + (called if called is not None else _as_content(after_reasoning))


class _TokenRun(Struct, frozen=True):
    """A run of ordinary tokens, or one special token, which `special` names."""

    special: str | None
    ids: list[int]
    data: bytes


_TURN_ENDS = ("<|im_end|>", "<|endoftext|>")


def _runs(tokenizer: Vocabulary, ids: Sequence[int], byte_limit: int | None) -> list[_TokenRun]:
    tokens: list[_TokenRun] = []
    bytes_left = byte_limit
    for id_ in ids:
        data = tokenizer.token_bytes[id_][:bytes_left]
        bytes_left = None if bytes_left is None else bytes_left - len(data)
        special = tokenizer.special_texts.get(id_)
        # A special token that a stop string has cut is ordinary text.
        tokens.append(
            _TokenRun(special if special is not None and len(data) == len(special) else None, [id_], data)
        )
    runs: list[_TokenRun] = []
    for special, members in groupby(tokens, key=lambda token: token.special):
        group = list(members)
        runs += group if special else [_TokenRun(None, _ids(group), b"".join(token.data for token in group))]
    return runs


def _reasoning(runs: Sequence[_TokenRun]) -> tuple[list[CompletionSegment], int]:
    """Return the reasoning at the start, if any, and the index where it ends; unclosed reasoning ends with the
    turn.
    """
    if not runs or runs[0].special != "<think>":
        return [], 0
    end = _find(runs, 1, "</think>", *_TURN_ENDS)
    closed = end < len(runs) and runs[end].special == "</think>"
    thoughts = runs[: end + closed]
    return [CompletionSegment("reasoning", _text(runs[1:end]), _ids(thoughts))], len(thoughts)


def _with_calls(runs: Sequence[_TokenRun]) -> list[CompletionSegment] | None:
    """Return content, then tool calls; None when a call cannot be parsed. Text after the first call is dropped."""
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
    # A character that is incomplete at the completion's end is dropped, as in a stream.
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(run.data for run in runs))


def _ids(runs: Sequence[_TokenRun]) -> list[int]:
    return [id_ for run in runs for id_ in run.ids]
