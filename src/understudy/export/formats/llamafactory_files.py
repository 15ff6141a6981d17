"""What stands beside the rows for LLaMA-Factory: the entries of `dataset_info.json`, and a training config."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from understudy.errors import ConfigError
from understudy.export.files import JsonLines
from understudy.export.formats.llamafactory_rows import Form
from understudy.util.atomic import atomic_path
from understudy.util.locks import locked

Stage = Literal["sft", "dpo", "kto"]
Finetuning = Literal["lora", "full"]

INFO = "dataset_info.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_COLUMNS: dict[tuple[Form, Stage], dict[str, str]] = {
    ("sharegpt", "sft"): {},
    ("sharegpt", "kto"): {"kto_tag": "kto_tag"},
    ("sharegpt", "dpo"): {"chosen": "chosen", "rejected": "rejected"},
    ("alpaca", "sft"): {"response": "output"},
    ("alpaca", "kto"): {"response": "output", "kto_tag": "kto_tag"},
    ("alpaca", "dpo"): {"chosen": "chosen", "rejected": "rejected"},
}
_FORM_COLUMNS: dict[Form, dict[str, str]] = {
    "sharegpt": {"messages": "conversations"},
    "alpaca": {"prompt": "instruction", "query": "input", "history": "history"},
}
_RATES: dict[tuple[Stage, Finetuning], float] = {
    ("sft", "lora"): 1e-4,
    ("sft", "full"): 1e-5,
    ("dpo", "lora"): 5e-6,
    ("dpo", "full"): 5e-7,
    ("kto", "lora"): 5e-6,
    ("kto", "full"): 5e-7,
}


class AlpacaLines(JsonLines):
    """Rows in the form of Alpaca, the first one that has a history in front.

    `datasets` takes the types of columns from the first 10 MB of a file: where no row in them has a history, it
    fails at the first one that has.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        self._size = 0
        self._first: tuple[int, int] | None = None

    def write(self, row: Mapping[str, Any]) -> int:
        """Write a row. Returns its length in bytes."""
        length = super().write(row)
        if self._first is None and row["history"]:
            self._first = (self._size, length)
        self._size += length
        return length

    def close(self) -> None:
        """Finish the file."""
        super().close()
        begin, length = self._first or (0, 0)
        if not begin:
            return
        with self._path.open("rb") as old, atomic_path(self._path) as place, place.open("wb") as new:
            old.seek(begin)
            new.write(old.read(length))
            old.seek(0)
            while begin:
                part = old.read(min(begin, 1 << 20))
                new.write(part)
                begin -= len(part)
            old.seek(length, os.SEEK_CUR)
            shutil.copyfileobj(old, new, 1 << 20)


def named(name: str) -> str:
    """The name of a data set. Raises ConfigError for one that LLaMA-Factory, or a directory, cannot have."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name: {name!r} cannot name a data set of LLaMA-Factory; give letters, digits, dots, dashes and "
            "underscores, beginning with a letter or a digit, at most 100"
        )
    return name


def entry(file: str, form: Form, stage: Stage) -> dict[str, Any]:
    """What `dataset_info.json` says of a file of rows. A list of columns must name all: the others are none."""
    columns = {**_FORM_COLUMNS[form], **_COLUMNS[form, stage], "system": "system", "tools": "tools"}
    said: dict[str, Any] = {"file_name": file, "formatting": form, "columns": columns}
    return {**said, "ranking": True} if stage == "dpo" else said


def check(directory: Path, names: Mapping[str, str]) -> None:
    """Raises ConfigError where the `dataset_info.json` of a directory is none, or has one of `names` for others.

    `names` maps a data set to the beginning of the files that are its own.
    """
    known = _read(directory / INFO)
    for name, own in names.items():
        taken = known.get(name)
        if taken is not None and not _ours(taken, own):
            raise ConfigError(
                f"{directory / INFO} has a data set {name!r} already, which is none of ours; choose another --name"
            )


def merge(directory: Path, entries: Mapping[str, dict[str, Any] | None]) -> None:
    """Put entries into the `dataset_info.json` of a directory (None takes one out); all others stay as they are.

    The file is exchanged at one stroke. Raises ConfigError when it is broken.
    """
    path = directory / INFO
    with locked(directory / f".{INFO}.lock", remedy="choose another --output"):
        known: dict[str, Any] = dict(_read(path))
        for name, said in entries.items():
            known.pop(name, None)
            if said is not None:
                known[name] = msgspec.Raw(msgspec.json.format(msgspec.json.encode(said), indent=2))
        lines = [f"{json.dumps(name)}: {bytes(raw).decode()}" for name, raw in known.items()]
        text = "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"
        with atomic_path(path) as fresh:
            fresh.write_text(text, encoding="utf-8")


def config(
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
    """A training config, as YAML."""
    method: dict[str, Any] = {"stage": stage, "do_train": True, "finetuning_type": finetuning}
    if finetuning == "lora":
        method |= {"lora_rank": 16, "lora_target": "all"}
    if stage != "sft":
        method["pref_beta"] = 0.1
    if stage == "dpo":
        method["pref_loss"] = "sigmoid"
    data: dict[str, Any] = {"dataset_dir": str(dataset_dir), "dataset": name}
    if test is not None:
        data["eval_dataset"] = test
    data |= {"template": template, "cutoff_len": cutoff}
    if stage == "sft":
        data["mask_history"] = mask_history
    # Null leaves answers with thinking and answers without as they are.
    data |= {"enable_thinking": None, "overwrite_cache": True}
    train: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": _RATES[stage, finetuning],
        "num_train_epochs": 1.0 if stage != "sft" else 3.0,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "bf16": True,
        "gradient_checkpointing": True,
    }
    if test is not None:
        train |= {"per_device_eval_batch_size": 1, "eval_strategy": "epoch"}
    parts: dict[str, dict[str, Any]] = {
        "model": {"model_name_or_path": model},
        "method": method,
        "dataset": data,
        "output": {
            "output_dir": str(output),
            "logging_steps": 10,
            "save_strategy": "epoch",
            "report_to": "none",
        },
        "train": train,
    }
    lines: list[str] = []
    for title, settings in parts.items():
        lines += [f"### {title}", *(f"{key}: {_scalar(value)}" for key, value in settings.items()), ""]
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    # 1e-05 would be a string: YAML wants the dot.
    return f"{value:.1e}" if isinstance(value, float) and value < 1e-3 else json.dumps(value)


def _read(path: Path) -> dict[str, msgspec.Raw]:
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
            f"{path} is no JSON object of data sets ({error}), so LLaMA-Factory cannot read it and nothing can be "
            "added; mend or move it away, or choose another --output"
        ) from error


def _ours(raw: msgspec.Raw, own: str) -> bool:
    said: Any = msgspec.json.decode(raw)
    return isinstance(said, dict) and str(cast(dict[str, Any], said).get("file_name", "")).startswith(own)
