"""Model servers of one's own: vLLM, SGLang and the embedded server, which give token ids and logprobs too."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from understudy.gateway.backends.chat import ChatBackend
from understudy.gateway.backends.http import ANSWER_TIMEOUT_S
from understudy.gateway.prices import Price
from understudy.wire.model import ChatRequest

_NO_ARGS: Mapping[str, Any] = MappingProxyType({})

_VLLM_EXTRAS = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_weight_versions": True}
_LOGPROBS = {"logprobs": True}
# With a stream the ids come in its last chunk, and only if they are asked for by these names.
_SGLANG_EXTRAS = {
    False: _LOGPROBS | {"return_token_ids": True},
    True: _LOGPROBS | {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
}


class SelfHostedBackend(ChatBackend):
    """A server of one's own (see ChatBackend), whose chat template takes `template_args`."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        template_args: Mapping[str, Any] = _NO_ARGS,
        price: Price | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        resend: bool = True,
    ) -> None:
        super().__init__(base_url, model, api_key, price=price, timeout_s=timeout_s, resend=resend)
        self._template_args = dict(template_args)

    def _prompt(self, request: ChatRequest) -> dict[str, Any]:
        args = self._template_args
        if request.enable_thinking is not None:
            args = args | {"enable_thinking": request.enable_thinking}
        return super()._prompt(request) | ({"chat_template_kwargs": args} if args else {})


class VLLMBackend(SelfHostedBackend):
    """A vLLM server (see TemplateBackend)."""

    @property
    def name(self) -> str:
        """The kind of the server."""
        return "vllm"

    def _extra_fields(self, *, stream: bool) -> dict[str, Any]:
        return _VLLM_EXTRAS


class EmbeddedBackend(VLLMBackend):
    """Our own server of the embedded model."""

    @property
    def name(self) -> str:
        """The kind of the server."""
        return "embedded"


class SGLangBackend(SelfHostedBackend):
    """An SGLang server (see TemplateBackend)."""

    @property
    def name(self) -> str:
        """The kind of the server."""
        return "sglang"

    @property
    def _reasoning_field(self) -> str | None:
        return "reasoning_content"

    def _extra_fields(self, *, stream: bool) -> dict[str, Any]:
        return _SGLANG_EXTRAS[stream]
