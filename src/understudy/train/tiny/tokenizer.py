"""The tiny model's tokenizer: byte-level BPE in which a word is the same tokens wherever it stands.

What the work asks of a small model is to copy names. A space, a quote or a bracket is never part of a name's
token, digits stand alone, and there are few merges: a name is some syllables, always the same ones. Only the words
that everyone uses carry the space before them, which shortens a conversation by a quarter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer

from understudy.model import train_tokenizer

VOCABULARY = 1024
CONTEXT = 4096

_COMMON_SHARE = 0.02
_WORDS = r"\p{L}+|\p{N}| +|\n+|[^\s\p{L}\p{N}]+|\s"


def train(texts: Sequence[str]) -> Tokenizer:
    """A tokenizer of `VOCABULARY` tokens."""
    found = Counter(word for text in texts for word in set(re.findall(r"[A-Za-z]+", text)))
    common = sorted(word for word, count in found.items() if count >= _COMMON_SHARE * len(texts))
    words = rf" ?(?:{'|'.join(common)})(?!\p{{L}})|{_WORDS}"
    return train_tokenizer.train(texts, words, VOCABULARY)


def chat_template() -> str:
    """The template of the tiny model's conversations."""
    return resources.files("understudy.train.tiny").joinpath("chat_template.jinja").read_text("utf-8")


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer's files and the chat template, as `transformers.AutoTokenizer` reads them."""
    train_tokenizer.write(tokenizer, directory, CONTEXT)
    (directory / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
