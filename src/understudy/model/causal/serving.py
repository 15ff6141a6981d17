"""Serves weights from a directory, with vLLM's endpoints for exchanging them."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
from msgspec import Struct, field
from safetensors import SafetensorError

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
from understudy.model.causal.linear_layers import pack_linear_layers, unpacked_copy
from understudy.model.causal.sampling import SamplingSettings
from understudy.model.directory import require_packages
from understudy.model.hermes import CompletionSegment, Vocabulary, parse_completion
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
from understudy.util.text import reason_of

_SMALL_MODEL_PARAMETERS = 50_000_000
"""Parameters below which a second thread, and packed layers, cost more than they bring."""
_EXCHANGE_TIMEOUT_S = 600.0
"""The maximum time in seconds for replacing weights, which waits for at most one step of the engine."""


class WeightStore:
    """The weights of an engine by name: `base`, and adapters. All have the same `version`, which an operator sets.

    New weights are loaded beside the served ones, and replace them between two tokens; if loading fails, nothing
    changes.
    """

    def __init__(
        self, checkpoint: Checkpoint, base: str, version: str, *, device: str, limits: EngineLimits | None
    ) -> None:
        """Load the checkpoint's weights and start their engine. Raises ConfigError."""
        self.base = base
        self.version = version
        self._checkpoint = checkpoint
        self._device = device
        module = load_model(checkpoint.directory, device=device)
        self._shapes = _shapes(module)
        self._packs_layers = device == "cpu" and _parameter_count(module) >= _SMALL_MODEL_PARAMETERS
        if device == "cpu" and not self._packs_layers:
            torch.set_num_threads(1)
        self._modules: dict[str, Any] = {base: self._ready(module)}
        self._adapters: dict[str, Path] = {}
        self._lock = asyncio.Lock()
        self.engine = CausalEngine(
            {base: ModelWeights(self._modules[base], version)}, checkpoint.tokenizer.token_bytes, limits=limits
        )

    @property
    def names(self) -> list[str]:
        """The names of the adapters."""
        return list(self._adapters)

    async def label(self, version: str) -> None:
        """Set the version of the served weights."""
        async with self._lock:
            await self._serve(version, clear_cache=False)

    async def exchange(self, directory: Path, version: str | None) -> None:
        """Serve the weights of another directory with the same architecture and vocabulary, and with the same
        adapters.

        Without a `version` the old one is kept. Raises InvalidRequestError.
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
            loaded = {self.base: module} | merged
            self._modules = {name: await asyncio.to_thread(self._ready, loaded[name]) for name in loaded}
            await self._serve(version or self.version)

    async def add(self, name: str, path: Path, *, in_place: bool) -> None:
        """Serve an adapter; with `in_place` it may replace one with the same name. Raises InvalidRequestError."""
        async with self._lock:
            if name == self.base:
                raise InvalidRequestError(
                    f"lora_name: '{name}' is the name of the base model; expected one that no served model has: "
                    "choose another",
                    param="lora_name",
                )
            if name in self._adapters and not in_place:
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
            self._modules[name] = await asyncio.to_thread(self._ready, module)
            self._adapters[name] = path
            await self._set(name, ModelWeights(self._modules[name], self.version))

    async def remove(self, name: str) -> None:
        """Stop serving an adapter. Raises InvalidRequestError for one that does not exist."""
        async with self._lock:
            if name not in self._adapters:
                raise InvalidRequestError(
                    f"The lora adapter '{name}' cannot be found. "
                    + (
                        f"Name one of: {', '.join(self._adapters)}"
                        if self._adapters
                        else "No adapter is loaded; POST /v1/load_lora_adapter loads one."
                    ),
                    status=404,
                    kind="NotFoundError",
                )
            del self._adapters[name], self._modules[name]
            await self._set(name, None)

    def _load(self, directory: Path) -> Any:
        served: Any = self._modules[self.base].config
        config = read_config(directory)
        for key in ("model_type", "vocab_size"):
            actual, expected = getattr(config, key), getattr(served, key)
            if actual != expected:
                raise ConfigError(
                    f"{directory / 'config.json'}: {key} is {actual!r}, but the served model has "
                    f"{expected!r}; give weights of the same architecture"
                )
        if config.max_position_embeddings < self._checkpoint.context:
            raise ConfigError(
                f"{directory / 'config.json'}: max_position_embeddings is "
                f"{config.max_position_embeddings}, expected at least {self._checkpoint.context}, the context "
                "length of the served model; give weights with at least that, or serve these with a new server"
            )
        module = load_model(directory, device=self._device)
        actual, expected = _shapes(module), self._shapes
        for name in sorted(actual.keys() | expected.keys()):
            if actual.get(name) != expected.get(name):
                raise ConfigError(
                    f"{directory}: the weights do not fit the served model: {name} has the shape "
                    f"{actual.get(name, 'none (the tensor is missing)')}, expected "
                    f"{expected.get(name, 'none (no such tensor)')}; give weights of the same architecture"
                )
        return module

    def _ready(self, module: Any) -> Any:
        """Return a loaded module as it is served."""
        if self._packs_layers:
            pack_linear_layers(module)
        return module

    async def _serve(self, version: str, *, clear_cache: bool = True) -> None:
        self.version = version
        for name, module in self._modules.items():
            await self._set(name, ModelWeights(module, version), clear_cache=clear_cache)

    async def _set(self, name: str, weights: ModelWeights | None, *, clear_cache: bool = True) -> None:
        done = self.engine.set_weights(name, weights, clear_cache=clear_cache)
        try:
            async with asyncio.timeout(_EXCHANGE_TIMEOUT_S):
                await asyncio.wrap_future(done)
        except TimeoutError:
            raise BackendError(
                f"the engine did not load the new weights of {name!r} within {_EXCHANGE_TIMEOUT_S:g} s, its time "
                "limit; see the server's log, and send the request again",
                status=500,
            ) from None


def _parameter_count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shapes(module: Any) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in module.named_parameters()}


def merge_adapter(module: Any, adapter: Path, base: Path) -> Any:
    """Return a copy of a module with a PEFT LoRA adapter merged into it. Raises ConfigError for anything else."""
    config = adapter / "adapter_config.json"
    if not config.is_file():
        raise ConfigError(
            f"{config}: no such file; expected a PEFT adapter as its save_pretrained writes it: give the "
            "directory of one"
        )
    try:
        kind = json.loads(config.read_text("utf-8"))["peft_type"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{config}: invalid adapter configuration: {reason_of(error)}; expected a JSON object with peft_type: "
            "give one that PEFT wrote"
        ) from error
    if kind != "LORA":
        raise ConfigError(f"{config}: unsupported adapter type {kind!r}; give one of the type LORA")
    require_packages("peft")
    import peft

    library: Any = peft
    try:
        with warnings.catch_warnings():
            # Checked, because a missing tensor would keep its initial value, with which an adapter has no effect.
            warnings.filterwarnings("error", message=".*missing adapter keys")
            tuned: Any = library.PeftModel.from_pretrained(unpacked_copy(module), adapter)
        merged: Any = tuned.merge_and_unload()
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{adapter}: the adapter's weights cannot be read: {reason_of(error)}; give a complete directory that "
            "PEFT wrote"
        ) from error
    except Exception as error:  # errors of PEFT have no narrower class
        raise ConfigError(
            f"{adapter}: the adapter does not fit the model in {base}: {reason_of(error)}; give an adapter that "
            "was trained on this model"
        ) from error
    return merged.eval().requires_grad_(False)


class CausalModel:
    """A model's directory as a model that can be served (see ServedModel).

    Requests without a temperature are sampled at temperature 1, without top-p or top-k. JSON schemas and tool
    choices are not enforced. Tool calls in chat responses are parsed in Hermes format.
    """

    def __init__(
        self, directory: Path, *, name: str, version: str, device: str = "cpu", limits: EngineLimits | None = None
    ) -> None:
        """Load the directory. Raises ConfigError."""
        self._checkpoint = read_checkpoint(directory)
        self.vocabulary: Vocabulary = self._checkpoint.tokenizer
        self.context = self._checkpoint.context
        self._weights = WeightStore(self._checkpoint, name, version, device=device, limits=limits)
        self._engine = self._weights.engine
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
        """See ServedModel: the names of the adapters."""
        return self._weights.names

    def render(
        self,
        messages: Sequence[ModelMessage],
        tools: Sequence[ModelTool] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[list[int], int]:
        """See ServedModel."""
        return self._checkpoint.tokenizer.render(messages, tools, add_generation_prompt=add_generation_prompt), 0

    async def chat(
        self, request: ModelChatRequest, prompt: list[int], cached: int, limit: int, model: str
    ) -> ModelCompletion:
        """See ServedModel."""
        sampling = self._sampling_request(request, prompt, limit, model)
        result = await asyncio.wrap_future(self._engine.submit(sampling))
        byte_limit: int | None = None
        if result.stop is not None:
            shown_stop = result.stop if request.include_stop_str_in_output else ""
            byte_limit = result.stop_start + len(shown_stop.encode())
        tools = bool(request.tools) and request.tool_choice != "none"
        segments = parse_completion(self.vocabulary, result.ids, tools=tools, byte_limit=byte_limit)
        return self._completion(result, sampling, segments)

    async def generate(self, request: GenerateRequest, limit: int, model: str) -> ModelCompletion:
        """See ServedModel. The client decodes the tokens itself, so the completion has no segments."""
        sampling = self._sampling_request(request.sampling_params, request.token_ids, limit, model)
        return self._completion(await asyncio.wrap_future(self._engine.submit(sampling)), sampling, [])

    async def prompt_logprobs(self, prompt: Sequence[int], model: str) -> list[float]:
        """See ServedModel."""
        return await asyncio.wrap_future(self._engine.score(prompt, model))

    def close(self) -> None:
        """See ServedModel."""
        self._engine.close()

    def _sampling_request(
        self, params: SamplingFields, prompt: list[int], limit: int, model: str
    ) -> SamplingRequest:
        ends = frozenset[int]() if params.ignore_eos else self._checkpoint.ends
        values = {name: getattr(params, name) for name in SamplingSettings.__struct_fields__}
        settings = SamplingSettings(**{name: value for name, value in values.items() if value is not None})
        return SamplingRequest(
            prompt=prompt,
            limit=limit,
            model=model,
            sampling=settings,
            seed=params.seed,
            stops=tuple(params.stop_strings),
            end_tokens=ends.union(params.stop_token_ids or ()),
        )

    def _completion(
        self, result: SamplingResult, request: SamplingRequest, segments: list[CompletionSegment]
    ) -> ModelCompletion:
        stop_reason: str | int | None = result.stop
        if stop_reason is None and result.finish_reason == "stop":
            last_token = result.ids[-1]
            # The token that ends every turn is not reported as a stop reason, because no client chose it.
            stop_reason = last_token if last_token in request.end_tokens - self._checkpoint.ends else None
        return ModelCompletion(
            ids=result.ids,
            logprobs=result.logprobs,
            segments=segments,
            finish_reason=result.finish_reason,
            stop_reason=stop_reason,
            weight_versions=result.spans,
            cached_tokens=result.cached,
        )

    # --- control ----------------------------------------------------------------------------------------

    async def _pause(self, command: ControlRequest) -> dict[str, Any]:
        try:
            mode = msgspec.convert(command.query.get("mode", "abort"), PauseMode)
        except msgspec.ValidationError:
            raise InvalidRequestError(
                f"mode: expected one of {', '.join(get_args(PauseMode))}, got {command.query.get('mode')!r}; "
                "send one of them",
                param="mode",
            ) from None
        clear = _boolean_parameter(command, "clear_cache", default=True)
        await asyncio.wrap_future(self._engine.pause(mode, clear_cache=clear))
        return {"status": "paused"}

    async def _resume(self, _: ControlRequest) -> dict[str, Any]:
        await asyncio.wrap_future(self._engine.resume())
        return {"status": "resumed"}

    async def _is_paused(self, _: ControlRequest) -> dict[str, Any]:
        return {"is_paused": self._engine.paused}

    async def _rpc(self, command: ControlRequest) -> dict[str, Any]:
        """Carry out the only supported one of vLLM's collective RPCs: load weights from a directory."""
        call = read_body(command.body, _CollectiveCall)
        if call.method != "reload_weights":
            raise InvalidRequestError(
                f"method: {call.method!r} is unsupported, expected reload_weights; send that, or serve the model "
                "with vLLM for others",
                param="method",
            )
        path = Path(call.kwargs.weights_path) if call.kwargs.weights_path else self._checkpoint.directory
        await self._weights.exchange(path, call.kwargs.weight_version)
        return {"results": [None]}

    async def _reset(self, _: ControlRequest) -> dict[str, Any]:
        await asyncio.wrap_future(self._engine.clear_cache())
        return {"success": True}

    async def _label(self, command: ControlRequest) -> dict[str, Any]:
        version = read_body(command.body, _VersionLabel).new_version
        await self._weights.label(version)
        return {"success": True, "message": f"Weight version updated to {version}", "new_version": version}

    async def _info(self, _: ControlRequest) -> dict[str, Any]:
        return {"weight_version": self._weights.version}

    async def _load_adapter(self, command: ControlRequest) -> str:
        request = read_body(command.body, _LoadAdapter)
        await self._weights.add(request.lora_name, Path(request.lora_path), in_place=request.load_inplace)
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    async def _unload_adapter(self, command: ControlRequest) -> str:
        name = read_body(command.body, _UnloadAdapter).lora_name
        await self._weights.remove(name)
        return f"Success: LoRA adapter '{name}' removed successfully."


class _ReloadArguments(Struct):
    """`weight_version` is our extension: it sets the version of the new weights in the same instant."""

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


def _boolean_parameter(command: ControlRequest, name: str, *, default: bool) -> bool:
    text = command.query.get(name, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequestError(
            f"{name}: expected true or false, got {command.query[name]!r}; send one of them", param=name
        )
    return text in ("true", "1")
