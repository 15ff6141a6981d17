"""LLaMA-Factory itself loads what we write for it, and trains on it.

It wants an environment of its own, whose python UNDERSTUDY_LLAMAFACTORY_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from understudy.export.examples import Example
from understudy.export.formats import llamafactory as files
from understudy.export.formats import llamafactory_rows as rows
from understudy.export.formats.llamafactory_rows import TemplateRules, template_rules
from understudy.ingest.trace import TurnAction, tool_call
from understudy.preference.checks import Pair

PYTHON = os.environ.get("UNDERSTUDY_LLAMAFACTORY_PYTHON", "")
pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(not PYTHON, reason="UNDERSTUDY_LLAMAFACTORY_PYTHON names no python with LLaMA-Factory"),
]

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does.", "parameters": {"type": "object"}}}
    for name in ("Read", "Bash")
]

# The releases of torchvision and torchaudio are built for CUDA, and nothing here needs them.
SITE = "import sys\nsys.modules['torchvision'] = None\n"

MAKE = """
def made(place):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    known = dict(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known).save_pretrained(place)
    size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8192)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=272, **size, **heads)).save_pretrained(place)
"""

PROGRAM = """
import json, sys, yaml
place, tiny, *paths = sys.argv[1:]
made(tiny)
from llamafactory.cli import main
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer

def learned(labels):
    parts, part = [], []
    for label in [*labels, -100]:
        if label != -100:
            part.append(label)
        elif part:
            parts.append(tokenizer.decode(part))
            part = []
    return parts

def told(row):
    texts = {key.replace("input_ids", "text"): tokenizer.decode(row[key]) for key in row if "input_ids" in key}
    parts = {key.replace("labels", "learned"): learned(row[key]) for key in row if "labels" in key}
    return {**texts, **parts, "tag": row.get("kto_tags")}

found = {}
for path in paths:
    settings = yaml.safe_load(open(path)) | {"bf16": False, "use_cpu": True}
    model, data, training, finetuning, _ = get_train_args(settings)
    module = load_tokenizer(model)
    tokenizer = module["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data)
    stage = {"dpo": "rm"}.get(finetuning.stage, finetuning.stage)
    loaded = get_dataset(template, model, data, training, stage=stage, **module)
    found[path] = [told(row) for row in loaded["train_dataset"]]
json.dump(found, open(place + "/loaded.json", "w"))
for path in TRAINED:
    settings = ["bf16=false", "use_cpu=true", "max_steps=1", "gradient_accumulation_steps=1"]
    sys.argv = ["llamafactory-cli", "train", place + "/" + path + "/train.yaml", *settings]
    main()
"""


TRAINED = ("conversation", "pairs", "judged")


def run(directory: Path, *arguments: str) -> None:
    """Run LLaMA-Factory's python, without a network."""
    site = directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    (site / "torchaudio.py").write_text('"""Nothing here is about sound."""\n')
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "hf"),
        "PYTHONPATH": str(site),
        "DISABLE_VERSION_CHECK": "1",
    }
    quiet |= {"CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": str(directory / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, "-c", f"TRAINED = {TRAINED}\n{MAKE}{PROGRAM}", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **quiet},
        cwd=directory,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def answer(
    text: str | None, *calls: tuple[str, str, dict[str, Any]], thinking: str | None = None
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [tool_call(*call) for call in calls]
    return message


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


HARD = "look for </tool_call> and <think>\n in naïve ✓ <image>"
CONVERSATION = [
    {"role": "system", "content": "You work."},
    {"role": "user", "content": "Mend it."},
    answer("I look.", ("t1", "Read", {"path": "a.py"}), ("t2", "Bash", {"command": HARD}), thinking="Look first."),
    result("t1", "one <image>"),
    result("t2", "two"),
    {"role": "user", "content": "And quickly."},
    answer(None, ("t3", "Bash", {"command": "pytest"})),
    result("t3", "ok"),
    answer("Done."),
]


def called(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


FIRST = "I look.\n" + called("Read", {"path": "a.py"}) + "\n" + called("Bash", {"command": HARD})
SECOND = called("Bash", {"command": "pytest"})
END = "<|im_end|>\n"
THOUGHT = "<think>\nLook first.\n</think>\n\n"


def example(trained: tuple[int, ...], *, desirable: bool | None = None) -> Example:
    return Example(
        example_id="e1",
        origin="session",
        unit="conversation" if len(trained) > 1 else "turn",
        group="g",
        messages=CONVERSATION[: trained[-1] + 1],
        trained=trained,
        tools=TOOLS,
        desirable=desirable,
    )


def pair(chosen: TurnAction, rejected: TurnAction) -> Pair:
    return Pair(
        pair_id="p1",
        origin="replay",
        group="g",
        messages=CONVERSATION[:6],
        tools=TOOLS,
        chosen=chosen,
        rejected=rejected,
    )


LISTS = TurnAction(content="So.", tool_calls=[tool_call("x", "Bash", {"command": "ls"})])
SAYS = TurnAction(content="No.")
QWEN, BARE = template_rules("qwen3"), template_rules("qwen3_nothink")


def cases() -> dict[str, tuple[files.Stage, rows.Form, TemplateRules, bool, list[Any]]]:
    """Data sets by name: stage, form, template, whether only the last answer is learned, rows."""
    turns = [rows.sft(example((last,)), BARE, "sharegpt") for last in (2, 6, 8)]
    judged = [rows.kto(example((6,), desirable=good), QWEN, "sharegpt") for good in (True, False)]
    return {
        "conversation": ("sft", "sharegpt", QWEN, False, [rows.sft(example((2, 6, 8)), QWEN, "sharegpt")]),
        "turns": ("sft", "sharegpt", BARE, True, turns),
        "pairs": ("dpo", "sharegpt", QWEN, False, [rows.dpo(pair(LISTS, SAYS), QWEN, "sharegpt")]),
        "judged": ("kto", "sharegpt", QWEN, False, judged),
        "alpaca-sft": ("sft", "alpaca", BARE, True, [rows.sft(example((at,)), BARE, "alpaca") for at in (6, 2)]),
        "alpaca-dpo": ("dpo", "alpaca", BARE, False, [rows.dpo(pair(LISTS, SAYS), BARE, "alpaca")]),
        "alpaca-kto": ("kto", "alpaca", BARE, False, [rows.kto(example((6,), desirable=True), BARE, "alpaca")]),
    }


def written(directory: Path, model: Path, name: str) -> Path:
    """A data set, beside another's, and its config."""
    stage, form, template, masked, made = cases()[name]
    (directory / name).mkdir(parents=True)
    if not (directory / "dataset_info.json").exists():
        (directory / "dataset_info.json").write_text('{"other": {"hf_hub_url": "some/where"}}')
    (directory / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    files.merge_entries(directory, {name: files.dataset_entry(f"{name}/train.jsonl", form, stage)})
    config = directory / name / "train.yaml"
    config.write_text(
        files.training_config(
            stage=stage,
            model=str(model),
            template=template.name,
            finetuning="full",
            dataset_dir=directory,
            name=name,
            test=None,
            cutoff=4096,
            mask_history=masked,
            output=directory / name / "model",
        )
    )
    return config


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where LLaMA-Factory has loaded every data set, and trained on some, in one process: it starts slowly."""
    directory = tmp_path_factory.mktemp("data")
    tiny = directory / "tiny"
    run(directory, str(directory), str(tiny), *(str(written(directory, tiny, name)) for name in cases()))
    return directory


@pytest.fixture(scope="module")
def loaded(place: Path) -> dict[str, list[dict[str, Any]]]:
    """What LLaMA-Factory makes of each data set: the texts of its rows, and the parts that are learned."""
    rows_by_path = json.loads((place / "loaded.json").read_text())
    return {Path(path).parent.name: rows for path, rows in rows_by_path.items()}


def test_every_answer_of_a_conversation_is_learned_and_nothing_else(loaded: dict[str, list[dict[str, Any]]]):
    (row,) = loaded["conversation"]
    assert row["learned"] == [THOUGHT + FIRST + END, SECOND + END, "Done." + END]
    results = "<tool_response>\none <image>\n</tool_response>\n<tool_response>\ntwo"
    assert f"<|im_start|>user\n{results}\n\nAnd quickly.\n</tool_response><|im_end|>" in row["text"]
    assert row["text"].startswith("<|im_start|>system\nYou work.\n\n# Tools")
    assert '{"type": "function", "function": {"name": "Read"' in row["text"]


def test_of_a_turn_the_last_answer_alone_is_learned(loaded: dict[str, list[dict[str, Any]]]):
    rows = loaded["turns"]
    assert [row["learned"] for row in rows] == [[THOUGHT + FIRST + END], [SECOND + END], ["Done." + END]]
    assert THOUGHT not in rows[2]["text"] and FIRST in rows[2]["text"]


def test_pairs_have_one_prompt_and_two_answers(loaded: dict[str, list[dict[str, Any]]]):
    (row,) = loaded["pairs"]
    assert row["chosen_learned"] == ["So.\n" + called("Bash", {"command": "ls"}) + END]
    assert row["rejected_learned"] == ["No." + END]
    assert "And quickly." in row["chosen_text"] and "And quickly." in row["rejected_text"]


def test_good_and_bad_answers_keep_their_tag(loaded: dict[str, list[dict[str, Any]]]):
    tagged = [(row["tag"], row["learned"]) for row in loaded["judged"]]
    assert tagged == [(True, [SECOND + END]), (False, [SECOND + END])]


def test_the_alpaca_form_has_tool_calls_and_results_as_text(loaded: dict[str, list[dict[str, Any]]]):
    tool_call = '<tool_call>\n{"name":"Bash","arguments":{"command":"pytest"}}\n</tool_call>' + END
    later, first = loaded["alpaca-sft"]
    assert later["learned"] == [tool_call] and first["learned"][0].startswith(THOUGHT + "I look.\n<tool_call>")
    (judged,), (ranked,) = loaded["alpaca-kto"], loaded["alpaca-dpo"]
    assert (judged["tag"], judged["learned"]) == (True, [tool_call])
    assert ranked["rejected_learned"] == ["No." + END] and ranked["chosen_learned"][0].startswith(
        "So.\n<tool_call>"
    )
    for conversation in (later["text"], judged["text"], ranked["chosen_text"]):
        assert "<tool_response>\ntwo\n</tool_response>\nAnd quickly.<|im_end|>" in conversation
        assert conversation.startswith("<|im_start|>system\nYou work.\n\n# Tools")


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_with_the_config_that_is_written(place: Path, name: str):
    assert (place / name / "model" / "model.safetensors").is_file()
    assert json.loads((place / name / "model" / "train_results.json").read_text())["train_loss"] > 0
