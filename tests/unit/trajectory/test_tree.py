"""The tree of calls: who follows whom, retries, subagents, compaction, and the recordings of the real CLI."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from understudy.trajectory.tree import build
from understudy.types import Call
from understudy.wire.stored import read_request, read_response, response_message, shown_messages

from support.trajectory import Session, assistant, recorded, recordings, text, tool_result, tool_use, user

ASK = user(text("Mend it."))


def parents(calls: list[Call]) -> list[int | None]:
    return [node.parent.call.sequence if node.parent else None for node in build(calls).nodes]


def test_a_conversation_is_one_branch():
    session = Session()
    session.ask([ASK], [text("I look."), tool_use("t1", command="ls")])
    turn = assistant(text("I look."), tool_use("t1", command="ls"))
    session.ask([ASK, turn, user(tool_result("t1"))], [text("Done.")])
    plain = {"role": "user", "content": "Mend it."}
    session.ask(
        [plain, turn, user(tool_result("t1")), assistant(text("Done.")), user(text("More"))], [text("No.")]
    )
    tree = build(session.calls)
    assert parents(session.calls) == [None, 0, 1]
    assert list(tree.branches) == ["main"]
    assert [node.inherited_blocks for node in tree.nodes] == [0, 3, 5]
    assert all(node.verbatim for node in tree.nodes)


@pytest.mark.parametrize(
    ("answer", "echoed"),
    [
        ([tool_use("t1", "Edit", file_path="a")], [tool_use("t1", "Edit", replace_all=False, file_path="a")]),
        ([tool_use("t1", timeout=5000.0)], [tool_use("t1", timeout=5000)]),
        ([text(" \n"), tool_use("t1")], [tool_use("t1")]),
        ([text("Look \n"), tool_use("t1")], [text("Look"), tool_use("t1")]),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}, tool_use("t1")], [tool_use("t1")]),
    ],
)
def test_the_cli_may_rewrite_the_answer(answer: list[dict[str, object]], echoed: list[dict[str, object]]):
    session = Session()
    session.ask([ASK], answer)
    session.ask([ASK, assistant(*echoed), user(tool_result("t1"))], [text("Done.")])
    _, second = build(session.calls).nodes
    assert second.parent is not None
    assert second.inherited_blocks == len(read_request(second.call).blocks) - 1


def test_a_conversation_of_its_own_has_a_first_call_of_its_own():
    """As chats without a session header on one key have."""
    session = Session()
    session.ask([ASK], [text("Done.")])
    session.ask([user(text("What is the time?"))], [text("Late.")])
    assert [node.origin for node in build(session.calls).nodes] == ["first call", "first call"]


@pytest.mark.parametrize("name", ["prompt", "message"])
def test_a_subagent_is_spawned_by_the_call_that_gives_its_prompt(name: str):
    session = Session()
    session.ask([ASK], [tool_use("t1", "spawn_agent", **{name: "Look around."})])
    session.ask([user(text("Look around."))], [text("Nothing.")], agent="a1")
    first, second = build(session.calls).nodes
    assert second.spawned_by is first


@pytest.mark.parametrize(
    "history",
    [
        [user(text("Mend that.")), assistant(tool_use("t1")), user(tool_result("t1"))],
        [ASK, assistant(tool_use("t2")), user(tool_result("t2"))],
        [ASK, assistant(tool_use("t1"), text("and more")), user(tool_result("t1"))],
    ],
)
def test_another_history_is_a_new_root(history: list[dict[str, object]]):
    session = Session()
    session.ask([ASK], [tool_use("t1")])
    session.ask(history, [text("Done.")])
    assert [node.origin for node in build(session.calls).nodes] == ["first call", "history rewritten"]


def test_a_retry_is_a_sibling_and_the_vain_one_is_superseded():
    session = Session()
    session.ask([ASK], [tool_use("t0")])
    history = [ASK, assistant(tool_use("t0")), user(tool_result("t0"))]
    session.ask(history, None, status="error")
    session.ask(history, [tool_use("t1")])
    session.ask(history, [tool_use("t2")])
    session.ask([*history, assistant(tool_use("t1")), user(tool_result("t1"))], [text("Done.")])
    tree = build(session.calls)
    assert parents(session.calls) == [None, 0, 0, 0, 2]
    assert [node.superseded for node in tree.nodes] == [False, True, False, True, False]
    assert [node.call.sequence for node in tree.branches["main"]] == [0, 2, 4]


def at_once(session: Session, count: int) -> None:
    """Let the last `count` calls of a session be in flight at the same time."""
    session.calls[-count:] = [
        msgspec.structs.replace(call, started_at=200.0, ended_at=201.0 + number)
        for number, call in enumerate(session.calls[-count:])
    ]


def test_samples_of_one_request_are_all_kept():
    session = Session()
    for number in range(4):
        session.ask([ASK], [text(f"sample {number}")])
    at_once(session, 4)
    tree = build(session.calls)
    assert [node.superseded for node in tree.nodes] == [False] * 4
    assert [node.alternative for node in tree.nodes] == [False, True, True, True]
    assert [node.origin for node in tree.nodes] == ["first call", *["sibling"] * 3]
    assert list(tree.branches) == ["main", "main.1", "main.2", "main.3"]


def test_the_line_goes_on_from_the_sample_that_the_agent_chose():
    session = Session()
    session.ask([ASK], [tool_use("t0")])
    history = [ASK, assistant(tool_use("t0")), user(tool_result("t0"))]
    session.ask(history, None, status="error")
    for number in range(1, 4):
        session.ask(history, [tool_use(f"t{number}")])
    at_once(session, 4)
    session.ask([*history, assistant(tool_use("t2")), user(tool_result("t2"))], [text("Done.")])
    tree = build(session.calls)
    assert [node.superseded for node in tree.nodes] == [False, True, *[False] * 4], "the error is no sample"
    assert [node.alternative for node in tree.nodes] == [False, False, True, False, True, False]
    assert [node.call.sequence for node in tree.branches["main"]] == [0, 3, 5]


def test_samples_of_a_retried_request_supersede_what_was_answered_before():
    session = Session()
    for number in range(3):
        session.ask([ASK], [text(f"sample {number}")])
    at_once(session, 2)
    tree = build(session.calls)
    assert [node.superseded for node in tree.nodes] == [True, False, False]
    assert [node.alternative for node in tree.nodes] == [False, False, True]
    assert [node.branch for node in tree.nodes] == ["main.2", "main", "main.1"]


def test_a_retried_first_call():
    session = Session()
    session.ask([ASK], None, status="error")
    session.ask([ASK], [text("Done.")])
    first, second = build(session.calls).nodes
    assert (first.superseded, second.superseded) == (True, False)
    assert (first.origin, second.origin) == ("first call", "retry")
    assert (first.branch, second.branch) == ("main.1", "main")


def test_twins_with_equal_answers_are_told_apart_by_thinking():
    session = Session()
    for thought in ("a", "b"):
        session.ask([ASK], [{"type": "thinking", "thinking": thought}, text("Hm.")])
    echoed = assistant({"type": "thinking", "thinking": "a"}, text("Hm."))
    session.ask([ASK, echoed, user(text("Go on."))], [text("Done.")])
    assert parents(session.calls) == [None, None, 0]


def test_subagents_are_branches_under_the_call_that_started_them():
    session = Session()
    session.ask([ASK], [tool_use("t1", "Agent", prompt="Find x."), tool_use("t2", "Agent", prompt="Find y.")])
    for agent, prompt in (("x1", "Find x."), ("y2", "Find y.")):
        session.ask([user(text(prompt))], [text("Found.")], agent=agent)
    history = [ASK, assistant(tool_use("t1"), tool_use("t2")), user(tool_result("t1"), tool_result("t2"))]
    session.ask(history, [text("Done.")])
    tree = build(session.calls)
    assert {name: [n.call.sequence for n in nodes] for name, nodes in tree.branches.items()} == {
        "main": [0, 3],
        "x1": [1],
        "y2": [2],
    }
    assert all(node.spawned_by is tree.nodes[0] for node in tree.nodes[1:3])


def test_one_agents_calls_never_follow_anothers():
    session = Session()
    session.ask([ASK], [text("Hm.")])
    session.ask([ASK, assistant(text("Hm.")), user(text("Go on."))], [text("Done.")], agent="x1")
    assert parents(session.calls) == [None, None]


def test_a_fork_goes_on_under_a_new_session():
    session = Session()
    session.ask([ASK], [text("Hm.")])
    session.ask([ASK, assistant(text("Hm.")), user(text("Go on."))], [text("Done.")], session="s2")
    assert parents(session.calls) == [None, 0]


def test_a_compaction_begins_a_new_root():
    session = Session()
    session.ask([ASK], [text("Hm.")])
    summary = "This session is being continued from a previous conversation that ran out of context."
    session.ask([user(text(summary))], [text("Done.")])
    tree = build(session.calls)
    assert [node.origin for node in tree.nodes] == ["first call", "compaction"]
    assert list(tree.branches) == ["main", "main.1"]


def test_order_and_repetition_of_the_input_do_not_matter():
    calls = Session().calls
    session = Session()
    history = [ASK]
    for number in range(12):
        session.ask(history, [tool_use(f"t{number}")])
        history = [*history, assistant(tool_use(f"t{number}")), user(tool_result(f"t{number}"))]
    calls = session.calls * 2
    random.Random(1).shuffle(calls)
    assert parents(calls) == [None, *range(11)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'{"messages": 1}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "user", "content": [1, null]}]}',
        b'{"messages": [{"role": "assistant", "content": [{"type": ["x"]}, {"type": "tool_use", "input": 1}]}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "tool_result", "content": {"a": 1}}]}]}',
        b'{"system": {"a": 1}, "messages": []}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "x", "a": '
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}]}]}",
        b'{"messages": ' + b"[" * 100_000,
    ],
)
def test_a_hostile_body_is_a_call_like_any_other(body: bytes):
    call = Session().ask([ASK], [text("Hm.")])
    hostile = msgspec.structs.replace(call, id="odd", sequence=1, request=body, response=body)
    follower = msgspec.structs.replace(call, id="last", sequence=2)
    nodes = build([call, hostile, follower]).nodes
    assert [node.call.id for node in nodes] == [call.id, "odd", "last"]
    for node in nodes:
        assert isinstance(node.messages, list)
        response_message(node.answer or ())


def test_arguments_of_a_hostile_shape_start_no_subagent():
    session = Session()
    session.ask(
        [ASK], [tool_use("t1", "Agent", prompt=["Find x."]), {"type": "tool_use", "id": "t2", "input": [1]}]
    )
    session.ask([user(text("Find x."))], [text("Found.")], agent="x1")
    assert build(session.calls).nodes[1].spawned_by is None


def test_messages_are_laid_out_as_the_model_gets_them():
    session = Session()
    turn = assistant({"type": "thinking", "thinking": "hm"}, text("I look."), tool_use("t1", command="ls"))
    image = {"type": "image", "source": {"type": "base64", "data": "eA=="}}
    failed = {**tool_result("t1", [text("no"), image]), "is_error": True}
    call = session.ask([ASK, turn, user(text("note"), failed, image)], [text("Done.")], system="Be brief.")
    messages = [*shown_messages(read_request(call)), response_message(read_response(call) or ())]
    function = {"name": "Bash", "arguments": json.dumps({"command": "ls"})}
    image_part = {"type": "image_url", "image_url": {"url": "data:;base64,eA=="}}
    calls = [{"id": "t1", "function": function, "type": "function"}]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Mend it."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "user", "content": "note"},
        {"role": "tool", "content": "Error: no\n[image]", "tool_call_id": "t1"},
        {"role": "user", "content": [image_part, image_part]},
        {"role": "assistant", "content": "Done."},
    ]


@pytest.mark.skipif(not recordings(), reason="the recordings of the real CLI are not here")
class TestRecordings:
    @pytest.mark.parametrize(
        "name", ["03_edit_flow", "14_resume", "16_multi_turn", "26_long_horizon", "26b_long_horizon_qwen"]
    )
    def test_one_session_is_one_branch(self, name: str):
        tree = build(recorded(name))
        assert list(tree.branches) == ["main"]
        assert [node.origin for node in tree.nodes].count(None) == len(tree.nodes) - 1

    @pytest.mark.parametrize("name", ["04_subagents", "04b_subagents_fg", "37_interrupt"])
    def test_subagents(self, name: str):
        tree = build(recorded(name))
        assert list(tree.branches) == ["main", "a0000000000000001", "a0000000000000002"]
        assert [nodes[0].spawned_by is not None for nodes in tree.branches.values()] == [False, True, True]

    @pytest.mark.parametrize("name", ["06_err429", "06_err500", "06_err529", "07_drop_mid_text", "25_timeout"])
    def test_retries(self, name: str):
        *tried, last = build(recorded(name)).nodes
        assert tried
        assert all(node.superseded for node in tried)
        assert not last.superseded

    def test_every_recording_makes_a_tree(self):
        nodes = [node for name in recordings() for node in build(recorded(name)).nodes]
        assert len(nodes) > 400
        follows = sum(node.parent is not None for node in nodes)
        assert follows > 280
