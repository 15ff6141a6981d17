"""What differs between an agent's own log and its calls is a finding, and a hostile log is no failure."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import structs

from understudy.agents.codex import Codex
from understudy.agents.gemini_cli import GeminiCli
from understudy.agents.mini_swe_agent import MiniSweAgent
from understudy.agents.opencode import OpenCode
from understudy.agents.openhands import OpenHands
from understudy.agents.packaged import PackagedAgent
from understudy.agents.pi import Pi
from understudy.agents.qwen_code import QwenCode
from understudy.agents.turn_log import LoggedTurn, compare_turns
from understudy.trajectory.tree import Trajectory, build

from support.trajectory import Session, assistant, text, tool_result, tool_use, user

LOOK = LoggedTurn("I look.\n", (("read", '{"path": "f", "limit": 2}'),))
END = LoggedTurn("Done.")
AGENTS = (Codex, GeminiCli, MiniSweAgent, OpenCode, OpenHands, Pi, QwenCode)


@pytest.fixture
def trajectory() -> Trajectory:
    session, look = Session(), (text("I look."), tool_use("t", "read", limit=2, path="f"))
    start = user(text("go"))
    session.ask([start], look)
    session.ask([start, assistant(*look), user(tool_result("t"))], [text("Done.")])
    return build(session.calls)


def differences(turns: list[LoggedTurn], trajectory: Trajectory, *, cut_off: bool = False) -> list[str]:
    return [finding.message for finding in compare_turns(turns, trajectory, cut_off=cut_off)]


def test_equal_logs_have_no_differences(trajectory: Trajectory) -> None:
    assert differences([LOOK, LoggedTurn("  "), END], trajectory) == []


def test_each_difference_is_told(trajectory: Trajectory) -> None:
    assert differences([LOOK], trajectory) == ["the answer of call 1 is not in the log"]
    assert differences([LOOK], trajectory, cut_off=True) == []
    (forged,) = differences([LOOK, END, LoggedTurn("More.")], trajectory)
    assert forged == "the log has a response that no call has: 'More.'"
    (other,) = differences([LoggedTurn("I look.", (("read", '{"path": "g", "limit": 2}'),)), END], trajectory)
    assert other.startswith("the log has the answer of call 0 otherwise: 'I look.', ('read'")
    assert len(differences([LoggedTurn(str(n)) for n in range(500)], trajectory)) == 20


def test_a_log_that_is_much_longer_than_the_calls_is_compared_in_part(trajectory: Trajectory) -> None:
    compared: list[str] = []

    class Counted(LoggedTurn, frozen=True):
        @property
        def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
            compared.append(self.text)
            return super().key

    turns: list[LoggedTurn] = [Counted(str(number)) for number in range(5000)]
    *_, last = differences(turns, trajectory)
    assert (len(compared), last) == (22, f"and {5000 - 19} more differences")
    repeated = differences([LOOK] * 5000, trajectory)
    assert (len(repeated), repeated[-1]) == (20, f"and {5000 - 1 - 19} more differences")


def test_an_answer_that_was_asked_for_again_may_be_in_the_log() -> None:
    session, start = Session(), user(text("go"))
    session.ask([start], [text("I was about to")])
    session.ask([start], [text("Done.")])
    again = build(session.calls)
    assert [node.superseded for node in again.nodes] == [True, False]
    assert differences([END], again) == []
    assert differences([LoggedTurn("I was about to"), END], again) == []
    assert differences([LoggedTurn("I was about to")], again) == ["the answer of call 1 is not in the log"]


def test_arguments_that_are_not_json_may_be_logged_in_a_repaired_form() -> None:
    function = {"name": "bash", "arguments": '{"command": "echo lost'}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "t", "function": function}]}
    request = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    call = structs.replace(
        Session().ask([user(text("go"))], [text("x")]),
        dialect="openai-chat",
        request=json.dumps(request).encode(),
        response=json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode(),
    )
    broken = build([call])
    assert differences([LoggedTurn("I look.", (("bash", '{"command":"echo lost"}'),))], broken) == []
    for other in (("sh", '{"command":"echo lost"}'), ("bash", "{}"), ("bash", "{}")):
        turns = [LoggedTurn("I look." if other[0] == "sh" else "You look.", (other,))]
        assert len(differences(turns, broken)) == 1


@pytest.mark.parametrize(
    ("sampled", "logged"),
    [
        ("", "{}"),
        (" ", "{}"),
        ('{"n": 1.0, "m": [-0.0, 1180591620717411303424]}', '{"m":[0,1.1805916207174113e21],"n":1}'),
        ('{"s": "a\\ud83db", "n": 1.0}', '{"n":1,"s":"a\ufffdb"}'),
    ],
    ids=["empty", "blank", "numbers", "half of a surrogate pair"],
)
def test_arguments_are_equal_in_the_form_that_javascript_writes(sampled: str, logged: str) -> None:
    assert LoggedTurn("", (("bash", sampled),)).key == LoggedTurn("", (("bash", logged),)).key
    for other in ('{"n": true}', '{"n": "1"}', '{"n": 2}', "[]"):
        assert LoggedTurn("", (("bash", sampled),)).key != LoggedTurn("", (("bash", other),)).key


def test_the_last_words_where_a_budget_is_used_up_may_be_in_the_log(trajectory: Trajectory) -> None:
    final_text = "The budget of this attempt is used up."
    body = json.dumps({"role": "assistant", "content": [{"type": "text", "text": final_text}]}).encode()
    start = [user(text("go")), assistant(text("Done.")), user(text("more"))]
    last = Session()
    refused = structs.replace(last.ask(start, None, status="error"), id="last", sequence=2, response=body)
    spent = build([*(node.call for node in trajectory.nodes), refused])
    assert differences([LOOK, END, LoggedTurn(final_text)], spent) == []
    assert differences([LOOK, END], spent) == []
    assert differences([LOOK, LoggedTurn(final_text)], spent) == ["the answer of call 1 is not in the log"]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\n",
        b"[" * 5000,
        b'{"type": "assistant", "message": {"parts": 3}}\n{"type": "assistant"}',
        b'{"type": "tool_use", "part": {"state": []}}\n{"type": "step_finish"}',
        json.dumps({"info": [], "messages": [{"role": "assistant", "content": 1}, 3]}).encode(),
    ],
    ids=["empty", "binary", "deep", "assistant", "tool", "trajectory"],
)
def test_a_hostile_log_is_no_failure(agent: type[PackagedAgent], content: bytes, trajectory: Trajectory) -> None:
    logs = {
        "stdout.txt": content,
        "session/a.jsonl": content,
        "session/b.traj.json": content,
        "session/c/events/event-1.json": content,
    }
    turns: Any = agent().logged_turns(logs)
    assert compare_turns(turns, trajectory, cut_off=False)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_that_was_stopped_before_it_wrote_anything_has_no_turns(agent: type[PackagedAgent]) -> None:
    assert list(agent().logged_turns({"stdout.txt": b"", "stderr.txt": b""}) or ()) == []


def test_an_event_with_half_of_a_surrogate_pair_is_read() -> None:
    used = rb'{"type": "tool_use", "part": {"tool": "bash", "state": {"input": {"command": "echo \ud83d"}}}}'
    (turn,) = OpenCode().logged_turns({"stdout.txt": used + b'\n{"type": "step_finish"}'})
    assert turn.key == LoggedTurn("", (("bash", r'{"command": "echo \ud83d"}'),)).key


def test_parallel_calls_of_opencode_are_in_the_order_of_the_response() -> None:
    def used(id_: str, command: str) -> dict[str, Any]:
        return {
            "type": "tool_use",
            "part": {"id": id_, "tool": "bash", "state": {"input": {"command": command}}},
        }

    events = [used("prt_2", "true"), used("prt_1", "sleep 1"), {"type": "step_finish"}]
    (turn,) = OpenCode().logged_turns({"stdout.txt": b"\n".join(map(msgspec.json.encode, events))})
    assert turn.calls == (("bash", '{"command":"sleep 1"}'), ("bash", '{"command":"true"}'))
