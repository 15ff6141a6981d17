"""How OpenCode's events are read: when it ended its work, and what the model answered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from understudy.agents.opencode import OpenCode
from understudy.agents.turn_log import LoggedTurn
from understudy.sandbox.base import Completed

START, FINISH = {"type": "step_start"}, {"type": "step_finish"}
ERROR = {"type": "error", "error": {"name": "ContextOverflowError", "data": {"message": "too long"}}}


def lines(*events: dict[str, Any]) -> bytes:
    return b"\n".join(map(msgspec.json.encode, events))


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "part": {"type": "text", "text": text, **more}}


@pytest.mark.parametrize(
    ("events", "exit_code", "outcome"),
    [
        ((START, FINISH), 0, "completed"),
        ((START, FINISH), 1, "crashed"),
        ((START, FINISH, ERROR), 0, "crashed"),
        ((START, FINISH, ERROR, START, FINISH), 1, "completed"),
        ((START, FINISH, ERROR, START), 1, "crashed"),
        ((START, FINISH, ERROR, START, FINISH, START), 130, "crashed"),
        ((START, FINISH, ERROR, START, FINISH), 130, "crashed"),
    ],
)
def test_an_error_that_it_recovered_from_does_not_end_it(
    events: tuple[dict[str, Any], ...], exit_code: int, outcome: str
) -> None:
    completed = Completed(exit_code=exit_code, stdout=lines(*events), stderr=b"", duration_s=1.0, timed_out=False)
    assert OpenCode().end_of(completed, {}).outcome == outcome


def test_a_summary_and_its_own_words_after_it_are_no_answers() -> None:
    continued = said("Continue.", synthetic=True, metadata={"compaction_continue": True})
    events = (
        START, said("I look."), FINISH, ERROR, START, said("A summary."), FINISH, continued, START, said("Done."),
        FINISH, said("A note.", synthetic=True),
    )  # fmt: skip
    turns = OpenCode().logged_turns({"stdout.txt": lines(*events)})
    assert turns == [LoggedTurn("I look."), LoggedTurn("Done.")]
