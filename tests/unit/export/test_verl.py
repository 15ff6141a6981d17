"""verl's Parquet: what the rows hold; and verl's own data sets read them, where there is a verl.

UNDERSTUDY_VERL_PYTHON names a python that has verl.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError
from understudy.export.base import ExportSummary
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.formats.verl import COLUMNS, Form, export
from understudy.export.parquet import ExportParquetWriter
from understudy.ingest.trace import RequestShape
from understudy.redact.redactor import Redactor
from understudy.store import Store

from support.export import Log, put_rollouts, put_sessions, session

pyarrow: Any = pytest.importorskip("pyarrow.parquet")

PYTHON = os.environ.get("UNDERSTUDY_VERL_PYTHON", "")

MAKE = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
raw = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
raw.decoder = decoders.ByteLevel()
raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
tokenizer.chat_template = sys.argv[1]
"""

SFT = """
import importlib.util, json
spec = importlib.util.spec_from_file_location("loader", sys.argv[2] + "/verl_loader.py")
loader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loader)
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
config = {"max_length": 8192, "pad_mode": "no_padding"}
told = {}
for name, kind in {"ours": loader.Conversations, "theirs": MultiTurnSFTDataset}.items():
    rows = kind([sys.argv[2] + "/train.parquet"], tokenizer, config)
    told[name] = [
        [tokenizer.decode(row["input_ids"]), tokenizer.decode(row["input_ids"][row["loss_mask"].bool()])]
        for row in (rows[at] for at in range(len(rows)))
    ]
print("TOLD" + json.dumps(told))
"""

RL = """
import json
from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset
config = OmegaConf.create({"cache_dir": sys.argv[2] + "/cache", "filter_overlong_prompts_workers": 1})
rows = RLHFDataset(sys.argv[2] + "/train.parquet", tokenizer, config)
found = [dict(rows[at]) for at in range(len(rows))]
print("TOLD" + json.dumps([{k: v for k, v in row.items() if k != "dummy_tensor"} for row in found]))
"""

TEMPLATE = """\
{%- if tools %}<|im_start|>tools{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}<call>{{ call.function | tojson }}</call>
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def written(directory: Path, output: Path, form: Form, **chosen: Any) -> ExportSummary:
    with Store.open(directory, create=False) as store:
        return export(
            Corpus(store, ExportSelection(test_share=0.0, **chosen), Redactor(bytes(32))), output, form=form
        )


def rows(output: Path) -> list[dict[str, Any]]:
    return pyarrow.read_table(output / "train.parquet").to_pylist()


def verl(script: str, output: Path) -> Any:
    done = subprocess.run(
        [PYTHON, "-c", MAKE + script, TEMPLATE, str(output)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(output / "hf")},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.partition("TOLD")[2])


def test_sft_rows_have_messages_tools_and_trained_ranges(tmp_path: Path):
    put_sessions(tmp_path / "store", [session("s")])
    summary = written(tmp_path / "store", tmp_path / "out", "sft", origins=("sessions",))
    assert "verl_loader.py" in summary.files
    branch, main = rows(tmp_path / "out")
    assert branch["trained"] == [2, 5] and main["trained"] == [4, 6]
    call = main["messages"][4]["tool_calls"][0]
    assert call["function"] == {"name": "Edit", "arguments": '{"path":"a.py","old":"x","new":"y"}'}
    tool = main["tools"][1]["function"]
    assert (tool["name"], json.loads(tool["parameters"])["type"]) == ("Edit", "object")
    assert main["messages"][6]["reasoning_content"] == "All good."


def test_rl_rows_have_the_ground_truth_that_grades_the_task(tmp_path: Path):
    put_rollouts(tmp_path / "store", tasks=2, samples=2)
    summary = written(tmp_path / "store", tmp_path / "out", "rl", solved_only=True)
    assert summary.rows == 2 and summary.origins == {"rollout": 4}
    first, second = rows(tmp_path / "out")
    assert list(first) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert [message["role"] for message in first["prompt"]] == ["user"]
    assert json.loads(first["reward_model"]["ground_truth"]) == {
        "instance_id": "calc-0",
        "fail_to_pass": ["test_calc.py::test_shift"],
        "pass_to_pass": ["test_calc.py::test_same"],
    }
    assert "return 1" not in first["prompt"][0]["content"] and "diff" not in json.dumps(first)
    assert (second["extra_info"]["index"], second["extra_info"]["solve_rate"]) == (1, 0.5)


def test_rollouts_are_the_tokens_that_were_sampled(tmp_path: Path):
    put_rollouts(tmp_path / "store", tasks=1, samples=2)
    written(tmp_path / "store", tmp_path / "out", "tokens")
    good, bad = rows(tmp_path / "out")
    assert good["prompts"] == list(range(20))
    assert good["responses"] == [100, 101, 102, 5, 6, 7, 110, 111]
    assert good["response_mask"] == [1, 1, 1, 0, 0, 0, 1, 1]
    assert good["rollout_log_probs"] == [-0.25] * 3 + [0.0] * 3 + [-0.25] * 2
    assert (good["reward"], bad["reward"], good["uid"], good["policy_version"]) == (1.0, 0.0, "calc-0", "3")


def test_half_of_a_pair_of_surrogates_does_not_end_an_export(tmp_path: Path):
    file = ExportParquetWriter(tmp_path / "x.parquet", COLUMNS["rl"])
    file.write({"data_source": "a\ud800b", "prompt": [{"role": "user", "content": "\udfff"}]})
    file.close()
    (row,) = pyarrow.read_table(tmp_path / "x.parquet").to_pylist()
    assert (row["data_source"], row["prompt"][0]["content"]) == ("a?b", "?")


def test_an_rl_export_without_rollouts_is_an_error(tmp_path: Path):
    put_sessions(tmp_path / "store", [session("s")])
    with pytest.raises(ConfigError, match=r"nothing (to export|can be exported)"):
        written(tmp_path / "store", tmp_path / "out", "rl")


@pytest.mark.skipif(not PYTHON, reason="UNDERSTUDY_VERL_PYTHON names no python with verl")
def test_verl_learns_the_chosen_answers_with_arguments_as_objects(tmp_path: Path):
    bare = Log("bare", shape=RequestShape("You talk.", None))
    bare.answer(bare.user(-1, "Hello."), "Hello ✓.")
    put_sessions(tmp_path / "store", [session("s"), bare.trace])
    written(tmp_path / "store", tmp_path / "out", "sft", origins=("sessions",))
    datasets = verl(SFT, tmp_path / "out")
    learned = [row[1] for row in datasets["ours"]]
    look = 'I look.<call>{"name": "Bash", "arguments": {"command": "ls -l"}}</call>'
    edit = '<call>{"name": "Edit", "arguments": {"path": "a.py", "old": "x", "new": "y"}}</call>'
    end = "<|im_end|>\n"
    assert sorted(learned) == sorted(
        [look + end + "Then I stop." + end, edit + end + "Done ✓." + end, "Hello ✓." + end]
    )
    assert not any("null" in row[0] or "None" in row[0] for row in datasets["ours"])
    assert '"command": {"type": "string"}' in datasets["ours"][0][0]
    # verl's own class reads the same rows; it learns every answer, arguments as text.
    assert len(datasets["theirs"]) == 3 and any(row[1].count(end) == 3 for row in datasets["theirs"])


@pytest.mark.skipif(not PYTHON, reason="UNDERSTUDY_VERL_PYTHON names no python with verl")
def test_verl_reads_the_tasks(tmp_path: Path):
    put_rollouts(tmp_path / "store", tasks=2, samples=1)
    written(tmp_path / "store", tmp_path / "out", "rl")
    first, second = verl(RL, tmp_path / "out")
    assert first["raw_prompt"][0]["role"] == "user" and (first["index"], second["index"]) == (0, 1)
    assert first["reward_model"]["style"] == "rule" and first["data_source"] == "example/calc"
