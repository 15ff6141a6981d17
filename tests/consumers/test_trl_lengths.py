"""TRL prepares exports of sessions with Qwen's chat templates: tools, calls and lengths are as the card tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from understudy.cli.templates import chat_template
from understudy.export.base import ExportSummary
from understudy.export.corpus import Corpus, ExportSelection, Unit
from understudy.export.formats.trl import export_sft
from understudy.redact.redactor import Redactor
from understudy.store import Store

from support import optional
from support.claude_log import Log, read, thinking
from support.export import put_sessions, session

optional("pyarrow")

PROGRAM = Path(__file__).with_name("trl_lengths_program.py")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed (the extra train)"),
]


class Case(NamedTuple):
    """An export, the template of its tokenizer, and what the trainer learns of it.

    It is cut to so many tokens less than the longest row of the first export has, where `shorter` is not 0.
    """

    template: str
    loss: str
    unit: Unit
    exact: bool
    shorter: int


CASES = {
    "qwen2.5": Case("qwen2_5", "assistant", "conversation", False, 0),
    "qwen2.5-cut": Case("qwen2_5", "assistant", "conversation", True, 2500),
    "qwen3-turns": Case("qwen3", "all", "turn", False, 0),
    "qwen3-assistant": Case("qwen3_training", "assistant", "conversation", False, 0),
}


def write_tokenizer(directory: Path, template: str) -> Path:
    """A tokenizer whose tokens are bytes, with a template of Qwen's as TRL ships it."""
    spec = find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{template}.jinja"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = [AddedToken(token, normalized=False, special=True) for token in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(source.read_text())
    return directory


def longest(summary: ExportSummary) -> int:
    assert summary.lengths is not None
    return summary.lengths.longest


def claude_session() -> Any:
    """A session of Claude Code: its log has no tools, which come of its version, but for one of an MCP server."""
    log = Log("claude")
    log.user("Mend the test.")
    for number in range(12):
        name = "mcp__docs__lookup" if number == 5 else "Bash"
        answer_text = f"Step {number} ✓."
        log.assistant(
            f"m{number}", thinking("Hm."), answer_text, (f"t{number}", name, {"command": f"cat {number}"})
        )
        log.result(f"t{number}", f"{number}: " + "line of a file\n" * 40)
    log.assistant("last", "Done.", stop="end_turn")
    return read(log)[0]


@pytest.fixture(scope="module")
def read_back(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ExportSummary, list[Any], list[Any]]]:
    """For each case the summary, the rows, and what the trainer made of them; in one process, for TRL is slow."""
    work = tmp_path_factory.mktemp("trl")
    put_sessions(work / "store", [session("one"), claude_session()])
    arguments: list[str] = []
    summaries: dict[str, ExportSummary] = {}
    for name, case in CASES.items():
        directory = write_tokenizer(work / f"tokenizer-{name}", case.template)
        selection = ExportSelection(
            origins=("sessions",),
            test_share=0.0,
            cut_tokens=longest(summaries["qwen2.5"]) - case.shorter if case.shorter else None,
            tokenizer=directory.name,
        )
        with Store.open(work / "store", create=False) as store, chat_template(directory) as template:
            corpus = Corpus(store, selection, Redactor(bytes(32)), template=template)
            summaries[name] = export_sft(corpus, work / name, unit=case.unit, exact=case.exact)
        arguments.append(f"{directory}={case.loss}={work / name}")
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, PROGRAM, work, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env={"PATH": os.environ["PATH"], "HOME": str(work), **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import datasets

    datasets.disable_progress_bars()
    prepared = json.loads((work / "told.json").read_text())
    return {
        name: (
            summaries[name],
            list(datasets.load_dataset(str(work / name), split="train", cache_dir=str(work / "cache-rows"))),
            rows,
        )
        for name, rows in zip(CASES, prepared, strict=True)
    }


ReadBack = dict[str, tuple[ExportSummary, list[Any], list[Any]]]


@pytest.mark.parametrize("name", CASES)
def test_lengths_are_those_that_the_trainer_has(read_back: ReadBack, name: str):
    summary, _, prepared = read_back[name]
    lengths = sorted(length for _, length, _ in prepared)
    figures = summary.lengths
    assert figures is not None and figures.unit == "tokens"
    assert (figures.shortest, figures.longest, figures.total) == (lengths[0], lengths[-1], sum(lengths))
    assert sum(figures.histogram.values()) == len(prepared)
    assert CASES[name].shorter == 0 or lengths[-1] <= longest(read_back["qwen2.5"][0]) - CASES[name].shorter


@pytest.mark.parametrize("name", CASES)
def test_every_tool_that_is_called_is_rendered_in_the_list(read_back: ReadBack, name: str):
    _, rows, prepared = read_back[name]
    called_tools: set[str] = set()
    for row, (text, _, _) in zip(rows, prepared, strict=True):
        offered = {tool["function"]["name"] for tool in json.loads(row["tools"])}
        listed = text.split("<tools>\n")[1].split("\n</tools>")[0]
        assert {json.loads(line)["function"]["name"] for line in listed.splitlines()} == offered
        messages = row.get("messages") or row["prompt"] + row["completion"]
        called = [call for message in messages for call in message.get("tool_calls") or ()]
        assert {call["function"]["name"] for call in called} <= offered
        for call in called:
            assert f'{{"name": "{call["function"]["name"]}", "arguments": ' in text
        assert text.count("<tool_response>") == sum(message["role"] == "tool" for message in messages)
        called_tools |= {call["function"]["name"] for call in called}
    assert {"Bash", "Edit", "mcp__docs__lookup"} <= called_tools


def test_what_was_cut_still_teaches_each_answer_once(read_back: ReadBack):
    summary, _, prepared = read_back["qwen2.5-cut"]
    learned = "".join(text for _, _, text in prepared)
    assert [learned.count(f"Step {number} ✓.") for number in range(12)] == [1] * 12
    assert any("were cut at turns" in note for note in summary.notes), "the limit has to cut something"
