"""SkyRL and slime take our rollouts: in their own types, by their own checks.

Each wants an environment with its package (its Python files are enough) and Understudy in it, whose python a
variable names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.tiny_model import write_tokenizer

pytestmark = pytest.mark.services

PROGRAM = Path(__file__).with_name("rl_engine_rollouts.py")


def rollouts_in(engine: str, directory: Path, tasks: Path) -> dict[str, Any]:
    """What the program reports of rollouts in an engine's environment; skips where there is none."""
    variable = f"UNDERSTUDY_{engine.upper()}_PYTHON"
    python = os.environ.get(variable, "")
    if not python:
        pytest.skip(f"{variable} names no python with {engine}")
    model = directory / "model"
    model.mkdir()
    write_tokenizer(model)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    instance = json.loads(tasks.read_text().splitlines()[0])["instance_id"]
    result = directory / "found"
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, PROGRAM, engine, model, tasks, directory / "runs", instance, result],
        capture_output=True,
        text=True,
        env={**os.environ, **quiet, "OMP_NUM_THREADS": "1"},
        cwd=directory,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(result.read_text())


@pytest.mark.usefixtures("isolation")
def test_skyrl_takes_a_rollouts_sequences_as_the_steps_of_a_trajectory(tmp_path: Path, calc_tasks: Path):
    report = rollouts_in("skyrl", tmp_path, calc_tasks)
    instance = report["trajectories"][0].removesuffix("_0")
    # Two sequences a rollout, side by side, and one row outside the loss for the task that does not exist.
    assert report["trajectories"] == [f"{instance}_0"] * 2 + [f"{instance}_1"] * 2 + ["no-such-task_0"]
    assert report["last"] == [False, True, False, True, True] and report["merged"] == 5
    assert report["rewards"] == [0.0] * 5
    assert report["masks"][:4] == report["responses"][:4] and report["masks"][4] == 0
    assert all(set(each) == {-0.5} for each in report["logprobs"][:4])
    # What SkyRL says of sampling holds, whatever the agent asks for; a rollout's requests are one session.
    expected = {"temperature": 0.7, "max_tokens": 50, "logprobs": 1, "prompts": 1}
    assert report["asked"] == [expected] * 4
    assert report["sessions"] == 2 and report["finished"] == 3
    assert report["refused"].startswith("BackendError: all 2 prompts")


@pytest.mark.usefixtures("isolation")
def test_slime_takes_a_rollouts_sequences_as_samples_of_one_rollout(tmp_path: Path, calc_tasks: Path):
    report = rollouts_in("slime", tmp_path, calc_tasks)
    first, second = report["samples"]
    for each in (first, second):
        assert each["status"] == "completed" and each["reward"] == 0.0 and each["rollout_id"] == 0
        assert each["loss_mask"] == [1] * each["response_length"] and each["tokens"] > each["response_length"]
        assert each["rollout_log_probs"] == [-0.5] * each["response_length"]
    assert report["evaluated"] == 0.0
    assert report["absent"] == ["aborted", True, [0]]
    assert report["aborted"] == ["aborted", "slime aborted its requests"]
    parameters = {"temperature": 0.7, "max_new_tokens": 50, "skip_special_tokens": False, "no_stop_trim": True}
    assert report["asked"] == [parameters] * 4
    # A rollout of two samples counts once: the mean is 1/2. The one that was left out counts in no mean.
    assert report["raw"] == [0.0, 0.0, 1.0, 0.0] and report["advantages"] == [-0.5, -0.5, 0.5, 0.0]
    assert report["refused"].startswith("ConfigError") and "instance_id" in report["refused"]
