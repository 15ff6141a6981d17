"""What several commands can be told: models, tasks, agents, sandboxes. The fields are options and keys of TOML."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

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
"""The names by which Claude Code asks for its models, unless it is told others."""
VLLM_URL = "http://localhost:8000/v1"

_NEEDS_MODEL = ("vllm", "sglang", "openai")
_NEEDS_URL = ("sglang",)


def gateway_config(settings: BackendSettings, *, backend: str | None) -> GatewayConfig:
    """The gateway's configuration: of the file, where that names models, else of the `backend` and its options.

    Raises ConfigError when the options contradict each other.
    """
    from understudy.gateway.config import config_from_flags, parse_config

    urls, high, low = settings.base_url, settings.backend_model_high, settings.backend_model_low
    if settings.config is not None:
        file = read_toml(settings.config)
        own = {name: value for name, value in file.items() if name not in COMMAND_TABLES}
        if own or not file:
            if settings.backend or urls or high or low:
                raise ConfigError(
                    f"{settings.config} already configures the "
                    f"models; give either --config, or a backend with its options"
                )
            return parse_config(own, settings.config)
    if backend is None:
        raise ConfigError(f"missing backend; expected one of {', '.join(BACKENDS)}, or --config FILE")
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "embedded" and not urls:
        if high or low:
            raise ConfigError(
                "the embedded backend takes no model names, since it has only one model; leave them out"
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
        raise ConfigError(f"the {backend} backend needs {flags}")
    return config_from_flags(backend, urls, high, low)


def run_gateway_config(settings: ModelSettings) -> tuple[GatewayConfig, str, str]:
    """The gateway's configuration of a run, and the names by which its agent asks for the models; "": their own.

    Weights that the run serves itself are asked in tokens, unless a configuration file says how.

    The names of Claude's models are the default where the models are another's, or have no names of their own:
    Anthropic is asked for what the agent asks. Raises ConfigError.
    """
    from understudy.gateway.config import config_for_weights

    high, low = settings.frontend_model_high or "", settings.frontend_model_low or ""
    by_file = _names_models(settings.config)
    backend = settings.backend or (None if by_file else "embedded")
    if backend == "anthropic" and not by_file:
        settings = replace(
            settings,
            backend_model_high=settings.backend_model_high or high or FRONTEND_HIGH,
            backend_model_low=settings.backend_model_low or low or FRONTEND_LOW,
        )
    config = gateway_config(settings, backend=backend)
    if settings.weights is not None and not by_file and backend == "embedded" and not settings.base_url:
        config = config_for_weights(str(settings.weights.absolute()))
    own_names = config.models.high.model is not None if by_file else backend == "embedded"
    if not own_names:
        high, low = high or FRONTEND_HIGH, low or FRONTEND_LOW
    return _sampled(_routed(config, high, low), settings), high, low


def _names_models(config: Path | None) -> bool:
    """Whether a configuration file says which models answer, and not only what a command is told."""
    return config is not None and not set(read_toml(config) or ("",)).issubset(COMMAND_TABLES)


def embedded_server(config: GatewayConfig, settings: ModelSettings) -> tuple[str | None, str | None, str | None]:
    """The policy, or the directory and the version of the weights, of the server that a run starts; None: none.

    Raises ConfigError where it starts none, or for a directory without weights.
    """
    from understudy.model.directory import fingerprint

    policy, weights, version = settings.policy, settings.weights, settings.weights_version
    high = config.models.high
    starts = high.backend == "embedded" and not high.urls
    if weights is None:
        if version is not None:
            raise ConfigError("--weights-version needs --weights")
        return (policy or "oracle" if starts else None), None, None
    if not starts:
        raise ConfigError(
            "--weights only applies to the embedded backend without --base-url, which the run starts itself"
        )
    if policy is not None:
        raise ConfigError("--policy and --weights exclude each other; give one of them")
    return None, str(weights.absolute()), version or fingerprint(weights)


def _sampled(config: GatewayConfig, settings: ModelSettings) -> GatewayConfig:
    """The configuration with the sampling of the settings laid over what agents ask, where they have any."""
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


def _routed(config: GatewayConfig, high: str, low: str) -> GatewayConfig:
    """The configuration with these names standing for the high and the low model."""
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
"""The tables of a TOML file that belong to commands; those that are left are the gateway's."""

DOCKER, LOCAL = "docker", "local"
"""Kinds of sandboxes."""

DrainTimeout = Annotated[
    float, option("Seconds that the first Ctrl-C or SIGTERM gives the running rollouts to finish.", ge=0)
]
DRAIN_TIMEOUT_S = 300.0


class BackendSettings(Struct, frozen=True, kw_only=True):
    """Which models answer, and where their servers are."""

    backend: Annotated[
        str | None,
        option(
            "The model server: embedded (scripted, or --weights), vllm, sglang, openai or anthropic; "
            "`gateway serve` needs one, or --config [default: embedded].",
            argument=True,
        ),
    ] = None
    config: Annotated[
        Path | None, option("A TOML file with models, sampling, budget; see docs/gateway.md.", "--config", "-c")
    ] = None
    base_url: Annotated[
        tuple[str, ...],
        option(
            "The server's address; repeat it for several of one model "
            "[default for vllm: http://localhost:8000/v1]."
        ),
    ] = ()
    backend_model_high: Annotated[str | None, option("The model's name at the server.")] = None
    backend_model_low: Annotated[str | None, option("The model for small tasks, where it is another one.")] = None


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
            "The embedded model is the one in this directory, as HuggingFace lays it out, of this GGUF file, or "
            "fetched by this name; tiny: the one that comes with us."
        ),
    ] = None
    weights_version: Annotated[
        str | None, option("What these weights are called in the store [default: a hash of their content].")
    ] = None
    temperature: (
        Annotated[float, option("The temperature of every call [default: what the agent asks].", ge=0)] | None
    ) = None
    answer_tokens: (
        Annotated[int, option("The most tokens of an answer [default: what the agent asks].", ge=1)] | None
    ) = None
    frontend_model_high: Annotated[
        str | None,
        option(
            "The name by which Claude Code asks for the model [default: claude-sonnet-4-5-20250929; for "
            "embedded and --config the model's own]."
        ),
    ] = None
    frontend_model_low: Annotated[
        str | None,
        option("The same for the model for small tasks [default: claude-haiku-4-5-20251001; or as above]."),
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

    agents: Annotated[
        tuple[str, ...],
        option(
            "claude-code, codex, gemini, mini-swe-agent, opencode, pi, qwen-code, shell, or acp:COMMAND for any "
            "that speaks the Agent Client Protocol; repeatable: each gets every task.",
            "--agent",
        ),
    ] = ("claude-code",)
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
        str | None, option("The only built-in tools that the agent has, as Read,Edit [default: its own choice].")
    ] = None
    system_prompt: Annotated[
        str | None, option("A system prompt in the place of the agent's own, for models that read little.")
    ] = None
    mcp_config: Annotated[
        Path | None,
        option(
            "A JSON file with the MCP servers that Claude Code starts in the sandbox; stored with the run, so it "
            "may hold no keys."
        ),
    ] = None
    settings: Annotated[
        Path | None,
        option("A JSON file of settings that are laid over Claude Code's; stored with the run, as above."),
    ] = None
    max_turns: Annotated[int, option("Turns an agent may take.", ge=1)] = 30
    timeout: Annotated[float, option("Seconds an agent may take.", ge=1)] = 1800.0

    @property
    def only_agent(self) -> str:
        """The agent, of commands that work with one. Raises ConfigError where there are several, or none."""
        if len(self.agents) != 1:
            raise ConfigError(f"--agent: expected one agent, got {', '.join(self.agents) or 'none'}")
        return self.agents[0]

    def options_of(self, agent: str) -> dict[str, str]:
        """The options of an agent that were given. Raises ConfigError for those that are other agents'."""
        options: dict[str, str] = {}
        for name, owners in _AGENT_OPTIONS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if agent in _OWN_AGENTS and agent not in owners:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag}: unsupported by --agent {agent}; it is for --agent {' or '.join(owners)}"
                )
            if name != "run_method" or value != "cli":  # given or not, "cli" is the same run
                options[name.removeprefix("agent_")] = (
                    _json_of(name, value) if isinstance(value, Path) else str(value)
                )
        return options


_AGENT_OPTIONS = {
    "agent_command": ("shell",),
    "run_method": ("claude-code",),
    "open_file_limit": ("claude-code",),
    "mcp_config": ("claude-code",),
    "settings": ("claude-code",),
    "tools": ("claude-code", "gemini", "opencode", "pi", "qwen-code"),
    "system_prompt": ("claude-code", "codex", "gemini", "mini-swe-agent", "opencode", "pi", "qwen-code"),
}
"""The fields of `AgentRunSettings` that are passed to the constructors of agents, with the agents that have them.

A field that is not here is shown in `--help` and reaches no agent.
"""

_OWN_AGENTS = frozenset(agent for owners in _AGENT_OPTIONS.values() for agent in owners)
"""The agents whose options are known; what others take, their constructors tell."""


def _json_of(name: str, path: Path) -> str:
    """The JSON object in a file that an option names. Raises ConfigError."""
    flag = f"--{name.replace('_', '-')}"
    try:
        value = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"{flag} {path}: expected a file with a JSON object: {error}") from error
    return msgspec.json.encode(value).decode()


class SandboxSettings(Struct, frozen=True, kw_only=True):
    """In which sandboxes agents work."""

    sandbox: Annotated[
        str | None,
        option(
            "docker; local; ssh:MACHINE, local ones of another machine; or unsafe-local: no isolation at all, "
            "for tasks and models you trust "
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


def roles_of(names: str | None, usual: tuple[Role, ...]) -> tuple[Role, ...]:
    """The roles of calls that an option names, in their own order. Raises ConfigError for an unknown one."""
    from understudy.trajectory.roles import ROLES

    if names is None:
        return usual
    chosen = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := chosen.difference(ROLES):
        raise ConfigError(f"--roles: unknown role {min(unknown)!r}; expected some of: {', '.join(ROLES)}")
    return tuple(role for role in ROLES if role in chosen)


def thinking_of(word: str | None) -> Thinking | None:
    """What --thinking says, None where it is not given. Raises ConfigError for an unknown word."""
    from understudy.preference.checks import Thinking

    for choice in get_args(Thinking):
        if word == choice:
            return choice
    if word is None:
        return None
    raise ConfigError(f"--thinking: expected one of {', '.join(get_args(Thinking))}, got {word!r}")


def default_concurrency() -> int:
    """How many agents work at a time: one a CPU, and one that waits for its model."""
    return available_cpus() + 1


def sandbox_for(tasks: Iterable[Task]) -> str:
    """The kind of sandbox where nobody names one: containers where one of the tasks needs its image."""
    return DOCKER if any(isinstance(task.source, ImageTree) for task in tasks) else LOCAL
