"""The identity of a run: what is part of it, and what follows from it."""

from understudy.run.config import RunConfig, task_digests

from support import calc_task


def _config(**changes: object) -> RunConfig:
    return RunConfig(**{"backend": "embedded", "model": "m", "tasks": {"a": "1"}, **changes})  # type: ignore[arg-type]


def test_equal_configurations_are_one_run():
    assert _config().run_id == _config().run_id
    assert _config(tasks={"a": "1", "b": "2"}).run_id == _config(tasks={"b": "2", "a": "1"}).run_id


def test_every_field_is_part_of_the_identity():
    changes = {
        "backend": "vllm", "model": "n", "base_url": "u", "policy": "oracle", "policy_args": {"p": "1"},
        "agent": "shell", "agent_options": {"command": "true"}, "sandbox": "unsafe-local", "samples": 2, "seed": 1,
        "max_turns": 1, "timeout_s": 1.0, "tasks": {"a": "2"},
    }  # fmt: skip
    assert set(changes) == set(RunConfig.__struct_fields__)
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
