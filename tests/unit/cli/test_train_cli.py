"""`understudy train` as a person has it: options, files of options, what it says, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.cli.commands.train import refuse_options_for_exports
from understudy.cli.options import from_options
from understudy.errors import ConfigError
from understudy.train.metrics import MetricsWriter, parse_trackers, read_metrics
from understudy.train.options import GRPOOptions, LoraOptions, SFTOptions
from understudy.train.weights import lock_output

from support import optional, understudy
from support.export import put_rollouts
from support.tiny_model import make_model
from support.train import put_training_run

optional("torch")

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
FACTORY = ("--engine", "llamafactory")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("train")
    make_model(directory / "model")
    put_training_run(directory / "run", directory / "model", sampling={"temperature": 1.0})
    put_training_run(directory / "without", directory / "model", logprobs=None)
    return directory


@pytest.mark.services  # two trainings again
def test_sft_trains_from_the_model_that_grpo_wrote(place: Path, tmp_path: Path):
    common = ("--track", "none", "--learning-rate", "0.01")
    completed = understudy(
        *("train", "grpo", str(place / "model"), "--from", str(place / "run"), "-o", str(tmp_path / "one")),
        *(*common, "--groups-per-update", "1", "--json"),
        env=ONE_THREAD,
    )
    assert completed.returncode == 0, completed.stderr
    summary = json.loads(completed.stdout)
    assert (summary["groups"], summary["updates"], summary["updated"]) == (2, 2, 2) and summary["skipped"] == {}
    assert [line["step"] for line in read_metrics(tmp_path / "one" / "training" / "metrics.jsonl")] == [1, 2]
    again = understudy(
        *("train", "sft", str(tmp_path / "one"), "--from", str(place / "run"), "-o", str(tmp_path / "two")),
        *common,
        env=ONE_THREAD,
    )
    assert again.returncode == 0, again.stderr
    assert "4 sequences" in again.stdout and "left out: 4 rollouts with a reward below 1" in again.stderr
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "two" / name).read_bytes() == (place / "model" / name).read_bytes()


@pytest.mark.services  # two trainings, 13 s of CPU; what they learn is tested without the command
def test_grpo_of_an_adapter_and_dpo(place: Path, tmp_path: Path):
    model, run = str(place / "model"), str(place / "run")
    adapted = understudy(
        *("train", "grpo", model, "--from", run, "-o", str(tmp_path / "adapted"), "--lora", "--lora-rank", "4"),
        *("--gradient-checkpointing", "--kl-coefficient", "0.1", "--track", "none"),
        env=ONE_THREAD,
    )
    assert adapted.returncode == 0, adapted.stderr
    assert "1 of 1 updates over 2 groups" in adapted.stdout
    assert (tmp_path / "adapted" / "adapter" / "adapter_config.json").is_file()
    preferred = understudy(
        *("train", "dpo", str(tmp_path / "adapted"), "--from", run, "-o", str(tmp_path / "preferred"), "--json"),
        *("--track", "none"),
        env=ONE_THREAD,
    )
    assert preferred.returncode == 0, preferred.stderr
    assert json.loads(preferred.stdout)["rows"] >= 2
    assert not (tmp_path / "preferred" / "adapter").exists()


def test_unusable_training_inputs_are_refused_before_torch_is_imported(place: Path, tmp_path: Path):
    put_rollouts(tmp_path / "foreign", tokens=False)
    for arguments, expected in (
        (("grpo", place / "model", "--from", place / "without"), "expected token ids and logprobs"),
        (("sft", place / "model", "--from", tmp_path / "foreign"), "no solved rollouts to learn from"),
        (("sft", tmp_path, "--from", place / "run"), "no config.json"),
        (("sft", place / "model", "--from", place / "run", "--track", "x"), "'x' is not supported"),
        (("sft", place / "model", "--from", place / "run", "--engine", "axolotl"), "'axolotl' is not one of"),
        (
            ("sft", place / "model", "--from", place / "run", *FACTORY, "--resume"),
            "--resume: unsupported with --engine llamafactory",
        ),
        (
            ("sft", place / "model", "--from", place / "run", *FACTORY, "--threshold", "0.5"),
            "--threshold: unsupported with",
        ),
        (
            ("sft", place / "model", "--from", place / "run", *FACTORY, "--micro-batch-tokens", "9"),
            "--micro-batch-tokens: unsupported with",
        ),
        (("grpo", place / "model", "--from", place / "run", "--temperature", "0.7"), "give --temperature 1"),
        (("sft", place / "model", "--from", place / "run", "--learning-rate", "-1"), "sft.learning_rate|above 0"),
    ):
        done = understudy("train", *map(str, arguments), "-o", str(tmp_path / "out"))
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert any(part in done.stderr for part in expected.split("|")), done.stderr


def test_command_line_options_override_the_training_config_file(tmp_path: Path):
    config = tmp_path / "train.toml"
    config.write_text("[grpo]\nlearning_rate = 0.5\nloss = 'gspo'\n[grpo.lora]\nrank = 4\n[sft]\nepochs = 7\n")
    options = from_options(GRPOOptions, {"learning_rate": 0.25, "lora_alpha": 8.0, "config": config})
    assert options == GRPOOptions(learning_rate=0.25, loss="gspo", lora=LoraOptions(rank=4, alpha=8.0))
    assert from_options(GRPOOptions, {"lora": False, "config": config}).lora is None
    assert from_options(SFTOptions, {"config": config}) == SFTOptions(epochs=7)
    modules = from_options(SFTOptions, {"lora_modules": "q_proj, v_proj"}).lora
    assert modules == LoraOptions(modules=("q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[sft]\nepoch = 3\n", "epoch"),
        ("[sft]\nepochs = 'many'\n", "epochs"),
        ("sft = 3\n", "expected a table"),
        ("[sft\n", "invalid TOML"),
        ("[sft]\nepochs = 0\n", "epochs"),
        ("[grpo]\nepochs = 2\n", r"no table \[sft\], expected at least one, got grpo"),
        ("epochs = 2\n", r"no table \[sft\], expected at least one, got epochs"),
        ("", r"no table \[sft\], expected at least one, got nothing"),
    ],
)
def test_an_invalid_training_config_file_is_refused(tmp_path: Path, content: str, expected: str):
    (tmp_path / "train.toml").write_text(content)
    with pytest.raises(ConfigError, match=expected):
        from_options(SFTOptions, {"config": tmp_path / "train.toml"})


def test_an_existing_training_output_is_not_overwritten(tmp_path: Path):
    output = tmp_path / "out"

    def claimed(**options: bool) -> None:
        with lock_output(output, **({"resume": False} | options)):
            pass

    claimed()
    claimed()  # nothing was written
    (output / "training" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="--resume"):
        claimed()
    claimed(resume=True)
    (output / "config.json").touch()
    with pytest.raises(ConfigError, match="already holds a model"):
        claimed(resume=True)
    (output / "training").rename(tmp_path / "training")
    with pytest.raises(ConfigError, match="not written by training"):
        claimed(overwrite=True)
    (tmp_path / "training").rename(output / "training")
    claimed(overwrite=True)
    assert [path.name for path in output.rglob("*")] == ["training", ".lock"]
    (output / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="so nothing in it is overwritten"):
        claimed(overwrite=True)
    assert (output / "thesis.tex").exists()


def test_two_trainings_do_not_write_to_one_directory(tmp_path: Path):
    with lock_output(tmp_path / "out", resume=False):
        (tmp_path / "out" / "training" / "metrics.jsonl").touch()
        for options in ({"resume": False}, {"resume": True}, {"resume": False, "overwrite": True}):
            with (
                pytest.raises(ConfigError, match="another training is writing"),
                lock_output(tmp_path / "out", **options),
            ):
                pass
        assert (tmp_path / "out" / "training" / "metrics.jsonl").exists()
    with lock_output(tmp_path / "out", resume=True):
        pass


def test_an_output_that_is_a_training_input_is_refused(tmp_path: Path):
    model = tmp_path / "model"
    (model / "training").mkdir(parents=True)
    (model / "config.json").touch()
    linked = tmp_path / "linked"
    linked.symlink_to(model)
    for each in (model, linked, model / "training" / "checkpoint"):
        inputs = [tmp_path / "run", each]
        with (
            pytest.raises(ConfigError, match="which this training reads; choose another"),
            lock_output(model, resume=False, overwrite=True, needed=inputs),
        ):
            pass
    assert (model / "config.json").exists()
    with lock_output(tmp_path / "other", resume=False, overwrite=True, needed=[model]):
        pass


def test_a_training_killed_while_moving_its_final_model_can_be_resumed(tmp_path: Path):
    output = tmp_path / "out"
    (output / "training" / "final").mkdir(parents=True)
    (output / "training" / "final" / "config.json").touch()
    (output / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="--resume"), lock_output(output, resume=False):
        pass
    with lock_output(output, resume=True):
        assert (output / "model.safetensors").exists()
    with lock_output(output, resume=False, overwrite=True):
        assert not (output / "model.safetensors").exists() and not (output / "training" / "final").exists()


def test_options_that_choose_rollouts_are_refused_of_an_export(tmp_path: Path):
    (tmp_path / "understudy.json").write_text('{"format": "trl-tokens"}')
    refuse_options_for_exports(
        [tmp_path / "run", tmp_path], {"--run": None, "--roles": None, "--include-suspicious": False}
    )
    with pytest.raises(ConfigError, match="--roles selects rollouts"):
        refuse_options_for_exports([tmp_path / "run", tmp_path], {"--run": None, "--roles": "main"})
    refuse_options_for_exports([tmp_path / "run"], {"--run": "one"})


def test_resumed_metrics_continue_from_the_resumed_step(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        for step in range(1, 5):
            metrics.write(step, {"loss": float(step), "skipped": {"a b": step}})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    with MetricsWriter(tmp_path, start=3) as metrics:
        metrics.write(3, {"loss": float("nan")})
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[2]["loss"] is None


def test_tensorboard_records_the_numeric_metrics(tmp_path: Path):
    pytest.importorskip("tensorboard")
    with MetricsWriter(tmp_path, ("tensorboard",), name="named") as metrics:
        metrics.write(1, {"loss": 0.5, "version": "v1", "skipped": {"why": 2}})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "named"))
    events.Reload()
    assert {"loss", "skipped/why"} <= set(events.Tags()["scalars"])


def test_trackers_do_not_initialise_the_accelerator_state(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with MetricsWriter(tmp_path, ("tensorboard",)) as metrics:
        metrics.write(1, {"loss": 0.5})
        assert AcceleratorState._shared_state == {}


def test_auto_trackers_include_no_unconfigured_remote_ones(monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    assert set(parse_trackers("auto")) <= {"tensorboard"}
    assert parse_trackers("none") == ()
