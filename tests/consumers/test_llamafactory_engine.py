"""`understudy train sft --engine llamafactory`: LLaMA-Factory itself trains on a store's rollouts."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.errors import ConfigError
from understudy.train.engines import llamafactory
from understudy.train.options import LoraOptions, SFTOptions

from support.export import put_rollouts
from support.tiny_model import make_model, write_tokenizer

pytestmark = pytest.mark.services

PYTHON = os.environ.get("UNDERSTUDY_LLAMAFACTORY_PYTHON", "")
needs_it = pytest.mark.skipif(not PYTHON, reason="UNDERSTUDY_LLAMAFACTORY_PYTHON names no python")

# The releases of torchvision and torchaudio are built for CUDA, and nothing here needs them.
SITE = "import sys\nsys.modules['torchvision'] = None\n"

OPTIONS = SFTOptions(learning_rate=1e-2, epochs=1, batch_rollouts=1, max_tokens=30_000, schedule="constant")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    put_rollouts(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    return make_model(tmp_path / "tiny")


@pytest.fixture
def cpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    (site / "torchaudio.py").write_text('"""Nothing here is about sound."""\n')
    for name, value in {
        "PYTHONPATH": str(site),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(tmp_path / "hf"),
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@needs_it
@pytest.mark.usefixtures("cpu_alone")
def test_a_stores_rollouts_become_a_model(store: Path, model: Path, tmp_path: Path):
    """By way of a LoRA, which has all that training whole has, and the merging."""
    progress: list[str] = []
    options = replace(OPTIONS, lora=LoraOptions(rank=4))
    trained = llamafactory.train(model, [store], tmp_path / "new", options, on_line=progress.append)
    assert trained.rows >= 1 and trained.steps >= 1 and trained.first_loss > 0, trained
    assert weights(tmp_path / "new") != weights(model) and progress
    config = json.loads((tmp_path / "new" / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert_whole(tmp_path / "new", model)
    with pytest.raises(ConfigError, match="not empty"):
        llamafactory.train(model, [store], tmp_path / "new", options)


def assert_whole(made: Path, model: Path) -> None:
    """A model's directory, with the tokenizer of the one before it."""
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (made / name).read_bytes() == (model / name).read_bytes()
    assert json.loads((made / "config.json").read_text())["model_type"] == "qwen3"
    assert (made / "training" / "train.yaml").is_file()


# --- without it --------------------------------------------------------------------------------------------


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model as far as can be told without loading it."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path / "bare"


WRITES = """
import json, pathlib, shutil, sys, yaml
order, config = sys.argv[1:]
asked = yaml.safe_load(open(config))
assert order == "train" and asked["finetuning_type"] == "full" and asked["do_train"], asked
made, model = pathlib.Path(asked["output_dir"]), pathlib.Path(asked["model_name_or_path"])
(made / "checkpoint-2").mkdir(parents=True)
config = json.loads((model / "config.json").read_text())
(made / "config.json").write_text(json.dumps({**config, "use_cache": False}))
(made / "model.safetensors").write_text("new weights")
(made / "tokenizer.json").write_text("written anew")
(made / "trainer_log.jsonl").write_text("".join(
    json.dumps({"current_steps": step, "loss": 1 / step}) + "\\n" for step in (1, 2)))
print("trained")
"""
"""What LLaMA-Factory leaves of a training of all weights; test_llamafactory.py has the real one train so."""


def test_all_weights_become_a_model(store: Path, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(llamafactory.PYTHON, raising=False)
    executable = program(tmp_path / "bin" / "llamafactory-cli", WRITES)
    monkeypatch.setenv("PATH", f"{executable.parent}:{os.environ['PATH']}")
    write_tokenizer(bare)
    progress: list[str] = []
    trained = llamafactory.train(bare, [store], tmp_path / "new", OPTIONS, on_line=progress.append)
    assert (trained.rows, trained.steps, trained.first_loss, trained.last_loss) == (2, 2, 1.0, 0.5)
    assert (tmp_path / "new" / "model.safetensors").read_text() == "new weights" and progress == ["trained"]
    assert_whole(tmp_path / "new", bare)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["use_cache"] is True
    assert not list((tmp_path / "new").rglob("checkpoint-*"))


def test_where_it_is_not_installed_it_says_how(
    store: Path, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(llamafactory.PYTHON, raising=False)
    with pytest.raises(ConfigError, match="pip install llamafactory"):
        llamafactory.train(bare, [store], tmp_path / "new", OPTIONS)
    monkeypatch.setenv(llamafactory.PYTHON, str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="not an executable program"):
        llamafactory.train(bare, [store], tmp_path / "new", OPTIONS)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("print('CUDA out of memory. Tried'); raise SystemExit(1)", "lower --max-tokens"),
        ("print('its last words'); raise SystemExit(3)", "exit code 3.*its last words"),
        ("pass", "wrote no weights"),
    ],
)
def test_its_failures_are_told(
    body: str, says: str, store: Path, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(llamafactory.PYTHON, raising=False)
    executable = program(
        tmp_path / "bin" / "llamafactory-cli", f"import os\nos.makedirs({str(tmp_path / 'made')!r})\n{body}"
    )
    monkeypatch.setenv("PATH", f"{executable.parent}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        llamafactory.train(bare, [store], tmp_path / "new", OPTIONS)
    assert not (tmp_path / "new" / "config.json").exists()
    config_lines = (tmp_path / "new" / "training" / "train.yaml").read_text().splitlines()
    assert (
        "learning_rate: 1.00000000e-02" in config_lines and "use_cpu: true" in config_lines
    ) or llamafactory._has_gpu()
    assert not [line for line in config_lines if line.startswith("warmup_ratio")]
    with pytest.raises(ConfigError, match="unfinished training"):
        llamafactory.train(bare, [store], tmp_path / "new", OPTIONS)


def test_a_model_whose_template_is_not_known_is_refused(
    store: Path, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(llamafactory.PYTHON, sys.executable)
    (bare / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="'mamba'"):
        llamafactory.train(bare, [store], tmp_path / "new", OPTIONS)
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read"):
        llamafactory.train(tmp_path, [store], tmp_path / "new", OPTIONS)
