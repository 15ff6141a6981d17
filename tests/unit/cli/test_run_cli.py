"""What `understudy run` makes of its options: who answers, by which names, and the answer to former spellings."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from understudy.agents.claude_code import ClaudeCode
from understudy.cli.commands.run import RunSettings, print_summary, tasks_to_run
from understudy.cli.main import current_spelling, refuse_old_spelling
from understudy.cli.settings import FRONTEND_HIGH, FRONTEND_LOW, ModelSettings, TaskSettings, run_gateway_config
from understudy.errors import ConfigError
from understudy.run.runner import RunSummary
from understudy.tasks.records import LoadedTasks
from understudy.types import Directory, PytestChecks, Task

from support import understudy


@pytest.mark.parametrize(
    ("old_command", "new_command"),
    [
        (
            "--model_name_or_path Qwen/Q --server_address localhost:8000/v1 --dataset_path x.jsonl --max_step 5 "
            "--output_dir out",
            "vllm --backend-model-high Qwen/Q --base-url http://localhost:8000/v1 --dataset-path x.jsonl "
            "--max-turns 5 --output-dir out",
        ),
        ("--official --dataset_path=x.jsonl", "anthropic --dataset-path x.jsonl"),
        ("run --official --server_address a:1 --model_name_or_path m", "anthropic --backend-model-high m"),
        ("--dataset_path 'my tasks.jsonl'", "vllm --backend-model-high MODEL --dataset-path 'my tasks.jsonl'"),
        (
            "vllm --backend-model-high m --limit 2 --debug --dataset-path x",
            "vllm --backend-model-high m --limit 2 --debug --dataset-path x",
        ),
        ("run openai --backend_model_high m -t x", "openai --backend-model-high m -t x"),
    ],
)
def test_a_former_command_line_is_answered_with_the_present_one(old_command: str, new_command: str):
    arguments = shlex.split(old_command)
    assert current_spelling(arguments) == f"understudy run {new_command}"
    with pytest.raises(ConfigError, match="old syntax"):
        refuse_old_spelling(arguments)
    # What is answered is no former spelling itself.
    refuse_old_spelling(shlex.split(new_command, posix=True) and ["run", *shlex.split(new_command)])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["--version"],
        ["run", "vllm"],
        ["grade", "p.jsonl", "--official"],
        ["show", "--dir", "vllm"],
    ],
)
def test_present_command_lines_are_accepted(arguments: list[str]):
    refuse_old_spelling(arguments)


def test_the_error_for_a_former_command_line_shows_the_present_one():
    done = understudy("--model_name_or_path", "m", "--dataset_path", "x.jsonl")
    assert done.returncode == 2
    assert "  understudy run vllm --backend-model-high m --dataset-path x.jsonl\n" in done.stderr


def test_the_agents_model_names_map_to_the_backend_models():
    model = ModelSettings(backend="vllm", backend_model_high="big", backend_model_low="small")
    settings, high, low = run_gateway_config(model)
    assert (high, low) == (FRONTEND_HIGH, FRONTEND_LOW)
    assert settings.names == {FRONTEND_HIGH: "high", FRONTEND_LOW: "low"}
    assert settings.models.high.urls == ("http://localhost:8000/v1",)
    assert settings.models.low is not None
    assert (settings.models.high.model, settings.models.low.model) == ("big", "small")
    names = {"frontend_model_high": "claude-a", "frontend_model_low": "claude-b"}
    settings, high, low = run_gateway_config(ModelSettings(backend="openai", backend_model_high="big", **names))
    assert (high, low, settings.models.low) == ("claude-a", "claude-b", None)


def test_the_anthropic_backend_is_asked_for_the_agents_model_names():
    settings, high, low = run_gateway_config(ModelSettings(backend="anthropic", frontend_model_high="claude-a"))
    assert (settings.models.high.model, high) == ("claude-a", "claude-a")
    assert settings.models.low is not None
    assert (settings.models.low.model, low) == (FRONTEND_LOW, FRONTEND_LOW)
    settings, high, _ = run_gateway_config(ModelSettings(backend="anthropic", backend_model_high="claude-z"))
    assert (settings.models.high.model, high) == ("claude-z", FRONTEND_HIGH)


def test_a_model_with_a_name_of_its_own_is_asked_for_by_it(tmp_path: Path):
    settings, high, low = run_gateway_config(ModelSettings())
    assert (settings.names, high, low) == ({}, "", "")
    file = tmp_path / "models.toml"
    by_file = ModelSettings(config=file)
    file.write_text('[models.high]\nbackend = "anthropic"\n')
    assert run_gateway_config(by_file)[1] == FRONTEND_HIGH
    file.write_text('names = { "claude-a" = "low" }\n[models.high]\nbackend = "anthropic"\nmodel = "claude-b"\n')
    assert run_gateway_config(by_file)[1:] == ("", "")
    with pytest.raises(ConfigError, match=r"claude-a.*--frontend-model-high"):
        run_gateway_config(ModelSettings(config=file, frontend_model_high="claude-a"))


@pytest.mark.parametrize(
    ("backend", "urls", "missing"),
    [
        ("vllm", [], ["--backend-model-high"]),
        ("openai", [], ["--backend-model-high"]),
        ("sglang", [], ["--base-url", "--backend-model-high"]),
        ("sglang", ["http://a/v1"], ["--backend-model-high"]),
    ],
)
def test_missing_model_settings_are_named_by_their_flags(backend: str, urls: list[str], missing: list[str]):
    with pytest.raises(ConfigError) as caught:
        run_gateway_config(ModelSettings(backend=backend, base_url=tuple(urls)))
    assert all(flag in str(caught.value) for flag in missing)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--run-method", "magic"), "python"),
        (("--agent", "shell", "--agent-command", "true", "--run-method", "python"), "--run-method"),
        (("--agent-command", "true"), "--agent shell"),
        (("--agent", "shell", "--agent-command", "true", "--tools", "Read"), "--tools"),
        (("--agent", "shell", "--agent-command", "true", "--system-prompt", "Mend."), "--system-prompt"),
        (("--tools", "Read Edit"), "--tools: expected names separated by commas"),
        (("--tools", "Read,Nosuch"), "--tools: Claude Code has no tool 'Nosuch'; give some of: Agent"),
        (("--tools", "Read,edit"), "did you mean 'Edit'?"),
        (("--agent", "pi", "--tools", "Read"), "--tools: pi has no tool 'Read', did you mean 'read'?"),
        (("--agent", "codex", "--system-prompt", " "), "--system-prompt: got an empty text"),
        (("--tools", ""), "--tools: got an empty text"),
        (("--cache-level", "some"), "instance"),
        (("--sandbox", "local", "--image", "x", "--clean"), "--image, --clean"),
        (("--namespace", "Not/Valid!"), "namespace"),
        (("--policy-arg", "p"), "KEY=VALUE"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: tuple[str, ...], expected: str, calc_tasks: Path):
    done = understudy("run", "--tasks", calc_tasks, *options)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_nul_in_a_system_prompt_is_refused(calc_tasks: Path, tmp_path: Path):
    (tmp_path / "run.toml").write_text('[run]\nsystem_prompt = "a\\u0000b"\n')
    done = understudy("run", "--tasks", calc_tasks, "--config", tmp_path / "run.toml", "--agent", "pi")
    assert done.returncode == 2 and "--system-prompt: got a text with a NUL character" in done.stderr


def test_the_run_summary_mentions_suspicious_patches_once(capsys: pytest.CaptureFixture[str]):
    figures = dict.fromkeys(("solved", "unsolved", "infrastructure_failures", "pending", "calls"), 1)
    tokens = {"prompt_tokens": 1, "completion_tokens": 1, "cost_usd": 0.0, "wall_s": 1.0}
    texts: dict[str, Any] = {
        "failures": {},
        "refused_tasks": {},
        "output_dir": "out",
        "run_id": "r",
        "rollouts": 3,
    }
    print_summary(RunSummary(agent="codex", **figures, **tokens, **texts, suspicious=2), as_json=False)
    assert capsys.readouterr().out.count("suspicious") == 1


def test_ids_of_instances_are_taken_once_each():
    assert TaskSettings(instance_ids=("a, b", "b,,c")).ids == ("a", "b", "c")
    assert TaskSettings().ids is None
    with pytest.raises(ConfigError, match="--instance-ids"):
        _ = TaskSettings(instance_ids=(" , ",)).ids


def test_an_agent_takes_no_unknown_run_method():
    with pytest.raises(ConfigError, match="cli, python"):
        ClaudeCode(run_method="magic")


@pytest.mark.parametrize("tools", [",", "Read,", " ", "Read;Edit", "Read,--model", "Bash(git:*)"])
def test_tools_of_an_agent_are_names(tools: str):
    with pytest.raises(ConfigError, match=r"expected names separated by commas, got .* as in Agent,"):
        ClaudeCode(tools=tools)


def test_a_limit_takes_a_random_sample_that_contains_those_of_smaller_limits() -> None:
    tasks = [Task(f"t{n}", "r", "do it", Directory("."), PytestChecks({}, ("a",)), "") for n in range(9)]
    loaded = LoadedTasks(tasks)

    def chosen(limit: int | None, seed: int = 0) -> list[str]:
        return [task.instance_id for task in tasks_to_run(loaded, RunSettings(limit=limit, seed=seed))]

    assert chosen(None) == [f"t{n}" for n in range(9)]
    assert len(chosen(4)) == 4 and chosen(4) == sorted(chosen(4)) == chosen(4)
    assert set(chosen(4)) < set(chosen(6))
    assert len({tuple(chosen(4, seed)) for seed in range(5)}) > 1
