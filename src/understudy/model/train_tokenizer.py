"""Train the tokenizer that we ship: `python -m understudy.model.train_tokenizer DIRECTORY`.

The text is the Python standard library's own sources (of the interpreter that runs this) and JSON renderings of
made-up tool calls, both in a fixed order, so that the same interpreter version gives the same file. `train` and
`write` make the tiny model's tokenizer as well.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from understudy.model.scripted.tokenizer import SPECIAL_TOKENS

VOCABULARY = 8192
CONTEXT = 200_000
_FILE_LIMIT = 48 << 10
_CORPUS_LIMIT = 12 << 20
_TOOL_CALLS = 4000

# Words with their leading space, digits one by one, runs of punctuation with their newlines, and indentation
# apart from the word after it: the split that current code models use.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str], words: str, vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens; each match of `words` is encoded by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, as `transformers.AutoTokenizer` reads them.

    `context` is how many tokens the model takes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": [
            token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")
        ],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _corpus(library: Path) -> Iterator[str]:
    """Made-up tool calls, then the `.py` files below `library`."""
    yield from _made_up_tool_calls()
    size = 0
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        parts = path.relative_to(library).parts
        if "site-packages" in parts or "test" in parts or "tests" in parts or size >= _CORPUS_LIMIT:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")[:_FILE_LIMIT]
        size += len(text)
        yield text


def _made_up_tool_calls() -> Iterator[str]:
    """Tool calls and results as Claude Code writes them, with invented files and code."""
    choose = random.Random(8192)
    folders = ("src", "tests", "lib", "docs", "core", "utils", "api", "models")
    words = (
        "load",
        "parse",
        "index",
        "cache",
        "token",
        "value",
        "items",
        "result",
        "config",
        "path",
        "name",
        "user",
    )

    def path() -> str:
        return f"/workspace/{choose.choice(folders)}/{choose.choice(words)}_{choose.choice(words)}.py"

    def code() -> str:
        name, value = choose.choice(words), choose.choice(words)
        body = f"        if {value} is None:\n            return {choose.randint(0, 9)}\n"
        return f"    def {name}(self, {value}):\n{body}"

    for _ in range(_TOOL_CALLS):
        file, old = path(), code()
        calls = (
            ("Read", {"file_path": file, "offset": choose.randint(1, 900), "limit": choose.randint(10, 200)}),
            ("Edit", {"file_path": file, "old_string": old, "new_string": code()}),
            ("Write", {"file_path": file, "content": old}),
            ("Bash", {"command": f"python -m pytest -q {file}", "description": "Run the tests"}),
            ("Grep", {"pattern": choose.choice(words), "path": "/workspace", "output_mode": "content"}),
        )
        name, arguments = choose.choice(calls)
        yield json.dumps({"name": name, "arguments": arguments})
        yield json.dumps({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
        yield f"The file {file} has been updated successfully."


def main(argv: Sequence[str] | None = None) -> None:
    """Train on this interpreter's standard library and write the tokenizer's files to the given directory."""
    parser = argparse.ArgumentParser(prog="understudy.model.train_tokenizer", description=main.__doc__)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args(argv).directory
    write(train(_corpus(Path(sysconfig.get_path("stdlib"))), _WORDS, VOCABULARY), directory, CONTEXT)


if __name__ == "__main__":
    main()
