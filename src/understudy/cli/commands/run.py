"""`understudy run`: tasks in, scored rollouts out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.backends import embedded, run_config, sampled
from understudy.cli.selection import instances
from understudy.errors import ConfigError


class CacheLevel(StrEnum):
    """Which container images stay when a run ends."""

    none = "none"
    base = "base"
    env = "env"
    instance = "instance"


class RunMethod(StrEnum):
    """How Claude Code is driven."""

    cli = "cli"
    python = "python"


def run(
    backend: Annotated[
        str | None,
        typer.Argument(
            help="Who answers for Claude: embedded (scripted, or --weights), vllm, sglang, openai or anthropic "
            "[default: embedded]."
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            "-t",
            "--dataset-path",
            help="A file of task records or dataset rows, a dataset's name, a task folder, a directory of them, "
            "or smoke; repeatable.",
        ),
    ] = None,
    instance_ids: Annotated[
        list[str] | None, typer.Option(help="Only these instances, separated by commas; repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="What the embedded model does: oracle, terse (the same in few words), wrong, idle or flaky "
            "[default: oracle; none with --weights]."
        ),
    ] = None,
    policy_arg: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the policy, as p=0.5 for flaky; repeatable.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="The embedded model is the one in this directory, as HuggingFace lays it out; tiny: the one that "
            "comes with us."
        ),
    ] = None,
    weights_version: Annotated[
        str | None,
        typer.Option(help="What these weights are called in the store [default: a hash of their content]."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="The temperature of every call [default: what the agent asks].")
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that an answer may have [default: what the agent asks].")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="A TOML file with models, sampling, budget; see docs/gateway.md."),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="The server's address; repeat it for several of one model "
            "[default for vllm: http://localhost:8000/v1]."
        ),
    ] = None,
    backend_model_high: Annotated[str | None, typer.Option(help="The model's name at the server.")] = None,
    backend_model_low: Annotated[str | None, typer.Option(help="The model for small tasks, if another.")] = None,
    frontend_model_high: Annotated[
        str | None,
        typer.Option(
            help="The name by which Claude Code asks for the model [default: claude-sonnet-4-5-20250929; for "
            "embedded and --config the model's own]."
        ),
    ] = None,
    frontend_model_low: Annotated[
        str | None,
        typer.Option(help="The same for small tasks [default: claude-haiku-4-5-20251001; or as above]."),
    ] = None,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Sample as [sampling.evaluation] of the configuration says.")
    ] = False,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Rollouts a task.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-j", min=1, help="Agents at a time [default: CPUs + 1].")
    ] = None,
    cooldown_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that an agent's place stays empty before the next one.")
    ] = 0.0,
    max_turns: Annotated[int, typer.Option(min=1, help="Turns an agent may take.")] = 30,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds an agent may take.")] = 1800.0,
    seed: Annotated[int, typer.Option(help="Seed of everything random in the run.")] = 0,
    agent: Annotated[str, typer.Option(help="claude-code, or shell.")] = "claude-code",
    agent_command: Annotated[
        str | None,
        typer.Option(help="The shell agent's command; it reads the instruction from stdin."),
    ] = None,
    run_method: Annotated[
        RunMethod | None,
        typer.Option(
            help="How Claude Code is driven: its command line, or the package claude-agent-sdk, both inside the "
            "sandbox [default: cli]."
        ),
    ] = None,
    open_file_limit: Annotated[
        int | None, typer.Option(min=64, help="Files that Claude Code may have open [default: the sandbox's].")
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(help="The only built-in tools that Claude Code has, as Read,Edit [default: its own choice]."),
    ] = None,
    system_prompt: Annotated[
        str | None,
        typer.Option(help="A system prompt in the place of Claude Code's own, for models that read little."),
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(
            help="docker; local; or unsafe-local: no isolation at all, for tasks and models you trust "
            "[default: docker where a task needs its container image, else local]."
        ),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Docker: the image for tasks that name none.")] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Docker: where instance images are from, as swebench or starryzhang; or none."),
    ] = None,
    instance_image_tag: Annotated[
        str | None, typer.Option(help="Docker: the tag of instance images [default: latest].")
    ] = None,
    cache_level: Annotated[
        CacheLevel | None, typer.Option(help="Docker: which images stay when the run ends [default: instance].")
    ] = None,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Docker: also remove images above the cache level that were there before."),
    ] = False,
    force_rebuild: Annotated[
        bool, typer.Option("--force-rebuild", help="Docker: fetch and prepare images anew.")
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Store and outputs [default: runs/BACKEND-POLICY-ID]."),
    ] = None,
    rewrite_reports: Annotated[
        bool, typer.Option("--rewrite-reports", help="Write the files of rollouts that ended before anew.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Keep debug.log in the output directory, and Claude Code's own in logs/."),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Run an agent on tasks, keep every call, grade every patch.

    The same command again continues the run where it ended: rollouts that ended are not repeated, those that
    failed for reasons of infrastructure are tried again. Ctrl-C lets the running rollouts finish; a second one
    stops at once.
    """
    if not tasks:
        raise ConfigError(
            "say which tasks to run with --tasks or --dataset-path; to make some: "
            "understudy tasks make toolz --count 5 --output tasks.jsonl"
        )
    from understudy.cli.commands.run_execution import Order, carry_out
    from understudy.cli.display.live import drawn
    from understudy.cli.display.run_progress import Display
    from understudy.cli.display.run_summary import print_summary
    from understudy.cli.exit_codes import EXIT_INTERRUPTED
    from understudy.model.directory import directory_of
    from understudy.run.config import RunConfig
    from understudy.tasks.datasets.images import ImageChoice

    who = backend or (None if config else "embedded")
    weights = None if weights is None else directory_of(weights)
    settings, frontend_high, frontend_low = run_config(
        who,
        config,
        base_url or [],
        backend_model_high,
        backend_model_low,
        frontend_model_high,
        frontend_model_low,
        weights,
    )
    settings = sampled(settings, temperature, answer_tokens)
    policy, directory, version = embedded(settings, policy, weights, weights_version)
    order = Order(
        config=RunConfig(
            gateway=settings,
            purpose="evaluation" if evaluation else "training",
            policy=policy,
            policy_args=_pairs(policy_arg or []),
            weights=directory,
            weights_version=version,
            frontend_high=frontend_high,
            frontend_low=frontend_low,
            agent=agent,
            agent_options=_agent_options(
                agent,
                command=agent_command or None,
                run_method=run_method,
                open_file_limit=open_file_limit,
                tools=tools,
                system_prompt=system_prompt,
            ),
            samples=samples,
            seed=seed,
            max_turns=max_turns,
            timeout_s=timeout,
        ),
        specs=tuple(tasks),
        instance_ids=instances(instance_ids),
        limit=limit,
        images=ImageChoice(namespace, instance_image_tag),
        sandbox=sandbox,
        image_options=_image_options(image, cache_level, clean=clean, force_rebuild=force_rebuild),
        output_dir=output_dir,
        concurrency=concurrency or (os.cpu_count() or 1) + 1,
        cooldown_s=cooldown_seconds,
        rewrite=rewrite_reports,
        debug=debug,
    )
    with drawn(Display(), sys.stderr) as monitor:
        summary = carry_out(order, monitor)
    print_summary(summary, json_)
    if summary.pending:
        raise typer.Exit(EXIT_INTERRUPTED)
    if summary.infrastructure_failures or summary.refused_tasks:
        raise typer.Exit(1)


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--policy-arg {text!r} is not of the form KEY=VALUE")
        pairs[key] = value
    return pairs


_OWNERS = {"command": "shell"}
"""Whose an option of an agent is, where it is not Claude Code's."""


def _agent_options(agent: str, **given: str | int | None) -> dict[str, str]:
    """The options of the agent that were given. Raises ConfigError for those that are another agent's."""
    for name, value in given.items():
        owner = _OWNERS.get(name, "claude-code")
        if value is not None and agent in ("shell", "claude-code") and agent != owner:
            flag = "--agent-command" if name == "command" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: the agent {agent} has no such option; it is for --agent {owner}")
    options = {name: str(value) for name, value in given.items() if value is not None}
    # Said or not, it is the same run.
    return {name: value for name, value in options.items() if value != RunMethod.cli}


def _image_options(
    image: str | None, cache_level: CacheLevel | None, *, clean: bool, force_rebuild: bool
) -> dict[str, str | bool]:
    """The options of sandboxes that run container images, as far as they were given."""
    given: dict[str, str | bool | None] = {
        "image": image,
        "cache_level": None if cache_level is None else cache_level.value,
        "clean": clean,
        "force_rebuild": force_rebuild,
    }
    return {name: value for name, value in given.items() if value}
