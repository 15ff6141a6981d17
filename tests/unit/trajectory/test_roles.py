"""What each call was for, by evidence: the work, a subagent, a summary, something beside it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from understudy.trajectory.roles import Role
from understudy.trajectory.samples import merge, samples
from understudy.trajectory.tree import build
from understudy.types import Call

from support.trajectory import Session, assistant, recorded, recordings, text, tool_result, tool_use, user

ASK = user(text("Mend it."))
TURN = assistant(tool_use("t1"))
SUM_UP = user(
    text("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nYour task is to create a summary.")
)
SUMMARY = "<analysis>x</analysis>\n<summary>It was mended.</summary>"
GO_ON = user(text("This session is being continued from a previous conversation that ran out of context. …"))


def changed(call: Call, **fields: Any) -> Call:
    """The call with other fields in its request; None takes one away."""
    body = json.loads(call.request) | fields
    remaining = {name: value for name, value in body.items() if value is not None}
    return msgspec.structs.replace(call, request=json.dumps(remaining).encode())


def marked_before(call: Call) -> Call:
    """The call with its mark for the cache one message earlier, as the CLI has it where it will not go on."""
    body = json.loads(call.request)
    for message in body["messages"]:
        for block in message["content"]:
            block.pop("cache_control", None)
    body["messages"][-2]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return msgspec.structs.replace(call, request=json.dumps(body).encode())


def roles(calls: list[Call]) -> dict[str, Role]:
    return {name: nodes[0].role for name, nodes in build(calls).branches.items()}


def compacted(summary: str = SUMMARY, question: dict[str, Any] = SUM_UP) -> Session:
    session = Session()
    session.ask([ASK], [tool_use("t1")])
    session.ask([ASK, TURN, user(tool_result("t1"), *question["content"])], [text(summary)])
    return session


@pytest.mark.parametrize(
    ("question", "answer", "marked", "role"),
    [
        (SUM_UP, "It was mended.", False, "compaction"),
        (
            user(text("You are performing a CONTEXT CHECKPOINT COMPACTION. Create …")),
            "Mended.",
            False,
            "compaction",
        ),
        (user(text("«any words»")), SUMMARY, False, "compaction"),
        (user(text("«any words»")), "Mended.", True, "compaction"),
        (user(text("[SUGGESTION MODE: Suggest what the user might type next]")), "run it", True, "auxiliary"),
        (user(text("<system-reminder>This is a side question from the user.")), "Yes.", True, "auxiliary"),
        (user(text("Go on.")), "Done.", False, "main"),
        (user(text("Sum it up in <summary> tags.")), "Here: <summary>x</summary>", False, "main"),
    ],
)
def test_what_a_question_at_the_end_of_a_conversation_is_for(
    question: dict[str, Any], answer: str, marked: bool, role: Role
):
    calls = compacted(answer, question).calls
    calls[1] = marked_before(calls[1]) if marked else calls[1]
    tree = build(calls)
    assert [node.role for node in tree.nodes] == ["main", role]
    assert list(tree.branches) == (["main"] if role == "main" else ["main", role])


def test_what_goes_on_after_a_compaction_is_main_again():
    session = compacted()
    session.ask([GO_ON], [tool_use("t2")])
    session.ask([GO_ON, assistant(tool_use("t2")), user(tool_result("t2"))], [text("Done.")])
    tree = build(session.calls)
    assert roles(session.calls) == {"main": "main", "compaction": "compaction", "main.1": "main"}
    root = tree.branches["main.1"][0]
    assert (root.origin, root.continues) == ("compaction", tree.nodes[1])
    assert root.parent is None


def test_a_summary_may_stand_behind_the_first_turns():
    """As OpenHands puts it, which keeps its first events, with others than those that it sends for the summary."""
    session = Session()
    history = [ASK, TURN, user(tool_result("t1"))]
    session.ask([ASK], [tool_use("t1")])
    session.ask(history, [tool_use("t2")])
    session.ask([*history, assistant(tool_use("t2")), user(tool_result("t2"))], [tool_use("t2b")])
    system = "You are maintaining a context-aware state summary for an interactive agent.\n"
    session.ask([user(text("<EVENT>…</EVENT>"))], [text("The parser is mended.")], system=system)
    kept = [ASK, TURN, user(tool_result("t1"), text("The parser is mended."))]
    session.ask(kept, [tool_use("t3")])
    session.ask([*kept, assistant(tool_use("t3")), user(tool_result("t3"))], [text("Done.")])
    tree = build(headerless(*session.calls))
    first, *_, summary, after, last = tree.nodes
    assert [node.role for node in tree.nodes] == ["main"] * 3 + ["compaction"] + ["main"] * 2
    assert (after.parent, after.continues, after.branch) == (first, summary, "main.1")
    assert (last.parent, last.continues) == (after, None)


def test_a_compaction_that_is_not_the_last_word_is_no_heir():
    session = compacted()
    history = [ASK, TURN, user(tool_result("t1"))]
    session.ask(history, [text("Done.")])
    assert list(build(session.calls).branches) == ["main", "compaction"]
    assert [len(nodes) for nodes in build(session.calls).branches.values()] == [2, 1]


def test_a_task_that_speaks_like_a_compaction_is_main():
    session = Session()
    session.ask([SUM_UP], [text(SUMMARY)])
    session.ask([ASK], [tool_use("t1")])
    session.ask([ASK, TURN, user(tool_result("t1", SUM_UP["content"][0]["text"]))], [tool_use("t2")])
    assert {node.role for node in build(session.calls).nodes} == {"main"}


def test_subagents_have_their_own_roles_and_their_own_compaction():
    session = Session()
    session.ask([ASK], [tool_use("t0", "Agent", prompt="Find it.")])
    task = user(text("Find it."))
    session.ask([task], [tool_use("t1")], agent="a1")
    session.ask([task, TURN, user(tool_result("t1")), SUM_UP], [text(SUMMARY)], agent="a1")
    session.ask([GO_ON], [text("Found.")], agent="a1")
    tree = build(session.calls)
    expected = {"main": "main", "a1": "subagent", "a1.compaction": "compaction", "a1.1": "subagent"}
    assert roles(session.calls) == expected
    assert tree.branches["a1"][0].spawned_by is tree.nodes[0]
    assert tree.branches["a1.1"][0].continues is tree.nodes[2]


def test_a_subagent_without_an_id_is_known_by_its_prompt():
    session = Session()
    session.ask([ASK], [tool_use("t0", "Task", prompt="Find it.")])
    session.ask([user(text("Find it."))], [text("Found.")], system="You are an agent.")
    assert [node.role for node in build(session.calls).nodes] == ["main", "subagent"]


def test_single_questions_without_tools_are_auxiliary_where_others_have_tools():
    session = Session()
    title = changed(session.ask([user(text("Name it."))], [text("Mending")], system="T"), tools=None)
    work = session.ask([ASK], [tool_use("t1", "WebFetch", url="http://x", prompt="Which year?")])
    page = changed(session.ask([user(text("Web page…\nWhich year?"))], [text("1999")], system="P"), tools=[])
    search = session.ask([user(text("Search for: x"))], [text("none")], system="P")
    forced = changed(search, tool_choice={"type": "tool", "name": "web_search"})
    tree = build([title, work, page, forced])
    assert [node.role for node in tree.nodes] == ["auxiliary", "main", "auxiliary", "auxiliary"]
    assert list(tree.branches) == ["auxiliary", "main", "auxiliary.1", "auxiliary.2"]
    served = changed(search, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert [node.role for node in build([work, served]).nodes] == ["main", "auxiliary"]
    assert tree.nodes[2].spawned_by is tree.nodes[1]
    assert build([title]).nodes[0].role == "main"
    schema = {"format": {"type": "json_schema", "schema": {}}}
    assert build([changed(title, output_config=schema)]).nodes[0].role == "auxiliary"


def test_a_check_whether_a_tool_call_is_safe_is_auxiliary():
    """Qwen Code's, which repeats the conversation and has one tool, for the verdict."""
    session = Session()
    work = session.ask([ASK], [tool_use("t1", "run_shell_command", command="make")])
    pending = user(text("## Pending tool call to classify"))
    system = "You are a security classifier for an AI coding agent operating in auto mode.\n\nGiven the"
    check = session.ask([ASK, pending], [tool_use("t2", "respond_in_schema", shouldBlock=False)], system=system)
    after = session.ask([ASK, TURN, user(tool_result("t1"))], [text("Done.")])
    tree = build(headerless(work, check, after))
    assert [node.role for node in tree.nodes] == ["main", "auxiliary", "main"]


def test_an_agent_that_never_has_tools_is_main():
    session = Session()
    calls = [session.ask([ASK], [text("ls")])]
    calls.append(session.ask([ASK, assistant(text("ls")), user(text("a.py"))], [text("Done.")]))
    assert {node.role for node in build([changed(call, tools=None) for call in calls]).nodes} == {"main"}


def headerless(*calls: Call) -> list[Call]:
    return [msgspec.structs.replace(call, session_id=None) for call in calls]


def test_chats_without_sessions_do_not_get_each_others_roles():
    session = Session()
    work = session.ask([user(text("Mend the parser."))], [tool_use("t1", path="src", prompt="Which year is it?")])
    chat = changed(session.ask([user(text("What is in src?"))], [text("Files.")], system="C"), tools=None)
    title = changed(
        session.ask([user(text("Name this: Mend the parser."))], [text("Mending")], system="T"), tools=None
    )
    page = changed(session.ask([user(text("Page…\nWhich year is it?"))], [text("1999")], system="P"), tools=None)
    tree = build(headerless(work, chat, title, page))
    assert [node.role for node in tree.nodes] == ["main", "main", "auxiliary", "auxiliary"]
    assert tree.nodes[1].spawned_by is None
    assert tree.nodes[3].spawned_by is tree.nodes[0]
    assert [node.role for node in build([work, chat]).nodes] == ["main", "auxiliary"], (
        "in one session it is beside"
    )


def test_a_chat_without_a_session_does_not_go_on_from_anothers_summary():
    session = compacted()
    session.ask([user(text("Another matter."))], [text("Yes?")])
    session.ask([GO_ON], [tool_use("t2")])
    *_, summary, other, continued = build(headerless(*session.calls)).nodes
    assert (other.origin, other.continues) == ("first call", None)
    assert (continued.origin, continued.continues) == ("compaction", summary)


def test_roles_can_be_left_out_of_samples():
    session = Session()
    session.ask([ASK], [tool_use("t1")], prompt=[1], completion=[2])
    history = [ASK, TURN, user(tool_result("t1"), *SUM_UP["content"])]
    session.ask(history, [text(SUMMARY)], prompt=[1, 2, 3], completion=[4])
    session.ask([GO_ON], [text("Done.")], prompt=[5], completion=[6])
    tree = build(session.calls)
    assert merge(tree).reasons == {"first call": 1, "compaction": 2}
    assert [segment.role for segment in merge(tree).segments] == ["main", "compaction", "main"]
    selected = samples(tree, rollout_id="r", reward=1.0, roles=("main", "subagent"))
    assert [(sample.role, sample.branch) for sample in selected] == [("main", "main"), ("main", "main.1")]


@pytest.mark.skipif(not recordings(), reason="the recordings of the real CLI are not here")
class TestRecordings:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("04_subagents", {"main": 2, "a0000000000000001": 2, "a0000000000000002": 2}),
            ("12_notools", {"main": 1}),
            ("12_json_schema", {"main": 2}),
            ("16_multi_turn", {"main": 2}),
            ("17_compact_cmd", {"main": 2, "compaction": 1}),
            ("17b_compact_seq", {"main": 3, "compaction": 1, "main.1": 1}),
            ("17c_compact_drive", {"main": 3, "compaction": 1, "main.1": 2}),
            ("18i_reactive_compact", {"main": 5, "compaction": 1, "main.1": 3}),
            ("18x_setting_on", {"main": 6, "compaction": 1, "main.1": 4}),
            ("18z_w60k", {"main": 11, "compaction": 1, "main.1": 10, "compaction.1": 1, "main.2": 2}),
            ("21_webfetch", {"main": 2, "auxiliary": 1}),
            ("27_plan_mode", {"main": 1}),
            ("29_fallback_model", {"main": 1, "main.1": 1, "main.2": 1, "main.3": 1}),
            ("50_interactive", {"auxiliary": 1, "main": 3, "compaction": 1}),
        ],
    )
    def test_every_recorded_behaviour(self, name: str, expected: dict[str, int]):
        tree = build(recorded(name))
        assert {branch: len(nodes) for branch, nodes in tree.branches.items()} == expected
        for branch, nodes in tree.branches.items():
            kind = branch.split(".")[0]
            role = kind if kind in ("main", "compaction", "auxiliary") else "subagent"
            assert {node.role for node in nodes} == {role}

    def test_the_answered_call_has_the_plain_name(self):
        tree = build(recorded("29_fallback_model"))
        assert [node.call.status for node in tree.branches["main"]] == ["ok"]

    def test_what_goes_on_after_a_compaction_is_tied_to_it(self):
        for name in ("17b_compact_seq", "17c_compact_drive", "18i_reactive_compact", "18z_q_w100k_pct30"):
            tree = build(recorded(name))
            roots = [node for node in tree.nodes if node.origin == "compaction"]
            summaries = [node for node in tree.nodes if node.role == "compaction"]
            assert roots and [root.continues for root in roots] == summaries
