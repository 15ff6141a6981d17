"""TRL's SFTTrainer: conversations with their tools, or prompts and completions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from understudy.export.base import Exported, Report, Traits, exporter, silent
from understudy.export.corpus import Corpus, Unit
from understudy.export.examples import Example
from understudy.export.files import Writing
from understudy.export.formats.trl_messages import MESSAGES, templated_all, tools_text
from understudy.export.parquet import Parquet

_COMMON: dict[str, Any] = {
    "tools": "string",
    "example_id": "string",
    "origin": "string",
    "group": "string",
    "source": "string",
    "model": "string",
    "family": "string",
    "reward": "float64",
}
Form = Literal["messages", "completion"]

COLUMNS: dict[Form, dict[str, Any]] = {
    "messages": {"messages": MESSAGES, "trained": ["int32"], **_COMMON},
    "completion": {"prompt": MESSAGES, "completion": MESSAGES, **_COMMON},
}
_ABOUT: dict[Form, str] = {
    "messages": "Each row is a conversation: `messages` with the arguments of tool calls as objects, and `tools`"
    " as JSON text. `trained` are the indexes of the messages that were chosen to be learned. With "
    "`assistant_only_loss=True` TRL learns all the assistant's messages of a row: those too that were not "
    "chosen, and those that two paths of one session share. Where that matters, export with `--exact`.",
    "completion": "Each row is a `prompt`, the conversation so far, and the `completion` that is learned, which "
    "may be several messages with tool results between them; `tools` are JSON text. Each chosen message is "
    "learned once: with `assistant_only_loss=True` TRL learns the assistant's messages of the completion, and no"
    " others.",
}
_LOAD = """from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("{output}")
config = SFTConfig(assistant_only_loss=True, max_length=None)
SFTTrainer(MODEL, args=config, train_dataset=dataset["train"]).train()"""


@exporter(Traits(solved_only=True))
def export(
    corpus: Corpus,
    output: Path,
    *,
    unit: Annotated[Unit, "A row a conversation, or a turn (as prompt and completion)."] = "conversation",
    exact: Annotated[
        bool, "Conversations as prompt and completion, so that TRL learns the chosen messages only, each once."
    ] = False,
    report: Report = silent,
) -> Exported:
    """Conversations for TRL's SFTTrainer, with their tools.

    Raises ConfigError when there is nothing to write, or it cannot be written.
    """
    form: Form = "completion" if exact or unit == "turn" else "messages"
    rows = partial(Parquet, columns=COLUMNS[form])
    with Writing(corpus, output, "trl-sft", rows, report, suffix=Parquet.suffix) as writing:
        for example in corpus.examples(unit):
            for row in rows_of(example, form):
                writing.add(example.group, row)
        return writing.finish(_ABOUT[form], _LOAD)


def rows_of(example: Example, form: Form) -> Iterator[dict[str, Any]]:
    """An example as rows of a form's columns: one, or one for each run of messages that are learned."""
    messages = templated_all(example.messages)
    common = {
        "tools": tools_text(example.tools),
        "example_id": example.example_id,
        "origin": example.origin,
        "group": example.group,
        "source": example.source,
        "model": example.model,
        "family": example.family,
        "reward": example.reward,
    }
    if form == "messages":
        yield {"messages": messages, "trained": list(example.trained), **common}
        return
    for first, last in runs(example):
        yield {"prompt": messages[:first], "completion": messages[first : last + 1], **common}


def runs(example: Example) -> list[tuple[int, int]]:
    """The first and the last index of each run of learned messages with no other answer between them."""
    found: list[tuple[int, int]] = []
    learned = set(example.trained)
    going_on = False
    for index, message in enumerate(example.messages):
        if index in learned:
            found[-1:] = [(found[-1][0], index)] if going_on else [*found[-1:], (index, index)]
            going_on = True
        elif message["role"] == "assistant":
            going_on = False
    return found
