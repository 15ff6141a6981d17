"""Run in the environment of SkyRL or slime: rollouts of ours with answers of their own servers' interface."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from understudy.errors import BackendError, ConfigError
from understudy.train.engines.rollout_process import RolloutRunner

# Two conversations, so that each rollout has two sequences.
AGENT = '''python3 -c "
import http.client, json, os, socket
for words in ('one', 'two'):
    link = http.client.HTTPConnection('gateway')
    link.sock = socket.socket(socket.AF_UNIX)
    link.sock.connect(os.environ['UNDERSTUDY_GATEWAY_SOCKET'])
    body = {'model': os.environ['UNDERSTUDY_MODEL'], 'max_tokens': 100, 'temperature': 0,
            'messages': [{'role': 'user', 'content': words}]}
    key = {'x-api-key': os.environ['UNDERSTUDY_API_KEY'], 'content-type': 'application/json',
           'anthropic-version': '2023-06-01'}
    link.request('POST', '/v1/messages', json.dumps(body), key)
    answer = link.getresponse()
    assert answer.status == 200, answer.read()
"'''
OPTIONS = ["--agent", "shell", "--agent-command", AGENT]


async def skyrl(model: str, tasks: str, output: str, instance: str) -> dict[str, Any]:
    from skyrl.train.generators.base import BatchMetadata, TrajectoryID
    from skyrl.train.generators.utils import merge_stepwise_output
    from skyrl.train.utils.trainer_utils import validate_generator_output

    from understudy.train.engines.skyrl import UnderstudyGenerator, generator_output

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked: list[Any] = []
    finished: list[str] = []

    class Engines:
        """SkyRL's client of its engines, as far as generators call it."""

        async def generate(self, input_batch: Any, model: str | None = None) -> Any:
            asked.append(input_batch)
            ids = [*tokenizer.encode("I give up.", add_special_tokens=False), tokenizer.eos_token_id]
            return {
                "responses": ["I give up."],
                "response_ids": [ids],
                "stop_reasons": ["stop"],
                "response_logprobs": [[-0.5] * len(ids)],
                "prompt_logprobs": None,
                "rollout_expert_indices": None,
            }

        async def finish_session(self, session_id: str) -> None:
            finished.append(session_id)

    runner = RolloutRunner(model, context=8000, tasks=[tasks], output=Path(output), options=OPTIONS, concurrency=2)
    generator = UnderstudyGenerator(Engines(), runner)
    names = [(instance, 0), (instance, 1), ("no-such-task", 0)]
    batch = {
        "prompts": [[{"role": "user", "content": "x"}]] * 3,
        "env_classes": ["understudy"] * 3,
        "env_extras": [{"extra_info": {"instance_id": name}} for name, _ in names],
        "sampling_params": {"temperature": 0.7, "max_tokens": 50, "logprobs": 1},
        "trajectory_ids": [TrajectoryID(name, number) for name, number in names],
        "batch_metadata": BatchMetadata(global_step=1, training_phase="train"),
    }
    made = await generator.generate(batch)
    validate_generator_output(3, made, step_wise=True)
    merged = merge_stepwise_output(made)
    try:
        generator_output(batch["trajectory_ids"], [(None, 0.0)] * 3)
    except BackendError as error:
        refused = f"BackendError: {error}"
    return {
        "rewards": made["rewards"],
        "last": made["is_last_step"],
        "trajectories": [each.to_string() for each in made["trajectory_ids"]],
        "masks": [sum(mask) for mask in made["loss_masks"]],
        "responses": [len(ids) for ids in made["response_ids"]],
        "logprobs": made["rollout_logprobs"],
        "merged": len(merged["response_ids"]),
        "asked": [{**each["sampling_params"], "prompts": len(each["prompt_token_ids"])} for each in asked],
        "sessions": len({each["session_ids"][0] for each in asked}),
        "finished": len(finished),
        "refused": refused,
    }


async def slime(model: str, tasks: str, output: str, instance: str) -> dict[str, Any]:
    from aiohttp import web
    from slime.ray.rollout_validation import validate_server_group_gpu_indices  # noqa: F401  (the package is whole)
    from slime.utils import http_utils
    from slime.utils.types import Sample

    from understudy.train.engines import slime as engine

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked: list[Any] = []
    aborting = False

    async def answer(request: web.Request) -> web.Response:
        """The answer of SGLang's /generate, behind slime's router."""
        asked.append(await request.json())
        ids = [*tokenizer.encode("I give up.", add_special_tokens=False), tokenizer.eos_token_id]
        reason = {"type": "abort"} if aborting else {"type": "stop"}
        logprobs = [] if aborting else [[-0.5, id_, None] for id_ in ids]
        return web.json_response(
            {"text": "I give up.", "meta_info": {"finish_reason": reason, "output_token_logprobs": logprobs}}
        )

    app = web.Application()
    app.router.add_post("/generate", answer)
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    args = SimpleNamespace(
        hf_checkpoint=model,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=server.addresses[0][1],
        rollout_max_context_len=8000,
        understudy_tasks=[tasks],
        understudy_output=output,
        understudy_options=OPTIONS,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        sglang_server_concurrency=8,
        use_distributed_post=False,
        grpo_std_normalization=False,
    )
    http_utils.init_http_client(args)
    sampling = {"temperature": 0.7, "max_new_tokens": 50}

    def sample(index: int, name: str = instance, group: int = 0) -> Any:
        return Sample(
            index=index, group_index=group, prompt="x", metadata={"instance_id": name}, session_id=f"s{index}"
        )

    made = await engine.generate(args, sample(0), dict(sampling))
    (evaluated,) = await engine.generate(args, sample(1), dict(sampling), evaluation=True)
    (absent,) = await engine.generate(args, sample(2, "no-such-task"), dict(sampling))
    answered = len(asked)
    aborting = True
    (aborted,) = await engine.generate(args, sample(3), dict(sampling))
    solved = sample(4)
    solved.reward, solved.rollout_id = 1.0, 4
    raw, advantages = engine.advantages(args, [*made, solved, absent])
    try:
        await engine.generate(args, Sample(metadata={}), dict(sampling))
    except ConfigError as error:
        refused = f"ConfigError: {error}"
    await server.cleanup()
    return {
        "samples": [Sample.from_dict(each.to_dict()).to_dict() for each in made],
        "evaluated": evaluated.reward,
        "absent": [absent.status.value, absent.remove_sample, absent.loss_mask],
        "aborted": [aborted.status.value, aborted.metadata["left_out"]],
        "asked": [each["sampling_params"] for each in asked[:answered]],
        "raw": raw,
        "advantages": advantages,
        "refused": refused,
    }


if __name__ == "__main__":
    engine, model, tasks, output, instance, result = sys.argv[1:]
    report = asyncio.run({"skyrl": skyrl, "slime": slime}[engine](model, tasks, output, instance))
    for each in report.get("samples", []):
        each["tokens"] = len(each["tokens"])
    Path(result).write_text(json.dumps(report, default=str))
