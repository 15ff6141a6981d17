"""What goes wrong at the teachers of a replay, over real sockets, and what becomes of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError
from understudy.preference.checks import PairCounts as PairTally
from understudy.preference.pairs import replay_pairs
from understudy.preference.proposals import proposals
from understudy.replay.plan import ReplaySettings
from understudy.replay.replay import Replay
from understudy.replay.teachers import read_teachers
from understudy.store import Store

from fakes.turns import Drop, Fail, Step, Tool, Turn, tool
from support.replay import (
    CHEAP,
    GOOD,
    AnthropicTeacher,
    OpenAITeacher,
    VLLMTeacher,
    asked_about,
    asked_about_text,
    fill,
    rule,
    session,
    table,
    teachers_of,
    work_on,
)


async def test_what_is_refused_for_the_moment_is_sent_again(tmp_path: Path):
    fill(tmp_path / "s", session("a"))
    slow = Fail(status=429, headers={"retry-after": "0"})
    busy = Fail(status=503, headers={"retry-after": "0"})
    async with (
        OpenAITeacher(rule(slow, slow, GOOD)) as gpt,
        AnthropicTeacher(rule(slow, Fail(status=529, headers={"retry-after": "0"}), GOOD)) as other,
        VLLMTeacher(rule(busy, GOOD)) as down,
    ):
        file = teachers_of(
            tmp_path,
            table("gpt", gpt, family="gpt", price=CHEAP, max_tokens=100),
            table("other", other, family="x", price=CHEAP, max_tokens=100),
            table("down", down, family="y", price=CHEAP, max_tokens=100),
        )
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file, max_cost_usd=1.0).run()
            assert {name: (t.answered, t.tries) for name, t in summary.teachers.items()} == {
                "gpt": (1, 3),
                "other": (1, 3),
                "down": (1, 2),
            }
            asks = {ask.teacher: ask for ask in store.asks.of_replay("replay")}
            for name, ask in asks.items():
                call = store.calls.get(ask.call_id or "")
                real = call.cost_usd or 0.0
                assert ask.reserved_usd == 0.0
                # What a server of 503 did nobody knows: it counts at the most it can have cost.
                assert ask.cost_usd is not None
                assert (ask.cost_usd > real + 1e-9) == (name == "down")


@pytest.mark.parametrize("kind", [OpenAITeacher, AnthropicTeacher, VLLMTeacher])
async def test_a_teacher_that_asks_for_a_long_pause_is_asked_no_more(kind: Any, tmp_path: Path):
    fill(tmp_path / "s", session("a"))
    async with kind(rule(Fail(status=429, headers={"retry-after": "3600"}), GOOD)) as teacher:
        file = teachers_of(tmp_path, table("gpt", teacher, family="gpt", price=CHEAP, max_tokens=100))
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file, max_cost_usd=1.0).run()
    counts = summary.teachers["gpt"]
    assert (counts.answered, counts.tries) == (0, 1)
    assert counts.dismissed is not None and "asks for a pause of 3600 s" in counts.dismissed


@pytest.mark.parametrize(
    ("step", "billed", "asked_again"),
    [
        pytest.param(Fail(status=400, message="too odd"), False, False, id="refused"),
        pytest.param(Fail(status=500, message="oh"), True, True, id="broken"),
        pytest.param(Drop(turn=GOOD, where="text"), True, True, id="broke off"),
        pytest.param(Drop(turn=GOOD, where="nothing"), True, True, id="no answer"),
        pytest.param(Fail(status=200, raw=b"<html>"), True, False, id="nonsense"),
        pytest.param(Fail(status=401, message="bad key"), False, True, id="wrong key"),
    ],
)
async def test_failures_are_kept_with_what_they_may_have_cost(
    tmp_path: Path, step: Step, billed: bool, asked_again: bool
):
    fill(tmp_path / "s", session("a"))
    async with (
        OpenAITeacher(rule(step)) as one,
        AnthropicTeacher(rule(step)) as two,
        VLLMTeacher(rule(step)) as three,
    ):
        servers = {"one": one, "two": two, "three": three}
        tables = [
            table(name, server, family=name, price=CHEAP, tries=1, max_tokens=100)
            for name, server in servers.items()
        ]
        file = teachers_of(tmp_path, *tables)
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file, max_cost_usd=1.0).run()
            assert {name: tally.failed for name, tally in summary.teachers.items()} == dict.fromkeys(servers, 1)
            assert [len(server.requests) for server in servers.values()] == [1, 1, 1], "each time may be billed"
            asks = store.asks.of_replay("replay")
            for ask in asks:
                assert ask.status == "failed"
                assert ask.error is not None
                assert (ask.cost_usd or 0.0) > 0 if billed else ask.cost_usd == 0.0
                assert ask.reserved_usd == 0.0
            assert summary.cost_usd == pytest.approx(sum(ask.cost_usd or 0.0 for ask in asks))
            await work_on(store, file, max_cost_usd=1.0).run()
            assert [len(server.requests) for server in servers.values()] == [1 + asked_again] * 3
            await work_on(store, file, max_cost_usd=1.0, again=True).run()
            assert [len(server.requests) for server in servers.values()] == [2 + asked_again] * 3


async def test_one_prompt_that_a_router_does_not_take_ends_no_teacher(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=3), session("b", turns=7))
    nobody = Fail(status=404, message="No endpoints found that support image input")

    def some(body: dict[str, Any]) -> Step:
        return nobody if asked_about_text(body).endswith("result 0 of a") else GOOD

    async with OpenAITeacher(some) as one, OpenAITeacher(rule(nobody)) as two:
        file = teachers_of(tmp_path, table("one", one, family="x"), table("two", two, family="y"))
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file, concurrency=1).run()
            assert (summary.teachers["one"].answered, summary.teachers["one"].failed) == (9, 1)
            assert summary.teachers["one"].dismissed is None
            assert (summary.teachers["two"].failed, len(two.requests)) == (5, 5)
            assert "No endpoints" in (summary.teachers["two"].dismissed or "")


async def test_tools_that_an_api_would_refuse_have_other_names_there(tmp_path: Path):
    odd, long_id = "mcp:weird.tool/ü", "c" * 90
    trace = session("a", turns=2, tools=[{"type": "function", "function": {"name": odd}}])
    for node in trace.nodes:
        message: dict[str, Any] = node.body
        for call in message.get("tool_calls", ()):
            call["id"], call["function"]["name"] = long_id, odd
        if message["role"] == "tool":
            message["tool_call_id"] = long_id
    fill(tmp_path / "s", trace)

    def calls_it(body: dict[str, Any]) -> Step:
        (offered,) = body["tools"]
        name = offered["name"] if "name" in offered else offered["function"]["name"]
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)
        assert odd not in json.dumps(body, ensure_ascii=False)
        return Turn(tools=[tool(name, x=1)])

    async with (
        OpenAITeacher(calls_it) as one,
        AnthropicTeacher(calls_it) as two,
        OpenAITeacher(rule(Turn(text="1"))) as j,
    ):
        file = teachers_of(
            tmp_path, table("one", one, family="x"), table("two", two, family="y"), table("judge", j, family="z")
        )
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file).run()
            assert [summary.teachers[name].answered for name in ("one", "two")] == [2, 2]
            assert not j.requests, "they agree"
            later = max(one.requests, key=lambda body: len(body["messages"]))
            assert long_id not in json.dumps(later)
            assert later["messages"][-2]["tool_calls"][0]["id"] == later["messages"][-1]["tool_call_id"]
            tally = PairTally()
            pairs = list(replay_pairs(store, tally=tally))
            assert [pair.chosen.tool_calls[0]["function"]["name"] for pair in pairs] == [odd, odd], tally


async def test_a_replay_is_redacted_or_not_from_its_beginning(tmp_path: Path):
    fill(tmp_path / "s", session("a"))
    async with OpenAITeacher() as gpt:
        file = teachers_of(tmp_path, table("gpt", gpt, family="gpt"))
        with Store.open(tmp_path / "s") as store:
            await work_on(store, file).run()
            with pytest.raises(ConfigError, match="was --unredacted before"):
                Replay(store, read_teachers(file), ReplaySettings(redacted=True))


async def test_a_wrong_key_ends_its_teacher_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WRONG", "sk-wrong-and-secret")
    fill(tmp_path / "s", session("a", turns=9))
    async with OpenAITeacher(rule(Fail(status=401, message="Incorrect API key"))) as gpt, VLLMTeacher() as qwen:
        file = teachers_of(
            tmp_path,
            table("gpt", gpt, family="gpt", api_key_env="WRONG"),
            table("qwen", qwen, family="qwen"),
        )
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file, concurrency=1).run()
            assert summary.teachers["qwen"].answered == 9
            assert summary.teachers["gpt"].failed == 1
            assert "Incorrect API key" in (summary.teachers["gpt"].dismissed or "")
            assert summary.left == 8
            assert len(gpt.requests) == 1
            reported = repr(
                [
                    *store.asks.of_replay("replay"),
                    *store.calls.of_attempt("client-replay-replay"),
                    store.asks.replays(),
                ]
            )
            assert "sk-wrong-and-secret" not in reported


async def test_a_teacher_that_is_down_is_asked_again_another_day(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=12))
    async with OpenAITeacher() as gpt, VLLMTeacher() as qwen, VLLMTeacher() as unreachable:
        file = teachers_of(
            tmp_path,
            table("gpt", gpt, family="gpt", tries=1, price=CHEAP, concurrency=5),
            table("qwen", qwen, family="qwen", price=CHEAP),
            table("gone", unreachable, family="glm", price=CHEAP),
        )
        await gpt.leave()
        await unreachable.leave()
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file, concurrency=16, max_cost_usd=5.0).run()
            assert summary.teachers["qwen"].answered == 12
            failed = summary.teachers["gpt"].failed
            assert 5 <= failed <= 10, "those under way when the fifth has failed still end"
            assert "5 asks in a row" in (summary.teachers["gpt"].dismissed or "")
            assert "no response" in (summary.teachers["gone"].dismissed or "")
            assert (summary.teachers["gone"].tries, summary.left) == (0, 24 - failed)
            down = [ask for ask in store.asks.of_replay("replay") if ask.teacher == "gpt"]
            assert all(ask.cost_usd == 0.0 for ask in down), "what was never sent costs nothing"
            await gpt.come_back()
            await unreachable.come_back()
            summary = await work_on(store, file, max_cost_usd=5.0).run()
            assert summary.left == 0
        assert all(
            count == 1 for server in (gpt, qwen, unreachable) for count in Counter(asked_about(server)).values()
        )


async def test_answers_that_are_no_proposals_are_counted(tmp_path: Path):
    fill(tmp_path / "s", session("a"))
    wrong = {
        "cut": Turn(text="I was going to", stop="length"),
        "bad_arguments": Turn(tools=[Tool(name="Bash", arguments="{'no': json")]),
        "unknown_tool": Turn(tools=[tool("Fly", to="moon")]),
        "withheld": Turn(text="no", stop="refusal"),
        "empty": Turn(text=""),
    }
    servers = {name: OpenAITeacher(rule(step)) for name, step in wrong.items()} | {
        "good": OpenAITeacher(rule(GOOD))
    }
    tables: list[str] = []
    for name, server in servers.items():
        await server.__aenter__()
        tables.append(table(name, server, family="x"))
    try:
        with Store.open(tmp_path / "s") as store:
            await work_on(store, teachers_of(tmp_path, *tables)).run()
            left_out: Counter[str] = Counter()
            (state,) = store.asks.answered_states()
            (one,) = proposals(store, state, left_out=left_out)
            assert one.teacher == "good"
            assert left_out == dict.fromkeys(wrong, 1)
    finally:
        for server in servers.values():
            await server.__aexit__()
