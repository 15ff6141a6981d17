"""The corpus that all exports are made of: what is in an example, what is learned, what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.export.corpus import Corpus, ExportSelection, split
from understudy.export.examples import (
    NOT_OFFERED,
    Example,
    arguments_of,
    desirable,
    find_answer,
    trace_examples,
    with_text_content,
)
from understudy.export.formats.trl import token_row, trained_ranges
from understudy.ingest.trace import RequestShape, TraceOutcome, TurnSignals, expand, tool_call
from understudy.preference.checks import LOSSY
from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.wire.arguments import UNPARSED_INPUT

from support.export import Log, put_attempt, put_rollouts, put_sessions, session
from support.trajectory import Session, assistant, text, tool_result, tool_use, user

REDACTOR = Redactor(bytes(32))


def of(trace, unit: str = "conversation") -> list[Example]:
    from collections import Counter

    return list(trace_examples(trace, unit, Counter(), Counter()))


def test_turn_examples_are_the_expanded_states_plus_their_action():
    trace = session()
    examples = of(trace, "turn")
    expected = list(expand(trace))
    assert [example.example_id for example in examples] == [state.state_id for state in expected]
    for example, state in zip(examples, expected, strict=True):
        assert example.messages[:-1] == [with_text_content(message) for message in state.messages]
        assert example.trained == (len(state.messages),)
        assert example.tools == state.tools
    assert [example.messages[-1].get("reasoning_content") for example in examples] == [
        "Where is it?",
        None,
        "All good.",
        None,
    ]
    assert [example.desirable for example in examples] == [None, True, True, False]
    assert {(e.group, e.family, e.model, e.source, e.licence) for e in examples} == {
        ("/home/ann/project", "glm", "glm-5", "chat", None)
    }


def test_a_turn_shared_by_two_branches_is_trained_in_one_example_only():
    branch, main = of(session())
    assert [message["role"] for message in main.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    # The newest turn's path comes first, with the turn that both have.
    assert [branch.messages[index]["content"] for index in branch.trained] == ["I look.", "Then I stop."]
    assert [main.messages[index]["content"] for index in main.trained] == ["", "Done ✓."]
    assert main.messages[4]["tool_calls"][0]["id"] == "c2"
    assert branch.messages[2]["reasoning_content"] == "Where is it?"
    assert "reasoning_content" not in main.messages[2]
    assert main.messages[0] == {"role": "system", "content": "You code."}


def test_a_trained_range_ends_at_an_untrained_answer():
    branch, main = of(session())
    assert trained_ranges(branch) == [(2, 5)]
    assert trained_ranges(main) == [(4, 6)]
    trace = session()
    del trace.turns[1]  # as `where` would
    chosen = of(trace)[1]
    assert chosen.trained == (6,)
    log = Log("gaps")
    node = log.user(-1, "go")
    for number in range(5):
        node = log.user(log.answer(node, f"step {number}"), "on")
    del log.trace.turns[2]
    (example,) = of(log.trace)
    assert [example.messages[index]["content"] for index in example.trained] == [
        "step 0", "step 1", "step 3", "step 4",
    ]  # fmt: skip
    assert trained_ranges(example) == [(2, 4), (8, 10)]


@given(st.lists(st.integers(min_value=0, max_value=20), min_size=1, max_size=25), st.data())
def test_every_selected_turn_of_any_tree_is_trained_exactly_once(parents: list[int], data: st.DataObject):
    log = Log("tree")
    ends = [log.user(-1, "begin")]
    for number, parent in enumerate(parents):
        answer = log.answer(ends[parent % len(ends)], f"answer {data.draw(st.integers(0, 3))}")
        ends.append(log.user(answer, f"on {number}"))
    chosen = data.draw(st.sets(st.integers(0, len(parents) - 1), min_size=1))
    log.trace.turns = [turn for number, turn in enumerate(log.trace.turns) if number in chosen]
    whole = {state.state_id: state for state in expand(log.trace)}
    learned: list[tuple[str, ...]] = []
    for example in of(log.trace):
        for index in example.trained:
            learned.append(tuple(message["content"] for message in example.messages[: index + 1]))
    expected = [
        (*(message["content"] for message in state.messages), state.student_action.content or "")
        for state in whole.values()
    ]
    assert sorted(learned) == sorted(expected)


def test_broken_calls_and_empty_answers_are_not_trained(tmp_path: Path):
    log = Log("t", shape=RequestShape())
    ask = log.user(-1, [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": "data:,"}}])
    broken = log.answer(ask, "I try.", [("c1", "Bash", '{"command": "l')])
    wrapped = '{"__unparsedToolInput": {"raw": "{\\"command\\": \\"l", "len": 14}}'
    again = log.answer(log.result(broken, "c1", "no"), "I try.", [("c2", "Bash", wrapped)])
    result = log.result(again, "c2", "no")
    log.answer(result, "  ")
    log.answer(result, "Well.")
    put_sessions(tmp_path, [log.trace])
    with Store.open(tmp_path, create=False) as store:
        corpus = Corpus(store, ExportSelection(), unredacted=True)
        (example,) = corpus.examples("conversation")
        assert corpus.counts.left_out == {
            "empty answers": 1,
            "tool calls whose arguments are no JSON object": 2,
        }
        assert example.trained == (6,)
        assert example.messages[1]["content"] == "See:\n[image]"
        assert example.tools is None
        assert [e.example_id for e in corpus.examples("conversation")] == [example.example_id]
        assert corpus.counts.total == 1


def test_exporting_sessions_needs_a_redactor_or_unredacted(tmp_path: Path):
    put_sessions(tmp_path, [session()])
    with Store.open(tmp_path, create=False) as store:
        with pytest.raises(ConfigError, match="--unredacted"):
            Corpus(store)
        with pytest.raises(ConfigError, match="no runs"):
            list(Corpus(store, ExportSelection(origins=("rollouts",))).examples())
        plain = list(Corpus(store, unredacted=True).examples())
        redacted = list(Corpus(store, redactor=REDACTOR).examples())
        assert [e.messages[1]["content"] for e in plain] == [e.messages[1]["content"] for e in redacted]
        assert {e.group for e in plain} == {"/home/ann/project"}
        assert not any("ann" in e.group for e in redacted)
        # The user's word counts even where a redactor is at hand.
        assert Corpus(store, redactor=REDACTOR, unredacted=True).redactor is None


def test_where_and_roles_select_the_exported_examples(tmp_path: Path):
    helper = Log("helper", role="subagent")
    helper.answer(helper.user(-1, "Help."), "Here.")
    warmup = Log("warm", role="warmup")
    warmup.answer(warmup.user(-1, "Warm."), "Up.")
    failed = session("u", outcome=TraceOutcome(resolved=False, task="u-1"), project=None)
    put_sessions(tmp_path, [session(), helper.trace, warmup.trace, failed])

    def count(**chosen) -> int:
        with Store.open(tmp_path, create=False) as store:
            corpus = Corpus(store, ExportSelection(**chosen), REDACTOR)
            number = sum(1 for _ in corpus.examples("turn"))
            assert number == corpus.counts.total == corpus.counts.origins["session"]
            return number

    assert count() == 9
    assert count(roles=("main",)) == 8
    assert count(roles=("auxiliary",)) == 1
    assert count(where="tests = 'passed'") == 2
    assert count(where="tests = 'passed' AND project IS NOT NULL") == 1
    assert count(solved_only=True) == 5
    with pytest.raises(ConfigError):
        count(where="nonsense(")


def test_rollouts_yield_branches_as_conversations_and_calls_as_turns(tmp_path: Path):
    put_rollouts(tmp_path)
    with Store.open(tmp_path, create=False) as store:
        corpus = Corpus(store, ExportSelection(origins=("rollouts",)))
        whole = list(corpus.examples("conversation"))
        assert corpus.counts.left_out == {"calls without an answer": 4}
        assert [example.desirable for example in whole] == [True, False, True, False]
        first = whole[0]
        assert [message["role"] for message in first.messages] == [
            "system", "user", "assistant", "tool", "assistant",
        ]  # fmt: skip
        assert first.trained == (2, 4)
        assert first.messages[2]["reasoning_content"] == "Hm."
        assert first.tools == [
            {
                "type": "function",
                "function": {
                    "name": "Bash",
                    "description": "",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
        ]
        assert (first.group, first.source, first.reward) == ("calc-0", "example/calc", 1.0)
        turns = list(corpus.examples("turn"))
        assert [len(example.messages) for example in turns[:2]] == [3, 5]
        assert all(example.trained == (len(example.messages) - 1,) for example in turns)
        solved = Corpus(store, ExportSelection(origins=("rollouts",), solved_only=True))
        assert len(list(solved.examples())) == 2
        assert solved.counts.left_out["not solved"] == 2
        samples = list(corpus.samples())
        assert len(samples) == len(list(corpus.samples())) == 4
        graded, sample = samples[0]
        assert sample.segment.loss_mask == (*[0] * 20, 1, 1, 1, 0, 0, 0, 1, 1)
        assert (graded.verdict.reward, sample.policy_version) == (1.0, "3")
        with pytest.raises(ConfigError, match="no run 'other'"):
            list(Corpus(store, ExportSelection(origins=("rollouts",), run="other")).examples())


def test_a_broken_call_of_a_rollout_is_context_but_not_trained(tmp_path: Path):
    broken = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {UNPARSED_INPUT: {"raw": '{"c', "len": 3}}}
    session = Session("a1")
    ask = user(text("Mend it."))
    session.ask([ask], [text("I try."), broken])
    session.ask([ask, assistant(text("I try."), broken), user(tool_result("t1", "no"))], [text("Done.")])
    with Store.open(tmp_path) as store:
        put_attempt(store, session.calls)
        corpus = Corpus(store, ExportSelection(origins=("rollouts",)))
        (example,) = corpus.examples("conversation")
        assert corpus.counts.left_out == {"tool calls whose arguments are no JSON object": 1}
        *_, called, result, done = example.messages
        assert UNPARSED_INPUT in called["tool_calls"][0]["function"]["arguments"]  # as the model was shown it
        assert (result["content"], done["content"]) == ("no", "Done.")
        assert example.trained == (len(example.messages) - 1,)
        (turn,) = corpus.examples("turn")
        assert turn.messages[-1]["content"] == "Done."


def test_the_tokens_of_a_broken_call_are_not_trained(tmp_path: Path):
    broken = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {UNPARSED_INPUT: {"raw": '{"c', "len": 3}}}
    session = Session("a1")
    ask = user(text("Mend it."))
    session.ask([ask], [broken], prompt=[1, 2], completion=[3, 4])
    answered = [ask, assistant(broken), user(tool_result("t1", "no"))]
    session.ask(answered, [text("Done.")], prompt=[1, 2, 3, 4, 5], completion=[6])
    with Store.open(tmp_path) as store:
        put_attempt(store, session.calls)
        corpus = Corpus(store, ExportSelection(origins=("rollouts",)))
        ((graded, sample),) = corpus.samples()
        assert sample.segment.loss_mask == (0, 0, 1, 1, 0, 1)  # what learns from rewards learns all of them
        row = token_row(graded, sample)
        assert row["assistant_masks"] == [0, 0, 0, 0, 0, 1]
        assert row["labels"] == [-100, -100, -100, -100, -100, 6]


def test_calls_in_the_context_keep_the_arguments_as_the_model_sampled_them(tmp_path: Path):
    session = Session("a1")
    ask = user(text("Mend it."))
    session.ask([ask], [tool_use("t1", command="ls", timeout=5000.0)])
    echo = {
        "type": "tool_use",
        "id": "t1",
        "name": "Bash",
        "input": {"timeout": 5000, "command": "ls", "x": False},
    }
    session.ask([ask, assistant(echo), user(tool_result("t1", "a.py"))], [text("Done.")])
    with Store.open(tmp_path) as store:
        put_attempt(store, session.calls)
        _, turn = Corpus(store, ExportSelection(origins=("rollouts",))).examples("turn")
        assert (
            turn.messages[-3]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls", "timeout": 5000.0}'
        )


@pytest.mark.parametrize(
    ("signals", "outcome", "label"),
    [
        (None, None, None),
        (TurnSignals(tool_calls=3), None, None),
        (TurnSignals(tests="passed"), None, True),
        (TurnSignals(tests="failed"), None, None),
        (TurnSignals(commits=1), None, True),
        (TurnSignals(feedback="positive"), None, True),
        (TurnSignals(feedback="negative", commits=1), None, False),
        (TurnSignals(tests="passed", denied=1), None, False),
        (TurnSignals(interrupted=True), None, False),
        (TurnSignals(edits=2, edits_survived=1, tests="passed"), None, False),
        (TurnSignals(edits=2, edits_survived=2), None, None),
        (TurnSignals(edits=2), TraceOutcome(resolved=True), True),
        (None, TraceOutcome(resolved=False), False),
        (TurnSignals(interrupted=True), TraceOutcome(resolved=True), False),
    ],
)
def test_desirable_labels_follow_from_signals_and_outcome(
    signals: TurnSignals | None, outcome: TraceOutcome | None, label: bool | None
):
    assert desirable(signals, outcome) is label


@given(st.text(), st.integers(0, 9))
def test_the_split_of_a_group_is_deterministic_and_grows_with_the_share(group: str, seed: int):
    assert split(group, seed=seed, share=0) == "train"
    once = split(group, seed=seed, share=0.3)
    assert once == split(group, seed=seed, share=0.3)
    if once == "test":  # a larger share takes nothing away from it
        assert split(group, seed=seed, share=0.6) == "test"


def test_the_test_split_has_about_the_requested_share():
    splits = [split(f"project-{number}", share=0.2) for number in range(2_000)]
    assert 340 < splits.count("test") < 460


def test_find_answer_ignores_whitespace_and_argument_order():
    answer = {
        "role": "assistant",
        "content": "I  look.",
        "tool_calls": [tool_call("c1", "Bash", {"a": 1, "b": 2})],
    }
    back = {"role": "assistant", "content": "I look.\n", "tool_calls": [tool_call("c1", "Bash", {"b": 2, "a": 1})]}
    other = {**back, "tool_calls": [tool_call("c2", "Bash", {"b": 2, "a": 1})]}
    assert find_answer([{"role": "user", "content": "I look."}, other, back], answer, 0) == 2
    assert find_answer([other, back], answer, 2) is None
    assert arguments_of({"function": {"name": "x", "arguments": "[]"}}) is None
    assert with_text_content({"role": "assistant", "content": None}) == {"role": "assistant", "content": ""}


def test_lossy_turns_are_left_out_and_counted_unless_selected(tmp_path: Path):
    log = Log("lossy", project="/srv/t")
    log.answer(log.user(-1, "go"), "Done.", [])
    log.trace.turns[0].fidelity = "lossy"
    put_sessions(tmp_path, [log.trace, session()])
    with Store.open(tmp_path, create=False) as store:
        corpus = Corpus(store, ExportSelection(origins=("sessions",)), unredacted=True)
        assert "/srv/t" not in {example.group for example in corpus.examples("turn")}
        assert corpus.counts.left_out[LOSSY] == 1
        everything = Corpus(store, ExportSelection(origins=("sessions",), include_lossy=True), unredacted=True)
        assert "/srv/t" in {example.group for example in everything.examples("turn")}
        assert LOSSY not in everything.counts.left_out


def test_an_answer_that_calls_an_unoffered_tool_is_not_trained(tmp_path: Path):
    log = Log("t", shape=RequestShape(None, [{"type": "function", "function": {"name": "Bash"}}]))
    ask = log.user(-1, "go")
    first = log.answer(ask, "I fly.", [("c1", "Fly", {})])
    log.answer(log.result(first, "c1", "no"), "Done.", [("c2", "Bash", {"command": "ls"})])
    put_sessions(tmp_path, [log.trace])
    with Store.open(tmp_path, create=False) as store:
        corpus = Corpus(store, unredacted=True)
        for unit, trained in (("turn", 1), ("conversation", 1)):
            (example,) = corpus.examples(unit)
            assert len(example.trained) == trained
            assert corpus.counts.left_out == {NOT_OFFERED: 1}
            assert (example.tools_source, corpus.counts.tools_sources) == ("logged", {"logged": 1})
