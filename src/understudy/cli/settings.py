"""What several commands can be told: models, tasks, agents, sandboxes. The fields are options and keys of TOML."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.tasks.datasets.images import ImageChoice
from understudy.types import ImageTree, Task
from understudy.util.cpus import available_cpus
from understudy.util.settings import option

COMMAND_TABLES = ("run", "serve", "grade", "replay", "pairs", "loop", "sft", "dpo", "grpo")
"""The tables of a TOML file that belong to commands; those that are left are the gateway's."""

DOCKER, LOCAL = "docker", "local"
"""Kinds of sandboxes."""

DrainTimeout = Annotated[
    float,
    option("Seconds that the first Ctrl-C or SIGTERM gives the running rollouts to finish.", ge=0),
]
DRAIN_TIMEOUT_S = 300.0


class BackendSettings(Struct, frozen=True, kw_only=True):
    """Which models answer, and where their servers are."""

    backend: Annotated[
        str | None,
        option(
            "Who answers for Claude: embedded (scripted, or --weights), vllm, sglang, openai or anthropic "
            "[default: embedded].",
            argument=True,
        ),
    ] = None
    config: Annotated[
        Path | None,
        option("A TOML file with models, sampling, budget; see docs/gateway.md.", "--config", "-c"),
    ] = None
    base_url: Annotated[
        tuple[str, ...],
        option(
            "The server's address; repeat it for several of one model "
            "[default for vllm: http://localhost:8000/v1]."
        ),
    ] = ()
    backend_model_high: Annotated[str | None, option("The model's name at the server.")] = None
    backend_model_low: Annotated[str | None, option("The model for small tasks, if another.")] = None


class ModelSettings(BackendSettings, frozen=True, kw_only=True):
    """Which models answer in a run, by which names, and how they are sampled."""

    policy: Annotated[
        str | None,
        option(
            "What the embedded model does: oracle, terse (the same in few words), wrong, idle or flaky "
            "[default: oracle; none with --weights]."
        ),
    ] = None
    policy_arg: Annotated[
        tuple[str, ...], option("KEY=VALUE for the policy, as p=0.5 for flaky; repeatable.")
    ] = ()
    weights: Annotated[
        Path | None,
        option(
            "The embedded model is the one in this directory, as HuggingFace lays it out; tiny: the one that "
            "comes with us."
        ),
    ] = None
    weights_version: Annotated[
        str | None, option("What these weights are called in the store [default: a hash of their content].")
    ] = None
    temperature: (
        Annotated[float, option("The temperature of every call [default: what the agent asks].", ge=0)] | None
    ) = None
    answer_tokens: (
        Annotated[int, option("Tokens that an answer may have [default: what the agent asks].", ge=1)] | None
    ) = None
    frontend_model_high: Annotated[
        str | None,
        option(
            "The name by which Claude Code asks for the model [default: claude-sonnet-4-5-20250929; for "
            "embedded and --config the model's own]."
        ),
    ] = None
    frontend_model_low: Annotated[
        str | None, option("The same for small tasks [default: claude-haiku-4-5-20251001; or as above].")
    ] = None
    evaluation: Annotated[
        bool, option("Sample as [sampling.evaluation] of the configuration says.", "--evaluation")
    ] = False

    @property
    def policy_args(self) -> dict[str, str]:
        """The arguments of the policy by name. Raises ConfigError for one that is not KEY=VALUE."""
        arguments: dict[str, str] = {}
        for text in self.policy_arg:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise ConfigError(f"--policy-arg: expected KEY=VALUE, got {text!r}")
            arguments[key] = value
        return arguments


class TaskSettings(Struct, frozen=True, kw_only=True):
    """Which tasks a command works on, and which container images they run in."""

    tasks: Annotated[
        tuple[str, ...],
        option(
            "A file of task records or dataset rows, a dataset's name, a task folder, a directory of them, "
            "or smoke; repeatable.",
            "--tasks",
            "-t",
            "--dataset-path",
        ),
    ] = ()
    instance_ids: Annotated[tuple[str, ...], option("Only these instances, separated by commas; repeatable.")] = ()
    namespace: Annotated[
        str | None, option("Docker: where instance images are from, as swebench or starryzhang; or none.")
    ] = None
    instance_image_tag: Annotated[str | None, option("Docker: the tag of instance images [default: latest].")] = (
        None
    )

    @property
    def ids(self) -> tuple[str, ...] | None:
        """The ids of `instance_ids`, each once; None for all. Raises ConfigError when it is given without any."""
        if not self.instance_ids:
            return None
        ids = (id.strip() for text in self.instance_ids for id in text.split(","))
        unique = tuple(dict.fromkeys(id for id in ids if id))
        if not unique:
            raise ConfigError("--instance-ids: expected ids separated by commas, got none")
        return unique

    @property
    def images(self) -> ImageChoice:
        """Where instance images are taken from. Raises ConfigError for a name that no image can have."""
        return ImageChoice(self.namespace, self.instance_image_tag)


class AgentRunSettings(Struct, frozen=True, kw_only=True):
    """How agents work, in a run and in every run of a loop."""

    agent: Annotated[str, option("claude-code, or shell.")] = "claude-code"
    agent_command: Annotated[
        str | None, option("The shell agent's command; it reads the instruction from stdin.")
    ] = None
    run_method: Annotated[
        Literal["cli", "python"] | None,
        option(
            "How Claude Code is driven: its command line, or the package claude-agent-sdk, both inside the "
            "sandbox [default: cli]."
        ),
    ] = None
    open_file_limit: (
        Annotated[int, option("Files that Claude Code may have open [default: the sandbox's].", ge=64)] | None
    ) = None
    tools: Annotated[
        str | None,
        option("The only built-in tools that Claude Code has, as Read,Edit [default: its own choice]."),
    ] = None
    system_prompt: Annotated[
        str | None, option("A system prompt in the place of Claude Code's own, for models that read little.")
    ] = None
    max_turns: Annotated[int, option("Turns an agent may take.", ge=1)] = 30
    timeout: Annotated[float, option("Seconds an agent may take.", ge=1)] = 1800.0

    @property
    def agent_options(self) -> dict[str, str]:
        """The options of the agent that were given. Raises ConfigError for those that are another agent's."""
        options: dict[str, str] = {}
        for name, owner in _AGENT_OPTIONS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if self.agent in ("shell", "claude-code") and self.agent != owner:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag}: unsupported by --agent {self.agent}; it is for --agent {owner}")
            if name != "run_method" or value != "cli":  # given or not, "cli" is the same run
                options[name.removeprefix("agent_")] = str(value)
        return options


_AGENT_OPTIONS = {
    "agent_command": "shell",
    "run_method": "claude-code",
    "open_file_limit": "claude-code",
    "tools": "claude-code",
    "system_prompt": "claude-code",
}
"""The options of `AgentSettings` that are passed to the agent, with the agent that has them."""


class SandboxSettings(Struct, frozen=True, kw_only=True):
    """In which sandboxes agents work."""

    sandbox: Annotated[
        str | None,
        option(
            "docker; local; or unsafe-local: no isolation at all, for tasks and models you trust "
            "[default: docker where a task needs its container image, else local]."
        ),
    ] = None
    image: Annotated[str | None, option("Docker: the image for tasks that name none.")] = None
    cache_level: Annotated[
        Literal["none", "base", "env", "instance"] | None,
        option("Docker: which images stay when the run ends [default: instance]."),
    ] = None
    clean: Annotated[
        bool, option("Docker: also remove images above the cache level that were there before.", "--clean")
    ] = False
    force_rebuild: Annotated[bool, option("Docker: fetch and prepare images anew.", "--force-rebuild")] = False

    @property
    def image_options(self) -> dict[str, Any]:
        """The options of sandboxes that run container images, as far as they were given."""
        options = {name: getattr(self, name) for name in ("image", "cache_level", "clean", "force_rebuild")}
        return {name: value for name, value in options.items() if value}


def default_concurrency() -> int:
    """How many agents work at a time: one a CPU, and one that waits for its model."""
    return available_cpus() + 1


def sandbox_for(tasks: Iterable[Task]) -> str:
    """The kind of sandbox where nobody names one: containers where one of the tasks needs its image."""
    return DOCKER if any(isinstance(task.source, ImageTree) for task in tasks) else LOCAL
