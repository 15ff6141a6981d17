"""Loads a model's directory in Hugging Face's layout as a torch module, with its tokenizer."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import transformers
from msgspec import Struct

from understudy.errors import ConfigError
from understudy.model.causal.cache import SlotCache
from understudy.model.directory import missing_template, require_files
from understudy.model.hermes import byte_level_bytes, check_unicode, decode_tokens
from understudy.model.protocol import InvalidRequestError, MessageToolCall, ModelMessage, ModelTool
from understudy.util.text import reason_of

_library: Any = transformers  # its type annotations are unusable


class CausalTokenizer:
    """See Vocabulary. `special_texts` are the added tokens of the vocabulary, whether special or not."""

    def __init__(self, directory: Path) -> None:
        """Read `tokenizer.json` and the chat template beside it. Raises ConfigError."""
        require_files(directory, "tokenizer.json")
        self._loaded: Any = load_tokenizer(directory)
        loaded = self._loaded
        if not loaded.chat_template:
            raise missing_template(directory)
        template: Any = loaded.chat_template
        source = template if isinstance(template, str) else json.dumps(template)
        self._takes_text = "arguments is string" in source
        vocabulary = cast("dict[str, int]", loaded.get_vocab())
        added = {int(id_): str(token) for id_, token in loaded.added_tokens_decoder.items()}
        self.special_texts: dict[int, str] = added
        self.special_ids = {text: id_ for id_, text in added.items()}
        self.token_bytes = _token_bytes(loaded, vocabulary, added)
        end: int | None = loaded.eos_token_id
        self.end_id = -1 if end is None else end

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, in which special tokens are recognised. Raises BackendError for a lone
        surrogate.
        """
        check_unicode(text)
        return cast("list[int]", self._loaded.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        """See Vocabulary."""
        return decode_tokens(self.token_bytes, ids)

    def render(
        self,
        messages: Sequence[ModelMessage],
        tools: Sequence[ModelTool] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the tokens of a conversation. Raises InvalidRequestError when the template rejects it."""
        fields = [self._fields(message) for message in messages]
        offered = [msgspec.to_builtins(tool) for tool in tools or ()]
        try:
            text: str = self._loaded.apply_chat_template(
                fields, tools=offered or None, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise InvalidRequestError(
                f"messages: the model's chat template rejects this conversation: {reason_of(error)}; expected "
                "roles and contents that the template allows: change the messages as it says",
                param="messages",
            ) from error
        return self.encode(text)

    def _fields(self, message: ModelMessage) -> dict[str, Any]:
        role = "system" if message.role == "developer" else message.role
        fields: dict[str, Any] = {"role": role, "content": message.text}
        reasoning = message.thinking
        if reasoning is not None:
            fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            fields["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return fields

    def _call(self, call: MessageToolCall) -> dict[str, Any]:
        """Return a tool call for the template: the sampled text if the template can write text, otherwise an
        object.
        """
        arguments: Any = call.function.arguments
        if isinstance(arguments, str) and not self._takes_text:
            with suppress(ValueError):
                arguments = json.loads(arguments)
        return {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": arguments},
        }


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer of a model's directory as transformers loads it. Raises ConfigError."""
    try:
        return _library.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # errors of transformers and tokenizers have no narrower class
        raise ConfigError(
            f"{directory}: invalid tokenizer: {reason_of(error)}; expected tokenizer.json and "
            "tokenizer_config.json as transformers writes them: download them again with the model"
        ) from error


def _token_bytes(loaded: Any, vocabulary: dict[str, int], added: dict[int, str]) -> list[bytes]:
    """Return the bytes of every token by id, in either way that vocabularies spell them; b"" for an id without a
    token.
    """
    definition = str(loaded.backend_tokenizer.decoder.__getstate__()) if loaded.backend_tokenizer.decoder else ""
    if "ByteLevel" in definition:
        return byte_level_bytes(vocabulary, added)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id_ in vocabulary.items():
        if id_ in added:
            table[id_] = added[id_].encode()
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            table[id_] = bytes([int(token[3:5], 16)])
        else:
            table[id_] = token.replace("▁", " ").encode()
    return table


_PROBE_TOKENS = 6
"""The tokens of the short sequence with which a module is tested."""
_MISMATCH = {
    "missing": "the weights lack tensors",
    "mismatched": "tensors have another shape",
    "unexpected": "the model has no tensors named",
}
_USE_VLLM = "serve it with vLLM, and name that server: understudy run vllm --base-url http://HOST:PORT/v1"
"""What to do with a model that the embedded server does not support."""


class Checkpoint(Struct, frozen=True):
    """A model's directory without its weights.

    `context` is the model's context length in tokens, `ends` are the tokens that end a turn, and `vocabulary` is
    the number of rows of its embedding.
    """

    directory: Path
    tokenizer: CausalTokenizer
    context: int
    ends: frozenset[int]
    vocabulary: int


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read a model's directory except for its weights. Raises ConfigError for files that are missing or do not
    match.
    """
    config = read_config(directory)
    tokenizer = CausalTokenizer(directory)
    vocabulary: int = config.vocab_size
    if len(tokenizer.token_bytes) > vocabulary:
        raise ConfigError(
            f"{directory}: the tokenizer has {len(tokenizer.token_bytes)} tokens, but vocab_size in "
            f"config.json is {vocabulary}, so they belong to different models; download the model "
            "again"
        )
    ends = {tokenizer.end_id} if tokenizer.end_id >= 0 else set[int]()
    for settings in (_read_json(directory / "generation_config.json"), config.to_dict()):
        value = settings.get("eos_token_id")
        ends.update(cast("list[int]", value) if isinstance(value, list) else [] if value is None else [value])
    if not ends:
        raise ConfigError(
            f"{directory / 'generation_config.json'}: eos_token_id is missing, here and in config.json; set it to "
            "the id of the token that ends a turn"
        )
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        path = directory / "config.json"
        raise ConfigError(
            f"{path}: max_position_embeddings is {context!r}, expected the model's context length in tokens, 1 or "
            "more; set it"
        )
    return Checkpoint(directory, tokenizer, context, frozenset(ends), vocabulary)


def read_config(directory: Path) -> Any:
    """Return the config of the model in a directory. Raises ConfigError for a model that cannot be served here."""
    config = _causal_config(directory)
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if kinds - {"full_attention"} or (getattr(config, "sliding_window", None) and not kinds):
        raise ConfigError(
            f"{directory / 'config.json'}: the model has {', '.join(sorted(kinds)) or 'sliding window'} layers, "
            f"but the embedded server supports full attention only; {_USE_VLLM}"
        )
    return config


def _causal_config(directory: Path) -> Any:
    """Return the config of the causal language model in a directory. Raises ConfigError for other models."""
    require_files(directory, "config.json")
    _read_json(directory / "config.json")
    try:
        config: Any = _library.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # errors of transformers have no narrower class
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{directory / 'config.json'}: auto_map requires code of the model itself, which Understudy never "
                "executes; give a model of an architecture that transformers has"
            ) from error
        raise ConfigError(
            f"{directory / 'config.json'}: invalid or unsupported model: {reason_of(error)}; correct the file, "
            f"give a model that transformers {_library.__version__} supports, or install a release that supports "
            "this one"
        ) from error
    if type(config) not in _library.AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"{directory / 'config.json'}: model_type is {config.model_type!r}, expected a causal language model, "
            "such as llama or qwen3; give the directory of one"
        )
    return config


def load_model(directory: Path, *, device: str = "cpu") -> Any:
    """Return the module of a directory's weights, in float32 on the CPU and in bfloat16 on a GPU, ready for
    inference.

    Raises ConfigError when there are no weights, when they do not match the config, or when the model computes
    other results with a KV cache than without.
    """
    read_config(directory)
    module = load_module(directory, torch.float32 if device == "cpu" else torch.bfloat16)
    module = module.to(device).eval().requires_grad_(False)
    _check_cached_forward(directory, module)
    return module


def load_module(directory: Path, dtype: torch.dtype | None) -> Any:
    """Return the module of a directory's weights on the CPU, in the type `dtype` (None: their own).

    Nothing in the directory is executed: neither Python files nor what a pickle names. Raises ConfigError when
    there are no weights, or when they do not match the config exactly.
    """
    config = _causal_config(directory)
    _library.logging.disable_progress_bar()
    try:
        module, loading_info = cast(
            "tuple[Any, dict[str, Any]]",
            _library.AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype or "auto",
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # mismatches are reported below, by name
            ),
        )
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{directory}: the weights are a pickle that is damaged, or contains more than tensors and could run "
            "code when it is loaded; expected *.safetensors: download the model in this format"
        ) from error
    except Exception as error:  # errors of transformers and safetensors have no narrower class
        raise ConfigError(
            f"{directory}: the weights cannot be loaded: {reason_of(error)}; expected complete *.safetensors that "
            "belong to its config.json: download the model again, or free memory if that ran out"
        ) from error
    for what in ("missing", "mismatched", "unexpected"):
        if names := sorted(name if isinstance(name, str) else name[0] for name in loading_info[f"{what}_keys"]):
            names_text = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ConfigError(
                f"{directory}: the weights do not match config.json ({type(module).__name__}): {_MISMATCH[what]}: "
                f"{names_text}; replace config.json by the one that belongs to the weights"
            )
    return module


def forward(
    module: Any, slots: SlotCache, tokens: list[list[int]], rows: list[int], starts: list[int]
) -> torch.Tensor:
    """Return the logits [rows, vocabulary] after `tokens[i]`, which follow `starts[i]` cached tokens in slot
    `rows[i]`.

    With several rows each has one token. The slots must have room, and torch must be in inference mode.
    """
    device = next(module.parameters()).device
    length = len(tokens[0])
    first = torch.tensor(starts, device=device)
    positions = first.unsqueeze(-1) + torch.arange(length, device=device)
    keys = torch.arange(max(starts) + length, device=device)
    mask = (keys <= positions.unsqueeze(-1)).unsqueeze(1)  # shape [rows, 1, length, keys]
    slots.target(rows, starts, length)
    answer = module(
        input_ids=torch.tensor(tokens, device=device),
        attention_mask=mask,
        position_ids=positions,
        past_key_values=slots,
        use_cache=True,
        logits_to_keep=1,
    )
    return answer.logits[:, -1]


def prompt_logprobs(module: Any, tokens: Sequence[int], chunk: int) -> list[float]:
    """Return the logprob of each token but the first given all before it, shape [len(tokens) - 1].

    Computed `chunk` tokens per forward pass.
    """
    device = next(module.parameters()).device
    ids = torch.tensor([tokens], device=device)
    cache: Any = _library.DynamicCache(config=module.config)
    values: list[float] = []
    for start in range(0, len(tokens) - 1, chunk):
        end = min(start + chunk, len(tokens) - 1)
        logits = module(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True).logits[0].float()
        chosen = logits.gather(1, ids[0, start + 1 : end + 1].unsqueeze(1)).squeeze(1)
        values += cast("list[float]", (chosen - logits.logsumexp(dim=-1)).tolist())
    return values


@torch.inference_mode()
def _check_cached_forward(directory: Path, module: Any) -> None:
    """Raise ConfigError unless the model computes the same with our cache as without."""
    tokens = [index % module.config.vocab_size for index in range(1, _PROBE_TOKENS + 1)]
    slots = SlotCache()
    slots.reserve(2, _PROBE_TOKENS)
    try:
        uncached = module(input_ids=torch.tensor([tokens], device=module.device), use_cache=False).logits[0, -1]
        forward(module, slots, [tokens[:-2]], [1], [0])
        slots.move(1, 0, _PROBE_TOKENS - 2)
        forward(module, slots, [tokens[-2:-1]] * 2, [0, 1], [_PROBE_TOKENS - 2] * 2)
        cached = forward(module, slots, [tokens[-1:]] * 2, [0, 1], [_PROBE_TOKENS - 1] * 2)
    except Exception as error:  # a model of an arbitrary architecture may raise anything
        raise ConfigError(
            f"{directory}: the embedded server cannot run the model with a KV cache: {reason_of(error)}; "
            f"{_USE_VLLM}"
        ) from error
    size = 1.0 + uncached.abs().max().item()
    # Values that are not finite are ignored here; requests that meet them report them.
    if (cached - uncached).abs().max().item() > (1e-3 if uncached.dtype == torch.float32 else 5e-2) * size:
        raise ConfigError(
            f"{directory}: the model gives other results with a KV cache than without, so the embedded server "
            f"does not support its architecture; {_USE_VLLM}"
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: invalid JSON: {reason_of(error)}; expected a JSON object: download the model again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: expected a JSON object, got {type(content).__name__}; download the model again"
        )
    return cast("dict[str, Any]", content)
