"""Taking a task in: its gold patch must score 1 and the empty patch 0, truly run."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import msgspec

from understudy.errors import TaskError
from understudy.grade.patch import GatedPatch, gate
from understudy.grade.verdict import evaluate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask

_FORMAT = "1"  # part of every digest: a change of how patches are judged validates anew


async def validate(
    prepared: PreparedTask, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path
) -> None:
    """Grade the gold patch and the empty one; a task that passed is remembered in the cache by its content.

    Raises TaskError with the reason unless they score 1 and 0, GraderError or SandboxError when they could not be
    graded.
    """
    task = prepared.task
    mark = cache / "validated" / _digest(prepared, sandboxes, environment)
    if mark.exists():
        return
    gated = gate(task.gold_patch.encode(errors="surrogateescape"), task)
    if gated.refused:
        raise TaskError(f"task {task.instance_id}: gold_patch refused: {gated.refused}")
    if not gated.patch:
        raise TaskError(f"task {task.instance_id}: gold_patch changes nothing that counts; it must score 1")
    gold, empty = await asyncio.gather(
        evaluate(prepared, gated, sandboxes=sandboxes, environment=environment),
        evaluate(prepared, GatedPatch(b""), sandboxes=sandboxes, environment=environment),
    )
    for name, verdict, expected in (("the gold patch", gold, 1.0), ("the empty patch", empty, 0.0)):
        if verdict.reward != expected:
            raise TaskError(
                f"task {task.instance_id}: {name} scores {verdict.reward:g} instead of {expected:g}: "
                f"{verdict.reason}\n{verdict.log[-2000:]}".rstrip()
            )
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _digest(prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment) -> str:
    places = [str(prepared.tree), str(prepared.hidden), *(str(mount.source) for mount in environment.mounts)]
    content = msgspec.json.encode([_FORMAT, sandboxes.name, places, environment.env, prepared.task])
    return hashlib.sha256(content).hexdigest()[:32]
