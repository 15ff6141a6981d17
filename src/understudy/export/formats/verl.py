"""verl: Parquet for its SFT trainer, tasks for its RL trainers, and rollouts as exact tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec

from understudy.export.base import ExportSummary, FormatTraits, ProgressCallback, exporter, no_progress
from understudy.export.corpus import Corpus, Unit
from understudy.export.examples import Example
from understudy.export.files import ExportWriter
from understudy.export.formats.trl import TOOLS_FROM, tools_columns
from understudy.export.parquet import CHAT_MESSAGE
from understudy.ingest.trace import Message
from understudy.store.outcomes import GradedRollout
from understudy.trajectory.samples import Sample
from understudy.types import Task, is_solved

Form = Literal["sft", "rl", "tokens"]

LOADER = "verl_loader.py"
"""A module that every export of conversations contains, byte for byte. Changing it changes the export."""

_TEXT = "string"
_SAMPLE_COLUMNS = ("policy_version", "rollout_id", "attempt_id", "branch", "role")
COLUMNS: dict[Form, dict[str, Any]] = {
    "sft": {
        "messages": [CHAT_MESSAGE],
        "tools": [{"type": _TEXT, "function": {"name": _TEXT, "description": _TEXT, "parameters": _TEXT}}],
        "trained": ["int32"],
        **dict.fromkeys(("example_id", "origin", "group", "model"), _TEXT),
        "reward": "float64",
    },
    "rl": {
        "data_source": _TEXT,
        "prompt": [{"role": _TEXT, "content": _TEXT}],
        "ability": _TEXT,
        "reward_model": {"style": _TEXT, "ground_truth": _TEXT},
        "extra_info": {
            "index": "int64",
            **dict.fromkeys(("split", "instance_id", "repo", "run_id"), _TEXT),
            "rollouts": "int64",
            "solve_rate": "float64",
        },
    },
    "tokens": {
        "uid": _TEXT,
        "prompts": ["int32"],
        "responses": ["int32"],
        "response_mask": ["int8"],
        "rollout_log_probs": ["float64"],
        "reward": "float64",
        **dict.fromkeys((*_SAMPLE_COLUMNS, "integrity"), _TEXT),
    },
}
_ABOUT: dict[Form, str] = {
    "sft": "Each row is a conversation: `messages` and `tools` with the columns that verl's "
    "`MultiTurnSFTDataset` reads, the arguments of tool calls and the parameters of tools as JSON text, "
    "because Parquet would give every call every argument of any. `trained` are the indexes of the "
    "messages to learn. `verl_loader.py` has a class for verl that gives chat templates objects, and "
    "learns the messages in `trained` only; verl's own learns every answer.",
    "rl": "Each row is a task: `data_source`, `prompt`, `ability`, `reward_model` and `extra_info`, as verl's "
    "`RLHFDataset` reads them. `reward_model.ground_truth` is JSON text with the id of the task and the "
    "tests that decide: what grades a patch needs it. `extra_info` has how many rollouts there were, and "
    "the share of them that solved the task.",
    "tokens": "Each row is a token sequence of one or more calls of a rollout, exactly as sent and sampled, "
    "under the names of verl's batches: `prompts` are the ids before the first sampled one, "
    "`responses` those from there on, `response_mask` is 1 on sampled tokens, `rollout_log_probs` are "
    "the sampling policy's (0 off the mask, null where the backend gave none). `reward` is the "
    "rollout's; rollouts of one `uid` are a group.",
}
_LOAD: dict[Form, str] = {
    "sft": "torchrun -m verl.trainer.sft_trainer data.train_files={quoted}/train.parquet "
    "data.messages_key=messages data.tools_key=tools data.custom_cls.path={quoted}/verl_loader.py "
    "data.custom_cls.name=Conversations",
    "rl": "python3 -m verl.trainer.main_ppo data.train_files={quoted}/train.parquet data.prompt_key=prompt",
    "tokens": 'import pandas\n\nrows = pandas.read_parquet("{output}/train.parquet")',
}


@exporter(FormatTraits(solved_only=True, cuts=True, weights=True))
def export(
    corpus: Corpus,
    output: Path,
    *,
    form: Annotated[Form, "Conversations to learn, the tasks of a run, or its rollouts as tokens."] = "sft",
    unit: Annotated[Unit, "For sft: a row a conversation, or a row a turn."] = "conversation",
    report: ProgressCallback = no_progress,
) -> ExportSummary:
    """Parquet for verl: conversations, tasks, or rollouts as exact tokens.

    Tasks and tokens come from rollouts only, and include unsolved ones. Raises ConfigError if there is nothing to
    write, or it cannot be written.
    """
    if form != "sft":
        corpus.refuse_length_options(f"rows of --form {form}")
        selection = msgspec.structs.replace(corpus.selection, solved_only=False, origins=("rollouts",))
        corpus = corpus.with_selection(selection)
    columns = COLUMNS[form] | (tools_columns(corpus) if form == "sft" else {})
    with ExportWriter(corpus, output, f"verl-{form}", report, columns=columns) as writing:
        for group, row in _rows(corpus, form, unit):
            writing.add(group, row)
        if form == "sft":
            loader = files("understudy.export.formats").joinpath(LOADER).read_text(encoding="utf-8")
            writing.path(LOADER).write_text(loader, encoding="utf-8")
        return writing.finish(_ABOUT[form], _LOAD[form])


def conversation_row(example: Example) -> dict[str, Any]:
    """Return an example as a row for verl's SFT trainer."""
    return {
        "messages": [_message(message) for message in example.messages],
        # An empty list, because verl passes null on to the template, which then fails.
        "tools": [_tool(tool) for tool in example.tools or ()],
        "trained": list(example.trained),
        **{
            name: getattr(example, name)
            for name in ("example_id", "origin", "group", "reward", "model", *TOOLS_FROM)
        },
    }


def task_row(record: Task, run_id: str, split: str, index: int, rewards: list[float]) -> dict[str, Any]:
    """Return a task as a row for verl's RL trainers. `rewards` are those of its rollouts."""
    checks = cast(dict[str, Any], msgspec.to_builtins(record.checks))
    decides = {key: checks[key] for key in ("fail_to_pass", "pass_to_pass") if key in checks}
    truth = json.dumps({"instance_id": record.instance_id, **decides})
    return {
        "data_source": str(record.meta.get("dataset") or record.repo),
        "prompt": [{"role": "user", "content": record.instruction}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "index": index,
            "split": split,
            "instance_id": record.instance_id,
            "repo": record.repo,
            "run_id": run_id,
            "rollouts": len(rewards),
            "solve_rate": sum(map(is_solved, rewards)) / len(rewards),
        },
    }


def token_row(graded: GradedRollout, sample: Sample, uid: str) -> dict[str, Any]:
    """Return a sample as a row with the names of verl's batches. `uid` names the rollout's group."""
    segment = sample.segment
    first_sampled = segment.loss_mask.index(1)
    logprobs = segment.logprobs[first_sampled:]
    return {
        "uid": uid,
        "prompts": list(segment.token_ids[:first_sampled]),
        "responses": list(segment.token_ids[first_sampled:]),
        "response_mask": list(segment.loss_mask[first_sampled:]),
        "rollout_log_probs": None if None in logprobs else list(logprobs),
        "reward": sample.reward,
        **{name: getattr(sample, name) for name in _SAMPLE_COLUMNS},
        "integrity": graded.verdict.integrity.status,
    }


def _rows(corpus: Corpus, form: Form, unit: Unit) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a form, each with its group, which must stay in one split."""
    if form == "sft":
        for example in corpus.examples(unit):
            yield example.group, conversation_row(example)
        return
    if form == "tokens":
        for graded, sample in corpus.samples():
            uid = corpus.group_name(graded) or graded.rollout.task_id
            yield graded.rollout.task_id, token_row(graded, sample, uid)
        return
    rewards: dict[tuple[str, str], list[float]] = {}
    for graded in corpus.rollouts():
        rewards.setdefault((graded.rollout.run_id, graded.rollout.task_id), []).append(graded.verdict.reward)
    counts: Counter[str] = Counter()
    for (run_id, task_id), task_rewards in rewards.items():
        split = corpus.split(task_id)
        yield (
            task_id,
            task_row(corpus.store.runs.task(run_id, task_id), run_id, split, counts[split], task_rewards),
        )
        counts[split] += 1


def _message(message: Message) -> dict[str, Any]:
    calls = cast(list[dict[str, Any]], message.get("tool_calls") or [])
    return {
        "role": message["role"],
        "content": message.get("content") or "",
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [_call(call) for call in calls] or None,
        "tool_call_id": message.get("tool_call_id"),
    }


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = call["function"]
    fields = {"name": function["name"], "arguments": function["arguments"]}
    return {"id": call["id"], "type": "function", "function": fields}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = cast(dict[str, Any], tool.get("function") or tool)
    parameters: Any = function.get("parameters") or {"type": "object", "properties": {}}
    fields = {"name": function.get("name"), "description": function.get("description")}
    return {"type": "function", "function": {**fields, "parameters": json.dumps(parameters, ensure_ascii=False)}}
