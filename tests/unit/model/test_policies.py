"""The scripted policies at work on real directories, through the manners of Claude Code's tools."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.errors import ConfigError, TaskError
from understudy.model.protocol import ModelMessage, ModelTool
from understudy.model.scripted.changes import Edit, read_changes, wrong_changes
from understudy.model.scripted.oracle import Action, ChatTurn, Policy
from understudy.model.scripted.policies import POLICIES, ScriptedTask, TaskIndex, make_policy, read_tasks

from fakes.claude_tools import tool_definitions
from support.policies import ALL_TOOLS, CASES, INSTRUCTION, LINES, diff, oracle, read, work, write


@pytest.mark.parametrize("context", ["-U3", "-U0"])
@pytest.mark.parametrize("case", CASES)
def test_the_oracle_makes_exactly_the_gold_change(case: str, context: str, tmp_path: Path) -> None:
    before, after, expected = CASES[case]
    patch = diff(before, after, context)
    write(tmp_path, before)
    tools, messages = work(oracle(patch), tmp_path)
    assert read(tmp_path) == after
    assert messages[-1]["content"] == "The change is made."
    if context == "-U3":
        assert tools.names == expected


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_makes_the_gold_change_with_a_shell_alone(case: str, tmp_path: Path) -> None:
    before, after, _ = CASES[case]
    write(tmp_path, before)
    tools, _ = work(oracle(diff(before, after)), tmp_path, tools=("Bash",))
    assert read(tmp_path) == after
    assert set(tools.names) == {"Bash"}


def test_a_binary_patch_is_applied_through_the_shell(tmp_path: Path) -> None:
    before, after = {"x.bin": bytes(range(256))}, {"x.bin": bytes(range(255, -1, -1)), "y": b"text\n"}
    write(tmp_path, before)
    work(oracle(diff(before, after, "--binary")), tmp_path)
    assert read(tmp_path) == after


def test_an_edit_that_fails_falls_back_to_the_rest_of_the_patch(tmp_path: Path) -> None:
    before = {"a.py": LINES.encode(), "b.py": LINES.encode()}
    after = {name: data.replace(b"line 50\n", b"fifty\n") for name, data in before.items()}
    write(tmp_path, before)
    policy = oracle(diff(before, after))

    class Refusing(Policy):
        name = "refusing"

        def act(self, request: ChatTurn) -> Action:
            action = policy.act(request)
            if (
                action.tool_calls
                and "b.py" in action.tool_calls[0].arguments
                and action.tool_calls[0].name == "Read"
            ):
                (tmp_path / "b.py").write_bytes(before["b.py"].replace(b"line 48\n", b"line  48\n"))
            return action

    tools, _ = work(Refusing(), tmp_path)
    assert tools.names == ["Read", "Edit", "Read", "Edit", "Bash"]


line = st.sampled_from(["a\n", "b\n", "    c\n", "\n", "d = 1\n", "return\n", "é\n"])
lines = st.lists(line, max_size=30).map("".join)


@settings(max_examples=25, deadline=None)
@given(st.lists(line, min_size=1, max_size=60), st.data())
def test_any_line_change_is_reproduced_exactly(old: list[str], data: st.DataObject) -> None:
    new = list(old)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(new)))
        new[start : start + data.draw(st.integers(0, 3))] = data.draw(st.lists(line, max_size=3))
    tail = data.draw(st.sampled_from(["", "no newline"]))
    before, after = {"a.py": "".join(old).encode()}, {"a.py": ("".join(new) + tail).encode()}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write(root, before)
        patch = diff(before, after, data.draw(st.sampled_from(["-U3", "-U0", "-U1"])))
        work(oracle(patch, data.draw(st.sampled_from(["oracle", "terse"]))), root)
        assert read(root) == after


@pytest.mark.parametrize("name", ["oracle", "terse"])
def test_the_oracle_resumes_from_the_summary_of_a_compacted_conversation(name: str, tmp_path: Path) -> None:
    before, after, _ = CASES["two hunks that shift, two files"]
    write(tmp_path, before)
    policy = oracle(diff(before, after), name)
    work(policy, tmp_path)
    tools, _ = work(
        policy, tmp_path, prompt=f"This session goes on from a summary.\nThe task is:\n\n{INSTRUCTION}"
    )
    assert read(tmp_path) == after
    assert tools.names == ["Read", "Read", "Read", "Bash"]


@pytest.mark.parametrize("case", CASES)
def test_the_wrong_policy_makes_a_change_different_from_gold(case: str, tmp_path: Path) -> None:
    before, after, _ = CASES[case]
    write(tmp_path, before)
    tasks = TaskIndex([ScriptedTask("t", INSTRUCTION, diff(before, after))])
    work(make_policy("wrong", tasks, {}), tmp_path)
    assert read(tmp_path) not in (before, after)


def test_the_wrong_policy_leaves_valid_code() -> None:
    before = b"def f(x):\n    if x:\n        return x - 1\n    return 0\n"
    patch = diff({"a.py": before}, {"a.py": before.replace(b"x - 1", b"x + 1")})
    (edit,) = wrong_changes(read_changes(patch))
    assert isinstance(edit, Edit)
    assert edit.new == edit.old.replace(
        "        return", "        # Checked: this is as it should be.\n        return"
    )


def test_the_idle_policy_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"a\n"})
    tools, messages = work(make_policy("idle", TaskIndex(()), {}), tmp_path)
    assert tools.names == [] and read(tmp_path) == {"a": b"a\n"}
    assert messages[-1]["content"]


def test_the_flaky_policy_succeeds_with_its_probability_and_is_deterministic() -> None:
    before, after, _ = CASES["one hunk"]
    patch = diff(before, after)
    tasks = [ScriptedTask(f"t{n}", f"Instruction number {n} of many", patch) for n in range(400)]
    (read_tool,) = msgspec.convert(tool_definitions("Read"), list[ModelTool])
    edit_tools = [read_tool, *msgspec.convert(tool_definitions("Edit"), list[ModelTool])]

    def right(probability: str, seed: str = "0", request_seed: int | None = None) -> list[bool]:
        policy = make_policy("flaky", TaskIndex(tasks), {"p": probability, "seed": seed})
        messages = [
            [
                {"role": "user", "content": task.instruction},
                {"role": "assistant", "tool_calls": [{"function": {"name": "Read"}}]},
                {"role": "tool", "content": "\n".join(f"{n}\tline {n}" for n in range(30, 71))},
            ]
            for task in tasks
        ]
        turns = [ChatTurn(msgspec.convert(m, list[ModelMessage]), edit_tools, request_seed) for m in messages]
        return ["line fifty" in policy.act(turn).tool_calls[0].arguments for turn in turns]

    assert 0.6 < sum(right("0.7")) / 400 < 0.8
    assert right("0.7") == right("0.7")
    assert right("0.7") != right("0.7", seed="1") != right("0.7", seed="1", request_seed=5)
    assert not any(right("0")) and all(right("1"))


def test_the_task_with_the_longest_matching_instruction_is_found() -> None:
    tasks = [
        ScriptedTask(str(n), f"The tests of boltons fail since yesterday: case {n} is wrong.\n", "")
        for n in range(3000)
    ]
    tasks += [
        ScriptedTask("short", "Fix the bug", ""),
        ScriptedTask("long", "Fix the bug in the parser, please", ""),
    ]
    index = TaskIndex(tasks)

    def task_id(text: str) -> str | None:
        task = index.find(text)
        return task and task.instance_id

    assert task_id("<context>\nThe tests of boltons fail since yesterday: case 1234 is wrong.\n\nBye") == "1234"
    assert task_id("Hello. Fix the bug in the parser, please!") == "long"
    assert task_id("Fix the bug in the lexer") == "short"
    assert task_id("Fix the bu") is None
    assert task_id("") is None


def test_the_latest_task_of_a_conversation_is_chosen(tmp_path: Path) -> None:
    before = {"a.py": b"a\n"}
    write(tmp_path, before)
    gold = diff(before, {"a.py": b"b\n"})
    index = TaskIndex([ScriptedTask("1", "First thing to do", gold), ScriptedTask("2", "Second thing to do", "")])
    work(make_policy("oracle", index, {}), tmp_path, prompt="First thing to do. Then: Second thing to do")
    policy = make_policy("oracle", index, {})
    tools = msgspec.convert(tool_definitions(*ALL_TOOLS), list[ModelTool])
    history = [
        ModelMessage("user", "Second thing to do"),
        ModelMessage("assistant", "done"),
        ModelMessage("user", "First thing to do"),
    ]
    assert policy.act(ChatTurn(history, tools)).tool_calls[0].name == "Read"


@pytest.mark.parametrize("name", POLICIES)
def test_requests_without_tools_get_a_short_text(name: str) -> None:
    action = make_policy(name, TaskIndex(()), {}).act(ChatTurn([ModelMessage("user", "Title, please")]))
    assert 0 < len(action.content) < 50 and not action.tool_calls


def test_an_unknown_task_is_reported_without_tool_calls() -> None:
    tools = msgspec.convert(tool_definitions("Bash"), list[ModelTool])
    action = oracle("").act(ChatTurn([ModelMessage("user", "Something else")], tools))
    assert "no task" in action.content and not action.tool_calls


def test_a_requested_summary_contains_the_task_instruction() -> None:
    tools = msgspec.convert(tool_definitions(*ALL_TOOLS), list[ModelTool])
    ask = ModelMessage("user", "Your task is to create a detailed summary of the conversation so far")
    action = oracle("").act(ChatTurn([ModelMessage("user", f"Do this: {INSTRUCTION}"), ask], tools))
    assert INSTRUCTION in action.content and not action.tool_calls


@pytest.mark.parametrize(
    "patch", ["", "no patch at all", "--- a/x\n+++ b/x\n@@ -1,9 +1,9 @@\n broken\n", "\x00\r\r\n@@"]
)
def test_an_invalid_patch_ends_with_a_message_and_no_change(patch: str, tmp_path: Path) -> None:
    write(tmp_path, {"x": b"x\n"})
    _, messages = work(oracle(patch), tmp_path)
    assert messages[-1]["content"]
    assert read(tmp_path) == {"x": b"x\n"}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("clever", {}, "flaky, idle, oracle, terse, wrong"),
        ("oracle", {"p": "1"}, "it takes no arguments, got 'p'"),
        ("flaky", {"p": "2"}, "from 0 to 1"),
        ("flaky", {"p": "often"}, "expected a number; give one, such as p=0.5"),
        ("flaky", {"seed": "nan"}, "expected a whole number"),
    ],
)
def test_invalid_policies_and_arguments_are_config_errors(
    name: str, arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name, TaskIndex(()), arguments)


def test_an_invalid_task_file_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"instance_id": "a", "instruction": "b", "gold_patch": ""}\n\n{"instance_id": 3}\n')
    with pytest.raises(TaskError, match=r"tasks\.jsonl, line 3: .*instance_id"):
        read_tasks(path)
    with pytest.raises(TaskError, match=r"absent\.jsonl.*No such file"):
        read_tasks(tmp_path / "absent.jsonl")


def test_tasks_with_the_same_instruction_and_different_patches_are_refused() -> None:
    with pytest.raises(TaskError, match="one and two have the same instruction"):
        TaskIndex([ScriptedTask("one", "Mend it.", "a"), ScriptedTask("two", " Mend it.\n", "b")])
    TaskIndex([ScriptedTask("one", "Mend it.", "a"), ScriptedTask("two", "Mend it.", "a")])
