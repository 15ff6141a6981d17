"""Anthropic's API and compatible ones: requests and answers are passed on byte for byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from understudy.errors import BackendError
from understudy.gateway.backends.base import NativeRequest, NativeResponse
from understudy.gateway.backends.fields import Count
from understudy.gateway.backends.http import ANSWER_TIMEOUT_S, HttpClient, ServerSentEvent, naming
from understudy.gateway.errors import refused_credentials
from understudy.gateway.prices import Price
from understudy.types import Usage
from understudy.wire.anthropic import CLOSING_EVENTS, MessageAssembly
from understudy.wire.errors import InvalidRequest, ProviderError, ProviderRefusal, too_deep

BASE_URL = "https://api.anthropic.com"
END_S = 1.0
"""How many seconds a stream may take to end after its last event."""

_VERSION = {"anthropic-version": "2023-06-01"}
_PASSED_ON = re.compile(rb"accept|user-agent|x-app|(anthropic|x-claude-code|x-stainless)-[a-z0-9-]+")
_SPACE = re.compile(r"[ \t\n\r]*")
_KEY = re.compile(rb'[{,\s]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*+:\s*+')
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OUR_KEY = frozenset({401, 403})
_NO_STATUS = 600
# The HTTP status for each type of error event, for when no status was sent to the agent yet.
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

# Reasons why an answer ended, in the terms of chat completions. Reasons without such a term stay as they are.
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


class _MessageBody(Struct):
    type: Literal["message"]
    content: list[msgspec.Raw]
    model: str | None = None
    stop_reason: str | None = None
    usage: _MessageUsage | None = None


class _TokenCountBody(Struct):
    input_tokens: int


class AnthropicRelay:
    """A Relay to the Messages API at `base_url` (without its `/v1`), with our key.

    Every request is sent with the model name `model`, or with the agent's own if that is None. No connection is
    opened before the first use.
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
        self.model = model or ""
        self.price = price

    async def relay(self, request: NativeRequest, emit: Callable[[bytes], None] | None = None) -> NativeResponse:
        """See Relay."""
        url = self._http.base + request.path
        data, headers = self._body(request.body), _headers(request.headers)
        try:
            with naming(f"POST {url}"):
                if request.stream:
                    return await self._stream(url, data, headers, emit)
                return self._parse_message(url, await self._http.send("POST", url, data, headers))
        except BackendError as error:
            raise self._refusal_for_agent(error) from error

    async def relay_count(self, request: NativeRequest) -> bytes:
        """See Relay."""
        url = self._http.base + request.path
        try:
            answer = await self._http.send("POST", url, self._body(request.body), _headers(request.headers))
        except BackendError as error:
            raise self._refusal_for_agent(error) from error
        self._http.decode(f"POST {url}", answer, _TokenCountBody)
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
    ) -> NativeResponse:
        message = MessageAssembly()
        held_back: list[bytes] = []
        deadline = asyncio.timeout(None)

        def take(events: list[ServerSentEvent]) -> None:
            passed_on: list[bytes] = []
            try:
                for event in events:
                    if event.name == b"content_block_delta" and message.streaming and emit is not None:
                        message.add_delta(event.data)  # nearly all events are of this kind
                        passed_on.append(event.raw)
                        continue
                    if event.name == b"error" and not message.complete:
                        raise _error_of_event(url, event.data)
                    repeated = event.name == b"message_start" and message.started
                    message.add(event.name, event.data)
                    if repeated:
                        continue  # some gateways send it twice, which an agent would take for a second message
                    if message.complete:
                        held_back.append(event.raw)
                        deadline.reschedule(asyncio.get_running_loop().time() + END_S)
                    elif emit is None or not message.started or event.name in CLOSING_EVENTS:
                        held_back.append(event.raw)
                    elif event.name == b"message_start":
                        # together with the events that came before the message
                        passed_on.extend((*held_back, event.raw))
                        held_back.clear()
                    else:
                        passed_on.append(event.raw)
            finally:
                if passed_on and emit is not None:
                    emit(b"".join(passed_on))  # events that arrived together are passed on together

        try:
            async with deadline:
                await self._http.stream("POST", url, data, take, headers)
        except (BackendError, TimeoutError):
            if not message.complete:
                raise
        if not message.started and (whole := self._unstreamed_response(held_back)):
            return whole
        answer = self._parse_message(url, message.message())
        return msgspec.structs.replace(answer, events=b"".join(held_back))

    def _unstreamed_response(self, events: list[bytes]) -> NativeResponse | None:
        """Return the response of a provider that sent a single JSON message although a stream was requested."""
        try:
            return self._parse_message("", b"".join(events))
        except BackendError:
            return None

    def _parse_message(self, url: str, body: bytes) -> NativeResponse:
        message = self._http.decode(f"POST {url}", body, _MessageBody)
        usage, stop_reason = message.usage or _MessageUsage(), message.stop_reason or "none"
        cache_read, cache_write = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        return NativeResponse(
            message=body,
            events=None,
            model=message.model or self.model,
            finish_reason=_FINISH_REASONS.get(stop_reason, stop_reason),
            usage=Usage(
                prompt_tokens=(usage.input_tokens or 0) + cache_read + cache_write,
                completion_tokens=usage.output_tokens or 0,
                cached_tokens=cache_read,
                cache_write_tokens=cache_write,
            ),
        )

    def _refusal_for_agent(self, error: BackendError) -> BackendError:
        """Return the error for the agent: the provider's own, unless it rejected the gateway's key."""
        if isinstance(error, ProviderRefusal):
            status, provider_error = error.error.status, error.error
        elif error.status is not None and error.status >= 400:
            status, provider_error = error.status, _provider_error(error)
        else:
            return error
        if status in _OUR_KEY:
            # With these words an agent would blame its own key, and ask its user for another one.
            provider_error = ProviderError(500, "api_error", refused_credentials(status), should_retry=False)
        provider_error = msgspec.structs.replace(
            provider_error,
            status=provider_error.status if provider_error.status < _NO_STATUS else 500,
            type=self._http.clean(provider_error.type),
            message=self._http.clean(provider_error.message),
        )
        return ProviderRefusal(self._http.clean(str(error)), provider_error, error.retry_after_s)

    def _body(self, body: bytes) -> bytes:
        return with_model_name(body, self.model) if self.model else body


def _provider_error(error: BackendError) -> ProviderError:
    """Return the error in a provider's response if it has the usual shape, else None."""
    status = error.status or 0
    try:
        detail = msgspec.json.decode(error.body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        detail = _ErrorDetail(message=error.body[:500].decode(errors="replace"))
    return ProviderError(status, detail.type, detail.message or f"status {status}", error.should_retry)


def _error_of_event(url: str, data: bytes) -> BackendError:
    """Convert an error event to an error."""
    try:
        detail = msgspec.json.decode(data, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        detail = _ErrorDetail(message=data[:500].decode(errors="replace"))
    provider_error = ProviderError(_STATUS.get(detail.type, 500), detail.type, detail.message)
    return ProviderRefusal(
        f"POST {url}: the stream ended with an error: {detail.type}: {detail.message}; retry the request if the "
        "provider's message asks for nothing else",
        provider_error,
    )


def _headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return those of the agent's headers that the provider needs. The agent's key is not among them."""
    passed = {name: value for name, value in headers.items() if _PASSED_ON.fullmatch(name)}
    return _VERSION | {name.decode("latin-1"): value.decode("latin-1") for name, value in passed.items()}


def with_model_name(body: bytes, model: str) -> bytes:
    """Return a request body with another model name, and every other byte unchanged. Raises InvalidRequest."""
    if (position := _find_model_value(body)) is not None:
        start, end = position
        return b"".join((body[:start], json.dumps(model).encode(), body[end:]))
    name, parts, copied_end = json.dumps(model), list[str](), 0
    read = json.JSONDecoder().raw_decode
    try:
        text = body.decode()
        position = _skip_whitespace(text, 0) + 1  # after the opening brace
        while True:
            key, end = read(text, _skip_whitespace(text, position))
            start = _skip_whitespace(text, _skip_whitespace(text, end) + 1)
            _, end = read(text, start)
            if key == "model":
                parts += (text[copied_end:start], name)
                copied_end = end
            position = _skip_whitespace(text, end) + 1
            if text[position - 1] == "}":
                return "".join((*parts, text[copied_end:])).encode()
    except RecursionError as error:
        raise too_deep() from error
    except (ValueError, IndexError) as error:
        raise InvalidRequest(
            f"the request body is not valid JSON: {error}; expected a JSON object: correct the request"
        ) from error


def _find_model_value(body: bytes) -> tuple[int, int] | None:
    """Return where the one value of `model` begins and ends.

    It is a quick search: None if the result is not certain.
    """
    try:
        fields = _FIELDS.decode(body)
        body.decode()  # the values in between are skipped without parsing them
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    position, span = 0, None
    for name, value in fields.items():
        if (key := _KEY.match(body, position)) is None:
            return None
        position = key.end() + len(memoryview(value))
        if name == "model":
            span = key.end(), position
    # A duplicate key, of which `fields` holds only the last value, is detected at the end.
    return span if body[position:].strip() == b"}" else None


def _skip_whitespace(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position
