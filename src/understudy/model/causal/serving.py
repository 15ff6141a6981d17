"""Weights as a model that can be served, with vLLM's own paths for those who exchange them."""

from __future__ import annotations

import asyncio
import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct, field

from understudy.errors import BackendError, ConfigError
from understudy.model.causal.checkpoint import Checkpoint, load_model, read_checkpoint, read_config
from understudy.model.causal.engine import (
    CausalEngine,
    EngineLimits,
    ModelWeights,
    PauseMode,
    SamplingRequest,
    SamplingResult,
)
from understudy.model.causal.sampling import SamplingSettings
from understudy.model.hermes import Vocabulary, parse_completion
from understudy.model.protocol import (
    GenerateRequest,
    InvalidRequestError,
    ModelChatRequest,
    ModelMessage,
    ModelTool,
    SamplingFields,
    read_body,
)
from understudy.model.responses import ControlHandler, ControlRequest, ModelCompletion


class WeightStore:
    """The weights of an engine by name: `base`, and adapters. All bear one `version`, which an operator sets.

    What is loaded is loaded beside what is served, and takes its place between two tokens; what cannot be loaded
    changes nothing.
    """

    def __init__(self, checkpoint: Checkpoint, base: str, version: str, *, device: str = "cpu") -> None:
        """Load the checkpoint's weights. Raises ConfigError."""
        self.base = base
        self.version = version
        self._checkpoint = checkpoint
        self._device = device
        self._modules: dict[str, Any] = {base: load_model(checkpoint.directory, device=device)}
        self._adapters: dict[str, Path] = {}
        self._lock = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """The names of the adapters."""
        return list(self._adapters)

    def weights(self) -> dict[str, ModelWeights]:
        """All weights by name."""
        return {name: ModelWeights(module, self.version) for name, module in self._modules.items()}

    async def label(self, engine: CausalEngine, version: str) -> None:
        """Call the weights that are served by another version."""
        async with self._lock:
            await self._serve(engine, version, clear_cache=False)

    async def exchange(self, engine: CausalEngine, directory: Path, version: str | None) -> None:
        """Serve the weights of another directory, of the same architecture and vocabulary, with the same adapters.

        Without a `version` the old one stays. Raises RequestFault.
        """
        async with self._lock:
            try:
                module = await asyncio.to_thread(self._load, directory)
                merged = {
                    name: await asyncio.to_thread(merge_adapter, module, path, directory)
                    for name, path in self._adapters.items()
                }
            except ConfigError as error:
                raise InvalidRequestError(str(error), param="weights_path") from error
            self._modules = {self.base: module} | merged
            await self._serve(engine, version or self.version)

    async def add(self, engine: CausalEngine, name: str, path: Path, *, in_place: bool) -> None:
        """Serve an adapter under a name, with `in_place` also under one that is another's. Raises RequestFault."""
        async with self._lock:
            if name == self.base or (name in self._adapters and not in_place):
                raise InvalidRequestError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                    "place, set 'load_inplace' to True."
                )
            try:
                module = await asyncio.to_thread(
                    merge_adapter, self._modules[self.base], path, self._checkpoint.directory
                )
            except ConfigError as error:
                raise InvalidRequestError(
                    str(error), status=404, param="lora_path", kind="NotFoundError"
                ) from error
            self._modules[name] = module
            self._adapters[name] = path
            await _wait_for_engine(engine.set_weights(name, ModelWeights(module, self.version)))

    async def remove(self, engine: CausalEngine, name: str) -> None:
        """Serve an adapter no more. Raises RequestFault for one that is not there."""
        async with self._lock:
            if name not in self._adapters:
                raise InvalidRequestError(
                    f"The lora adapter '{name}' cannot be found.", status=404, kind="NotFoundError"
                )
            del self._adapters[name], self._modules[name]
            await _wait_for_engine(engine.set_weights(name, None))

    def _load(self, directory: Path) -> Any:
        served: Any = self._modules[self.base].config
        config = read_config(directory)
        for key in ("model_type", "vocab_size"):
            actual, expected = getattr(config, key), getattr(served, key)
            if actual != expected:
                raise ConfigError(
                    f"{directory / 'config.json'} has {key} {actual!r}; the model that is served has {expected!r}"
                )
        if config.max_position_embeddings < self._checkpoint.context:
            raise ConfigError(
                f"{directory / 'config.json'} has max_position_embeddings {config.max_position_embeddings}; the "
                f"model that is served has {self._checkpoint.context}"
            )
        module = load_model(directory, device=self._device)
        actual, expected = _shapes(module), _shapes(self._modules[self.base])
        for name in sorted(actual.keys() | expected.keys()):
            if actual.get(name) != expected.get(name):
                raise ConfigError(
                    f"the weights in {directory} do not fit the model that is served: {name} has shape "
                    f"{actual.get(name, 'none')}, expected {expected.get(name, 'none')}"
                )
        return module

    async def _serve(self, engine: CausalEngine, version: str, *, clear_cache: bool = True) -> None:
        self.version = version
        for name, weights in self.weights().items():
            await _wait_for_engine(engine.set_weights(name, weights, clear_cache=clear_cache))


def _shapes(module: Any) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in module.named_parameters()}


def merge_adapter(module: Any, adapter: Path, base: Path) -> Any:
    """A copy of a module with a LoRA adapter of PEFT's merged into it. Raises ConfigError for another thing."""
    config = adapter / "adapter_config.json"
    if not config.is_file():
        raise ConfigError(f"{adapter} has no adapter_config.json; expected the directory of a PEFT adapter")
    try:
        kind = json.loads(config.read_text("utf-8"))["peft_type"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{config} cannot be read: {error}") from error
    if kind != "LORA":
        raise ConfigError(f"{config} is of an adapter of type {kind!r}; only LORA can be served")
    try:
        import peft

        library: Any = peft
        with warnings.catch_warnings():
            # What is missing would be left as it was initialised: an adapter that does nothing.
            warnings.filterwarnings("error", message=".*missing adapter keys")
            tuned: Any = library.PeftModel.from_pretrained(copy.deepcopy(module), adapter)
        merged: Any = tuned.merge_and_unload()
    except Exception as error:  # the library raises whatever it met
        raise ConfigError(f"the adapter in {adapter} does not fit the model in {base}: {error}") from error
    return merged.eval().requires_grad_(False)


async def _wait_for_engine(future: Any) -> None:
    try:
        await asyncio.wait_for(asyncio.wrap_future(future), 600)
    except TimeoutError:
        raise BackendError("the engine did not take up the weights within ten minutes", status=500) from None


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
