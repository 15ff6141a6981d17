"""Validation of a task: its gold patch must score 1 and the empty patch 0, both by running the checks.

Where the gold patch fails only because of how it is graded, other options are tried, and stored in the cache:
as root, for images whose programs only root can use; without canaries, for suites that do not run with them; with
test names that both pass and fail, where they do so with the gold patch too.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.log_parsers import check_parser
from understudy.errors import TaskError
from understudy.grade.gate import GatedPatch, gate
from understudy.grade.verdict import evaluate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask
from understudy.types import SuiteChecks, Verdict, is_solved
from understudy.util.atomic import atomic_write

_FORMAT = "2"  # part of every digest: a change of how patches are judged validates anew


class _ValidationRecord(Struct, frozen=True):
    """The grading options of a task that passed."""

    as_root: bool = False
    canaries: bool = True
    conflicts: dict[str, int] = {}


async def validate(
    prepared: PreparedTask, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path
) -> PreparedTask:
    """Grade the gold patch and the empty one; that a task passed is stored in the cache by its content.

    Returns the task with the options that its grading needs. Raises TaskError with the reason unless they score
    1 and 0, GraderError or SandboxError when they could not be graded.
    """
    task = prepared.task
    record = _record_path(prepared, sandboxes, environment, cache)
    if record.exists():
        return as_validated(prepared, sandboxes=sandboxes, environment=environment, cache=cache)
    if isinstance(task.checks, SuiteChecks):
        await asyncio.to_thread(check_parser, task.checks.parser, f"task {task.instance_id}")
    gated = gate(task.gold_patch.encode(errors="surrogateescape"), task)
    if gated.refused:
        raise TaskError(f"task {task.instance_id}: gold_patch refused: {gated.refused}")
    if not gated.patch:
        raise TaskError(f"task {task.instance_id}: gold_patch changes nothing that counts; it must score 1")
    nothing = GatedPatch(b"")
    trying = asyncio.create_task(_find_grading_options(prepared, gated, sandboxes, environment))
    grading = asyncio.create_task(evaluate(prepared, nothing, sandboxes=sandboxes, environment=environment))
    try:
        (graded, gold), empty = await asyncio.gather(trying, grading)
    finally:  # if one raises, wait for the other: its sandbox must not outlive this call
        await asyncio.wait((trying, grading))
    if graded != prepared and is_solved(gold.reward):
        # The empty patch was graded without the options that the gold patch turned out to need.
        empty = await evaluate(graded, nothing, sandboxes=sandboxes, environment=environment)
    for name, verdict, expected in (("the gold patch", gold, 1.0), ("the empty patch", empty.verdict, 0.0)):
        if verdict.reward != expected:
            raise TaskError(
                f"task {task.instance_id}: {name} scores {verdict.reward:g} instead of {expected:g}: "
                f"{verdict.reason}\n{verdict.log[-2000:]}".rstrip()
            )
    record.parent.mkdir(parents=True, exist_ok=True)
    content = _ValidationRecord(graded.as_root, graded.canaries, graded.conflicts)
    atomic_write(record, msgspec.json.encode(content))
    return graded


def as_validated(
    prepared: PreparedTask, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path
) -> PreparedTask:
    """The task with the grading options that validation found; unchanged if it was not validated."""
    try:
        content = _record_path(prepared, sandboxes, environment, cache).read_bytes()
    except FileNotFoundError:
        return prepared
    record = msgspec.json.decode(content, type=_ValidationRecord)
    return replace(prepared, as_root=record.as_root, canaries=record.canaries, conflicts=record.conflicts)


async def _find_grading_options(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> tuple[PreparedTask, Verdict]:
    """The first options with which the gold patch scores 1, and its verdict; else the first verdict of all."""
    first: Verdict | None = None
    for as_root in (False,) if sandboxes.host_programs else (False, True):
        for canaries in (True, False) if isinstance(prepared.task.checks, SuiteChecks) else (True,):
            candidate = replace(prepared, as_root=as_root, canaries=canaries)
            result = await evaluate(candidate, gated, sandboxes=sandboxes, environment=environment)
            if result.verdict.reward != 1.0 and result.conflicts:
                candidate = replace(candidate, conflicts=result.conflicts)
                result = await evaluate(candidate, gated, sandboxes=sandboxes, environment=environment)
            if is_solved(result.verdict.reward):
                return candidate, result.verdict
            first = first or result.verdict
    return prepared, first or Verdict(reward=0.0, reason="")


def _record_path(prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path) -> Path:
    paths = [str(prepared.tree), str(prepared.hidden), *(str(mount.source) for mount in environment.mounts)]
    content = msgspec.json.encode([_FORMAT, sandboxes.name, paths, environment.env, prepared.task])
    return cache / "validated" / hashlib.sha256(content).hexdigest()[:32]
