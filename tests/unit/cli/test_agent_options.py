"""The options of agents: each one that a command takes reaches the agent that it is for."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.cli.settings import AgentRunSettings

FOR_EVERY_AGENT = {"agent", "max_turns", "timeout"}
"""The fields that the run itself works with."""


@pytest.mark.parametrize("name", sorted({*AgentRunSettings.__struct_fields__} - FOR_EVERY_AGENT))
def test_no_option_of_an_agent_is_dropped_silently(name: str):
    values: dict[str, Any] = {name: "1"}
    options = AgentRunSettings(agent="another", **values).agent_options
    assert options == {name.removeprefix("agent_"): "1"}, f"_AGENT_OPTIONS lacks {name}"
