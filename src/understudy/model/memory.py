"""Estimates how much GPU memory a model needs, to serve and to train it, from its shapes."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.model.directory import require_files
from understudy.util.text import reason_of

_BYTES_BY_TYPE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
}
_HEADER_LIMIT = 100 << 20
_ADAM_BYTES = 16
"""Bytes a trained parameter takes: weight, gradient and AdamW's two moments, all in fp32."""
_ACTIVATION_BYTES = 36
"""Bytes that a token's activations take in a layer, by hidden size: two norms with inputs and outputs in fp32, and
bf16 inputs, queries, keys and values of the attention, before and after the rotation. No attention matrices."""
_GATED_BYTES = 8
"""The same by the intermediate size of a gated feed-forward network: four tensors in bf16."""
_CHECKPOINT_BYTES = 2
"""The same if only the input of each layer is kept."""
_LOGIT_BYTES = 12
"""Bytes that a token's logits take, by vocabulary: themselves in fp32, their log-softmax and its gradient."""


class ModelShape(Struct, frozen=True, kw_only=True):
    """The numbers of a model that determine its memory; `weight_bytes` is the size of its weights files."""

    parameters: int
    weight_bytes: int
    layers: int
    hidden: int
    intermediate: int
    kv_width: int
    vocabulary: int
    context: int


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """Bytes, estimated and not measured: the overhead of libraries and fragmentation is not included."""

    weights: int
    kv_cache: int
    optimizer: int
    activations: int
    logits: int

    @property
    def serving(self) -> int:
        """Bytes to serve the model, in the type of its files."""
        return self.weights + self.kv_cache

    @property
    def training(self) -> int:
        """Bytes to make an update."""
        return self.optimizer + self.activations + self.logits


def read_shape(directory: Path) -> ModelShape:
    """Return the shape of the model in a directory, from `config.json` and the headers of its safetensors.

    The weights are not loaded. Raises ConfigError when something is missing or damaged.
    """
    require_files(directory, "config.json")
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
        config = config.get("text_config", config)
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        head = int(config.get("head_dim") or hidden // heads)
        layers, vocabulary = int(config["num_hidden_layers"]), int(config["vocab_size"])
        context = int(config["max_position_embeddings"])
        intermediate = _intermediate(config, hidden)
        kv_heads = int(config.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{directory / 'config.json'}: the shape of the model cannot be read: {reason_of(error)}; expected "
            "the configuration of a causal language model: give the directory of one"
        ) from error
    parameters = weight_bytes = 0
    for path in sorted(directory.glob("*.safetensors")):
        for count, size in _tensors(path):
            parameters += count
            weight_bytes += count * size
    if not parameters:
        raise ConfigError(
            f"{directory} has no weights in *.safetensors, from which their size is computed; give the directory "
            "of a model in the format of transformers, with config.json and *.safetensors"
        )
    return ModelShape(
        parameters=parameters,
        weight_bytes=weight_bytes,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        kv_width=kv_heads * head,
        vocabulary=vocabulary,
        context=context,
    )


def estimate_memory(
    shape: ModelShape,
    *,
    context: int,
    sequences: int,
    micro_batch_tokens: int,
    lora_rank: int | None = None,
    checkpointing: bool = False,
) -> MemoryEstimate:
    """Estimate the memory to serve `sequences` of `context` tokens at once, and to train on `micro_batch_tokens`
    at once.

    Keys and values take 2 · layers · kv_width · 2 bytes per token. An adapter of rank r on every linear layer has
    about r · 2 · √(p · n) trained parameters, for p parameters in n matrices, seven per layer; the base keeps the
    type of its files. All tokens are counted as learned; logits of others are not computed, so that with a share
    of them learned, `logits` is that share.
    """
    trained = shape.parameters
    base = 0
    if lora_rank is not None:
        body = max(shape.parameters - shape.vocabulary * shape.hidden, 1)
        matrices = 7 * shape.layers
        trained = round(lora_rank * 2 * math.sqrt(body / matrices) * matrices)
        base = shape.weight_bytes
    activations = shape.hidden * _ACTIVATION_BYTES + shape.intermediate * _GATED_BYTES
    activations *= 1 if checkpointing else shape.layers
    activations += shape.hidden * _CHECKPOINT_BYTES * shape.layers if checkpointing else 0
    return MemoryEstimate(
        weights=shape.weight_bytes,
        kv_cache=2 * 2 * shape.layers * shape.kv_width * context * sequences,
        optimizer=base + trained * _ADAM_BYTES,
        activations=activations * micro_batch_tokens,
        logits=micro_batch_tokens * shape.vocabulary * _LOGIT_BYTES,
    )


def _intermediate(config: dict[str, Any], hidden: int) -> int:
    """Return the width of the feed-forward network that a token passes through; with experts, that of all it
    uses.
    """
    width = int(config.get("intermediate_size") or 4 * hidden)
    if experts := config.get("num_experts_per_tok"):
        shared = int(config.get("shared_expert_intermediate_size") or 0)
        return int(experts) * int(config.get("moe_intermediate_size") or width) + shared
    return width


def _tensors(path: Path) -> list[tuple[int, int]]:
    """Return the number of elements of each tensor in a file, and the bytes of one. Raises ConfigError for a
    damaged file.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _HEADER_LIMIT:
                raise ValueError(f"its header has {length} bytes, expected at most {_HEADER_LIMIT}")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = [(math.prod(tensor["shape"]), str(tensor["dtype"])) for tensor in header.values()]
    except (OSError, ValueError, AttributeError, KeyError, TypeError, struct.error) as error:
        raise ConfigError(f"{path}: damaged safetensors: {reason_of(error)}; download the model again") from error
    if unknown := next((type_ for _, type_ in tensors if type_ not in _BYTES_BY_TYPE), None):
        raise ConfigError(
            f"{path}: a tensor has the type {unknown[:40]!r}, expected one of {', '.join(_BYTES_BY_TYPE)}; give "
            "the model's weights in one of these, such as BF16"
        )
    return [(elements, _BYTES_BY_TYPE[type_]) for elements, type_ in tensors]
