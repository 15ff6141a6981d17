"""A random causal model of a few thousand parameters as a HuggingFace directory: what tests serve and train."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from understudy.model.hermes import SPECIAL_TOKENS

CONTEXT = 32_768


def make_model(
    directory: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2, tied: bool = True, context: int = CONTEXT
) -> Path:
    """A Qwen3 directory with random weights, the same for the same arguments.

    One token a byte, behind the special tokens; the chat template is ChatML with Hermes tool calls.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(directory)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(2, hidden // 4),
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
        with torch.no_grad():
            # Far enough from uniform that a wrong position or a wrong cache shows in the logprobs.
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def write_tokenizer(directory: Path) -> int:
    """Write a byte-level tokenizer without merges and our chat template; how many tokens there are."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id_ for id_, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    template = resources.files("understudy.model").joinpath("assets/chat_template.jinja").read_text("utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return len(vocabulary)
