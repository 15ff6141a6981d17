"""Who comes second to a run is refused before it changes anything of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.errors import StoreError
from understudy.gateway.config import GatewayConfig, ModelConfig, ModelsConfig
from understudy.run import runner
from understudy.run.config import RunConfig
from understudy.run.executors import RunEngine, RunMonitor
from understudy.store import Store
from understudy.store.runs import Lease
from understudy.types import AgentIdentity, ErrorInfo

from support.store import make_task


@pytest.mark.parametrize("engine", ["local", "workers", "detached"])
def test_who_comes_second_leaves_failed_rollouts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: RunEngine
) -> None:
    task = make_task()
    high = ModelConfig(backend="embedded")
    config = RunConfig(
        gateway=GatewayConfig(models=ModelsConfig(high=high)), policy="x", tasks={task.instance_id: "1"}
    )

    async def validated(tasks: Any, **_: Any) -> runner.ValidatedTasks:
        return runner.ValidatedTasks([task], {})

    agent = SimpleNamespace(version="1", problems=list)
    monkeypatch.setattr(runner, "make_agent", lambda *_: agent)
    monkeypatch.setattr(runner, "environment_for", lambda *_: None)
    monkeypatch.setattr(runner, "validate_tasks", validated)
    rollout_id = config.rollout_id(task.instance_id, 0)
    with Store.open(tmp_path) as store:
        run_id = config.run_id
        store.runs.create(run_id, config.record()).result()
        store.runs.add_tasks(run_id, [task]).result()
        identity = AgentIdentity(config.agent, "1")
        store.runs.create_rollouts(run_id, [(rollout_id, task.instance_id, 0)], identity).result()
        store.leases.execute_alone(run_id, Lease("first", 60.0), "1.0").result()
        attempt = store.runs.start_attempt(rollout_id).result()
        store.runs.finish_attempt(attempt.id, "failed", "failed", error=ErrorInfo("run", "X", "x")).result()
        second = runner.execute_run(
            config,
            [task],
            tmp_path,
            sandboxes=None,  # type: ignore[arg-type]
            concurrency=1,
            monitor=RunMonitor(),
            engine=engine,
        )
        with pytest.raises(StoreError, match="is being executed by first"):
            asyncio.run(second)
        assert store.runs.rollout(rollout_id).status == "failed"
