"""What is found out of a turn: by the calls that it made, their results, and what the user did next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from understudy.ingest.trace import (
    Message,
    PlainRenderer,
    Trace,
    TraceNode,
    TraceParent,
    TraceTurn,
    TurnSignals,
    tool_call,
)

from support.claude_log import Log, read
from support.ingest import DATA
from support.ingest import read as read_logs
from support.signals import annotated, signals, trace_of, turns

REFUSED = (
    "The user doesn't want to proceed with this tool use. The tool use was rejected (eg. if it was a file edit, "
    "the new_string was NOT written to the file). STOP what you are doing and wait for the user to tell you how "
    "to proceed."
)


def of(log: Log) -> dict[str, TurnSignals]:
    (trace,) = read(log)
    return dict(zip((turn.message_id for turn in trace.turns), annotated(trace), strict=True))


def error(log: Log, call: str, text: str) -> None:
    log.user([{"type": "tool_result", "tool_use_id": call, "content": text, "is_error": True}])


# --- Claude Code ------------------------------------------------------------------------------------------------


def test_a_denied_call_and_the_following_interruption_count_for_that_turn() -> None:
    log = Log()
    log.user("go")
    log.assistant("msg_000000000001", "first", ("t1", "Bash", {"command": "rm -rf x"}))
    error(log, "t1", REFUSED)
    log.user([{"type": "text", "text": "[Request interrupted by user for tool use]"}])
    log.user("look first")
    log.assistant("msg_000000000002", ("t2", "Read"))
    log.result("t2", "text")
    log.assistant("msg_000000000003", "I see.")
    first, second, third = of(log).values()
    assert (first.denied, first.tool_errors, first.interrupted) == (1, 0, True)
    assert (second.denied, second.tool_errors, second.interrupted) == (0, 0, False)
    assert third == TurnSignals(edits_survived=0)


@pytest.mark.parametrize(
    ("text", "denied", "interrupted", "failed"),
    [
        (REFUSED, 1, False, 0),
        ("Claude requested permissions to use Bash, but you haven't granted it yet.", 1, False, 0),
        ("Claude requested permissions to write to /a/b.txt, but you haven't granted it yet.", 1, False, 0),
        ("This command requires approval", 1, False, 0),
        (
            "This Bash command contains multiple operations. The following part requires approval: cat a",
            1,
            False,
            0,
        ),
        ("Permission to use WebFetch has been auto-denied in dontAsk mode.", 1, False, 0),
        ("Permission for this action has been denied. Reason: no", 1, False, 0),
        ("Exit plan mode?", 1, False, 0),
        ("The user doesn't want to take this action right now. STOP what you are doing.", 0, True, 0),
        ("Exit code 137\n[Request interrupted by user for tool use]", 0, True, 0),
        ("[Request interrupted by user for tool use]", 0, True, 0),
        (
            f"{REFUSED} Correction to the text above: this call was stopped while running, not refused before.",
            0,
            True,
            0,
        ),
        ("Exit code 1\nboom", 0, False, 1),
        ("<tool_use_error>File has not been read yet.</tool_use_error>", 0, False, 1),
        ("bash: /root/x: Permission denied", 0, False, 1),
    ],
)
def test_each_failed_call_counts_once_as_denied_interrupted_or_error(
    text: str, denied: int, interrupted: bool, failed: int
) -> None:
    log = Log()
    log.user("go")
    log.assistant("msg_000000000001", ("t1", "Bash", {"command": "x"}))
    error(log, "t1", text)
    (one,) = of(log).values()
    assert (one.tool_calls, one.denied, one.interrupted, one.tool_errors) == (1, denied, interrupted, failed)


def test_a_successful_result_that_quotes_a_denial_counts_as_no_denial() -> None:
    log = Log()
    log.user("go")
    log.assistant("msg_000000000001", ("t1", "Bash", {"command": "cat session.txt"}))
    log.result("t1", f"{REFUSED}\nExit code 1\n[Request interrupted by user]")
    assert of(log)["msg_000000000001"] == TurnSignals(tool_calls=1, edits_survived=0)


def test_results_of_parallel_calls_are_each_their_own() -> None:
    log = Log()
    log.user("go")
    log.assistant(
        "msg_000000000001",
        ("t1", "Bash", {"command": "pytest -q"}),
        ("t2", "Edit", {"file_path": "a.py", "old_string": "x", "new_string": "y"}),
        ("t3", "Bash", {"command": "git commit -am x"}),
    )
    log.result("t2", "The file a.py has been updated.")
    log.result("t3", "[main 1a2b3c4] x\n 1 file changed")
    error(log, "t1", "Exit code 1\n1 failed, 2 passed in 0.1s")
    one = of(log)["msg_000000000001"]
    assert one == TurnSignals(tool_calls=3, tool_errors=1, tests="failed", edits=1, edits_survived=1, commits=1)


def test_a_rewound_edit_did_not_survive() -> None:
    log = Log()
    prompt = log.user("go")
    log.assistant("msg_000000000001", ("t1", "Write", {"file_path": "a.py", "content": "a"}))
    log.result("t1", "File created successfully at: a.py")
    log.user("again, differently", parent=prompt)
    log.assistant("msg_000000000002", ("t2", "Write", {"file_path": "b.py", "content": "b"}))
    log.result("t2", "File created successfully at: b.py")
    first, second = of(log).values()
    assert (first.edits, first.edits_survived) == (1, 0) and (second.edits, second.edits_survived) == (1, 1)


def test_the_next_user_message_is_feedback_on_the_last_turn_only() -> None:
    log = Log()
    log.user("thanks, go")
    log.assistant("msg_000000000001", ("t1", "Read"))
    log.result("t1", "text")
    log.assistant("msg_000000000002", "done")
    log.user("No, that's wrong. Use the other file.")
    log.assistant("msg_000000000003", "done again")
    log.user("<command-name>/cost</command-name>")
    log.user("perfect, now commit")
    log.assistant("msg_000000000004", "ok")
    log.user("push it")
    assert [one.feedback for one in of(log).values()] == [None, "negative", "positive", None]


def test_a_refusal_with_words_is_a_correction() -> None:
    log = Log()
    log.user("go")
    log.assistant("msg_000000000001", ("t1", "Bash", {"command": "npm i"}))
    error(
        log,
        "t1",
        "The user doesn't want to proceed with this tool use. To tell you how to proceed, the user said:\nyarn",
    )
    one = of(log)["msg_000000000001"]
    assert (one.denied, one.feedback) == (1, "negative")


def test_a_subagent_gets_no_feedback() -> None:
    messages: list[Message] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "no, that's wrong"},
    ]
    assert annotated(trace_of(messages))[0].feedback == "negative"
    trace = trace_of(messages)
    trace.parent = TraceParent("s")
    assert annotated(trace)[0].feedback is None
    assert annotated(trace_of(messages, "swe-agent"))[0].feedback is None


# --- other programs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("codex", "exec command rejected by user", "denied"),
        ("codex", "patch rejected by user", "denied"),
        ("codex", "aborted by user after 3.2s", "interrupted"),
        ("codex", "Exit code: 2\nWall time: 0.1 seconds\nOutput:\nx", "failed"),
        ("codex", "Exit code: 0\nWall time: 0.1 seconds\nOutput:\nx", "fine"),
        ("gemini", "[Operation Cancelled] Reason: User did not allow tool call", "denied"),
        ("gemini", "[Operation Cancelled] Reason: User cancelled the operation", "interrupted"),
        ("gemini", "Command: x\nOutput: y\nExit Code: 1", "failed"),
        ("cline", "The user denied this operation.", "denied"),
        ("cline", "The user denied this operation and provided the following feedback:\n<feedback>x", "denied"),
        ("cline", "The tool execution failed with the following error:\n<error>x", "failed"),
        ("openhands", "ls\n[Last action has been rejected by the user]", "denied"),
        ("openhands", "x\n[Error occurred in processing last action]", "failed"),
        ("openhands", "x\n[Command finished with exit code 0]", "fine"),
        ("openhands-v1", "Action rejected: not now", "denied"),
        ("swe-smith", "ERROR: No replacement was performed", "failed"),
        ("claude-text", "User rejected update to a.py", "denied"),
        ("claude-text", "Interrupted by user", "interrupted"),
    ],
)
def test_call_outcomes_are_recognised_by_the_wording_of_each_program(
    format: str, text: str, expected: str
) -> None:
    (one,) = signals(("shell", {"command": "x"}, text), format=format)
    outcomes = {"denied": one.denied, "interrupted": one.interrupted, "failed": one.tool_errors}
    assert [name for name, there in outcomes.items() if there] == ([] if expected == "fine" else [expected])


def test_an_interruption_of_codex_and_of_cline() -> None:
    messages: list[Message] = [
        {"role": "assistant", "content": "I"},
        {"role": "user", "content": "<turn_aborted>\nx"},
    ]
    assert annotated(trace_of(messages))[0].interrupted
    cline_messages: list[Message] = [{"role": "assistant", "content": "I will\n\n[Response interrupted by user]"}]
    assert annotated(trace_of(cline_messages, "cline"))[0].interrupted


def test_calls_written_as_text_are_counted_with_their_results() -> None:
    def one(format: str, text: str, after: str) -> TurnSignals:
        messages: list[Message] = [{"role": "assistant", "content": text}, {"role": "user", "content": after}]
        return annotated(trace_of(messages, format))[0]

    mini_swe = one(
        "mini-swe-agent", "Run them.\n\n```bash\npytest -q\n```", "<returncode>1</returncode>\n1 failed in 0.1s"
    )
    assert (mini_swe.tool_calls, mini_swe.tool_errors, mini_swe.tests) == (1, 1, "failed")
    xml = "<function=bash>\n<parameter=command>pytest</parameter>\n</function>"
    assert one("swe-smith", xml, "OBSERVATION:\n2 passed in 0.1s").tests == "passed"
    edit = "<function=str_replace_editor><parameter=command>create</parameter><parameter=path>/a</parameter>"
    made = one("swe-smith", f"{edit}<parameter=file_text>x</parameter></function>", "OBSERVATION:\nFile created")
    assert (made.edits, made.edits_survived) == (1, 1)
    cline = "<write_to_file>\n<path>a.py</path>\n<content>\nx = 1\n</content>\n</write_to_file>"
    assert one("cline", cline, "[write_to_file for 'a.py'] Result:\nThe content was saved").edits == 1
    denied = one(
        "cline",
        "<execute_command><command>ls</command></execute_command>",
        "[x] Result:\nThe user denied this operation.",
    )
    assert denied.denied == 1
    # Elsewhere a block of code is no call.
    assert one("claude-code", "```bash\npytest\n```", "2 passed in 0.1s") == TurnSignals(edits_survived=0)


@pytest.mark.parametrize(
    ("command", "text", "expected"),
    [
        ("git commit -m x", "[main 1a2b3c4] x", 1),
        ('git add -A && git commit -m "$(cat <<\'EOF\'\na "b" c\n\nEOF\n)"', "[main (root-commit) 1a2b3c4] a", 1),
        ("git -C /x -c user.name=a commit --amend --no-edit", "[fix/a-b 1a2b3c4d] x\n Date: now", 1),
        ("git commit -m x | tail -1", "[main 1a2b3c4] x", 1),
        ("git commit -m x; git commit -m y", "[main 1a2b3c4] x\n[main 2a2b3c4] y", 2),
        ("git commit -qm x", "Exit code: 0\nOutput:\n", 0),
        ("git commit -q -m x", "Exit code: 0\nOutput:\n", 1),
        ("git commit -q -m x", "Exit code: 1\nOutput:\n", 0),
        ("git commit -m x", "On branch main\nnothing to commit, working tree clean", 0),
        ("git commit --dry-run", "[main 1a2b3c4] x", 0),
        ("git log --grep commit", "[main 1a2b3c4] x", 0),
        ("echo git commit", "[main 1a2b3c4] x", 0),
        ("git commit -m x", "Exit code: 1\nhook failed", 0),
    ],
)
def test_commits_that_were_made(command: str, text: str, expected: int) -> None:
    (one,) = signals(("shell", {"command": command}, text))
    assert one.commits == expected


def test_a_result_is_found_by_its_id_also_on_another_branch() -> None:
    nodes = [
        TraceNode(-1, {"role": "user", "content": "go"}),
        TraceNode(
            0,
            {"role": "assistant", "content": None, "tool_calls": [tool_call("c1", "Bash", {"command": "pytest"})]},
        ),
        TraceNode(0, {"role": "user", "content": "other"}),
        TraceNode(2, {"role": "assistant", "content": "hm"}),
        TraceNode(3, {"role": "tool", "tool_call_id": "c1", "content": "2 passed in 0.1s"}),
    ]
    trace_turns = [
        TraceTurn(message_id="a", context=0, action=(1,)),
        TraceTurn(message_id="b", context=2, action=(3,)),
    ]
    trace = Trace(
        trace_id="t",
        session_id="t",
        format="codex",
        source="x",
        renderer=PlainRenderer(),
        nodes=nodes,
        turns=trace_turns,
    )
    assert [one.tests for one in annotated(trace)] == ["passed", None]


def test_ids_that_are_used_again_do_not_mix_results_up() -> None:
    trace = turns(
        ("Bash", {"command": "pytest"}, "2 passed in 0.1s"), ("Bash", {"command": "pytest"}, "1 failed in 0.1s")
    )
    for node in trace.nodes:
        if node.body["role"] == "tool":
            node.body["tool_call_id"] = "same"
        for call in node.body.get("tool_calls", ()):
            call["id"] = "same"
    assert [one.tests for one in annotated(trace)] == ["passed", "failed"]


def test_the_logs_of_all_programs_have_signals() -> None:
    for path in sorted(DATA.iterdir()):
        for trace in read_logs(path):
            assert len(annotated(trace)) == len(trace.turns)


# --- any trace --------------------------------------------------------------------------------------------------

_WORDS = some.sampled_from(
    (
        "pytest -q && git commit -m x",
        "sed -i s/a/b/ a.py; rm a.py",
        "cat <<EOF > a.py\nx",
        "1 failed, 2 passed in 0.1s",
        "[main 1a2b3c4] x",
        "no, that's wrong",
        "thanks!",
        "[Request interrupted by user]",
        "Exit code 1",
        REFUSED,
        "<function=bash><parameter=command>pytest",
        "```bash\npytest\n```",
        "*** Begin Patch\n*** Update File: a.py\n-x\n+y",
    )
)
_TEXT = some.one_of(some.text(max_size=40), _WORDS)
_NAMES = some.sampled_from(
    ("Bash", "Edit", "Write", "MultiEdit", "apply_patch", "shell", "replace_in_file", "", "é")
)
_VALUES: Any = some.recursive(
    some.one_of(some.none(), some.booleans(), some.integers(-5, 5), _TEXT),
    lambda inner: some.one_of(some.lists(inner, max_size=3), some.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=5,
)
_KEYS = some.sampled_from(
    ("command", "cmd", "file_path", "path", "old_string", "new_string", "content", "edits", "input", "diff")
)
_CALLS = some.builds(
    tool_call,
    some.sampled_from(("a", "b", "c")),
    _NAMES,
    some.one_of(_TEXT, some.dictionaries(_KEYS, _VALUES, max_size=4)),
)
_CONTENT = some.one_of(
    some.none(), _TEXT, some.lists(some.fixed_dictionaries({"type": some.just("text"), "text": _TEXT}), max_size=2)
)
_MESSAGES = some.one_of(
    some.fixed_dictionaries({"role": some.just("user"), "content": _CONTENT}),
    some.fixed_dictionaries(
        {"role": some.just("tool"), "content": _CONTENT, "tool_call_id": some.sampled_from(("a", "b", "z"))},
        optional={"is_error": some.just(True)},
    ),
    some.fixed_dictionaries(
        {"role": some.just("assistant"), "content": _CONTENT},
        optional={"tool_calls": some.lists(_CALLS, max_size=3)},
    ),
)
_FORMATS = some.sampled_from(("claude-code", "codex", "cline", "swe-smith", "mini-swe-agent", "unheard-of"))


@given(some.lists(some.tuples(some.integers(-2, 12), _MESSAGES), max_size=12), _FORMATS, some.data())
def test_any_trace_can_be_annotated_with_consistent_signals(
    nodes: list[tuple[int, Message]], format: str, data: some.DataObject
) -> None:
    trace = Trace(trace_id="t", session_id="t", format=format, source="x", renderer=PlainRenderer())
    trace.nodes = [TraceNode(parent, body) for parent, body in nodes]
    for at, (parent, body) in enumerate(nodes):
        if body["role"] == "assistant":
            branch = data.draw(some.sampled_from(("active", "branch")))
            trace.turns.append(TraceTurn(message_id=f"m{at}", context=parent, action=(at,), branch=branch))
    for turn, one in zip(trace.turns, annotated(trace), strict=True):
        assert 0 <= one.tool_errors + one.denied <= one.tool_calls
        assert one.edits >= 0 and one.commits >= 0
        assert one.edits_survived is None or 0 <= one.edits_survived <= one.edits
        assert turn.branch == "active" or one.edits_survived == 0
