"""Token-exact runs of real agents over twenty turns with edits: one sequence a branch, nothing sampled is lost."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from understudy.store import Store
from understudy.tasks.records import dump
from understudy.trajectory.samples import merge
from understudy.trajectory.tree import build
from understudy.types import WORK_ROLES, Files, PytestChecks, Task

from support import understudy
from support.agents import AGENTS, require_agent

pytestmark = [pytest.mark.e2e, pytest.mark.services, pytest.mark.usefixtures("isolation")]

FUNCTIONS = 10
CONFIG = '[models.high]\nbackend = "embedded"\ntokens = "exact"\ntool_format = "hermes"\n'


def many_edits() -> Task:
    """A task with a wrong line in each of ten functions, so far apart that each is an edit of its own."""

    def module(sign: str) -> str:
        padding = "".join(f"# {line}\n" for line in range(12))
        return "".join(f"def f{n}(x):\n    return x {sign} {n + 1}\n\n\n{padding}\n\n" for n in range(FUNCTIONS))

    bad, good = module("-"), module("+")
    diff = difflib.unified_diff(bad.splitlines(True), good.splitlines(True), "a/calc.py", "b/calc.py")
    test = "import calc\n\n\ndef test_same():\n    assert calc.f0\n"
    values = f"[getattr(calc, f'f{{n}}')(1) for n in range({FUNCTIONS})]"
    hidden = f"{test}\n\ndef test_all():\n    assert {values} == {[n + 2 for n in range(FUNCTIONS)]}\n"
    return Task(
        instance_id="calc-many",
        repo="example/calc",
        instruction="Each function of calc.py must add its number to x; all of them take it away. Mend calc.py.",
        source=Files({"calc.py": bad, "test_calc.py": test}),
        checks=PytestChecks(
            files={"test_calc.py": hidden},
            fail_to_pass=("test_calc.py::test_all",),
            pass_to_pass=("test_calc.py::test_same",),
        ),
        gold_patch="".join(diff),
    )


@pytest.mark.parametrize("agent", ("claude-code", *AGENTS, "openhands"))
def test_twenty_turns_with_edits_are_one_sequence(agent: str, tmp_path: Path) -> None:
    require_agent(agent)
    dump([many_edits()], tmp_path / "tasks.jsonl")
    (tmp_path / "run.toml").write_text(CONFIG)
    output = tmp_path / "out"
    done = understudy(
        "run", "--config", tmp_path / "run.toml", "--tasks", tmp_path / "tasks.jsonl", "--agent", agent,
        "--output-dir", output, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["solved"] == 1
    with Store.open(output, create=False) as store:
        (rollout,) = store.runs.rollouts()
        (attempt,) = store.runs.attempts(rollout.id)
        calls = list(store.calls.of_attempt(attempt.id))
    tree = build(calls)
    work = [node.call for node in tree.nodes if node.role in WORK_ROLES]
    assert len(work) >= 2 * FUNCTIONS
    merged = merge(tree, WORK_ROLES)
    sampled = sum(len(call.completion_token_ids or ()) for call in work)
    trained = sum(sum(segment.loss_mask) for segment in merged.segments)
    assert [segment.role for segment in merged.segments] == ["main"], merged.reasons
    assert trained == sampled > 0
    assert not attempt.findings
