"""The options of agents: each one that a command takes reaches the agent that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy.cli.agent_files import option_text
from understudy.cli.commands.run import RunSettings
from understudy.cli.options import from_options
from understudy.cli.settings import AgentRunSettings
from understudy.errors import ConfigError

FOR_EVERY_AGENT = {"agents", "max_turns", "timeout"}
"""The fields that the run itself works with."""


@pytest.mark.parametrize("name", sorted({*AgentRunSettings.__struct_fields__} - FOR_EVERY_AGENT))
def test_no_option_of_an_agent_is_dropped_silently(name: str, tmp_path: Path):
    file, skills = tmp_path / "file.json", tmp_path / "skills"
    file.write_text("{}")
    (skills / "one").mkdir(parents=True)
    (skills / "one" / "SKILL.md").write_text("---\nname: one\n---\n")
    files: dict[str, Any] = {"mcp_config": file, "settings": file, "skills": skills}
    values: dict[str, Any] = {name: files.get(name, "1")}
    options = AgentRunSettings(**values).options_of("another")
    expected = option_text(name, values[name])
    assert expected and options == {name.removeprefix("agent_"): expected}, f"the option of {name} is dropped"


def test_an_option_of_another_agent_is_refused_with_those_that_have_it():
    with pytest.raises(
        ConfigError, match=r"--tools: unsupported by --agent codex, expected --agent claude-code or"
    ):
        AgentRunSettings(tools="Read").options_of("codex")
    assert AgentRunSettings(system_prompt="p").options_of("codex") == {"system_prompt": "p"}


def test_a_config_file_may_name_several_agents_but_a_loop_accepts_one(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[run]\nagent = "codex"\n')
    assert from_options(RunSettings, {"config": file}).agent.only_agent == "codex"
    file.write_text('[run]\nagent = ["codex", "opencode"]\n')
    agent = from_options(RunSettings, {"config": file}).agent
    assert agent.agents == ("codex", "opencode")
    with pytest.raises(ConfigError, match="expected one agent, got codex, opencode"):
        _ = agent.only_agent
