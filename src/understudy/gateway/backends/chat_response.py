"""Assembles chat completions, whole or in chunks, into a generation.

The fields are those of vLLM, SGLang and providers that follow OpenAI. Fields that a server does not have are
absent.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from understudy.errors import BackendError
from understudy.gateway.backends.fields import (
    NegativeLog,
    PromptTokenDetails,
    ServerUsage,
    TokenId,
    VersionSpan,
    policy_spans,
)
from understudy.store.tokens import TokenIds, pack_ids, shared_bytes
from understudy.types import PolicySpan, Usage
from understudy.wire.model import ConversationHandle, Delta, Emit, Generation, ToolCall

CACHED_IDS = 8_000_000
"""How many token ids are cached over all conversations, at about 10 bytes each."""

_decode = msgspec.json.Decoder(list[TokenId]).decode


class _CachedPrompt(Struct, frozen=True, gc=False):
    text: bytes
    ids: TokenIds


_NOTHING = _CachedPrompt(b"", TokenIds(b"", 0))


def read_ids(text: bytes) -> TokenIds:
    """Decode a JSON array of token ids. Raises BackendError for anything else."""
    try:
        ids = _decode(text)
    except msgspec.DecodeError as error:
        raise BackendError(
            f"invalid response: prompt token ids: {error}; expected an array of integers: update the model server",
            status=200,
        ) from error
    return TokenIds(pack_ids(ids), len(ids))


class PromptIdCache:
    """Decodes the prompts of conversations.

    The part that a prompt shares with the previous one is not decoded again.

    For 15,400 ids of which 400 are new, that takes 0.03 ms instead of 0.4 ms.
    """

    def __init__(self, limit: int = CACHED_IDS) -> None:
        self._limit = limit
        self._size = 0
        # Weak references: what a backend keeps of a conversation is freed with it, even if it is also cached here.
        self._prompts: OrderedDict[weakref.ref[ConversationHandle], _CachedPrompt] = OrderedDict()

    def read(self, text: bytes, conversation: ConversationHandle | None) -> TokenIds:
        """Decode the token ids of a prompt, as `read_ids` does."""
        if conversation is None:
            return read_ids(text)
        key = weakref.ref(conversation)
        previous = self._prompts.pop(key, _NOTHING)
        self._size -= len(previous.ids)
        # Up to the last common comma, the shared text is an array of ids that was decoded before.
        end = text.rfind(b",", 0, shared_bytes(previous.text, text))
        if end < 0:
            ids = read_ids(text)
        else:
            replaced, new = read_ids(b"[" + previous.text[end + 1 :]), read_ids(b"[" + text[end + 1 :])
            shared = previous.ids.packed[: len(previous.ids.packed) - len(replaced.packed)]
            ids = TokenIds(shared + new.packed, len(previous.ids) - len(replaced) + len(new))
        self._prompts[key] = _CachedPrompt(text, ids)
        self._size += len(ids)
        while self._size > self._limit:
            self._size -= len(self._prompts.popitem(last=False)[1].ids)
        return ids


CALLS_LIMIT = 1024
"""How many tool calls an answer may have. A model in a loop is cut off long before."""


class _FunctionPiece(Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ToolPiece(Struct, gc=False):
    """A piece of a tool call, or a whole one, as the server sent it."""

    index: int | None = None
    id: str | None = None
    function: _FunctionPiece | None = None

    @classmethod
    def of_arguments(cls, index: int, arguments: str) -> ToolPiece:
        """Return a piece that only adds to the arguments of a call."""
        return cls(index=index, function=_FunctionPiece(arguments=arguments))


class _ToolCallBuilder:
    """A tool call while its pieces arrive. Once it was opened, its id and name were sent and cannot change."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.id = ""
        self.name = ""
        self.arguments: list[str] = []
        self.opened = False


class ToolCallAssembly:
    """The tool calls of one answer, in the order in which they began."""

    def __init__(self, emit: Emit | None) -> None:
        self._emit = emit
        self._all: list[_ToolCallBuilder] = []
        self._at: dict[int, _ToolCallBuilder] = {}
        self._opened = 0

    def add(self, pieces: Iterable[ToolPiece], *, whole: bool) -> None:
        """Add the pieces of one chunk. `whole`: each piece is a complete call.

        Raises BackendError for more than CALLS_LIMIT calls.
        """
        for position, piece in enumerate(pieces):
            function = piece.function or _FunctionPiece()
            arguments = _text(function.arguments)
            # Without an index, the position in the chunk tells the calls apart.
            index = position if piece.index is None else piece.index
            call = self._at.get(index)
            if call is None or whole or _starts_new_call(call, piece.id, function.name, arguments):
                call = self._at[index] = _ToolCallBuilder(len(self._all))
                self._all.append(call)
                if len(self._all) > CALLS_LIMIT:
                    raise BackendError(
                        f"invalid response: it has more than {CALLS_LIMIT} tool calls, the maximum; check "
                        "the server's tool-call parser, or lower max_tokens",
                        status=200,
                    )
            if not call.opened:
                call.id = _extended(call.id, piece.id or "")
                call.name = _extended(call.name, function.name or "")
            if arguments:
                call.arguments.append(arguments)
                if call.opened:
                    self._emit_delta(Delta("arguments", arguments, call.number))
            self._open_ready()

    def whole(self) -> tuple[ToolCall, ...]:
        """Return all calls. Raises BackendError if one has no name."""
        self._open_ready(ended=True)
        if len(self._all) != self._opened:
            raise BackendError(
                "invalid response: expected a name in each tool call, got one without; check the server's "
                "tool-call parser",
                status=200,
            )
        return tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._all)

    def _open_ready(self, *, ended: bool = False) -> None:
        """Open, in order, the calls whose id and name are known to be complete."""
        for call in self._all[self._opened :]:
            # While a call has no arguments and is the last one, its name and id may still grow.
            complete = call.name and (call.arguments or ended or call is not self._all[-1])
            if not complete:
                return
            call.opened = True
            self._opened += 1
            self._emit_delta(Delta("tool", index=call.number, id=call.id, name=call.name))
            if call.arguments:
                self._emit_delta(Delta("arguments", "".join(call.arguments), call.number))

    def _emit_delta(self, delta: Delta) -> None:
        if self._emit is not None:
            self._emit(delta)


def _starts_new_call(call: _ToolCallBuilder, id_: str | None, name: str | None, arguments: str) -> bool:
    """Return whether a piece begins another call although it has the same index as the previous one.

    Some providers give every call the index 0; others repeat id and name with every piece.
    """
    if not name or not call.name:
        return False
    if id_ and call.id:
        return id_ != call.id
    # Servers that send neither ids nor indexes send each call whole, in one piece.
    return bool(arguments.strip()) and len(call.arguments) == 1 and _is_json(call.arguments[0])


def _extended(current: str, piece: str) -> str:
    """Return an id or a name extended by a piece. Some providers repeat the whole text each time."""
    return piece if piece.startswith(current) else current + piece


def _text(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or ""


def _is_json(text: str) -> bool:
    with suppress(msgspec.DecodeError, RecursionError):
        msgspec.json.decode(text)
        return True
    return False


_ABSENT = Raw()


class ResponseMessage(Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolPiece] | None = None


class _Logprob(Struct, gc=False):
    logprob: NegativeLog


class _Logprobs(Struct, gc=False):
    content: list[_Logprob] | None = None


class _ResponseChoice(Struct, gc=False):
    """`message` of a whole answer, or `delta` of a chunk.

    vLLM sends the token ids as `token_ids`; the remaining fields are for SGLang. The ids of the prompt are decoded
    later (see PromptIdCache).
    """

    index: int = 0
    message: ResponseMessage | None = None
    delta: ResponseMessage | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[TokenId] | None = None
    response_token_ids: list[TokenId] | None = None
    prompt_token_ids: Raw = _ABSENT
    weight_versions: list[VersionSpan] | None = None


class _SglExt(Struct):
    input_ids: Raw = _ABSENT
    output_ids: list[list[TokenId]] | None = None


class _Metadata(Struct):
    weight_version: str | int | None = None
    weight_versions: list[VersionSpan] | None = None


class _ChatError(Struct):
    message: str = ""
    code: str | int | None = None


class ChatResponse(Struct, gc=False):
    """A whole answer, or one chunk of a streamed one."""

    choices: list[_ResponseChoice] = field(default_factory=list[_ResponseChoice])
    model: str | None = None
    usage: ServerUsage | None = None
    prompt_token_ids: Raw = _ABSENT
    sglext: _SglExt | None = None
    metadata: _Metadata | None = None
    error: _ChatError | str | None = None


class StreamError(BackendError):
    """A stream that failed after its first byte. Whatever the reason, the request is not sent again."""


LONG = 4096
"""The size in bytes from which an answer may have so many token ids that they are cut out first."""
_PROMPT = b',"prompt_token_ids":['


def read_answer(data: bytes, decode: Callable[[bytes], ChatResponse]) -> ChatResponse:
    """Decode the JSON of an answer with `decode`, and raise what it raises.

    The token ids of the prompt are cut out first, since the decoder would skip thousands of numbers one by one.
    """
    if len(data) < LONG:
        return decode(data)
    start = data.find(_PROMPT) + len(_PROMPT)
    end = data.find(b"]", start)
    if start >= len(_PROMPT) and end > start:
        # the error is raised below, when the whole answer is decoded
        with suppress(msgspec.DecodeError, BackendError):
            answer = decode(data[:start] + data[end:])
            if bytes(answer.prompt_token_ids) == b"[]":
                answer.prompt_token_ids = Raw(data[start - 1 : end + 1])
                return answer
    return decode(data)


class _DeltaJoiner:
    """Passes pieces of an answer on. Consecutive pieces of one part are joined until `flush`."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._kind: Literal["reasoning", "text", "arguments"] = "text"
        self._index = 0
        self._texts: list[str] = []

    def add(self, delta: Delta) -> None:
        if delta.kind == "tool":
            self.flush()
            self._emit(delta)
        else:
            self.add_text(delta.kind, delta.text, delta.index)

    def add_text(self, kind: Literal["reasoning", "text", "arguments"], text: str, index: int = 0) -> None:
        """Do what `add` does with a Delta of this text."""
        if kind != self._kind or index != self._index:
            self.flush()
            self._kind, self._index = kind, index
        self._texts.append(text)

    def flush(self) -> None:
        if self._texts:
            text, self._texts = "".join(self._texts), []
            self._emit(Delta(self._kind, text, self._index))


class ResponseAssembly:
    """One response while its parts arrive. With `emit`, what was added is passed on at each `flush`.

    `read_prompt` decodes the JSON array of a prompt's token ids.
    """

    def __init__(self, emit: Emit | None = None, read_prompt: Callable[[bytes], Sequence[int]] = read_ids) -> None:
        self._joined = None if emit is None else _DeltaJoiner(emit)
        self._read_prompt = read_prompt
        self._calls = ToolCallAssembly(None if self._joined is None else self._joined.add)
        self._model = ""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._has_reasoning = False
        self._finish: str | None = None
        self._stop: str | None = None
        self._usage = ServerUsage()
        self._prompt_ids: Sequence[int] | None = None
        self._ids: list[int] | None = None
        self._in_chunks = False
        self._logprobs: list[float] | None = None
        self._spans: tuple[PolicySpan, ...] = ()

    def add_whole(self, answer: ChatResponse) -> None:
        """Add a whole answer. Raises BackendError if it is not one."""
        if len(answer.choices) != 1:
            raise BackendError(
                f"invalid response: expected 1 choice, got {len(answer.choices)}; leave out `n`, or update "
                "the model server",
                status=200,
            )
        choice = answer.choices[0]
        if (message := choice.message) is None:
            raise BackendError(
                "invalid response: expected a choice with a message, got one without; check that base_url is "
                "the address of the model server",
                status=200,
            )
        self._add_outer(answer)
        self._add_choice(choice, message, whole=True)

    def add_chunks(self, chunks: Iterable[ChatResponse]) -> None:
        """Add the next chunks of a stream. Raises StreamError if one belongs to another choice."""
        for chunk in chunks:
            self._add_outer(chunk)
            if not chunk.choices:
                continue
            choice = chunk.choices[0]
            if choice.index or len(chunk.choices) > 1:
                raise StreamError(
                    f"invalid stream: expected choice 0 only, got choice {choice.index} of {len(chunk.choices)} "
                    "in a chunk; leave out `n`, or update the model server"
                )
            if choice.token_ids:
                self._in_chunks = True
            self._add_choice(choice, choice.delta, whole=False)

    def flush(self) -> None:
        """Pass on what was added since the last call."""
        if self._joined is not None:
            self._joined.flush()

    def generation(self, model: str, sampling: dict[str, Any]) -> Generation:
        """Return everything that was added as one generation.

        Raises BackendError if its parts contradict each other.
        """
        details = self._usage.prompt_tokens_details or PromptTokenDetails()
        text, calls = "".join(self._text), self._calls.whole()
        self.flush()
        if self._ids == [] and (text or calls):
            raise BackendError(
                "invalid response: expected token ids for its text and tool calls, got an empty list; update the "
                "model server",
                status=200,
            )
        prompt_ids = self._prompt_ids
        prompt, completion = self._usage.prompt_tokens, self._usage.completion_tokens
        if self._in_chunks and completion is not None and len(self._ids or ()) < completion:
            raise BackendError(
                f"invalid response: the stream has {len(self._ids or ())} token ids, expected {completion} "
                "as in its usage, so it cannot be trained on; update the model server",
                status=200,
            )
        return Generation(
            model=self._model or model,
            text=text,
            reasoning="".join(self._reasoning) if self._has_reasoning else None,
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

    def _add_outer(self, answer: ChatResponse) -> None:
        """Add the fields of a response that are not in its choice."""
        if not self._model:
            self._model = answer.model or ""
        if answer.usage is not None:
            self._usage = answer.usage
        if answer.prompt_token_ids is not _ABSENT:
            self._add_prompt(answer.prompt_token_ids)
        if answer.sglext is not None:
            self._add_prompt(answer.sglext.input_ids)
            if answer.sglext.output_ids:
                self._ids = answer.sglext.output_ids[0]
        if answer.metadata is not None:
            self._spans = policy_spans(answer.metadata.weight_versions, answer.metadata.weight_version)

    def _add_prompt(self, ids: Raw) -> None:
        # Read at once, while the model generates: the agent does not wait for it at the end.
        text = bytes(ids)
        if text not in (b"", b"null"):
            self._prompt_ids = self._read_prompt(text)

    def _add_choice(self, choice: _ResponseChoice, message: ResponseMessage | None, *, whole: bool) -> None:
        # Written without helpers for texts and tokens, because a stream has thousands of them.
        if message is not None:
            reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
            if reasoning is not None:
                self._has_reasoning = True
                if reasoning:
                    self._reasoning.append(reasoning)
                    if self._joined is not None:
                        self._joined.add_text("reasoning", reasoning)
            if text := message.content:
                self._text.append(text)
                if self._joined is not None:
                    self._joined.add_text("text", text)
            if message.tool_calls is not None:
                self._calls.add(message.tool_calls, whole=whole)
        if choice.finish_reason:
            self._finish = choice.finish_reason
        stop = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
        if isinstance(stop, str):
            self._stop = stop
        if choice.weight_versions is not None:
            self._spans = policy_spans(choice.weight_versions)
        if choice.prompt_token_ids is not _ABSENT:
            self._add_prompt(choice.prompt_token_ids)
        ids = choice.token_ids if choice.token_ids is not None else choice.response_token_ids
        if ids is not None:
            if self._ids is None:
                self._ids = []
            self._ids += ids
        if choice.logprobs is not None and choice.logprobs.content is not None:
            if self._logprobs is None:
                self._logprobs = []
            for entry in choice.logprobs.content:
                self._logprobs.append(entry.logprob)

    def _checked_logprobs(self) -> tuple[float, ...] | None:
        """Return the logprobs of tokens whose ids are known. Without ids they are useless."""
        if self._ids is None or self._logprobs is None:
            return None
        if len(self._logprobs) != len(self._ids):
            raise BackendError(
                f"invalid response: it has {len(self._logprobs)} logprobs for {len(self._ids)} tokens, expected "
                "one for each, so it cannot be trained on; update the model server",
                status=200,
            )
        return tuple(self._logprobs)
