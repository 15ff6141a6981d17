"""The tiny model's tokenizer and template, made of few conversations, with random weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy.gateway.exact.codec import ChatTemplate
from understudy.train.tiny import corpus, tokenizer

CONVERSATIONS = 300


def text(conversation: Sequence[corpus.Message]) -> str:
    """A conversation as the gateway's own renderer writes it."""
    template = ChatTemplate({"default": tokenizer.chat_template()}, {}, str)
    return template.render(conversation, corpus.tool_definitions(), {"add_generation_prompt": False})


def make_tokenizer(directory: Path) -> Any:
    """Write the tokenizer's files; returns it as transformers reads it."""
    from transformers import AutoTokenizer

    texts = [text(one) for one in itertools.islice(corpus.conversations(0), CONVERSATIONS)]
    tokenizer.write(tokenizer.train(texts), directory)
    return AutoTokenizer.from_pretrained(directory)


def make_model(directory: Path, *, context: int = tokenizer.CONTEXT_TOKENS) -> Any:
    """Write the tokenizer and random weights of the tiny model's architecture; returns the tokenizer."""
    import torch
    from transformers import Qwen3ForCausalLM

    from understudy.train.tiny.pretrain import configuration

    reader = make_tokenizer(directory)
    config = configuration(len(reader))
    config.max_position_embeddings = context
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    return reader


def encode(reader: Any, conversation: Sequence[corpus.Message]) -> tuple[list[int], list[int]]:
    """The tokens of a conversation as transformers makes them, and 1 for each that the assistant says."""
    encoded = reader.apply_chat_template(
        list(conversation), tools=corpus.tool_definitions(), return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], encoded["assistant_masks"]
