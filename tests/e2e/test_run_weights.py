"""`understudy run embedded --weights`: a model's own weights behind the real CLI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.model.directory import fingerprint
from understudy.store import Store
from understudy.trajectory.samples import merge
from understudy.trajectory.tree import build

from support import optional, understudy
from support.tiny_model import make_model

optional("torch")
# Weights behind the CLI are in test_tiny_corpus.py as well; this run costs 14 s of CPU.
pytestmark = [pytest.mark.e2e, pytest.mark.services, pytest.mark.usefixtures("claude_code", "isolation")]


def test_a_random_model_fails_the_task_and_every_call_can_be_learned_from(
    calc_tasks: Path, tmp_path: Path
) -> None:
    weights, out = make_model(tmp_path / "model"), tmp_path / "out"
    done = understudy(
        "run", "embedded", "--weights", weights, "--tasks", calc_tasks, "--limit", "1", "--samples", "2",
        "--max-turns", "2", "--answer-tokens", "100",
        "--temperature", "0.9", "--tools", "Read,Edit", "--system-prompt", "You mend code.",
        "--output-dir", out, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["solved"], summary["infrastructure_failures"]) == (2, 0, 0)
    with Store.open(out, create=False) as store:
        for rollout in store.runs.rollouts():
            calls = list(store.calls.of_attempt(store.runs.attempts(rollout.id)[0].id))
            assert calls
            for call in calls:
                assert call.status == "ok" and call.audit is not None and call.audit["mode"] == "exact"
                assert call.prompt_token_ids and call.completion_token_ids and call.logprobs
                assert len(call.logprobs) == len(call.completion_token_ids)
                assert all(-20 < logprob <= 0 for logprob in call.logprobs)
                assert {span.version for span in call.policy_spans} == {fingerprint(weights)}
                assert call.sampling["temperature"] == 0.9
            merged = merge(build(calls))
            sampled = sum(len(call.completion_token_ids or ()) for call in calls)
            assert sum(sum(segment.loss_mask) for segment in merged.segments) == sampled
