"""What tests of the store need: a run with queued rollouts, attempts under way, calls."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec

from understudy.store import Store
from understudy.types import Attempt, Call, Files, PytestChecks, Task


def make_task(name: str = "t", **changes: Any) -> Task:
    task = Task(
        instance_id=name,
        repo="r",
        instruction="do it",
        source=Files({"a.py": "x = 1\n"}),
        checks=PytestChecks({"test_a.py": ""}, ("test_a.py::test",)),
        gold_patch="",
    )
    return msgspec.structs.replace(task, **changes)


def make_call(attempt_id: str, sequence: int = 0, **changes: Any) -> Call:
    call = Call(
        id=f"{attempt_id}-{sequence}",
        attempt_id=attempt_id,
        sequence=sequence,
        dialect="anthropic",
        requested_model="m",
        backend="embedded",
        backend_model="m",
        request=b"{}",
        response=b"{}",
        status="ok",
        started_at=1.25,
        ended_at=2.5,
    )
    return msgspec.structs.replace(call, **changes)


@contextmanager
def writes_held(store: Store) -> Generator[None]:
    """Everything that is written inside is committed as one group at the end."""
    started, release = threading.Event(), threading.Event()

    def hold(_: object) -> bool:
        started.set()
        return release.wait(60)

    blocked = store._database.writer.submit(hold)  # pyright: ignore[reportPrivateUsage]
    assert started.wait(60)  # else it could be in one group with what is written inside
    yield
    release.set()
    assert blocked.result()


def prepare(store: Store, rollouts: int = 1, run: str = "run") -> None:
    store.runs.create(run, {"model": "m"}).result()
    store.runs.add_tasks(run, [make_task()]).result()
    store.runs.create_rollouts(run, [(f"{run}-{n}", "t", n) for n in range(rollouts)]).result()


def running(store: Store, rollout_id: str = "run-0") -> Attempt:
    attempt = store.runs.start_attempt(rollout_id).result()
    store.runs.mark_running(attempt.id).result()
    return attempt
