"""Attempts that calls can belong to."""

from __future__ import annotations

from collections.abc import Sequence

from understudy.store.store import Store

from support import calc_task


def start_attempts(store: Store, *, count: int = 1) -> Sequence[str]:
    """Ids of `count` running attempts, each of a rollout of its own."""
    task = calc_task()
    store.put_run("run", {}).result()
    store.put_tasks("run", [task]).result()
    rollouts = [f"rollout-{index}" for index in range(count)]
    given = [(rollout, task.instance_id, index) for index, rollout in enumerate(rollouts)]
    store.create_rollouts("run", given).result()
    attempts = [store.start_attempt(rollout).result().id for rollout in rollouts]
    for attempt in attempts:
        store.begin_running(attempt).result()
    return attempts
