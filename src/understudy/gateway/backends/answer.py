"""Chat-completions answers, whole or in chunks, put together as one generation.

The fields are those of vLLM, SGLang and the providers that follow OpenAI; what a server does not have is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from understudy.errors import BackendError
from understudy.gateway.backends.fields import Count, NegativeLog, Span, TokenId, policy_spans
from understudy.gateway.backends.prompts import read_ids
from understudy.gateway.backends.tool_calls import ToolCalls, ToolPiece
from understudy.types import PolicySpan, Usage
from understudy.wire.model import Delta, Emit, Generation

_ABSENT = Raw()


class _Said(Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolPiece] | None = None


_SILENCE = _Said()


class _Logprob(Struct, gc=False):
    logprob: NegativeLog


class _Logprobs(Struct, gc=False):
    content: list[_Logprob] | None = None


class _Choice(Struct, gc=False):
    """`message` of a whole answer, `delta` of a chunk. The ids are `token_ids` for vLLM, the rest for SGLang.

    Prompt ids are read later, by `Prompts`.
    """

    index: int = 0
    message: _Said | None = None
    delta: _Said | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[TokenId] | None = None
    response_token_ids: list[TokenId] | None = None
    prompt_token_ids: Raw = _ABSENT
    weight_versions: list[Span] | None = None


class _PromptDetails(Struct, gc=False):
    cached_tokens: Count | None = None
    created_cache_tokens: Count | None = None
    cache_write_tokens: Count | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _SglExt(Struct):
    input_ids: Raw = _ABSENT
    output_ids: list[list[TokenId]] | None = None


class _Metadata(Struct):
    weight_version: str | int | None = None
    weight_versions: list[Span] | None = None


class _Error(Struct):
    message: str = ""
    code: str | int | None = None


class Answer(Struct, gc=False):
    """A whole answer, or one chunk of a streamed one."""

    choices: list[_Choice] = field(default_factory=list[_Choice])
    model: str | None = None
    usage: _Usage | None = None
    prompt_token_ids: Raw = _ABSENT
    sglext: _SglExt | None = None
    metadata: _Metadata | None = None
    error: _Error | str | None = None


class StreamFault(BackendError):
    """A stream that failed after its first byte: whatever the reason, the request is not sent again."""


_CHUNK = msgspec.json.Decoder(Answer)
_PROMPT, _LONG = b',"prompt_token_ids":[', 4096


def read_answer(data: bytes, decode: Callable[[bytes], Answer]) -> Answer:
    """What `decode` makes of an answer's JSON. Raises what it does.

    The token ids of the prompt are cut out before: it would step over thousands of numbers, one by one.
    """
    if len(data) < _LONG:
        return decode(data)
    start = data.find(_PROMPT) + len(_PROMPT)
    end = data.find(b"]", start)
    if start >= len(_PROMPT) and end > start:
        with suppress(msgspec.DecodeError, BackendError):  # whatever it is, it is said of the whole
            answer = decode(data[:start] + data[end:])
            if bytes(answer.prompt_token_ids) == b"[]":
                answer.prompt_token_ids = Raw(data[start - 1 : end + 1])
                return answer
    return decode(data)


def read_chunk(data: bytes, clean: Callable[[str], str]) -> Answer:
    """A chunk from the data of its event. Raises StreamFault, also for one that tells an error, made `clean`."""
    try:
        chunk = read_answer(data, _CHUNK.decode)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise StreamFault(f"a chunk of the stream makes no sense: {error}") from error
    if chunk.error is not None:
        told = chunk.error if isinstance(chunk.error, _Error) else _Error(chunk.error)
        status = told.code if isinstance(told.code, int) and 400 <= told.code < 600 else None
        raise StreamFault(f"the stream ended with an error: {clean(told.message)[:500]}", status=status)
    return chunk


class _Joined:
    """Passes pieces of an answer on; those of one part that come one after the other as one, at `flush`."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._first: Delta | None = None
        self._texts: list[str] = []

    def add(self, delta: Delta) -> None:
        first = self._first
        if first is None or delta.kind != first.kind or delta.kind == "tool" or delta.index != first.index:
            self.flush()
            self._first = delta
        self._texts.append(delta.text)

    def flush(self) -> None:
        if (first := self._first) is not None:
            self._emit(msgspec.structs.replace(first, text="".join(self._texts)))
            self._first, self._texts = None, []


class Assembly:
    """One answer in the making. With `emit`, what was added is passed on at each `flush`.

    `read_prompt` makes token ids of the JSON array of a prompt's.
    """

    def __init__(self, emit: Emit | None = None, read_prompt: Callable[[bytes], Sequence[int]] = read_ids) -> None:
        self._joined = None if emit is None else _Joined(emit)
        self._emit = None if self._joined is None else self._joined.add
        self._read_prompt = read_prompt
        self._calls = ToolCalls(self._emit)
        self._model = ""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._thought = False
        self._finish: str | None = None
        self._stop: str | None = None
        self._usage = _Usage()
        self._prompt: bytes | None = None
        self._ids: list[int] | None = None
        self._in_chunks = False
        self._logprobs: list[float] | None = None
        self._spans: tuple[PolicySpan, ...] = ()

    def add_whole(self, answer: Answer) -> None:
        """Take in a whole answer. Raises BackendError unless it is one."""
        if len(answer.choices) != 1:
            raise BackendError(f"the backend gave {len(answer.choices)} choices, expected 1", status=200)
        said = answer.choices[0].message
        if said is None:
            raise BackendError("the backend gave a choice without a message", status=200)
        self._add(answer, said, whole=True)

    def add_chunk(self, chunk: Answer) -> None:
        """Take in the next chunk of a stream. Raises StreamFault for one that belongs to another choice."""
        said = None
        if chunk.choices:
            choice = chunk.choices[0]
            if choice.index or len(chunk.choices) > 1:
                raise StreamFault("the stream carries more than the one choice that was asked for")
            said = choice.delta
            self._in_chunks = self._in_chunks or bool(choice.token_ids)
        self._add(chunk, said or _SILENCE, whole=False)

    def flush(self) -> None:
        """Pass on what was added since the last time."""
        if self._joined is not None:
            self._joined.flush()

    def generation(self, model: str, sampling: dict[str, Any]) -> Generation:
        """All that was added, as one answer. Raises BackendError where its parts contradict each other."""
        details = self._usage.prompt_tokens_details or _PromptDetails()
        text, calls = "".join(self._text), self._calls.whole()
        self.flush()
        if self._ids == [] and (text or calls):
            raise BackendError("the backend gave an answer without a token in it", status=200)
        prompt_ids = None if self._prompt is None else self._read_prompt(self._prompt)
        prompt, completion = self._usage.prompt_tokens, self._usage.completion_tokens
        if self._in_chunks and completion is not None and len(self._ids or ()) < completion:
            raise BackendError(
                f"the stream carried {len(self._ids or ())} of the {completion} tokens that the backend counted; "
                "an answer like that cannot be trained on",
                status=200,
            )
        return Generation(
            model=self._model or model,
            text=text,
            reasoning="".join(self._reasoning) if self._thought else None,
            tool_calls=calls,
            finish_reason=self._finish or "none",
            stop=self._stop,
            usage=Usage(
                prompt_tokens=len(prompt_ids or ()) if prompt is None else prompt,
                completion_tokens=len(self._ids or ()) if completion is None else completion,
                cached_tokens=details.cached_tokens or 0,
                cache_write_tokens=details.cache_write_tokens or details.created_cache_tokens or 0,
            ),
            prompt_token_ids=prompt_ids,
            completion_token_ids=None if self._ids is None else tuple(self._ids),
            logprobs=self._checked_logprobs(),
            policy_spans=self._spans,
            sampling=sampling,
        )

    def _add(self, answer: Answer, said: _Said, *, whole: bool) -> None:
        if not self._model:
            self._model = answer.model or ""
        if answer.usage is not None:
            self._usage = answer.usage
        thought = said.reasoning if said.reasoning is not None else said.reasoning_content
        if thought is not None:
            self._thought = True
            self._piece("reasoning", thought, self._reasoning)
        if said.content is not None:
            self._piece("text", said.content, self._text)
        if said.tool_calls is not None:
            self._calls.add(said.tool_calls, whole=whole)
        self._add_tokens(answer)

    def _piece(self, kind: Literal["reasoning", "text"], text: str, parts: list[str]) -> None:
        if text:
            parts.append(text)
            if self._emit is not None:
                self._emit(Delta(kind, text))

    def _add_tokens(self, answer: Answer) -> None:
        if answer.prompt_token_ids is not _ABSENT:
            self._prompt = _given(answer.prompt_token_ids) or self._prompt
        if answer.sglext is not None:
            self._prompt = _given(answer.sglext.input_ids) or self._prompt
            if answer.sglext.output_ids:
                self._ids = answer.sglext.output_ids[0]
        if answer.metadata is not None:
            self._spans = policy_spans(answer.metadata.weight_versions, answer.metadata.weight_version)
        if not answer.choices:
            return
        choice = answer.choices[0]
        self._finish = choice.finish_reason or self._finish
        stop = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
        if isinstance(stop, str):
            self._stop = stop
        if choice.weight_versions is not None:
            self._spans = policy_spans(choice.weight_versions)
        if choice.prompt_token_ids is not _ABSENT:
            self._prompt = _given(choice.prompt_token_ids) or self._prompt
        ids = choice.token_ids if choice.token_ids is not None else choice.response_token_ids
        if ids is not None:
            self._ids = self._ids or []
            self._ids += ids
        if choice.logprobs is not None and choice.logprobs.content is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += [entry.logprob for entry in choice.logprobs.content]

    def _checked_logprobs(self) -> tuple[float, ...] | None:
        """The logprobs of the tokens whose ids are known; without ids they belong to nothing."""
        if self._ids is None or self._logprobs is None:
            return None
        if len(self._logprobs) != len(self._ids):
            raise BackendError(
                f"the backend gave {len(self._logprobs)} logprobs for {len(self._ids)} tokens; "
                "an answer like that cannot be trained on",
                status=200,
            )
        return tuple(self._logprobs)


def _given(value: Raw) -> bytes | None:
    """A JSON value without what it was read from, None where there is none."""
    text = bytes(value)
    return None if text in (b"", b"null") else text
