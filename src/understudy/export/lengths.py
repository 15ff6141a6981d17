"""The lengths of an export's conversations, and the cutting of overlong ones at turns.

A trainer that truncates cuts through a message or removes the end, which is what is learned. Here the system
prompt and the first user message are kept, and of the rest the newest complete turns that fit.
"""

from __future__ import annotations

import json
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from understudy.errors import ConfigError
from understudy.export.examples import Example, message_rows
from understudy.ingest.trace import Message
from understudy.preference.checks import NOT_RENDERED, Template

LengthUnit = Literal["tokens", "characters"]

CANNOT_BE_CUT = "answers that are too long even with the turn before them alone"
CUT = "conversations that were too long and were cut at turns"
PIECES = "rows that were made of them"

_MIN_BUCKET = 256
_BAR_WIDTH = 40

_TOKENS_PER_CHARACTER = 0.3
"""The first estimate, which measured conversations correct."""
_FAR_TOO_LONG_FACTOR = 8
"""A conversation with so many characters for each token of the limit is cut without counting all its tokens."""


class LengthFigures(Struct, frozen=True, kw_only=True):
    """The lengths of an export's rows, in `unit`s. `histogram` counts rows by range of lengths.

    `limit` is the length that longer rows were cut to, `tokenizer` the name of the directory whose tokenizer
    counted.
    """

    unit: LengthUnit
    tokenizer: str | None
    limit: int | None
    shortest: int
    median: int
    p90: int
    longest: int
    total: int
    histogram: dict[str, int]

    def summary(self) -> str:
        """Return the figures as a sentence."""
        tokenizer_note = f" by the tokenizer {self.tokenizer}" if self.tokenizer else ""
        return (
            f"lengths in {self.unit}{tokenizer_note}: shortest {self.shortest:,}, median {self.median:,}, "
            f"90 % up to {self.p90:,}, longest {self.longest:,}, together {self.total:,}"
        )

    def bars(self) -> Iterator[str]:
        """Return the histogram as lines of text."""
        most = max(self.histogram.values())
        width = max(map(len, self.histogram))
        for name, count in self.histogram.items():
            yield f"{name:>{width}} {'#' * -(-_BAR_WIDTH * count // most):{_BAR_WIDTH}} {count:,}"


def length_figures(
    lengths: Counter[int], unit: LengthUnit, tokenizer: str | None, limit: int | None
) -> LengthFigures | None:
    """Return the figures for rows counted by length; None if there are none."""
    counts = sorted((length, count) for length, count in lengths.items() if count)
    if not counts:
        return None
    rows = list(accumulate(count for _, count in counts))
    histogram: dict[str, int] = {}
    bound = _MIN_BUCKET
    for length, count in counts:
        while length > bound:
            bound *= 2
            if histogram:  # an empty range between others is shown, one at the beginning is not
                histogram[f"to {bound:,}"] = 0
        histogram[f"to {bound:,}"] = histogram.get(f"to {bound:,}", 0) + count

    def quantile(share: float) -> int:
        return counts[bisect_left(rows, share * rows[-1])][0]

    return LengthFigures(
        unit=unit,
        tokenizer=tokenizer,
        limit=limit,
        shortest=counts[0][0],
        median=quantile(0.5),
        p90=quantile(0.9),
        longest=counts[-1][0],
        total=sum(length * count for length, count in counts),
        histogram=histogram,
    )


class LengthRule:
    """Measures conversations, in tokens if there is a template, else in characters, and cuts long ones.

    Raises ConfigError for a limit in tokens without a tokenizer, or for two limits.
    """

    def __init__(
        self, template: Template | None = None, *, max_tokens: int | None = None, max_chars: int | None = None
    ) -> None:
        if max_tokens is not None and template is None:
            raise ConfigError("--max-tokens needs a tokenizer; name its directory with --tokenizer MODEL_DIR")
        if max_chars is not None and template is not None:
            raise ConfigError(
                "--max-chars and --tokenizer exclude each other, because a tokenizer measures in tokens; give "
                "--max-tokens instead, or leave out --tokenizer"
            )
        self._template = template
        self.limit = max_chars if template is None else max_tokens
        self.unit: LengthUnit = "characters" if template is None else "tokens"
        self._per_character = 1.0 if template is None else _TOKENS_PER_CHARACTER

    def measure(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> int | None:
        """Return the length of a conversation with its tools; None if the chat template rejects it."""
        return self._measure([_renderable(message) for message in messages] if self._template else messages, tools)

    def pieces(self, example: Example, left_out: Counter[str], notes: Counter[str]) -> Iterator[Example]:
        """Yield the example with its length, in the rule's unit, or, if it is too long, pieces that fit.

        Each of its answers is taught by one piece. A piece ends with an answer, and has the system prompt, the
        first user message, and before the answer the newest turns that fit, at least one. A turn is a user
        message, or an answer with the results of its calls. What cannot be rendered or cut is left out and
        counted in `left_out`; `notes` counts what was cut.
        """
        if self.limit is None or not self._is_far_too_long(example, self.limit):
            length = self.measure(example.messages, example.tools)
            if length is None:
                left_out[NOT_RENDERED] += 1
                return
            if self.limit is None or length <= self.limit:
                yield replace(example, length=length)
                return
        pieces = self._cut(example, self.limit, left_out)
        for number, piece in enumerate(pieces):
            if number == 0 and len(piece.messages) == len(example.messages):
                yield piece  # shorter than estimated
                return
            notes[PIECES] += 1
            yield piece
        notes[CUT] += 1

    def _measure(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> int | None:
        """Return the length of messages that `_renderable` has prepared."""
        if self._template is None:
            return sum(map(_characters, messages)) + (len(json.dumps(tools, ensure_ascii=False)) if tools else 0)
        tokens = self._template.render(messages, tools or (), generation_prompt=False)
        return None if tokens is None else len(tokens)

    def _is_far_too_long(self, example: Example, limit: int) -> bool:
        """Return whether an example is so long that it need not be rendered as a whole.

        To render each of a conversation's turns with all that came before it would take quadratic time.
        """
        return (
            self._template is not None and sum(map(_characters, example.messages)) > limit * _FAR_TOO_LONG_FACTOR
        )

    def _cut(self, example: Example, limit: int, left_out: Counter[str]) -> Iterator[Example]:
        messages = example.messages
        prepared = [_renderable(message) for message in messages] if self._template else messages
        head = _head_length(messages)
        turns = [index for index in range(head, len(messages)) if messages[index]["role"] in ("assistant", "user")]
        sizes = list(accumulate(map(_characters, messages), initial=0))
        answer_ids = dict(zip(example.trained, example.answer_ids, strict=True))
        pending = list(example.trained)
        while pending:
            answer = pending[-1]
            starts = [index for index in turns if index < answer] or [answer]

            def measured(start: int, end: int = answer + 1) -> int | None:
                return self._measure(_joined(prepared, head, start, end)[0], example.tools)

            characters = [sizes[head] + sizes[answer + 1] - sizes[index] for index in starts]
            start, size = self._earliest_start(starts, characters, limit, measured)
            if size is None:
                left_out[NOT_RENDERED if measured(starts[-1]) is None else CANNOT_BE_CUT] += 1
                pending.pop()
                continue
            piece, shift = _joined(messages, head, start, answer + 1)
            # The turn that a piece begins with is only context, because what it answers may be cut off.
            learned = [index for index in pending if index > start or index == answer or index == start == head]
            yield replace(
                example,
                example_id=answer_ids[answer],
                messages=piece,
                trained=tuple(index - shift for index in learned),
                answer_ids=tuple(answer_ids[index] for index in learned),
                length=size,
            )
            pending = [index for index in pending if index not in learned]

    def _earliest_start(
        self, starts: Sequence[int], characters: Sequence[int], limit: int, measure: Callable[[int], int | None]
    ) -> tuple[int, int | None]:
        """Return the first of the starts from which a piece fits, and its length; None if there is none.

        `characters` of the pieces tell where to measure first, and each measurement where to measure next, so
        that a few suffice: at last one that fits, and one with another turn that does not.
        """
        too_long, fits, size = -1, len(starts), None
        characters_at, length_at = 0, 0
        while too_long + 1 < fits:
            # The first start that should fit, among those that are still possible.
            remaining_characters = characters_at + (limit - length_at) / self._per_character
            guess = bisect_left(characters, -remaining_characters, key=operator.neg)
            position = min(max(guess, too_long + 1), fits - 1)
            length = measure(starts[position])
            if length is None or length > limit:
                too_long = position
            else:
                fits, size = position, length
            if length and characters[position]:
                characters_at, length_at = characters[position], length
                self._per_character = length / characters[position]
        return starts[min(fits, len(starts) - 1)], size


def _head_length(messages: Sequence[Message]) -> int:
    """Return how many leading messages are never cut off: the system prompt, and the first user message."""
    first_index = next(
        (index for index, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0
    )
    return (
        first_index + 1 if first_index < len(messages) and messages[first_index]["role"] == "user" else first_index
    )


def _joined(messages: Sequence[Message], head: int, start: int, end: int) -> tuple[list[Message], int]:
    """Join the head with the messages from `start` to `end`. Also returns by how much their indexes decrease.

    A user message directly after that of the head is joined with it, because chat templates require turns to
    alternate.
    """
    head_messages, tail_messages = list(messages[:head]), list(messages[start:end])
    if (
        start > head
        and head_messages
        and head_messages[-1]["role"] == "user"
        and tail_messages[0]["role"] == "user"
    ):
        head_messages[-1] = {
            **head_messages[-1],
            "content": f"{head_messages[-1]['content']}\n\n{tail_messages[0]['content']}",
        }
        return [*head_messages, *tail_messages[1:]], start + 1 - head
    return [*head_messages, *tail_messages], start - head


def _characters(message: Message) -> int:
    """Return the number of characters in a message: its text, its thinking, and its calls."""
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return (
        len(message.get("content") or "")
        + len(message.get("reasoning_content") or "")
        + sum(len(call["name"]) + len(call["arguments"]) for call in calls)
    )


def _renderable(message: Message) -> Message:
    """Return the message with the arguments of its calls as the template would write the objects in rows.

    Some templates copy text as it is, so the white space in the text that a model wrote would count.
    """
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_as_template_writes(call) for call in calls]} if calls else message


def _as_template_writes(call: dict[str, Any]) -> dict[str, Any]:
    (row,) = message_rows([{"tool_calls": [call]}])
    function = row["tool_calls"][0]["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
