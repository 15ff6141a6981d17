"""TRL itself loads what is exported for it, sees what was exported, and trains on it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from understudy import plugins
from understudy.export.base import traits_of
from understudy.export.corpus import Corpus, ExportSelection
from understudy.redact.redactor import Redactor
from understudy.store import Store

from support import optional
from support.export import put_rollouts, put_sessions, session

optional("pyarrow")

PROGRAM = Path(__file__).with_name("trl_program.py")

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed (the extra train)"),
]


EXPORTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "conversations": ("sft", "trl-sft", {}),
    "exact": ("sft", "trl-sft", {"exact": True}),
    "turns": ("sft", "trl-sft", {"unit": "turn"}),
    "tokens": ("tokens", "trl-tokens", {}),
    "pairs": ("dpo", "trl-dpo", {}),
    "judged": ("kto", "trl-kto", {}),
}
"""By name: the trainer, the format and its options."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the trainers made of each export, each after a step: in one process, for TRL takes long to start."""
    work = tmp_path_factory.mktemp("trl")
    put_sessions(work / "store", [session(f"s{n}", project=f"/srv/p{n}") for n in range(2)])
    put_rollouts(work / "store")
    with Store.open(work / "store", create=False) as store:
        for export, (_, name, options) in EXPORTS.items():
            function = plugins.load("exports", name)
            selection = ExportSelection(test_share=0.0, origins=traits_of(function).origins)
            function(Corpus(store, selection, Redactor(bytes(32))), work / export, **options)
    done = subprocess.run(
        [sys.executable, PROGRAM, work, *(f"{kind}={work / export}" for export, (kind, _, _) in EXPORTS.items())],
        capture_output=True,
        text=True,
        timeout=400,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(work),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((work / "told.json").read_text())


LOOK = '<think>Where is it?</think>I look.<tool_call>Bash<command>"ls -l"</command></tool_call><|im_end|>'
EDIT = '<tool_call>Edit<path>"a.py"</path><old>"x"</old><new>"y"</new></tool_call><|im_end|>'
DONE = "<think>All good.</think>Done ✓.<|im_end|>"
STOP = "Then I stop.<|im_end|>"


@pytest.mark.parametrize("name", EXPORTS)
def test_it_trains_on_every_export(told: dict[str, dict[str, Any]], name: str):
    report = told[name]
    assert report["steps"] == 1 and math.isfinite(report["loss"]) and report["moved"]


def test_sft_learns_the_assistants_messages(told: dict[str, dict[str, Any]]):
    assert told["conversations"]["rows"] == 8
    assert LOOK + STOP in told["conversations"]["learned"]


def test_sft_exact_learns_each_chosen_message_once(told: dict[str, dict[str, Any]]):
    assert told["exact"]["learned"].count(LOOK + STOP) == 2
    assert told["exact"]["learned"].count(EDIT + DONE) == 2


def test_sft_of_turns_learns_the_completion(told: dict[str, dict[str, Any]]):
    for each in (LOOK, EDIT, DONE, STOP):
        assert told["turns"]["learned"].count(each) == 2


def test_sft_takes_tokens_as_they_are(told: dict[str, dict[str, Any]]):
    rows = told["tokens"]["labels"]
    assert rows and all(
        [label for label in labels if label != -100] == [100, 101, 102, 110, 111] for labels in rows
    )


def test_dpo_has_the_better_and_the_worse_answer(told: dict[str, dict[str, Any]]):
    report = told["pairs"]
    assert report["chosen"] == ["Done.<|im_end|>"] and report["rejected"] == ["I give up 1.<|im_end|>"]


def test_kto_has_turns_and_labels(told: dict[str, dict[str, Any]]):
    report = told["judged"]
    assert report["completions"].count(EDIT) == 2 and report["completions"].count(STOP) == 2
    assert all(prompt.endswith("<|im_start|>assistant\n") for prompt in report["prompts"])
