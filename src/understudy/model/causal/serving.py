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
from understudy.model.causal.engine import Engine, Limits, PauseMode
from understudy.model.causal.jobs import Ask, Outcome
from understudy.model.causal.sampling import Drawing
from understudy.model.causal.weights import Shelf
from understudy.model.hermes import parse
from understudy.model.interface import Command, Completion, Control
from understudy.model.protocol import (
    Drawn,
    GenerateRequest,
    Message,
    RequestFault,
    ServedChatRequest,
    Tool,
    read_body,
)
from understudy.model.vocabulary import Vocabulary

_SMALL = 50_000_000
"""Parameters below which a second thread costs more than it brings."""


class CausalModel:
    """A model's directory as a model that can be served (see ServedModel).

    Requests without a temperature are sampled at 1, without cut-offs: as the model says. JSON schemas and choices
    of tools are not enforced. Tool calls in chat answers are read in Hermes' form.
    """

    def __init__(
        self, directory: Path, *, name: str, version: str, device: str = "cpu", limits: Limits | None = None
    ) -> None:
        """Load the directory. Raises ConfigError."""
        self._checkpoint = read_checkpoint(directory)
        self._tokenizer = self._checkpoint.tokenizer
        self.vocabulary: Vocabulary = self._tokenizer
        self.context = self._checkpoint.context
        self._shelf = Shelf(self._checkpoint, name, version, device=device)
        weights = self._shelf.weights()
        parameters = sum(parameter.numel() for parameter in weights[name].module.parameters())
        if device == "cpu" and parameters < _SMALL:
            torch.set_num_threads(1)
        self._engine = Engine(weights, self._tokenizer.token_bytes, limits=limits)
        self.controls: Mapping[str, Mapping[str, Control]] = {
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
        return self._shelf.names

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool = True
    ) -> tuple[list[int], int]:
        """See ServedModel."""
        return self._tokenizer.render(messages, tools, add_generation_prompt=add_generation_prompt), 0

    async def chat(
        self, request: ServedChatRequest, prompt: list[int], known: int, limit: int, model: str
    ) -> Completion:
        """See ServedModel."""
        ask = self._ask(request, prompt, limit, model, request.seed, request.stop_strings)
        tools = bool(request.tools) and request.tool_choice != "none"
        return self._completion(request, await self._outcome(ask), ask, tools)

    async def generate(self, request: GenerateRequest, limit: int, model: str) -> Completion:
        """See ServedModel."""
        params = request.sampling_params
        ask = self._ask(params, request.token_ids, limit, model, params.seed, request.stop_strings)
        outcome = await self._outcome(ask)
        return self._completion(None, outcome, ask, tools=False)

    def close(self) -> None:
        """See ServedModel."""
        self._engine.close()

    def _ask(
        self,
        drawn: Drawn,
        prompt: list[int],
        limit: int,
        model: str,
        seed: int | None,
        stops: Sequence[str],
    ) -> Ask:
        ends = frozenset[int]() if drawn.ignore_eos else self._checkpoint.ends
        drawing = Drawing(
            temperature=1.0 if drawn.temperature is None else drawn.temperature,
            top_p=drawn.top_p if drawn.top_p is not None else 1.0,
            top_k=max(drawn.top_k or 0, 0),
            min_p=drawn.min_p or 0.0,
            presence_penalty=drawn.presence_penalty or 0.0,
            frequency_penalty=drawn.frequency_penalty or 0.0,
            repetition_penalty=drawn.repetition_penalty or 1.0,
            logit_bias=drawn.logit_bias,
        )
        return Ask(
            prompt=prompt,
            limit=limit,
            model=model,
            drawing=drawing,
            seed=seed,
            stops=tuple(stops),
            ends=ends.union(drawn.stop_token_ids or ()),
        )

    async def _outcome(self, ask: Ask) -> Outcome:
        return await asyncio.wrap_future(self._engine.submit(ask))

    def _completion(
        self, request: ServedChatRequest | None, outcome: Outcome, ask: Ask, tools: bool
    ) -> Completion:
        limit: int | None = None
        if outcome.stop is not None:
            kept = outcome.stop if request is not None and request.include_stop_str_in_output else ""
            limit = outcome.stop_start + len(kept.encode())
        # Where tokens were asked for, what they say is the client's affair.
        segments = [] if request is None else parse(self.vocabulary, outcome.ids, tools=tools, byte_limit=limit)
        last = outcome.ids[-1] if outcome.ids else None
        chosen = last if outcome.finish_reason == "stop" and last in ask.ends - self._checkpoint.ends else None
        return Completion(
            ids=outcome.ids,
            logprobs=outcome.logprobs,
            segments=segments,
            finish_reason=outcome.finish_reason,
            stop_reason=outcome.stop if outcome.stop is not None else chosen,
            weight_versions=outcome.spans,
            cached_tokens=outcome.cached,
        )

    # --- control ----------------------------------------------------------------------------------------

    async def _pause(self, command: Command) -> dict[str, Any]:
        try:
            mode = msgspec.convert(command.query.get("mode", "abort"), PauseMode)
        except msgspec.ValidationError:
            raise RequestFault("mode must be abort, wait or keep", param="mode") from None
        clear = _flag(command, "clear_cache", default=True)
        await asyncio.wrap_future(self._engine.pause(mode, clear_cache=clear))
        return {"status": "paused"}

    async def _resume(self, _: Command) -> dict[str, Any]:
        await asyncio.wrap_future(self._engine.resume())
        return {"status": "resumed"}

    async def _is_paused(self, _: Command) -> dict[str, Any]:
        return {"is_paused": self._engine.paused}

    async def _rpc(self, command: Command) -> dict[str, Any]:
        """Of vLLM's calls of its workers, the one that loads weights from a directory."""
        call = read_body(command.body, _Call)
        if call.method != "reload_weights":
            raise RequestFault(f"method must be reload_weights, got {call.method!r}", param="method")
        path = Path(call.kwargs.weights_path) if call.kwargs.weights_path else self._checkpoint.directory
        await self._shelf.exchange(self._engine, path, call.kwargs.weight_version)
        return {"results": [None]}

    async def _reset(self, _: Command) -> dict[str, Any]:
        await asyncio.wrap_future(self._engine.clear_cache())
        return {"success": True}

    async def _label(self, command: Command) -> dict[str, Any]:
        version = read_body(command.body, _Label).new_version
        await self._shelf.label(self._engine, version)
        return {"success": True, "message": f"Weight version updated to {version}", "new_version": version}

    async def _info(self, _: Command) -> dict[str, Any]:
        return {"weight_version": self._shelf.version}

    async def _load_adapter(self, command: Command) -> str:
        wanted = read_body(command.body, _Adapter)
        await self._shelf.add(self._engine, wanted.lora_name, Path(wanted.lora_path), in_place=wanted.load_inplace)
        return f"Success: LoRA adapter '{wanted.lora_name}' added successfully."

    async def _unload_adapter(self, command: Command) -> str:
        name = read_body(command.body, _AdapterName).lora_name
        await self._shelf.remove(self._engine, name)
        return f"Success: LoRA adapter '{name}' removed successfully."


class _Where(Struct):
    """`weight_version` is ours: it names the new weights in the same instant."""

    weights_path: str | None = None
    weight_version: str | None = None


class _Call(Struct):
    method: str
    kwargs: _Where = field(default_factory=_Where)


class _Label(Struct):
    new_version: str


class _Adapter(Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class _AdapterName(Struct):
    lora_name: str


def _flag(command: Command, name: str, *, default: bool) -> bool:
    given = command.query.get(name)
    if given is None:
        return default
    if given.lower() not in ("true", "false", "1", "0"):
        raise RequestFault(f"{name} must be true or false, got {given!r}", param=name)
    return given.lower() in ("true", "1")
