"""Servers that take a prompt as token ids and answer with token ids.

Which distribution a logprob refers to depends on the server. vLLM returns logprobs before temperature and cut-offs
are applied, unless it is served with `--logprobs-mode processed_logprobs`; only those are the behaviour policy's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import Struct, json

from understudy.errors import BackendError
from understudy.gateway.backends.fields import Count, NegativeLog, ServerUsage, TokenId, VersionSpan, policy_spans
from understudy.gateway.backends.http import HttpClient
from understudy.types import PolicySpan


class SampledTokens(Struct, frozen=True, kw_only=True):
    """What a server sampled. `logprobs[i]` belongs to `ids[i]`.

    `stop` is the stop string that ended it, if any; `sent` are the sampling parameters as they were sent.
    """

    ids: list[int]
    logprobs: list[float] | None
    finish_reason: str
    stop: str | None
    sent: dict[str, Any]
    policy_spans: tuple[PolicySpan, ...] = ()
    cached_tokens: int = 0


class TokenServer(ABC):
    """A server of one model, reached through `client`. It knows nothing of chat.

    `parameters` maps the sampling parameters that it supports, by OpenAI's names, to its own names.
    """

    path: ClassVar[str]
    parameters: ClassVar[Mapping[str, str]]

    def __init__(self, client: HttpClient, model: str) -> None:
        self.client = client
        self.model = model
        # Servers have these paths beside /v1, not below it.
        self._url = f"{client.base.removesuffix('/v1')}/{self.path}"

    @abstractmethod
    async def generate(
        self, prompt: Sequence[int], sampling: Mapping[str, Any], schema: dict[str, Any] | None
    ) -> SampledTokens:
        """Sample from `prompt`. With `schema`, the answer satisfies this JSON schema.

        `sampling` uses OpenAI's names, all of which are in `parameters`. Raises BackendError, also for an answer
        that does not have one logprob for each token id.
        """


_COMMON = ("temperature", "top_p", "top_k", "min_p", "stop", "logit_bias")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAME_NAMES = {name: name for name in (*_COMMON, *_PENALTIES)}


# --- vLLM ----------------------------------------------------------------------------------------------


class _VLLMLogprob(Struct):
    logprob: NegativeLog
    token_id: TokenId | None = None


class _VLLMLogprobs(Struct):
    content: list[_VLLMLogprob] | None = None


class _VLLMChoice(Struct):
    token_ids: list[TokenId]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _VLLMLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class _VLLMAnswer(Struct):
    choices: list[_VLLMChoice]
    usage: ServerUsage | None = None


class VLLMTokens(TokenServer):
    """vLLM served with `--enable-scale-out`, and our own embedded server (see TokenServer)."""

    path = "inference/v1/generate"
    parameters = _SAME_NAMES | {"max_tokens": "max_tokens", "seed": "seed"}

    async def generate(
        self, prompt: Sequence[int], sampling: Mapping[str, Any], schema: dict[str, Any] | None
    ) -> SampledTokens:
        """See TokenServer."""
        sent = _renamed(sampling, self.parameters)
        if schema is not None:
            sent["structured_outputs"] = {"json": schema}
        body = {
            "model": self.model,
            "token_ids": prompt,
            "sampling_params": sent | {"logprobs": 0},
            "return_token_ids": True,
            "return_weight_versions": True,
            "output_mode": "tokens",
            "stream": False,
        }
        answer = await self.client.call("POST", self._url, body, _VLLMAnswer)
        if len(answer.choices) != 1:
            raise BackendError(
                f"POST {self._url}: invalid response: expected 1 choice, got {len(answer.choices)}; update the "
                "model server",
                status=200,
            )
        choice = answer.choices[0]
        entries = choice.logprobs.content if choice.logprobs else None
        if entries is not None:
            pairs = zip(choice.token_ids, entries, strict=False)
            named = [id_ if entry.token_id is None else entry.token_id for id_, entry in pairs]
            _check(self._url, choice.token_ids, named, len(entries))
        details = answer.usage.prompt_tokens_details if answer.usage else None
        return SampledTokens(
            ids=choice.token_ids,
            logprobs=None if entries is None else [entry.logprob for entry in entries],
            finish_reason=choice.finish_reason or "none",
            stop=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
            sent=sent,
            policy_spans=policy_spans(choice.weight_versions),
            cached_tokens=(details.cached_tokens or 0) if details else 0,
        )


# --- SGLang --------------------------------------------------------------------------------------------


class _SGLangFinish(Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str = ""


class _SGLangMeta(Struct):
    finish_reason: _SGLangFinish | None = None
    output_token_logprobs: list[tuple[NegativeLog, TokenId, Any]] | None = None
    weight_version: str | int | None = None
    weight_versions: list[VersionSpan] | None = None
    cached_tokens: Count = 0


class _SGLangAnswer(Struct):
    output_ids: list[TokenId]
    meta_info: _SGLangMeta


class SGLangTokens(TokenServer):
    """SGLang's native `/generate` (see TokenServer). The model name `lora:NAME` selects the adapter NAME."""

    path = "generate"
    parameters = _SAME_NAMES | {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}

    def __init__(self, client: HttpClient, model: str) -> None:
        super().__init__(client, model)
        # As in SGLang's chat completions, where the part before the colon may be anything.
        self._adapter = {"lora_path": model.removeprefix("lora:")} if model.startswith("lora:") else {}

    async def generate(
        self, prompt: Sequence[int], sampling: Mapping[str, Any], schema: dict[str, Any] | None
    ) -> SampledTokens:
        """See TokenServer."""
        sent = _renamed(sampling, self.parameters)
        if schema is not None:
            sent["json_schema"] = json.encode(schema).decode()
        body = {"input_ids": prompt, "sampling_params": sent, "return_logprob": True, "stream": False}
        body |= self._adapter
        answer = await self.client.call("POST", self._url, body, _SGLangAnswer)
        meta = answer.meta_info
        finish = meta.finish_reason or _SGLangFinish("none")
        entries = meta.output_token_logprobs
        if entries is not None:
            _check(self._url, answer.output_ids, [entry[1] for entry in entries], len(entries))
        return SampledTokens(
            ids=answer.output_ids,
            logprobs=None if entries is None else [entry[0] for entry in entries],
            finish_reason=finish.type,
            stop=finish.matched if isinstance(finish.matched, str) else None,
            sent=sent,
            policy_spans=policy_spans(meta.weight_versions, meta.weight_version),
            cached_tokens=meta.cached_tokens,
        )


SERVERS: dict[str, type[TokenServer]] = {"vllm": VLLMTokens, "embedded": VLLMTokens, "sglang": SGLangTokens}
"""The token servers by kind of backend."""


def _renamed(sampling: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[name]: value for name, value in sampling.items()}


def _check(url: str, ids: Sequence[int], named: Sequence[int], count: int) -> None:
    """Raise BackendError unless there is one logprob for each token, and of that token."""
    if count != len(ids) or list(ids) != list(named):
        got = f"{count} logprobs" if count != len(ids) else "logprobs of other tokens"
        raise BackendError(
            f"POST {url}: invalid response: expected a logprob of each of its {len(ids)} tokens, got {got}, so it "
            "cannot be trained on; update the model server",
            status=200,
        )
