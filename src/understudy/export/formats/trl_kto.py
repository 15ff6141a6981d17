"""TRL's KTOTrainer: turns that are to be learned from, and turns that are to be unlearned."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from understudy.export.base import Exported, Report, Traits, exporter, silent
from understudy.export.corpus import Corpus
from understudy.export.files import Writing
from understudy.export.formats.trl_messages import MESSAGES, templated_all, tools_text
from understudy.export.parquet import Parquet

COLUMNS: dict[str, Any] = {
    "prompt": MESSAGES,
    "completion": MESSAGES,
    "label": "bool",
    "tools": "string",
    "example_id": "string",
    "origin": "string",
    "group": "string",
    "source": "string",
    "model": "string",
    "family": "string",
    "reward": "float64",
}
_ABOUT = (
    "Each row is a turn: `prompt` is what the model saw, `completion` its one answer, `label` whether it is to "
    "be learned from; `tools` are JSON text. A turn of a rollout has the label of its rollout: solved or not. A "
    "turn of a session is undesirable where the user denied a call, interrupted it, said that it was wrong, or "
    "an edit of it was undone later; else desirable where tests that it ran passed, it made a commit, or the "
    "user praised it; else as the log says of the whole task, if it does. Turns of which nothing tells are left "
    "out."
)
_LOAD = """from datasets import load_dataset
from trl import KTOConfig, KTOTrainer

dataset = load_dataset("{output}")
KTOTrainer(MODEL, args=KTOConfig(max_length=None), train_dataset=dataset["train"]).train()"""


@exporter(Traits(chooses_solved=False))
def export(corpus: Corpus, output: Path, *, report: Report = silent) -> Exported:
    """Turns with a label, desirable or not, for TRL's KTOTrainer.

    Raises ConfigError when there is nothing to write, or it cannot be written.
    """
    rows = partial(Parquet, columns=COLUMNS)
    labels: Counter[bool] = Counter()
    with Writing(corpus, output, "trl-kto", rows, report, suffix=Parquet.suffix) as writing:
        for example in corpus.examples("turn"):
            if example.desirable is None:
                corpus.tally.leave_out(example, "turns of which nothing tells whether they were good")
                continue
            labels[example.desirable] += 1
            messages = templated_all(example.messages)
            row = {
                "prompt": messages[:-1],
                "completion": messages[-1:],
                "label": example.desirable,
                "tools": tools_text(example.tools),
                "example_id": example.example_id,
                "origin": example.origin,
                "group": example.group,
                "source": example.source,
                "model": example.model,
                "family": example.family,
                "reward": example.reward,
            }
            writing.add(example.group, row)
        note = f"{labels[True]} rows are desirable, {labels[False]} are not."
        return writing.finish(_ABOUT, _LOAD, notes=(note,))
