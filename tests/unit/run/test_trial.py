"""What is said of two versions of an agent, and which names of versions are taken."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from understudy.errors import ConfigError
from understudy.run.trial import Observation, VersionTrial, changes, parse_version


def tool(*names: str, description: str = "d") -> str:
    parameters = {"type": "object", "properties": {name: {} for name in names}}
    return json.dumps({"name": "t", "description": description, "parameters": parameters})


SEEN = Observation(
    behaviour="edit",
    problems=[],
    outcome="completed",
    statuses=["ok", "ok"],
    roles=["main"],
    results=["PID 17 in b3f9x1k: x = 1"],
    system="It is 2026-11-23.",
    tools={"read": tool("path"), "edit": tool("path", "old")},
)


def said(**other: object) -> list[str]:
    trials = [
        VersionTrial(agent="a", version="1", observations=[one]) for one in (SEEN, structs.replace(SEEN, **other))
    ]
    return changes(*trials)


def test_what_differs_in_every_run_is_no_change() -> None:
    assert said(results=["PID 2391 in z81kk0q: x = 1"], system="It is 2026-12-01.") == []


def test_names_of_sessions_and_of_long_outputs_are_no_change() -> None:
    names = [
        ("8c962495-f71e-4a07-a496-b36415647580", "bmxyzwabc"),
        ("bd2fcbc4-0f64-4e4e-abcd-854cddef9908", "b0a1"),
    ]
    one, other = ([f"Saved to /h/{session}/tool-results/{file}.txt"] for session, file in names)
    trials = [
        VersionTrial(agent="a", version="1", observations=[structs.replace(SEEN, results=results)])
        for results in (one, other)
    ]
    assert changes(*trials) == []


def test_each_change_is_said() -> None:
    assert said(outcome="crashed") == ["edit: it ends as: completed, now crashed"]
    assert said(statuses=["ok"]) == ["edit: calls of the work: ['ok', 'ok'], now ['ok']"]
    assert said(results=["PID 17: y"]) == ["edit: a tool's result: 'PID 17 in b3f9x1k: x = 1', now 'PID 17: y'"]
    assert said(tools={"read": tool("file"), "edit": tool("path", "old", description="e"), "new": tool()}) == [
        "tool new: new",
        "tool read: other parameters (without path, with file)",
        "tool edit: another description",
    ]
    (prompt,) = said(system="It is late.")
    assert prompt.startswith("system prompt: 17 characters, now 11; it differs from ")


def test_a_version_is_named_behind_the_agent() -> None:
    assert [package.version for package in parse_version("pi")] == ["0.87.1"]
    assert [package.version for package in parse_version("pi@0.87.1")] == ["0.87.1"]
    pinned, other = parse_version("pi@0.88.0-rc.1")
    assert (pinned.pinned, other.pinned) == (True, False)
    assert other.directory().name == "0.88.0-rc.1" and "agents try pi@0.88.0-rc.1" in other.problems()[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("moon@1", "'moon' is no agent that can be installed"),
        ("pi@", "invalid version ''; give one such as pi@0.87.1"),
        ("pi@latest", "invalid version 'latest'"),
        ("pi@1/../../x", "give one such as"),
    ],
)
def test_other_names_of_versions_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_version(text)
