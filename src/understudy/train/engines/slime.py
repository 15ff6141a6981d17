"""Graded rollouts of coding agents as slime's custom generate. Written for slime 0.3.1 (commit 624b824).

    --custom-generate-function-path understudy.train.engines.slime.generate
    --custom-reward-post-process-path understudy.train.engines.slime.advantages
    --custom-config-path recipes/slime/rollouts.yaml

Understudy must be installed in slime's environment. Both functions belong together: as soon as rollouts have
several samples, slime itself would compare rewards over the whole batch.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import copy
import logging
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from slime.utils.http_utils import post
from slime.utils.types import Sample

from understudy.errors import BackendError, ConfigError
from understudy.train.engines import verl
from understudy.train.engines.bridge import BridgeResponse, Generate
from understudy.train.engines.rollout_process import RolloutRunner, missing_instance_id
from understudy.train.groups import TrainingRollout

_log = logging.getLogger(__name__)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> list[Any]:
    """Run and grade one rollout of a sample's task; return a Sample for each of its sequences.

    An evaluation, which counts samples, gets the last one. The task is the `instance_id` in the sample's metadata.
    A rollout whose infrastructure failed, or whose requests slime aborted, is one sample of the status ABORTED
    outside the loss. Raises ConfigError for a sample without the id of a task, and for missing settings.
    """
    instance = (sample.metadata or {}).get("instance_id")
    if not instance:
        raise missing_instance_id("instance_id in the sample's metadata (--metadata-key extra_info)")
    aborted = asyncio.Event()
    sampler = _sampler(args, sample.session_id, sampling_params, aborted)
    running = asyncio.ensure_future(
        _runner(args).run(str(instance), sampler, sampling_params, seed=int(sample.index or 0))
    )
    waiting = asyncio.ensure_future(aborted.wait())
    try:
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return [_excluded_sample(sample, "slime aborted its requests")]
        rollout, _ = running.result()
    except (BackendError, ConfigError) as error:
        _log.warning("%s: left out: %s", instance, error)
        return [_excluded_sample(sample, str(error))]
    finally:
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
    return samples(sample, rollout)[-1 if evaluation else 0 :]


def samples(sample: Any, rollout: TrainingRollout) -> list[Any]:
    """Return a copy of slime's sample for each sequence of a rollout. All have its reward and the same rollout_id,
    by which slime counts them as one rollout.
    """
    rows = [verl.row(sequence) for sequence in rollout.sequences]
    rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    sequence_samples: list[Any] = []
    for row in rows:
        copied = copy.copy(sample)
        copied.tokens = row.prompt + row.response
        copied.response_length = len(row.response)
        copied.loss_mask = row.mask
        copied.rollout_log_probs = row.logprobs
        copied.reward = rollout.reward
        copied.rollout_id = rollout_id
        copied.status = Sample.Status.COMPLETED
        copied.metadata = {**(sample.metadata or {}), "rollout": rollout.rollout_id}
        sequence_samples.append(copied)
    return sequence_samples


def advantages(args: Any, collected: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the rewards of samples, and their advantages within the groups of slime's prompts.

    A rollout of several samples counts once in its group; one that was left out does not count, and has the
    advantage 0. With `grpo_std_normalization` advantages are divided by the group's standard deviation.
    """
    groups: dict[Any, dict[Any, float]] = {}
    for sample in collected:
        if not sample.remove_sample:
            groups.setdefault(sample.group_index, {})[sample.rollout_id] = float(sample.reward)
    means = {name: statistics.fmean(rewards.values()) for name, rewards in groups.items()}
    scales = dict.fromkeys(groups, 1.0)
    if getattr(args, "grpo_std_normalization", False):
        scales = {name: _deviation(list(rewards.values())) + 1e-6 for name, rewards in groups.items()}
    return [float(sample.reward) for sample in collected], [
        0.0 if sample.remove_sample else (sample.reward - means[sample.group_index]) / scales[sample.group_index]
        for sample in collected
    ]


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _excluded_sample(sample: Any, why: str) -> Any:
    sample.tokens, sample.response_length = [0, 0], 1
    sample.loss_mask, sample.rollout_log_probs, sample.reward = [0], [0.0], 0.0
    sample.remove_sample, sample.status = True, Sample.Status.ABORTED
    sample.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    sample.metadata = {**(sample.metadata or {}), "left_out": why}
    return sample


def _sampler(args: Any, session: str | None, sampling: Mapping[str, Any], aborted: asyncio.Event) -> Generate:
    """Return a function that samples through slime's router, as slime's own generate does."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    hashed = session and getattr(args, "router_policy", None) == "consistent_hashing"
    headers = {"X-SMG-Routing-Key": session} if hashed else None

    async def sample(prompt: list[int], wanted: dict[str, Any]) -> BridgeResponse:
        limit = min(wanted["max_tokens"], int(sampling.get("max_new_tokens") or wanted["max_tokens"]))
        parameters = {key: value for key, value in wanted.items() if key != "max_tokens"}
        parameters |= {"max_new_tokens": limit, "skip_special_tokens": False, "no_stop_trim": True}
        payload = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
        meta = (await post(url, payload, headers=headers))["meta_info"]
        finish = meta["finish_reason"]["type"]
        if finish == "abort":
            aborted.set()
        sampled = meta.get("output_token_logprobs") or []
        return BridgeResponse(
            ids=[int(token[1]) for token in sampled],
            logprobs=[float(token[0]) for token in sampled],
            stopped=finish == "stop",
            aborted=finish == "abort",
        )

    return sample


_REQUIRED_SETTINGS = ("understudy_tasks", "understudy_output", "rollout_max_context_len")


def _runner(args: Any) -> RolloutRunner:
    missing = [name for name in _REQUIRED_SETTINGS if not getattr(args, name, None)]
    if missing:
        raise ConfigError(
            f"slime's arguments have no {', '.join(missing)}; give --rollout-max-context-len, and the others in "
            "the file of --custom-config-path, as recipes/slime/rollouts.yaml does"
        )
    return _shared_runner(
        str(args.hf_checkpoint),
        int(args.rollout_max_context_len),
        tuple(args.understudy_tasks),
        str(args.understudy_output),
        tuple(getattr(args, "understudy_options", None) or ()),
        str(getattr(args, "understudy_tool_format", "hermes")),
        int(getattr(args, "understudy_concurrency", 16)),
    )


@cache
def _shared_runner(
    model: str,
    context: int,
    tasks: tuple[str, ...],
    output: str,
    options: tuple[str, ...],
    tool_format: str,
    concurrency: int,
) -> RolloutRunner:
    """Return the runner of this process, whose concurrency all samples share."""
    return RolloutRunner(
        model,
        context=context,
        tasks=tasks,
        output=Path(output),
        options=options,
        tool_format=tool_format,
        concurrency=concurrency,
    )
