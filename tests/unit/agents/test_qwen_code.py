"""How Qwen Code's last event decides how it ended."""

from __future__ import annotations

import json

import pytest

from understudy.agents.qwen_code import QwenCode
from understudy.sandbox.base import Completed

LOOP = (
    "Loop detection halted the run (consecutive_identical_tool_calls: the model repeated the same tool call with "
    "identical arguments). This is an always-on guard and cannot be disabled via `model.skipLoopDetection`."
)


@pytest.mark.parametrize(
    ("message", "outcome"), [(LOOP, "completed"), ("400 status code (no body)", "crashed"), ("", "crashed")]
)
def test_a_model_that_repeats_itself_has_worked_on_the_task(message: str, outcome: str) -> None:
    result = {"type": "result", "subtype": "error_during_execution", "is_error": True}
    stdout = json.dumps(result | {"error": {"message": message}}).encode()
    completed = Completed(exit_code=1, stdout=stdout, stderr=b"", duration_s=1.0, timed_out=False)
    assert QwenCode().end_of(completed, {}).outcome == outcome
