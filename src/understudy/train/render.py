"""Renders conversations and pairs of an export as tokens, by the chat template of the model that is trained on
them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.model.directory import require_packages
from understudy.store import Store
from understudy.train.groups import TokenSequence, is_export, read_rows
from understudy.train.weights import check_model, load_chat_tokenizer
from understudy.types import Call
from understudy.wire.stored import read_response

if TYPE_CHECKING:
    import tokenizers

SPECIAL_TOKEN_IN_TEXT = "conversations in which a special token is spelled out"
NOT_RENDERABLE = "conversations that the chat template does not render"
NOT_A_PREFIX = "answers before which the chat template renders another prompt"

Message = dict[str, Any]

_MESSAGE_COLUMNS = frozenset({"messages", "prompt", "completion", "chosen", "rejected"})
"""Columns of messages."""


class PairTokens(Struct, frozen=True):
    """A preference pair as tokens: a prompt with a preferred and a rejected answer."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


class Renderer:
    """A model's tokenizer and chat template. Raises ConfigError when the model's directory lacks one of them."""

    def __init__(self, model: Path) -> None:
        require_packages("torch", "transformers")
        check_model(model)
        self._tokenizer: Any = load_chat_tokenizer(model)
        self._model = model
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        self._special = tuple(token for token in added if len(token) > 2)
        self._end_tokens = self._end_ids()

    def answer(
        self, before: Sequence[Message], answer: Sequence[Message], tools: Any, left_out: Counter[str]
    ) -> tuple[list[int], list[int]] | None:
        """Return the tokens of a prompt and of the answer after it, up to the token that ends the turn.

        Returns None, and counts the reason in `left_out`, when the template cannot render the messages, when the
        prompt's tokens change with the answer behind it, or when a message contains special tokens, by which
        hostile text could forge a turn.
        """
        if any(
            token in text for message in (*before, *answer) for text in _texts(message) for token in self._special
        ):
            left_out[SPECIAL_TOKEN_IN_TEXT] += 1
            return None
        try:
            prompt = self._render(before, tools, generation_prompt=True)
            complete = self._render([*before, *answer], tools, generation_prompt=False)
        except Exception:  # noqa: BLE001  a template raises whatever its author chose
            left_out[NOT_RENDERABLE] += 1
            return None
        if complete[: len(prompt)] != prompt:
            left_out[NOT_A_PREFIX] += 1
            return None
        completion = complete[len(prompt) :]
        ends = (index for index, token in enumerate(completion) if token in self._end_tokens)
        last = max(ends, default=len(completion) - 1)
        return prompt, completion[: last + 1]

    def _render(self, messages: Sequence[Message], tools: Any, *, generation_prompt: bool) -> list[int]:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tools=tools or None, add_generation_prompt=generation_prompt, tokenize=False
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _end_ids(self) -> set[int]:
        """Return the tokens that end a turn: the tokenizer's EOS and those at which generation stops."""
        path = self._model / "generation_config.json"
        try:
            eos: Any = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{path}: cannot be read, or is not a JSON object ({error}); download the file again with "
                "the model"
            ) from error
        ids = cast("list[Any]", eos) if isinstance(eos, list) else [eos]
        return {id for id in (*ids, self._tokenizer.eos_token_id) if isinstance(id, int)}


def sequences_from_export(directory: Path, model: Path, left_out: Counter[str]) -> list[TokenSequence]:
    """Return the conversations of an export's "train" split in the format trl-sft, each selected message learned
    once.

    Consecutive messages are one sequence as long as each prompt extends the tokens before it. Raises ConfigError
    when the export or the model cannot be read.
    """
    renderer = Renderer(model)
    sequences: list[TokenSequence] = []
    for row in decoded_rows(directory):
        sequences += _sequences_of_row(row, renderer, left_out)
    return sequences


def pairs_from_rows(rows: Iterator[dict[str, Any]], model: Path, left_out: Counter[str]) -> list[PairTokens]:
    """Return rows of the format trl-dpo as tokens. Pairs that cannot be rendered are counted in `left_out`."""
    renderer = Renderer(model)
    pairs: list[PairTokens] = []
    for row in rows:
        tools = _tools(row)
        better = renderer.answer(row["prompt"], row["chosen"], tools, left_out)
        worse = renderer.answer(row["prompt"], row["rejected"], tools, left_out) if better else None
        if better is not None and worse is not None:
            pairs.append(PairTokens(tuple(better[0]), tuple(better[1]), tuple(worse[1])))
    return pairs


def decoded_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the "train" split of an export of conversations, with their messages decoded from JSON.

    Raises ConfigError when the export cannot be read.
    """
    path = directory / "train.parquet"
    for number, row in enumerate(read_rows(path)):
        name = ""
        try:
            for name in _MESSAGE_COLUMNS & row.keys():
                row[name] = [json.loads(item) if isinstance(item, str) else item for item in row[name]]
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}: row {number}: invalid messages in the column {name} ({error}); export it again"
            ) from error
        yield row


def _sequences_of_row(row: dict[str, Any], renderer: Renderer, left_out: Counter[str]) -> Iterator[TokenSequence]:
    if "messages" in row:
        messages, learned = row["messages"], set(row["trained"])
    else:
        messages = [*row["prompt"], *row["completion"]]
        learned = {
            index for index in range(len(row["prompt"]), len(messages)) if messages[index]["role"] == "assistant"
        }
    tools = _tools(row)
    ids: list[int] = []
    mask: list[int] = []
    for index in sorted(learned):
        pair = renderer.answer(messages[:index], [messages[index]], tools, left_out)
        if pair is None:
            continue
        prompt, completion = pair
        if ids and prompt[: len(ids)] != ids:
            yield TokenSequence(token_ids=tuple(ids), loss_mask=tuple(mask), logprobs=None)
            ids, mask = [], []
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(completion)
        ids = [*prompt, *completion]
    if ids:
        yield TokenSequence(token_ids=tuple(ids), loss_mask=tuple(mask), logprobs=None)


def _tools(row: dict[str, Any]) -> Any:
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value except the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in cast("dict[str, Any]", value).values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _texts(item)


_MAX_CHECKED_CALLS = 64
"""How many calls of a store are checked. A wrong tokenizer is noticed within the first few."""


def check_tokenizer_matches(sources: Iterable[Path], model: Path, run: str | None = None) -> None:
    """Raise ConfigError when the samples in `sources` were not made with the tokenizer of `model`.

    The completion tokens of calls (of `run` only, if given) are decoded and compared with the text and the tool
    names that the agent got. Exports are skipped here, because they have no such text: the trainers check the
    range of their ids.
    """
    stores = [source for source in sources if not is_export(source)]
    if not stores:
        return
    tokenizer = load_tokenizer(model)
    for source in stores:
        with Store.open(source, create=False) as store:
            _check_calls(source, tokenizer, model, islice(_calls_with_tokens(store, run), _MAX_CHECKED_CALLS))


def load_tokenizer(model: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in a model's directory. Raises ConfigError when it is missing or invalid."""
    import tokenizers

    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{model} has no tokenizer.json; give the directory of a model that has one (a model in another "
            "format gets it by AutoTokenizer.from_pretrained(…).save_pretrained(DIR) of transformers)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # errors of `tokenizers` have no narrower class
        raise ConfigError(f"{path}: invalid tokenizer ({error}); download it again with the model") from error


def _check_calls(source: Path, tokenizer: tokenizers.Tokenizer, model: Path, calls: Iterable[Call]) -> None:
    size = tokenizer.get_vocab_size()
    compared, same = 0, 0
    names: set[str] = set()
    for call in calls:
        ids = list(call.completion_token_ids or ())
        names.add(call.backend_model)
        high = max([*ids, *(call.prompt_token_ids or ())], default=0)
        if high >= size:
            raise ConfigError(
                f"{source}: call {call.id} has the token id {high}, but the tokenizer of {model} has only {size} "
                f"tokens, so the samples are from another model ({', '.join(sorted(names))}); give that one as "
                "MODEL"
            )
        parts = [part for part in _expected_parts(call) if part]
        if parts:
            text = tokenizer.decode(ids, skip_special_tokens=False)
            compared += 1
            same += all(part in text for part in parts)
    if compared and same < compared / 2:
        raise ConfigError(
            f"{source}: decoded by the tokenizer of {model}, {compared - same} of {compared} answers differ from "
            f"the text that {', '.join(sorted(names))} returned, so the samples were made with another tokenizer; "
            "give the model that made them as MODEL"
        )


def _expected_parts(call: Call) -> Iterator[str]:
    """Yield what the decoded tokens of an answer must contain: its lines of text and the names of its tools."""
    for block in read_response(call) or ():
        if block.kind == "tool_use":
            yield block.name
        elif block.kind == "text":
            yield from (line.strip() for line in block.text.splitlines())


def _calls_with_tokens(store: Store, run: str | None) -> Iterator[Call]:
    for rollout in store.runs.rollouts(run):
        for attempt in store.runs.attempts(rollout.id):
            for call in store.calls.of_attempt(attempt.id):
                if call.status == "ok" and call.completion_token_ids:
                    yield call
