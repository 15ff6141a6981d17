"""The options of commands that are made from settings: what a file adds, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.cli.commands.run import RunSettings, run_config_of
from understudy.cli.options import from_options
from understudy.errors import ConfigError

from support import understudy


def test_a_config_file_sets_run_options_that_the_command_line_overrides(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[models.high]\nbackend = "anthropic"\n[run]\nsamples = 3\nmax_turns = 5\ntasks = ["smoke"]\n')
    settings = from_options(RunSettings, {"config": file, "samples": 4})
    assert (settings.samples, settings.agent.max_turns, settings.task.tasks) == (4, 5, ("smoke",))
    config = run_config_of(settings, settings.agent.only_agent)
    assert (config.samples, config.max_turns, config.backend) == (4, 5, "anthropic")


def test_a_file_without_models_leaves_the_backend_to_the_options(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[run]\nbackend = "vllm"\nbackend_model_high = "big"\n[grpo]\nseed = 1\n')
    config = run_config_of(from_options(RunSettings, {"config": file}), "shell")
    assert (config.backend, config.gateway.models.high.model) == ("vllm", "big")
    config = run_config_of(
        from_options(RunSettings, {"config": file, "backend": "embedded", "backend_model_high": ""}), "shell"
    )
    assert config.policy == "oracle"


def test_models_in_a_file_and_a_backend_contradict_each_other(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[models.high]\nbackend = "anthropic"\n')
    with pytest.raises(ConfigError, match=r"configures the models.*the backend vllm; give either"):
        run_config_of(from_options(RunSettings, {"config": file, "backend": "vllm"}), "shell")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[run]\nsample = 3\n", "unknown key 'sample'; did you mean 'samples'?"),
        ("[run]\nsamples = 0\n", "[run] samples: expected `int` >= 1"),
        ("run = 3\n", "run: expected a table"),
        ("[run\n", "invalid TOML"),
    ],
)
def test_an_invalid_config_file_is_refused_with_the_location(tmp_path: Path, content: str, message: str):
    (tmp_path / "run.toml").write_text(content)
    done = understudy("run", "--config", tmp_path / "run.toml", "--tasks", "smoke")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--samples", "0"), "greater than or equal to 1"), (("--run-method", "magic"), "'cli', 'python'")],
)
def test_command_line_options_out_of_bounds_or_choices_are_refused(options: tuple[str, ...], message: str):
    done = understudy("run", "--tasks", "smoke", *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_help_of_an_option_has_its_default():
    help_text = " ".join(understudy("run", "--help", env={"COLUMNS": "200"}).stdout.split())
    assert "Maximum number of turns of an agent. [default: 30]" in help_text
    assert "first Ctrl-C or SIGTERM. [default: 300.0]" in help_text
