"""LLaMA-Factory: rows in its sharegpt or Alpaca form, its `dataset_info.json`, and a training config to run.

`OUTPUT` is the dataset directory, which may be LLaMA-Factory's own; each data set has a directory in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from understudy.errors import ConfigError
from understudy.export.base import Exported, Report, Traits, exporter, silent
from understudy.export.corpus import Corpus, Tally, Unit
from understudy.export.examples import Example
from understudy.export.files import JsonLines, Writing
from understudy.export.formats import llamafactory_files as files
from understudy.export.formats import llamafactory_rows as rows
from understudy.export.formats.llamafactory_files import Finetuning, Stage
from understudy.export.formats.llamafactory_rows import Flaw, Form, Row
from understudy.export.formats.llamafactory_templates import Template, named
from understudy.preference.base import Pair

CONFIG = "train.yaml"
TOO_LONG = "rows longer than --cutoff, which LLaMA-Factory would cut"

_BYTES_A_TOKEN = 3
"""Cautious: text and code in English have about four."""
_A_MESSAGE = 8
_AROUND = 320
_ROUND = 1024

_ABOUT = (
    "Each row is one for LLaMA-Factory, stage `{stage}`, form `{form}`, made for its template `{template}`: the "
    "entry `{name}` of the `dataset_info.json` one directory up names its columns. `train.yaml` is a training "
    "config; the model is written to `model`, beside it."
)

_LOAD = f"llamafactory-cli train {{quoted}}/{CONFIG}"


@exporter(Traits(solved_only=True))
def export(
    corpus: Corpus,
    output: Path,
    *,
    stage: Annotated[Stage, "What to train: supervised, preference pairs, or good and bad answers."] = "sft",
    form: Annotated[Form, "The form of the rows; alpaca has tool calls and their results as text."] = "sharegpt",
    name: Annotated[str, "The name of the data set, and of its directory."] = "understudy",
    unit: Annotated[
        Unit, "For sft: a row a conversation, all its answers learned, or a row a turn, the last learned."
    ] = "conversation",
    model: Annotated[str, "The model to train: its name, or its directory."] = "Qwen/Qwen3-8B",
    template: Annotated[str, "LLaMA-Factory's name of the model's chat template."] = "qwen3",
    finetuning: Annotated[Finetuning, "Train a LoRA, or all weights."] = "lora",
    cutoff: Annotated[
        int | None, "Leave out rows of more tokens; else the config has room for the longest."
    ] = None,
    report: Report = silent,
) -> Exported:
    """Rows, dataset_info.json and a training config for LLaMA-Factory.

    Rows are in OUTPUT/NAME; the entries NAME and NAME_test of OUTPUT/dataset_info.json are made or replaced, all
    others stay as they are. Pairs, and good and bad answers, are also of what was not solved. Tokens are counted
    where `model` is a directory with a tokenizer, else estimated.

    Raises ConfigError when there is nothing to write, when it cannot be written, or when the names are taken.
    """
    name, test = files.named(name), f"{name}_test"
    if cutoff is not None and cutoff < 1:
        raise ConfigError(f"--cutoff: {cutoff} is no number of tokens; give one of at least 1")
    files.check(output, {name: f"{name}/", test: f"{name}/"})
    chosen = named(template)
    count = Lengths(model)
    place = output / name
    if stage != "sft":
        unit = "turn"
        both_ends = msgspec.structs.replace(corpus.selection, solved_only=False)
        corpus = Corpus(corpus.store, both_ends, corpus.redactor, unredacted=corpus.unredacted)
    longest = 0
    splits: set[str] = set()
    about = _ABOUT.format(stage=stage, form=form, template=template, name=name)
    lines = files.AlpacaLines if form == "alpaca" else JsonLines
    with Writing(corpus, place, "llamafactory", lines, report, suffix=JsonLines.suffix) as writing:
        for made, row in _rows(corpus, stage, unit, chosen, form):
            length = 0 if isinstance(row, Flaw) else count(row)
            if cutoff is not None and length > cutoff:
                row = Flaw(TOO_LONG)
            if isinstance(row, Flaw):
                _leave_out(corpus.tally, made, row.reason)
                continue
            longest = max(longest, length)
            splits.add(corpus.split(made.group))
            writing.add(made.group, row)
        both = len(splits) > 1
        room = cutoff or -(-longest // _ROUND) * _ROUND
        written = files.config(
            stage=stage,
            model=model,
            template=template,
            finetuning=finetuning,
            dataset_dir=output.resolve(),
            name=name,
            test=test if both else None,
            cutoff=room,
            mask_history=unit == "turn",
            output=(place / "model").resolve(),
        )
        writing.path(CONFIG).write_text(written, encoding="utf-8")
        roughly = "" if count.exact else "about "
        told = f"cutoff_len is {room} tokens; the longest row has {roughly}{longest}"
        exported = writing.finish(about, _LOAD, notes=(told,), kept=(CONFIG,))
    entries = {
        name: files.entry(f"{name}/train.jsonl", form, stage),
        test: files.entry(f"{name}/test.jsonl", form, stage) if both else None,
    }
    files.merge(output, entries)
    return exported


def _rows(
    corpus: Corpus, stage: Stage, unit: Unit, chosen: Template, form: Form
) -> Iterator[tuple[Example | Pair, Row | Flaw]]:
    if stage == "dpo":
        for pair in corpus.pairs():
            yield pair, rows.dpo(pair, chosen, form)
        return
    make: Callable[..., Row | Flaw] = rows.sft if stage == "sft" else rows.kto
    for example in corpus.examples(unit):
        yield example, make(example, chosen, form)


def _leave_out(tally: Tally, made: Example | Pair, reason: str) -> None:
    if isinstance(made, Example):
        tally.leave_out(made, reason)
        return
    tally.count("session" if made.origin == "replay" else "rollout", made.origin, None, made.family, -1)
    tally.left_out[reason] += 1


class Lengths:
    """Counts the tokens of a row, or estimates them where the tokenizer of `model` is not at hand."""

    def __init__(self, model: str) -> None:
        path = Path(model) / "tokenizer.json"
        self._tokenizer: Any = None
        if path.is_file():
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:
                raise ConfigError(f"{path} is no tokenizer ({error}); give another --model") from error

    @property
    def exact(self) -> bool:
        """Whether it counts."""
        return self._tokenizer is not None

    def __call__(self, row: Row) -> int:
        """About how many tokens the row has, what the template puts around them included."""
        texts = list(_texts(row))
        if self._tokenizer is None:
            length = sum(len(text.encode(errors="replace")) // _BYTES_A_TOKEN + 1 for text in texts)
        else:
            length = sum(len(each.ids) for each in self._tokenizer.encode_batch(texts, add_special_tokens=False))
        return length + _A_MESSAGE * len(texts) + _AROUND


def _texts(row: Row) -> Iterator[str]:
    yield row["system"]
    yield row["tools"]
    for turn in row.get("conversations", ()):
        yield turn["value"]
    for pair in row.get("history", ()):
        yield from pair
    # Two answers are two sequences: the longer one counts.
    answers: list[Any] = [row[key] for key in ("chosen", "rejected") if key in row]
    yield max((each if isinstance(each, str) else each["value"] for each in answers), key=len, default="")
    yield row.get("instruction", "")
    yield row.get("output", "")
