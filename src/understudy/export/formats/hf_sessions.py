"""The Hugging Face dataset of sessions: one row per conversation or turn, with everything known of its session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from understudy.export.base import ExportSummary, ProgressCallback
from understudy.export.corpus import Corpus, Unit
from understudy.export.examples import Example, message_rows
from understudy.export.files import ExportWriter
from understudy.export.formats.trl import TOOLS_FROM, tools_json

_TEXT = "string"
_FIELDS = ("example_id", "unit", "group", "source", "licence", "model", "family", *TOOLS_FROM)
_OF_SESSION = (
    "session_id", "trace_id", "role", "branch", "fidelity", "timestamp", "version", "task",
)  # fmt: skip

COLUMNS: dict[str, Any] = {
    "messages": ["json"],
    "tools": _TEXT,
    "trained": ["int32"],
    "answer_ids": [_TEXT],
    "signals": ["json"],
    **dict.fromkeys((*_FIELDS, *_OF_SESSION), _TEXT),
    "resolved": "bool",
    "reward": "float64",
}
"""The columns and their types. `answer_ids` and `signals` belong to the messages listed in `trained`."""

_ABOUT = (
    "Each row is a conversation of a session, or with `--unit turn` one turn of it: `messages` with the arguments "
    "of tool calls as objects, and `tools` as JSON text. `trained` are the indexes of the answers that were "
    "chosen, `answer_ids` are the ids of their states, and `signals` tell what became of each. `group` is the "
    "project or the task, `source` the format of the log, `licence` null where nothing names one. `fidelity` says "
    "how sure it is that the messages are what the model saw."
)
_LOAD = """from datasets import load_dataset

dataset = load_dataset("{output}", split="train")"""


def export_sessions(corpus: Corpus, output: Path, unit: Unit, report: ProgressCallback) -> ExportSummary:
    """Export the sessions of a corpus as one dataset. Raises ConfigError like `ExportWriter`."""
    with ExportWriter(corpus, output, "hf", report, columns=COLUMNS) as writing:
        for example in corpus.examples(unit):
            writing.add(example.group, session_row(example))
        return writing.finish(_ABOUT, _LOAD)


def session_row(example: Example) -> dict[str, Any]:
    """Return an example as a row of `COLUMNS`."""
    return {
        "messages": message_rows(example.messages),
        "tools": tools_json(example.tools),
        "trained": list(example.trained),
        "answer_ids": list(example.answer_ids),
        "signals": example.meta["signals"],
        **{name: getattr(example, name) for name in (*_FIELDS, "reward")},
        **{name: example.meta[name] for name in (*_OF_SESSION, "resolved")},
    }
