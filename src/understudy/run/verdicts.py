"""Grades the patches of one run, each distinct one once, because samples of a task often make the same patch.

A verdict is reused for the same bytes on the same task with the same grading, within one run of one process, and
`reused_from` says so. Results that may differ the next time are not reused: for a patch that is not clean, timed
out, or broke its grading.
"""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
from msgspec.structs import replace

from understudy.grade.verdict import FAULT_REASON, grade
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask
from understudy.tasks.records import task_digest
from understudy.types import Verdict

_MAX_VERDICTS = 1000


class _Graded:
    """What is known about a patch: the attempt that graded it first, and the verdict if it can be reused."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.decided = False
        self.attempt_id = ""
        self.verdict: Verdict | None = None


class RunVerdicts:
    """The reusable verdicts of a run, in memory. Belongs to one event loop."""

    def __init__(self) -> None:
        self._graded: dict[str, _Graded] = {}

    async def grade(
        self,
        prepared: PreparedTask,
        patch: bytes,
        attempt_id: str,
        *,
        sandboxes: Sandboxes,
        environment: TaskEnvironment,
    ) -> Verdict:
        """Return the verdict on an attempt's patch: that of an earlier attempt with the same patch, or a new one.

        If an equal patch is being graded, its verdict is awaited. Raises whatever `grade` raises.
        """
        graded = self._entry(prepared, patch)
        async with graded.lock:
            if graded.verdict is not None:
                return replace(graded.verdict, reused_from=graded.attempt_id, checks_s=0.0)
            if not graded.decided:
                verdict = await grade(prepared, patch, sandboxes=sandboxes, environment=environment)
                graded.decided = True
                if _may_be_reused(verdict):
                    graded.attempt_id, graded.verdict = attempt_id, verdict
                return verdict
        return await grade(prepared, patch, sandboxes=sandboxes, environment=environment)

    def _entry(self, prepared: PreparedTask, patch: bytes) -> _Graded:
        key_parts = [task_digest(prepared.task), prepared.options, hashlib.sha256(patch).hexdigest()]
        key = hashlib.sha256(msgspec.json.encode(key_parts)).hexdigest()
        entry = self._graded.pop(key, None) or _Graded()
        self._graded[key] = entry  # moved to the end, as the most recently used
        if len(self._graded) > _MAX_VERDICTS:
            del self._graded[next(iter(self._graded))]
        return entry


def _may_be_reused(verdict: Verdict) -> bool:
    """Return whether the checks ran to their end, and found nothing that must be looked at again."""
    ended = bool(verdict.tests) and all(outcome != "missing" for outcome in verdict.tests.values())
    is_fault = verdict.reason.startswith(FAULT_REASON) or "did not end in" in verdict.reason
    return ended and not is_fault and verdict.integrity.status == "clean"
