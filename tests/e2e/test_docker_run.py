"""Instances in container images, without network, solved by the real CLI by each of the three ways to run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.store import Store
from understudy.tasks.records import dump
from understudy.types import Task

from fakes.openai import OpenAIModel
from fakes.turns import ChatModel, MessagesModel, bash, say
from support import UNDERSTUDY, statuses, understudy, wait_for
from support.docker_engine import Engine
from support.grading import calc_instance

pytestmark = [
    pytest.mark.services,
    pytest.mark.e2e,
    pytest.mark.usefixtures("claude_code"),
]


def teach(server: ChatModel | MessagesModel, tasks: list[Task], *, solves: int) -> None:
    """Have the model solve the first so many tasks, leaving a new file, and give up on the others."""
    probe = (
        "! timeout 1 bash -c 'exec 3<>/dev/tcp/1.1.1.1/80' 2>/dev/null && git log --oneline --all | wc -l && "
        "id -u && echo $CONDA_DEFAULT_ENV && command -v python && "
    )
    for number, task in enumerate(tasks):
        step = number + 1
        mend = f"sed -i 's/return x - {step}/return x + {step}/' calc.py && echo 'how' > NOTES.md"
        turns = [say("I mend it.", bash(probe + mend)), say("Done.")]
        server.play.lanes[task.instruction] = turns if number < solves else [say("I give up.")]


WAYS: dict[str, tuple[type[ChatModel | MessagesModel], tuple[str, ...], dict[str, str]]] = {
    "vllm": (ChatModel, ("--backend-model-high", "fake"), {}),
    "openai": (OpenAIModel, ("--backend-model-high", "gpt-x"), {"OPENAI_API_KEY": "sk-o"}),
    "anthropic": (MessagesModel, (), {"ANTHROPIC_API_KEY": "sk-a"}),
}


@pytest.mark.parametrize("way", WAYS)
async def test_solved_in_a_container_without_network(way: str, engine: Engine, tmp_path: Path):
    kind, options, env = WAYS[way]
    out, tasks = tmp_path / "out", [calc_instance(engine, number) for number in range(2)]
    dump(tasks, tmp_path / "tasks.jsonl")
    # The SDK's way is tried once, where it costs least.
    method = ("--run-method", "python") if way == "anthropic" else ()
    async with kind() as server:
        teach(server, tasks, solves=1)
        done = await asyncio.to_thread(
            understudy, "run", way, *options, *method, "--base-url", server.url, "--dataset-path",
            tmp_path / "tasks.jsonl", "--max-turns", "5", "-o", out, "-j", "2", "--json", env=env,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["solved"], summary["unsolved"], summary["refused_tasks"]) == (1, 1, {})
    assert "return x + 1" in (patch := (out / "logs" / "example__calc-0" / "patch.diff").read_text())
    assert "NOTES.md" in patch
    events = (out / "logs" / "example__calc-0" / "stream.jsonl").read_text().splitlines()
    (result,) = [
        event["tool_use_result"]["stdout"] for line in events if (event := json.loads(line))["type"] == "user"
    ]
    commits, user, *environment = result.split()
    assert (commits, user) == ("2", "1000"), "commits that it can see, and who it is"
    assert environment == ["testbed", "/opt/miniconda3/envs/testbed/bin/python"], "what its tests run with"
    for name, reward in (("example__calc-0", 1.0), ("example__calc-1", 0.0)):
        spans = [json.loads(line) for line in (out / f"stream_{name}.json").read_text().splitlines()]
        assert spans[-1]["attributes"]["agentlightning.reward.0.value"] == reward
        assert (out / f"dataset-{name}").exists() is (way == "vllm")
    with Store.open(out, create=False) as store:
        assert all(not attempt.findings for r in store.runs.rollouts() for attempt in store.runs.attempts(r.id))
        assert store.runs.all()[0].config["sandbox"] == "docker"


def started(arguments: list[str]) -> subprocess.Popen[str]:
    """The command line in a process group of its own."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [UNDERSTUDY, *arguments], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, process_group=0
    )


async def test_killed_in_the_middle_and_continued(engine: Engine, tmp_path: Path):
    """What ended is not done again; what was cut off is, and its container is gone."""
    out, tasks = tmp_path / "out", [calc_instance(engine, number) for number in range(2)]
    dump(tasks, tmp_path / "tasks.jsonl")
    async with ChatModel() as server:
        teach(server, tasks, solves=2)
        release = asyncio.Event()
        server.play.lanes[tasks[1].instruction].insert(0, say("I wait.", bash("true"), hold=release))
        arguments = ["run", "vllm", "--backend-model-high", "fake", "--base-url", server.url, "-j", "2", "--json"]
        arguments += ["--tasks", str(tmp_path / "tasks.jsonl"), "-o", str(out)]
        process = started(arguments)
        try:
            await asyncio.to_thread(
                wait_for, lambda: statuses(out)["succeeded"] == 1 and len(server.requests) >= 3, process
            )
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        release.set()
        before = len(server.requests)
        done = await asyncio.to_thread(understudy, *arguments)
        assert done.returncode == 0, done.stderr
        assert len(server.requests) - before == 2
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["solved"]) == (2, 2)
    with Store.open(out, create=False) as store:
        tries = {
            r.task_id: [attempt.status for attempt in store.runs.attempts(r.id)] for r in store.runs.rollouts()
        }
    assert tries == {"example__calc-0": ["succeeded"], "example__calc-1": ["unresponsive", "succeeded"]}
    assert sorted(path.name for path in out.glob("stream_*")) == [
        f"stream_{task.instance_id}.json" for task in tasks
    ]


def test_an_image_that_is_not_there_is_named_and_the_others_run(engine: Engine, tmp_path: Path):
    good = calc_instance(engine, 0)
    absent = replace(good, instance_id="example__gone-1", image="127.0.0.1:9/nobody/has.this:latest")
    dump([absent, good], tmp_path / "tasks.jsonl")
    options = ("--agent", "shell", "--agent-command", "true", "--tasks", tmp_path / "tasks.jsonl", "--json")
    done = understudy("run", *options, "-o", tmp_path / "out")
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["unsolved"]) == (1, 1)
    assert "127.0.0.1:9/nobody/has.this" in summary["refused_tasks"]["example__gone-1"]


def test_an_engine_that_is_down_is_said_at_once(engine: Engine, tmp_path: Path):
    dump([calc_instance(engine, 0)], tmp_path / "tasks.jsonl")
    down = f"unix://{tmp_path}/no.sock"
    options = ("--agent", "shell", "--agent-command", "true", "--tasks", tmp_path / "tasks.jsonl")
    done = understudy("run", *options, "-o", tmp_path / "out", env={"DOCKER_HOST": down})
    assert done.returncode == 2
    assert f"{tmp_path}/no.sock" in done.stderr
    assert "Traceback" not in done.stderr
