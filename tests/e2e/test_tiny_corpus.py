"""What the tiny model is pre-trained on is what it will be asked: the corpus against the real CLI."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from understudy.gateway.session import GatewaySession
from understudy.store import Store
from understudy.tasks.generate.functions import make_functions
from understudy.tasks.records import dump
from understudy.train.tiny import corpus
from understudy.trajectory.samples import merge
from understudy.trajectory.tree import build
from understudy.types import Call
from understudy.wire.anthropic import Anthropic
from understudy.wire.dialect import Branch
from understudy.wire.model import ChatRequest

from fakes.tokens import FakeTokens, Sample
from support import optional, understudy
from support.tiny import encode, make_model, make_tokenizer

optional("torch")
# Runs of the real CLI over many tasks, with torch: each test takes many seconds.
pytestmark = [pytest.mark.e2e, pytest.mark.services, pytest.mark.usefixtures("claude_code", "isolation")]

SEED = 5
AGENT = ("--tools", corpus.TOOLS, "--system-prompt", corpus.SYSTEM_PROMPT, "--max-turns", "6")


def conversations(*behaviours: str) -> list[list[corpus.Message]]:
    """One conversation of each behaviour, about the tasks of `SEED` in their order."""
    return [
        next(itertools.islice(corpus.conversations(SEED, "held-out", {behaviour: 1.0}), number, None))
        for number, behaviour in enumerate(behaviours)
    ]


def on_its_day(conversation: Sequence[corpus.Message], prompt: str) -> list[corpus.Message]:
    """The conversation as it would be on the day that `prompt`, the user's message, names."""
    day = re.search(r"Today's date is (\S+)\.", prompt)
    assert day
    first = re.sub(r"(?<=Today's date is )\S+(?=\.)", day[1], conversation[1]["content"])
    return [conversation[0], {**conversation[1], "content": first}, *conversation[2:]]


def run(tasks: int, root: Path, *options: str | Path) -> Mapping[str, Any]:
    dump(make_functions(tasks, SEED, "held-out"), root / "tasks.jsonl")
    done = understudy("run", *options, *AGENT, "--tasks", root / "tasks.jsonl", "-o", root / "out", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def calls_by_task(out: Path) -> dict[str, list[Call]]:
    with Store.open(out, create=False) as store:
        rollouts = list(store.runs.rollouts())
        return {
            rollout.task_id: list(store.calls.of_attempt(store.runs.attempts(rollout.id)[0].id))
            for rollout in rollouts
        }


def chat(call: Call) -> ChatRequest:
    """What the gateway makes of what the CLI sent."""
    return Anthropic().parse(call.request, GatewaySession("attempt", {}), Branch(None, None)).chat


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the ids of its calls, and without the default that the CLI writes out."""
    content: str | list[dict[str, Any]] = message.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    calls = [
        (call["function"]["name"], {"replace_all": False} | json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": text, "calls": calls}


def test_the_terse_policy_holds_the_conversations_of_the_corpus(tmp_path: Path) -> None:
    assert run(2, tmp_path, "embedded", "--policy", "terse")["solved"] == 2
    by_task = calls_by_task(tmp_path / "out")
    for task, written in zip(make_functions(2, SEED, "held-out"), conversations("solves", "solves"), strict=True):
        calls = by_task[task.instance_id]
        assert len(calls) == 3
        last = chat(calls[-1])
        expected = on_its_day(written, plain(last.messages[1])["content"])
        assert [plain(message) for message in last.messages] == [plain(message) for message in expected[:-1]]
        assert calls[-1].response is not None
        (block,) = json.loads(calls[-1].response)["content"]
        assert block["text"] == expected[-1]["content"] == corpus.DONE
        offered_tools = [
            (tool["function"]["name"], list(tool["function"]["parameters"]["properties"])) for tool in last.tools
        ]
        assert offered_tools == [
            (tool["function"]["name"], list(tool["function"]["parameters"]["properties"]))
            for tool in corpus.tool_definitions()
        ]


async def test_the_gateway_asks_for_the_tokens_that_were_trained_on(tmp_path: Path) -> None:
    """Whatever the assistant does: what is sampled stands where it stood, and all between is the same."""
    reader = make_tokenizer(tmp_path / "model")
    written = conversations(*corpus.BEHAVIOURS)
    tasks = make_functions(len(written), SEED, "held-out")

    def sample(prompt: str) -> Sample:
        (conversation,) = (one for task, one in zip(tasks, written, strict=True) if task.instruction in prompt)
        ids, loss_mask = encode(reader, conversation)
        turns = [
            reader.decode([id_ for id_, _ in turn])
            for is_sampled, turn in itertools.groupby(zip(ids, loss_mask, strict=True), key=lambda pair: pair[1])
            if is_sampled
        ]
        return Sample(text=turns[prompt.count("<|im_start|>assistant\n") - 1].removesuffix("<|im_end|>"))

    async with FakeTokens((tmp_path / "model/tokenizer.json").read_text("utf-8"), sample) as server:
        config = tmp_path / "run.toml"
        config.write_text(
            f'[models.high]\nbackend = "vllm"\nmodel = "m"\nbase_url = "{server.url}"\n'
            f'tokens = "exact"\ntool_format = "hermes"\ntokenizer = "model"\n'
        )
        summary = await asyncio.to_thread(run, len(tasks), tmp_path, "--config", config)
    assert summary["solved"] == 1
    by_task = calls_by_task(tmp_path / "out")
    for task, conversation in zip(tasks, written, strict=True):
        calls = by_task[task.instance_id]
        ids, expected_mask = encode(reader, on_its_day(conversation, reader.decode(calls[0].prompt_token_ids)))
        (segment,) = merge(build(calls)).segments
        # The template ends the line, too.
        assert [*segment.token_ids, *reader.encode("\n")] == ids
        assert [*segment.loss_mask, 0] == expected_mask
        assert all(call.audit is not None and call.audit["mismatch"] is None for call in calls)


def test_weights_are_asked_with_the_same_tokens(tmp_path: Path) -> None:
    reader = make_model(tmp_path / "model", context=512)
    run(1, tmp_path, "embedded", "--weights", tmp_path / "model", "--answer-tokens", "20")
    (task,) = make_functions(1, SEED, "held-out")
    prompt = calls_by_task(tmp_path / "out")[task.instance_id][0].prompt_token_ids or ()
    (conversation,) = conversations("leaves")
    opening, _ = encode(reader, on_its_day(conversation, reader.decode(prompt))[:2])
    assert list(prompt[: len(opening)]) == opening
    assert reader.decode(prompt[len(opening) :]) == "<|im_start|>assistant\n"
