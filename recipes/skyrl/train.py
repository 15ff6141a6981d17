"""GRPO on SkyRL 0.3.0: Claude Code's rollouts on TASKS, sampled by SkyRL's own vLLM engines.

    TASKS=tasks.jsonl RUNS=runs/skyrl python recipes/skyrl/train.py [options of SkyRL]

What it needs, and which options, is in docs/clusters.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from understudy.train.engines.rollout_process import RolloutRunner
from understudy.train.engines.skyrl import UnderstudyGenerator


class Experiment(BasePPOExp):
    """SkyRL's experiment with our generator."""

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> UnderstudyGenerator:
        """Return the generator; `trainer.algorithm.max_seq_len` is the longest prompt and answer."""
        runner = RolloutRunner(
            str(cfg.trainer.policy.model.path),
            context=int(cfg.trainer.algorithm.max_seq_len),
            tasks=os.environ["TASKS"].split(":"),
            output=Path(os.environ.get("RUNS", "runs/skyrl")).absolute(),
            options=["--max-turns", "40", "--timeout", "1800"],
            tool_format=os.environ.get("TOOL_FORMAT", "hermes"),
            concurrency=int(os.environ.get("CONCURRENCY", "16")),
        )
        return UnderstudyGenerator(inference_engine_client, runner)


@ray.remote(num_cpus=1)
def train(cfg: Any) -> None:
    """Run the training in a Ray task, as SkyRL does."""
    Experiment(cfg).run()


def main() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(["generator.step_wise_trajectories=true", *sys.argv[1:]])
    validate_cfg(cfg)
    if cfg.trainer.algorithm.max_seq_len is None:
        sys.exit("trainer.algorithm.max_seq_len is missing; give the longest prompt and answer, such as 65536")
    initialize_ray(cfg)
    ray.get(train.remote(cfg))


if __name__ == "__main__":
    main()
