"""verl itself takes our rollouts: as its DataProto, as what its agent loops give back, and out of its own loops.

It wants an environment of its own, with Understudy in it, whose python UNDERSTUDY_VERL_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError
from understudy.train.engines import verl
from understudy.train.groups import RolloutGroup, TokenSequence, TrainingRollout

from support.tiny_model import write_tokenizer

pytestmark = pytest.mark.services

PYTHON = os.environ.get("UNDERSTUDY_VERL_PYTHON", "")
needs_it = pytest.mark.skipif(not PYTHON, reason="UNDERSTUDY_VERL_PYTHON names no python with verl")


def sequence(mask: str, *, start: int = 10, logprobs: bool = True) -> TokenSequence:
    ones = tuple(int(each) for each in mask)
    sampled_logprobs = tuple(-0.25 * one for one in ones) if logprobs else None
    return TokenSequence(
        token_ids=tuple(range(start, start + len(mask))), loss_mask=ones, logprobs=sampled_logprobs
    )


def rollout(name: str, reward: float, *masks: str, logprobs: bool = True) -> TrainingRollout:
    sequences = tuple(sequence(mask, logprobs=logprobs) for mask in masks)
    return TrainingRollout(rollout_id=name, task_id="task_a", reward=reward, sequences=sequences)


GROUP = RolloutGroup(
    task_id="task_a",
    rollouts=(rollout("r0", 1.0, "0011011", "001", "0001"), rollout("r1", 0.0, "01"), rollout("r2", 0.0, "0101")),
)
LENGTHS = verl.VerlLengths(4, 6)


def test_a_sequence_is_divided_at_its_first_sampled_token():
    made = verl.row(sequence("0011011"))
    assert (made.prompt, made.response) == ([10, 11], [12, 13, 14, 15, 16])
    assert made.mask == [1, 1, 0, 1, 1] and made.logprobs == [-0.25, -0.25, 0.0, -0.25, -0.25]
    assert verl.row(sequence("01", logprobs=False)).logprobs is None


def test_what_does_not_fit_is_left_out_and_counted():
    left_out = Counter[str]()
    (row,) = verl.rows(rollout("r", 1.0, "0011", "00001", "01111111"), verl.VerlLengths(2, 6), left_out)
    assert row.prompt == [10, 11] and left_out == {verl.TOO_LONG: 2}
    assert verl.rows(rollout("r", 1.0, "0001"), verl.VerlLengths(2, 6), left_out) == []
    assert left_out[verl.NOTHING_LEFT] == 1


# --- with verl ---------------------------------------------------------------------------------------------

DATA = """
import json, sys
import msgspec, torch
from understudy.errors import ConfigError
from understudy.train.engines import verl
from understudy.train.groups import RolloutGroup, TokenSequence, TrainingRollout
groups = msgspec.msgpack.decode(open(sys.argv[1], "rb").read(), type=list[RolloutGroup])
lengths = verl.VerlLengths(4, 6)
proto = verl.data_proto(groups, lengths, pad_id=0)
from verl.protocol import DataProto
assert isinstance(proto, DataProto)
proto.check_consistency()
again = DataProto.concat(list(proto.chunk(1)))
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss, compute_policy_loss_vanilla
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
done = compute_advantage_for_multi_trajectories(
    again, batch_keys=list(proto.non_tensor_batch["key"]), adv_estimator=AdvantageEstimator.GRPO,
    norm_adv_by_std_in_grpo=False,
)
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
given = [verl.outputs(rollout, lengths, steps=(3, 4)) for rollout in groups[0].rollouts]
fields = list_of_dict_to_tensordict([output.as_dict() for each in given for output in each])
said = {name: done.batch[name].tolist() for name in done.batch.keys()}
def refused(logprobs, lengths):
    sequence = TokenSequence(token_ids=(1, 2), loss_mask=(0, 1), logprobs=logprobs)
    rollout = TrainingRollout(rollout_id="r", task_id="t", reward=1.0, sequences=(sequence,))
    try:
        verl.outputs(rollout, verl.VerlLengths(*lengths))
    except ConfigError as error:
        return str(error)

json.dump(
    {
        "refused": [refused(None, (4, 4)), refused((0.0, -1.0), (0, 4))],
        "batch": said,
        "keys": list(proto.non_tensor_batch["key"]),
        "uid": list(proto.non_tensor_batch["uid"]),
        "turns": [int(each) for each in proto.non_tensor_batch["__num_turns__"]],
        "outputs": [len(each) for each in given],
        "scores": [float(each.sum()) for each in fields["rm_scores"].unbind()],
        "logprobs": [each.tolist() for each in fields["rollout_log_probs"].unbind()],
        "extra": given[0][0].extra_fields,
    },
    open(sys.argv[2], "w"),
)
"""

LOOP = """
import asyncio, json, sys
from types import SimpleNamespace
from pathlib import Path
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput
import hydra

model, tasks, output, found = sys.argv[1:5]
config = OmegaConf.create({
    "actor_rollout_ref": {
        "model": {"path": model},
        "rollout": {"prompt_length": 4000, "response_length": 4000, "max_model_len": 8000, "name": "vllm"},
    },
    "data": {},
})
tokenizer = AutoTokenizer.from_pretrained(model)
asked = []

class Servers:
    async def generate(self, request_id, *, prompt_ids, sampling_params):
        asked.append({"id": request_id, "prompt": len(prompt_ids), "sampling": dict(sampling_params)})
        ids = [*tokenizer.encode("I give up.", add_special_tokens=False), tokenizer.eos_token_id]
        step = 6 + len(asked)
        told = {"global_steps": step, "min_global_steps": step, "max_global_steps": step}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed", extra_fields=told)

agent = '''python3 -c "
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
options = ["--agent", "shell", "--agent-command", agent]
loop_config = {
    "_target_": "understudy.train.engines.verl_agent.UnderstudyLoop", "tasks": [tasks], "output": output,
    "options": options,
}

async def main():
    loop = hydra.utils.instantiate(
        config=OmegaConf.create(loop_config), trainer_config=DictConfigWrap(config=config),
        server_manager=Servers(), tokenizer=tokenizer, processor=None, hf_model_type="qwen3",
        dataset_cls=RLHFDataset, data_config=DictConfigWrap(config.data), tools=ToolListWrap([]),
    )
    row = {"extra_info": {"instance_id": sys.argv[5], "index": 0}, "raw_prompt": [], "uid": "u_1"}
    runs = [loop.run({"temperature": 0.7, "top_p": 1.0, "logprobs": True}, session_id=n, **row) for n in range(2)]
    given = await asyncio.gather(*runs)
    try:
        await loop.run({}, **(row | {"extra_info": {}}))
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    given = [[output.model_dump() for output in each] for each in given]
    json.dump({"given": given, "asked": asked, "refused": refused}, open(found, "w"))

asyncio.run(main())
"""


def with_verl(program: str, directory: Path, *arguments: str) -> Any:
    """Run a program in verl's python; what it wrote to its result."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [PYTHON, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **quiet, "OMP_NUM_THREADS": "1"},
        cwd=directory,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@needs_it
def test_verl_counts_a_rollout_of_several_sequences_once(tmp_path: Path):
    import msgspec

    (tmp_path / "groups").write_bytes(msgspec.msgpack.encode([GROUP]))
    with_verl(DATA, tmp_path, str(tmp_path / "groups"), str(tmp_path / "found"))
    report = json.loads((tmp_path / "found").read_text())
    batch = report["batch"]
    assert report["keys"] == ["task_a_0_0", "task_a_0_1", "task_a_0_2", "task_a_1_0", "task_a_2_0"]
    assert set(report["uid"]) == {"task_a"} and report["turns"] == [4, 2, 2, 2, 4]
    assert batch["prompts"][0] == [0, 0, 10, 11] and batch["responses"][0] == [12, 13, 14, 15, 16, 0]
    assert batch["attention_mask"][0] == [0, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    assert batch["position_ids"][0][2:9] == [0, 1, 2, 3, 4, 5, 6]
    assert batch["response_mask"][0] == [1, 1, 0, 1, 1, 0]
    assert batch["rollout_log_probs"][0] == [-0.25, -0.25, 0.0, -0.25, -0.25, 0.0]
    # 1 − 1/3 for the rollout that solved it, on every sampled token of all its sequences, and nowhere else.
    first = [
        sum(row) / max(1, sum(mask)) for row, mask in zip(batch["advantages"], batch["response_mask"], strict=True)
    ]
    assert first == pytest.approx([2 / 3, 2 / 3, 2 / 3, -1 / 3, -1 / 3])
    assert batch["advantages"][0] == pytest.approx([2 / 3, 2 / 3, 0, 2 / 3, 2 / 3, 0])
    assert report["outputs"] == [3, 1, 1] and report["scores"] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert report["logprobs"][0] == [-0.25, -0.25, 0.0, -0.25, -0.25]
    assert "without logprobs" in report["refused"][0] and "max_prompt_length 0" in report["refused"][1]
    assert (report["extra"]["min_global_steps"], report["extra"]["max_global_steps"]) == (3, 4)


@needs_it
def test_its_agent_loop_runs_rollouts_of_ours_on_its_own_servers(tmp_path: Path, calc_tasks: Path):
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    instance = json.loads(calc_tasks.read_text().splitlines()[0])["instance_id"]
    result = tmp_path / "found"
    with_verl(LOOP, tmp_path, str(model), str(calc_tasks), str(tmp_path / "runs"), str(result), instance)
    report = json.loads(result.read_text())
    assert len(report["asked"]) == 4 and len({each["id"] for each in report["asked"]}) == 2
    # What verl says of sampling holds, whatever the agent asks for.
    assert report["asked"][0]["sampling"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "max_tokens": 100,
        "logprobs": True,
    }
    for outputs in report["given"]:
        assert len(outputs) == 2
        for output in outputs:
            assert output["reward_score"] == 0.0 and output["num_turns"] == 2
            assert output["response_mask"] == [1] * len(output["response_ids"])
            assert output["response_logprobs"] == [-0.5] * len(output["response_ids"])
            assert output["extra_fields"]["min_global_steps"] >= 7
    assert "instance_id" in report["refused"] and report["refused"].startswith("ConfigError")


@needs_it
def test_the_recipe_is_a_configuration_that_verl_takes(tmp_path: Path):
    recipe = Path(__file__).parents[2] / "recipes" / "verl"
    environment = {
        "TASKS": str(tmp_path / "t.jsonl"),
        "DATA": str(tmp_path),
        "PYTHON": PYTHON,
        "RUNS": str(tmp_path / "r"),
    }
    done = subprocess.run(
        ["sh", str(recipe / "train.sh"), "trainer.nnodes=2", "--cfg", "job"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (tmp_path / "job.yaml").write_text(done.stdout)
    program = f"""
import json, os
os.environ |= {environment!r}
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import load_class_from_fqn
config = OmegaConf.load({str(tmp_path / "job.yaml")!r})
validate_config(
    config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
)
rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
(loop,) = OmegaConf.load(rollout.agent.agent_loop_config_path)
found = {{
    "name": loop.name, "default": rollout.agent.default_agent_loop, "tasks": list(loop.tasks), "runs": loop.output,
    "class": load_class_from_fqn(loop._target_, "AgentLoop").__name__, "nodes": config.trainer.nnodes,
    "logprobs": rollout.logprobs_mode, "given": rollout.calculate_log_probs,
}}
json.dump(found, open({str(tmp_path / "found")!r}, "w"))
"""
    with_verl(program, tmp_path)
    configured = json.loads((tmp_path / "found").read_text())
    assert configured == {
        "name": "understudy",
        "default": "understudy",
        "tasks": [environment["TASKS"]],
        "runs": environment["RUNS"],
        "class": "UnderstudyLoop",
        "nodes": 2,
        "logprobs": "processed_logprobs",
        "given": True,
    }


def test_nothing_for_verl_is_an_error():
    pytest.importorskip("numpy")
    with pytest.raises((ConfigError, ImportError)):
        verl.data_proto([], LENGTHS, pad_id=0)
