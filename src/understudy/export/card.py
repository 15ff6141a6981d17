"""The dataset card of an export: how it loads, what is in it, where it came from, and what was redacted."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence

from understudy import __version__
from understudy.export.base import ExportSummary
from understudy.export.corpus import ExportSelection

CARD_NAME = "README.md"

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


def render_card(
    exported: ExportSummary,
    selection: ExportSelection,
    name: str,
    about: str,
    load: str,
    data: Mapping[str, Sequence[str]],
) -> str:
    """The card, in Markdown with a YAML header by which `datasets.load_dataset` finds the splits.

    `data` are the files of rows of each split, `load` is how they are loaded. The licence is that of all sources
    where they share one and every one is known, else "unknown".
    """
    licences = set(exported.licences)
    licence = licences.pop().lower() if len(licences) == 1 else "unknown"
    size = next((word for limit, word in _SIZES if exported.rows < limit), "n>1M")
    header = [
        "---",
        f"license: {json.dumps(licence)}",
        f"size_categories:\n- {json.dumps(size)}",
        f"tags:\n- understudy\n- agent-traces\n- {json.dumps(name)}",
        *_configs(data),
        "---",
    ]
    parts = [
        "\n".join(header),
        f"# {exported.rows} rows in the format {name}",
        about,
        _table("split", "rows", exported.splits),
        "No project and no task is in more than one split: which one it is in follows from its name and the seed.",
        f"```python\n{load}\n```",
        "## Where it came from",
        _table("origin", "rows", exported.origins),
        _table("source", "rows", exported.sources),
        _table("model family that wrote it", "rows", exported.families),
        _table("licence of the source", "rows", exported.licences),
        "A licence is `unknown` where its source does not name one; nothing is said of it then, and it is not a "
        "permission.",
        "## How it was made",
        _how_made(selection, name),
    ]
    if exported.left_out:
        parts.append(_table("left out", "how many", exported.left_out))
    parts += [f"- {note}" for note in exported.notes]
    parts += ["## Redaction", _redaction(exported, selection)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _configs(data: Mapping[str, Sequence[str]]) -> list[str]:
    paths_by_split = {
        split: [json.dumps(glob.escape(path)) for path in paths] for split, paths in data.items() if paths
    }
    if not paths_by_split:
        return []
    splits = [f"  - split: {split}\n    path: [{', '.join(paths)}]" for split, paths in paths_by_split.items()]
    return ["configs:\n- config_name: default\n  data_files:", *splits]


def _how_made(selection: ExportSelection, name: str) -> str:
    chosen = {
        "from": ", ".join(selection.origins),
        "run": selection.run or "all",
        "roles": ", ".join(selection.roles),
        "where": selection.where or "all turns",
        "only solved": "yes" if selection.solved_only else "no",
        "suspicious patches": "included" if selection.include_suspicious else "left out",
        "share for the test": str(selection.test_share),
        "seed": str(selection.seed),
    }
    return f"Made by `understudy export {name}` (Understudy {__version__}).\n\n" + _table(
        "choice", "value", chosen
    )


def _redaction(exported: ExportSummary, selection: ExportSelection) -> str:
    if exported.unredacted:
        return (
            "**NOT REDACTED.** The sessions in it are as they were logged, with any secrets, names and paths. Do "
            "not give it away."
        )
    if "sessions" not in selection.origins:
        return "There are no sessions of people in it, only rollouts in sandboxes: nothing was redacted."
    if not exported.redaction:
        return "The sessions were searched for secrets, e-mail addresses and home directories: none were found."
    return "The same secret has the same pseudonym everywhere.\n\n" + _table(
        "rule", "replaced", exported.redaction
    )


def _table(head: str, count: str, rows: Mapping[str, object]) -> str:
    if not rows:
        return ""
    lines = [f"| {head} | {count} |", "|---|---|", *(f"| {_cell(key)} | {_cell(rows[key])} |" for key in rows)]
    return "\n".join(lines)


def _cell(value: object) -> str:
    """A value that cannot break out of its cell: names of models and sources come from logs."""
    text = "".join(each if each.isprintable() else " " for each in str(value))
    for special in "\\|<>`[]*":
        text = text.replace(special, f"\\{special}")
    return text
