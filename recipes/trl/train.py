"""GRPO by TRL's own trainer on rollouts of Claude Code: `python recipes/trl/train.py --help`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import torch
from trl import GRPOConfig, GRPOTrainer

from understudy.config import cache_dir
from understudy.run.collector import RolloutSettings
from understudy.sandbox.base import load_sandboxes
from understudy.tasks.load import load_tasks
from understudy.train.engines.trl import TRLRollouts, graded_reward
from understudy.train.loop.runtime import LoopRuntime
from understudy.train.weights import WeightsRecord, save_model
from understudy.types import Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the directory of a Hugging Face causal model")
    parser.add_argument("--tasks", action="append", required=True, help="as for `understudy run`; repeatable")
    parser.add_argument("--output", type=Path, default=Path("runs/trl"), help="runs, and the model in model/")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--groups", type=int, default=8, help="tasks a step")
    parser.add_argument("--samples", type=int, default=4, help="rollouts a task and step")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--tools", default="", help="the agent's only tools, as Edit,Read,Bash")
    parser.add_argument("--system-prompt", default="", help="in the place of the agent's own")
    parser.add_argument("--max-turns", type=int, default=30)
    parser.add_argument("--answer-tokens", type=int, help="the most tokens of an answer")
    parser.add_argument("--vllm", action="append", default=[], help="the address of a vLLM server; repeatable")
    parsed = parser.parse_args()
    restriction = {"tools": parsed.tools, "system_prompt": parsed.system_prompt}
    settings = RolloutSettings(
        agent_options={name: value for name, value in restriction.items() if value},
        max_turns=parsed.max_turns,
        max_tokens=parsed.answer_tokens,
    )
    tasks = asyncio.run(tasks_of(parsed.tasks))
    if len(tasks) < parsed.groups:
        # TRL would leave out the only, incomplete batch, and save the model as it was.
        parser.error(f"--groups {parsed.groups}: only {len(tasks)} tasks; give fewer groups or more tasks")
    gpu = torch.cuda.is_available()
    with TRLRollouts(
        parsed.model,
        tasks,
        parsed.output,
        settings=settings,
        runtime=LoopRuntime(urls=tuple(parsed.vllm)),
        backend="vllm" if parsed.vllm else "embedded",
    ) as rollouts:
        trainer = GRPOTrainer(
            model=str(parsed.model),
            args=GRPOConfig(
                str(parsed.output / "trainer"),
                max_steps=parsed.steps,
                num_generations=parsed.samples,
                per_device_train_batch_size=parsed.samples,
                gradient_accumulation_steps=parsed.groups,
                learning_rate=parsed.learning_rate,
                scale_rewards="none",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=not gpu,
                bf16=gpu,
            ),
            train_dataset=rollouts.dataset(),
            rollout_func=rollouts,
            reward_funcs=graded_reward,
        )
        trainer.train()
        # Not trainer.save_model, which changes the config: it would turn off the cache for generation.
        model = trainer.accelerator.unwrap_model(trainer.model)
        written = WeightsRecord(version="", step=int(trainer.state.global_step), base=str(parsed.model))
        save_model(model, parsed.model, parsed.output / "model", written=written)


async def tasks_of(specs: list[str]) -> list[Task]:
    sandboxes = load_sandboxes("local")
    try:
        return (await load_tasks(specs, sandboxes=sandboxes, cache=cache_dir())).tasks
    finally:
        await sandboxes.aclose()


if __name__ == "__main__":
    main()
