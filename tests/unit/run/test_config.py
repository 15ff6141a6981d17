"""The identity of a run: what is part of it, and what follows from it."""

from understudy.gateway.config import GatewayConfig, ModelConfig, ModelsConfig, SamplingConfig, SamplingParameters
from understudy.run.config import RunConfig, ServedPolicy, task_digests

from support import calc_task


def _config(**changes: object) -> RunConfig:
    return RunConfig(**{"gateway": _gateway(), "tasks": {"a": "1"}, **changes})  # type: ignore[arg-type]


def _gateway(model: str = "m", **changes: object) -> GatewayConfig:
    high = ModelConfig(backend="embedded", model=model)
    return GatewayConfig(models=ModelsConfig(high=high), **changes)  # type: ignore[arg-type]


def test_equal_configurations_are_one_run():
    assert _config().run_id == _config().run_id
    assert _config(tasks={"a": "1", "b": "2"}).run_id == _config(tasks={"b": "2", "a": "1"}).run_id


def test_every_field_is_part_of_the_identity():
    changes = {
        "gateway": _gateway("n"), "purpose": "evaluation", "policy": "oracle", "policy_args": {"p": "1"},
        "agent": "shell", "agent_options": {"command": "true"}, "sandbox": "unsafe-local", "samples": 2, "seed": 1,
        "max_turns": 1, "timeout_s": 1.0, "tasks": {"a": "2"}, "frontend_high": "a", "frontend_low": "b",
        "weights": "/m", "weights_version": "v", "wave": "loop/steps/step-0001",
    }  # fmt: skip
    assert {*changes, "served"} == set(RunConfig.__struct_fields__)
    assert _config(served=ServedPolicy(("http://127.0.0.1:1",), "v")).run_id == _config().run_id
    ids = {_config().run_id, *(_config(**{name: value}).run_id for name, value in changes.items())}
    assert len(ids) == len(changes) + 1


def test_sampling_seeds_differ_by_task_sample_and_run_seed():
    config = _config()
    seeds = [config.sampling_seed("a", 0), config.sampling_seed("a", 1), config.sampling_seed("b", 0)]
    seeds.append(_config(seed=1).sampling_seed("a", 0))
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_changed_task_is_another_digest():
    first, second = calc_task(1), calc_task(2)
    assert task_digests([first]) == task_digests([calc_task(1)])
    assert task_digests([first])["calc-1"] != task_digests([second])["calc-2"]


def test_an_evaluation_samples_by_parameters_of_its_own():
    sampling = SamplingConfig(
        training=SamplingParameters(temperature=1.0), evaluation=SamplingParameters(temperature=0.0, max_tokens=9)
    )
    gateway = _gateway(sampling=sampling)
    assert _config(gateway=gateway).sampling == {"temperature": 1.0}
    assert _config(gateway=gateway, purpose="evaluation").sampling == {"temperature": 0.0, "max_tokens": 9}


def test_the_agent_asks_for_the_models_by_their_names():
    both = ModelsConfig(high=ModelConfig(backend="vllm", model="h"), low=ModelConfig(backend="vllm", model="l"))
    config = _config(gateway=GatewayConfig(models=both))
    assert (config.model, config.small_model) == ("h", "l")
    assert _config().small_model == "m"
    named = _config(gateway=GatewayConfig(models=both), frontend_high="claude-a", frontend_low="claude-b")
    assert (named.model, named.small_model) == ("claude-a", "claude-b")
