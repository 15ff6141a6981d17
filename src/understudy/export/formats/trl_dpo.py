"""TRL's DPOTrainer: of two answers to one conversation, the better and the worse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from understudy.export.base import Exported, Report, Traits, exporter, silent
from understudy.export.corpus import Corpus
from understudy.export.files import Writing
from understudy.export.formats.trl_messages import MESSAGES, templated, templated_all, tools_text
from understudy.export.matching import textual
from understudy.export.parquet import Parquet
from understudy.preference.base import Pair
from understudy.preference.checks import message_of

COLUMNS: dict[str, Any] = {
    "prompt": MESSAGES,
    "chosen": MESSAGES,
    "rejected": MESSAGES,
    "tools": "string",
    "pair_id": "string",
    "origin": "string",
    "group": "string",
    "state_id": "string",
    "model": "string",
    "family": "string",
    "evidence": "json",
}

_ABOUT = (
    "Each row is a preference: `prompt` is what the model saw, `chosen` and `rejected` are one answer each, "
    "`tools` are JSON text, `evidence` says why the one is better. `model` and `family` wrote the rejected "
    "answer."
)
_LOAD = """from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

dataset = load_dataset("{output}")
DPOTrainer(MODEL, args=DPOConfig(max_length=None), train_dataset=dataset["train"]).train()"""


@exporter(Traits(chooses_solved=False))
def export(corpus: Corpus, output: Path, *, report: Report = silent) -> Exported:
    """Preference pairs for TRL's DPOTrainer, of replays and of attempts at one task.

    Raises ConfigError when there is nothing to write, or it cannot be written.
    """
    rows = partial(Parquet, columns=COLUMNS)
    with Writing(corpus, output, "trl-dpo", rows, report, suffix=Parquet.suffix) as writing:
        for pair in corpus.pairs():
            writing.add(pair.group, row_of(pair))
        return writing.finish(_ABOUT, _LOAD)


def row_of(pair: Pair) -> dict[str, Any]:
    """A pair as a row of `COLUMNS`."""
    return {
        "prompt": templated_all([textual(message) for message in pair.messages]),
        "chosen": [templated(textual(message_of(pair.chosen)))],
        "rejected": [templated(textual(message_of(pair.rejected)))],
        "tools": tools_text(pair.tools),
        "pair_id": pair.pair_id,
        "origin": pair.origin,
        "group": pair.group,
        "state_id": pair.state_id,
        "model": pair.model,
        "family": pair.family,
        "evidence": pair.evidence,
    }
