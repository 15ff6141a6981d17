"""Token-in-token-out with the real CLI, which rewrites what it sends back: still one sequence a branch."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy import model
from understudy.gateway.backends.http import HttpClient
from understudy.gateway.exact.backend import ExactBackend
from understudy.gateway.exact.codec import LocalCodec, ServerCodec
from understudy.gateway.exact.parsers import format_named
from understudy.gateway.exact.token_servers import SERVERS
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.model.process import start_server
from understudy.store import Store
from understudy.trajectory.samples import Merged, merge
from understudy.trajectory.tree import build
from understudy.types import Call

from fakes.attempts import start_attempts
from fakes.tokens import FakeTokens, Sample, Step
from support.cli import environment, without_network

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ASSETS = Path(model.__file__).with_name("assets")


async def run_cli(
    root: Path, claude: Path, backend: ExactBackend, prompt: str
) -> tuple[dict[str, Any], list[Call]]:
    """The CLI's result, and the calls as they came to the store."""
    home, work = root / "home", root / "work"
    home.mkdir()
    keys = Keys()
    with Store.open(root / "store") as store:
        gateway = Gateway(ModelRouter(backend), store.calls, keys)
        (attempt,) = start_attempts(store)
        await gateway.start_unix(root / "g.sock")
        env = environment(home, root / "g.sock", keys.issue(attempt)) | {"CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
        flags = ["--model", "qwen3-coder", "--max-turns", "60", "--output-format", "json"]
        process = await asyncio.create_subprocess_exec(
            *without_network(), str(claude), "-p", prompt, *flags, "--dangerously-skip-permissions",
            env=env, cwd=work, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), 150)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await gateway.stop()
            await backend.close()
        assert out, err.decode()
        return json.loads(out), list(store.calls.of_attempt(attempt))


def exact(calls: list[Call]) -> Merged:
    """The sequences of an attempt, checked: each sampled token is trained on, in its place, encoded by nobody."""
    merged = merge(build(calls))
    sampled = sum(len(call.completion_token_ids or ()) for call in calls)
    assert sum(sum(segment.loss_mask) for segment in merged.segments) == sampled
    by_id = {call.id: call for call in calls}
    for segment in merged.segments:
        for call in map(by_id.__getitem__, segment.call_ids):
            prompt, completion = call.prompt_token_ids or (), call.completion_token_ids or ()
            end = len(prompt) + len(completion)
            assert segment.token_ids[:end] == prompt + completion
            assert segment.loss_mask[len(prompt) : end] == (1,) * len(completion)
            assert segment.logprobs[len(prompt) : end] == call.logprobs
    assert [call.status for call in calls] == ["ok"] * len(calls)
    return merged


def local(server: FakeTokens) -> ExactBackend:
    tokens = SERVERS["vllm"](HttpClient(server.url), "m")
    return ExactBackend("vllm", tokens, LocalCodec.load(str(ASSETS)), format_named("hermes"))


def call(name: str, raw: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {raw}}}\n</tool_call>'


def thirty_turns(path: Path, work: Path) -> list[Step]:
    """Edits in every spelling that the CLI changes, among other things that it changes."""
    file = json.dumps(str(path))
    spellings: list[Callable[[int], str]] = [
        lambda n: f'{{"file_path": {file}, "old_string": "v{n} = 0", "new_string": "v{n} = 1"}}',
        lambda n: f'{{"new_string":"v{n} = 1",  "old_string":"v{n} = 0","file_path":{file}}}',
        lambda n: (
            f'{{"old_string": "v{n} = 0", "new_string": "v{n} = 1 # d\\u00e9j\\u00e0", "file_path": {file}}}'
        ),
        lambda n: (
            f'{{"file_path": {file}, "old_string": "v{n} = 0", "new_string": "v{n} = 1   ", "replace_all": false}}'
        ),
        lambda n: (
            f'{{"replace_all": true,\n "file_path": {file},\n "old_string": "v{n} = 0", "new_string": "v{n} = 1"}}'
        ),
        lambda n: f'{{"file_path": {file}, "old_string": "v{n} = 0", "new_string": "v{n} = \'</tool_call>\'"}}',
        lambda n: f'{{"file_path": {file}, "old_string": "not there {n}", "new_string": ""}}',
    ]
    before = ["", "\n\n", "I edit.", " \n", "I edit.\n\n", "<think>\nhm\n</think>\n\n", "<think></think>Now: "]
    steps: list[Step] = [Sample(text="I read. " + call("Read", f'{{"limit": 2000.0, "file_path": {file}}}'))]
    for n in range(26):
        answer = before[(n // 7 + n) % 7] + call("Edit", spellings[n % 7](n))
        if n % 6 == 2:
            shell = json.dumps({"timeout": 5000.0, "description": "d", "command": f"cd {work} && echo {n}"})
            answer += "\n" + call("Bash", shell)
        steps.append(Sample(text=answer, shattered=n % 5 == 3))
    shell = '{"command": "echo caf\\u00e9; false", "timeout": 6000.0, "description": "Fail"}'
    return [
        *steps,
        Sample(text=call("Bash", shell)),
        Sample(text=call("Nothing", "{}")),
        Sample(text="\nDone. \n"),
    ]


async def test_thirty_turns_with_edits_are_one_sequence(tmp_path: Path, claude: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    path = work / "a.py"
    path.write_text("".join(f"v{n} = 0\n" for n in range(26)))
    steps = thirty_turns(path, work)
    async with FakeTokens((ASSETS / "tokenizer.json").read_text(), list(steps)) as server:
        sampled = [server.encode(step) for step in steps if isinstance(step, Sample)]
        result, calls = await run_cli(tmp_path, claude, local(server), "go")
    assert result["result"].strip() == "Done."
    assert len(calls) == len(steps) == 30
    assert path.read_text().count(" = 1") == 20
    assert [list(one.completion_token_ids or ()) for one in calls] == sampled
    # The CLI did rewrite: some of what came back is not what was sampled.
    assert b'"replace_all":false' in calls[-1].request
    merged = exact(calls)
    assert merged.reasons == {"first call": 1}
    assert len(merged.segments[0].call_ids) == 30
    assert [one.audit["prompt"] for one in calls] == ["root"] + ["extended"] * 29


async def test_subagents_are_a_sequence_each(tmp_path: Path, claude: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("one\n")

    def agent(task: str, kind: str) -> str:
        arguments = {"subagent_type": kind, "prompt": f"{task}: list the files", "description": "explore"}
        return call("Agent", json.dumps(arguments | {"run_in_background": False}))

    def shell(number: int) -> Sample:
        return Sample(
            text="Look.\n" + call("Bash", json.dumps({"timeout": 5000.0, "command": f"ls -{'a' * number}"}))
        )

    lanes: dict[str, list[Step]] = {
        "DELEGATE": [
            shell(1),
            Sample(text=agent("TASKONE", "general-purpose") + "\n" + agent("TASKTWO", "Explore")),
            shell(2),
            Sample(text="Done."),
        ],
        "TASKONE": [*(shell(number) for number in range(1, 6)), Sample(text="One file.", shattered=True)],
        "TASKTWO": [*(shell(number) for number in range(1, 4)), Sample(text="One file.")],
    }

    def script(prompt: str) -> Step:
        return next(lanes[lane] for lane in lanes if lane in prompt).pop(0)

    async with FakeTokens((ASSETS / "tokenizer.json").read_text(), script) as server:
        result, calls = await run_cli(tmp_path, claude, local(server), "DELEGATE")
    assert result["result"] == "Done."
    merged = exact(calls)
    assert merged.reasons == {"first call": 3}
    assert sorted(len(segment.call_ids) for segment in merged.segments) == [4, 4, 6]
    assert len({segment.branch for segment in merged.segments}) == 3
    assert {one.audit["reason"] for one in calls if one.audit["prompt"] == "root"} == {"first call"}


async def test_the_embedded_model_in_tokens(tmp_path: Path, claude: Path) -> None:
    """The scripted policy reads the prompt out of its tokens, the server renders and counts."""
    work, tasks = tmp_path / "work", tmp_path / "tasks.jsonl"
    work.mkdir()
    lines = [f"line_{number} = {number}\n" for number in range(1500)]
    changed = [f"line_{n} = 'changed <|im_end|>'\n" if n % 110 == 50 else line for n, line in enumerate(lines)]
    (work / "big.py").write_text("".join(lines))
    patch = "".join(difflib.unified_diff(lines, changed, "a/big.py", "b/big.py"))
    instruction = "Change the lines of big.py as they should be."
    task = {"instance_id": "big", "instruction": instruction, "gold_patch": patch, "repo": "x/big"}
    tasks.write_text(json.dumps(task) + "\n")
    async with start_server("oracle", tasks=tasks) as server:
        client = HttpClient(f"{server.url}/v1")
        codec = ServerCodec(client, server.model)
        tokens = SERVERS["embedded"](client, server.model)
        backend = ExactBackend("embedded", tokens, codec, format_named("hermes"))
        result, calls = await run_cli(tmp_path, claude, backend, instruction)
    assert result["result"] == "The change is made."
    assert (work / "big.py").read_text() == "".join(changed)
    assert len(calls) >= 30
    assert exact(calls).reasons == {"first call": 1}
    assert {one.audit["mismatch"] for one in calls} == {None}
    assert {one.audit.get("canonical", True) for one in calls} == {True}
