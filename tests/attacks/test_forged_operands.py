"""Programs that print operators of the shell for a script that compares what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.grade.verdict import grade, validate
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare
from understudy.types import Files, ScriptChecks, Task

from support.grading import diff

pytestmark = pytest.mark.services  # each validates a task and grades patches

TREE = {"app.sh": "echo $(($1 - 1))\n"}
RIGHT = "echo $(($1 + 1))\n"
SCRIPT = """\
#!/bin/bash
check() {
    [ $(sh app.sh $1) = $2 ] || { echo "app.sh $1"; exit 1; }
}
check 11 12
check 730 731
echo 1 >/logs/verifier/reward.txt
"""
PATCHES = {
    "gold": (RIGHT, 1.0),
    "written otherwise": ('printf "  %s \\n\\n" `expr $1 + 1`\n', 1.0),
    "true in any case": ("echo 1 -o 1\n", 0.0),
    "nothing": ("true\n", 0.0),
}


async def test_what_a_program_prints_is_no_operator(
    sandboxes: LocalSandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    checks = ScriptChecks(Files({"test.sh": SCRIPT}), timeout_s=60)
    task = Task("app", "example/app", "mend it", Files(TREE), checks, diff({"app.sh": RIGHT}, TREE))
    ready = prepare(task, tmp_path, sandboxes)
    prepared = await validate(ready, sandboxes=sandboxes, environment=environment, cache=tmp_path)
    assert prepared.options.one_word
    for name, (text, reward) in PATCHES.items():
        patch = diff({"app.sh": text}, TREE).encode()
        verdict = await grade(prepared, patch, sandboxes=sandboxes, environment=environment)
        assert (verdict.reward, verdict.integrity.status) == (reward, "clean"), (name, verdict)


async def test_a_script_that_needs_several_words_is_left_as_it_is(
    sandboxes: LocalSandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    script = "same='= 12'\n[ \"$(sh app.sh 11)\" $same ] && echo 1 >/logs/verifier/reward.txt\nexit 0\n"
    checks = ScriptChecks(Files({"test.sh": script}), timeout_s=60)
    task = Task("app", "example/app", "mend it", Files(TREE), checks, diff({"app.sh": RIGHT}, TREE))
    ready = prepare(task, tmp_path, sandboxes)
    prepared = await validate(ready, sandboxes=sandboxes, environment=environment, cache=tmp_path)
    assert not prepared.options.one_word
