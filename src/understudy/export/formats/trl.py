"""TRL: conversations, exact tokens, preference pairs and labelled turns, as Parquet files for its trainers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from understudy.export.base import ExportSummary, FormatTraits, ProgressCallback, exporter, no_progress
from understudy.export.corpus import CallSource, ClientSession, Corpus, Unit, origin_name
from understudy.export.examples import INVALID_CALLS, Example, message_rows, with_text_content
from understudy.export.files import ExportWriter
from understudy.preference.checks import Pair, message_of
from understudy.trajectory.samples import Sample

SftForm = Literal["messages", "completion"]

IGNORED = -100
"""The label of a token that is not trained on."""

_MESSAGES = ["json"]
"""The column type of messages: JSON values, so that each message has only its own keys.

In a column of structs, every message would have all keys that occur anywhere, with None for the missing ones, and
every tool call all arguments; a chat template would render them.
"""
_TEXT = "string"
_ORIGIN = dict.fromkeys(("example_id", "origin", "group", "source", "model", "family"), _TEXT)
TOOLS_FROM = ("tools_source", "tools_version")
"""Columns that say where tools come from. Pairs have only the first."""
_EXAMPLE: dict[str, Any] = {"tools": _TEXT, **_ORIGIN, "reward": "float64"}

SFT_COLUMNS: dict[SftForm, dict[str, Any]] = {
    "messages": {"messages": _MESSAGES, "trained": ["int32"], **_EXAMPLE},
    "completion": {"prompt": _MESSAGES, "completion": _MESSAGES, **_EXAMPLE},
}
TOKEN_COLUMNS: dict[str, Any] = {
    "input_ids": ["int32"],
    "labels": ["int32"],
    "assistant_masks": ["int8"],
    "logprobs": ["float64"],
    "reward": "float64",
    "policy_version": _TEXT,
    "policy_versions": [_TEXT],
    "call_ids": [_TEXT],
    **dict.fromkeys(("instance_id", "rollout_id", "attempt_id", "branch", "role", "reason", "integrity"), _TEXT),
}
_PAIR_COLUMNS = ("pair_id", "origin", "group", "state_id", "model", "family")
DPO_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("prompt", "chosen", "rejected"), _MESSAGES),
    **dict.fromkeys(("tools", *_PAIR_COLUMNS), _TEXT),
    "evidence": "json",
}
KTO_COLUMNS: dict[str, Any] = {"prompt": _MESSAGES, "completion": _MESSAGES, "label": "bool", **_EXAMPLE}

# --- The dataset cards --------------------------------------------------------------------------------------

_SFT_ABOUT: dict[SftForm, str] = {
    "messages": "Each row is a conversation: `messages` with the arguments of tool calls as objects, and `tools`"
    " as JSON text. `trained` are the indexes of the messages that were chosen to be learned. With "
    "`assistant_only_loss=True` TRL learns all the assistant's messages of a row: those too that were not "
    "chosen, and those that two paths of one session share. Where that matters, export with `--exact`.",
    "completion": "Each row is a `prompt`, the conversation so far, and the `completion` that is learned, which "
    "may be several messages with tool results between them; `tools` are JSON text. Each chosen message is "
    "learned once: with `assistant_only_loss=True` TRL learns the assistant's messages of the completion, and no"
    " others.",
}
_TOKENS_ABOUT = (
    "Each row is a token sequence of one or more calls of a rollout, exactly as its tokens were sent and "
    "sampled. `assistant_masks` is 1 on the sampled tokens, but for answers with a malformed tool call, which are "
    "nothing to imitate; `labels` are the tokens where it is 1 and -100 elsewhere. TRL takes the rows as they "
    "are. `logprobs` are those of the policy that sampled: 0 off the mask, null where the"
    " backend gave none. `policy_version` is the one that all of a row's calls share, `policy_versions` are "
    "those of its `call_ids`; `reward` is the whole rollout's; `reason` says why the sequence begins where it "
    "does. Use the tokenizer of the model that sampled."
)
_GROUP_NOTE = "Several agents worked on some tasks: rollouts may be compared with others of the same `group` only."
_DPO_ABOUT = (
    "Each row is a preference: `prompt` is what the model saw, `chosen` and `rejected` are one answer each, "
    "`tools` are JSON text, `evidence` says why the one is better. `model` and `family` wrote the rejected "
    "answer."
)
_KTO_ABOUT = (
    "Each row is a turn: `prompt` is what the model saw, `completion` its one answer, `label` whether it is to "
    "be learned from; `tools` are JSON text. A turn of a rollout has the label of its rollout: solved or not. A "
    "turn of a session is undesirable where the user denied a call, interrupted it, said that it was wrong, or "
    "an edit of it was undone later; else desirable where tests that it ran passed, it made a commit, or the "
    "user praised it; else as the log says of the whole task, if it does. Turns of which nothing tells are left "
    "out."
)
_SFT_LOAD = """from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("{output}")
config = SFTConfig(assistant_only_loss=True, max_length=None)
SFTTrainer(MODEL, args=config, train_dataset=dataset["train"]).train()"""


def _load(trainer: str) -> str:
    return (
        f"from datasets import load_dataset\nfrom trl import {trainer}Config, {trainer}Trainer\n\n"
        'dataset = load_dataset("{output}")\n'
        f'{trainer}Trainer(MODEL, args={trainer}Config(max_length=None), train_dataset=dataset["train"]).train()'
    )


# --- The formats --------------------------------------------------------------------------------------------


@exporter(FormatTraits(solved_only=True, cuts=True, weights=True))
def export_sft(
    corpus: Corpus,
    output: Path,
    *,
    unit: Annotated[Unit, "A row a conversation, or a turn (as prompt and completion)."] = "conversation",
    exact: Annotated[
        bool, "Conversations as prompt and completion, so that TRL learns the chosen messages only, each once."
    ] = False,
    report: ProgressCallback = no_progress,
) -> ExportSummary:
    """Conversations for TRL's SFTTrainer, with their tools.

    Raises ConfigError if there is nothing to write, or it cannot be written.
    """
    form: SftForm = "completion" if exact or unit == "turn" else "messages"
    columns = SFT_COLUMNS[form] | tools_columns(corpus)
    with ExportWriter(corpus, output, "trl-sft", report, columns=columns) as writer:
        for example in corpus.examples(unit):
            if form == "completion":
                corpus.count_row_lengths(example, [last for _, last in trained_ranges(example)])
            for row in sft_rows(example, form):
                writer.add(example.group, row)
        return writer.finish(_SFT_ABOUT[form], _SFT_LOAD)


@exporter(FormatTraits(origins=("rollouts",), chooses_thinking=False, clients=True))
def export_tokens(corpus: Corpus, output: Path, *, report: ProgressCallback = no_progress) -> ExportSummary:
    """Exact tokens of rollouts for TRL's SFTTrainer, with masks, logprobs, rewards and policy versions.

    Raises ConfigError if there is nothing to write, or it cannot be written.
    """
    # Added only if needed, so that the rows of other exports stay as they were.
    of_clients = bool(corpus.selection.clients)
    has_groups = not of_clients and bool(corpus.shared_tasks)
    columns = TOKEN_COLUMNS | ({"group": _TEXT} if has_groups or of_clients else {})
    with ExportWriter(corpus, output, "trl-tokens", report, columns=columns) as writer:
        for item, sample in corpus.client_samples() if of_clients else corpus.samples():
            origin = corpus.task_origin(item)
            if any(sample.segment.target_mask):
                group = origin.group if isinstance(item, ClientSession) else corpus.group_name(item)
                # Only keys that are columns are written.
                writer.add(origin.group, token_row(item, sample) | {"group": group})
            else:
                corpus.counts.count(origin_name(item), origin.source, origin.licence, None, -1)
                corpus.counts.left_out[INVALID_CALLS] += 1
        notes = (_GROUP_NOTE,) if has_groups else ()
        return writer.finish(_TOKENS_ABOUT, _load("SFT"), notes=notes)


@exporter(FormatTraits(chooses_solved=False))
def export_dpo(corpus: Corpus, output: Path, *, report: ProgressCallback = no_progress) -> ExportSummary:
    """Preference pairs for TRL's DPOTrainer, from replays and from attempts at one task.

    Raises ConfigError if there is nothing to write, or it cannot be written.
    """
    columns = DPO_COLUMNS | tools_columns(corpus)
    with ExportWriter(corpus, output, "trl-dpo", report, columns=columns) as writer:
        for pair in corpus.pairs():
            writer.add(pair.group, dpo_row(pair))
        return writer.finish(_DPO_ABOUT, _load("DPO"))


@exporter(FormatTraits(chooses_solved=False, cuts=True))
def export_kto(corpus: Corpus, output: Path, *, report: ProgressCallback = no_progress) -> ExportSummary:
    """Turns labelled as desirable or not, for TRL's KTOTrainer.

    Raises ConfigError if there is nothing to write, or it cannot be written.
    """
    labels: Counter[bool] = Counter()
    columns = KTO_COLUMNS | tools_columns(corpus)
    with ExportWriter(corpus, output, "trl-kto", report, columns=columns) as writer:
        for example in corpus.examples("turn"):
            if example.desirable is None:
                corpus.counts.leave_out(example, "turns of which nothing tells whether they were good")
                continue
            labels[example.desirable] += 1
            messages = message_rows(example.messages)
            row = {"prompt": messages[:-1], "completion": messages[-1:], "label": example.desirable}
            writer.add(example.group, row | _example_fields(example))
        note = f"{labels[True]} rows are desirable, {labels[False]} are not."
        return writer.finish(_KTO_ABOUT, _load("KTO"), notes=(note,))


# --- Rows ---------------------------------------------------------------------------------------------------


def tools_columns(corpus: Corpus) -> dict[str, Any]:
    """Return the columns about the source of tools, for exports with sessions.

    Rows of rollouts stay as they were.
    """
    return dict.fromkeys(TOOLS_FROM, _TEXT) if "sessions" in corpus.selection.origins else {}


def sft_rows(example: Example, form: SftForm) -> Iterator[dict[str, Any]]:
    """Return the rows of an example: one, or in the form "completion" one for each range of trained messages."""
    messages = message_rows(example.messages)
    common = _example_fields(example)
    if form == "messages":
        yield {"messages": messages, "trained": list(example.trained), **common}
        return
    for first, last in trained_ranges(example):
        yield {"prompt": messages[:first], "completion": messages[first : last + 1], **common}


def token_row(item: CallSource, sample: Sample) -> dict[str, Any]:
    """Return a sample as a row of `TOKEN_COLUMNS`. What a client's session lacks, such as a reward, is None."""
    segment, rollout, verdict = sample.segment, item.rollout, item.verdict
    tokens = zip(segment.token_ids, segment.target_mask, strict=True)
    return {
        "input_ids": list(segment.token_ids),
        "labels": [token if trained else IGNORED for token, trained in tokens],
        "assistant_masks": list(segment.target_mask),
        "logprobs": list(segment.logprobs),
        "reward": sample.reward,
        "policy_version": sample.policy_version,
        "policy_versions": list(segment.policy_versions),
        "call_ids": list(segment.call_ids),
        "instance_id": rollout and rollout.task_id,
        "rollout_id": rollout and rollout.id,
        "attempt_id": sample.attempt_id,
        "branch": sample.branch,
        "role": sample.role,
        "reason": segment.reason,
        "integrity": verdict and verdict.integrity.status,
    }


def dpo_row(pair: Pair) -> dict[str, Any]:
    """Return a pair as a row of `DPO_COLUMNS`."""
    return {
        "prompt": message_rows([with_text_content(message) for message in pair.messages]),
        "chosen": message_rows([with_text_content(message_of(pair.chosen))]),
        "rejected": message_rows([with_text_content(message_of(pair.rejected))]),
        "tools": tools_json(pair.tools),
        **{name: getattr(pair, name) for name in (*_PAIR_COLUMNS, "evidence", "tools_source")},
    }


def trained_ranges(example: Example) -> list[tuple[int, int]]:
    """Return the first and last index of each range of trained messages without an untrained answer in between."""
    ranges: list[tuple[int, int]] = []
    trained = set(example.trained)
    extends = False
    for index, message in enumerate(example.messages):
        if index in trained:
            first = ranges.pop()[0] if extends else index
            ranges.append((first, index))
            extends = True
        elif message["role"] == "assistant":
            extends = False
    return ranges


def tools_json(tools: Sequence[dict[str, Any]] | None) -> str | None:
    """Return tools as JSON text, which TRL decodes; None if there are none."""
    return json.dumps(tools, ensure_ascii=False) if tools else None


def _example_fields(example: Example) -> dict[str, Any]:
    """Return the columns of `_EXAMPLE`."""
    return {
        "tools": tools_json(example.tools),
        **{name: getattr(example, name) for name in (*_ORIGIN, "reward", *TOOLS_FROM)},
    }
