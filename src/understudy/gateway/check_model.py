"""Checks a model server before a long run: template with tools, calls, exact tokens, logprobs, context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from understudy.errors import BackendError
from understudy.gateway.backends.http import HttpClient
from understudy.gateway.exact.parsers import FORMATS, opens_thinking

MIN_CONTEXT_TOKENS = 32_768
"""With fewer tokens, Claude Code's own system prompt and tools leave little room for work."""
_NEAR = 1e-3
"""How far apart two logprobs of one token may be, in nats."""
_RESCORED_NEAR = 50 * _NEAR
"""The same, if one of them was computed with the whole prompt at once."""
_TEMPLATE_CHECK, _TOKENS_CHECK, _PROCESSED_CHECK = (
    "template with tools",
    "exact token ids",
    "logprobs after temperature",
)
_NO_TEACHER = "give --teacher another server: one of vLLM, SGLang or the embedded server"
_WIDER = "serve the model in a wider type, such as --dtype float32"
_TEMPERATURE = 0.5
_SAMPLED = 24
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "ReadFile",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"file_path": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["file_path"],
        },
    },
}
_ARGUMENTS = '{"file_path": "/workspace/a \\"b\\".py", "limit": 20}'
_USER: dict[str, Any] = {"role": "user", "content": "Read the file /workspace/a.py with the tool."}


class ModelCheck(Struct, frozen=True, kw_only=True):
    """One check: whether it passed, what was found, and the remedy.

    A failed check that is not `required` limits what can be done with the model. `ok` is None if the server offers
    no way to find out.
    """

    name: str
    ok: bool | None
    seen: str
    remedy: str = ""
    required: bool = True


class _CheckedModel(Struct):
    id: str
    max_model_len: int | None = None


class _CheckedModels(Struct):
    data: list[_CheckedModel]


class _Encoded(Struct):
    tokens: list[int]


class _Decoded(Struct):
    prompt: str


class _SampledLogprob(Struct):
    logprob: float


class _SampledContent(Struct):
    content: list[_SampledLogprob] | None = None


class _SampledChoice(Struct):
    message: dict[str, Any]
    token_ids: list[int] | None = None
    logprobs: _SampledContent | None = None
    finish_reason: str | None = None


class _SampledAnswer(Struct):
    choices: list[_SampledChoice]
    prompt_token_ids: list[int] | None = None


class _PromptChoice(Struct):
    prompt_logprobs: list[dict[str, _SampledLogprob] | None] | None = None


class _PromptAnswer(Struct):
    choices: list[_PromptChoice]


class ModelChecker:
    """Checks the server of one model in vLLM's dialect, which our embedded server speaks too.

    If the server lacks a path, as SGLang lacks some, the checks that need it are reported as not done.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None) -> None:
        self._client = HttpClient(url.rstrip("/").removesuffix("/v1"), key, timeout_s=120.0)
        self._model = model

    async def run(self) -> list[ModelCheck]:
        """Run all checks in order. Raises BackendError if the server cannot be reached at all."""
        try:
            checks = await self._served()
            if not checks[0].ok:
                return checks
            parts = {
                _TEMPLATE_CHECK: self._template,
                _TOKENS_CHECK: self._sampling,
                _PROCESSED_CHECK: self._processed,
            }
            for name, part in parts.items():
                try:
                    checks += await part()
                except BackendError as error:
                    remedy = "do what this error says; vLLM and our embedded server have all that is checked"
                    checks.append(ModelCheck(name=name, ok=None, seen=f"not checked: {error}", remedy=remedy))
            return checks
        finally:
            await self._client.close()

    async def _served(self) -> list[ModelCheck]:
        cards = (await self._call("GET", "/v1/models", None, _CheckedModels)).data
        card = next((card for card in cards if self._model in (None, card.id)), None)
        if card is None and not cards:
            remedy = "start the server with a model"
            return [ModelCheck(name="model", ok=False, seen="the server lists no models", remedy=remedy)]
        if card is None:
            seen = f"no {self._model!r}; the server has {', '.join(card.id for card in cards)}"
            return [ModelCheck(name="model", ok=False, seen=seen, remedy="give --model one of these names")]
        self._model = card.id
        checks = [ModelCheck(name="model", ok=True, seen=card.id)]
        context = card.max_model_len
        enough = None if context is None else context >= MIN_CONTEXT_TOKENS
        remedy = (
            ""
            if enough
            else "serve more with --max-model-len, or run agents with few --tools and a short --system-prompt"
        )
        seen = "the server does not report max_model_len" if context is None else f"{context} tokens"
        seen += "" if enough else f"; agents need {MIN_CONTEXT_TOKENS} or more"
        checks.append(ModelCheck(name="context", ok=enough, seen=seen, remedy=remedy, required=False))
        return checks

    async def _template(self) -> list[ModelCheck]:
        """Check whether tools are shown, and what the template implies for calls and thinking."""
        prompt = await self._decoded(await self._rendered([_USER], add_generation_prompt=True))
        renders_tools = _TOOL["function"]["name"] in prompt
        remedy = "" if renders_tools else "serve the model with a chat template that shows tools (--chat-template)"
        seen = "tools are in the prompt" if renders_tools else "tools are not in the prompt"
        checks = [ModelCheck(name=_TEMPLATE_CHECK, ok=renders_tools, seen=seen, remedy=remedy)]
        call = {"id": "call_1", "type": "function", "function": {"name": "ReadFile", "arguments": _ARGUMENTS}}
        answered = [_USER, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
        conversation = await self._decoded(await self._rendered(answered, add_generation_prompt=False))
        # A template may open a thinking block in the prompt, which a parsed turn does not have.
        opening = prompt.removesuffix("<think>\n").removesuffix("<think>")
        written = conversation[len(opening) :] if conversation.startswith(opening) else None
        formats = [] if written is None else [name for name in FORMATS if _reads_back(name, written)]
        message = (
            f"formats that read it back: {', '.join(formats)}"
            if formats
            else f"no format reads {(written or '')[:300]!r} back"
        )
        if written is None:
            message = "a conversation with the model's turn does not begin with the prompt of that turn"
        remedy = (
            ""
            if formats
            else "serve it with a template (--chat-template) that writes calls as one of --tool-format: "
            f"{', '.join(FORMATS)}"
        )
        checks.append(ModelCheck(name="round trip of a tool call", ok=bool(formats), seen=message, remedy=remedy))
        thinks = opens_thinking(prompt)
        seen = "the prompt opens a thinking block" if thinks else "the prompt opens no thinking block"
        checks.append(ModelCheck(name="thinking", ok=True, seen=seen, required=False))
        return checks

    async def _sampling(self) -> list[ModelCheck]:
        """Check whether an answer has its tokens and their logprobs, and whether its prompt is as rendered."""
        answer = await self._sampled(1.0)
        choice = answer.choices[0]
        exact = bool(choice.token_ids) and bool(answer.prompt_token_ids)
        remedy = "" if exact else "serve it by vLLM 0.10.2 or later, SGLang or our embedded server"
        seen = f"{len(choice.token_ids or ())} ids sampled, {len(answer.prompt_token_ids or ())} of the prompt"
        checks = [ModelCheck(name=_TOKENS_CHECK, ok=exact, seen=seen, remedy=remedy)]
        logprobs = _logprobs(choice)
        complete = logprobs is not None and len(logprobs) == len(choice.token_ids or ())
        seen = f"{len(logprobs or ())} logprobs for {len(choice.token_ids or ())} tokens"
        remedy = "" if complete else "serve it with logprobs; grpo and distill need them"
        checks.append(ModelCheck(name="logprobs", ok=complete, seen=seen, remedy=remedy))
        if answer.prompt_token_ids:
            rendered = await self._rendered([_USER], add_generation_prompt=True)
            same = rendered == answer.prompt_token_ids
            seen = "as /tokenize renders it" if same else "differs from what /tokenize renders"
            remedy = (
                ""
                if same
                else 'use tokens = "observe" with it, or remove the server\'s default that changes prompts'
            )
            checks.append(ModelCheck(name="prompt", ok=same, seen=seen, remedy=remedy, required=False))
        if choice.token_ids and answer.prompt_token_ids and logprobs:
            checks += await self._rescored(answer.prompt_token_ids, choice.token_ids, logprobs)
        return checks

    async def _rescored(
        self, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]
    ) -> list[ModelCheck]:
        """Check whether the server returns the prompt's logprobs, as a teacher must, and whether they match
        those of sampling.
        """
        name = "logprobs of a prompt (for teachers)"
        try:
            scored = await self._prompt_logprobs([*prompt, *ids])
        except BackendError as error:
            return [ModelCheck(name=name, ok=False, seen=str(error), remedy=_NO_TEACHER, required=False)]
        if scored is None:
            seen = "the response has no prompt_logprobs"
            return [ModelCheck(name=name, ok=False, seen=seen, remedy=_NO_TEACHER, required=False)]
        gap = max(
            abs(rescored - sampled) for rescored, sampled in zip(scored[len(prompt) :], logprobs, strict=True)
        )
        close = gap < _RESCORED_NEAR
        seen = f"they differ from those of sampling by up to {gap:.1e} nats"
        seen += "" if close else f", expected less than {_RESCORED_NEAR:g}"
        return [ModelCheck(name=name, ok=close, seen=seen, remedy="" if close else _WIDER, required=False)]

    async def _processed(self) -> list[ModelCheck]:
        """Check whether logprobs are computed after temperature, by sampling below temperature 1 and scoring at
        1.
        """
        answer = await self._sampled(_TEMPERATURE)
        ids, prompt = answer.choices[0].token_ids or [], answer.prompt_token_ids or []
        sampled = _logprobs(answer.choices[0])
        name = _PROCESSED_CHECK
        scored = await self._prompt_logprobs([*prompt, *ids]) if ids and prompt and sampled else None
        if scored is None or not sampled:
            seen = "not checked: the server returns no token ids, logprobs or prompt_logprobs"
            remedy = "serve it by vLLM 0.10.2 or later or our embedded server"
            return [ModelCheck(name=name, ok=None, seen=seen, remedy=remedy, required=False)]
        pairs = zip(scored[len(prompt) :], sampled, strict=True)
        same = all(abs(rescored - logprob) < _NEAR for rescored, logprob in pairs)
        raw = same and any(logprob < -_NEAR for logprob in sampled)
        seen = (
            f"at temperature {_TEMPERATURE} they are those of temperature 1"
            if raw
            else "they follow the temperature"
        )
        remedy = "serve with --logprobs-mode processed_logprobs, or sample at temperature 1" if raw else ""
        return [ModelCheck(name=name, ok=not raw, seen=seen, remedy=remedy, required=False)]

    # --- requests ----------------------------------------------------------------------------------------

    async def _rendered(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        body = {"model": self._model, "messages": messages, "tools": [_TOOL]}
        body["add_generation_prompt"] = add_generation_prompt
        return (await self._call("POST", "/tokenize", body, _Encoded)).tokens

    async def _decoded(self, tokens: Sequence[int]) -> str:
        return (await self._call("POST", "/detokenize", {"model": self._model, "tokens": tokens}, _Decoded)).prompt

    async def _sampled(self, temperature: float) -> _SampledAnswer:
        body = {
            "model": self._model,
            "messages": [_USER],
            "tools": [_TOOL],
            "max_tokens": _SAMPLED,
            "temperature": temperature,
            "seed": 1,
            "logprobs": True,
            "return_token_ids": True,
        }
        answer = await self._call("POST", "/v1/chat/completions", body, _SampledAnswer)
        if not answer.choices:
            raise BackendError(
                f"POST {self._client.base}/v1/chat/completions: invalid response: expected a choice, got none; "
                "check that this is a model server",
                status=200,
            )
        return answer

    async def _prompt_logprobs(self, tokens: Sequence[int]) -> list[float] | None:
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await self._call("POST", "/v1/completions", body, _PromptAnswer)
        entries = answer.choices[0].prompt_logprobs if answer.choices else None
        if entries is None or len(entries) != len(tokens):
            return None
        by_token = [
            None if entry is None else entry.get(str(id_)) for entry, id_ in zip(entries, tokens, strict=True)
        ]
        return [0.0 if token is None else token.logprob for token in by_token]

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, kind: Any) -> Any:
        return await self._client.call(method, f"{self._client.base}{path}", body, kind)


def _logprobs(choice: _SampledChoice) -> list[float] | None:
    content = None if choice.logprobs is None else choice.logprobs.content
    return None if content is None else [token.logprob for token in content]


def _reads_back(name: str, written: str) -> bool:
    """Return whether a format finds, in a rendered turn, the call that the turn was rendered from."""
    format_ = FORMATS[name]
    ends = [written.find(end) for end in format_.turn_ends if end in written]
    calls = format_.parse(written[: min(ends)] if ends else written, [_TOOL]).tool_calls
    if len(calls) != 1 or calls[0].name != "ReadFile":
        return False
    try:
        return msgspec.json.decode(calls[0].arguments) == msgspec.json.decode(_ARGUMENTS)
    except msgspec.DecodeError:
        return False
