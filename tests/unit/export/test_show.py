"""`understudy show`: a readable story, and nothing in it that steers the terminal."""

from __future__ import annotations

import io
import json
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from understudy.cli.commands.show import newest_run
from understudy.cli.transcript import RolloutRecord, TranscriptPrinter
from understudy.errors import ConfigError
from understudy.store import Store
from understudy.trajectory.tree import build
from understudy.types import AgentIdentity, Attempt, ErrorInfo, Finding, PolicySpan, Rollout, Usage, Verdict
from understudy.util.text import visible

from support import calc_task, understudy
from support.trajectory import Session, assistant, text, tool_result, tool_use, user

HOSTILE = "\x1b]0;pwned\x07\x1b[2J[bold red]x[/] :smile: \x9b31m \u202egnp.exe \r\x7f"


def conversation(attempt_id: str = "a1") -> Session:
    session = Session(attempt_id)
    ask = user(text(HOSTILE))
    first = [text("I look."), tool_use("t1", "Agent", prompt="Find it.", **{HOSTILE: HOSTILE})]
    session.ask([ask], None, status="error")
    session.ask([ask], first, prompt=[1], completion=[2])
    session.ask([user(text("Find it."))], [text("Found.")], agent="sub-1")
    history = [ask, assistant(*first), user({**tool_result("t1", HOSTILE), "is_error": True})]
    session.ask(history, [{"type": "thinking", "thinking": HOSTILE}, text("long line\n" * 40 + HOSTILE)])
    return session


def record() -> RolloutRecord:
    tests = {"test_a.py::test_good": "passed", f"test_a.py::test_{HOSTILE}": "failed"}
    return RolloutRecord(
        rollout=Rollout(
            id="r1",
            run_id="run1",
            task_id="calc-0",
            sample_index=0,
            agent=AgentIdentity("claude-code", "2.1.197"),
            status="succeeded",
            created_at=1,
            updated_at=2,
            error=ErrorInfo("sandbox", "SandboxError", HOSTILE),
        ),
        attempts=[Attempt(id="a1", rollout_id="r1", number=1, status="timeout", started_at=1, heartbeat_at=1)],
        task=calc_task(),
        attempt=None,
        calls=conversation().calls,
        patch=f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old\n+{HOSTILE}\n".encode() + b"\xff\n",
        verdict=Verdict(reward=0.0, reason=HOSTILE, tests=tests),  # pyright: ignore[reportArgumentType]
    )


def shown(*, full: bool = False, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=color, color_system="standard" if color else None, width=200, markup=False
    )
    rollout_record = record()
    TranscriptPrinter(console, full=full).show(rollout_record, build(rollout_record.calls))
    return out.getvalue()


def test_a_rollout_is_printed_in_chronological_order():
    output = shown()
    parts = ["calc-0", "reward", "instruction", "branch main", "I look.", "→ Agent", "← error", "patch", "+++ b/x"]
    parts += ["tests", "failed   test_a.py", "passed   test_a.py::test_good", "errors", "sandbox error"]
    at = [output.index(part) for part in parts]
    assert at == sorted(at)
    assert "branch sub-1, started by call 1" in output
    assert "superseded by a retry" in output
    assert "backend error, BackendError: the model server is down" in output


def test_tabs_and_blank_lines_of_a_message_are_preserved():
    out = io.StringIO()
    session = Session()
    session.ask([user(text("1\tdef f():\n2\n\n3\t    return 1"))], [text("Hm.")])
    rollout_record = msgspec.structs.replace(record(), calls=session.calls)
    TranscriptPrinter(Console(file=out, width=200), full=False).show(rollout_record, build(rollout_record.calls))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    at = lines.index("  1       def f():")
    assert lines[at + 1 : at + 4] == ["  2", "", "  3           return 1"]


def test_long_values_are_shortened_unless_full():
    assert "more characters (--full shows them)" in shown()
    assert shown().count("long line") == 12
    assert shown(full=True).count("long line") == 40


def test_control_characters_and_markup_are_escaped_in_the_output():
    output = shown(full=True)
    assert not {character for character in output if character != "\n" and not character.isprintable()}
    assert "[bold red]x[/] :smile:" in output
    assert "␛]0;pwned␇␛[2J" in output
    assert "\\u202egnp.exe" in output


def test_on_a_terminal_the_only_escapes_are_colours_of_our_own():
    output = shown(full=True, color=True)
    assert "\x1b[32m" in output
    escapes = {part.split("m")[0] for part in output.split("\x1b")[1:]}
    assert all(part.startswith("[") and set(part[1:]) <= set("0123456789;") for part in escapes)


@given(st.text())
def test_visible_text_is_printable_but_for_line_ends_and_tabs(raw: str):
    assert not set(visible(raw)) & {*map(chr, range(9)), *map(chr, range(11, 32)), *map(chr, range(127, 160))}
    assert visible(visible(raw)) == visible(raw)


def test_the_newest_run_is_found(tmp_path: Path):
    with pytest.raises(ConfigError, match="name the directory of a run"):
        newest_run(tmp_path)
    for number, name in enumerate(("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "store.db").touch()
        os.utime(tmp_path / name / "store.db", (number, number))
    assert newest_run(tmp_path) == tmp_path / "a"


def wait(future: Future[Any]) -> Any:
    return future.result(30)


def test_the_command_lists_and_shows(tmp_path: Path):
    directory = tmp_path / "runs" / "x"
    with Store.open(directory) as store:
        wait(store.runs.create("run1", {"backend": "embedded"}))
        wait(store.runs.add_tasks("run1", [calc_task()]))
        wait(store.runs.create_rollouts("run1", [("abc1", "calc-0", 0), ("abd2", "calc-0", 1)]))
        attempt = wait(store.runs.start_attempt("abc1"))
        wait(store.runs.mark_running(attempt.id))
        for call in conversation(attempt.id).calls:
            wait(store.calls.append(call))
        verdict = Verdict(reward=1.0, reason="resolved", tests={"t.py::test_x": "passed"})
        findings = [Finding(kind="session-log", message="it differs", call_id=f"{attempt.id}-1")]
        ended: Any = {"patch": b"+new\n", "verdict": verdict, "findings": findings}
        wait(store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", **ended))

    def show(*arguments: str, code: int = 0) -> str:
        done = understudy("show", *arguments, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    listing = {rollout["id"]: rollout for rollout in json.loads(show("--json"))["rollouts"]}
    assert (listing["abc1"]["reward"], listing["abc1"]["attempts"]) == (1.0, 1)
    assert (listing["abd2"]["reward"], listing["abd2"]["status"]) == (None, "queuing")
    assert "abd2" in show()
    output = show("abc", "--dir", str(directory))
    assert all(part in output for part in ("calc-0", "I look.", "+new", "t.py::test_x", "resolved"))
    assert "queuing" in show("abd2")
    document = json.loads(show("abc1", "--json"))
    assert list(document["branches"]) == ["main.1", "main", "sub-1"]
    assert [(b["name"], b["role"], b["above"]) for b in document["outline"]] == [
        ("main.1", "main", None),
        ("main", "main", None),
        ("sub-1", "subagent", "main"),
    ]
    assert document["figures"]["calls"] == 4
    assert document["attempt"]["findings"] == [
        {"kind": "session-log", "message": "it differs", "call_id": f"{attempt.id}-1"}
    ]
    assert json.loads(show(attempt.id, "--json"))["attempt"]["id"] == attempt.id
    assert "session-log: it differs (call 1)" in output
    assert document["verdict"]["reward"] == 1.0
    show("ab", code=2)
    show("--dir", str(tmp_path / "nowhere"), code=2)


def test_clients_of_a_gateway_are_listed_and_shown(tmp_path: Path):
    with Store.open(tmp_path) as store:
        client = wait(store.keys.add_client("codex"))
        for call in conversation(client.id).calls:
            wait(store.calls.append(msgspec.structs.replace(call, cost_usd=0.25)))

    def show(*arguments: str) -> str:
        done = understudy("show", *arguments, "--dir", tmp_path)
        done.check_returncode()
        return done.stdout

    (listed,) = json.loads(show("--json"))["clients"]
    assert (listed["name"], listed["calls"], listed["cost_usd"]) == ("codex", 4, 1.0)
    assert "codex" in show() and "$1.0000" in show()
    for name in ("codex", client.id):
        output = show(name)
        assert all(part in output for part in ("client   codex", "$1.0000", "branch sub-1", "I look."))
    document = json.loads(show("codex", "--json"))
    assert (document["rollout"], document["instruction"], document["figures"]["priced"]) == (None, None, 4)


def test_a_summary_line_for_each_branch_and_totals_precede_the_transcript():
    session = conversation()
    main = session.calls[1]
    exact = {"mode": "exact", "prompt": "root", "reason": "first call", "mismatch": None}
    anew = {"mode": "exact", "prompt": "rendered anew", "reason": HOSTILE, "mismatch": "tool arguments"}
    session.calls[1] = msgspec.structs.replace(
        main,
        usage=Usage(prompt_tokens=1000, completion_tokens=10, cached_tokens=900),
        policy_version="v2",
        policy_spans=(PolicySpan("v1", 0, 4), PolicySpan("v2", 4, 10)),
        cost_usd=0.5,
        audit=exact,
    )
    session.calls[3] = msgspec.structs.replace(session.calls[3], audit=anew, policy_version="v2")
    out = io.StringIO()
    rollout_record = msgspec.structs.replace(record(), calls=session.calls)
    TranscriptPrinter(Console(file=out, width=200, markup=False), full=False).show(
        rollout_record, build(rollout_record.calls)
    )
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    for line in (
        "calls    4   1,000 prompt tokens, 10 completion tokens, 900 cached",
        "cost     $0.5000   of 1 calls whose price is known",
        "policy   v1 (1), v2 (2)",
        "segments 1 retry, 2 no token ids",
        "audit    1 tool arguments",
        "main      main         2 calls   1,000 + 10 tokens   $0.5000   retry",
        "  sub-1   subagent     1 call   0 + 0 tokens   started by call 1",
        "main.1    main         1 call   1 without an answer   0 + 0 tokens   superseded",
    ):
        assert line in lines, out.getvalue()
    assert any(line.startswith("prompts  1 root, 1 rendered anew   because of 1 first call, 1 ") for line in lines)
    assert not {character for line in lines for character in line if not character.isprintable()}
