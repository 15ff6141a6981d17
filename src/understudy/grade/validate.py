"""Taking a task in: its gold patch must score 1 and the empty patch 0, truly run.

Where the gold patch fails only because of how it is graded, another way is tried and remembered: as root, in
images whose programs nobody else can use; without canaries, in suites that do not bear them; with tests that pass
and fail under one name, where they did so with the gold patch.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.log_parsers import check_parser
from understudy.errors import TaskError
from understudy.grade.patch import GatedPatch, gate
from understudy.grade.verdict import evaluate, evaluate_fully
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask
from understudy.types import SuiteChecks, Verdict

_FORMAT = "2"  # part of every digest: a change of how patches are judged validates anew


class _ValidationRecord(Struct, frozen=True):
    """What is remembered of a task that passed: how it is graded."""

    as_root: bool = False
    canaries: bool = True
    conflicts: dict[str, int] = {}


async def validate(
    prepared: PreparedTask, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path
) -> PreparedTask:
    """Grade the gold patch and the empty one; a task that passed is remembered in the cache by its content.

    Returns the task as it has to be graded. Raises TaskError with the reason unless they score 1 and 0,
    GraderError or SandboxError when they could not be graded.
    """
    task = prepared.task
    mark = _mark(prepared, sandboxes, environment, cache)
    if mark.exists():
        return as_validated(prepared, sandboxes=sandboxes, environment=environment, cache=cache)
    if isinstance(task.checks, SuiteChecks):
        await asyncio.to_thread(check_parser, task.checks.parser, f"task {task.instance_id}")
    gated = gate(task.gold_patch.encode(errors="surrogateescape"), task)
    if gated.refused:
        raise TaskError(f"task {task.instance_id}: gold_patch refused: {gated.refused}")
    if not gated.patch:
        raise TaskError(f"task {task.instance_id}: gold_patch changes nothing that counts; it must score 1")
    finding = asyncio.create_task(_find_way(prepared, gated, sandboxes, environment))
    judging = asyncio.create_task(
        evaluate(prepared, GatedPatch(b""), sandboxes=sandboxes, environment=environment)
    )
    try:
        (way, gold), empty = await asyncio.gather(finding, judging)
    finally:  # where one could not be graded, the other is not left behind
        await asyncio.wait((finding, judging))
    if way != prepared and gold.reward == 1.0:
        empty = await evaluate(way, GatedPatch(b""), sandboxes=sandboxes, environment=environment)
    for name, verdict, expected in (("the gold patch", gold, 1.0), ("the empty patch", empty, 0.0)):
        if verdict.reward != expected:
            raise TaskError(
                f"task {task.instance_id}: {name} scores {verdict.reward:g} instead of {expected:g}: "
                f"{verdict.reason}\n{verdict.log[-2000:]}".rstrip()
            )
    mark.parent.mkdir(parents=True, exist_ok=True)
    aside = mark.with_name(f"{mark.name}.{secrets.token_hex(4)}.new")
    aside.write_bytes(msgspec.json.encode(_ValidationRecord(way.as_root, way.canaries, way.conflicts)))
    aside.replace(mark)
    return way


def as_validated(
    prepared: PreparedTask, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path
) -> PreparedTask:
    """The task as validation found that it has to be graded; as it is, where it was not validated."""
    try:
        content = _mark(prepared, sandboxes, environment, cache).read_bytes()
    except FileNotFoundError:
        return prepared
    mark = msgspec.json.decode(content, type=_ValidationRecord)
    return replace(prepared, as_root=mark.as_root, canaries=mark.canaries, conflicts=mark.conflicts)


async def _find_way(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> tuple[PreparedTask, Verdict]:
    """How the gold patch scores 1, and its verdict; else the first way and what was said there."""
    first: Verdict | None = None
    for as_root in (False,) if sandboxes.host_programs else (False, True):
        for canaries in (True, False) if isinstance(prepared.task.checks, SuiteChecks) else (True,):
            way = replace(prepared, as_root=as_root, canaries=canaries)
            judged = await evaluate_fully(way, gated, sandboxes=sandboxes, environment=environment)
            if judged.verdict.reward != 1.0 and judged.conflicts:
                way = replace(way, conflicts=judged.conflicts)
                judged = await evaluate_fully(way, gated, sandboxes=sandboxes, environment=environment)
            if judged.verdict.reward == 1.0:
                return way, judged.verdict
            first = first or judged.verdict
    return prepared, first or Verdict(reward=0.0, reason="")


def _mark(prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path) -> Path:
    places = [str(prepared.tree), str(prepared.hidden), *(str(mount.source) for mount in environment.mounts)]
    content = msgspec.json.encode([_FORMAT, sandboxes.name, places, environment.env, prepared.task])
    return cache / "validated" / hashlib.sha256(content).hexdigest()[:32]
