"""Our samples as verl's data: AgentLoopOutputs, as its agent loops return, and its DataProto. Written for verl
0.9.1.

A row's key has the form that verl's trainer gives it, `{uid}_{session}_{index}`. By it verl's
`compute_advantage_for_multi_trajectories` counts a rollout of several sequences once and gives all of them its
advantage. verl is imported only where one of its types is made.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Self

import msgspec
from aiohttp import web
from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.train.groups import RolloutGroup, TokenSequence, TrainingRollout

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
    """Return what the `run` of a verl agent loop returns for a rollout: one AgentLoopOutput per sequence.

    Each has the rollout's reward. `steps` are verl's step numbers of the oldest and the newest weights that
    sampled it, `seconds` how long it took. Raises ConfigError when no sequence fits, or when one has no logprobs.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    left_out = Counter[str]()
    fitting = rows(rollout, lengths, left_out)
    if not fitting:
        raise ConfigError(
            f"{rollout.rollout_id}: none of its {len(rollout.sequences)} sequences fits in "
            f"data.max_prompt_length {lengths.prompt} and data.max_response_length {lengths.response}; raise "
            "these settings of verl"
        )
    if any(each.logprobs is None for each in fitting):
        raise ConfigError(
            f"{rollout.rollout_id}: sequences without logprobs, which verl needs; collect rollouts "
            'with tokens = "exact" in the gateway\'s configuration'
        )
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
                # verl's trainer reads this key of every row that has a reward.
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
    rows = list(_keyed(groups, lengths, counts))
    if not rows:
        raise ConfigError(
            f"no rows for verl; left out: {dict(counts) or 'nothing'}; expected at least one group with a "
            f"sequence within {lengths}: raise these lengths, or collect more"
        )
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
        "uid": [names[rollout.rollout_id] for _, rollout, _ in rows],
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
                yield f"{group.name or group.task_id}_{session}_{index}", rollout, each


def _turns(mask: list[int]) -> int:
    """Return the number of turns as verl counts them: every answer, and the prompt or tool results before it."""
    answers = sum(now > before for before, now in zip([0, *mask], mask, strict=False))
    return 2 * answers


_BODY_LIMIT = 64 << 20


class BridgeResponse(Struct, frozen=True, kw_only=True):
    """The sampled tokens. `stopped`: the model ended by itself; `aborted`: sampling was interrupted from outside.

    `step` is the training step of the weights that sampled, None if unknown.
    """

    ids: list[int]
    logprobs: list[float] | None
    stopped: bool = True
    aborted: bool = False
    step: int | None = None


Generate = Callable[[list[int], dict[str, Any]], Awaitable[BridgeResponse]]
"""Samples from a prompt, with sampling parameters by vLLM's names."""


class BridgeSession:
    """The requests of one rollout: the URL that it sends them to, and the steps of the weights that answered."""

    def __init__(self, generate: Generate, sampling: dict[str, Any]) -> None:
        self.generate = generate
        self.sampling = sampling
        """Sampling parameters that override those of the agent's requests."""
        self.steps: set[int] = set()
        self.url = ""


class _BridgeRequest(Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any] = field(default_factory=dict[str, Any])


class Bridge:
    """A local HTTP server, used as a context manager. `context` is the maximum length of prompt and answer, in
    tokens.
    """

    def __init__(self, model: str, context: int) -> None:
        self._model = model
        self._context = context
        self._sessions: dict[str, BridgeSession] = {}
        self._base = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_BODY_LIMIT)
        app.router.add_post("/{session}/inference/v1/generate", self._generate)
        app.router.add_get("/{session}/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self._base = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def open(self, generate: Generate, sampling: dict[str, Any]) -> BridgeSession:
        """Start a session under an unguessable URL and return it."""
        name = secrets.token_urlsafe(16)
        session = self._sessions[name] = BridgeSession(generate, sampling)
        session.url = f"{self._base}/{name}/v1"
        return session

    def close(self, session: BridgeSession) -> None:
        """End a session: its URL answers 404 from now on."""
        self._sessions = {name: each for name, each in self._sessions.items() if each is not session}

    async def _generate(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            return _refused(404, "no such session")
        try:
            request_body = msgspec.json.decode(await request.read(), type=_BridgeRequest)
        except msgspec.DecodeError as error:
            return _refused(400, f"not understood: {error}")
        room = self._context - len(request_body.token_ids)
        if room < 1:
            return _refused(
                400,
                f"This model's maximum context length is {self._context} tokens. However, your request has "
                f"{len(request_body.token_ids)} input tokens.",
            )
        limit = min(int(request_body.sampling_params.get("max_tokens") or room), room)
        sampling = {
            key: value for key, value in request_body.sampling_params.items() if key in ("stop", "logit_bias")
        }
        answer = await session.generate(
            request_body.token_ids, {**sampling, **session.sampling, "max_tokens": limit}
        )
        if answer.aborted:
            return _refused(503, "the request was aborted for new weights; ask again")
        if answer.step is not None:
            session.steps.add(answer.step)
        return web.json_response(_answered(request_body.token_ids, answer, limit))

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "max_model_len": self._context}
        return web.json_response({"object": "list", "data": [card]})


def _answered(prompt: list[int], answer: BridgeResponse, limit: int) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": answer.ids,
        "finish_reason": "stop" if answer.stopped and len(answer.ids) < limit else "length",
        "logprobs": None,
    }
    if answer.logprobs is not None:
        pairs = zip(answer.ids, answer.logprobs, strict=True)
        choice["logprobs"] = {"content": [{"token_id": id_, "logprob": min(value, 0.0)} for id_, value in pairs]}
    if answer.step is not None:
        choice["weight_versions"] = [{"version": str(answer.step), "start": 0, "end": len(answer.ids)}]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer.ids)}
    return {"choices": [choice], "usage": usage}


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
