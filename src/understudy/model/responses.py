"""Writes a completion as JSON for clients: as one message, or as the chunks of a stream."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol
from uuid import uuid4

from msgspec import Struct

from understudy.model.hermes import CompletionSegment, Vocabulary
from understudy.model.protocol import (
    GenerateRequest,
    ModelChatRequest,
    ModelCompletionRequest,
    ModelMessage,
    ModelTool,
    NamedToolChoice,
)


class ModelVersionSpan(Struct, frozen=True):
    """The tokens of a completion from `start` up to `end` were sampled by this version of the weights."""

    version: str
    start: int
    end: int


class ModelCompletion(Struct, frozen=True):
    """A generated turn. `logprobs[i]` belongs to `ids[i]`.

    `stop_reason` is the stop string that was met, or the stop token that the request had named, if any.
    `weight_versions` are those of the weights, None for a policy. `cached_tokens` is the number of prompt tokens
    taken from the cache.
    """

    ids: list[int]
    logprobs: list[float]
    segments: list[CompletionSegment]
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None = None
    weight_versions: tuple[ModelVersionSpan, ...] | None = None
    cached_tokens: int = 0


class ControlRequest(Struct, frozen=True):
    """An operator's command: the query and body of a request to one of the control endpoints."""

    query: Mapping[str, str]
    body: bytes


ControlHandler = Callable[[ControlRequest], Coroutine[Any, Any, dict[str, Any] | str | None]]
"""Carries out a command and returns its result: an object, a text, or nothing. Raises BackendError."""


class ServedModel(Protocol):
    """A model that can be served. `controls` are its own control endpoints, by path and method."""

    vocabulary: Vocabulary
    controls: Mapping[str, Mapping[str, ControlHandler]]

    def models(self) -> Sequence[str]:
        """Return the names of the adapters that it serves besides the model itself."""
        ...

    def render(
        self,
        messages: Sequence[ModelMessage],
        tools: Sequence[ModelTool] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[list[int], int]:
        """Return the tokens of a conversation, and how many of the first ones were cached from earlier
        conversations.

        Raises BackendError when the model cannot represent the conversation.
        """
        ...

    async def chat(
        self, request: ModelChatRequest, prompt: list[int], cached: int, limit: int, model: str
    ) -> ModelCompletion:
        """Return the response to a conversation that was rendered as `prompt`, of at most `limit` tokens.

        `model` is one of its names. Raises BackendError.
        """
        ...

    async def generate(self, request: GenerateRequest, limit: int, model: str) -> ModelCompletion:
        """Return a continuation of the tokens, of at most `limit` tokens. Raises BackendError."""
        ...

    async def prompt_logprobs(self, prompt: Sequence[int], model: str) -> list[float]:
        """Return the logprob of every token of a prompt but the first, at temperature 1. Raises BackendError."""
        ...

    def close(self) -> None:
        """Stop running requests and free resources."""
        ...


_CHUNK_TOKENS = 8


class ChatResult(Struct, frozen=True):
    """All data that a response is made from."""

    model: str
    request: ModelChatRequest
    prompt_ids: list[int]
    completion: ModelCompletion


def message_body(result: ChatResult, tokenizer: Vocabulary) -> dict[str, Any]:
    """Return the body of a `chat.completion`."""
    completion, request = result.completion, result.request
    texts = {segment.kind: segment.text for segment in completion.segments}
    message: dict[str, Any] = {
        "role": "assistant",
        "content": texts.get("content"),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": texts.get("reasoning"),
    }
    calls = [segment for segment in completion.segments if segment.kind == "tool_call"]
    if calls:
        message["tool_calls"] = [
            {"id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in calls
        ]
    elif message["content"] is None and message["reasoning"] is None:
        message["content"] = ""
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(result, tokenizer, 0, len(completion.ids)),
        "finish_reason": _finish_reason(result),
        "stop_reason": completion.stop_reason,
        "token_ids": completion.ids if request.return_token_ids else None,
        "weight_versions": completion.weight_versions,
        "routed_experts": None,
    }
    return _head("chat.completion", result.model) | {
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _usage(result.prompt_ids, completion),
        "prompt_logprobs": None,
        "prompt_token_ids": result.prompt_ids if request.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def tokens_body(request: GenerateRequest, completion: ModelCompletion) -> dict[str, Any]:
    """Return the body of a response in tokens to `request`."""
    content = [
        {"token_id": id_, "logprob": logprob}
        for id_, logprob in zip(completion.ids, completion.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": completion.ids,
        "logprobs": None if request.sampling_params.logprobs is None else {"content": content},
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "weight_versions": completion.weight_versions if request.return_weight_versions else None,
    }
    return {
        "request_id": uuid4().hex,
        "choices": [choice],
        "usage": _usage(request.token_ids, completion),
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }


def completion_body(
    request: ModelCompletionRequest,
    model: str,
    completion: ModelCompletion,
    prompt: Sequence[int],
    scored: list[float] | None,
    tokenizer: Vocabulary,
) -> dict[str, Any]:
    """Return the body of a `text_completion`; `scored` are the logprobs of the prompt's tokens but the first."""
    logprobs: list[Any] | None = None
    if scored is not None:
        entries = zip(prompt[1:], scored, strict=True)
        logprobs = [None, *({str(id_): {"logprob": value}} for id_, value in entries)]
    choice = {
        "index": 0,
        "text": tokenizer.decode(completion.ids),
        "logprobs": None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.ids if request.return_token_ids else None,
        "prompt_token_ids": prompt if request.return_token_ids else None,
        "prompt_logprobs": logprobs,
    }
    head = {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model}
    return head | {"choices": [choice], "usage": _usage(prompt, completion)}


def chunk_bodies(result: ChatResult, tokenizer: Vocabulary) -> Iterator[dict[str, Any]]:
    """Yield the bodies of the `chat.completion.chunk`s, which together say the same as `message_body`."""
    request, completion = result.request, result.completion
    head = _head("chat.completion.chunk", result.model)
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    yield head | {
        "choices": [opening],
        "prompt_token_ids": result.prompt_ids if request.return_token_ids else None,
    }
    position = 0
    # a chunk is needed in any case, for the finish reason
    deltas = list(_deltas(completion.segments, tokenizer)) or [({}, 0)]
    for number, (delta, count) in enumerate(deltas, 1):
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": _logprobs(result, tokenizer, position, position + count),
            "finish_reason": None,
            "token_ids": completion.ids[position : position + count] if request.return_token_ids else None,
        }
        position += count
        if number == len(deltas):
            choice["finish_reason"] = _finish_reason(result)
            choice["stop_reason"] = completion.stop_reason
            choice["weight_versions"] = completion.weight_versions
        yield head | {"choices": [choice]}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield head | {"choices": [], "usage": _usage(result.prompt_ids, completion)}


def _deltas(segments: Sequence[CompletionSegment], tokenizer: Vocabulary) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield what each chunk adds, and how many of the completion's tokens it accounts for."""
    calls = 0
    for segment in segments:
        if segment.kind == "silent":
            yield {}, len(segment.ids)
        elif segment.kind == "tool_call":
            function: dict[str, Any] = {"name": segment.name, "arguments": ""}
            yield {"tool_calls": [{"index": calls, "id": _call_id(), "type": "function", "function": function}]}, 1
            pieces = _even_parts(segment.text, max(1, (len(segment.ids) - 1) // _CHUNK_TOKENS))
            counts = [len(part) for part in _even_parts(segment.ids[1:], len(pieces))]
            for piece, count in zip(pieces, counts, strict=True):
                yield {"tool_calls": [{"index": calls, "function": {"arguments": piece}}]}, count
            calls += 1
        else:
            for piece, count in _text_pieces(segment, tokenizer):
                yield {segment.kind: piece}, count


def _text_pieces(segment: CompletionSegment, tokenizer: Vocabulary) -> Iterator[tuple[str, int]]:
    """Yield the text of a segment, some tokens at a time, without splitting a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ids = segment.ids
    if segment.kind == "reasoning":
        ids = ids[1:-1] if tokenizer.special_texts.get(ids[-1]) == "</think>" else ids[1:]
    silent = len(segment.ids) - len(ids)
    position = 0
    for start in range(0, len(ids), _CHUNK_TOKENS):
        piece_ids = ids[start : start + _CHUNK_TOKENS]
        text = decoder.decode(b"".join(tokenizer.token_bytes[id_] for id_ in piece_ids))
        piece = text[: len(segment.text) - position]
        position += len(piece)
        yield piece, len(piece_ids)
    if silent:
        yield "", silent


def _even_parts(sequence: Any, parts: int) -> list[Any]:
    """Return a sequence in `parts` pieces of about the same length."""
    size = len(sequence)
    bounds = [size * number // parts for number in range(parts + 1)]
    return [sequence[start:end] for start, end in pairwise(bounds)]


def _finish_reason(result: ChatResult) -> str:
    """Return OpenAI's finish reason: "tool_calls", but "stop" for a call of a tool that was chosen by name."""
    reason = result.completion.finish_reason
    named = isinstance(result.request.tool_choice, NamedToolChoice)
    called = any(segment.kind == "tool_call" for segment in result.completion.segments)
    return "tool_calls" if called and not named and reason == "stop" else reason


def _logprobs(result: ChatResult, tokenizer: Vocabulary, start: int, end: int) -> dict[str, Any] | None:
    if not result.request.logprobs:
        return None
    completion = result.completion
    content: list[dict[str, Any]] = []
    for id_, logprob in zip(completion.ids[start:end], completion.logprobs[start:end], strict=True):
        data = tokenizer.token_bytes[id_]
        entry = {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
        # Only the probability of the chosen token is known.
        content.append(entry | {"top_logprobs": [entry] if result.request.top_logprobs else []})
    return {"content": content}


def _usage(prompt: Sequence[int], completion: ModelCompletion) -> dict[str, Any]:
    return {
        "prompt_tokens": len(prompt),
        "total_tokens": len(prompt) + len(completion.ids),
        "completion_tokens": len(completion.ids),
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid4().hex}"
