"""A batch of rollouts as training sees it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from understudy.gateway.config import GatewayConfig, ModelConfig, ModelsConfig
from understudy.run.collector import RolloutBatch
from understudy.run.config import RunConfig
from understudy.store.outcomes import TaskCounts


async def test_the_event_loop_goes_on_while_rollouts_are_counted(tmp_path: Path) -> None:
    release = threading.Event()

    def by_task(run_id: str) -> dict[str, TaskCounts]:
        assert release.wait(30)
        return {"whole": TaskCounts(1, 2, 0), "unfinished": TaskCounts(1, 1, 0)}

    batch = RolloutBatch(
        RunConfig(gateway=GatewayConfig(models=ModelsConfig(high=ModelConfig(backend="embedded"))), samples=2),
        [],
        tmp_path,
    )
    store: Any = SimpleNamespace(outcomes=SimpleNamespace(by_task=by_task))
    batch._store = store
    counting = asyncio.ensure_future(batch.task_counts())
    for _ in range(100):  # were it counted on the loop, nothing of this would run before `release`
        await asyncio.sleep(0)
    assert not counting.done()
    release.set()
    assert await counting == {"whole": TaskCounts(1, 2, 0)}
