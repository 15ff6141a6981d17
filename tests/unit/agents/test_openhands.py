"""How a run of OpenHands ended, by what its driver says; and its settings."""

from __future__ import annotations

import json

import pytest

from understudy.agents.openhands import OpenHands
from understudy.errors import ConfigError
from understudy.sandbox.base import Completed


def ended(stdout: str, exit_code: int = 1, stderr: str = "") -> tuple[str, str]:
    completed = Completed(exit_code=exit_code, stdout=stdout.encode(), stderr=stderr.encode(), duration_s=1.0)
    end = OpenHands().end_of(completed, {})
    return end.outcome, end.message


def told(status: str, code: str = "", detail: str = "") -> str:
    return "noise\n" + json.dumps({"status": status, "code": code, "detail": detail}) + "\n"


@pytest.mark.parametrize(
    ("stdout", "outcome"),
    [
        (told("finished"), "completed"),
        (told("stuck"), "completed"),
        (told("error", "MaxIterationsReached", "Agent reached maximum iterations limit (3)."), "max_turns"),
    ],
)
def test_an_ordinary_end_is_no_crash(stdout: str, outcome: str) -> None:
    assert ended(stdout) == (outcome, "")


def test_any_other_end_is_a_crash_that_says_why() -> None:
    outcome, message = ended(told("error", "LLMAuthenticationError", "Your LLM API key appears to be invalid"))
    assert outcome == "crashed" and "LLMAuthenticationError: Your LLM API key appears" in message
    assert ended("", 0) == ("crashed", "OpenHands ended with exit code 0 and left no result: nothing on stderr")
    assert "ImportError: no" in ended("", 1, "Traceback\nImportError: no\n")[1]
    assert ended(told("paused"))[0] == "crashed"


def test_an_unknown_tool_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no tool 'browser'; give some of: file_editor, finish"):
        OpenHands(tools="terminal,browser")
