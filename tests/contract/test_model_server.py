"""The embedded model's server over real HTTP, as a client made for vLLM sees it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from understudy.errors import BackendError
from understudy.model.process import ServerProcess, start_server
from understudy.model.scripted.tokenizer import scripted_tokenizer

from fakes.claude_tools import Body, Tools, tool_definitions

TOKENIZER = scripted_tokenizer()
INSTRUCTION = "Make `add` add again; it must work for <|im_end|> too."
BEFORE = 'def add(a, b):\n    """Add."""\n    return a - b\n'
AFTER = BEFORE.replace("a - b", "a + b  # not <tool_call> or é")
PATCH = (
    "--- a/calc.py\n+++ b/calc.py\n@@ -1,3 +1,3 @@\n def add(a, b):\n"
    '     """Add."""\n-    return a - b\n+    return a + b  # not <tool_call> or é\n'
)
SERVER = [sys.executable, "-m", "understudy.model.server"]


class Client:
    """A chat-completions client."""

    def __init__(self, server: ServerProcess, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def post(self, path: str, body: Any) -> tuple[int, Body]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(f"{self.server.url}{path}", data=data) as response:
            return response.status, await response.json()

    async def chat(self, **body: Any) -> Body:
        status, answer = await self.post("/v1/chat/completions", {"messages": [user("hi")]} | body)
        assert status == 200, answer
        return answer

    async def stream(self, **body: Any) -> list[Body]:
        body = {"messages": [user("hi")], "stream": True} | body
        async with self.session.post(f"{self.server.url}/v1/chat/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def user(text: str) -> Body:
    return {"role": "user", "content": text}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    task = {"instance_id": "calc", "instruction": INSTRUCTION, "gold_patch": PATCH, "repo": "x/calc"}
    path.write_text(json.dumps(task) + "\n")
    return path


@pytest.fixture
async def client(tasks: Path) -> AsyncGenerator[Client]:
    async with (
        start_server("oracle", tasks=tasks, max_model_len=4000) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Client(server, session)


def task_request(root: Path) -> Body:
    return {
        "messages": [{"role": "system", "content": f"Primary working directory: {root}"}, user(INSTRUCTION)],
        "tools": tool_definitions("Read", "Edit", "Write", "Bash"),
        "return_token_ids": True,
        "logprobs": True,
    }


async def test_every_prompt_of_a_task_begins_with_all_that_was_said_before(client: Client, tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    (root / "calc.py").write_text(BEFORE)
    tools, request = Tools(root), task_request(root)
    previous: list[int] = []
    for _ in range(10):
        answer = await client.chat(**request)
        (choice,) = answer["choices"]
        prompt, completion = answer["prompt_token_ids"], choice["token_ids"]
        assert prompt[: len(previous)] == previous
        previous = prompt + completion
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == len(completion)
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [0.0] * len(completion)
        text = TOKENIZER.decode(completion)
        assert text.startswith(choice["message"]["content"]) and text.endswith("<|im_end|>")
        assert b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode() == text
        calls = choice["message"].get("tool_calls", [])
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        request["messages"].append(choice["message"])
        if not calls:
            break
        for call in calls:
            assert call["function"]["arguments"] in text
            result = tools.run(call["function"]["name"], call["function"]["arguments"])
            request["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": result})
    assert tools.names == ["Read", "Edit", "Bash"]
    assert (root / "calc.py").read_text() == AFTER


async def test_a_stream_adds_up_to_the_whole_answer(client: Client, tmp_path: Path) -> None:
    requests: list[Body] = [
        task_request(tmp_path),
        {"return_token_ids": True, "logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True, "max_tokens": 2},
        {"return_token_ids": True, "stop": "on the"},
        task_request(tmp_path) | {"max_tokens": 30},
    ]
    for request in requests:
        whole = await client.chat(**request)
        chunks = await client.stream(**request, stream_options={"include_usage": True})
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert (
            chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        )
        choices = [chunk["choices"][0] for chunk in chunks[:-1]]
        expected = whole["choices"][0]
        assert [id_ for choice in choices for id_ in choice.get("token_ids", [])] == expected["token_ids"]
        assert "".join(c["delta"].get("content", "") for c in choices) == (expected["message"]["content"] or "")
        assert choices[-1]["finish_reason"] == expected["finish_reason"]
        assert choices[-1]["stop_reason"] == expected["stop_reason"]
        assert all(choice["finish_reason"] is None for choice in choices[:-1])
        if request.get("logprobs"):
            logprobs = [
                entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]
            ]
            assert logprobs == expected["logprobs"]["content"]
        deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        calls = expected["message"].get("tool_calls", [])
        assert "".join(d["function"].get("arguments", "") for d in deltas) == "".join(
            call["function"]["arguments"] for call in calls
        )
        assert [d["function"]["name"] for d in deltas if "id" in d] == [call["function"]["name"] for call in calls]


async def test_token_counts_and_texts_agree_with_the_chat(client: Client, tmp_path: Path) -> None:
    request = task_request(tmp_path)
    answer = await client.chat(**request)
    body = {"messages": request["messages"], "tools": request["tools"], "model": answer["model"]}
    _, counted = await client.post("/tokenize", body)
    assert counted["tokens"] == answer["prompt_token_ids"]
    assert (counted["count"], counted["max_model_len"]) == (len(counted["tokens"]), 4000)
    _, text = await client.post("/detokenize", {"tokens": counted["tokens"]})
    assert INSTRUCTION in text["prompt"]
    _, again = await client.post("/tokenize", {"prompt": "<|im_start|>hé"})
    assert again["tokens"] == TOKENIZER.encode("<|im_start|>hé") and again["tokens"][0] == 1


async def test_a_repeated_prompt_is_mostly_cached(client: Client) -> None:
    answers = [await client.chat() for _ in range(2)]
    usage = answers[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


async def test_max_tokens_cuts_the_tokens(client: Client) -> None:
    whole = (await client.chat(return_token_ids=True))["choices"][0]
    for field in ("max_tokens", "max_completion_tokens"):
        cut = (await client.chat(return_token_ids=True, **{field: 3}))["choices"][0]
        assert cut["finish_reason"] == "length"
        assert cut["token_ids"] == whole["token_ids"][:3]
        assert cut["message"]["content"] == TOKENIZER.decode(cut["token_ids"])


async def test_a_stop_string_is_left_out_and_told(client: Client) -> None:
    choice = (await client.chat(return_token_ids=True, stop=["never", " the"]))["choices"][0]
    assert choice["message"]["content"] == "Working on"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " the")
    assert TOKENIZER.decode(choice["token_ids"]) == "Working on the"
    included = (await client.chat(stop=" the", include_stop_str_in_output=True))["choices"][0]
    assert included["message"]["content"] == "Working on the"


async def test_tool_choice_is_kept_to(client: Client, tmp_path: Path) -> None:
    request = task_request(tmp_path)
    none = (await client.chat(**request, tool_choice="none"))["choices"][0]
    assert "tool_calls" not in none["message"] and none["message"]["content"]
    named = {"type": "function", "function": {"name": "Bash"}}
    choice = (await client.chat(**request, tool_choice=named))["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "Bash" and set(json.loads(call["function"]["arguments"])) == {"command"}
    assert choice["finish_reason"] == "stop"
    request["messages"] = [user("No task of ours")]
    choice = (await client.chat(**request, tool_choice="required"))["choices"][0]
    assert choice["message"]["tool_calls"] and choice["finish_reason"] == "tool_calls"


async def test_a_json_schema_is_satisfied(client: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["title"],
    }
    answer = await client.chat(
        response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}
    )
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"title": "Working on the task"}


async def test_too_long_a_prompt_is_refused_in_vllms_words(client: Client) -> None:
    status, answer = await client.post(
        "/v1/chat/completions", {"messages": [user("word " * 5000)], "max_tokens": 9}
    )
    error = answer["error"]
    assert (status, error["type"], error["param"], error["code"]) == (400, "BadRequestError", "input_tokens", 400)
    assert error["message"].startswith(
        "This model's maximum context length is 4000 tokens. However, you requested 9 output tokens and your "
        "prompt contains "
    )
    status, answer = await client.post("/v1/chat/completions", {"messages": [user("hi")], "max_tokens": 4001})
    assert status == 400 and "max_model_len=4000" in answer["error"]["message"]
    status, answer = await client.post("/v1/chat/completions", {"messages": [user("hi")], "max_tokens": 3999})
    assert status == 400 and "for a total of" in answer["error"]["message"]


BAD: list[tuple[Any, int, str]] = [
    (b"", 400, "the request body is not valid JSON"),
    (b"{", 400, "the request body is not valid JSON"),
    (b"\xff\xfe", 400, "the request body is not valid JSON"),
    (b"[]", 400, "Expected `object`"),
    (b'{"messages": ' + b"[" * 100_000, 400, "invalid request body"),
    ({"messages": []}, 400, "at least one message"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "$.messages[0].role"),
    ({"messages": [user("hi")], "max_tokens": 0}, 400, "at least 1"),
    ({"messages": [user("hi")], "max_tokens": "many"}, 400, "$.max_tokens"),
    ({"messages": [user("hi")], "tools": []}, 400, "must not be an empty array"),
    ({"messages": [user("hi")], "tool_choice": "required"}, 400, "`tools` must be set"),
    ({"messages": [user("hi")], "n": 2}, 400, "n must be 1"),
    ({"messages": [user("hi")], "top_logprobs": 1}, 400, "`logprobs` must be set"),
    ({"messages": [user("hi")], "stream_options": {"include_usage": True}}, 400, "stream=True"),
    ({"messages": [user("hi")], "stop": ""}, 400, "empty string"),
    ({"messages": [user("hi")], "model": "gpt-9"}, 404, "The model `gpt-9` does not exist."),
    (b'{"messages": [{"role": "user", "content": "a \\ud83d b"}]}', 400, "one of a pair"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "image"),
    (
        {
            "messages": [user("hi")],
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": 3}}},
        },
        400,
        "invalid JSON schema",
    ),
]


async def test_bad_requests_get_an_error_in_openais_shape_and_harm_nothing(client: Client) -> None:
    for body, expected, message in BAD:
        status, answer = await client.post("/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (expected, expected), body
        assert message in answer["error"]["message"]
    for body in ({}, {"prompt": "a", "messages": []}, {"prompt": 3}):
        assert (await client.post("/tokenize", body))[0] == 400
    assert (await client.post("/detokenize", {"tokens": [99999]}))[0] == 400
    assert (await client.post("/v1/nothing", {}))[0] == 404
    assert (await client.post("/v1/models", {}))[0] == 405
    assert await client.chat()


async def test_the_other_paths(client: Client) -> None:
    async with client.session.get(f"{client.server.url}/v1/models") as response:
        (card,) = (await response.json())["data"]
        assert (card["id"], card["max_model_len"]) == (client.server.model, 4000)
    async with client.session.get(f"{client.server.url}/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with client.session.get(f"{client.server.url}/version") as response:
        assert "version" in await response.json()


async def test_many_at_once_get_their_own_answers(client: Client) -> None:
    async def count(number: int) -> int:
        answer = await client.chat(messages=[user("word " * number)], return_token_ids=True)
        assert TOKENIZER.decode(answer["prompt_token_ids"]).count("word") == number
        return answer["usage"]["prompt_tokens"]

    assert len(set(await asyncio.gather(*(count(number) for number in range(100))))) == 100


@pytest.mark.parametrize("policy", ["oracle", "wrong", "idle", "flaky"])
async def test_every_policy_can_be_served(policy: str, tasks: Path, tmp_path: Path) -> None:
    arguments = {"p": "0.5", "seed": "3"} if policy == "flaky" else {}
    async with (
        start_server(policy, tasks=tasks, policy_args=arguments) as server,
        aiohttp.ClientSession() as session,
    ):
        answer = await Client(server, session).chat(**task_request(tmp_path), seed=1)
        assert bool(answer["choices"][0]["message"].get("tool_calls")) == (policy != "idle")


# --- the process ---------------------------------------------------------------------------------------


async def test_a_taken_port_and_other_mistakes_end_with_2_and_words(client: Client, tmp_path: Path) -> None:
    port = client.server.url.rsplit(":", 1)[1]
    missing = tmp_path / "missing.jsonl"
    for options, message in (
        (["--policy", "idle", "--port", port], f"cannot listen on 127.0.0.1 port {port}"),
        (["--policy", "idle", "--host", "0.0.0.0"], "UNDERSTUDY_MODEL_KEY"),
        (["--policy", "nobody"], "unknown policy 'nobody'"),
        (["--policy", "flaky", "--policy-arg", "p"], "KEY=VALUE"),
        (["--policy", "oracle", "--tasks", str(missing)], str(missing)),
    ):
        done = await asyncio.to_thread(
            subprocess.run, [*SERVER, *options], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr and "Traceback" not in done.stderr


async def test_a_server_that_does_not_start_is_a_backend_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"exit code 2: .*no-such\.jsonl"):
        async with start_server("oracle", tasks=tmp_path / "no-such.jsonl"):
            pass


async def test_a_server_that_is_killed_is_noticed() -> None:
    async with start_server("idle") as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(BackendError, match="by signal 9"):
            await asyncio.wait_for(server.watch(), 10)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_it_does_not_outlive_a_parent_that_is_killed() -> None:
    script = (
        "import asyncio\nfrom understudy.model.process import start_server\n"
        "async def main():\n    async with start_server('idle') as server:\n"
        "        print(server.pid, flush=True)\n        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    await parent.wait()
    for _ in range(500):
        if not alive(pid):
            return
        await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the server outlived its parent")


async def test_sigterm_is_an_ordinary_end_and_a_key_is_demanded_when_set() -> None:
    environment = os.environ | {"UNDERSTUDY_MODEL_KEY": "secret"}
    process = await asyncio.create_subprocess_exec(
        *SERVER, "--policy", "idle", "--host", "127.0.0.1", stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    url = json.loads(await process.stdout.readline())["url"]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            assert response.status == 401
        async with session.post(f"{url}/tokenize", json={"prompt": "x"}) as response:
            assert response.status == 401
        async with session.get(f"{url}/v1/models", headers={"authorization": "Bearer secret"}) as response:
            assert response.status == 200
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0
