"""Reads the chunks of a streamed chat completion, with characters that the server cut into two put together.

JSON writes a character beyond U+FFFF as two escapes, the halves of a surrogate pair. A server that streams UTF-16
units sends them in two chunks; a model may also write one half alone, which UTF-8 cannot encode.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, cast

import msgspec
from msgspec import Raw

from understudy.gateway.backends.chat_response import (
    LONG,
    ChatResponse,
    ResponseMessage,
    StreamError,
    ToolPiece,
    read_answer,
)

REPLACEMENT = "\ufffd"
"""Stands for half of a surrogate pair that has no other half."""

_CHUNK = msgspec.json.Decoder(ChatResponse)
_TEXTS = frozenset(("content", "reasoning", "reasoning_content", "arguments"))
_TOKENS = frozenset(("prompt_token_ids", "input_ids"))
_Part = tuple[str, int]


class ChunkReader:
    """Reads the chunks of one stream. `clean` removes credentials from a text of the server."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._half: tuple[_Part, str] | None = None
        """The first half of a character, at the end of what was read of one part of the response."""

    def read_all(self, data: Sequence[bytes]) -> Iterable[ChatResponse]:
        """Decode chunks that arrived together, from the data of their events. Raises what `read` raises."""
        if len(data) > 1 and len(data[0]) >= LONG:  # the tokens of the prompt come with the first chunk
            return chain((self.read(data[0]),), self.read_all(data[1:]))
        if self._half is None and len(data[0]) < LONG:
            try:
                chunks = _CHUNK.decode_lines(b"\n".join(data))
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                chunks = []  # they are read again, in the ways for what is unusual
            for chunk in chunks:
                if chunk.error is not None:
                    break
            else:
                if len(chunks) == len(data):
                    return chunks
        return map(self.read, data)

    def read(self, data: bytes) -> ChatResponse:
        """Decode a chunk from the data of its event. Raises StreamError, also if it contains an error."""
        try:
            chunk, has_halves = _decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise StreamError(
                f"invalid chunk in the stream: {error}; expected one of /v1/chat/completions: check that "
                "base_url is the address of the model server"
            ) from error
        if has_halves or self._half is not None:
            self._join(chunk)
        if chunk.error is not None:
            self._raise(chunk)
        return chunk

    def _raise(self, chunk: ChatResponse) -> None:
        error = chunk.error
        text = error if isinstance(error, str) else "" if error is None else error.message
        code = None if error is None or isinstance(error, str) else error.code
        raise StreamError(
            f"the stream ended with an error: {self._clean(text)[:500]}; see the model server's log",
            status=code if isinstance(code, int) and 400 <= code < 600 else None,
        )

    def _join(self, chunk: ChatResponse) -> None:
        """Put halves together, and replace those that stay alone. A half at the end of a chunk waits for the next
        one that has a text or ends the response.
        """
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        message = choice.delta = choice.delta or ResponseMessage()
        ended = choice.finish_reason is not None
        if self._half is not None and (ended or _has_text(message)):
            (name, index), half = self._half
            self._half = None
            _prepend(message, name, index, half)
        for name in ("reasoning", "reasoning_content", "content"):
            if text := getattr(message, name):
                setattr(message, name, self._whole((name, 0), text, ended))
        for position, piece in enumerate(message.tool_calls or ()):
            if piece.function is not None and isinstance(piece.function.arguments, str):
                index = position if piece.index is None else piece.index
                piece.function.arguments = self._whole(("arguments", index), piece.function.arguments, ended)

    def _whole(self, part: _Part, text: str, ended: bool) -> str:
        if text and "\ud800" <= text[-1] <= "\udbff" and not ended and self._half is None:
            self._half = part, text[-1]
            text = text[:-1]
        return whole(text)


def whole(text: str) -> str:
    """Return a text with the halves of surrogate pairs joined; one without its other half is replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _decode(data: bytes) -> tuple[ChatResponse, bool]:
    """Return a chunk, and whether its texts may have halves of surrogate pairs."""
    try:
        return read_answer(data, _CHUNK.decode), False
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if rb"\u" not in data:
            raise
    return msgspec.convert(_without_halves(json.loads(data)), ChatResponse), True


def _without_halves(value: Any) -> Any:
    """Return a JSON value with the halves in its strings replaced, but for those of texts; token ids as JSON."""
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, list):
        return [_without_halves(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    return {
        key: item
        if key in _TEXTS and isinstance(item, str)
        else Raw(json.dumps(item).encode())
        if key in _TOKENS
        else _without_halves(item)
        for key, item in fields.items()
    }


def _has_text(message: ResponseMessage) -> bool:
    return bool(message.content or message.reasoning or message.reasoning_content or message.tool_calls)


def _prepend(message: ResponseMessage, name: str, index: int, half: str) -> None:
    """Put a half before the text of a part; if the chunk has none of that part, as a text of its own."""
    if name != "arguments":
        setattr(message, name, half + (getattr(message, name) or ""))
        return
    pieces = message.tool_calls or []
    for position, piece in enumerate(pieces):
        at = position if piece.index is None else piece.index
        function = piece.function
        if at == index and function is not None and isinstance(function.arguments, str) and not function.name:
            function.arguments = half + function.arguments
            return
    message.tool_calls = [ToolPiece.of_arguments(index, REPLACEMENT), *pieces]
