"""What `understudy train loop` says to what it cannot use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.tasks.records import dump

from support import calc_task
from support.tiny_model import write_tokenizer

TWO = ["{model}", "-t", "{train}", "--groups", "2"]
CASES: dict[str, tuple[list[str], str]] = {
    "no tasks": (["{model}"], "missing option --tasks"),
    "no such model": (["{here}/nowhere", "-t", "{train}"], "there is no directory"),
    "no model in it": (["{here}", "-t", "{train}"], "config.json"),
    "no template": (["{bare}", "-t", "{train}"], "chat template"),
    "few tasks": (["{model}", "-t", "{train}", "--groups", "9"], "must not exceed the number of --tasks, 2"),
    "few groups": ([*TWO, "--min-groups", "3"], "must not exceed --groups (2)"),
    "groups that teach nothing": ([*TWO, "--min-groups", "1", "--no-dynamic-sampling"], "needs dynamic sampling"),
    "learned from what measures": ([*TWO, "-e", "{train}"], "is also a training task"),
    "the same under another name": ([*TWO, "-e", "{renamed}"], "is also a training task"),
    "no command": (["{model}", "-t", "{train}", "--agent", "shell"], "--agent-command"),
    "no address": (["{model}", "-t", "{train}", "--groups", "2", "--backend", "vllm"], "--base-url"),
    "no such server": (["{model}", "-t", "{train}", "--backend", "openai"], "unsupported for training"),
    "no such device": ([*TWO, "--device", "tpu"], "'cpu', 'cuda'"),
    "no such tracker": ([*TWO, "--track", "abacus"], "'abacus' is not supported"),
    "no adapter to publish": ([*TWO, "--publish", "lora"], "--lora"),
    "no such option": (["{model}", "-t", "{train}", "--advantage", "luck"], "luck"),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tmp_path = tmp_path_factory.mktemp("loop")
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


@pytest.fixture(scope="module")
def answers(places: dict[str, Path]) -> dict[str, tuple[int, str]]:
    """The exit code and the words of every case, all in one process: what a loop stands on is slow to import."""
    pytest.importorskip("torch")
    output = ["-o", str(places["here"] / "loop")]
    command_lines = {
        case: [word.format_map(places) for word in arguments] + output for case, (arguments, _) in CASES.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(command_lines),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PROGRAM = """
import contextlib, io, json, sys
from understudy.cli.main import main
answers = {}
for case, words in json.load(sys.stdin).items():
    sys.argv = ["understudy", "train", "loop", *words]
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
    answers[case] = (code, said.getvalue())
print(json.dumps(answers))
"""


@pytest.mark.parametrize("case", CASES)
def test_unusable_arguments_exit_2_with_a_message(case: str, answers: dict[str, tuple[int, str]]):
    code, output = answers[case]
    assert code == 2, output
    assert CASES[case][1] in output
    assert "Traceback" not in output
