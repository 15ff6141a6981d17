"""Graded rollouts that a tiny model with one token a byte could have sampled, in a store and as sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from msgspec import structs

from understudy.store import Store
from understudy.train.groups import RolloutGroup, TokenSequence, TrainingRollout
from understudy.types import Verdict

from support import calc_task
from support.trajectory import Session, assistant, text, tool_result, tool_use, user

SYSTEM = "<|im_start|>system\nYou mend code. Use the tools.<|im_end|>\n"
LOOK = 'I look.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
TOOL_RESULT = "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LOGPROB = -3.0

Encode = Callable[[str], list[int]]


def encoder(model: Path) -> Encode:
    """Token ids of marked text by the tokenizer in a model's directory."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def last_words(number: int) -> str:
    return f"Done {number}." if number % 2 == 0 else f"I give up {number}."


def put_training_run(
    directory: Path,
    model: Path,
    *,
    tasks: int = 2,
    samples: int = 4,
    logprobs: float | None = LOGPROB,
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A run of two-turn rollouts, sampled by a policy step-0000; of each task every other one earns 1."""
    encode = encoder(model)
    with Store.open(directory) as store:
        created = [calc_task(number) for number in range(tasks)]
        _wait(store.runs.create("run1", {"backend": "embedded"}))
        _wait(store.runs.add_tasks("run1", created))
        ids = [(f"{task.instance_id}-{n}", task.instance_id, n) for task in created for n in range(samples)]
        _wait(store.runs.create_rollouts("run1", ids))
        for rollout_id, _, number in ids:
            attempt = _wait(store.runs.start_attempt(rollout_id))
            _wait(store.runs.mark_running(attempt.id))
            for call in _conversation(attempt.id, encode, number, logprobs).calls:
                _wait(store.calls.append(structs.replace(call, sampling=dict(sampling))))
            verdict = Verdict(reward=1.0 - number % 2, reason="x", tests={"t.py::test": "passed"})
            _wait(store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", patch=b"+x\n", verdict=verdict))


def make_groups(
    *, groups: int = 3, rollouts: int = 4, sequences: int = 2, prompt: int = 20, answer: int = 12
) -> list[RolloutGroup]:
    """Groups of rollouts of several sequences, tokens a function of where they are; rewards 0 and 1 in turn."""
    made: list[RolloutGroup] = []
    for task in range(groups):
        members: list[TrainingRollout] = []
        for number in range(rollouts):
            parts = [_made(task, number, part, prompt, answer) for part in range(sequences)]
            members.append(
                TrainingRollout(
                    rollout_id=f"t{task}-{number}",
                    task_id=f"t{task}",
                    reward=float(number % 2),
                    sequences=tuple(parts),
                )
            )
        made.append(RolloutGroup(task_id=f"t{task}", rollouts=tuple(members)))
    return made


def _made(task: int, number: int, part: int, prompt: int, answer: int) -> TokenSequence:
    length = answer + number + 3 * part
    sampled = [(task * 31 + number * 17 + part * 7 + position * position) % 200 for position in range(length)]
    return TokenSequence(
        token_ids=(*[7 + position % 50 for position in range(prompt)], *sampled),
        loss_mask=(*[0] * prompt, *[1] * length),
        logprobs=(*[0.0] * prompt, *[-4.0 - 0.01 * position for position in range(length)]),
        policy_versions=("step-0000",),
    )


def _conversation(attempt_id: str, encode: Encode, number: int, logprobs: float | None) -> Session:
    session = Session(attempt_id)
    ask = user(text("Mend it."))
    first = encode(f"{SYSTEM}<|im_start|>user\nMend it.<|im_end|>\n<|im_start|>assistant\n")
    look = encode(LOOK)
    answer_text = last_words(number)
    turns: list[tuple[list[Any], list[Any], list[int], list[int]]] = [
        ([ask], [text("I look."), tool_use("t1", command="ls")], first, look),
        (
            [ask, assistant(text("I look."), tool_use("t1", command="ls")), user(tool_result("t1"))],
            [text(answer_text)],
            first + look + encode(TOOL_RESULT),
            encode(answer_text + "<|im_end|>"),
        ),
    ]
    for messages, answer, prompt, completion in turns:
        stored_logprobs = None if logprobs is None else [logprobs] * len(completion)
        session.ask(
            messages, answer, prompt=prompt, completion=completion, logprobs=stored_logprobs, policy="step-0000"
        )
    return session


def _wait(future: Future[Any]) -> Any:
    return future.result(30)
