"""The embedded server with weights, over real HTTP: tokens in and out, control, weights exchanged."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from understudy.errors import BackendError, ConfigError
from understudy.gateway.backends.http import HttpClient
from understudy.gateway.exact.codec import LocalCodec
from understudy.gateway.exact.token_servers import SERVERS
from understudy.model.process import ServerProcess, start_server
from understudy.train.publish.choice import make_publisher

from support import optional
from support.tiny_model import make_model

torch: Any = optional("torch")
transformers: Any = optional("transformers")

pytestmark = pytest.mark.asyncio(loop_scope="module")

Body = dict[str, Any]
CONTEXT = 40_000
ENDLESS: dict[str, Any] = {"max_tokens": 39_000, "ignore_eos": True}
"""For what is never waited for: whatever else the machine does, it goes on until it is called off."""
PATIENCE = (0.05, 1.0, 10.0)
"""Seconds in which requests get to the server and begin. Nothing tells when they did, so what rests on it is tried
again where they had not.
"""
FIRST = "step-0000"


class Client:
    """What asks the server."""

    def __init__(self, server: ServerProcess, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.request(method, f"{self.server.url}{path}", json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def post(self, path: str, body: Any = None) -> Any:
        status, answer = await self.send("POST", path, body)
        assert status == 200, answer
        return answer

    async def generate(self, prompt: list[int], model: str | None = None, **params: Any) -> Body:
        body = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": 8, "logprobs": 0, "seed": 1} | params,
            "return_weight_versions": True,
        }
        (choice,) = (await self.post("/inference/v1/generate", body | ({"model": model} if model else {})))[
            "choices"
        ]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        return choice

    async def end(self, requests: list[asyncio.Task[Body]]) -> list[Body]:
        """Call off what was asked, also what is only just coming in; what was said till then."""
        while True:
            await self.post("/pause?mode=abort")
            _, late = await asyncio.wait(requests, timeout=1.0)
            if not late:
                return [one.result() for one in requests]
            await self.post("/resume")

    async def serve(self, weights: Path, version: str) -> None:
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
        await self.post("/update_weight_version", {"new_version": version})
        await self.post("/resume")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("first"), context=CONTEXT)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("second"), seed=1, context=CONTEXT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(directory: Path) -> AsyncGenerator[Client]:
    """The one server of most tests, for it takes seconds to start."""
    async with start_server(weights=directory, version=FIRST) as server, aiohttp.ClientSession() as session:
        yield Client(server, session)


@pytest_asyncio.fixture(loop_scope="module")
async def client(started: Client, directory: Path) -> AsyncGenerator[Client]:
    """The server as it was started, whatever the test before has exchanged."""
    yield started
    await started.serve(directory, FIRST)


def assert_sampled_by(
    weights: Any, prompt: list[int], choice: Body, start: int = 0, end: int | None = None
) -> None:
    """The logprobs of a stretch of a completion are those of a plain forward of these weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(weights) if isinstance(weights, Path) else weights
    ids = choice["token_ids"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    reported = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    torch.testing.assert_close(reported[start:end], expected[start:end], atol=1e-4, rtol=0)


async def test_tokens_go_in_and_come_out_and_the_chat_is_the_same(client: Client, directory: Path) -> None:
    messages = [{"role": "user", "content": "héllo"}]
    tools = [{"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}}]
    tokenized = await client.post("/tokenize", {"messages": messages, "tools": tools})
    prompt, limit = tokenized["tokens"], tokenized["max_model_len"]
    assert limit == CONTEXT
    assert prompt == await LocalCodec.load(str(directory)).render(messages, tools)
    choice = await client.generate(prompt, max_tokens=30)
    assert_sampled_by(directory, prompt, choice)
    body = {"messages": messages, "tools": tools, "max_tokens": 30, "seed": 1, "logprobs": True}
    answer = await client.post("/v1/chat/completions", body | {"return_token_ids": True})
    (chat,) = answer["choices"]
    assert (answer["prompt_token_ids"], chat["token_ids"]) == (prompt, choice["token_ids"])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    text = (await client.post("/detokenize", {"tokens": chat["token_ids"]}))["prompt"]
    assert text.startswith(chat["message"]["content"].rstrip("\ufffd"))
    # As the gateway asks it, and reads it.
    server = SERVERS["embedded"](HttpClient(f"{client.server.url}/v1"), client.server.model)
    try:
        sampled = await server.generate(prompt, {"max_tokens": 30, "seed": 1, "temperature": 1.0}, None)
    finally:
        await server.client.close()
    assert sampled.ids == choice["token_ids"]
    assert [(span.version, span.start, span.end) for span in sampled.policy_spans] == [
        ("step-0000", 0, len(sampled.ids))
    ]


async def test_other_weights_under_traffic_give_each_token_its_version(
    client: Client, directory: Path, second: Path
) -> None:
    prompts = [list(range(9 + number, 40 + number)) for number in range(5)]
    models = {"step-0000": directory, "step-0001": second}
    swapped = 0
    for patience in PATIENCE:
        requests = [asyncio.ensure_future(client.generate(p, **ENDLESS)) for p in prompts]
        await asyncio.sleep(patience)
        assert await client.post("/pause?mode=keep") == {"status": "paused"}
        assert (await client.send("GET", "/is_paused"))[1] == {"is_paused": True}
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(second)}}
        assert await client.post("/collective_rpc", reload) == {"results": [None]}
        await client.post("/update_weight_version", {"new_version": "step-0001"})
        assert (await client.send("GET", "/weight_info"))[1] == {"weight_version": "step-0001"}
        assert await client.post("/resume") == {"status": "resumed"}
        new = await client.generate(prompts[0], max_tokens=9)
        assert [span["version"] for span in new["weight_versions"]] == ["step-0001"]
        for prompt, choice in zip(prompts, await client.end(requests), strict=True):
            spans = choice["weight_versions"]
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
            assert spans[-1]["end"] == len(choice["token_ids"])
            swapped += len(spans) == 2
            for span in spans:
                assert_sampled_by(models[span["version"]], prompt, choice, span["start"], span["end"])
        if swapped:
            return
        await client.serve(directory, FIRST)
    raise AssertionError("nothing was under way when the weights were changed")


async def test_weights_that_do_not_fit_change_nothing(client: Client, directory: Path, tmp_path: Path) -> None:
    wider = make_model(tmp_path / "wider", context=CONTEXT)
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    bad = {
        wider: "vocab_size is 300",
        tmp_path / "none": "is no directory",
        make_model(
            tmp_path / "broad", hidden=64, context=CONTEXT
        ): "model: model.embed_tokens.weight has the shape",
        make_model(tmp_path / "deep", layers=3, context=CONTEXT): "has the shape [32], expected none",
        make_model(tmp_path / "short", context=100): "max_position_embeddings is 100",
    }
    for path, message in bad.items():
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        status, answer = await client.send("POST", "/collective_rpc", call)
        assert status == 400 and message in answer["error"]["message"], answer
    status, answer = await client.send("POST", "/collective_rpc", {"method": "os.system"})
    assert status == 400 and "reload_weights" in answer["error"]["message"]
    assert (await client.send("POST", "/pause?mode=never"))[0] == 400
    assert_sampled_by(directory, [9, 10], await client.generate([9, 10]))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers for it
async def test_an_adapter_is_served_under_its_name_and_exchanged_in_place(
    client: Client, directory: Path, tmp_path: Path
) -> None:
    peft: Any = pytest.importorskip("peft")

    def adapter(seed: int) -> tuple[Path, Any]:
        torch.manual_seed(seed)
        base = transformers.AutoModelForCausalLM.from_pretrained(directory)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        tuned = peft.get_peft_model(base, config)
        tuned.save_pretrained(tmp_path / f"adapter-{seed}")
        return tmp_path / f"adapter-{seed}", tuned.eval()

    prompt = list(range(9, 60))
    path, tuned = adapter(1)
    assert "added successfully" in await client.post(
        "/v1/load_lora_adapter", {"lora_name": "tuned", "lora_path": str(path)}
    )
    _, models = await client.send("GET", "/v1/models")
    assert [card["id"] for card in models["data"]] == [client.server.model, "tuned"]
    ours, theirs = await asyncio.gather(client.generate(prompt, "tuned"), client.generate(prompt))
    assert_sampled_by(tuned, prompt, ours)
    assert_sampled_by(directory, prompt, theirs)
    path, tuned = adapter(2)
    again = {"lora_name": "tuned", "lora_path": str(path)}
    status, answer = await client.send("POST", "/v1/load_lora_adapter", again)
    assert status == 400 and "load_inplace" in answer["error"]["message"]
    await client.post("/v1/load_lora_adapter", again | {"load_inplace": True})
    assert_sampled_by(tuned, prompt, await client.generate(prompt, "tuned"))
    partial = tmp_path / "partial"
    shutil.copytree(path, partial)
    from safetensors.torch import load_file, save_file

    tensors = load_file(partial / "adapter_model.safetensors")
    save_file({name: tensors[name] for name in sorted(tensors)[1:]}, partial / "adapter_model.safetensors")
    for bad, message in (
        (tmp_path / "no", "adapter_config.json: no such file"),
        (partial, "missing adapter keys"),
    ):
        missing = {"lora_name": "x", "lora_path": str(bad)}
        status, answer = await client.send("POST", "/v1/load_lora_adapter", missing)
        assert status == 404 and message in answer["error"]["message"]
    assert "removed" in await client.post("/v1/unload_lora_adapter", {"lora_name": "tuned"})
    status, _ = await client.send("POST", "/inference/v1/generate", {
        "model": "tuned", "token_ids": [9], "sampling_params": {},
    })  # fmt: skip
    assert status == 404


BAD: list[tuple[Body, str]] = [
    ({"token_ids": [9] * CONTEXT, "sampling_params": {"max_tokens": 9}}, f"maximum context length is {CONTEXT}"),
    ({"token_ids": [9] * 300_000, "sampling_params": {"max_tokens": 9}}, "300000 input tokens"),
    ({"token_ids": [9] * (CONTEXT + 5), "sampling_params": {"max_tokens": -5}}, "max_tokens must be at least 1"),
    ({"token_ids": [9], "sampling_params": {"max_tokens": 0}}, "max_tokens must be at least 1"),
    ({"token_ids": [9], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"token_ids": [9], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"token_ids": [9], "sampling_params": {"top_k": -2}}, "top_k"),
    ({"token_ids": [9], "sampling_params": {"min_p": 2}}, "min_p"),
    ({"token_ids": [9], "sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"token_ids": [9], "sampling_params": {"n": 2}}, "n must be 1"),
    ({"token_ids": [9], "sampling_params": {"stop": ""}}, "empty string"),
    ({"token_ids": [9], "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
    ({"token_ids": [9], "sampling_params": {"logit_bias": {"9": 1e300}}}, "in [-100, 100]"),
    ({"token_ids": [9], "sampling_params": {"logit_bias": {"265": 1}}}, "out of vocabulary: [265]"),
    ({"token_ids": [265], "sampling_params": {}}, "out of vocabulary"),
    ({"token_ids": [], "sampling_params": {}}, "at least one token"),
]


async def test_bad_requests_are_refused_in_words_and_clients_that_leave_are_let_go(client: Client) -> None:
    for body, message in BAD:
        status, answer = await client.send("POST", "/inference/v1/generate", body)
        assert status == 400 and message in answer["error"]["message"], (body, answer)
    endless = [asyncio.ensure_future(client.generate([9], **ENDLESS)) for _ in range(40)]
    await client.generate([9, 10], max_tokens=1)
    for one in endless:
        one.cancel()
    await asyncio.gather(*endless, return_exceptions=True)
    # Had they been served to their end, this would wait for 40 times 39,000 tokens.
    choice = await asyncio.wait_for(client.generate([9, 10, 11], max_tokens=5), 20)
    assert len(choice["token_ids"]) == 5


@pytest.mark.services
async def test_a_signal_ends_it_though_requests_are_under_way(directory: Path) -> None:
    async with start_server(weights=directory) as server, aiohttp.ClientSession() as session:
        client = Client(server, session)
        request = asyncio.ensure_future(client.generate([9], **ENDLESS))
        await client.generate([9, 10], max_tokens=1)
        os.kill(server.pid, signal.SIGTERM)
        with pytest.raises(BackendError, match="with exit code 0"):
            await asyncio.wait_for(server.watch(), 120)
        with pytest.raises((aiohttp.ClientError, AssertionError)):
            await request


# --- as a loop publishes to it --------------------------------------------------------------------------


async def test_what_is_published_is_what_samples(client: Client, second: Path) -> None:
    prompt = list(range(20, 60))
    publisher = make_publisher("embedded", client.server.url + "/v1")
    assert await publisher.current() == FIRST
    before = await client.generate(prompt)
    for _ in range(2):
        await publisher.publish(second, "step-0001")
        assert await publisher.current() == "step-0001"
        after = await client.generate(prompt)
        assert [span["version"] for span in after["weight_versions"]] == ["step-0001"]
        # Nothing of what the former weights had read is left.
        assert_sampled_by(second, prompt, after)
    assert after["token_ids"] != before["token_ids"]


async def test_what_is_in_flight_goes_on_while_weights_are_published(
    client: Client, directory: Path, second: Path
) -> None:
    publisher = make_publisher("embedded", client.server.url)
    prompts = [list(range(20 + number, 60)) for number in range(3)]
    choices: list[Body] = []
    for patience in PATIENCE:
        requests = [asyncio.ensure_future(client.generate(p, **ENDLESS)) for p in prompts]
        await asyncio.sleep(patience)
        await publisher.publish(second, "step-0001")
        await client.generate([20, 21, 22], max_tokens=10, ignore_eos=True)
        choices = await client.end(requests)
        if all(choice["weight_versions"][0]["version"] == FIRST for choice in choices):
            break
        await client.serve(directory, FIRST)
    for prompt, choice in zip(prompts, choices, strict=True):
        old, new = choice["weight_versions"]
        assert (old["version"], new["version"]) == (FIRST, "step-0001")
        assert (old["start"], old["end"], new["end"]) == (0, new["start"], len(choice["token_ids"]))
        assert_sampled_by(directory, prompt, choice, 0, old["end"])
        assert_sampled_by(second, prompt, choice, new["start"], new["end"])


async def test_a_directory_that_the_server_cannot_use_leaves_it_to_the_next(
    client: Client, directory: Path, tmp_path: Path
) -> None:
    publisher = make_publisher("embedded", client.server.url)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((directory / "config.json").read_text())
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(BackendError, match="broken"):
        await publisher.publish(broken, "step-0001")
    assert await publisher.current() == FIRST
    await publisher.publish(directory, "step-0002")
    choice = await client.generate([9, 10])
    assert [span["version"] for span in choice["weight_versions"]] == ["step-0002"]


async def test_a_scripted_policy_has_no_weights(directory: Path) -> None:
    async with start_server("idle") as server:
        with pytest.raises(ConfigError, match="--weights"):
            await make_publisher("embedded", server.url).publish(directory, "v1")
