"""Runs versions of a task's deciding tests (see `understudy.checks.twins`) over patches, in fresh sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial

from msgspec.structs import replace

from understudy.checks.run import run_task_versions
from understudy.checks.suite import run_before_patch
from understudy.checks.twins.run import VersionRun, WrittenVersion
from understudy.checks.twins.script import placed_version
from understudy.checks.twins.test_ids import deciding_tests
from understudy.errors import GraderError
from understudy.grade.apply import apply_patch
from understudy.grade.faults import PatchFault, attribute_faults, with_untrusted_code
from understudy.grade.gate import GatedPatch, intruder_predicate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, hidden_mounts, other_hash_seed, sandbox_spec
from understudy.types import PytestChecks, SuiteChecks

_MIN_TIMEOUT_S = 30.0  # for code that computes nothing new, which may never end
_MAX_QUICK_S = 5.0
"""Where the tests take longer, starting them costs little, and nothing is run before it is known to be needed."""


async def run_or_fault(
    prepared: PreparedTask,
    gated: GatedPatch,
    versions: Sequence[WrittenVersion],
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
) -> list[VersionRun] | PatchFault | None:
    """Return what `run_some_versions` does, or the fault if the patch's code broke it (see `attribute_faults`)."""
    return await attribute_faults(
        partial(run_some_versions, prepared, gated, versions, sandboxes, environment),
        partial(run_some_versions, prepared, GatedPatch(b""), versions, sandboxes, environment),
    )


async def run_some_versions(
    prepared: PreparedTask,
    gated: GatedPatch,
    versions: Sequence[WrittenVersion],
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    *,
    later_s: float = 0.0,
) -> list[VersionRun] | None:
    """Run versions of the deciding tests over a patch where its code never meets the originals. Returns the runs
    of the first ones, at least of one.

    Where a sandbox shows whether something is left there of a run, the next versions run in the same one, if
    nothing is; they must have the same hash seed. With `later_s`, none but the first may take longer than that.
    None where the patch does not apply.
    """
    task = prepared.task
    tests = deciding_tests(task, prepared.options)
    is_intruder = intruder_predicate(task, prepared.tree)
    version = versions[0]
    if isinstance(task.checks, PytestChecks):
        task = replace(task, checks=replace(task.checks, files=version.files))
    if not isinstance(task.checks, PytestChecks) or not sandboxes.host_programs:
        versions = versions[:1]
    async with AsyncExitStack() as stack:
        if prepared.hidden is not None:
            placed = await asyncio.to_thread(stack.enter_context, placed_version(prepared.hidden, version))
            prepared = replace(prepared, hidden=placed)
        env = other_hash_seed(prepared, environment) if version.reseeded else {}
        spec = sandbox_spec(prepared, environment, mounts=hidden_mounts(prepared), env=env)
        sandbox = await sandboxes.open(spec)
        stack.push_async_callback(sandbox.close)
        if isinstance(task.checks, SuiteChecks):
            await run_before_patch(sandbox, task.checks)
        with with_untrusted_code():
            if await apply_patch(
                sandbox, task, gated.patch, host_programs=sandboxes.host_programs, tree=prepared.tree
            ):
                return None
            return await run_task_versions(
                sandbox,
                task,
                gated.patch,
                versions,
                tests,
                is_intruder,
                sealed=prepared.options.sealed,
                later_s=later_s,
            )


class ReferenceRuns:
    """The runs that validation learns twins from: over the gold patch, and over its `outlines`.

    Versions that will probably be needed run over the gold patch beside others, in the same sandbox and from the
    same process, and are kept until they are asked for: starting each alone takes longer than quick tests.
    """

    def __init__(
        self,
        prepared: PreparedTask,
        gold: GatedPatch,
        outlines: Sequence[GatedPatch],
        *,
        checks_s: float,
        sandboxes: Sandboxes,
        environment: TaskEnvironment,
    ) -> None:
        """`checks_s` is how long the tests took with the gold patch."""
        self._prepared = prepared
        self._gold = gold
        self._outlines = outlines
        self._quick = checks_s <= _MAX_QUICK_S
        self._limit_s = min(prepared.task.checks.timeout_s, _MIN_TIMEOUT_S + 4 * checks_s)
        self._sandboxes = sandboxes
        self._environment = environment
        self._kept: dict[tuple[bool, tuple[tuple[str, str], ...]], VersionRun] = {}

    async def gold(self, version: WrittenVersion, likely: Sequence[WrittenVersion] = ()) -> VersionRun:
        """Return a run over the gold patch; `likely` are versions that it will probably be asked for next.

        Raises PatchFault, GraderError and SandboxError.
        """
        if (kept := self._take(version)) is not None:
            return kept
        task = self._prepared.task
        versions = (version, *(other for other in likely if self._quick and _key(other) not in self._kept))
        runs = await run_some_versions(
            self._prepared, self._gold, versions, self._sandboxes, self._environment, later_s=self._limit_s
        )
        if runs is None:
            raise GraderError(
                f"task {task.instance_id}: its gold patch applied in one sandbox but not in the next; "
                "expected the same files in each: correct what its image or `checks.before` changes in them"
            )
        for other, run in zip(versions[1:], runs[1:], strict=False):
            self._kept[_key(other)] = run
        return runs[0]

    async def solution(self, versions: Sequence[WrittenVersion]) -> list[VersionRun | None]:
        """See `References`."""
        kept = [self._take(version) for version in versions]
        missing = [version for version, run in zip(versions, kept, strict=True) if run is None]
        new_runs = iter(await self._run(self._gold, missing))
        return [_observing(next(new_runs) if run is None else run) for run in kept]

    async def effortless(self, versions: Sequence[WrittenVersion]) -> list[list[VersionRun]]:
        """See `References`."""
        empty_patch = GatedPatch(b"")
        runs: list[list[VersionRun]] = [[] for _ in versions]
        unfinished = list(range(len(versions)))
        for patch in dict.fromkeys((*self._outlines, empty_patch)):
            if patch == empty_patch:  # it is for outlines that cannot be imported
                unfinished = [number for number in unfinished if not runs[number]]
            of_patch = await self._run(patch, [versions[number] for number in unfinished])
            for number, run in zip(unfinished, map(_observing, of_patch), strict=True):
                runs[number] += [run] if run is not None else []
        return runs

    def _take(self, version: WrittenVersion) -> VersionRun | None:
        run = self._kept.pop(_key(version), None)
        return None if run is None else replace(run, sites=version.sites, emptied=version.emptied)

    async def _run(self, patch: GatedPatch, versions: Sequence[WrittenVersion]) -> list[VersionRun | None]:
        checks = replace(self._prepared.task.checks, timeout_s=self._limit_s)
        limited = replace(self._prepared, task=replace(self._prepared.task, checks=checks))
        runs: list[VersionRun | None] = []
        while pending := versions[len(runs) :]:
            some: list[VersionRun] | None = None
            with suppress(PatchFault):
                some = await run_some_versions(limited, patch, pending, self._sandboxes, self._environment)
            runs += some or [None]
        return runs


def _observing(run: VersionRun | None) -> VersionRun | None:
    """Return a run in which something was observed; None for any other."""
    return run if run is not None and any(run.observations.values()) else None


def _key(version: WrittenVersion) -> tuple[bool, tuple[tuple[str, str], ...]]:
    return version.reseeded, tuple(sorted(version.files.items()))
