"""The memory of token-in-token-out: what it finds again, in which tokens, and what it lets go."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from array import array
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.gateway.exact.tree import (
    FOREST_LIMIT,
    TREE_LIMIT,
    TokenForest,
    TokenNode,
    TokenTree,
    conversation_path,
)
from understudy.wire.model import ConversationHandle

Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "S"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def result(id_: str, text: str = "ok") -> Message:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def said(text: str, **calls: dict[str, Any]) -> Message:
    """An answer; each keyword is the id of a call of Edit with these arguments."""
    tool_calls = [
        {"id": id_, "type": "function", "function": {"name": "Edit", "arguments": json.dumps(arguments)}}
        for id_, arguments in calls.items()
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})


def keep(
    tree: TokenTree,
    messages: list[Message],
    answer: Message,
    prompt: Sequence[int],
    completion: Sequence[int],
) -> TokenNode:
    """As the backend does it: look up, ask, keep."""
    path = conversation_path(messages)
    match = tree.find(path)
    return tree.add(path, path.then(answer), prompt, completion, parent=match[0] if match else None)


def find(tree: TokenTree, *messages: Message) -> tuple[TokenNode, int] | None:
    return tree.find(conversation_path(list(messages)))


def test_a_continued_conversation_finds_its_stored_tokens() -> None:
    tree = TokenTree()
    first = keep(tree, [SYSTEM, user("a")], said("A"), [1, 2], [3])
    assert find(tree, SYSTEM, user("a"), said("A"), user("b")) == (first, 3)
    assert first.ids == [1, 2, 3]
    assert first.sampled == [3]


@pytest.mark.parametrize(
    "other",
    [
        [SYSTEM, user("a "), said("A"), user("b")],
        [SYSTEM, user("a"), said("B"), user("b")],
        [{"role": "system", "content": "T"}, user("a"), said("A"), user("b")],
        [user("a"), said("A"), user("b")],
        [SYSTEM, user("a"), said("A", t1={}), user("b")],
        [SYSTEM, user("a"), said("A")],
        [SYSTEM, user("a")],
        [SYSTEM],
        [],
    ],
)
def test_another_conversation_is_not_found(other: list[Message]) -> None:
    tree = TokenTree()
    keep(tree, [SYSTEM, user("a")], said("A"), [1, 2], [3])
    assert tree.find(conversation_path(other)) is None


def test_tools_and_template_arguments_distinguish_conversations() -> None:
    messages, tools = [user("a"), said("A"), user("b")], [{"type": "function", "function": {"name": "f"}}]
    paths = [
        conversation_path(messages),
        conversation_path(messages, tools),
        conversation_path(messages, tools, {"enable_thinking": False}),
    ]
    assert len({path.setting for path in paths}) == 3
    assert conversation_path([user("a")]).then(said("A")) == paths[0].marks[2]


# --- what the CLI makes of its own turns ---------------------------------------------------------------

arguments = st.fixed_dictionaries(
    {"file_path": st.text(max_size=6), "old_string": st.text(max_size=9), "timeout": st.floats(0, 1e4).map(round)}
)


def rewritten(message: Message) -> Message:
    """Everything at once that Claude Code was seen to do."""
    echo = copy.deepcopy(message)
    echo["content"] = echo["content"].strip()
    echo.pop("reasoning", None)
    for call in echo.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        backwards = {key: arguments[key] for key in sorted(arguments, reverse=True)}
        call["function"]["arguments"] = json.dumps({"replace_all": False, **backwards}, ensure_ascii=False)
    return echo


answers = st.builds(
    lambda text, blank, thought, made, number: (
        said(
            blank + text + blank, **{f"toolu_{number}_{index}": arguments for index, arguments in enumerate(made)}
        )
        | ({"reasoning": thought} if thought else {})
    ),
    st.sampled_from(["", "Done.", "a  b"]),
    st.sampled_from(["", "\n", " "]),
    st.sampled_from(["", "hm"]),
    st.lists(arguments, max_size=2),
    st.integers(0, 10**6),
)


@given(st.lists(st.tuples(st.sampled_from(["go", "on", ""]), answers), min_size=1, max_size=30))
def test_messages_rewritten_by_the_agent_still_match_their_stored_tokens(turns: list[tuple[str, Message]]) -> None:
    tree = TokenTree()
    messages: list[Message] = [SYSTEM]
    ids: list[int] = []
    for number, (text, answer) in enumerate(turns):
        messages.append(user(text))
        match = tree.find(conversation_path(messages))
        assert (match is None) == (number == 0)
        if match:
            assert match[1] == len(messages) - 1
            assert match[0].ids == ids
        node = keep(tree, messages, answer, [*ids, 1000 + number], [2000 + number])
        ids = node.ids
        messages = [*messages, rewritten(answer)]
    assert {node.line for node in tree.nodes} == {tree.nodes[0].line}
    assert tree.nodes[-1].turns == len(turns) - 1


# --- twins, retries, order -----------------------------------------------------------------------------


def test_two_responses_to_one_request_can_each_be_continued() -> None:
    tree = TokenTree()
    keep(tree, [user("a")], said("A"), [1], [2])
    request = [user("a"), said("A"), user("b")]
    twins = [keep(tree, request, said("", **{f"t{n}": {}}), [1, 2, 3], [4 + n]) for n in (0, 1)]
    for n in (0, 1):
        assert find(tree, *request, said("", **{f"t{n}": {}}), result(f"t{n}")) == (twins[n], 4)
        assert twins[n].ids == [1, 2, 3, 4 + n]
    assert twins[0].line is not twins[1].line


def test_of_two_equal_responses_to_one_request_the_latest_is_found() -> None:
    tree = TokenTree()
    _, latest = [keep(tree, [user("a")], said("A"), [1], [2 + n]) for n in (0, 1)]
    assert find(tree, user("a"), said("A"), user("b")) == (latest, 2)


def test_a_second_response_to_a_request_does_not_replace_the_first() -> None:
    tree = TokenTree()
    keep(tree, [user("a")], said("A"), [1], [2])
    request = [user("a"), said("A"), user("b")]
    first = keep(tree, request, said("", t0={}), [1, 2, 3], [4, 5])
    second = keep(tree, request, said("", t1={}), [1, 2, 3], [6])
    assert second.ids == [1, 2, 3, 6]
    assert find(tree, *request, said("", t0={}), result("t0")) == (first, 4)
    assert find(tree, *request, said("", t1={}), result("t1")) == (second, 4)
    assert first.ids == [1, 2, 3, 4, 5]


def test_a_continued_response_is_kept_when_its_request_is_repeated() -> None:
    tree = TokenTree()
    first = keep(tree, [user("a")], said("A", t0={}), [1], [2])
    keep(tree, [user("a"), said("A", t0={}), result("t0")], said("B"), [1, 2, 3], [4])
    again = keep(tree, [user("a")], said("A", t1={}), [1], [5])
    assert find(tree, user("a"), said("A", t0={}), result("t0", "other")) == (first, 2)
    assert first.ids == [1, 2]
    assert find(tree, user("a"), said("A", t1={}), result("t1")) == (again, 2)


def test_calls_can_be_added_in_any_order() -> None:
    calls = [
        ([user("a")], said("A"), [1], [2]),
        ([user("a"), said("A"), user("b")], said("B", t0={}), [1, 2, 3], [4]),
        ([user("a"), said("A"), user("b"), said("B", t0={}), result("t0")], said("C"), [1, 2, 3, 4, 5], [6]),
        ([user("x")], said("X"), [7], [8]),
    ]
    for order in permutations(calls):
        tree = TokenTree()
        for call in order:
            keep(tree, *call)
        for messages, answer, prompt, completion in calls:
            match = find(tree, *messages, answer, user("next"))
            assert match is not None
            assert match[1] == len(messages) + 1
            assert match[0].ids == prompt + completion


steps = st.lists(
    st.tuples(
        st.integers(0, 30),  # the answer to go on from
        st.sampled_from(["go on", "samples", "new root"]),
    ),
    max_size=25,
)


@given(steps)
def test_every_response_keeps_its_tokens_under_random_branching(steps: list[tuple[int, str]]) -> None:
    tree = TokenTree()
    answered: list[tuple[list[Message], list[int]]] = []  # conversations that an agent may go on from
    number = 0

    def ask(messages: list[Message], ids: list[int]) -> tuple[list[Message], list[int]]:
        nonlocal number
        number += 1
        answer = said("x", **{f"t{number}": {}})
        node = keep(tree, messages, answer, [*ids, number], [number, 0])
        assert node.ids == [*ids, number, number, 0]
        return [*messages, rewritten(answer)], node.ids

    for index, action in steps:
        past, ids = answered[index % len(answered)] if answered and action != "new root" else ([], [])
        messages = [*past, user(f"u{number}")]
        answered.extend(ask(messages, ids) for _ in range(3 if action == "samples" else 1))
        for conversation, expected in answered:
            match = tree.find(conversation_path([*conversation, user("on")]))
            assert match is not None
            assert match[0].ids == expected
            assert match[1] == len(conversation)
    assert len(tree.nodes) == len(answered)


# --- bounded memory ------------------------------------------------------------------------------------


def test_a_long_branch_stores_each_token_once() -> None:
    tree = TokenTree()
    messages: list[Message] = []
    ids: list[int] = []
    for number in range(200):
        messages = [*messages, user(str(number))]
        node = keep(tree, messages, said(str(number)), [*ids, *range(500)], [1, 2])
        ids = node.ids
        messages = [*messages, said(str(number))]
    assert tree.cost < 200 * 502 + 200 * 300


def test_the_least_recently_used_lines_of_a_tree_are_evicted() -> None:
    tree = TokenTree()
    for number in range(24):
        keep(tree, [user(str(number))], said("A"), array("i", [number]) * (TREE_LIMIT // 16), [1])
    assert tree.cost <= TREE_LIMIT
    assert find(tree, user("0"), said("A"), user("on")) is None
    assert find(tree, user("23"), said("A"), user("on")) is not None
    assert sum(len(node.line.ids) for node in tree.nodes) <= TREE_LIMIT


def test_the_least_recently_used_branches_of_a_forest_are_evicted() -> None:
    forest = TokenForest()
    conversations = [ConversationHandle("a") for _ in range(20)]
    for conversation in conversations:
        keep(forest.tree(conversation), [user("a")], said("A"), array("i", [1]) * (FOREST_LIMIT // 16), [1])
        forest.shrink()
    retained = [find(forest.tree(one), user("a"), said("A"), user("b")) is not None for one in conversations]
    assert retained == [False] * 5 + [True] * 15
    assert sum(forest.tree(one).cost for one in conversations) <= FOREST_LIMIT


def test_the_tree_of_a_collected_conversation_is_freed() -> None:
    forest = TokenForest()
    conversation = ConversationHandle("a")
    keep(forest.tree(conversation), [user("a")], said("A"), [1], [2])
    tree = weakref.ref(forest.tree(conversation))
    del conversation
    gc.collect()
    assert tree() is None


def test_a_request_without_a_branch_stores_nothing() -> None:
    forest = TokenForest()
    keep(forest.tree(None), [user("a")], said("A"), [1], [2])
    assert find(forest.tree(None), user("a"), said("A"), user("b")) is None
