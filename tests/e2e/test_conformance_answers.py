"""Claude Code and every shape of answer: through the gateway as against the server it was made for."""

from __future__ import annotations

import json

import pytest

from understudy.trajectory.samples import merge
from understudy.trajectory.tree import Trajectory

from fakes.turns import Tool, Turn, bash, say, tool
from support.cli import CHAT_WAYS, MODEL, WAYS, CliRun, Rig, in_ways, red_square
from support.conformance import Behaviour, Check, play

pytestmark = pytest.mark.e2e

DONE = say("Done.")


def one_line(_: Rig, run: CliRun) -> None:
    """Each call follows the one before, none was made twice."""
    assert [node.parent for node in run.nodes] == [None, *run.nodes[:-1]]
    assert not any(node.superseded for node in run.nodes)
    assert set(run.statuses) == {"ok"}


def one_segment(rig: Rig, run: CliRun) -> None:
    """One line of calls, and one sequence of tokens where the server tells them."""
    one_line(rig, run)
    if rig.way.wire == "chat":
        assert merge(Trajectory(tuple(run.nodes))).reasons == {"first call": 1}


def told(*expected: str) -> Check:
    """The tool results that the model was given hold these texts, in this order."""

    def check(_: Rig, run: CliRun) -> None:
        results = run.tool_results()
        assert len(results) == len(expected), results
        for text, result in zip(expected, results, strict=True):
            assert text in result

    return check


def untouched(name: str) -> Check:
    """A tool call that was not whole did nothing."""

    def check(rig: Rig, _: CliRun) -> None:
        assert not (rig.work / name).exists()

    return check


def given_back(*arguments: str) -> Check:
    """The model was given its own argument strings back."""

    def check(_: Rig, run: CliRun) -> None:
        calls = [call for message in run.model_requests[-1]["messages"] for call in message.get("tool_calls", [])]
        assert [call["function"]["arguments"] for call in calls] == list(arguments)

    return check


def an_empty_answer_is_nudged(_: Rig, run: CliRun) -> None:
    """Both answers are kept, and the second is no retry of the first: it answers to a nudge, no turn before it."""
    assert run.statuses == ["ok", "ok"]
    first, second = run.nodes
    assert (first.superseded, second.superseded) == (False, False)
    assert second.origin == "first call"


def image_seen(_: Rig, run: CliRun) -> None:
    assert "iVBORw0KGgo" in json.dumps(run.model_requests[-1]["messages"][-1])


def ends_as_refused(_: Rig, run: CliRun) -> None:
    assert run.statuses == ["ok"]
    assert run.result["is_error"] is True


LONG = "word " * 12_000
ODD = '{"description":"d\\u00e9j\\u00e0",  "timeout":5000.0, "command":"echo \\u003c\\/b\\u003e"}'
EXTRA = '{"command":"echo x","extra_key":1,"description":"d"}'
ODD_READ = '{"file_path":"a.py","limit":"5","offset":1e0}'

EVERYWHERE = [
    Behaviour(name="plain", script=[DONE], check=one_segment, like="01_plain"),
    Behaviour(
        name="parallel tools, one failing",
        script=[
            Turn(
                thinking="I should look at both files.",
                text="Looking.",
                tools=[
                    tool("Read", file_path="a.py"),
                    bash("cat b.txt; echo err >&2; exit 3"),
                    bash("ls"),
                ],
            ),
            say("Again.", tool("Read", file_path="/nonexistent/file")),
            DONE,
        ],
        files={"a.py": "x = 1\n", "b.txt": "bee\n"},
        check=(one_segment, told("x = 1", "Exit code 3", "a.py", "File does not exist")),
        like="02_parallel_tools",
    ),
    Behaviour(
        name="cut by max_tokens, then in a tool call",
        script=[
            say("truncated answ", stop="length"),
            Turn(
                text="more",
                tools=[Tool(name="Bash", arguments='{"command": "touch cut", "descr')],
                stop="length",
            ),
            DONE,
        ],
        check=(one_line, untouched("cut")),
        like="05b_max_tokens",
    ),
    Behaviour(
        name="tool call with the stop reason of an end",
        script=[say("x", bash("echo hi"), stop="end"), DONE],
        check=(one_segment, told("hi")),
        like="08_stop_mismatch",
    ),
    Behaviour(
        name="empty answer",
        script=[say(""), DONE],
        check=an_empty_answer_is_nudged,
        like="08_sse_no_content",
    ),
    Behaviour(
        name="blank text",
        script=[
            say("\n\n", bash("echo a")),
            say("", bash("echo b")),
            say("  lead and trail \n\n", bash("echo c")),
            say("Done.\n"),
        ],
        result="Done.\n",
        like="08_whitespace_text",
        check=(one_line, told("a", "b", "c")),
    ),
    Behaviour(
        name="thinking without a signature",
        script=[
            Turn(thinking="secret plan", text="a", tools=[bash("echo a")]),
            Turn(thinking="more ", tools=[bash("echo b")]),
            DONE,
        ],
        check=(one_segment, told("a", "b")),
        like="08_thinking_nosig",
    ),
    Behaviour(
        name="unknown tool",
        script=[say("", tool("Nope", a=1)), DONE],
        check=(one_segment, told("No such tool available: Nope")),
    ),
    Behaviour(
        name="emoji, line separators, half of a surrogate pair",
        script=[
            say("héllo 🦉 \u2028", bash("printf '🦉é'")),
            say("", Tool(name="Bash", arguments='{"command":"printf half","description":"\\ud83d"}')),
            say("Done. 🦉"),
        ],
        result="Done. 🦉",
        check=(one_line, told("🦉é", "half")),
    ),
    Behaviour(
        name="refusal",
        script=[say("no", stop="refusal")],
        result="API Error: Claude Code is unable to respond",
        code=1,
        check=ends_as_refused,
    ),
    Behaviour(
        name="image that a tool read",
        script=[say("", tool("Read", file_path="p.png")), DONE],
        files={"p.png": red_square()},
        check=(one_segment, image_seen),
    ),
]

BY_CHAT = [
    Behaviour(
        name="long text, long output",
        script=[say(LONG, bash("seq 1 20000")), DONE],
        check=(one_segment, told("Output too large")),
        like="05_long_output",
    ),
    Behaviour(
        name="the same tool id again and again",
        script=[
            say("", bash("sleep 0.3; echo a", "call_1"), bash("echo b", "call_1")),
            say("", bash("echo c", "call_1")),
            DONE,
        ],
        check=(one_segment, told("a", "b", "c")),
    ),
    Behaviour(
        name="tool ids that Anthropic would not give",
        script=[say("", bash("echo a", "functions.Bash:0")), say("", bash("echo b", "id with spaces/é")), DONE],
        check=(one_segment, told("a", "b")),
    ),
    Behaviour(
        name="arguments that are no object",
        script=[
            say("", Tool(name="Bash", arguments='{"command": "echo hi')),
            say("", Tool(name="Bash", arguments="[1]")),
            say("", Tool(name="Bash", arguments="")),
            DONE,
        ],
        check=(one_line, told(*["<tool_use_error>InputValidationError"] * 3)),
    ),
    Behaviour(
        name="arguments that the CLI rewrites",
        script=[
            say("", Tool(name="Bash", arguments=ODD)),
            say(
                "",
                Tool(name="Bash", arguments=EXTRA),
                Tool(name="Read", arguments=ODD_READ),
            ),
            DONE,
        ],
        files={"a.py": "x = 1\n"},
        check=(one_segment, given_back(ODD, EXTRA, ODD_READ)),
        like="08_input_normalise",
    ),
    Behaviour(
        name="twenty-five turns",
        script=[*(Turn(thinking=f"k{n}", text=f"step {n}", tools=[bash(f"echo {n}")]) for n in range(25)), DONE],
        check=one_segment,
        like="26b_long_horizon_qwen",
    ),
]


@pytest.mark.parametrize(
    ("behaviour", "rig"),
    in_ways(EVERYWHERE, WAYS, "parallel tools, one failing", "thinking without a signature", "empty answer"),
    indirect=["rig"],
)
async def test_an_answer(rig: Rig, behaviour: Behaviour) -> None:
    run = await play(rig, behaviour)
    if rig.way.wire == "messages":
        assert [body | {"model": MODEL} for body in run.model_requests] == run.requests, (
            "only the model's name may change"
        )
        assert {call.backend for call in run.calls} == {"anthropic"}


@pytest.mark.parametrize(
    ("behaviour", "rig"), in_ways(BY_CHAT, CHAT_WAYS, "arguments that the CLI rewrites"), indirect=["rig"]
)
async def test_an_answer_of_a_chat_server(rig: Rig, behaviour: Behaviour) -> None:
    await play(rig, behaviour)


@pytest.mark.parametrize("rig", WAYS, indirect=True, ids=str)
async def test_an_edited_file_leaves_one_line_of_calls(rig: Rig) -> None:
    path = str(rig.work / "a.py")
    run = await play(
        rig,
        Behaviour(
            name="edit",
            script=[
                Turn(thinking="think 1", tools=[tool("Glob", pattern="**/*.py")]),
                Turn(thinking="think 2", tools=[tool("Grep", pattern="def ", output_mode="content")]),
                Turn(thinking="think 3", text="Reading.", tools=[tool("Read", file_path=path)]),
                Turn(
                    thinking="think 4",
                    tools=[tool("Edit", new_string="a + b", old_string="a - b", file_path=path)],
                ),
                Turn(
                    thinking="think 5",
                    tools=[tool("Write", file_path=f"{path}.txt", content="x\n")],
                ),
                Turn(thinking="think 6", tools=[bash("python3 -c 'import a; print(a.add(1, 2))'")]),
                say("", tool("TaskCreate", subject="check", description="check it", activeForm="checking")),
                say("", tool("TaskUpdate", taskId="1", status="completed")),
                DONE,
            ],
            files={"a.py": "def add(a, b):\n    return a - b\n"},
            check=one_segment,
        ),
    )
    assert "a + b" in (rig.work / "a.py").read_text()
    assert '"replace_all":false' in run.calls[-1].request.decode()
