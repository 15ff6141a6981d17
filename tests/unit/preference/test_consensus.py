"""What teachers agree on, and whether two actions differ: votes, ties, judges, and laws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.ingest.trace import TurnAction, tool_call
from understudy.preference.consensus import Group, Proposal, consensus, grouped
from understudy.preference.equivalence import SIMILAR, difference_of_actions, effect_of, similarity

from support import example_count


def does(name: str, message: str | None = None, **arguments: Any) -> TurnAction:
    return TurnAction(content=message, tool_calls=[tool_call("c1", name, arguments)])


def says(text: str) -> TurnAction:
    return TurnAction(content=text)


def proposal(teacher: str, action: TurnAction, number: int = 0) -> Proposal:
    return Proposal(
        ask_id=f"{teacher}-{number}", replay_id="r", teacher=teacher, model=teacher, family=teacher, action=action
    )


def proposals(*actions: TurnAction) -> list[Proposal]:
    return [proposal(f"t{number}", action) for number, action in enumerate(actions)]


LS, PWD = does("Bash", command="ls"), does("Bash", command="pwd")


def test_teachers_agree_on_the_tool_and_its_arguments_whatever_they_say_before():
    result = consensus(proposals(does("Bash", "I look.", command="ls -l"), PWD, does("Bash", command="ls  -l")))
    assert result is not None
    assert (result.by, result.supporters, result.asked) == ("tools", ("t0", "t2"), ("t0", "t1", "t2"))
    assert result.teacher == "t0"
    assert result.action.content == "I look."
    assert result.agreement == pytest.approx(2 / 3)


def test_a_tie_is_no_agreement():
    assert consensus(proposals(LS, PWD)) is None
    assert consensus(proposals(LS, LS, PWD, PWD)) is None
    assert consensus(proposals(LS, PWD, says("Done."))) is None


def test_fewer_than_the_minimum_do_not_agree():
    assert consensus(proposals(LS)) is None
    assert consensus(proposals(LS, LS, PWD), minimum=3) is None
    assert consensus(proposals(LS), minimum=1) is not None
    assert consensus([]) is None


def test_teachers_agree_in_words_where_they_use_no_tool():
    result = consensus(
        proposals(
            says("The bug is fixed: shift now adds the step, and all tests pass."),
            says("The bug is fixed: `shift` now adds the step and all of the tests pass."),
            says("Which file do you mean?"),
        )
    )
    assert result is not None
    assert (result.by, result.supporters) == ("text", ("t0", "t1"))


def test_other_words_are_no_agreement():
    assert consensus(proposals(says("All tests pass now."), says("All tests fail now."))) is None


def test_a_teacher_has_one_vote():
    twice = [proposal("a", LS, 0), proposal("a", LS, 1), proposal("b", PWD)]
    assert consensus(twice) is None
    assert consensus([*twice, proposal("c", LS)]) is not None
    undecided = [proposal("a", LS, 0), proposal("a", PWD, 1), proposal("b", LS), proposal("c", PWD)]
    assert consensus(undecided) is None


def test_an_answer_that_does_nothing_supports_nothing():
    result = consensus(proposals(LS, LS, TurnAction(thinking="hm"), says(" ")))
    assert result is not None
    assert result.agreement == 0.5


def test_edits_are_compared_by_what_they_change():
    small = does("Edit", file_path="a.py", old_string="return x - 1", new_string="return x + 1")
    large = does(
        "Edit",
        file_path="a.py",
        old_string="def f(x):\n    return x - 1\n",
        new_string="def f(x):\n    return x + 1\n",
    )
    elsewhere = does("Edit", file_path="b.py", old_string="return x - 1", new_string="return x + 1")
    everywhere = does(
        "Edit", file_path="a.py", old_string="return x - 1", new_string="return x + 1", replace_all=True
    )
    assert difference_of_actions(small, large) is None
    assert difference_of_actions(large, small) is None
    assert difference_of_actions(small, elsewhere) is not None
    assert difference_of_actions(small, everywhere) is not None


def test_a_judge_decides_where_nobody_wins():
    judged: list[Sequence[Group]] = []

    def judge(groups: Sequence[Group]) -> int | None:
        judged.append(groups)
        return next(i for i, group in enumerate(groups) if group.proposal.action == PWD)

    result = consensus(proposals(LS, PWD, says("Done.")), judge=judge)
    assert result is not None
    assert (result.by, result.action, result.supporters) == ("judge", PWD, ("t1",))
    assert len(judged[0]) == 3
    assert consensus(proposals(LS, LS, PWD), judge=judge) is not None
    assert len(judged) == 1, "a judge is not asked where teachers agree"


@pytest.mark.parametrize("choice", [None, 7, -1])
def test_a_judge_that_chooses_nothing(choice: int | None):
    assert consensus(proposals(LS, PWD), judge=lambda groups: choice) is None


def test_what_differs_is_told():
    assert difference_of_actions(LS, PWD).arguments == ("command",)
    assert difference_of_actions(LS, does("Read", file_path="a")).kind == "tools"
    assert difference_of_actions(LS, says("Done.")).kind == "words or tools"
    assert difference_of_actions(LS, TurnAction()).kind == "nothing"
    difference = difference_of_actions(says("Yes, it works."), says("What do you want to know?"))
    assert (difference.kind, difference.a, difference.b) == (
        "words",
        ("Yes, it works.",),
        ("What do you want to know?",),
    )
    assert difference.similarity is not None and difference.similarity < SIMILAR
    long = difference_of_actions(does("Write", file_path="a", content="x" * 9000), LS)
    assert len(long.a[0]) <= 300


def test_a_long_text_is_compared_by_its_beginning():
    one, other = says("the same words again " * 5000 + "a"), says("the same words again " * 5000 + "b")
    assert similarity(effect_of(one), effect_of(other)) == 1.0


# --- laws ----------------------------------------------------------------------------------------------

texts = st.sampled_from(
    [
        "",
        " ",
        "Done.",
        "All tests pass.",
        "All tests pass now.",
        "All of the tests pass now, I checked.",
        "Why?",
        "👍",
    ]
)
calls = st.sampled_from(
    [
        tool_call("c", "Bash", {"command": "ls"}),
        tool_call("d", "Bash", {"command": "ls  ", "description": "x"}),
        tool_call("e", "Read", {"file_path": "a"}),
        tool_call("f", "Bash", "{"),
        tool_call("g", "Edit", {"file_path": "a", "old_string": "x", "new_string": "y"}),
        tool_call("h", "Edit", {"file_path": "a", "old_string": "x1", "new_string": "y1"}),
        tool_call("i", "Edit", {"file_path": "a", "old_string": "0x", "new_string": "0y"}),
        tool_call("j", "Edit", {"file_path": "a", "old_string": "0x1", "new_string": "0y1"}),
    ]
)
actions = st.builds(TurnAction, content=st.none() | texts, tool_calls=st.lists(calls, max_size=3))


@given(st.lists(st.tuples(st.sampled_from("abcd"), actions), max_size=7), st.integers(1, 3), st.data())
@settings(max_examples=example_count(150))
def test_the_order_of_proposals_does_not_count(
    given_proposals: list[tuple[str, TurnAction]], minimum: int, data: st.DataObject
):
    all_proposals = [proposal(teacher, action, number) for number, (teacher, action) in enumerate(given_proposals)]
    shuffled = data.draw(st.permutations(all_proposals))
    assert consensus(all_proposals, minimum=minimum) == consensus(shuffled, minimum=minimum)
    assert grouped(all_proposals) == grouped(shuffled)
    pick = data.draw(st.integers(0, 3))
    assert consensus(all_proposals, minimum=minimum, judge=lambda _: pick) == consensus(
        shuffled, minimum=minimum, judge=lambda _: pick
    )


@given(st.lists(st.tuples(st.sampled_from("abcd"), actions), max_size=7), st.integers(1, 3))
def test_a_consensus_is_one(given_proposals: list[tuple[str, TurnAction]], minimum: int):
    all_proposals = [proposal(teacher, action, number) for number, (teacher, action) in enumerate(given_proposals)]
    members = [member.ask_id for group in grouped(all_proposals) for member in group.members]
    assert len(members) == len(set(members))
    agreed = consensus(all_proposals, minimum=minimum)
    if agreed is None:
        return
    assert len(agreed.supporters) >= minimum
    assert set(agreed.supporters) <= set(agreed.asked) == {each.teacher for each in all_proposals}
    assert 0 < agreed.agreement <= 1
    assert agreed.teacher in agreed.supporters
    for teacher in agreed.supporters:
        assert any(each.teacher == teacher for each in all_proposals)
    assert agreed.by == ("tools" if agreed.action.tool_calls else "text")


@given(actions, actions)
@settings(max_examples=example_count(150))
def test_to_differ_is_symmetric(a: TurnAction, b: TurnAction):
    there, back = difference_of_actions(a, b), difference_of_actions(b, a)
    assert (there is None) == (back is None)
    assert difference_of_actions(a, a) is None
    if there is not None and back is not None:
        assert (there.kind, there.a, there.b) == (back.kind, back.b, back.a)
        assert there.similarity == back.similarity


@given(actions, actions)
def test_words_before_a_tool_do_not_count(a: TurnAction, b: TurnAction):
    if a.tool_calls:
        assert difference_of_actions(a, TurnAction(content="Other words.", tool_calls=a.tool_calls)) is None
        assert difference_of_actions(a, TurnAction(tool_calls=a.tool_calls[::-1])) is None
