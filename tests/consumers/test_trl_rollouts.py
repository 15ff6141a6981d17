"""TRL's own GRPOTrainer trains on our rollouts: exact tokens of an agent in a sandbox, by its present weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.errors import BackendError, ConfigError
from understudy.model.directory import TINY, directory_of
from understudy.run.collector import RolloutSettings
from understudy.store import Store
from understudy.train.engines.trl import OTHER_SEQUENCES, TRLRollouts, graded_reward
from understudy.train.groups import groups_from_store
from understudy.train.loop.runtime import LoopRuntime
from understudy.train.tiny.corpus import SYSTEM_PROMPT, TOOLS

from fakes.loop_program import quick_task
from fakes.policy import AGENT
from support import understudy
from support.tiny_model import make_model

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # of TRL and transformers about their own experiments and old names
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed (the extra train)"),
]

TASKS = [quick_task(0), quick_task(1)]
# A random model's answers are noise: what they add up to decides whether the agent mends the task.
COIN = AGENT.replace('"yes" in answer', "sum(answer.encode()) % 2")
FAILS_AT_TASK_1 = COIN.replace("held =", 'if "return x + 2" in instruction: sys.exit("broken")\nheld =')


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def rollouts(tmp_path: Path, model: Path) -> Iterator[TRLRollouts]:
    agent = tmp_path / "agent.py"
    agent.write_text(COIN)
    with TRLRollouts(
        model,
        TASKS,
        tmp_path / "runs",
        settings=RolloutSettings(agent="shell", agent_options={"command": f"python3 {agent}"}),
        runtime=LoopRuntime(concurrency=2),
        sandbox="unsafe-local",
    ) as rollout_source:
        yield rollout_source


def trainer_of(model: Path, rollouts: TRLRollouts, output: Path, reward: Any, **options: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    class Private(GRPOTrainer):
        def _send_telemetry(self) -> None:
            """A test reports nothing to TRL's authors."""

    defaults = {
        "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 1e-2,
        "beta": 0.0, "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False,
        "activation_checkpointing": False, "logging_steps": 1,
    }  # fmt: skip
    return Private(
        model=str(model),
        args=GRPOConfig(str(output), **(defaults | options)),
        train_dataset=rollouts.dataset(),
        rollout_func=rollouts,
        reward_funcs=reward,
    )


def test_two_steps_on_exact_tokens_of_the_present_weights(tmp_path: Path, model: Path, rollouts: TRLRollouts):
    import torch

    steps: list[dict[str, Any]] = []

    def reward(
        completion_ids: list[list[int]], reward: list[float], rollout_id: list[str], prompts: list[str], **_: Any
    ) -> list[float | None]:
        """Compares what TRL has with the store, and the logprobs with those of the weights that TRL has now."""
        wave = sorted((tmp_path / "runs").glob("wave-*"))[-1]
        with Store.open(wave, create=False) as store:
            stored = {one.rollout_id: one for group in groups_from_store(store) for one in group.rollouts}
        gap = 0.0
        for ids, earned, name, task in zip(completion_ids, reward, rollout_id, prompts, strict=True):
            (sequence,) = stored[name].sequences
            first = sequence.loss_mask.index(1)
            assert ids == list(sequence.token_ids[first:]) and earned == stored[name].reward
            assert stored[name].task_id == task
            assert sequence.logprobs is not None
            tokens = torch.tensor([sequence.token_ids])
            with torch.no_grad():
                scores = trainer.model(tokens).logits[0].float().log_softmax(-1)
            at = torch.arange(first - 1, len(sequence.token_ids) - 1)
            own = scores[at, tokens[0, first:]]
            gap = max(gap, float((own - torch.tensor(sequence.logprobs[first:])).abs().max()))
        versions = {
            version for one in stored.values() for each in one.sequences for version in each.policy_versions
        }
        steps.append({"gap": gap, "versions": versions, "rewards": reward})
        return graded_reward(reward)

    trainer = trainer_of(model, rollouts, tmp_path / "output", reward)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert [each["versions"] for each in steps] == [{"step-0000"}, {"step-0001"}]
    assert all(len(each["rewards"]) == 8 for each in steps)
    assert {one for each in steps for one in each["rewards"]} == {0.0, 1.0}
    assert max(each["gap"] for each in steps) < 1e-3
    assert any(not torch.equal(before[name], value) for name, value in trainer.model.named_parameters())
    assert rollouts.left_out[OTHER_SEQUENCES] == 0
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["reward"] for entry in logged] == [pytest.approx(sum(each["rewards"]) / 8) for each in steps]


def test_a_rollout_that_failed_has_no_reward_and_is_not_learned(
    tmp_path: Path, model: Path, rollouts: TRLRollouts
):
    (tmp_path / "agent.py").write_text(FAILS_AT_TASK_1)
    trainer = trainer_of(model, rollouts, tmp_path / "output", graded_reward, max_steps=1)
    names = [task.instance_id for task in TASKS]
    made = rollouts([names[0], names[1], names[0]], trainer)
    assert made["reward"][1] is None and made["rollout_id"][1] == ""
    assert (made["env_mask"][1], len(made["completion_ids"][1]), made["logprobs"][1]) == ([0], 1, [0.0])
    assert all(made["reward"][at] in (0.0, 1.0) and sum(made["env_mask"][at]) > 0 for at in (0, 2))
    assert made["rollout_id"][0] != made["rollout_id"][2]
    with pytest.raises(
        BackendError, match=r"none of the 1 rollouts of step 0 can be learned from, .*: .* without a verdict"
    ):
        rollouts([names[1]], trainer)
    trainer.rollout_func = lambda prompts, _: {key: (values * 3)[: len(prompts)] for key, values in made.items()}
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [each for each in (made["reward"] * 3)[:8] if each is not None]
    assert logged["rewards/graded_reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize(
    ("options", "processes", "message"),
    [({"top_p": 0.9}, 1, r"GRPOConfig\(top_p=0.9\) is unsupported"), ({}, 2, "runs in 2 processes")],
)
def test_what_cannot_be_exact_is_refused(
    rollouts: TRLRollouts, options: dict[str, Any], processes: int, message: str
):
    from trl import GRPOConfig

    arguments = GRPOConfig(use_cpu=True, bf16=False, **options)
    trainer: Any = SimpleNamespace(args=arguments, accelerator=SimpleNamespace(num_processes=processes))
    with pytest.raises(ConfigError, match=message):
        rollouts([TASKS[0].instance_id], trainer)


def test_a_prompt_that_is_no_task_is_refused(rollouts: TRLRollouts):
    with pytest.raises(ConfigError, match="no task has the id 'Mend it'"):
        rollouts(["Mend it"], None)


@pytest.mark.usefixtures("claude_code", "isolation")
def test_the_recipe_trains_on_rollouts_of_claude_code(tmp_path: Path):
    tasks = tmp_path / "tasks.jsonl"
    done = understudy("tasks", "make", "functions", "--count", "2", "--split", "train", "--output", tasks)
    assert done.returncode == 0, done.stderr
    recipe = Path(__file__).parents[2] / "recipes" / "trl" / "train.py"
    runs = tmp_path / "runs"
    options = ["--tasks", tasks, "--output", runs, "--steps", "1", "--groups", "1", "--samples", "2"]
    options += ["--max-turns", "4", "--answer-tokens", "200", "--tools", TOOLS, "--system-prompt", SYSTEM_PROMPT]
    completed = subprocess.run(
        [sys.executable, recipe, directory_of(TINY), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    with Store.open(runs / "wave-0000", create=False) as store:
        (group,) = groups_from_store(store)
    assert len(group.rollouts) == 2
    assert all(each.logprobs is not None for rollout in group.rollouts for each in rollout.sequences)
    assert (runs / "model" / "model.safetensors").is_file()
    assert json.loads((runs / "model" / "config.json").read_text())["use_cache"] is True
