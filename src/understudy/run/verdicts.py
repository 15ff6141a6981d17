"""Grades the patches of one run, each different one once: samples of a task often make the same patch.

A verdict is used again for the same bytes on the same task, graded in the same way, within one run of one process,
and says so (`Verdict.reused_from`). What may come out otherwise another time is graded each time: a patch that is
not clean, that ran out of time, or that broke its grading.
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

_MOST_VERDICTS = 1000


class _Graded:
    """What is known of a patch: who is the first to grade it, and the verdict if it may be used again."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.decided = False
        self.attempt_id = ""
        self.verdict: Verdict | None = None


class RunVerdicts:
    """The verdicts of a run that may be used again, in memory. Belongs to one event loop."""

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
        """The verdict on an attempt's patch: that of an earlier attempt with the same one, or a new one.

        An equal patch that is being graded is waited for. Raises what `grade` raises.
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
        how = [task_digest(prepared.task), prepared.options, hashlib.sha256(patch).hexdigest()]
        key = hashlib.sha256(msgspec.json.encode(how)).hexdigest()
        entry = self._graded.pop(key, None) or _Graded()
        self._graded[key] = entry  # the last one is the one used last
        if len(self._graded) > _MOST_VERDICTS:
            del self._graded[next(iter(self._graded))]
        return entry


def _may_be_reused(verdict: Verdict) -> bool:
    """Whether the checks ran to their end, and nothing was seen that needs to be seen again."""
    ended = bool(verdict.tests) and all(outcome != "missing" for outcome in verdict.tests.values())
    is_fault = verdict.reason.startswith(FAULT_REASON) or "did not end in" in verdict.reason
    return ended and not is_fault and verdict.integrity.status == "clean"
