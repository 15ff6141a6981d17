"""The one place where a verdict is decided: of a patch by `grade`, of a task before it is used by `validate`.

A patch goes through the gate, is applied in a fresh sandbox with the hidden files, and the checks and the audit
say what it is worth. A task is valid when its gold patch scores 1 and the empty patch 0, both by running the
checks.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from understudy.checks.base import CheckResult, GradingOptions
from understudy.checks.log_parsers import check_parser
from understudy.checks.run import run_checks
from understudy.checks.suite import run_before_patch
from understudy.checks.twin_run import (
    VALIDATION_VERSIONS,
    TwinRun,
    judge_twins,
    protection_of,
    run_twins,
    stable_sites,
    versions_needed,
)
from understudy.errors import GraderError, TaskError
from understudy.grade.apply import apply_patch
from understudy.grade.audit import audit
from understudy.grade.gate import GatedPatch, gate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, hidden_mounts, sandbox_spec
from understudy.types import Integrity, PytestChecks, SuiteChecks, Verdict, is_solved
from understudy.util.files import atomic_write

_FORMAT = "5"  # part of every digest: a change of how patches are judged validates anew


async def grade(
    prepared: PreparedTask, patch: bytes, *, sandboxes: Sandboxes, environment: TaskEnvironment
) -> Verdict:
    """Grade a patch in a fresh sandbox. A patch of which nothing passes the gate gets 0 without running.

    The audit's findings are in the verdict's `integrity`; the reward is what the checks say. Raises GraderError
    or SandboxError when the patch could not be graded: that is never a reward.
    """
    gated = gate(patch, prepared.task)
    if gated.refused:
        verdict = Verdict(reward=0.0, reason=f"patch refused: {gated.refused}", applied=False)
    elif not gated.patch:
        dropped = ", ".join(gated.dropped[:5])
        reason = f"only files that do not count: {dropped}" if dropped else "empty patch"
        verdict = Verdict(reward=0.0, reason=reason)
    else:
        verdict = (await _evaluate(prepared, gated, sandboxes, environment)).verdict
        if is_solved(verdict.reward) and prepared.options.twin_seeds:
            verdict = await _confirm(prepared, gated, verdict, sandboxes, environment)
    if verdict.integrity.status != "forged":
        integrity = await asyncio.to_thread(audit, patch, prepared.task, gated, verdict)
        verdict = replace(verdict, integrity=integrity)
    protection, unprotected = protection_of(prepared.task, prepared.options)
    return replace(verdict, protection=protection, unprotected=unprotected)


async def _confirm(
    prepared: PreparedTask, gated: GatedPatch, verdict: Verdict, sandboxes: Sandboxes, environment: TaskEnvironment
) -> Verdict:
    """The verdict on a patch that solves its task, once twins of the deciding tests ran too.

    A contradiction counts when it is seen again with other changes: one of them can hold by coincidence.
    """
    checks, sites = prepared.task.checks, prepared.options.twins
    assert isinstance(checks, PytestChecks)
    versions = versions_needed(checks, sites)
    integrity = Integrity()
    for seed in prepared.options.twin_seeds:
        run = await _run_versions(prepared, gated, versions, seed, sandboxes, environment)
        integrity = judge_twins(run, sites)
        if integrity.status == "clean":
            return verdict
    return replace(verdict, reward=0.0, reason=integrity.reason, integrity=integrity)


async def _run_versions(
    prepared: PreparedTask,
    gated: GatedPatch,
    versions: Mapping[str, int],
    seed: int,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
) -> TwinRun:
    """Run versions of the deciding tests over a patch in a fresh sandbox."""
    task = prepared.task
    assert isinstance(task.checks, PytestChecks)
    sandbox = await sandboxes.open(sandbox_spec(prepared, environment))
    try:
        if problem := await apply_patch(sandbox, task, gated.patch, host_programs=sandboxes.host_programs):
            raise GraderError(f"a patch that applied once does not apply again: {problem}")
        seconds = task.checks.timeout_s * (1 + max(versions.values(), default=0))
        return await run_twins(sandbox, task.checks, versions, seed=seed, timeout_s=seconds)
    finally:
        await sandbox.close()


async def _evaluate(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> CheckResult:
    """Apply a gated patch, which may be empty, in a fresh sandbox and run the checks.

    Raises GraderError or SandboxError when that failed, TaskError when the task's own test patch does not apply.
    """
    task = prepared.task
    sandbox = await sandboxes.open(sandbox_spec(prepared, environment, mounts=hidden_mounts(prepared)))
    try:
        if isinstance(task.checks, SuiteChecks):
            await run_before_patch(sandbox, task.checks)
        if problem := await apply_patch(sandbox, task, gated.patch, host_programs=sandboxes.host_programs):
            return CheckResult(Verdict(reward=0.0, reason=problem, applied=False))
        result = await run_checks(sandbox, task, gated.patch, prepared.options)
    finally:
        await sandbox.close()
    if not gated.dropped:
        return result
    note = f"(changes left out: {', '.join(gated.dropped[:5])})"
    return replace(result, verdict=replace(result.verdict, reason=f"{result.verdict.reason} {note}"))


# --- validation ----------------------------------------------------------------------------------------


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
    gold_grading = asyncio.create_task(_grade_gold(prepared, gated, sandboxes, environment))
    empty_grading = asyncio.create_task(_evaluate(prepared, nothing, sandboxes, environment))
    try:
        (graded, gold), empty = await asyncio.gather(gold_grading, empty_grading)
    finally:  # if one raises, wait for the other: its sandbox must not outlive this call
        await asyncio.wait((gold_grading, empty_grading))
    if graded != prepared and is_solved(gold.reward):
        # The empty patch was graded without the options that the gold patch turned out to need.
        empty = await _evaluate(graded, nothing, sandboxes, environment)
    for name, verdict, expected in (("the gold patch", gold, 1.0), ("the empty patch", empty.verdict, 0.0)):
        if verdict.reward != expected:
            raise TaskError(
                f"task {task.instance_id}: {name} scores {verdict.reward:g} instead of {expected:g}: "
                f"{verdict.reason}\n{verdict.log[-2000:]}".rstrip()
            )
    if isinstance(checks := task.checks, PytestChecks):
        versions = dict.fromkeys((*checks.fail_to_pass, *checks.pass_to_pass), VALIDATION_VERSIONS)
        # Grading changes expectations to what the gold patch was seen to fail here, not to anything else.
        seeds = (secrets.randbits(32), secrets.randbits(32))
        runs = [await _run_versions(graded, gated, versions, seed, sandboxes, environment) for seed in seeds]
        stable = stable_sites(runs)
        options = replace(
            graded.options,
            twins=stable.sites,
            partial_twins=stable.partial,
            twin_seeds=seeds if stable.sites else (),
        )
        graded = replace(graded, options=options)
    record.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(record, msgspec.json.encode(graded.options))
    return graded


def as_validated(
    prepared: PreparedTask, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path
) -> PreparedTask:
    """The task with the grading options that validation found; unchanged if it was not validated."""
    try:
        content = _record_path(prepared, sandboxes, environment, cache).read_bytes()
    except FileNotFoundError:
        return prepared
    return replace(prepared, options=msgspec.json.decode(content, type=GradingOptions))


async def _grade_gold(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> tuple[PreparedTask, Verdict]:
    """The task with the first grading options with which its gold patch scores 1, and the gold patch's verdict.

    Where it fails only because of how it is graded, other options are tried: as root, for images whose programs
    only root can use; without canaries, for suites that do not run with them; with test names that both pass and
    fail, where they do so with the gold patch too. With none of them, the task as it was and the first verdict.
    """
    first: Verdict | None = None
    for as_root in (False,) if sandboxes.host_programs else (False, True):
        for canaries in (True, False) if isinstance(prepared.task.checks, SuiteChecks) else (True,):
            options = GradingOptions(as_root, canaries)
            result = await _evaluate(replace(prepared, options=options), gated, sandboxes, environment)
            if result.verdict.reward != 1.0 and result.conflicts:
                options = replace(options, conflicts=result.conflicts)
                result = await _evaluate(replace(prepared, options=options), gated, sandboxes, environment)
            if is_solved(result.verdict.reward):
                return replace(prepared, options=options), result.verdict
            first = first or result.verdict
    return prepared, first or Verdict(reward=0.0, reason="")


def _record_path(prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path) -> Path:
    paths = [str(prepared.tree), str(prepared.hidden), *(str(mount.source) for mount in environment.mounts)]
    content = msgspec.json.encode([_FORMAT, sandboxes.name, paths, environment.env, prepared.task])
    return cache / "validated" / hashlib.sha256(content).hexdigest()[:32]
