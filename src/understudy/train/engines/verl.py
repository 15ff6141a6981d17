"""Our samples as verl's data: AgentLoopOutputs, as its agent loops return, and its DataProto. Written for verl
0.9.1.

A row's key has the form that verl's trainer gives it, `{uid}_{session}_{index}`. By it verl's
`compute_advantage_for_multi_trajectories` counts a rollout of several sequences once and gives all of them its
advantage. verl is imported only where one of its types is made.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.train.groups import RolloutGroup, TokenSequence, TrainingRollout, format_counts

TOO_LONG = "sequences longer than verl's prompt and response lengths"
NOTHING_LEFT = "rollouts of which no sequence is left"


class VerlLengths(Struct, frozen=True):
    """verl's limits in tokens: of the part before a sequence's first sampled token, and of the rest."""

    prompt: int
    response: int


class VerlRow(Struct, frozen=True, kw_only=True):
    """A sequence split as verl expects it: `response` begins with the first sampled token."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float] | None


def row(sequence: TokenSequence) -> VerlRow:
    """Return the sequence split into prompt and response. At least one of its tokens must be sampled."""
    first = sequence.loss_mask.index(1)
    logprobs = sequence.logprobs
    return VerlRow(
        prompt=list(sequence.token_ids[:first]),
        response=list(sequence.token_ids[first:]),
        mask=list(sequence.loss_mask[first:]),
        logprobs=None if logprobs is None else list(logprobs[first:]),
    )


def rows(rollout: TrainingRollout, lengths: VerlLengths, left_out: Counter[str]) -> list[VerlRow]:
    """Return the sequences of a rollout that fit in `lengths`; the others are counted in `left_out`."""
    divided = [row(sequence) for sequence in rollout.sequences if any(sequence.loss_mask)]
    fitting = [
        verl_row
        for verl_row in divided
        if len(verl_row.prompt) <= lengths.prompt and len(verl_row.response) <= lengths.response
    ]
    if len(fitting) < len(divided):
        left_out[TOO_LONG] += len(divided) - len(fitting)
    if not fitting:
        left_out[NOTHING_LEFT] += 1
    return fitting


def outputs(
    rollout: TrainingRollout, lengths: VerlLengths, *, steps: tuple[int, int] = (0, 0), seconds: float = 0.0
) -> list[Any]:
    """Return what the `run` of a verl agent loop returns for a rollout: one AgentLoopOutput per sequence.

    Each has the rollout's reward. `steps` are verl's step numbers of the oldest and the newest weights that
    sampled it, `seconds` how long it took. Raises ConfigError when no sequence fits, or when one has no logprobs.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    left_out = Counter[str]()
    fitting = rows(rollout, lengths, left_out)
    if not fitting:
        raise ConfigError(
            f"rollout {rollout.rollout_id}: none of its {len(rollout.sequences)} sequences fits in verl's "
            f"data.max_prompt_length ({lengths.prompt}) and data.max_response_length ({lengths.response}); raise "
            "these settings, or limit the agent's turns and answers"
        )
    if any(verl_row.logprobs is None for verl_row in fitting):
        raise ConfigError(
            f"rollout {rollout.rollout_id}: has sequences without logprobs, which verl needs; collect rollouts "
            'with tokens = "exact" in the gateway\'s configuration'
        )
    return [
        AgentLoopOutput(
            prompt_ids=verl_row.prompt,
            response_ids=verl_row.response,
            response_mask=verl_row.mask,
            response_logprobs=verl_row.logprobs,
            reward_score=rollout.reward,
            num_turns=_turns(verl_row.mask),
            metrics=AgentLoopMetrics(generate_sequences=seconds),
            extra_fields={
                "min_global_steps": steps[0],
                "max_global_steps": steps[1],
                # verl's trainer reads this key of every row that has a reward.
                "reward_extra_info": {},
                "turn_scores": [],
                "tool_rewards": [],
                "rollout_id": rollout.rollout_id,
            },
        )
        for verl_row in fitting
    ]


def data_proto(
    groups: Iterable[RolloutGroup], lengths: VerlLengths, *, pad_id: int, left_out: Counter[str] | None = None
) -> Any:
    """Return groups as one DataProto, with the tensors that verl's trainer has after its own rollouts.

    Prompts are padded on the left and responses on the right, to `lengths`. `rm_scores` has a rollout's reward at
    the last token of each of its sequences; `uid` is the group, `key` is described in this module's docstring.
    Sequences that do not fit are counted in `left_out`. Raises ConfigError when none is left.
    """
    import numpy
    import torch
    from verl.protocol import DataProto

    counts = Counter[str]() if left_out is None else left_out
    groups = list(groups)
    names = {rollout.rollout_id: group.name or group.task_id for group in groups for rollout in group.rollouts}
    rows = list(_rows_with_keys(groups, lengths, counts))
    if not rows:
        raise ConfigError(
            f"no rows for verl; left out: {format_counts(counts)}; expected a sequence of at most "
            f"{lengths.prompt} tokens of prompt and {lengths.response} of response: raise verl's "
            "data.max_prompt_length or data.max_response_length, or collect more"
        )
    size = (len(rows), lengths.response)
    prompts = torch.full((len(rows), lengths.prompt), pad_id)
    responses = torch.full(size, pad_id)
    attention = torch.zeros((len(rows), lengths.prompt + lengths.response), dtype=torch.long)
    mask = torch.zeros(size, dtype=torch.long)
    logprobs, scores = torch.zeros(size), torch.zeros(size)
    exact = all(verl_row.logprobs is not None for _, _, verl_row in rows)
    for at, (_, rollout, verl_row) in enumerate(rows):
        before, after = len(verl_row.prompt), len(verl_row.response)
        prompts[at, lengths.prompt - before :] = torch.tensor(verl_row.prompt, dtype=torch.long)
        responses[at, :after] = torch.tensor(verl_row.response)
        attention[at, lengths.prompt - before : lengths.prompt + after] = 1
        mask[at, :after] = torch.tensor(verl_row.mask)
        logprobs[at, :after] = torch.tensor(verl_row.logprobs or [0.0] * after)
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
        "uid": [names[rollout.rollout_id] for _, rollout, _ in rows],
        "key": [key for key, _, _ in rows],
        "rollout_id": [rollout.rollout_id for _, rollout, _ in rows],
        "__num_turns__": [_turns(verl_row.mask) for _, _, verl_row in rows],
    }
    return DataProto.from_dict(
        tensors=tensors, non_tensors={name: numpy.array(values, dtype=object) for name, values in extra.items()}
    )


def _rows_with_keys(
    groups: Iterable[RolloutGroup], lengths: VerlLengths, left_out: Counter[str]
) -> Iterator[tuple[str, TrainingRollout, VerlRow]]:
    for group in groups:
        for session, rollout in enumerate(group.rollouts):
            for index, verl_row in enumerate(rows(rollout, lengths, left_out)):
                yield f"{group.name or group.task_id}_{session}_{index}", rollout, verl_row


def _turns(mask: list[int]) -> int:
    """Return the number of turns as verl counts them: every answer, and the prompt or tool results before it."""
    answers = sum(now > before for before, now in zip([0, *mask], mask, strict=False))
    return 2 * answers
