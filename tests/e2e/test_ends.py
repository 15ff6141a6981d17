"""How an attempt ends when its agent or its model does not behave: a reward, or a failure of infrastructure."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from understudy.store import Store

from fakes.vllm import FakeVLLM, Refuse, Say
from support import CLIENT, understudy

pytestmark = pytest.mark.usefixtures("isolation")


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A model server that lists its model and never answers; its base URL."""
    loop = asyncio.new_event_loop()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(600)
        return web.Response()

    async def start() -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions", never)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    runner, port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{port}/v1"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def agent(tmp_path: Path, then: str, calls: int = 1) -> tuple[str, ...]:
    client = tmp_path / "client.py"
    client.write_text(CLIENT)
    command = f"python3 {client} {calls} {tmp_path / 'seen'}; {then}"
    return ("--agent", "shell", "--agent-command", command, "--sandbox", "unsafe-local", "--limit", "1", "--json")


def test_a_model_cannot_trade_a_reward_of_0_for_a_crash_of_its_agent(calc_tasks: Path, tmp_path: Path):
    out = tmp_path / "out"
    done = understudy("run", "--policy", "idle", "--tasks", calc_tasks, "-o", out, *agent(tmp_path, "kill -9 $$"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["unsolved"], summary["infrastructure_failures"], summary["calls"]) == (1, 0, 3)
    with Store.open(out, create=False) as store:
        attempts = store.runs.attempts(store.runs.rollouts()[0].id)
        verdicts = [store.runs.verdict(attempt.id) for attempt in attempts]
    assert [attempt.status for attempt in attempts] == ["failed"] * 3
    assert all(attempt.error and "exit code -9" in attempt.error.message for attempt in attempts)
    assert verdicts[:2] == [None, None]
    assert verdicts[2] is not None
    assert verdicts[2].reward == 0.0


def test_a_model_that_never_answers_is_no_reward(calc_tasks: Path, tmp_path: Path, silent_server: str):
    out = tmp_path / "out"
    backend = ("vllm", "--base-url", silent_server, "--backend-model-high", "m", "--timeout", "2")
    done = understudy("run", *backend, "--tasks", calc_tasks, "-o", out, *agent(tmp_path, "true"))
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["unsolved"], summary["infrastructure_failures"]) == (0, 1)
    (reason,) = summary["failures"]
    assert "backend: the model answered no request" in reason
    with Store.open(out, create=False) as store:
        calls = [
            call for a in store.runs.attempts(store.runs.rollouts()[0].id) for call in store.calls.of_attempt(a.id)
        ]
    assert {call.status for call in calls} == {"abandoned"}


async def test_an_agent_that_ends_after_errors_only_has_no_reward(calc_tasks: Path, tmp_path: Path):
    async with FakeVLLM(default=Refuse(status=400, message="broken")) as server:
        backend = ("vllm", "--base-url", server.url, "--backend-model-high", "fake")
        out, talks = tmp_path / "out", agent(tmp_path, "true", calls=1)
        done = await asyncio.to_thread(understudy, "run", *backend, "--tasks", calc_tasks, "-o", out, *talks)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["unsolved"], summary["infrastructure_failures"]) == (1, 0, 1), done.stderr
    (reason,) = summary["failures"]
    assert "the model answered none of the agent's 1 requests" in reason and "broken" in reason


NUMBERS = "This model's maximum context length is 64 tokens. However, your request has 80 input tokens."


@pytest.mark.parametrize(
    ("answers", "message"),
    [(1, NUMBERS), (1, "prompt is too long"), (0, NUMBERS)],
    ids=["that it filled itself", "that it filled itself, without numbers", "that was too short from the start"],
)
async def test_a_context(calc_tasks: Path, tmp_path: Path, answers: int, message: str):
    full = Refuse(status=400, message=message)
    async with FakeVLLM(*[Say(text="ever so much")] * answers, default=full) as server:
        server.tokenizes = False
        backend = ("vllm", "--base-url", server.url, "--backend-model-high", "fake")
        out = tmp_path / "out"
        talks = agent(tmp_path, "exit 1", calls=2)
        done = await asyncio.to_thread(understudy, "run", *backend, "--tasks", calc_tasks, "-o", out, *talks)
    summary = json.loads(done.stdout)
    with Store.open(out, create=False) as store:
        attempts = store.runs.attempts(store.runs.rollouts()[0].id)
        verdicts = [store.runs.verdict(attempt.id) for attempt in attempts]
    if not answers:
        assert (done.returncode, summary["infrastructure_failures"]) == (1, 1)
        assert any("context holds" in reason for reason in summary["failures"])
        assert set(verdicts) == {None}
        return
    assert (done.returncode, summary["unsolved"], summary["infrastructure_failures"]) == (0, 1, 0), done.stderr
    (attempt,), (verdict,) = attempts, verdicts
    assert (attempt.status, attempt.error, [finding.kind for finding in attempt.findings]) == (
        "succeeded", None, ["context"]
    )  # fmt: skip
    assert verdict is not None and verdict.reward == 0.0


async def test_an_agent_that_gives_up_after_a_cut_answer_has_failed_its_task(calc_tasks: Path, tmp_path: Path):
    async with FakeVLLM(default=Say(text="on and on", finish="length")) as server:
        backend = ("vllm", "--base-url", server.url, "--backend-model-high", "fake")
        out = tmp_path / "out"
        talks = agent(tmp_path, "exit 1", calls=2)
        done = await asyncio.to_thread(understudy, "run", *backend, "--tasks", calc_tasks, "-o", out, *talks)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["unsolved"], summary["calls"]) == (0, 1, 2), done.stderr
    with Store.open(out, create=False) as store:
        (attempt,) = store.runs.attempts(store.runs.rollouts()[0].id)
    assert (attempt.status, attempt.error, [each.kind for each in attempt.findings]) == (
        "succeeded", None, ["answer limit"]
    )  # fmt: skip


def test_one_task_that_cannot_be_had_does_not_end_the_others(calc_tasks: Path, tmp_path: Path):
    lines = calc_tasks.read_text().splitlines()
    bad = {**json.loads(lines[1]), "workdir": "/home"}
    calc_tasks.write_text(f"{lines[0]}\n{json.dumps(bad)}\n")
    agent = ("--agent", "shell", "--agent-command", "true", "--json")
    done = understudy("run", "--tasks", calc_tasks, "-o", tmp_path / "out", *agent)
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert summary["rollouts"] == 1
    assert "/home" in summary["refused_tasks"]["calc-1"]


def test_the_same_task_from_two_places_is_refused(calc_tasks: Path, tmp_path: Path):
    copy = tmp_path / "copy.jsonl"
    copy.write_text(calc_tasks.read_text())
    done = understudy("run", "--tasks", calc_tasks, "--tasks", copy, "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "calc-0" in done.stderr
    assert "copy.jsonl" in done.stderr


@pytest.mark.services
async def test_agents_become_more_while_the_server_bears_them(tmp_path: Path, calc_tasks: Path) -> None:
    # Each agent ends when another one works beside it: one at a time would wait until its timeout.
    beside = tmp_path / "agents"
    beside.mkdir()
    command = f"touch {beside}/$$; until test $(ls {beside} | wc -l) -ge 2; do sleep 0.2; done"
    agent = ("--agent", "shell", "--agent-command", command, "--sandbox", "unsafe-local", "--timeout", "60")
    async with FakeVLLM() as server:
        backend = ("vllm", "--base-url", server.url, "--backend-model-high", "fake")
        arguments = ("run", *backend, "--tasks", calc_tasks, "-n", "2", "-j", "1", *agent, "--json")
        bounded = await asyncio.to_thread(understudy, *arguments, "-o", tmp_path / "no", "--max-concurrency", "0")
        done = await asyncio.to_thread(understudy, *arguments, "-o", tmp_path / "out", "--max-concurrency", "4")
    assert bounded.returncode == 2
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["pending"], summary["infrastructure_failures"]) == (0, 0)
    with Store.open(tmp_path / "out", create=False) as store:
        statuses = {a.status for each in store.runs.rollouts() for a in store.runs.attempts(each.id)}
    assert statuses == {"succeeded"}
    refused = understudy("run", "embedded", "--tasks", calc_tasks, "-j", "1", "--max-concurrency", "4", *agent)
    assert refused.returncode == 2 and "the embedded backend does not report its load" in refused.stderr
