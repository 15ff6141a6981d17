"""`understudy run` as a person meets it: the real CLI, real sandboxes, the real store."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from understudy.model.process import start_server
from understudy.model.scripted.tokenizer import scripted_tokenizer
from understudy.store import Store
from understudy.tasks.records import dump

from support import calc_task, understudy

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("claude_code", "isolation")]


def run(tasks: Path, output: Path, *options: str) -> dict[str, object]:
    done = understudy("run", "embedded", "--tasks", tasks, "--output-dir", output, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ORACLE = ("--policy", "oracle", "--instance-ids", "calc-0,calc-1", "--samples", "2")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, object]]:
    """The tasks, the directory and the summary of a run of the oracle, which tests may read."""
    directory = tmp_path_factory.mktemp("oracle")
    tasks = directory / "tasks.jsonl"
    dump([calc_task(number) for number in range(2)], tasks)
    return tasks, directory / "out", run(tasks, directory / "out", *ORACLE)


def test_policies_score_as_they_should_and_nothing_is_repeated(
    oracle: tuple[Path, Path, dict[str, object]], tmp_path: Path
):
    tasks, out, summary = oracle
    assert (summary["rollouts"], summary["solved"], summary["unsolved"]) == (4, 4, 0)
    assert summary["infrastructure_failures"] == 0
    for field in ("calls", "prompt_tokens", "completion_tokens"):
        assert int(str(summary[field])) > 0
    again = run(tasks, out, *ORACLE)
    assert {**again, "wall_s": 0} == {**summary, "wall_s": 0}
    for policy in ("wrong", "idle"):
        summary = run(tasks, tmp_path / policy, "--policy", policy, "--limit", "1")
        assert (summary["rollouts"], summary["solved"], summary["unsolved"]) == (1, 0, 1)


async def test_the_embedded_model_is_asked_exactly_in_a_server_of_our_own_or_in_the_runs(
    calc_tasks: Path, tmp_path: Path
):
    exact = '[models.high]\nbackend = "embedded"\ntokens = "exact"\ntool_format = "hermes"\n'
    (tmp_path / "run.toml").write_text(exact)
    async with start_server("idle") as server:
        (tmp_path / "own.toml").write_text(f'{exact}base_url = "{server.url}/v1"\n')
        for name, solved in (("run", 1), ("own", 0)):
            options = (
                "--config",
                tmp_path / f"{name}.toml",
                "--limit",
                "1",
                "--json",
                "--output-dir",
                tmp_path / name,
            )
            done = await asyncio.to_thread(understudy, "run", "--tasks", calc_tasks, *options)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["solved"] == solved
            with Store.open(tmp_path / name, create=False) as store:
                (rollout,) = store.runs.rollouts()
                (call, *_) = store.calls.of_attempt(store.runs.attempts(rollout.id)[0].id)
            assert (call.backend, call.backend_model) == ("embedded", "understudy-embedded")
            assert call.audit is not None


@pytest.mark.services  # four rollouts; tests/unit/model/test_policies.py asks the policy itself
def test_flaky_is_right_as_often_as_it_is_told_and_the_same_each_time(calc_tasks: Path, tmp_path: Path):
    options = ("--policy", "flaky", "--policy-arg", "p=0.5", "--instance-ids", "calc-0,calc-1", "--seed", "3")
    first = run(calc_tasks, tmp_path / "a", *options)
    second = run(calc_tasks, tmp_path / "b", *options)
    assert first["solved"] == second["solved"]
    assert 0 < int(str(first["solved"])) < 2


def test_the_dataset_holds_the_very_tokens_of_each_call(
    oracle: tuple[Path, Path, dict[str, object]], tmp_path: Path
):
    datasets = pytest.importorskip("datasets")
    out = tmp_path / "out"
    shutil.copytree(oracle[1], out)
    done = understudy("export", "hf", out, "--json")
    assert done.returncode == 0, done.stderr
    tokenizer = scripted_tokenizer()
    for task in ("calc-0", "calc-1"):
        rows = datasets.load_from_disk(str(out / f"dataset-{task}"))
        assert [row["turn"] for row in rows] == 2 * list(range(len(rows) // 2))
        for row in rows:
            assert row["repo"] == "example/calc"
            assert row["reward"] == 1.0
            assert tokenizer.decode(row["prompt_ids"]) == row["prompt"]
            assert len(row["logprobs"]) == len(row["gold_completion_ids"])
            assert set(row["logprobs"]) == {0.0}
        closing = tokenizer.decode(rows[len(rows) - 1]["gold_completion_ids"])
        assert closing.endswith("<|im_end|>")
        names = [json.loads(line)["name"] for line in (out / f"stream_{task}.json").read_text().splitlines()]
        assert names.count("raw_gen_ai_request") == len(rows)
        assert "agentlightning.annotation" in names


def test_the_store_has_what_the_cli_saw(oracle: tuple[Path, Path, dict[str, object]]):
    with Store.open(oracle[1], create=False) as store:
        rollout, *_ = store.runs.rollouts()
        (attempt,) = store.runs.attempts(rollout.id)
        calls = list(store.calls.of_attempt(attempt.id))
        logs = store.runs.logs(attempt.id)
    assert [call.sequence for call in calls] == list(range(len(calls)))
    answered = {json.loads(call.response)["id"] for call in calls}
    events = [json.loads(line) for line in logs["stream.jsonl"].splitlines()]
    shown_ids = {event["message"]["id"] for event in events if event["type"] == "assistant"}
    assert shown_ids == answered
    assert any(name.startswith("session/") for name in logs)
    key = b"sk-understudy-"
    assert not any(key in call.request or key in call.response for call in calls)
    assert not any(key in content for content in logs.values())


def test_show_prints_the_story(oracle: tuple[Path, Path, dict[str, object]]):
    out = oracle[1]
    listing = json.loads(understudy("show", "--dir", out, "--json").stdout)
    rollout = next(each["id"] for each in listing["rollouts"] if each["task_id"] == "calc-0")
    text = understudy("show", rollout, "--dir", out).stdout
    for expected in ("calc-0", "Read", "Edit", "Bash", "return x + 1", "test_shift", "passed"):
        assert expected in text


def test_another_agent_works_through_the_same_seam(calc_tasks: Path, tmp_path: Path):
    command = "cat > /dev/null; sed -i 's/return x - 1/return x + 1/' calc.py"
    options = ("--agent", "shell", "--agent-command", command, "--instance-ids", "calc-0,calc-1")
    summary = run(calc_tasks, tmp_path / "out", *options)
    assert (summary["solved"], summary["unsolved"], summary["calls"]) == (1, 1, 0)


def test_max_turns_ends_a_rollout_with_a_reward(calc_tasks: Path, tmp_path: Path):
    summary = run(calc_tasks, tmp_path / "out", "--policy", "oracle", "--limit", "1", "--max-turns", "1")
    assert (summary["solved"], summary["unsolved"], summary["infrastructure_failures"]) == (0, 1, 0)


def test_the_wall_clock_ends_a_rollout_with_a_reward(calc_tasks: Path, tmp_path: Path):
    options = ("--agent", "shell", "--agent-command", "sleep 60", "--timeout", "1", "--limit", "1")
    summary = run(calc_tasks, tmp_path / "out", *options)
    assert (summary["solved"], summary["unsolved"], summary["infrastructure_failures"]) == (0, 1, 0)
    with Store.open(tmp_path / "out", create=False) as store:
        assert store.runs.attempts(store.runs.rollouts()[0].id)[0].status == "timeout"
