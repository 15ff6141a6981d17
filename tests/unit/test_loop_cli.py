"""What `understudy train loop` says to what it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest

from support_tiny_model import write_tokenizer
from understudy.tasks.records import dump

from support import calc_task, understudy

TWO = ["{model}", "-t", "{train}", "--groups", "2"]
CASES: dict[str, tuple[list[str], str]] = {
    "no tasks": (["{model}"], "say what to learn from with --tasks"),
    "no such model": (["{here}/nowhere", "-t", "{train}"], "there is no directory"),
    "no model in it": (["{here}", "-t", "{train}"], "config.json"),
    "no template": (["{bare}", "-t", "{train}"], "chat template"),
    "few tasks": (["{model}", "-t", "{train}", "--groups", "9"], "there are only 2 tasks"),
    "learned from what measures": ([*TWO, "-e", "{train}"], "cannot measure"),
    "the same under another name": ([*TWO, "-e", "{renamed}"], "cannot measure"),
    "no command": (["{model}", "-t", "{train}", "--agent", "shell"], "--agent-command"),
    "no address": (["{model}", "-t", "{train}", "--groups", "2", "--backend", "vllm"], "--base-url"),
    "no such server": (["{model}", "-t", "{train}", "--backend", "openai"], "served by embedded, vllm, sglang"),
    "no such option": (["{model}", "-t", "{train}", "--advantage", "luck"], "luck"),
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    from msgspec.structs import replace

    tasks = [calc_task(0), calc_task(1)]
    dump(tasks, tmp_path / "train.jsonl")
    dump([replace(tasks[0], instance_id="renamed")], tmp_path / "renamed.jsonl")
    for name in ("model", "bare"):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    return {
        "here": tmp_path,
        "model": tmp_path / "model",
        "bare": tmp_path / "bare",
        "train": tmp_path / "train.jsonl",
        "renamed": tmp_path / "renamed.jsonl",
    }


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_used_is_told_in_words(case: str, places: dict[str, Path]):
    pytest.importorskip("torch")
    arguments, words = CASES[case]
    given = [argument.format_map(places) for argument in arguments]
    done = understudy("train", "loop", *given, "-o", places["here"] / "loop")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
