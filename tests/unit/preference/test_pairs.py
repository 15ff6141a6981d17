"""Pairs from replays and rollouts, out of a store as the rest of the house fills it."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.cli.app import app
from understudy.errors import ConfigError
from understudy.ingest import trace_store
from understudy.ingest.trace import PlainRenderer, RequestShape, Trace, TraceNode, TraceTurn, state_id, tool_call
from understudy.preference.checks import UNREADABLE, Checks, Limits, Pair, PairCounts, in_turns
from understudy.preference.equivalence import difference_of_actions, without_volatile_parts
from understudy.preference.normalise import WorkingDirectory
from understudy.preference.pairs import replay_pairs
from understudy.preference.proposals import judge_ask_id, judge_name, shown_order
from understudy.preference.rollouts import rollout_pairs
from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.store.asks import AskKind, StoredAsk
from understudy.types import SCHEMA, Call, Integrity, Verdict
from understudy.wire.arguments import UNPARSED_INPUT

from support import calc_task
from support.trajectory import Block, Message, Session, assistant, text, tool_result, tool_use, user

CWD = "/home/me/project"


def wait(future: Future[Any]) -> Any:
    return future.result(30)


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}


def bash(command: str, content: str = "", call_id: str = "c1") -> Message:
    calls = [tool_call(call_id, "Bash", {"command": command, "description": "Run it"})]
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def trace(name: str, *answers: Message, model: str | None = "claude-opus-4-5", ask: str = "look around") -> Trace:
    """A session of one question a turn, on one line."""
    nodes: list[TraceNode] = []
    turns: list[TraceTurn] = []
    for number, answer in enumerate(answers):
        nodes.append(TraceNode(len(nodes) - 1, {"role": "user", "content": f"{ask} ({number})"}))
        context = len(nodes) - 1
        nodes.append(TraceNode(context, answer))
        turns.append(TraceTurn(message_id=f"m{number}", context=context, action=(len(nodes) - 1,), model=model))
        for call in answer.get("tool_calls") or ():
            nodes.append(TraceNode(len(nodes) - 1, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}))
    return Trace(
        trace_id=name,
        session_id=name,
        format="claude-code",
        source="log",
        renderer=PlainRenderer(),
        nodes=nodes,
        turns=turns,
        project=CWD,
        shape=RequestShape("S", [function("Bash"), function("Read")]),
    )


def answered(
    store: Store,
    state: str,
    teacher: str,
    answer: Message,
    *,
    offered: str = "Bash",
    kind: AskKind = "teacher",
    ask_id: str | None = None,
) -> None:
    """An ask that a teacher answered, with the call that the gateway kept of it."""
    client = wait(store.keys.add_client("teachers"))
    number = store.calls.next_sequence(client.id)
    request = {"model": teacher, "messages": [{"role": "user", "content": "x"}], "tools": [function(offered)]}
    call = Call(
        id=f"call{number}",
        attempt_id=client.id,
        sequence=number,
        dialect="openai-chat",
        requested_model=teacher,
        backend=teacher,
        backend_model=teacher,
        request=json.dumps(request).encode(),
        response=json.dumps({"choices": [{"index": 0, "message": answer}]}).encode(),
        status="ok",
        started_at=1.0,
        ended_at=2.0,
        finish_reason="stop",
    )
    wait(store.calls.append(call))
    ask = StoredAsk(
        id=ask_id or f"ask{number}",
        replay_id="r",
        state_id=state,
        kind=kind,
        teacher=teacher,
        model=teacher,
        family=teacher,
        number=0,
        status="answered",
        asked_at=1.0,
        cost_usd=0.25,
        call_id=call.id,
    )
    wait(store.asks.add(ask))


def replayed(store: Store, *traces: Trace, votes: dict[tuple[str, int], dict[str, Message]]) -> None:
    """The traces, with what teachers said of their turns."""
    for each in traces:
        wait(trace_store.store_trace(store.sessions, each))
    wait(store.asks.put_replay("r", {}))
    for (name, turn), answers in votes.items():
        for teacher, answer in answers.items():
            answered(store, state_id(name, f"m{turn}"), teacher, answer)


@pytest.fixture
def store(tmp_path: Path):
    with Store.open(tmp_path / "store") as store:
        yield store


def test_teachers_against_the_student(store: Store):
    agree = {"gpt": bash("git status", "I look."), "qwen": bash("git  status"), "glm": bash("ls")}
    same = {"gpt": bash("ls -la"), "qwen": bash(f"cd {CWD} && ls -la")}
    tie = {"gpt": bash("ls"), "qwen": bash("pwd")}
    replayed(
        store,
        trace("a", bash("rm -rf build"), bash("ls -la", call_id="c2"), bash("pytest", call_id="c3")),
        votes={("a", 0): agree, ("a", 1): same, ("a", 2): tie},
    )
    tally = PairCounts()
    (pair,) = replay_pairs(store, tally=tally)
    assert (tally.compared, tally.pairs) == (3, 1)
    assert tally.left_out == {"the same in substance": 1, "the teachers do not agree": 1}
    assert tally.compared == tally.pairs + tally.left_out.total()
    assert pair.state_id == state_id("a", "m0")
    assert (pair.origin, pair.group, pair.model, pair.family) == ("replay", CWD, "claude-opus-4-5", "claude")
    assert [message["role"] for message in pair.messages] == ["system", "user"]
    assert pair.tools is not None and len(pair.tools) == 2
    assert pair.chosen.content == "I look."
    assert (
        pair.rejected.tool_calls[0]["function"]["arguments"] == '{"command":"rm -rf build","description":"Run it"}'
    )
    evidence = pair.evidence
    assert (evidence["by"], evidence["supporters"], evidence["asked"]) == (
        "tools",
        ["gpt", "qwen"],
        ["glm", "gpt", "qwen"],
    )
    assert evidence["agreement"] == pytest.approx(2 / 3)
    assert evidence["cost_usd"] == 0.75
    assert evidence["differs"]["arguments"] == ["command"]
    assert [(each["teacher"], each["as_chosen"], each["as_rejected"]) for each in evidence["answers"]] == [
        ("glm", False, False),
        ("gpt", True, False),
        ("qwen", True, False),
    ]
    assert evidence["fidelity"] == "exact"
    assert list(replay_pairs(store, minimum=3)) == []
    assert [each.pair_id for each in replay_pairs(store)] == [pair.pair_id]


def test_what_the_judge_of_the_replay_chose_decides(store: Store):
    state = state_id("a", "m0")
    replayed(store, trace("a", bash("ls")), votes={("a", 0): {"gpt": bash("pwd"), "qwen": bash("whoami")}})
    asks = [ask.id for ask in store.asks.of_state(state)]
    judge_id = judge_ask_id("r", state, judge_name("jury", "jury"), asks)
    best = next(ask.id for ask in store.asks.of_state(state) if ask.teacher == "qwen")
    number = shown_order(judge_id, asks).index(best) + 1
    assert list(replay_pairs(store)) == []
    answered(store, state, "jury", {"role": "assistant", "content": str(number)}, ask_id=judge_id, kind="judge")
    (pair,) = replay_pairs(store)
    assert (pair.evidence["by"], pair.evidence["chosen_from"]) == ("judge", "qwen")
    assert pair.evidence["asked"] == ["gpt", "qwen"]


def test_states_are_chosen_by_an_expression(store: Store):
    votes = {"gpt": bash("pwd"), "qwen": bash("pwd")}
    replayed(store, trace("a", bash("ls"), bash("ls -l", call_id="c2")), votes={("a", 0): votes, ("a", 1): votes})
    assert len(list(replay_pairs(store))) == 2
    assert [each.state_id for each in replay_pairs(store, where="message_id = 'm1'")] == [state_id("a", "m1")]
    with pytest.raises(ConfigError):
        list(replay_pairs(store, where="nonsense ="))


def test_families_that_may_not_vote(store: Store):
    votes = {"gpt": bash("pwd"), "claude": bash("pwd")}
    replayed(
        store,
        trace("a", bash("ls")),
        trace("b", bash("ls"), model="some-model", ask="another"),
        votes={("a", 0): votes, ("b", 0): votes},
    )
    tally = PairCounts()
    assert list(replay_pairs(store, tally=tally)) == []
    assert tally.answers == {"of the family that wrote the turn": 1}
    assert tally.left_out == {
        "the teachers do not agree": 1,
        "the model that wrote the turn is of no known family": 1,
    }
    before = {"options": {"allow_same_family": True}}
    allowed = {"options": {"allow_same_family": True, "allow_unknown_family": True}}
    wait(store.asks.put_replay("r", {"invocations": [before, allowed]}))
    assert [pair.family for pair in replay_pairs(store)] == ["claude", None]
    wait(store.asks.put_replay("r", {"invocations": [allowed, before]}))
    assert [pair.family for pair in replay_pairs(store)] == ["claude"], "what was chosen last counts"


def test_actions_that_no_pair_is_made_of(store: Store):
    votes = {"gpt": bash("pwd"), "qwen": bash("pwd")}
    foreign: Message = {"role": "assistant", "content": "", "tool_calls": [tool_call("x", "Fly", {"to": "moon"})]}
    broken: Message = {"role": "assistant", "content": "", "tool_calls": [tool_call("x", "Bash", '{"comm')]}
    empty: Message = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    replayed(
        store,
        trace("a", broken),
        trace("b", empty),
        trace("c", bash("ls")),
        trace("d", bash("ls"), ask="once more"),
        votes={("a", 0): votes, ("b", 0): votes, ("c", 0): {"gpt": broken, "qwen": empty}},
    )
    for teacher in ("gpt", "qwen"):
        answered(store, state_id("d", "m0"), teacher, foreign, offered="Fly")
    tally = PairCounts()
    assert list(replay_pairs(store, tally=tally)) == []
    assert tally.left_out == {
        "a tool call whose arguments cannot be read": 1,
        "an action that does nothing": 1,
        "no teacher gave an answer that can be used": 1,
        "a tool that was not offered": 1,
    }
    assert tally.answers == {"bad_arguments": 1, "empty": 1}


def test_lengths_and_duplicates(store: Store):
    long = bash("echo " + "x" * 5000)
    replayed(
        store,
        *(trace(name, bash("ls")) for name in "abc"),
        trace("d", bash("ls"), ask="another"),
        votes={(name, 0): {"gpt": bash("pwd"), "qwen": bash("pwd")} for name in "abc"}
        | {("d", 0): {"gpt": long, "qwen": long}},
    )
    tally = PairCounts()
    assert len(list(replay_pairs(store, tally=tally))) == 1
    assert tally.left_out == {"duplicates": 2, "answers of too different length": 1}
    for limits, reason in (
        (Limits(prompt_chars=5), "a prompt that is too long"),
        (Limits(chars=20), "a prompt that is too long"),
        (Limits(side_chars=5), "an answer that is too long"),
    ):
        tally = PairCounts()
        assert list(replay_pairs(store, checked=Checks(limits), tally=tally)) == []
        assert tally.left_out[reason] == 4


def test_a_template_has_to_take_a_pair(store: Store):
    votes = {"gpt": bash("pwd"), "qwen": bash("pwd")}
    replayed(store, trace("a", bash("ls")), votes={("a", 0): votes})

    class Template:
        def __init__(self, rendered: Callable[[int, bool], Sequence[int] | None]) -> None:
            self.rendered = rendered

        def render(
            self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation_prompt: bool
        ) -> Sequence[int] | None:
            assert len(tools) == 2
            return self.rendered(len(messages), generation_prompt)

    def pairs(rendered: Callable[[int, bool], Sequence[int] | None], tokens: int | None = None) -> PairCounts:
        tally = PairCounts()
        list(replay_pairs(store, checked=Checks(Limits(tokens=tokens), Template(rendered)), tally=tally))
        return tally

    assert pairs(lambda count, prompt: range(count)).pairs == 1
    for wrong in (
        lambda count, prompt: None,
        lambda count, prompt: None if not prompt else [1],
        lambda count, prompt: [7] if prompt else [1, 2, 3],
        lambda count, prompt: [1, 2],
    ):
        assert pairs(wrong).left_out == {"not as the tokenizer's chat template wants it": 1}
    assert pairs(lambda count, prompt: range(count), tokens=2).left_out == {"a prompt that is too long": 1}


def test_pairs_hold_no_secrets(store: Store):
    key = "AKIA" + "Q3EGWZ7PLMX2R4TD"
    replayed(
        store,
        trace("a", bash(f"aws configure set key {key}"), ask=f"my key is {key}, use it"),
        votes={("a", 0): {"gpt": bash(f"echo {key}"), "qwen": bash(f"echo {key}")}},
    )
    assert key in repr(list(replay_pairs(store)))
    (pair,) = replay_pairs(store, redactor=Redactor(b"k" * 32))
    assert key not in repr(pair)
    assert pair.state_id == state_id("a", "m0")


def test_answers_to_what_was_redacted_are_not_mixed_with_what_is_not(store: Store):
    key = "AKIA" + "Q3EGWZ7PLMX2R4TD"
    redactor = Redactor(b"k" * 32)
    redacted = redactor.text(key)
    assert redacted != key
    replayed(
        store,
        trace("a", bash(f"echo {key}"), ask=f"my key is {key}"),
        trace("b", bash("ls"), ask=f"my key is {key}"),
        votes={(name, 0): {"gpt": bash(f"echo {redacted}"), "qwen": bash(f"echo {redacted}")} for name in "ab"},
    )
    (pair,) = replay_pairs(store, redactor=redactor)
    assert pair.state_id == state_id("b", "m0"), "the student of the other did the same"
    tally = PairCounts()
    assert list(replay_pairs(store, tally=tally)) == []
    assert tally.answers == {"with pseudonyms that the conversation does not have": 4}


def test_messages_in_turns():
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "x"}
    tool_call_turn, result = bash("ls"), {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    assistant = {"role": "assistant", "content": "Done."}
    for good in (
        [user],
        [system, user],
        [user, tool_call_turn, result],
        [system, user, tool_call_turn, result, user],
        [user, assistant, user],
    ):
        assert in_turns(good)
    for bad in (
        [],
        [system],
        [assistant],
        [user, user],
        [user, tool_call_turn],
        [user, result],
        [user, tool_call_turn, result, result],
        [user, assistant],
        [user, system],
        [assistant, user],
        [user, tool_call_turn, user],
        [user, {"role": "assistant", "content": ""}, user],
    ):
        assert not in_turns(bad)


# --- rollouts ------------------------------------------------------------------------------------------

BROKEN = "\u2026"
"""Ends a command whose call the model did not finish."""

Script = Sequence[tuple[str, str]]
"""What an agent does at each turn, and what comes of it."""


def converse(attempt_id: str, script: Script, *, date: str = "2026-11-21") -> list[Call]:
    session = Session(attempt_id)
    messages: list[Message] = [user(text(f"Mend it. Today is {date}."))]
    for number, (command, result) in enumerate(script):
        call_id = f"toolu_{attempt_id}_{number}"
        answer: list[Block] = [text(f"I try {attempt_id}."), tool_use(call_id, command=command)]
        if command.endswith(BROKEN):
            answer[1]["input"] = {UNPARSED_INPUT: {"raw": f'{{"command": "{command[:-1]}', "len": 9}}
        if not command:
            answer = [text(result)]
        session.ask(messages, answer)
        messages = [*messages, assistant(*answer), user(tool_result(call_id, result) if command else text("?"))]
    return session.calls


def play(
    store: Store, scripts: Sequence[tuple[float, Script]], *, suspicious: Sequence[int] = (), run: str = "run1"
) -> None:
    """A run of one task, whose rollouts did what the scripts say and earned so much."""
    wait(store.runs.create(run, {}))
    wait(store.runs.add_tasks(run, [calc_task()]))
    ids = [(f"{run}-{n}", "calc-0", n) for n in range(len(scripts))]
    wait(store.runs.create_rollouts(run, ids))
    for number, (reward, script) in enumerate(scripts):
        attempt = wait(store.runs.start_attempt(f"{run}-{number}"))
        wait(store.runs.mark_running(attempt.id))
        for call in converse(attempt.id, script, date=f"2026-11-{number + 1:02}"):
            wait(store.calls.append(call))
        integrity = Integrity("suspicious", "x") if number in suspicious else Integrity()
        verdict = Verdict(reward=reward, reason="x", integrity=integrity)
        wait(store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", patch=b"", verdict=verdict))


LOOK = ("ls", "calc.py")
GOOD = [LOOK, ("pytest", "1 failed in 0.31s"), ("sed -i s/-/+/ calc.py", ""), ("", "Done.")]
BAD = [LOOK, ("pytest  # all", "1 failed in 0.29s"), ("rm test_calc.py", ""), ("", "Done.")]


def test_the_first_turn_at_which_a_solved_and_an_unsolved_rollout_differ(store: Store):
    play(store, [(1.0, GOOD), (0.0, BAD)])
    tally = PairCounts()
    (pair,) = rollout_pairs(store, tally=tally)
    assert (tally.compared, tally.pairs, tally.left_out) == (1, 1, {})
    assert (pair.origin, pair.group, pair.state_id) == ("rollouts", "calc-0", None)
    assert [message["role"] for message in pair.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert pair.messages[1]["content"] == "Mend it. Today is 2026-11-01."
    assert "sed" in pair.chosen.tool_calls[0]["function"]["arguments"]
    assert "rm" in pair.rejected.tool_calls[0]["function"]["arguments"]
    assert pair.tools is not None and pair.tools[0]["function"]["name"] == "Bash"
    evidence = pair.evidence
    assert (evidence["turn"], evidence["chosen"]["rollout_id"], evidence["rejected"]["rollout_id"]) == (
        2,
        "run1-0",
        "run1-1",
    )
    assert (evidence["chosen"]["reward"], evidence["rejected"]["reward"]) == (1.0, 0.0)
    assert difference_of_actions(pair.chosen, pair.rejected, WorkingDirectory("/workspace")) is not None


def test_rollouts_of_two_agents_make_no_pair(store: Store, tmp_path: Path):
    play(store, [(1.0, GOOD), (0.0, BAD)])
    with sqlite3.connect(store.directory / "store.db") as raw:
        raw.execute("UPDATE rollouts SET agent_version = '3.0' WHERE sample_index = 1")
    raw.close()
    tally = PairCounts()
    assert list(rollout_pairs(store, tally=tally)) == []
    assert tally.notes["tasks all of whose rollouts ended alike"] == 2


def test_rollouts_that_cannot_be_compared_are_counted(store: Store):
    elsewhere = [("ls", "calc.py other.py"), ("rm -rf .", "")]
    play(store, [(1.0, GOOD), (0.0, elsewhere), (0.0, GOOD), (0.0, BAD), (0.0, BAD)])
    tally = PairCounts()
    assert len(list(rollout_pairs(store, tally=tally))) == 1
    assert (tally.compared, tally.pairs) == (4, 1)
    assert tally.left_out == {
        "another environment before another action": 1,
        "no different action": 1,
        "the same pair as of other rollouts": 1,
    }


def test_a_broken_call_is_never_chosen(store: Store):
    broken = (f"sed -i{BROKEN}", "InputValidationError")
    play(store, [(1.0, [*GOOD[:2], broken, *GOOD[2:]]), (0.0, BAD)])
    tally = PairCounts()
    assert list(rollout_pairs(store, tally=tally)) == []
    assert tally.left_out == {UNREADABLE: 1}


def test_what_solved_it_too_is_not_rejected(store: Store):
    play(
        store,
        [
            (1.0, GOOD),
            (1.0, [*GOOD[:2], ("python mend.py", ""), ("", "Done.")]),
            (0.0, [*GOOD[:2], ("python mend.py", "no")]),
        ],
    )
    tally = PairCounts()
    assert list(rollout_pairs(store, tally=tally)) == []
    assert tally.left_out == {"an action that solved it too": 1, "no different action": 1}


def test_suspicious_rollouts_and_tasks_without_both(store: Store):
    play(store, [(1.0, GOOD), (0.0, BAD)], suspicious=[0])
    play(store, [(1.0, GOOD), (1.0, BAD)], run="run2")
    tally = PairCounts()
    assert list(rollout_pairs(store, tally=tally)) == []
    assert tally.notes == {
        "rollouts with a suspicious patch": 1,
        "rollouts without a verdict": 0,
        "tasks all of whose rollouts ended alike": 2,
    }
    assert len(list(rollout_pairs(store, "run1", include_suspicious=True))) == 1
    with pytest.raises(ConfigError, match="run9"):
        list(rollout_pairs(store, "run9"))


def test_pairs_of_a_task_are_bounded(store: Store):
    ways = [(0.0, [LOOK, (f"rm {number}", "")]) for number in range(5)]
    play(store, [(1.0, GOOD), *ways])
    tally = PairCounts()
    assert len(list(rollout_pairs(store, most=2, tally=tally))) == 2
    assert tally.left_out == {"more pairs than wanted of the task": 3}


steps = st.sampled_from(
    [LOOK, ("pytest", "1 failed in 0.2s"), ("pytest", "2 failed"), ("rm a", ""), ("", "Done.")]
)
scripts = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.lists(steps, max_size=3)), min_size=1, max_size=5)


@given(scripts)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_comparison_has_one_end(store: Store, given_scripts: list[Any]):
    run = f"run{len(store.runs.all())}"
    play(store, given_scripts, run=run)
    tally = PairCounts()
    pairs = list(rollout_pairs(store, run, tally=tally))
    solved = sum(reward >= 1 for reward, _ in given_scripts)
    assert tally.compared == solved * (len(given_scripts) - solved)
    assert tally.compared == tally.pairs + tally.left_out.total()
    assert tally.pairs == len(pairs) == len({pair.pair_id for pair in pairs})
    for pair in pairs:
        assert in_turns(pair.messages)
        assert difference_of_actions(pair.chosen, pair.rejected, WorkingDirectory("/workspace")) is not None
        assert pair.evidence["did_as_rejected_solved"] == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1 passed in 0.31s", "1 passed in 12.5s"),
        ("Today's date is 2026-11-21.", "Today's date is 2027-01-02."),
        ("at 2026-11-21T09:30:01.123Z", "at 2026-11-22T10:31:02.9Z"),
        ("in /tmp/pytest-of-me/pytest-3/x", "in /tmp/pytest-of-me/pytest-14/x"),
        ("<object at 0x7f1a2b3c4d5e>", "<object at 0x7f9a2b3c4d50>"),
        ("[main 1a2b3c4] mend", "[main 9f8e7d6] mend"),
        ("Sat Nov 21 13:00:21 UTC 2026", "Sun Nov 22 14:01:22 UTC 2026"),
    ],
)
def test_what_changes_from_run_to_run_is_taken_out(one: str, other: str):
    assert without_volatile_parts(one) == without_volatile_parts(other)


def test_the_rest_is_not_taken_out():
    assert without_volatile_parts("1 passed") != without_volatile_parts("2 passed")
    assert without_volatile_parts("calc.py:12") != without_volatile_parts("calc.py:13")
    assert without_volatile_parts("return x - 1") != without_volatile_parts("return x + 1")


# --- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """`understudy pairs` with a home of its own, in this process; what it prints."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]

    def called(*arguments: str | Path) -> str:
        app(["pairs", *map(str, arguments)], standalone_mode=False)
        return capsys.readouterr().out

    yield called
    for number, handler in before:
        signal.signal(number, handler)


def test_the_command_writes_whole_files_and_counts(tmp_path: Path, command: Callable[..., str]):
    directory = tmp_path / "store"
    secret = "AKIA" + "Q3EGWZ7PLMX2R4TD"
    with Store.open(directory) as store:
        votes = {"gpt": bash("pwd"), "qwen": bash("pwd"), "claude": bash("pwd")}
        replayed(store, trace("a", bash(f"echo {secret}")), votes={("a", 0): votes})
        play(store, [(1.0, GOOD), (0.0, BAD)])
    output = tmp_path / "pairs.jsonl"
    summary = json.loads(command(directory, "--output", output, "--json"))
    assert (summary["pairs"], summary["replay"]["pairs"], summary["rollouts"]["pairs"]) == (2, 1, 1)
    assert summary["replay"]["answers"] == {"of the family that wrote the turn": 1}
    assert sum(summary["replaced"].values()) > 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["origin"] for line in lines] == ["replay", "rollouts"]
    assert set(lines[0]) == {*Pair.__struct_fields__, "schema"}
    assert [line["schema"] for line in lines] == [SCHEMA, SCHEMA]
    assert secret not in output.read_text()
    assert output.stat().st_mode & 0o777 == 0o600
    counted = command(directory, "--from", "replay", "--unredacted")
    assert "from replay: 1 pairs of 1 states" in counted
    assert "rollouts" not in counted
    before = output.read_text()
    with pytest.raises(ConfigError):
        command(directory, "--where", "nonsense =", "-o", output)
    assert output.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != "") == [
        "pairs.jsonl",
        "pairs.jsonl.redaction.json",
    ]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "pairs"),
    [
        (CHATML, 1),
        (CHATML.replace("assistant\n{%", "assistant\n<think>{%"), 0),
        ("{{ raise_exception('no') }}", 0),
    ],
)
def test_the_command_renders_pairs_with_a_tokenizer(
    tmp_path: Path, command: Callable[..., str], template: str, pairs: int
):
    directory, folder = tmp_path / "store", tmp_path / "model"
    with Store.open(directory) as store:
        play(store, [(1.0, GOOD), (0.0, BAD)])
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.train_from_iterator(
        [template],
        tokenizers.trainers.BpeTrainer(
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    counts = json.loads(command(directory, "--tokenizer", folder, "--json"))["rollouts"]
    assert counts["pairs"] == pairs
    assert counts["left_out"] == ({} if pairs else {"not as the tokenizer's chat template wants it": 1})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--from", "nowhere"], "--from"),
        (["--max-tokens", "5"], "--tokenizer"),
        (["--tokenizer", "no/such"], "--tokenizer"),
        (["-o", "."], "directory"),
    ],
)
def test_the_command_names_what_is_wrong(
    tmp_path: Path, command: Callable[..., str], options: list[str], expected: str
):
    Store.open(tmp_path / "store").close()
    with pytest.raises(ConfigError, match=expected):
        command(tmp_path / "store", *options)
