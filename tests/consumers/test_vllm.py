"""A real vLLM on CPUs serves the tiny model: rollouts, token ids, weights published, servers killed."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from understudy.errors import BackendError
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.backends.pool import BackendPool
from understudy.model.directory import directory_of
from understudy.store import Store
from understudy.tasks.records import dump
from understudy.train.publish.choice import make_publisher
from understudy.train.tiny import corpus
from understudy.types import Call
from understudy.wire.model import ChatRequest, ConversationHandle

from fakes.control import FakeVLLMControl, Served
from fakes.loop_program import quick_task
from support import optional, require, understudy, vllm_server
from support.vllm_server import MODEL, VLLMProcess

torch: Any = optional("torch")
transformers: Any = optional("transformers")

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

AGENT = ("--tools", corpus.TOOLS, "--system-prompt", corpus.SYSTEM_PROMPT, "--max-turns", "6")
PROMPT = list(range(20, 60))
# How many tokens to generate while weights are published. Where a generation ends before the publishing, which is
# where other processes have the cores, the next number is taken.
LENGTHS = (300, 900, 2000)


@pytest.fixture(scope="module")
def tiny() -> Path:
    return directory_of("tiny")


@pytest.fixture(scope="module")
def second(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights, but for its embedding.

    On CPUs, vLLM 0.32 packs an output head that is tied to the embedding when it starts, and does not pack it
    anew when weights are loaded in place.
    """
    directory = tmp_path_factory.mktemp("second")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "embed_tokens" not in name:
                parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[list[VLLMProcess]]:
    require(vllm_server.problems())
    with socket.socket() as one, socket.socket() as other:
        ports = [(each.bind(("127.0.0.1", 0)), each.getsockname()[1])[1] for each in (one, other)]
    async with vllm_server.serving(tiny, tmp_path_factory.mktemp("vllm"), ports) as started:
        yield started


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "train.jsonl"
    made = understudy("tasks", "make", "functions", "--count", "4", "--split", "train", "--output", path)
    assert made.returncode == 0, made.stderr
    return path


def calls_of(run: Path) -> list[list[Call]]:
    with Store.open(run, create=False) as store:
        attempts = [attempt for rollout in store.runs.rollouts() for attempt in store.runs.attempts(rollout.id)]
        return [list(store.calls.of_attempt(attempt.id)) for attempt in attempts]


def assert_sampled_by(weights: Path, prompt: list[int], ids: list[int], logprobs: list[float], start: int = 0):
    """The logprobs are those of a plain forward pass of these weights, from `start` on."""
    model = transformers.AutoModelForCausalLM.from_pretrained(weights)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs)[start:], expected[start:], atol=2e-3, rtol=0)


# --- rollouts --------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize("tokens", ["observe", "exact"])
async def test_the_real_cli_works_before_it(
    tokens: str, servers: list[VLLMProcess], tasks: Path, tmp_path: Path, claude_code: Path, isolation: None
) -> None:
    exact = f'tokens = "exact"\ntokenizer = "{directory_of("tiny")}"\ntool_format = "hermes"\n'
    config = tmp_path / "gateway.toml"
    config.write_text(
        f'streaming = {"true" if tokens == "observe" else "false"}\n[models.high]\nbackend = "vllm"\n'
        f'base_url = "{servers[0].url}/v1"\nmodel = "{MODEL}"\n{exact if tokens == "exact" else ""}'
    )
    out = tmp_path / "run"
    done = await asyncio.to_thread(
        understudy,
        "run", "--config", config, "--tasks", tasks, "--limit", "2", "--samples", "2", "--temperature", "1",
        "--answer-tokens", "300", *AGENT, "-j", "2", "-o", out, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["infrastructure_failures"] == 0, done.stdout
    rollouts = calls_of(out)
    assert len(rollouts) == 4
    for calls in rollouts:
        assert calls
        for call in calls:
            assert call.status == "ok", call.error
            ids, logprobs = list(call.completion_token_ids or ()), list(call.logprobs or ())
            assert call.prompt_token_ids and ids and len(logprobs) == len(ids)
        if tokens == "exact":
            assert all(call.audit and call.audit["mode"] == "exact" for call in calls)


# --- weights ---------------------------------------------------------------------------------------------


# It mends its task or not by what the model says, so that the rollouts of a group differ.
LEARNER = """
import http.client, json, os, pathlib, re, socket, sys
instruction = sys.stdin.read()
gateway = http.client.HTTPConnection("localhost")
gateway.sock = socket.socket(socket.AF_UNIX)
gateway.sock.connect(os.environ["UNDERSTUDY_GATEWAY_SOCKET"])
body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": instruction}]}
gateway.request("POST", "/v1/messages", json.dumps(body), {
    "authorization": "Bearer " + os.environ["UNDERSTUDY_API_KEY"], "anthropic-version": "2023-06-01"})
answer = json.loads(gateway.getresponse().read())
if sum(json.dumps(answer["content"]).encode()) % 2:
    path = pathlib.Path("calc.py")
    path.write_text(re.sub(r"x - (\\d+)", r"x + \\1", path.read_text()))
"""


# In this order: a server keeps the whole weights that it was given last, and an adapter stands on the first ones.
@pytest.mark.parametrize("way", ["lora", "disk"])
async def test_a_loop_learns_and_publishes(
    way: str, servers: list[VLLMProcess], tmp_path: Path, isolation: None
) -> None:
    dump([quick_task(number) for number in range(2)], tmp_path / "tasks.jsonl")
    out, agent = tmp_path / "loop", shlex.join(["python3", "-c", LEARNER])
    done = await asyncio.to_thread(
        understudy,
        "train", "loop", "tiny", "--tasks", tmp_path / "tasks.jsonl", "--steps", "1", "--groups", "2",
        "--samples", "6", "--eval-every", "0", "--temperature", "1.5",
        "--agent", "shell", "--agent-command", agent,
        "--backend", "vllm", "--base-url", f"{servers[0].url}/v1", "--served-model", MODEL, "--publish", way,
        *(["--lora", "--lora-rank", "8"] if way == "lora" else []), "-o", out, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["updates"], summary["version"]) == (1, 1, "step-0001"), done.stderr
    (line,) = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["mismatch_mean"] < 1e-3


async def generate(server: VLLMProcess, **params: Any) -> dict[str, Any]:
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"logprobs": 0, "seed": 1, "temperature": 1.0} | params,
        "return_token_ids": True,
        "return_weight_versions": True,
    }
    status, answer = await send(server, "POST", "/inference/v1/generate", body)
    assert status == 200, answer
    return answer["choices"][0]


async def send(server: VLLMProcess | Served, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.request(method, server.url + path, json=body) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if answer.content_type == "application/json" else text


async def until_running(server: VLLMProcess, number: int) -> None:
    """Wait until the engine has so many requests in its batch."""
    async with asyncio.timeout(60):
        while True:
            _, metrics = await send(server, "GET", "/metrics")
            running = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", metrics, re.MULTILINE)
            assert running, metrics
            if float(running[1]) >= number:
                return
            await asyncio.sleep(0.01)


async def test_what_is_in_flight_goes_on_with_the_new_weights(
    servers: list[VLLMProcess], tiny: Path, second: Path
) -> None:
    publisher = make_publisher("vllm", [server.url for server in servers])
    await publisher.publish(tiny, "before")
    for server in servers:
        for length in LENGTHS:
            started = [
                asyncio.ensure_future(generate(server, max_tokens=length, ignore_eos=True)) for _ in range(6)
            ]
            await until_running(server, len(started))
            # A batch of eight takes all of them a step further at once, so each has tokens of the old weights now.
            await generate(server, max_tokens=5, ignore_eos=True)
            await publisher.publish(second, "after")
            choices = await asyncio.gather(*started)
            await publisher.publish(tiny, "before")
            if all(len(choice["weight_versions"]) > 1 for choice in choices):
                break
        for choice in choices:
            old, new = choice["weight_versions"]
            assert (old["version"], old["start"], new["version"]) == ("before", 0, "after")
            assert (old["end"], new["end"]) == (new["start"], length)
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert_sampled_by(second, PROMPT, choice["token_ids"], logprobs, start=new["start"])
            assert_sampled_by(tiny, PROMPT, choice["token_ids"][: old["end"]], logprobs[: old["end"]])
    assert await publisher.current() == "before"


async def test_what_a_paused_server_was_asked_is_answered_once_it_goes_on(servers: list[VLLMProcess]) -> None:
    assert (await send(servers[0], "POST", "/pause?mode=keep"))[0] == 200
    request = asyncio.ensure_future(generate(servers[0], max_tokens=3, ignore_eos=True))
    assert not (await asyncio.wait([request], timeout=1.0))[0]
    assert (await send(servers[0], "POST", "/resume"))[0] == 200
    assert len((await request)["token_ids"]) == 3


# What it refuses: the method, path and body of a request, and what it answers. The fakes answer the same.
REFUSED: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/pause?mode=never", None, 400, "Input should be 'abort', 'wait' or 'keep'"),
    ("GET", "/pause", None, 405, "Method Not Allowed"),
    ("POST", "/update_weight_version", {}, 400, "Field required"),
    (
        "POST",
        "/v1/load_lora_adapter",
        {"lora_name": "a", "lora_path": "/nowhere"},
        404,
        "No adapter found for /nowhere",
    ),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a"}, 400, "Field required"),
]


@pytest.mark.parametrize("real", [True, False])
async def test_the_fake_control_endpoints_refuse_what_the_real_ones_do(
    real: bool, request: pytest.FixtureRequest
) -> None:
    async with FakeVLLMControl() as fake:
        server = request.getfixturevalue("servers")[0] if real else fake
        for method, path, body, status, text in REFUSED:
            got, answer = await send(server, method, path, body)
            assert (got, text in json.dumps(answer)) == (status, True), (method, path, answer)


async def test_weights_that_cannot_be_loaded_leave_a_server_paused_until_some_can(
    servers: list[VLLMProcess], tiny: Path, tmp_path: Path
) -> None:
    publisher = make_publisher("vllm", servers[0].url)
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(BackendError, match="stays paused"):
        await publisher.publish(broken, "broken")
    assert (await send(servers[0], "GET", "/is_paused"))[1] == {"is_paused": True}
    await publisher.publish(tiny, "before")
    assert len((await generate(servers[0], max_tokens=3, ignore_eos=True))["token_ids"]) == 3


# --- a server dies ---------------------------------------------------------------------------------------


async def test_what_a_killed_server_was_answering_is_asked_of_the_other(
    servers: list[VLLMProcess], tiny: Path
) -> None:
    one, other = servers
    await make_publisher("vllm", [server.url for server in servers]).publish(tiny, "before")
    pool = BackendPool([VLLMBackend(f"{server.url}/v1", MODEL) for server in servers])

    def ask(number: int, tokens: int) -> Any:
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        return pool.generate(
            ChatRequest(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                conversation=ConversationHandle(f"talk {number}"),
                sampling=sampling,
            )
        )

    try:
        in_flight = [asyncio.ensure_future(ask(number, 800)) for number in range(8)]
        while "vllm:num_requests_running" not in (metrics := (await send(one, "GET", "/metrics"))[1]) or not any(  # noqa: ASYNC110
            float(line.split()[-1]) > 1
            for line in metrics.splitlines()
            if line.startswith("vllm:num_requests_running")
        ):
            await asyncio.sleep(0.1)
        await one.kill()
        ended = await asyncio.gather(*in_flight)
        assert all(len(generation.completion_token_ids or ()) == 800 for generation in ended)
        again = await asyncio.gather(*(ask(number, 5) for number in range(8)))
        assert all(len(generation.completion_token_ids or ()) == 5 for generation in again)
    finally:
        await pool.close()
    with pytest.raises(BackendError, match="start the server, or correct its address"):
        await make_publisher("vllm", one.url).current()
    assert await make_publisher("vllm", other.url).current() == "before"
