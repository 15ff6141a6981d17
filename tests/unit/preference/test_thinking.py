"""What becomes of thinking: both sides of a pair are alike, and so are the answers of a row."""

from __future__ import annotations

import pytest

from understudy.export.examples import Example, with_thinking
from understudy.ingest.trace import TurnAction
from understudy.preference.checks import NO_THINKING, Checks, Pair

BOTH, NEITHER = ("I see.", "Hm."), (None, None)


def pair(chosen: str | None, rejected: str | None) -> Pair:
    return Pair(
        pair_id="p",
        origin="replay",
        group="g",
        messages=[{"role": "user", "content": "go"}],
        tools=None,
        chosen=TurnAction(content="a", thinking=chosen),
        rejected=TurnAction(content="b", thinking=rejected),
    )


@pytest.mark.parametrize(
    ("mode", "thoughts", "expected"),
    [
        ("only-when-both", BOTH, BOTH),
        ("only-when-both", (None, "Hm."), NEITHER),
        ("only-when-both", ("I see.", None), NEITHER),
        ("only-when-both", NEITHER, NEITHER),
        ("strip", BOTH, NEITHER),
        ("both", BOTH, BOTH),
        ("both", (None, "Hm."), NO_THINKING),
        ("both", NEITHER, NO_THINKING),
        ("as-logged", (None, "Hm."), (None, "Hm.")),
    ],
)
def test_thinking_is_the_same_on_both_sides(mode, thoughts, expected):
    passed = Checks(thinking=mode).passed(pair(*thoughts))
    assert (passed if isinstance(passed, str) else (passed.chosen.thinking, passed.rejected.thinking)) == expected


def test_by_default_a_pair_does_not_differ_in_form():
    passed = Checks().passed(pair(None, "I thought."))
    assert isinstance(passed, Pair)
    assert (passed.chosen.thinking, passed.rejected.thinking) == NEITHER


@pytest.mark.parametrize(
    ("mode", "expected"), [("as-logged", ["x", None]), ("strip", [None, None]), ("only-when-both", [None, None])]
)
def test_the_answers_of_a_row_are_treated_alike(mode, expected):
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "a", "reasoning_content": "x"},
        {"role": "user", "content": "on"},
        {"role": "assistant", "content": "b"},
    ]
    example = Example(
        example_id="e", origin="session", unit="conversation", group="g", messages=messages, trained=(1, 3)
    )
    result = with_thinking(example, mode)
    assert result is not None
    assert [result.messages[index].get("reasoning_content") for index in result.trained] == expected
    assert with_thinking(example, "both") is None
