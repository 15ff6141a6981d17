"""Whether samples were made with the tokenizer of the model that is to learn from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.store import Store
from understudy.train.data.load import is_export
from understudy.types import Call
from understudy.wire.stored import read_response

if TYPE_CHECKING:
    import tokenizers

_CALLS = 64
"""Calls of a store that are looked at: another tokenizer shows in the first."""


def check_tokenizer_matches(sources: Iterable[Path], model: Path, run: str | None = None) -> None:
    """Raise ConfigError when what was sampled in `sources` was not sampled with the tokenizer of `model`.

    The tokens of answered calls (of `run` alone, where one is named) are decoded and compared with the text and
    the tool names that the agent got. An export has no text to compare with: its ids alone are looked at, by the
    trainers.
    """
    stores = [source for source in sources if not is_export(source)]
    if not stores:
        return
    tokenizer = load_tokenizer(model)
    for source in stores:
        with Store.open(source, create=False) as store:
            _check(source, tokenizer, model, islice(_answered(store, run), _CALLS))


def load_tokenizer(model: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a model's directory. Raises ConfigError when there is none that makes sense."""
    import tokenizers

    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{model} has no tokenizer.json; give the directory of a model with its tokenizer")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # what `tokenizers` raises has no narrower class
        raise ConfigError(f"{path}: invalid tokenizer ({error}); download it again with the model") from error


def _check(source: Path, tokenizer: tokenizers.Tokenizer, model: Path, calls: Iterable[Call]) -> None:
    size = tokenizer.get_vocab_size()
    compared, same = 0, 0
    names: set[str] = set()
    for call in calls:
        ids = list(call.completion_token_ids or ())
        names.add(call.backend_model)
        high = max([*ids, *(call.prompt_token_ids or ())], default=0)
        if high >= size:
            raise ConfigError(
                f"{source}: call {call.id} has the token {high}, and the tokenizer of {model} has {size} tokens: "
                f"the samples were made with another ({', '.join(sorted(names))}); give the model that they were "
                "made with"
            )
        parts = [part for part in _parts(call) if part]
        if parts:
            text = tokenizer.decode(ids, skip_special_tokens=False)
            compared += 1
            same += all(part in text for part in parts)
    if compared and same < compared / 2:
        raise ConfigError(
            f"{source}: decoded by the tokenizer of {model}, {compared - same} of {compared} answers are not what "
            f"{', '.join(sorted(names))} said: the samples were made with another tokenizer; give the model that "
            "they were made with"
        )


def _parts(call: Call) -> Iterator[str]:
    """What must be found in the decoded tokens of an answer: its lines of text, the names of its tools."""
    for block in read_response(call) or ():
        if block.kind == "tool_use":
            yield block.name
        elif block.kind == "text":
            yield from (line.strip() for line in block.text.splitlines())


def _answered(store: Store, run: str | None) -> Iterator[Call]:
    for rollout in store.runs.rollouts(run):
        for attempt in store.runs.attempts(rollout.id):
            for call in store.calls.of_attempt(attempt.id):
                if call.status == "ok" and call.completion_token_ids:
                    yield call
