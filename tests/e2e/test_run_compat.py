"""The three ways to run, with the flags and the outputs of the example that Understudy began from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from understudy.store import Store
from understudy.tasks.records import dump

from fakes.openai import OpenAIModel
from fakes.turns import ChatModel, MessagesModel, bash, say
from support import calc_task, understudy

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("claude_code", "isolation")]

HIGH, LOW = "claude-sonnet-4-5-20250929", "claude-haiku-4-5-20251001"


@dataclass(frozen=True)
class Way:
    """A way to run: the server behind it, what it takes, and the model's name that the server is asked for."""

    server: type[ChatModel | MessagesModel]
    options: tuple[str, ...]
    env: dict[str, str]
    asked: str
    tokens: bool


WAYS = {
    "vllm": Way(ChatModel, ("--backend-model-high", "fake", "--backend-model-low", "fake"), {}, "fake", True),
    "openai": Way(OpenAIModel, ("--backend-model-high", "gpt-x"), {"OPENAI_API_KEY": "sk-o"}, "gpt-x", False),
    "anthropic": Way(MessagesModel, (), {"ANTHROPIC_API_KEY": "sk-a"}, HIGH, False),
}


@asynccontextmanager
async def model(way: Way) -> AsyncIterator[ChatModel | MessagesModel]:
    """A model that solves calc-0, leaving a new file, and gives up on calc-1."""
    async with way.server() as server:
        mend = "sed -i 's/return x - 1/return x + 1/' calc.py && echo 'how it was mended' > NOTES.md"
        server.play.lanes = {
            calc_task(0).instruction: [say("I mend it.", bash(mend)), say("Done.")],
            calc_task(1).instruction: [say("I look.", bash("cat calc.py")), say("I give up.")],
        }
        yield server


def spans(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"stream_{name}.json").read_text().splitlines()]


@pytest.mark.parametrize("name", WAYS)
async def test_a_way_to_run(name: str, tmp_path: Path):
    way, out = WAYS[name], tmp_path / "out"
    dump([calc_task(0), calc_task(1)], tmp_path / "tasks.jsonl")
    async with model(way) as server:
        done = await asyncio.to_thread(
            understudy, "run", name, *way.options, "--base-url", server.url, "--dataset-path",
            tmp_path / "tasks.jsonl", "--max-turns", "5", "--output-dir", out, "--cooldown-seconds", "0.1",
            "--debug", "-j", "2", "--json", env=way.env,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["solved"], summary["unsolved"]) == (1, 1)
    assert {body["model"] for body in server.requests} == {way.asked}
    if isinstance(server, MessagesModel):
        assert {headers["x-api-key"] for headers in server.headers} == {"sk-a"}

    for instance, reward in (("calc-0", 1.0), ("calc-1", 0.0)):
        stream = spans(out, instance)
        names = [span["name"] for span in stream]
        assert names == ["raw_gen_ai_request"] * 2 + ["agentlightning.annotation"]
        assert stream[-1]["attributes"]["agentlightning.reward.0.value"] == reward
        logs = out / "logs" / instance
        assert {"stream.jsonl", "stderr.txt", "debug.txt", "patch.diff", "test_output.txt"} <= {
            path.name for path in logs.iterdir()
        }
        assert json.loads((logs / "rollout.json").read_text())["reward"] == reward
        (report,) = (out / "logs" / "run_evaluation").glob(f"*/*/{instance}/report.json")
        assert json.loads(report.read_text())[instance]["resolved"] is (reward == 1.0)
        assert (out / f"dataset-{instance}").exists() is way.tokens
    assert "NOTES.md" in (out / "logs" / "calc-0" / "patch.diff").read_text()
    assert [note for note in summary["notes"] if f"{name} backend gives no token ids" in note] == (
        [] if way.tokens else summary["notes"]
    )
    assert bool(summary["notes"]) is not way.tokens
    (of_run,) = out.glob(f"*.{summary['run_id']}.json")
    assert json.loads(of_run.read_text())["resolved_ids"] == ["calc-0"]
    assert "calc-0, sample 0, attempt 1 has reward 1" in (out / "debug.log").read_text()
    if way.tokens:
        datasets = pytest.importorskip("datasets")
        rows = datasets.load_from_disk(str(out / "dataset-calc-0"))
        assert [row["reward"] for row in rows] == [1.0, 1.0]
        assert set(datasets.load_from_disk(str(out / "dataset-calc-1"))["reward"]) == {0.0}
    with Store.open(out, create=False) as store:
        calls = [
            call
            for rollout in store.runs.rollouts()
            for call in store.calls.of_attempt(store.runs.attempts(rollout.id)[0].id)
        ]
        assert {call.requested_model for call in calls} == {HIGH}
        logs = [
            log
            for rollout in store.runs.rollouts()
            for log in store.runs.logs(store.runs.attempts(rollout.id)[0].id).values()
        ]
    for secret in (*way.env.values(), "sk-understudy-"):
        assert not any(secret.encode() in log for log in logs)


async def test_driven_by_the_sdk_inside_the_sandbox(tmp_path: Path):
    """The same model, the same ends: the SDK's way has the same logs, and max_turns is an ordinary end."""
    way, out = WAYS["vllm"], tmp_path / "out"
    dump([calc_task(0), calc_task(1)], tmp_path / "tasks.jsonl")
    async with model(way) as server:
        server.play.lanes[calc_task(1).instruction] = [say("I look.", bash("cat calc.py"))] * 2
        done = await asyncio.to_thread(
            understudy, "run", "vllm", *way.options, "--base-url", server.url, "--tasks",
            tmp_path / "tasks.jsonl", "--max-turns", "2", "-o", out, "--run-method", "python",
            "--open-file-limit", "4096", "-j", "2", "--json",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["solved"], summary["unsolved"], summary["infrastructure_failures"]) == (1, 1, 0)
    ends: dict[str, str] = {}
    for instance in ("calc-0", "calc-1"):
        logs = out / "logs" / instance
        events = [json.loads(line) for line in (logs / "stream.jsonl").read_text().splitlines()]
        ends[instance] = events[-1]["subtype"]
        assert {event["type"] for event in events} >= {"system", "assistant", "user", "result"}
        assert list((logs / "session").glob("*.jsonl"))
    assert ends == {"calc-0": "success", "calc-1": "error_max_turns"}
    with Store.open(out, create=False) as store:
        attempts = [attempt for rollout in store.runs.rollouts() for attempt in store.runs.attempts(rollout.id)]
        assert [attempt.findings for attempt in attempts] == [(), ()]
        (first, *_) = store.calls.of_attempt(attempts[0].id)
    # It is Claude Code itself that asks, with its own system prompt and tools, not the SDK's bare agent.
    request = json.loads(first.request)
    assert len(json.dumps(request["system"])) > 5000
    assert {"Bash", "Edit", "Read"} <= {tool["name"] for tool in request["tools"]}


def test_what_is_missing_is_written_again_and_nothing_is_repeated(calc_tasks: Path, tmp_path: Path):
    out = tmp_path / "out"
    mend = "cat > /dev/null; sed -i 's/return x - 1/return x + 1/' calc.py"
    arguments = (
        "run",
        "--agent",
        "shell",
        "--agent-command",
        mend,
        "--tasks",
        calc_tasks,
        "--instance-ids",
        "calc-0,calc-1",
    )
    arguments = (*arguments, "-n", "2", "-o", out, "--json")
    assert understudy(*arguments).returncode == 0
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.suffix != ".db")
    assert out / "stream_calc-1.1.json" in files
    before = {path: path.read_bytes() for path in files}
    (out / "stream_calc-0.0.json").unlink()
    (out / "logs" / "calc-1.1" / "rollout.json").unlink()
    patch = out / "logs" / "calc-1.0" / "patch.diff"
    patch.write_text("as it was left\n")
    again = understudy(*arguments)
    assert again.returncode == 0, again.stderr
    assert patch.read_text() == "as it was left\n"
    assert json.loads(again.stdout)["rollouts"] == 4
    assert understudy(*arguments, "--rewrite-reports").returncode == 0
    same = {path: path.read_bytes() for path in before}
    assert {path for path in before if same[path] != before[path]} == set()
    with Store.open(out, create=False) as store:
        assert all(len(store.runs.attempts(rollout.id)) == 1 for rollout in store.runs.rollouts())


def test_an_instance_that_is_not_there_is_named_and_the_others_run(calc_tasks: Path, tmp_path: Path):
    options = ("--agent", "shell", "--agent-command", "true", "--tasks", calc_tasks, "--json")
    done = understudy("run", *options, "--instance-ids", "calc-2,calc-9", "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "calc-9" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["rollouts"] == 1
    assert list(summary["refused_tasks"]) == ["calc-9"]
    done = understudy("run", *options, "--instance-ids", "calc-9", "-o", tmp_path / "none")
    assert done.returncode == 2
    assert "calc-9" in done.stderr


def test_what_the_models_lack_is_said_before_the_tasks_are_taken_in(calc_tasks: Path, tmp_path: Path):
    """Intake of a large dataset takes hours, and a key or a server may be missing."""
    way = ("run", "openai", "--backend-model-high", "gpt-x", "--tasks", calc_tasks, "-o", tmp_path / "out")
    done = understudy(*way, env={"OPENAI_API_KEY": ""})
    assert done.returncode == 2
    assert "OPENAI_API_KEY is not set" in done.stderr
    assert "validating" not in done.stderr
    assert not (tmp_path / "out").exists()
    down = ("run", "vllm", "--backend-model-high", "m", "--base-url", "http://127.0.0.1:9/v1")
    done = understudy(*down, "--tasks", calc_tasks, "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "and that the server is running" in done.stderr
    assert "validating" not in done.stderr
