"""TRL's SFTTrainer, tokens as they were sampled: no template and no tokenizer comes between."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from understudy.export.base import Exported, Report, Traits, exporter, silent
from understudy.export.corpus import Corpus
from understudy.export.files import Writing
from understudy.export.parquet import Parquet
from understudy.trajectory.graded import Graded
from understudy.trajectory.samples import Sample

IGNORED = -100
"""The label of a token that is not learned."""

COLUMNS: dict[str, Any] = {
    "input_ids": ["int32"],
    "labels": ["int32"],
    "assistant_masks": ["int8"],
    "logprobs": ["float64"],
    "reward": "float64",
    "policy_version": "string",
    "policy_versions": ["string"],
    "call_ids": ["string"],
    "instance_id": "string",
    "rollout_id": "string",
    "attempt_id": "string",
    "branch": "string",
    "role": "string",
    "reason": "string",
    "integrity": "string",
}
_ABOUT = (
    "Each row is a token sequence of one or more calls of a rollout, exactly as its tokens were sent and "
    "sampled. `assistant_masks` is 1 on the sampled tokens, `labels` are those tokens and -100 elsewhere; TRL "
    "takes the rows as they are. `logprobs` are those of the policy that sampled: 0 off the mask, null where the"
    " backend gave none. `policy_version` is the one that all of a row's calls share, `policy_versions` are "
    "those of its `call_ids`; `reward` is the whole rollout's; `reason` says why the sequence begins where it "
    "does. Use the tokenizer of the model that sampled."
)
_LOAD = """from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("{output}")
SFTTrainer(MODEL, args=SFTConfig(max_length=None), train_dataset=dataset["train"]).train()"""


@exporter(Traits(origins=("rollouts",)))
def export(corpus: Corpus, output: Path, *, report: Report = silent) -> Exported:
    """Exact tokens of rollouts for TRL's SFTTrainer, with masks, logprobs, rewards and policy versions.

    Raises ConfigError when there is nothing to write, or it cannot be written.
    """
    rows = partial(Parquet, columns=COLUMNS)
    with Writing(corpus, output, "trl-tokens", rows, report, suffix=Parquet.suffix) as writing:
        for graded, sample in corpus.samples():
            writing.add(graded.rollout.task_id, row_of(graded, sample))
        return writing.finish(_ABOUT, _LOAD)


def row_of(graded: Graded, sample: Sample) -> dict[str, Any]:
    """A sample as a row of `COLUMNS`."""
    segment = sample.segment
    tokens = zip(segment.token_ids, segment.loss_mask, strict=True)
    return {
        "input_ids": list(segment.token_ids),
        "labels": [token if learned else IGNORED for token, learned in tokens],
        "assistant_masks": list(segment.loss_mask),
        "logprobs": list(segment.logprobs),
        "reward": sample.reward,
        "policy_version": sample.policy_version,
        "policy_versions": list(segment.policy_versions),
        "call_ids": list(segment.call_ids),
        "instance_id": graded.rollout.task_id,
        "rollout_id": sample.rollout_id,
        "attempt_id": sample.attempt_id,
        "branch": sample.branch,
        "role": sample.role,
        "reason": segment.reason,
        "integrity": graded.verdict.integrity.status,
    }
