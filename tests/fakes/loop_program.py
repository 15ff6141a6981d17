"""A loop in a process of its own, which a test kills: python -m fakes.loop_program JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from understudy.run.collector import RolloutCollector, RolloutSettings
from understudy.run.config import task_digests
from understudy.run.ray_cluster import RayOptions
from understudy.sandbox.base import load_sandboxes
from understudy.tasks.load import load_tasks
from understudy.tasks.recipes import ImageChoice
from understudy.tasks.records import dump
from understudy.train.loop.loop import Watcher
from understudy.train.loop.runtime import LoopRuntime, LoopSummary, run_loop
from understudy.train.loop.state import Evaluation, LoopConfig, StepState
from understudy.types import SuiteChecks, Task

from fakes.policy import AGENT, Waits, dying_at, opener, write_weights
from support import calc_task
from support.tiny_model import write_tokenizer


class Order(Struct, frozen=True, kw_only=True):
    """What the program is to do. `die` is a moment at which it kills itself."""

    root: str
    model: str
    url: str
    tasks: str
    eval_tasks: str
    agent: str
    steps: int = 3
    groups: int = 2
    samples: int = 3
    eval_every: int = 2
    seed: int = 0
    asynchronous: bool = False
    quorum: float = 0.5
    min_groups: int = 0
    max_staleness: int = 2
    concurrency: int = 2
    keep: int = 2
    token_values_mb: int = 0
    die: str | None = None
    slow_s: float = 0.0
    way: str = "disk"
    store: str | None = None
    engine: Literal["local", "workers", "ray"] = "local"
    ray: RayOptions = RayOptions()


def quick_task(number: int) -> Task:
    """A small task that is judged by the shell: a loop grades dozens of patches, and pytest starts slowly."""
    mended = f"grep -q 'return x + {number + 1}$' calc.py"
    command = f"if {mended}; then echo 'shift ... ok'; else echo 'shift ... FAIL'; exit 1; fi"
    checks = SuiteChecks(parser="parse_log_django", command=command, fail_to_pass=("shift",))
    return replace(calc_task(number), checks=checks)


def small_loop(root: Path) -> Order:
    """A loop over small tasks that is not begun yet, without the address of its server."""
    dump([quick_task(number) for number in range(5)], root / "train.jsonl")
    dump([quick_task(number) for number in range(10, 12)], root / "eval.jsonl")
    (root / "agent.py").write_text(AGENT)
    model = root / "model"
    write_weights(model, "first")
    write_tokenizer(model)
    return Order(
        root=str(root / "loop"),
        model=str(model),
        url="",
        tasks=str(root / "train.jsonl"),
        eval_tasks=str(root / "eval.jsonl"),
        agent=str(root / "agent.py"),
    )


class _Dying(Watcher):
    def __init__(self, moment: str | None) -> None:
        self._die = dying_at(moment)

    def stepped(self, step: StepState) -> None:
        self._die(f"after step {step.step}")

    def evaluated(self, evaluation: Evaluation) -> None:
        self._die(f"after evaluation {evaluation.step}")


async def run(
    order: Order,
    watcher: Watcher | None = None,
    collects: Callable[[RolloutCollector], None] = lambda _: None,
    waits: Waits = lambda: False,
) -> LoopSummary:
    """Carry on with the loop to its end; an update goes on as long as it `waits`."""
    sandboxes = load_sandboxes("unsafe-local")
    tasks, eval_tasks = [await _tasks(spec, sandboxes) for spec in (order.tasks, order.eval_tasks)]
    config = LoopConfig(
        model=order.model,
        model_digest="tiny",
        backend="vllm",
        served_model="m",
        tasks=task_digests(tasks),
        eval_tasks=task_digests(eval_tasks),
        steps=order.steps,
        groups=order.groups,
        samples=order.samples,
        eval_every=order.eval_every,
        seed=order.seed,
        asynchronous=order.asynchronous,
        quorum=order.quorum,
        min_groups=order.min_groups,
        max_staleness=order.max_staleness,
        sandbox="unsafe-local",
        rollout_settings=msgspec.to_builtins(
            RolloutSettings(agent="shell", agent_options={"command": f"python3 {order.agent}"})
        ),
        keep=order.keep,
    )
    return await run_loop(
        config,
        Path(order.root),
        tasks,
        eval_tasks,
        sandboxes=sandboxes,
        runtime=LoopRuntime(
            concurrency=order.concurrency,
            urls=(order.url,) if order.url else (),
            publish=order.way,
            token_values_mb=order.token_values_mb,
            store=order.store,
            engine=order.engine,
            ray=order.ray,
        ),
        on_collector=collects,
        watcher=watcher or _Dying(order.die),
        open_trainer=opener(dying_at(order.die), order.slow_s, always=order.asynchronous, waits=waits),
    )


async def _tasks(spec: str, sandboxes: object) -> list[Task]:
    loaded = await load_tasks(
        [spec], sandboxes=sandboxes, cache=Path(spec).parent, images=ImageChoice(None, None), instance_ids=None
    )
    return loaded.tasks


if __name__ == "__main__":
    summary = asyncio.run(run(msgspec.json.decode(sys.argv[1], type=Order)))
    sys.stdout.write(msgspec.json.encode(summary).decode())
