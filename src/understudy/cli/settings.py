"""Settings that several commands share: models, tasks, agents, sandboxes. The fields are options and TOML keys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from understudy.cli.agent_files import option_text
from understudy.errors import ConfigError
from understudy.tasks.recipes import ImageChoice
from understudy.types import ImageTree, Task
from understudy.util.processes import available_cpus
from understudy.util.settings import option, read_toml

if TYPE_CHECKING:
    from understudy.gateway.config import GatewayConfig, ModelRole
    from understudy.preference.checks import Thinking
    from understudy.trajectory.roles import Role


BACKENDS = ("embedded", "vllm", "sglang", "openai", "anthropic")
FRONTEND_HIGH, FRONTEND_LOW = "claude-sonnet-4-5-20250929", "claude-haiku-4-5-20251001"
"""The model names that Claude Code requests unless it is told others."""
VLLM_URL = "http://localhost:8000/v1"

_NEEDS_MODEL = ("vllm", "sglang", "openai")
_NEEDS_URL = ("sglang",)


def gateway_config(settings: BackendSettings, *, backend: str | None) -> GatewayConfig:
    """Return the gateway's configuration: from the file if it defines models, else from the `backend` and its
    options.

    Raises ConfigError if the options contradict each other.
    """
    from understudy.gateway.config import config_from_flags, parse_config

    urls, high, low = settings.base_url, settings.backend_model_high, settings.backend_model_low
    if settings.config is not None:
        file = read_toml(settings.config)
        gateway_values = {name: value for name, value in file.items() if name not in COMMAND_TABLES}
        if gateway_values or not file:
            if _model_options(settings):
                raise ConfigError(
                    f"--config {settings.config}: configures the models, as a file does that is empty or has "
                    f"tables of a gateway, and so do options: {', '.join(_model_options(settings))}; give either "
                    "the file, or the backend with its options"
                )
            return parse_config(gateway_values, settings.config)
    if backend is None:
        raise ConfigError(
            f"missing backend, the kind of the model's server; give one of {', '.join(BACKENDS)}, or --config FILE"
        )
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend {backend[:100]!r}; give one of {', '.join(BACKENDS)}")
    if backend == "embedded" and not urls:
        if high or low:
            raise ConfigError(
                "the embedded backend serves one model, without names; leave out --backend-model-high and "
                "--backend-model-low"
            )
        return config_from_flags(backend, [], None, None)
    if backend == "vllm" and not urls:
        urls = (VLLM_URL,)
    missing = {
        "--base-url, the address of its server": backend in _NEEDS_URL and not urls,
        "--backend-model-high, the name of the model to ask it for": backend in _NEEDS_MODEL and not high,
    }
    if any(missing.values()):
        flags = "; ".join(flag for flag, absent in missing.items() if absent)
        raise ConfigError(f"the {backend} backend needs {flags}; add what is missing")
    return config_from_flags(backend, urls, high, low)


def _model_options(settings: BackendSettings) -> list[str]:
    """Return the given options that configure the models. On the command line the backend is an argument."""
    options = {
        f"the backend {settings.backend}": settings.backend,
        "--base-url": settings.base_url,
        "--backend-model-high": settings.backend_model_high,
        "--backend-model-low": settings.backend_model_low,
    }
    return [option for option, value in options.items() if value]


def run_gateway_config(settings: ModelSettings) -> tuple[GatewayConfig, str, str]:
    """Return the gateway's configuration for a run, and the model names that its agent requests ("": the model's
    own).

    Weights that the run serves itself use exact tokens, unless a configuration file says otherwise. Names of
    Claude's models are the default if another model answers; Anthropic is asked for the model that the agent
    requests. Raises ConfigError.
    """
    from understudy.gateway.config import config_for_weights

    high, low = settings.frontend_model_high or "", settings.frontend_model_low or ""
    file_has_models = _names_models(settings.config)
    backend = settings.backend or (None if file_has_models else "embedded")
    if backend == "anthropic" and not file_has_models:
        settings = replace(
            settings,
            backend_model_high=settings.backend_model_high or high or FRONTEND_HIGH,
            backend_model_low=settings.backend_model_low or low or FRONTEND_LOW,
        )
    config = gateway_config(settings, backend=backend)
    if settings.weights is not None and not file_has_models and backend == "embedded" and not settings.base_url:
        config = config_for_weights(str(settings.weights.absolute()))
    uses_own_names = config.models.high.model is not None if file_has_models else backend == "embedded"
    if not uses_own_names:
        high, low = high or FRONTEND_HIGH, low or FRONTEND_LOW
    return _with_sampling(_with_model_names(config, high, low), settings), high, low


def _names_models(config: Path | None) -> bool:
    """Return whether a configuration file defines models, rather than only tables for commands."""
    return config is not None and not set(read_toml(config) or ("",)).issubset(COMMAND_TABLES)


def embedded_server(config: GatewayConfig, settings: ModelSettings) -> tuple[str | None, str | None, str | None]:
    """Return (policy, weights directory, weights version) of the server that a run starts.

    Either the policy is set or the other two; all three are None if the run starts no server.

    Raises ConfigError for options that need such a server if there is none, or for a directory without weights.
    """
    from understudy.model.directory import fingerprint

    policy, weights, version = settings.policy, settings.weights, settings.weights_version
    high = config.models.high
    starts_server = high.backend == "embedded" and not high.urls
    if weights is None:
        if version is not None:
            raise ConfigError("--weights-version needs --weights; add it, or leave --weights-version out")
        return (policy or "oracle" if starts_server else None), None, None
    if not starts_server:
        raise ConfigError(
            "--weights only applies to the embedded backend without --base-url, because the run starts that "
            "server itself; leave it out"
        )
    if policy is not None:
        raise ConfigError("--policy and --weights exclude each other; give only one of them")
    return None, str(weights.absolute()), version or fingerprint(weights)


def _with_sampling(config: GatewayConfig, settings: ModelSettings) -> GatewayConfig:
    """Return the configuration with the settings' sampling parameters overriding those of agents, if any are
    given.
    """
    parameters = {"temperature": settings.temperature, "max_tokens": settings.answer_tokens}
    overrides = {name: value for name, value in parameters.items() if value is not None}
    sampling = config.sampling
    return replace(
        config,
        sampling=replace(
            sampling,
            training=replace(sampling.training, **overrides),
            evaluation=replace(sampling.evaluation, **overrides),
        ),
    )


def _with_model_names(config: GatewayConfig, high: str, low: str) -> GatewayConfig:
    """Return the configuration with these names for the high and the low model."""
    names: dict[str, ModelRole] = {}
    routes: tuple[tuple[str, ModelRole], ...] = ((high, "high"), (low, "low"))
    for name, role in routes:
        if not name:
            continue
        if {**config.names, **names}.get(name, role) != role:
            raise ConfigError(
                f"the name {name!r} is used for both models; give different names with --frontend-model-high and "
                "--frontend-model-low, or correct [names] in the configuration"
            )
        names[name] = role
    return replace(config, names=config.names | names)


COMMAND_TABLES = ("run", "serve", "grade", "replay", "pairs", "loop", "sft", "dpo", "grpo", "distill")
"""The tables of a TOML file that belong to commands. All other tables belong to the gateway."""

DOCKER, LOCAL = "docker", "local"
"""Kinds of sandboxes."""

DrainTimeout = Annotated[
    float, option("Seconds that running rollouts may take to finish after the first Ctrl-C or SIGTERM.", ge=0)
]
DRAIN_TIMEOUT_S = 300.0


class BackendSettings(Struct, frozen=True, kw_only=True):
    """Which models answer, and where their servers are."""

    backend: Annotated[
        str | None,
        option(
            "The model server: embedded (scripted, or --weights), vllm, sglang, openai or anthropic. `gateway "
            "serve` has no default, it needs this or --config, and takes embedded only with --base-url [default: "
            "embedded].",
            argument=True,
        ),
    ] = None
    config: Annotated[
        Path | None, option("A TOML file with models, sampling and budget; see docs/gateway.md.", "--config", "-c")
    ] = None
    base_url: Annotated[
        tuple[str, ...],
        option(
            "The server's address; repeatable, for several servers of one model [default for vllm: "
            "http://localhost:8000/v1]."
        ),
    ] = ()
    backend_model_high: Annotated[str | None, option("The model's name at the server.")] = None
    backend_model_low: Annotated[str | None, option("The model for small tasks, if it is a different one.")] = None


class ModelSettings(BackendSettings, frozen=True, kw_only=True):
    """Which models answer in a run, under which names, and how they are sampled."""

    policy: Annotated[
        str | None,
        option(
            "The scripted behaviour of the embedded model: oracle, terse (the same in few words), wrong, idle or "
            "flaky [default: oracle; none with --weights]."
        ),
    ] = None
    policy_arg: Annotated[
        tuple[str, ...], option("An argument of the policy as KEY=VALUE, such as p=0.5 for flaky; repeatable.")
    ] = ()
    weights: Annotated[
        Path | None,
        option(
            "The embedded model's weights: a directory in Hugging Face's layout, a GGUF file, the name of a "
            "fetched model, or tiny for the model shipped with Understudy."
        ),
    ] = None
    weights_version: Annotated[
        str | None, option("The version name of these weights in the store [default: a hash of their content].")
    ] = None
    temperature: (
        Annotated[float, option("The temperature of every call [default: what the agent requests].", ge=0)] | None
    ) = None
    answer_tokens: (
        Annotated[int, option("Maximum number of tokens in an answer [default: what the agent requests].", ge=1)]
        | None
    ) = None
    frontend_model_high: Annotated[
        str | None,
        option(
            "The name under which Claude Code requests the model [default: claude-sonnet-4-5-20250929; for "
            "embedded and --config the model's own]."
        ),
    ] = None
    frontend_model_low: Annotated[
        str | None,
        option("The same for the model for small tasks [default: claude-haiku-4-5-20251001; or as above]."),
    ] = None
    evaluation: Annotated[
        bool, option("Sample with the parameters in [sampling.evaluation] of the configuration.", "--evaluation")
    ] = False

    @property
    def policy_args(self) -> dict[str, str]:
        """Return the arguments of the policy by name. Raises ConfigError if one is not KEY=VALUE."""
        arguments: dict[str, str] = {}
        for text in self.policy_arg:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise ConfigError(f"--policy-arg: invalid value {text[:200]!r}; give KEY=VALUE, such as p=0.5")
            arguments[key] = value
        return arguments


class TaskSettings(Struct, frozen=True, kw_only=True):
    """The tasks of a command, and the container images that they run in."""

    tasks: Annotated[
        tuple[str, ...],
        option(
            "A file of task records or dataset rows, a dataset's name, a task folder, a directory of task "
            "folders, or smoke; repeatable.",
            "--tasks",
            "-t",
            "--dataset-path",
        ),
    ] = ()
    instance_ids: Annotated[tuple[str, ...], option("Only these instances, separated by commas; repeatable.")] = ()
    namespace: Annotated[
        str | None,
        option("Docker: the registry namespace of instance images, such as swebench or starryzhang; or none."),
    ] = None
    instance_image_tag: Annotated[str | None, option("Docker: the tag of instance images [default: latest].")] = (
        None
    )

    @property
    def ids(self) -> tuple[str, ...] | None:
        """Return the distinct ids in `instance_ids`; None for all. Raises ConfigError if it contains no id."""
        if not self.instance_ids:
            return None
        ids = (id.strip() for text in self.instance_ids for id in text.split(","))
        unique = tuple(dict.fromkeys(id for id in ids if id))
        if not unique:
            raise ConfigError(
                "--instance-ids: expected ids separated by commas, got none; give ids, or leave the option out"
            )
        return unique

    @property
    def images(self) -> ImageChoice:
        """Return where instance images come from. Raises ConfigError for an invalid image name."""
        return ImageChoice(self.namespace, self.instance_image_tag)


class AgentRunSettings(Struct, frozen=True, kw_only=True):
    """How agents work, in a run and in every run of a loop."""

    agents: Annotated[
        tuple[str, ...],
        option(
            "The agent: claude-code, codex, gemini, mini-swe-agent, opencode, openhands, pi, qwen-code, shell, or "
            "acp:COMMAND for any that speaks the Agent Client Protocol; repeatable: each agent gets every task.",
            "--agent",
        ),
    ] = ("claude-code",)
    agent_command: Annotated[
        str | None, option("The shell agent's command, which reads the instruction from stdin.")
    ] = None
    run_method: Annotated[
        Literal["cli", "python"] | None,
        option(
            "How Claude Code is started: by its command line, or by the package claude-agent-sdk, both inside "
            "the sandbox [default: cli]."
        ),
    ] = None
    open_file_limit: (
        Annotated[
            int, option("Maximum number of files that Claude Code may have open [default: the sandbox's].", ge=64)
        ]
        | None
    ) = None
    tools: Annotated[
        str | None,
        option(
            "The only built-in tools that the agent gets, such as Read,Edit [default: the agent's own choice]."
        ),
    ] = None
    system_prompt: Annotated[
        str | None, option("A system prompt that replaces the agent's own, for small models.")
    ] = None
    mcp_config: Annotated[
        Path | None,
        option(
            "A JSON file with MCP servers for Claude Code to start in the sandbox; it is stored with the run, so "
            "it must not contain keys."
        ),
    ] = None
    settings: Annotated[
        Path | None,
        option(
            "A JSON file with settings that override Claude Code's; it is stored with the run, so it must not "
            "contain keys."
        ),
    ] = None
    skills: Annotated[
        Path | None,
        option(
            "A directory with skills for Claude Code, each DIRECTORY/NAME/SKILL.md; they are stored with the run, "
            "so they must not contain keys."
        ),
    ] = None
    max_turns: Annotated[int, option("Maximum number of turns of an agent.", ge=1)] = 30
    timeout: Annotated[float, option("Time limit of an agent in seconds.", ge=1)] = 1800.0

    @property
    def only_agent(self) -> str:
        """Return the agent of a command that works with one agent.

        Raises ConfigError if there are several, or none.
        """
        if len(self.agents) != 1:
            raise ConfigError(
                f"--agent: expected one agent, got {', '.join(self.agents) or 'none'}; give one, "
                "because this command works with a single agent"
            )
        return self.agents[0]

    def options_of(self, agent: str) -> dict[str, str]:
        """Return the given options of an agent. Raises ConfigError for options of other agents."""
        options: dict[str, str] = {}
        for name, owners in _AGENT_OPTIONS.items():
            value = getattr(self, name)
            if value is None:
                continue
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, str) and (not value.strip() or "\0" in value):
                problem = "a text with a NUL character" if value.strip() else "an empty text"
                raise ConfigError(
                    f"{flag}: got {problem}, expected one that is not empty and has no NUL; correct it, or leave "
                    "the option out for the agent's own value"
                )
            if agent in _OWN_AGENTS and agent not in owners:
                raise ConfigError(
                    f"{flag}: unsupported by --agent {agent}, expected --agent {' or '.join(owners)}; leave it out"
                )
            # "cli" is the default: given or not, the configuration of the run is the same
            if name != "run_method" or value != "cli":
                options[name.removeprefix("agent_")] = option_text(name, value)
        return options


_AGENT_OPTIONS = {
    "agent_command": ("shell",),
    "run_method": ("claude-code",),
    "open_file_limit": ("claude-code",),
    "mcp_config": ("claude-code",),
    "settings": ("claude-code",),
    "skills": ("claude-code",),
    "tools": ("claude-code", "gemini", "opencode", "openhands", "pi", "qwen-code"),
    "system_prompt": (
        "claude-code", "codex", "gemini", "mini-swe-agent", "opencode", "openhands", "pi", "qwen-code",
    ),
}  # fmt: skip
"""The fields of `AgentRunSettings` that are passed to the constructors of agents, with the agents that take them.

A field that is missing here is shown in `--help` but reaches no agent.
"""

_OWN_AGENTS = frozenset(agent for owners in _AGENT_OPTIONS.values() for agent in owners)
"""The agents whose options are listed above. The constructors of all others declare their own options."""


class SandboxSettings(Struct, frozen=True, kw_only=True):
    """The sandboxes that agents work in."""

    sandbox: Annotated[
        str | None,
        option(
            "The kind of sandbox: docker; local; ssh:MACHINE, kubernetes:NAMESPACE or harbor:PROVIDER, local "
            "ones on other machines; or unsafe-local: no isolation, for tasks and models you trust [default: "
            "docker if a task needs its container image, else local]."
        ),
    ] = None
    image: Annotated[str | None, option("Docker: the image for tasks that name none.")] = None
    cache_level: Annotated[
        Literal["none", "base", "env", "instance"] | None,
        option("Docker: which images to keep when the run ends [default: instance]."),
    ] = None
    clean: Annotated[
        bool, option("Docker: also remove images above the cache level that existed before the run.", "--clean")
    ] = False
    force_rebuild: Annotated[bool, option("Docker: fetch and prepare all images again.", "--force-rebuild")] = (
        False
    )

    @property
    def image_options(self) -> dict[str, Any]:
        """Return the given options of sandboxes that run container images."""
        options = {name: getattr(self, name) for name in ("image", "cache_level", "clean", "force_rebuild")}
        return {name: value for name, value in options.items() if value}


def unknown_task(id: str, tasks: TaskSettings) -> str:
    """Return what is wrong with one of the --instance-ids that no task has."""
    return (
        f"--instance-ids: there is no task {id[:200]!r} in {', '.join(tasks.tasks)}, expected the instance_id of "
        "a row, or the name of a task's folder"
    )


def roles_of(names: str | None, usual: tuple[Role, ...]) -> tuple[Role, ...]:
    """Return the roles of calls that an option names, in canonical order.

    Raises ConfigError for an unknown one.
    """
    from understudy.trajectory.roles import ROLES

    if names is None:
        return usual
    chosen = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := chosen.difference(ROLES):
        raise ConfigError(f"--roles: unknown role {min(unknown)!r}; give some of: {', '.join(ROLES)}")
    return tuple(role for role in ROLES if role in chosen)


def thinking_of(word: str | None) -> Thinking | None:
    """Return the value of --thinking, or None if it is not given. Raises ConfigError for an unknown value."""
    from understudy.preference.checks import Thinking

    for choice in get_args(Thinking):
        if word == choice:
            return choice
    if word is None:
        return None
    raise ConfigError(f"--thinking: unknown value {word!r}; give one of {', '.join(get_args(Thinking))}")


def default_concurrency() -> int:
    """Return how many agents run at a time by default: one per CPU, plus one that waits for its model."""
    return available_cpus() + 1


def sandbox_for(tasks: Iterable[Task]) -> str:
    """Return the default kind of sandbox: containers if one of the tasks needs its image."""
    return DOCKER if any(isinstance(task.source, ImageTree) for task in tasks) else LOCAL
