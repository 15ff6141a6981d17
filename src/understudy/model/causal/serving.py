"""Weights as a model that can be served, with vLLM's own paths for those who exchange them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct, field

from understudy.model.causal.checkpoint import read_checkpoint
from understudy.model.causal.engine import CausalEngine, EngineLimits, PauseMode
from understudy.model.causal.jobs import SamplingRequest, SamplingResult
from understudy.model.causal.sampling import SamplingSettings
from understudy.model.causal.weights import WeightStore
from understudy.model.hermes import parse_completion
from understudy.model.interface import ControlHandler, ControlRequest, ModelCompletion
from understudy.model.protocol import (
    GenerateRequest,
    InvalidRequestError,
    ModelChatRequest,
    ModelMessage,
    ModelTool,
    SamplingFields,
    read_body,
)
from understudy.model.vocabulary import Vocabulary

_SINGLE_THREAD_PARAMETERS = 50_000_000
"""Parameters below which a second thread costs more than it brings."""


class CausalModel:
    """A model's directory as a model that can be served (see ServedModel).

    Requests without a temperature are sampled at 1, without cut-offs: as the model says. JSON schemas and choices
    of tools are not enforced. Tool calls in chat answers are read in Hermes' form.
    """

    def __init__(
        self, directory: Path, *, name: str, version: str, device: str = "cpu", limits: EngineLimits | None = None
    ) -> None:
        """Load the directory. Raises ConfigError."""
        self._checkpoint = read_checkpoint(directory)
        self._tokenizer = self._checkpoint.tokenizer
        self.vocabulary: Vocabulary = self._tokenizer
        self.context = self._checkpoint.context
        self._weights = WeightStore(self._checkpoint, name, version, device=device)
        weights = self._weights.weights()
        parameters = sum(parameter.numel() for parameter in weights[name].module.parameters())
        if device == "cpu" and parameters < _SINGLE_THREAD_PARAMETERS:
            torch.set_num_threads(1)
        self._engine = CausalEngine(weights, self._tokenizer.token_bytes, limits=limits)
        self.controls: Mapping[str, Mapping[str, ControlHandler]] = {
            "/pause": {"POST": self._pause},
            "/resume": {"POST": self._resume},
            "/is_paused": {"GET": self._is_paused},
            "/collective_rpc": {"POST": self._rpc},
            "/reset_prefix_cache": {"POST": self._reset},
            "/update_weight_version": {"POST": self._label},
            "/weight_info": {"GET": self._info},
            "/v1/load_lora_adapter": {"POST": self._load_adapter},
            "/v1/unload_lora_adapter": {"POST": self._unload_adapter},
        }

    def models(self) -> Sequence[str]:
        """See ServedModel: the adapters."""
        return self._weights.names

    def render(
        self,
        messages: Sequence[ModelMessage],
        tools: Sequence[ModelTool] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[list[int], int]:
        """See ServedModel."""
        return self._tokenizer.render(messages, tools, add_generation_prompt=add_generation_prompt), 0

    async def chat(
        self, request: ModelChatRequest, prompt: list[int], cached: int, limit: int, model: str
    ) -> ModelCompletion:
        """See ServedModel."""
        sampling_request = self._sampling_request(
            request, prompt, limit, model, request.seed, request.stop_strings
        )
        tools = bool(request.tools) and request.tool_choice != "none"
        return self._completion(request, await self._sample(sampling_request), sampling_request, tools)

    async def generate(self, request: GenerateRequest, limit: int, model: str) -> ModelCompletion:
        """See ServedModel."""
        params = request.sampling_params
        sampling_request = self._sampling_request(
            params, request.token_ids, limit, model, params.seed, request.stop_strings
        )
        result = await self._sample(sampling_request)
        return self._completion(None, result, sampling_request, tools=False)

    def close(self) -> None:
        """See ServedModel."""
        self._engine.close()

    def _sampling_request(
        self,
        params: SamplingFields,
        prompt: list[int],
        limit: int,
        model: str,
        seed: int | None,
        stops: Sequence[str],
    ) -> SamplingRequest:
        ends = frozenset[int]() if params.ignore_eos else self._checkpoint.ends
        settings = SamplingSettings(
            temperature=1.0 if params.temperature is None else params.temperature,
            top_p=params.top_p if params.top_p is not None else 1.0,
            top_k=max(params.top_k or 0, 0),
            min_p=params.min_p or 0.0,
            presence_penalty=params.presence_penalty or 0.0,
            frequency_penalty=params.frequency_penalty or 0.0,
            repetition_penalty=params.repetition_penalty or 1.0,
            logit_bias=params.logit_bias,
        )
        return SamplingRequest(
            prompt=prompt,
            limit=limit,
            model=model,
            sampling=settings,
            seed=seed,
            stops=tuple(stops),
            end_tokens=ends.union(params.stop_token_ids or ()),
        )

    async def _sample(self, request: SamplingRequest) -> SamplingResult:
        return await asyncio.wrap_future(self._engine.submit(request))

    def _completion(
        self,
        request: ModelChatRequest | None,
        result: SamplingResult,
        sampling_request: SamplingRequest,
        tools: bool,
    ) -> ModelCompletion:
        limit: int | None = None
        if result.stop is not None:
            shown_stop = result.stop if request is not None and request.include_stop_str_in_output else ""
            limit = result.stop_start + len(shown_stop.encode())
        # Where tokens were asked for, what they say is the client's affair.
        segments = (
            [] if request is None else parse_completion(self.vocabulary, result.ids, tools=tools, byte_limit=limit)
        )
        last = result.ids[-1] if result.ids else None
        chosen = (
            last
            if result.finish_reason == "stop" and last in sampling_request.end_tokens - self._checkpoint.ends
            else None
        )
        return ModelCompletion(
            ids=result.ids,
            logprobs=result.logprobs,
            segments=segments,
            finish_reason=result.finish_reason,
            stop_reason=result.stop if result.stop is not None else chosen,
            weight_versions=result.spans,
            cached_tokens=result.cached,
        )

    # --- control ----------------------------------------------------------------------------------------

    async def _pause(self, command: ControlRequest) -> dict[str, Any]:
        try:
            mode = msgspec.convert(command.query.get("mode", "abort"), PauseMode)
        except msgspec.ValidationError:
            raise InvalidRequestError("mode must be abort, wait or keep", param="mode") from None
        clear = _flag(command, "clear_cache", default=True)
        await asyncio.wrap_future(self._engine.pause(mode, clear_cache=clear))
        return {"status": "paused"}

    async def _resume(self, _: ControlRequest) -> dict[str, Any]:
        await asyncio.wrap_future(self._engine.resume())
        return {"status": "resumed"}

    async def _is_paused(self, _: ControlRequest) -> dict[str, Any]:
        return {"is_paused": self._engine.paused}

    async def _rpc(self, command: ControlRequest) -> dict[str, Any]:
        """Of vLLM's calls of its workers, the one that loads weights from a directory."""
        call = read_body(command.body, _CollectiveCall)
        if call.method != "reload_weights":
            raise InvalidRequestError(f"method must be reload_weights, got {call.method!r}", param="method")
        path = Path(call.kwargs.weights_path) if call.kwargs.weights_path else self._checkpoint.directory
        await self._weights.exchange(self._engine, path, call.kwargs.weight_version)
        return {"results": [None]}

    async def _reset(self, _: ControlRequest) -> dict[str, Any]:
        await asyncio.wrap_future(self._engine.clear_cache())
        return {"success": True}

    async def _label(self, command: ControlRequest) -> dict[str, Any]:
        version = read_body(command.body, _VersionLabel).new_version
        await self._weights.label(self._engine, version)
        return {"success": True, "message": f"Weight version updated to {version}", "new_version": version}

    async def _info(self, _: ControlRequest) -> dict[str, Any]:
        return {"weight_version": self._weights.version}

    async def _load_adapter(self, command: ControlRequest) -> str:
        wanted = read_body(command.body, _LoadAdapter)
        await self._weights.add(
            self._engine, wanted.lora_name, Path(wanted.lora_path), in_place=wanted.load_inplace
        )
        return f"Success: LoRA adapter '{wanted.lora_name}' added successfully."

    async def _unload_adapter(self, command: ControlRequest) -> str:
        name = read_body(command.body, _UnloadAdapter).lora_name
        await self._weights.remove(self._engine, name)
        return f"Success: LoRA adapter '{name}' removed successfully."


class _ReloadArguments(Struct):
    """`weight_version` is ours: it names the new weights in the same instant."""

    weights_path: str | None = None
    weight_version: str | None = None


class _CollectiveCall(Struct):
    method: str
    kwargs: _ReloadArguments = field(default_factory=_ReloadArguments)


class _VersionLabel(Struct):
    new_version: str


class _LoadAdapter(Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class _UnloadAdapter(Struct):
    lora_name: str


def _flag(command: ControlRequest, name: str, *, default: bool) -> bool:
    text = command.query.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{name} must be true or false, got {text!r}", param=name)
    return text.lower() in ("true", "1")
