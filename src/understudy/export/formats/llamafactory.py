"""LLaMA-Factory: rows in its sharegpt or Alpaca format, `dataset_info.json`, and a ready training config.

`OUTPUT` is the dataset directory, which may be LLaMA-Factory's own; each dataset has a directory in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec

from understudy.errors import ConfigError
from understudy.export.base import ExportSummary, FormatTraits, ProgressCallback, exporter, no_progress
from understudy.export.corpus import Corpus, Unit
from understudy.export.examples import Example
from understudy.export.files import ExportWriter
from understudy.export.formats import llamafactory_rows as rows
from understudy.export.formats.llamafactory_rows import Form, Row, RowFlaw, TemplateRules, template_rules
from understudy.export.parquet import JsonLinesWriter
from understudy.preference.checks import Pair
from understudy.util.files import atomic_path, locked

CONFIG = "train.yaml"
TOO_LONG = "rows longer than --cutoff, which LLaMA-Factory would cut"

_BYTES_A_TOKEN = 3
"""A low estimate; English text and code have about four."""
_TOKENS_A_MESSAGE = 8
_TOKENS_A_ROW = 320
_CUTOFF_STEP = 1024

_ABOUT = (
    "Each row is one for LLaMA-Factory, stage `{stage}`, form `{form}`, made for its template `{template}`: the "
    "entry `{name}` of the `dataset_info.json` one directory up names its columns. `train.yaml` is a training "
    "config; the model is written to `model`, beside it."
)

_LOAD = f"llamafactory-cli train {{quoted}}/{CONFIG}"


@exporter(FormatTraits(solved_only=True, cuts=True, weights=True))
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
    report: ProgressCallback = no_progress,
) -> ExportSummary:
    """Rows, dataset_info.json and a training config for LLaMA-Factory.

    Rows are in OUTPUT/NAME; the entries NAME and NAME_test of OUTPUT/dataset_info.json are added or replaced, all
    others stay as they are. Pairs, and good and bad answers, also include unsolved rollouts. Tokens are counted if
    `model` is a directory with a tokenizer, else estimated.

    Returns the summary of what was written. Raises ConfigError if there is nothing to write, it cannot be written,
    the names are taken, or an option is invalid or does not apply to the stage.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name: invalid dataset name {name!r}; give one of at most 100 letters, digits, dots, dashes and "
            "underscores, beginning with a letter or a digit"
        )
    test_name = f"{name}_test"
    if cutoff is not None and cutoff < 1:
        raise ConfigError(f"--cutoff: got {cutoff}, expected at least 1 token; give a larger number")
    if stage == "dpo":
        corpus.refuse_length_options("preference pairs")
    check_names(output, {name: f"{name}/", test_name: f"{name}/"})
    rules = template_rules(template)
    count_tokens = RowLengthCounter(model)
    directory = output / name
    if stage != "sft":
        unit = "turn"
        with_unsolved = msgspec.structs.replace(corpus.selection, solved_only=False)
        corpus = corpus.with_selection(with_unsolved)
    longest = 0
    about = _ABOUT.format(stage=stage, form=form, template=template, name=name)
    json_lines = AlpacaWriter if form == "alpaca" else JsonLinesWriter
    with ExportWriter(corpus, directory, "llamafactory", report, json_lines=json_lines) as writing:
        items: Iterable[Example | Pair] = corpus.pairs() if stage == "dpo" else corpus.examples(unit)
        for item in items:
            try:
                row = _row(item, stage, rules, form)
                length = count_tokens(row)
                if cutoff is not None and length > cutoff:
                    raise RowFlaw(TOO_LONG)
            except RowFlaw as flaw:
                corpus.counts.leave_out(item, str(flaw))
                continue
            longest = max(longest, length)
            writing.add(item.group, row)
        has_test = len(writing.written) > 1
        cutoff_tokens = cutoff or -(-longest // _CUTOFF_STEP) * _CUTOFF_STEP
        config = training_config(
            stage=stage,
            model=model,
            template=template,
            finetuning=finetuning,
            dataset_dir=output.resolve(),
            name=name,
            test=test_name if has_test else None,
            cutoff=cutoff_tokens,
            mask_history=unit == "turn",
            output=(directory / "model").resolve(),
        )
        writing.path(CONFIG).write_text(config, encoding="utf-8")
        roughly = "" if count_tokens.exact else "about "
        length_note = f"cutoff_len is {cutoff_tokens} tokens; the longest row has {roughly}{longest}"
        exported = writing.finish(about, _LOAD, notes=(length_note,), local_only=(CONFIG,))
    entries = {
        name: dataset_entry(f"{name}/train.jsonl", form, stage),
        test_name: dataset_entry(f"{name}/test.jsonl", form, stage) if has_test else None,
    }
    merge_entries(output, entries)
    return exported


def _row(item: Example | Pair, stage: Stage, rules: TemplateRules, form: Form) -> Row:
    """Return the row of an example or a pair. Raises RowFlaw."""
    if isinstance(item, Pair):
        return rows.dpo(item, rules, form)
    return rows.sft(item, rules, form) if stage == "sft" else rows.kto(item, rules, form)


class RowLengthCounter:
    """Counts the tokens of a row, or estimates them if the tokenizer of `model` is not available."""

    def __init__(self, model: str) -> None:
        path = Path(model) / "tokenizer.json"
        self._tokenizer: Any = None
        if path.is_file():
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:
                raise ConfigError(
                    f"{path}: invalid tokenizer: {error}; expected a tokenizer.json of Hugging Face: "
                    "download it again, or give another --model"
                ) from error

    @property
    def exact(self) -> bool:
        """Whether tokens are counted rather than estimated."""
        return self._tokenizer is not None

    def __call__(self, row: Row) -> int:
        """Return about how many tokens the row has, including those that the template adds."""
        texts = list(_texts(row))
        if self._tokenizer is None:
            length = sum(len(text.encode(errors="replace")) // _BYTES_A_TOKEN + 1 for text in texts)
        else:
            length = sum(
                len(encoding.ids) for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)
            )
        return length + _TOKENS_A_MESSAGE * len(texts) + _TOKENS_A_ROW


def _texts(row: Row) -> Iterator[str]:
    yield row["system"]
    yield row["tools"]
    for turn in row.get("conversations", ()):
        yield turn["value"]
    for pair in row.get("history", ()):
        yield from pair
    # The two answers are two sequences, so the longer one counts.
    answers: list[Any] = [row[key] for key in ("chosen", "rejected") if key in row]
    yield max((answer if isinstance(answer, str) else answer["value"] for answer in answers), key=len, default="")
    yield row.get("instruction", "")
    yield row.get("output", "")


Stage = Literal["sft", "dpo", "kto"]
Finetuning = Literal["lora", "full"]

DATASET_INFO = "dataset_info.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_COLUMNS: dict[Form, dict[str, str]] = {
    "sharegpt": {"messages": "conversations"},
    "alpaca": {"prompt": "instruction", "query": "input", "history": "history"},
}
_LEARNING_RATES: dict[tuple[Stage, Finetuning], float] = {
    ("sft", "lora"): 1e-4,
    ("sft", "full"): 1e-5,
    ("dpo", "lora"): 5e-6,
    ("dpo", "full"): 5e-7,
    ("kto", "lora"): 5e-6,
    ("kto", "full"): 5e-7,
}


class AlpacaWriter(JsonLinesWriter):
    """Rows in Alpaca format, with the first row that has a history at the front.

    `datasets` infers column types from the first 10 MB of a file: if no row there has a history, it fails at the
    first later one that has.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        self._size = 0
        self._first_with_history: tuple[int, int] | None = None

    def write(self, row: Mapping[str, Any]) -> int:
        """Write a row. Returns its length in bytes."""
        length = super().write(row)
        if self._first_with_history is None and row["history"]:
            self._first_with_history = (self._size, length)
        self._size += length
        return length

    def close(self) -> None:
        """Finish the file."""
        super().close()
        offset, length = self._first_with_history or (0, 0)
        if not offset:
            return
        with self._path.open("rb") as source, atomic_path(self._path) as new_path, new_path.open("wb") as target:
            source.seek(offset)
            target.write(source.read(length))
            source.seek(0)
            while offset:
                data = source.read(min(offset, 1 << 20))
                target.write(data)
                offset -= len(data)
            source.seek(length, os.SEEK_CUR)
            shutil.copyfileobj(source, target, 1 << 20)


def dataset_entry(file: str, form: Form, stage: Stage) -> dict[str, Any]:
    """Return the entry of a row file in `dataset_info.json`.

    A list of columns must be complete: missing ones are unset.
    """
    columns = dict(_COLUMNS[form])
    if form == "alpaca" and stage != "dpo":
        columns["response"] = "output"
    for key in {"sft": (), "kto": ("kto_tag",), "dpo": ("chosen", "rejected")}[stage]:
        columns[key] = key
    columns |= {"system": "system", "tools": "tools"}
    fields: dict[str, Any] = {"file_name": file, "formatting": form, "columns": columns}
    return {**fields, "ranking": True} if stage == "dpo" else fields


def check_names(directory: Path, names: Mapping[str, str]) -> None:
    """Raise ConfigError if the `dataset_info.json` of a directory is invalid, or uses one of `names` for other
    files.

    `names` maps a dataset to the prefix of its own files.
    """
    entries = _read_info(directory / DATASET_INFO)
    for name, prefix in names.items():
        existing = entries.get(name)
        if existing is not None and not _is_own_entry(existing, prefix):
            raise ConfigError(
                f"{directory / DATASET_INFO} already has a dataset {name!r} that was not written by an export; "
                "choose another --name"
            )


def merge_entries(directory: Path, entries: Mapping[str, dict[str, Any] | None]) -> None:
    """Set entries in the `dataset_info.json` of a directory (None removes one); all others stay as they are.

    The file is replaced atomically. Raises ConfigError if it is damaged.
    """
    path = directory / DATASET_INFO
    with locked(directory / f".{DATASET_INFO}.lock", remedy="choose another --output"):
        merged: dict[str, Any] = dict(_read_info(path))
        for name, fields in entries.items():
            merged.pop(name, None)
            if fields is not None:
                merged[name] = msgspec.Raw(msgspec.json.format(msgspec.json.encode(fields), indent=2))
        lines = [f"{json.dumps(name)}: {bytes(raw).decode()}" for name, raw in merged.items()]
        text = "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"
        with atomic_path(path) as new_path:
            new_path.write_text(text, encoding="utf-8")


def training_config(
    *,
    stage: Stage,
    model: str,
    template: str,
    finetuning: Finetuning,
    dataset_dir: Path,
    name: str,
    test: str | None,
    cutoff: int,
    mask_history: bool,
    output: Path,
) -> str:
    """Return a training config as YAML."""
    parts: dict[str, dict[str, Any]] = {
        "model": {"model_name_or_path": model},
        "method": {"stage": stage, "do_train": True, "finetuning_type": finetuning}
        | ({"lora_rank": 16, "lora_target": "all"} if finetuning == "lora" else {})
        | ({"pref_beta": 0.1} if stage != "sft" else {})
        | ({"pref_loss": "sigmoid"} if stage == "dpo" else {}),
        "dataset": {"dataset_dir": str(dataset_dir), "dataset": name}
        | ({} if test is None else {"eval_dataset": test})
        | {"template": template, "cutoff_len": cutoff}
        | ({"mask_history": mask_history} if stage == "sft" else {})
        # Null leaves answers with and without thinking as they are.
        | {"enable_thinking": None, "overwrite_cache": True},
        "output": {"output_dir": str(output), "logging_steps": 10, "save_strategy": "epoch", "report_to": "none"},
        "train": {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "learning_rate": _LEARNING_RATES[stage, finetuning],
            "num_train_epochs": 1.0 if stage != "sft" else 3.0,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
            "bf16": True,
            "gradient_checkpointing": True,
        }
        | ({} if test is None else {"per_device_eval_batch_size": 1, "eval_strategy": "epoch"}),
    }
    lines: list[str] = []
    for title, settings in parts.items():
        lines += [f"### {title}", *(f"{key}: {_scalar(value)}" for key, value in settings.items()), ""]
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    # YAML reads 1e-05 as a string, since it requires a dot.
    return f"{value:.1e}" if isinstance(value, float) and value < 1e-3 else json.dumps(value)


def _read_info(path: Path) -> dict[str, msgspec.Raw]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; choose another --output") from error
    try:
        msgspec.json.decode(data)
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: expected a JSON object of datasets: {error}; repair the file or move it away, or choose "
            "another --output"
        ) from error


def _is_own_entry(raw: msgspec.Raw, prefix: str) -> bool:
    fields: Any = msgspec.json.decode(raw)
    return isinstance(fields, dict) and str(cast(dict[str, Any], fields).get("file_name", "")).startswith(prefix)
