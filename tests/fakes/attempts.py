"""Attempts that calls can belong to."""

from __future__ import annotations

from collections.abc import Sequence

from understudy.store import Store

from support import calc_task


def start_attempts(store: Store, *, count: int = 1) -> Sequence[str]:
    """Ids of `count` running attempts, each of a rollout of its own."""
    task = calc_task()
    store.runs.create("run", {}).result()
    store.runs.add_tasks("run", [task]).result()
    rollouts = [f"rollout-{index}" for index in range(count)]
    assignments = [(rollout, task.instance_id, index) for index, rollout in enumerate(rollouts)]
    store.runs.create_rollouts("run", assignments).result()
    attempts = [store.runs.start_attempt(rollout).result().id for rollout in rollouts]
    for attempt in attempts:
        store.runs.mark_running(attempt).result()
    return attempts
