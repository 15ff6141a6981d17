"""Finds the class that runs an agent, by the agent's name."""

from __future__ import annotations

from collections.abc import Mapping

from understudy import plugins
from understudy.agents.acp import AcpAgent
from understudy.agents.base import Agent
from understudy.errors import ConfigError


def make_agent(name: str, options: Mapping[str, str]) -> Agent:
    """Return the agent that `--agent` names, with its options. Raises ConfigError."""
    kind, separator, command = name.partition(":")
    if separator and kind != AcpAgent.name:
        raise ConfigError(
            f"--agent {name}: only acp takes a command; give the name alone, or a command as in --agent "
            f"{AcpAgent.name}:COMMAND"
        )
    if kind not in (names := plugins.names("agents")):
        choices = (f"{AcpAgent.name}:COMMAND" if name == AcpAgent.name else name for name in names)
        raise ConfigError(f"--agent: unknown agent {name[:100]!r}; give one of: {', '.join(choices)}")
    return plugins.load("agents", kind)(**options, **({"command": command} if separator else {}))
