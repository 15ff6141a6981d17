"""Anthropic's API, and what speaks like it: requests and answers are passed on byte for byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import Struct

from understudy.errors import BackendError
from understudy.gateway.backends.base import NativeAnswer, NativeRequest
from understudy.gateway.backends.fields import Count
from understudy.gateway.backends.http import ANSWER_TIMEOUT_S, HttpClient
from understudy.gateway.prices import Price
from understudy.types import Usage
from understudy.wire.anthropic.stream import CLOSING_EVENTS, MessageAssembly
from understudy.wire.errors import InvalidRequest, ProviderError, ProviderRefusal, too_deep

BASE_URL = "https://api.anthropic.com"
END_S = 1.0
"""How long a stream may take to end, in seconds, after it has said its last event."""

_VERSION = {"anthropic-version": "2023-06-01"}
_PASSED_ON = re.compile(rb"accept|user-agent|x-app|(anthropic|x-claude-code|x-stainless)-[a-z0-9-]+")
_SPACE = re.compile(r"[ \t\n\r]*")
_KEY = re.compile(rb'[{,\s]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*+:\s*+')
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OUR_KEY = frozenset({401, 403})
_NO_STATUS = 600
# What an error event's type is as a status, for an agent that has seen none yet.
_STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}

# Why an answer ended, in the words of chat completions; what they have no word for stays as it is.
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}


class _ErrorDetail(Struct):
    type: str = "api_error"
    message: str = ""


class _ErrorBody(Struct):
    error: _ErrorDetail


class _MessageUsage(Struct):
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None


class _Whole(Struct):
    type: Literal["message"]
    content: list[msgspec.Raw]
    model: str | None = None
    stop_reason: str | None = None
    usage: _MessageUsage | None = None


class _Count(Struct):
    input_tokens: int


class AnthropicRelay:
    """A Relay to the Messages API at `base_url` (without its `/v1`), with our key.

    Every request is made under the name `model`, or under the agent's own where that is None. Opens no connection
    before it is used.
    """

    name = "anthropic"
    dialect = "anthropic"

    def __init__(
        self,
        base_url: str = BASE_URL,
        model: str | None = None,
        api_key: str | None = None,
        *,
        price: Price | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        resend: bool = True,
    ) -> None:
        self._http = HttpClient(base_url, api_key, key_header="x-api-key", timeout_s=timeout_s, resend=resend)
        self._model = model
        self.price = price

    @property
    def model(self) -> str:
        """The model that answers, whatever the agent calls it; empty where the agent's own name is used."""
        return self._model or ""

    async def relay(self, request: NativeRequest, emit: Callable[[bytes], None] | None = None) -> NativeAnswer:
        """See Relay."""
        url = self._http.base + request.path
        data, headers = self._body(request.body), _headers(request.headers)
        try:
            if request.stream:
                return await self._stream(url, data, headers, emit)
            return self._whole(url, await self._http.send("POST", url, data, headers))
        except BackendError as error:
            raise self._told(error) from error

    async def relay_count(self, request: NativeRequest) -> bytes:
        """See Relay."""
        url = self._http.base + request.path
        try:
            answer = await self._http.send("POST", url, self._body(request.body), _headers(request.headers))
        except BackendError as error:
            raise self._told(error) from error
        self._http.decode(f"POST {url}", answer, _Count)
        return answer

    async def models(self) -> list[str]:
        """See Relay."""
        return await self._http.models(f"{self._http.base}/v1/models?limit=1000", _VERSION)

    async def close(self) -> None:
        """See Relay."""
        await self._http.close()

    # --- answers ----------------------------------------------------------------------------------------

    async def _stream(
        self, url: str, data: bytes, headers: dict[str, str], emit: Callable[[bytes], None] | None
    ) -> NativeAnswer:
        message = MessageAssembly()
        kept: list[bytes] = []
        try:
            async with (
                asyncio.timeout(None) as patience,
                aclosing(self._http.stream("POST", url, data, headers)) as events,
            ):
                async for several in events:
                    said: list[bytes] = []
                    try:
                        for event in several:
                            if event.name == b"error" and not message.complete:
                                raise _said(url, event.data)
                            message.add(event.name, event.data)
                            if message.complete:
                                kept.append(event.raw)
                                patience.reschedule(asyncio.get_running_loop().time() + END_S)
                            elif emit is None or not message.started or event.name in CLOSING_EVENTS:
                                kept.append(event.raw)
                            elif event.name == b"message_start":
                                said += (*kept, event.raw)  # with what came before the message
                                kept.clear()
                            else:
                                said.append(event.raw)
                    finally:
                        if said and emit is not None:
                            emit(b"".join(said))  # what came together is passed on together
        except (BackendError, TimeoutError):
            if not message.complete:
                raise
        if not message.started and (whole := self._not_streamed(kept)):
            return whole
        answer = self._whole(url, message.message())
        return msgspec.structs.replace(answer, events=b"".join(kept))

    def _not_streamed(self, kept: list[bytes]) -> NativeAnswer | None:
        """The answer of a provider that was asked for a stream, and gave one JSON message instead."""
        try:
            return self._whole("", b"".join(kept))
        except BackendError:
            return None

    def _whole(self, url: str, body: bytes) -> NativeAnswer:
        message = self._http.decode(f"POST {url}", body, _Whole)
        told, ended = message.usage or _MessageUsage(), message.stop_reason or "none"
        read, written = told.cache_read_input_tokens or 0, told.cache_creation_input_tokens or 0
        return NativeAnswer(
            message=body,
            events=None,
            model=message.model or self.model,
            finish_reason=_FINISH_REASONS.get(ended, ended),
            usage=Usage(
                prompt_tokens=(told.input_tokens or 0) + read + written,
                completion_tokens=told.output_tokens or 0,
                cached_tokens=read,
                cache_write_tokens=written,
            ),
        )

    def _told(self, error: BackendError) -> BackendError:
        """A refusal as it is told to the agent: in the provider's words, but for one of our own key."""
        if isinstance(error, ProviderRefusal):
            status, said = error.error.status, error.error
        elif error.status is not None and error.status >= 400:
            status, said = error.status, _words(error)
        else:
            return error
        if status in _OUR_KEY:
            # In these words an agent would take it for a fault of its own key, and ask its user for another.
            message = f"the provider refused the gateway's key or its rights: {said.message}"
            said = ProviderError(500, "api_error", message, should_retry=False)
        said = msgspec.structs.replace(
            said,
            status=said.status if said.status < _NO_STATUS else 500,
            type=self._http.clean(said.type),
            message=self._http.clean(said.message),
        )
        return ProviderRefusal(self._http.clean(str(error)), said, error.retry_after_s)

    def _body(self, body: bytes) -> bytes:
        return body if self._model is None else renamed(body, self._model)


def _words(error: BackendError) -> ProviderError:
    """What the provider said in refusing, where it has the usual shape."""
    status = error.status or 0
    try:
        said = msgspec.json.decode(error.body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        said = _ErrorDetail(message=error.body[:500].decode(errors="replace"))
    return ProviderError(status, said.type, said.message or f"status {status}", error.should_retry)


def _said(url: str, data: bytes) -> BackendError:
    """An error event as an error."""
    try:
        said = msgspec.json.decode(data, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        said = _ErrorDetail(message=data[:500].decode(errors="replace"))
    told = ProviderError(_STATUS.get(said.type, 500), said.type, said.message)
    return ProviderRefusal(f"POST {url}: the stream ended with an error: {said.type}: {said.message}", told)


def _headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """What of an agent's headers concerns the provider; its key does not."""
    passed = {name: value for name, value in headers.items() if _PASSED_ON.fullmatch(name)}
    return _VERSION | {name.decode("latin-1"): value.decode("latin-1") for name, value in passed.items()}


def renamed(body: bytes, model: str) -> bytes:
    """A request body with another model's name in it, and every other byte as it was. Raises InvalidRequest."""
    if (place := _model_place(body)) is not None:
        start, end = place
        return b"".join((body[:start], json.dumps(model).encode(), body[end:]))
    name, parts, done = json.dumps(model), list[str](), 0
    read = json.JSONDecoder().raw_decode
    try:
        text = body.decode()
        place = _skip(text, 0) + 1  # past the brace
        while True:
            key, end = read(text, _skip(text, place))
            start = _skip(text, _skip(text, end) + 1)
            _, end = read(text, start)
            if key == "model":
                parts += (text[done:start], name)
                done = end
            place = _skip(text, end) + 1
            if text[place - 1] == "}":
                return "".join((*parts, text[done:])).encode()
    except RecursionError as error:
        raise too_deep() from error
    except (ValueError, IndexError) as error:
        raise InvalidRequest(f"the request body is not a JSON object: {error}") from error


def _model_place(body: bytes) -> tuple[int, int] | None:
    """Where the one value of `model` begins and ends, found quickly; None where that is not sure."""
    try:
        fields = _FIELDS.decode(body)
        body.decode()  # what is stepped over is not looked at
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    at, found = 0, None
    for name, value in fields.items():
        if (key := _KEY.match(body, at)) is None:
            return None
        at = key.end() + len(memoryview(value))
        if name == "model":
            found = key.end(), at
    # A key that comes twice, of which `fields` has the last value only, shows at the end.
    return found if body[at:].strip() == b"}" else None


def _skip(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    return space.end() if space else place
