"""OpenAI chat completions as vLLM speaks them: with the token ids and logprobs of what was sampled."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from typing import Annotated, Any, ClassVar, TypeVar
from urllib.parse import unquote

import aiohttp
import msgspec
from msgspec import Meta, Struct, field
from multidict import CIMultiDictProxy

from understudy.errors import BackendError
from understudy.gateway.backends.base import ChatRequest, ContextOverflow, Generation, ToolCall
from understudy.types import Usage

_T = TypeVar("_T")

RETRY_PAUSES_S = (0.2, 0.8)
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 3600.0
ANSWER_LIMIT = 256 << 20
"""The largest answer that is read: a whole context with its tokens and logprobs is far smaller."""

_Count = Annotated[int, Meta(ge=0, lt=2**31)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_NegativeLog = Annotated[float, Meta(le=1e-3)]  # rounding may lift a certain token's above 0

_USER_IN_URL = re.compile(r"(?<=://)[^/?#]*@")
_OVERFLOW = re.compile(r"context (length|window)|maximum model length|max_model_len", re.IGNORECASE)
_LIMIT = re.compile(r"(?:context length(?: is| of)?|model length of)\s*\(?(\d+)")
_PROMPT = re.compile(
    r"(?:has|contains|resulted in|input|length|total of \d+ tokens:)\s*\(?(\d+)(?: input)?(?: tokens|\))"
    r"|\((\d+) in the messages"
)


class _Function(Struct):
    name: str
    arguments: str | None = None


class _ToolCall(Struct):
    function: _Function
    id: str | None = None


class _Said(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprob(Struct):
    logprob: _NegativeLog


class _Logprobs(Struct):
    content: list[_Logprob] | None = None


class _Choice(Struct):
    message: _Said
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[_TokenId] | None = None


class _PromptDetails(Struct):
    cached_tokens: _Count | None = None


class _Usage(Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Completion(Struct):
    choices: list[_Choice]
    model: str = ""
    usage: _Usage | None = None
    prompt_token_ids: list[_TokenId] | None = None


class _Tokens(Struct):
    count: int
    max_model_len: int | None = None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model] = field(default_factory=list[_Model])


class _Error(Struct):
    message: str = ""


class _Refusal(Struct):
    error: _Error | str | None = None
    message: str = ""


class OpenAIBackend:
    """A server at `base_url` (with its `/v1`) that answers as `model`. Opens no connection before it is used.

    A name and password in `base_url` are sent as basic authorization where there is no `api_key`; unlike the rest
    of the address they stand in no error, which the agent may see.
    """

    name: ClassVar[str] = "openai"

    def __init__(self, base_url: str, model: str, api_key: str | None = None) -> None:
        user = _USER_IN_URL.search(base_url)
        self._user = user[0].removesuffix("@") if user else ""
        self._base = _USER_IN_URL.sub("", base_url).rstrip("/")
        self._model = model
        self._key = api_key
        self._session: aiohttp.ClientSession | None = None

    @property
    def model(self) -> str:
        """The model that answers, whatever the agent calls it."""
        return self._model

    async def generate(self, request: ChatRequest) -> Generation:
        """See Backend. When prompt and `max_tokens` do not fit together, `max_tokens` gives way."""
        try:
            return await self._complete(request, request.sampling)
        except BackendError as error:
            if error.status != 400 or not _OVERFLOW.search(str(error)):
                raise
            prompt, limit = await self._measure(request, error)
        asked = request.sampling.get("max_tokens")
        if prompt >= limit or (asked is not None and prompt + asked <= limit):
            raise ContextOverflow(prompt, limit)
        return await self._complete(request, request.sampling | {"max_tokens": limit - prompt})

    async def count_tokens(self, request: ChatRequest) -> int:
        """See Backend."""
        return (await self._tokenize(request)).count

    async def models(self) -> list[str]:
        """See Backend."""
        listed = await self._call("GET", f"{self._base}/models", None, _Models)
        return [model.id for model in listed.data]

    async def close(self) -> None:
        """See Backend."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- requests ---------------------------------------------------------------------------------------

    async def _complete(self, request: ChatRequest, sampling: dict[str, Any]) -> Generation:
        body = sampling | self._prompt(request)
        body |= {"stream": False, "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        if request.tools and request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
        if request.response_format is not None:
            body["response_format"] = request.response_format
        completion = await self._call("POST", f"{self._base}/chat/completions", body, _Completion)
        return _generation(completion, self._model, sampling)

    async def _tokenize(self, request: ChatRequest) -> _Tokens:
        # vLLM has it beside /v1, not below it.
        return await self._call(
            "POST", f"{self._base.removesuffix('/v1')}/tokenize", self._prompt(request), _Tokens
        )

    def _prompt(self, request: ChatRequest) -> dict[str, Any]:
        """The part of a request that decides its prompt tokens."""
        prompt: dict[str, Any] = {"model": self._model, "messages": request.messages}
        if request.tools:
            prompt["tools"] = request.tools
        if request.enable_thinking is not None:
            prompt["chat_template_kwargs"] = {"enable_thinking": request.enable_thinking}
        return prompt

    async def _measure(self, request: ChatRequest, refusal: BackendError) -> tuple[int, int]:
        """The tokens of a refused prompt and of the model's context, counted if possible, else as it was told.

        The message comes second because vLLM stops counting early and then says only "at least". Raises the
        refusal itself when it says nothing.
        """
        told_limit, told_prompt = _LIMIT.search(str(refusal)), _PROMPT.search(str(refusal))
        try:
            tokens = await self._tokenize(request)
        except BackendError:
            tokens = None
        limit = tokens.max_model_len if tokens and tokens.max_model_len else _number(told_limit)
        prompt = tokens.count if tokens else _number(told_prompt)
        if limit is None or prompt is None:
            raise refusal
        return prompt, limit

    async def _call(self, method: str, url: str, body: dict[str, Any] | None, expected: type[_T]) -> _T:
        """One request and its typed answer. Raises BackendError."""
        data = None if body is None else msgspec.json.encode(body)
        status, headers, answer = await self._exchange(method, url, data)
        if status != 200:
            raise BackendError(
                f"{method} {url}: status {status}: {self._clean(_reason(answer))}",
                status=status,
                retry_after_s=_seconds(headers.get("retry-after")),
            )
        try:
            return msgspec.json.decode(answer, type=expected)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BackendError(
                f"{method} {url}: an answer that makes no sense: {error}; is a chat completions server there?",
                status=status,
            ) from error

    async def _exchange(
        self, method: str, url: str, data: bytes | None
    ) -> tuple[int, CIMultiDictProxy[str], bytes]:
        """Send until an answer comes; tried again only while no byte of one has come."""
        for pause in (*RETRY_PAUSES_S, None):
            try:
                # Where a redirect leads nobody has said that the conversation may go.
                async with self._client().request(method, url, data=data, allow_redirects=False) as response:
                    return response.status, response.headers, await _whole(response)
            except aiohttp.ClientPayloadError as error:
                raise BackendError(f"{method} {url}: the answer broke off: {self._clean(str(error))}") from error
            except (aiohttp.ClientError, OSError) as error:
                # A TimeoutError is an OSError too, and comes after the longest wait there is.
                if pause is None or isinstance(error, TimeoutError | aiohttp.InvalidURL):
                    raise BackendError(
                        f"{method} {url}: no answer: {self._clean(str(error)) or type(error).__name__}; "
                        "is the model server running?"
                    ) from error
                await asyncio.sleep(pause)
        raise AssertionError("the last pause is None")

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"content-type": "application/json"}
            if self._key:
                headers["authorization"] = f"Bearer {self._key}"
            elif self._user:
                headers["authorization"] = f"Basic {b64encode(unquote(self._user).encode()).decode()}"
            self._session = aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
            )
        return self._session

    def _clean(self, text: str) -> str:
        """Text of the server's, without our key: it may end in a log, the store or a sandbox."""
        return text.replace(self._key, "***") if self._key else text


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises BackendError above ANSWER_LIMIT, however small it was on the wire."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > ANSWER_LIMIT:
            raise BackendError(f"{response.method} {response.url}: the answer has more than {ANSWER_LIMIT} bytes")
        parts.append(part)
    return b"".join(parts)


def _generation(completion: _Completion, model: str, sampling: dict[str, Any]) -> Generation:
    if len(completion.choices) != 1:
        raise BackendError(f"the backend gave {len(completion.choices)} choices, expected 1", status=200)
    choice, usage = completion.choices[0], completion.usage or _Usage()
    said = choice.message
    details = usage.prompt_tokens_details
    if choice.token_ids == [] and (said.content or said.tool_calls):
        raise BackendError("the backend gave an answer without a token in it", status=200)
    return Generation(
        model=completion.model or model,
        text=said.content or "",
        reasoning=said.reasoning if said.reasoning is not None else said.reasoning_content,
        tool_calls=tuple(
            ToolCall(call.id or "", call.function.name, call.function.arguments or "")
            for call in said.tool_calls or ()
        ),
        finish_reason=choice.finish_reason or "none",
        stop=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
        ),
        prompt_token_ids=None if completion.prompt_token_ids is None else tuple(completion.prompt_token_ids),
        completion_token_ids=None if choice.token_ids is None else tuple(choice.token_ids),
        logprobs=_logprobs(choice),
        sampling=sampling,
    )


def _logprobs(choice: _Choice) -> tuple[float, ...] | None:
    """The logprobs of the tokens whose ids are known; without ids they belong to nothing."""
    if choice.token_ids is None or choice.logprobs is None or choice.logprobs.content is None:
        return None
    if len(choice.logprobs.content) != len(choice.token_ids):
        raise BackendError(
            f"the backend gave {len(choice.logprobs.content)} logprobs for {len(choice.token_ids)} tokens; "
            "an answer like that cannot be trained on",
            status=200,
        )
    return tuple(entry.logprob for entry in choice.logprobs.content)


def _reason(answer: bytes) -> str:
    """What a refusal says: its message where it has the usual shape, else its beginning."""
    try:
        refusal = msgspec.json.decode(answer, type=_Refusal)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return answer[:500].decode(errors="replace")
    error = refusal.error.message if isinstance(refusal.error, _Error) else refusal.error
    return error or refusal.message or answer[:500].decode(errors="replace")


def _seconds(value: str | None) -> float | None:
    """A retry-after in seconds; the form with a date is not worth a parser."""
    return float(value) if value is not None and re.fullmatch(r"\d{1,9}(\.\d+)?", value.strip()) else None


def _number(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(next(group for group in match.groups() if group))
