"""The runs that validation learns from: which share a sandbox, and which are made at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from understudy.checks.twins.run import VersionRun, WrittenVersion
from understudy.grade import version_runs
from understudy.grade.gate import GatedPatch
from understudy.grade.version_runs import ReferenceRuns
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask

from support import calc_task

GOLD, OUTLINE = GatedPatch(b"gold"), GatedPatch(b"outline")


def version(text: str, *, reseeded: bool = False) -> WrittenVersion:
    return WrittenVersion({"test_it.py": text}, {}, reseeded=reseeded)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, str]]:
    """Each call for sandboxes: the patch, and the versions, of which one that begins with ! observes nothing."""
    made: list[tuple[bytes, str]] = []

    async def run(prepared: Any, patch: GatedPatch, versions: Sequence[WrittenVersion], *_: Any, **__: Any) -> Any:
        texts = [each.files["test_it.py"] for each in versions]
        made.append((patch.patch, " ".join(texts)))
        return [
            VersionRun({}, {}, {"t": {} if text[0] == "!" and patch == OUTLINE else {0: [[text]]}}, 0, False, "")
            for text in texts
        ]

    monkeypatch.setattr(version_runs, "run_some_versions", run)
    return made


def runs(checks_s: float = 0.1) -> ReferenceRuns:
    prepared = PreparedTask(calc_task(), Path("tree"), Path("git"))
    return ReferenceRuns(
        prepared,
        GOLD,
        (OUTLINE, GatedPatch(b"")),
        checks_s=checks_s,
        sandboxes=LocalSandboxes(),
        environment=TaskEnvironment(),
    )


async def test_versions_that_are_needed_next_run_beside_the_one_that_is_needed(
    calls: list[tuple[bytes, str]],
) -> None:
    reference = runs()
    await reference.gold(version("named"), [version("true"), version("inputs")])
    assert (await reference.gold(version("true"), [version("inputs")])).observations == {"t": {0: [["true"]]}}
    await reference.solution([version("inputs"), version("others")])
    await reference.gold(version("true", reseeded=True))
    assert calls == [(b"gold", "named true inputs"), (b"gold", "others"), (b"gold", "true")]
    await reference.gold(version("true"))
    assert len(calls) == 4, "a run is used once: each version that is asked for again runs again"


async def test_nothing_is_run_in_advance_of_tests_that_take_long(calls: list[tuple[bytes, str]]) -> None:
    await runs(checks_s=60.0).gold(version("named"), [version("true")])
    assert calls == [(b"gold", "named")]


async def test_the_old_code_runs_only_where_no_outline_of_the_gold_patch_does(
    calls: list[tuple[bytes, str]],
) -> None:
    found = await runs().effortless([version("a"), version("!b")])
    assert calls == [(b"outline", "a !b"), (b"", "!b")]
    assert [len(of_version) for of_version in found] == [1, 1]
