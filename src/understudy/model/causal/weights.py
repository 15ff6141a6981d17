"""The weights that a server answers with: loaded, exchanged while it serves, LoRA adapters merged into copies."""

from __future__ import annotations

import asyncio
import copy
import json
import warnings
from pathlib import Path
from typing import Any

from understudy.errors import BackendError, ConfigError
from understudy.model.causal.checkpoint import Checkpoint, load_model, read_config
from understudy.model.causal.engine import CausalEngine, ModelWeights
from understudy.model.protocol import InvalidRequestError


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
