"""A GGUF file of a random Llama of a few thousand parameters, as converters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONTEXT = 512
HIDDEN, LAYERS, HEADS, WIDE = 32, 2, 4, 64
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path, *, template: str | None = TEMPLATE, license: str | None = "mit") -> Path:
    """Write the file, one token a byte behind three special ones; the weights follow from nothing but a seed."""
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    library: Any = gguf
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = library.GGUFWriter(path, "llama")
    if license is not None:
        writer.add_license(license)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(specials) + [1] * (len(tokens) - len(specials)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        name = f"blk.{layer}"
        shapes |= {f"{name}.{part}_norm.weight": (HIDDEN,) for part in ("attn", "ffn")}
        shapes |= {f"{name}.attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
        shapes |= {f"{name}.ffn_{part}.weight": (WIDE, HIDDEN) for part in ("gate", "up")}
        shapes[f"{name}.ffn_down.weight"] = (HIDDEN, WIDE)
    for name, shape in shapes.items():
        weights = random.standard_normal(shape, dtype=np.float32) * 0.2
        if len(shape) == 1:
            writer.add_tensor(name, weights)
        else:
            kind = library.GGMLQuantizationType.Q4_1
            data = library.quants.quantize(weights, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
