"""The tiny model's tokenizer: byte-level BPE that splits a word into the same tokens wherever it stands.

A small model must above all copy names. So a name's tokens never contain a space, a quote or a bracket, digits are
single tokens, and there are few merges: a name is always the same few syllables. Only very common words include
the space before them, which shortens a conversation by a quarter.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from understudy.model.hermes import SPECIAL_TOKENS

VOCABULARY_SIZE = 1024
CONTEXT_TOKENS = 4096

_COMMON_SHARE = 0.02
_PRE_TOKENS = r"\p{L}+|\p{N}| +|\n+|[^\s\p{L}\p{N}]+|\s"


def train(texts: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer with `VOCABULARY_SIZE` tokens. No token has parts of two words, or of a
    word and a symbol.
    """
    counts = Counter(word for text in texts for word in set(re.findall(r"[A-Za-z]+", text)))
    common = sorted(word for word, count in counts.items() if count >= _COMMON_SHARE * len(texts))
    pattern = rf" ?(?:{'|'.join(common)})(?!\p{{L}})|{_PRE_TOKENS}"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def chat_template() -> str:
    """Return the chat template of the tiny model."""
    return resources.files("understudy.train.tiny").joinpath("chat_template.jinja").read_text("utf-8")


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer's files and the chat template, as `transformers.AutoTokenizer` reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    end, padding = "<|im_end|>", "<|endoftext|>"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": padding,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (end, padding)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
