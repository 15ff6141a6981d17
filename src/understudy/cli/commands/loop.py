"""`understudy train loop`: collect, grade, update, publish, and again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from understudy.cli.options import command, filled
from understudy.errors import ConfigError
from understudy.model.directory import TINY, directory_of
from understudy.train.options import GRPOOptions

SERVERS = ("embedded", "vllm", "sglang")
DEVICES = ("cpu", "cuda")


def _loop(
    *,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=f"A model's directory, or {TINY}: the one that comes with us."),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", "-t", help="What is learned from, as understudy run takes it; repeatable."),
    ] = None,
    eval_tasks: Annotated[
        list[str] | None,
        typer.Option("--eval-tasks", "-e", help="Held-out tasks, never learned from; repeatable."),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Waves of rollouts, each with an update of the policy where something can be learned."
        ),
    ] = 10,
    groups: Annotated[int, typer.Option(min=1, help="Tasks that a step learns from.")] = 8,
    samples: Annotated[int, typer.Option("--samples", "-n", min=2, help="Rollouts a task.")] = 8,
    eval_every: Annotated[
        int, typer.Option(min=0, help="Evaluate after every so many steps; 0: at the beginning and the end.")
    ] = 0,
    eval_samples: Annotated[int, typer.Option(min=1, help="Rollouts a held-out task.")] = 1,
    asynchronous: Annotated[
        bool, typer.Option("--async", help="Collect the next groups while the policy is updated.")
    ] = False,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Async: groups older than this many versions are dropped.")
    ] = 2,
    quorum: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Async: the share of a step's groups that an update waits for."),
    ] = 0.75,
    min_groups: Annotated[
        int,
        typer.Option(
            min=0, help="Update only with so many groups whose rewards differ, but for the last step; 0: with any."
        ),
    ] = 0,
    keep: Annotated[int, typer.Option(min=1, help="Steps whose weights are kept: the best and the last.")] = 3,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="The loop's directory [default: runs/loop-ID].")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-j", min=1, help="Agents at a time [default: CPUs + 1].")
    ] = None,
    eval_temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Temperature of evaluations [default: as --temperature].")
    ] = None,
    answer_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that an answer may have.")] = None,
    max_turns: Annotated[int, typer.Option(min=1, help="Turns an agent may take.")] = 30,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds an agent may take.")] = 1800.0,
    agent: Annotated[str, typer.Option(help="claude-code, or shell.")] = "claude-code",
    agent_command: Annotated[str | None, typer.Option(help="The shell agent's command.")] = None,
    tools: Annotated[
        str | None, typer.Option(help="The only built-in tools that Claude Code has, as Read,Edit.")
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="A system prompt in the place of Claude Code's own.")
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="docker, local or unsafe-local [default: as understudy run].")
    ] = None,
    backend: Annotated[str, typer.Option(help="What serves the model: embedded, vllm or sglang.")] = "embedded",
    base_url: Annotated[
        list[str] | None, typer.Option(help="The address of a server that runs; repeatable.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="The model's name at that server [default: its directory].")
    ] = None,
    tool_format: Annotated[str, typer.Option(help="The syntax of the model's tool calls.")] = "hermes",
    publish: Annotated[
        str, typer.Option(help="How weights get to a server: disk, lora; vllm also: sleep, transfer.")
    ] = "disk",
    seen_as: Annotated[
        str | None, typer.Option(help="The loop's directory, as the server sees it [default: the same].")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="The environment variable with the server's key.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Where the embedded server computes; the trainer takes a GPU.")
    ] = "cpu",
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.toml", help="The trainer's options from a table [grpo]."),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of the trainer; 0: as many as it takes.")] = 0,
    track: Annotated[
        str, typer.Option("--track", metavar="auto|none|NAME,…", help="Also tell tensorboard, wandb, mlflow.")
    ] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    options: dict[str, Any],
) -> None:
    """Improve a model by its own work: collect with it, grade, update it, publish the weights, collect again.

    The same command again continues the loop where it ended, even after kill -9. Ctrl-C lets the running rollouts
    finish; a second one stops at once.
    """
    if not tasks:
        raise ConfigError(
            "say what to learn from with --tasks; to make some: "
            "understudy tasks make functions --count 64 --output train.jsonl"
        )
    if agent == "shell" and agent_command is None:
        raise ConfigError("the shell agent needs a command: --agent-command 'COMMAND'")
    if backend not in SERVERS:
        raise ConfigError(f"--backend {backend}: what is trained is served by {', '.join(SERVERS)}")
    if backend != "embedded" and not base_url:
        raise ConfigError(f"--backend {backend} needs --base-url, the address of its server")
    if min_groups > groups:
        raise ConfigError(f"--min-groups {min_groups}: a step has only {groups} groups; give it more --groups")
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: the embedded server computes on {' or '.join(DEVICES)}")
    from understudy.train.requirements import need

    need()
    from understudy.cli.commands.loop_execution import LoopOrder, print_summary, run_trl_training
    from understudy.cli.display.live import drawn
    from understudy.cli.display.loop_progress import LoopDisplay
    from understudy.cli.exit_codes import EXIT_INTERRUPTED
    from understudy.run.collector import RolloutSettings
    from understudy.train.loop.runtime import LoopRuntime
    from understudy.train.metrics import chosen

    settings = filled(GRPOOptions, options, config, "grpo")
    if min_groups and not settings.dynamic_sampling:
        raise ConfigError("--min-groups is a part of dynamic sampling: leave it, or --no-dynamic-sampling, out")
    temperature = settings.temperature
    given: dict[str, str | None] = {"tools": tools, "system_prompt": system_prompt, "command": agent_command}
    order = LoopOrder(
        model=model_directory(model),
        tasks=tuple(tasks),
        eval_tasks=tuple(eval_tasks or ()),
        steps=steps,
        groups=groups,
        samples=samples,
        eval_every=eval_every,
        eval_samples=eval_samples,
        seed=settings.seed,
        asynchronous=asynchronous,
        max_staleness=max_staleness,
        quorum=quorum,
        min_groups=min_groups,
        keep=keep,
        backend=backend,
        served_model=served_model or "",
        tool_format=tool_format,
        manner=RolloutSettings(
            agent=agent,
            agent_options={name: value for name, value in given.items() if value is not None},
            max_turns=max_turns,
            timeout_s=timeout,
            temperature=temperature,
            evaluation_temperature=temperature if eval_temperature is None else eval_temperature,
            max_tokens=answer_tokens,
        ),
        options=settings,
        means=LoopRuntime(
            concurrency=concurrency or (os.cpu_count() or 1) + 1,
            urls=tuple(base_url or ()),
            way=publish,
            api_key_env=api_key_env,
            seen_as=seen_as,
            threads=threads,
            device=device,
            trackers=chosen(track),
        ),
        sandbox=sandbox,
        output_dir=output_dir,
    )
    with drawn(LoopDisplay(), sys.stderr) as shown:
        summary = run_trl_training(order, shown)
    print_summary(summary, json_)
    if summary.stopped:
        typer.echo("LoopStopped early; give the same command again to continue.", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def model_directory(name: str) -> Path:
    """The directory that a model's name means. Raises ConfigError when there is none."""
    path = directory_of(name)
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}; give that of a model in Hugging Face's form, or {TINY}")
    from understudy.train.weights import check_model

    check_model(path)
    return path


loop = command(_loop, GRPOOptions)
