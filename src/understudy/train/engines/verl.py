"""Our samples as verl's own data: what its agent loops give back, and its DataProto. Written for verl 0.9.1.

The rows that a rollout becomes carry keys as verl's trainer gives them, `{uid}_{session}_{index}`: by them its
`compute_advantage_for_multi_trajectories` counts a rollout of several sequences once, and shares its advantage
among them. This module imports verl only where it makes one of its types.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.train.data.groups import RolloutGroup, TokenSequence, TrainingRollout

TOO_LONG = "sequences longer than verl's prompt and response lengths"
NOTHING_LEFT = "rollouts of which no sequence is left"


class VerlLengths(Struct, frozen=True):
    """The most tokens that verl takes of a sequence: before its first sampled one, and from there on."""

    prompt: int
    response: int


class VerlRow(Struct, frozen=True, kw_only=True):
    """A sequence, divided as verl has it: `response` begins with the first sampled token."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float] | None


def row(sequence: TokenSequence) -> VerlRow:
    """A sequence in which something was sampled, divided."""
    first = sequence.loss_mask.index(1)
    logprobs = sequence.logprobs
    return VerlRow(
        prompt=list(sequence.token_ids[:first]),
        response=list(sequence.token_ids[first:]),
        mask=list(sequence.loss_mask[first:]),
        logprobs=None if logprobs is None else list(logprobs[first:]),
    )


def rows(rollout: TrainingRollout, lengths: VerlLengths, left_out: Counter[str]) -> list[VerlRow]:
    """The sequences of a rollout that fit; of those that do not it is counted how many."""
    divided = [row(each) for each in rollout.sequences if any(each.loss_mask)]
    fitting = [
        each for each in divided if len(each.prompt) <= lengths.prompt and len(each.response) <= lengths.response
    ]
    if len(fitting) < len(divided):
        left_out[TOO_LONG] += len(divided) - len(fitting)
    if not fitting:
        left_out[NOTHING_LEFT] += 1
    return fitting


def outputs(
    rollout: TrainingRollout, lengths: VerlLengths, *, steps: tuple[int, int] = (0, 0), seconds: float = 0.0
) -> list[Any]:
    """A rollout as what a verl agent loop's `run` returns: an AgentLoopOutput a sequence, all with its reward.

    `steps` are verl's numbers of the oldest and the newest weights that sampled it, `seconds` what it took. Raises
    ConfigError when nothing of it fits, or when it has no logprobs: then the rollout is none that verl can use.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    left_out = Counter[str]()
    fitting = rows(rollout, lengths, left_out)
    if not fitting:
        raise ConfigError(
            f"{rollout.rollout_id}: none of its {len(rollout.sequences)} sequences fits in data.max_prompt_length "
            f"{lengths.prompt} and data.max_response_length {lengths.response}; raise them"
        )
    if any(each.logprobs is None for each in fitting):
        raise ConfigError(f"{rollout.rollout_id}: sequences without logprobs; collect them with tokens in and out")
    return [
        AgentLoopOutput(
            prompt_ids=each.prompt,
            response_ids=each.response,
            response_mask=each.mask,
            response_logprobs=each.logprobs,
            reward_score=rollout.reward,
            num_turns=_turns(each.mask),
            metrics=AgentLoopMetrics(generate_sequences=seconds),
            extra_fields={
                "min_global_steps": steps[0],
                "max_global_steps": steps[1],
                # The trainer looks for it wherever there is a reward.
                "reward_extra_info": {},
                "turn_scores": [],
                "tool_rewards": [],
                "rollout_id": rollout.rollout_id,
            },
        )
        for each in fitting
    ]


def data_proto(
    groups: Iterable[RolloutGroup], lengths: VerlLengths, *, pad_id: int, left_out: Counter[str] | None = None
) -> Any:
    """Groups as one DataProto, with the tensors that verl's trainer has when its rollouts have ended.

    Prompts are padded on the left and responses on the right, to `lengths`. `rm_scores` has a rollout's reward at
    the last token of each of its sequences; `uid` is the group, `key` as described above. What does not fit is
    counted in `left_out`. Raises ConfigError when nothing is left.
    """
    import numpy
    import torch
    from verl.protocol import DataProto

    counts = Counter[str]() if left_out is None else left_out
    rows = list(_keyed(groups, lengths, counts))
    if not rows:
        raise ConfigError(f"no rows for verl: {dict(counts) or 'expected at least one group of rollouts'}")
    size = (len(rows), lengths.response)
    prompts = torch.full((len(rows), lengths.prompt), pad_id)
    responses = torch.full(size, pad_id)
    attention = torch.zeros((len(rows), lengths.prompt + lengths.response), dtype=torch.long)
    mask = torch.zeros(size, dtype=torch.long)
    logprobs, scores = torch.zeros(size), torch.zeros(size)
    exact = all(each.logprobs is not None for _, _, each in rows)
    for at, (_, rollout, each) in enumerate(rows):
        before, after = len(each.prompt), len(each.response)
        prompts[at, lengths.prompt - before :] = torch.tensor(each.prompt, dtype=torch.long)
        responses[at, :after] = torch.tensor(each.response)
        attention[at, lengths.prompt - before : lengths.prompt + after] = 1
        mask[at, :after] = torch.tensor(each.mask)
        logprobs[at, :after] = torch.tensor(each.logprobs or [0.0] * after)
        scores[at, after - 1] = rollout.reward
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": mask,
        "rm_scores": scores,
        "token_level_scores": scores,
        "token_level_rewards": scores,
        **({"rollout_log_probs": logprobs} if exact else {}),
    }
    extra = {
        "uid": [rollout.task_id for _, rollout, _ in rows],
        "key": [key for key, _, _ in rows],
        "rollout_id": [rollout.rollout_id for _, rollout, _ in rows],
        "__num_turns__": [_turns(each.mask) for _, _, each in rows],
    }
    return DataProto.from_dict(
        tensors=tensors, non_tensors={name: numpy.array(values, dtype=object) for name, values in extra.items()}
    )


def _keyed(
    groups: Iterable[RolloutGroup], lengths: VerlLengths, left_out: Counter[str]
) -> Iterator[tuple[str, TrainingRollout, VerlRow]]:
    for group in groups:
        for session, rollout in enumerate(group.rollouts):
            for index, each in enumerate(rows(rollout, lengths, left_out)):
                yield f"{group.task_id}_{session}_{index}", rollout, each


def _turns(mask: list[int]) -> int:
    """How many stretches of sampled tokens there are, and what lies between them."""
    answers = sum(now > before for before, now in zip([0, *mask], mask, strict=False))
    return 2 * answers
