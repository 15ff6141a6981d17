"""A replay over real sockets: who is asked, how, and what was asked before."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.errors import ConfigError
from understudy.preference.proposals import proposals
from understudy.store import Store

from fakes.turns import Turn
from support.replay import (
    CHEAP,
    AnthropicTeacher,
    OpenAITeacher,
    VLLMTeacher,
    asked_about,
    fill,
    rule,
    session,
    table,
    teachers_of,
    until_seen,
    work_on,
)


async def test_teachers_of_the_family_that_wrote_a_turn_are_never_contacted(tmp_path: Path):
    fill(
        tmp_path / "s",
        session("a", turns=3),
        session("b", turns=2, model="gpt-5"),
        session("c", model=None),
        session("d", model="glm-5", role="warmup"),
    )
    async with (
        OpenAITeacher() as gpt,
        VLLMTeacher() as qwen,
        AnthropicTeacher() as claude,
        VLLMTeacher() as unknown,
    ):
        file = teachers_of(
            tmp_path,
            table("gpt", gpt, family="gpt"),
            table("qwen", qwen, family="qwen"),
            table("claude", claude, family="claude"),
            table("unknown", unknown),
        )
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file).run()
            assert {name: tally.answered for name, tally in summary.teachers.items()} == {
                "gpt": 3,
                "qwen": 5,
                "claude": 2,
                "unknown": 0,
            }
            assert summary.left == 0
            assert [len(server.requests) for server in (gpt, qwen, claude, unknown)] == [3, 5, 2, 0]
            assert not unknown.headers, "not even its models were asked for"
            assert all("task a" in json.dumps(body) for body in gpt.requests)
            assert all("task b" in json.dumps(body) for body in claude.requests)
            counts = summary.selected
            assert counts.left_out == {"unknown_family": 1, "role": 1}
            assert counts.not_asked["claude"] == {"same_family": 3}
            assert counts.not_asked["gpt"] == {"same_family": 2}
            assert counts.not_asked["unknown"] == {"unknown_family": 5}
            (replay,) = store.asks.replays()
            (invocation,) = replay.config["invocations"]
            assert invocation["selected"]["not_asked"]["claude"] == {"same_family": 3}
            assert invocation["options"]["allow_same_family"] is False
            assert invocation["teachers"]["unknown"]["family"] is None
            ask = store.asks.of_replay("replay", "answered")[0]
            call = store.calls.get(ask.call_id or "")
            assert (call.attempt_id, call.session_id) == ("client-replay-replay", ask.id)
            # Nobody may be asked about a turn twice, and that is not done on another day either.
            again = await work_on(store, file).run()
            assert sum(tally.answered_before for tally in again.teachers.values()) == 10
            assert [len(server.requests) for server in (gpt, qwen, claude, unknown)] == [3, 5, 2, 0]


async def test_families_are_asked_where_that_is_allowed(tmp_path: Path):
    fill(tmp_path / "s", session("a"), session("b", model=None))
    async with AnthropicTeacher() as claude, VLLMTeacher() as unknown:
        file = teachers_of(tmp_path, table("claude", claude, family="claude"), table("unknown", unknown))
        with Store.open(tmp_path / "s") as store:
            await work_on(store, file, allow_same_family=True, allow_unknown_family=True).run()
        assert len(claude.requests) == len(unknown.requests) == 2


async def test_each_teacher_gets_the_state_in_its_own_dialect(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=2))
    async with OpenAITeacher() as gpt, AnthropicTeacher() as claude:
        file = teachers_of(
            tmp_path,
            table("gpt", gpt, family="gpt", max_tokens=77, temperature=0.5),
            table("claude", claude, family="x", max_tokens=88),
        )
        with Store.open(tmp_path / "s") as store:
            await work_on(store, file).run()
            (later,) = [body for body in claude.requests if len(body["messages"]) == 3]
            assert [message["role"] for message in later["messages"]] == ["user", "assistant", "user"]
            assert later["messages"][1]["content"] == [
                {"type": "tool_use", "id": "call_0", "name": "Bash", "input": {"command": "ls 0"}}
            ]
            assert later["messages"][2]["content"] == [
                {"type": "tool_result", "tool_use_id": "call_0", "content": "result 0 of a"}
            ]
            assert later["tools"][0]["input_schema"]["required"] == ["command"]
            assert later["max_tokens"] == 88
            assert "coding agent" in later["system"]
            (later,) = [body for body in gpt.requests if len(body["messages"]) == 4]
            assert [message["role"] for message in later["messages"]] == ["system", "user", "assistant", "tool"]
            assert later["tools"][0]["function"]["name"] == "Bash"
            assert (later["max_tokens"], later["temperature"]) == (77, 0.5)
            state = store.asks.answered_states()[0]
            assert {each.teacher for each in proposals(store, state)} == {"gpt", "claude"}
            assert {json.dumps(each.action.tool_calls[0]["function"]) for each in proposals(store, state)} == {
                '{"name": "Bash", "arguments": "{\\"command\\": \\"ls -la\\"}"}',
            }


async def test_tools_that_the_log_does_not_hold_are_inferred(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=2, tools=[]), session("b", turns=0, tools=[]))
    async with OpenAITeacher() as gpt:
        with Store.open(tmp_path / "s") as store:
            file = teachers_of(tmp_path, table("gpt", gpt, family="gpt"))
            summary = await work_on(store, file).run()
        assert summary.selected.tools == {"inferred": 2}
        (function,) = [each["function"] for each in gpt.requests[0]["tools"]]
        assert function["name"] == "Bash"
        assert function["parameters"]["properties"] == {"command": {"type": "string"}}


async def test_an_answer_that_was_kept_though_its_ask_was_not_is_taken_from_the_call(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=2))
    async with OpenAITeacher() as gpt:
        file = teachers_of(tmp_path, table("gpt", gpt, family="gpt", price=CHEAP))
        with Store.open(tmp_path / "s") as store:
            await work_on(store, file).run()
            asks = store.asks.of_replay("replay")
            for ask in asks:  # as if the process had died between the two commits
                store.asks.add(
                    replace(ask, status="asked", reserved_usd=0.25, cost_usd=0.0, call_id=None)
                ).result()
            summary = await work_on(store, file, max_cost_usd=1.0).run()
            assert summary.teachers["gpt"].recovered == 2
            after = {ask.id: ask for ask in store.asks.of_replay("replay")}
            for ask in asks:
                assert after[ask.id].call_id == ask.call_id
                assert after[ask.id].cost_usd == pytest.approx(ask.cost_usd, abs=1e-8)
                assert after[ask.id].reserved_usd == 0.0
        assert len(gpt.requests) == 2


async def test_a_limit_is_a_random_sample_of_what_may_be_asked(tmp_path: Path):
    fill(
        tmp_path / "s",
        *(session(name, turns=5) for name in "abcd"),
        session("e", turns=5, model="gpt-5"),
        session("f", model="glm-5", role="warmup"),
    )
    async with OpenAITeacher() as gpt:
        file = teachers_of(tmp_path, table("gpt", gpt, family="gpt"))
        with Store.open(tmp_path / "s") as store:
            counts, shares = work_on(store, file, limit=6).estimate()
            assert (counts.states, shares["gpt"].asks) == (6, 6)
            assert counts.left_out == {"no_teacher": 5, "role": 1}
            await work_on(store, file, limit=6).run()
            states = {ask.state_id for ask in store.asks.of_replay("replay")}
            first = {row[0] for row in store.sessions.table(("state_id",), limit=6)}
            assert len(states) == 6 and states != first
            again = await work_on(store, file, limit=6).run()
            assert (again.left, len(gpt.requests)) == (0, 6), "the same command asks about the same states"
            _, more = work_on(store, file, limit=9, seed=1).estimate()
            assert (more["gpt"].asks, more["gpt"].done) == (9, 6), "what was asked comes first"
            _, other = work_on(store, file, limit=6, seed=1, name="other").estimate()
            assert (other["gpt"].asks, other["gpt"].done) == (6, 0)


async def test_an_ask_under_way_at_a_kill_counts_and_is_not_sent_again_by_itself(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=2))
    async with OpenAITeacher() as gpt:
        file = teachers_of(tmp_path, table("gpt", gpt, family="gpt", price=CHEAP))
        with Store.open(tmp_path / "s") as store:
            await work_on(store, file, limit=1).run()
            (ask,) = store.asks.of_replay("replay")
            store.asks.add(
                replace(ask, id="0" * 32, status="failed", reserved_usd=0.5, cost_usd=0.0, call_id=None)
            ).result()
            with pytest.raises(ConfigError, match="expected more than 0 and less than"):
                work_on(store, file, max_cost_usd=0.0)
            summary = await work_on(store, file, max_cost_usd=0.5).run()
            assert summary.teachers["gpt"].unaffordable == 1, "half a dollar may have been spent"
        with sqlite3.connect(tmp_path / "s" / "store.db") as raw:
            raw.execute("DELETE FROM calls")
            raw.execute("DELETE FROM asks")
        with Store.open(tmp_path / "s") as store:
            lost = replace(ask, status="asked", reserved_usd=0.002, cost_usd=0.001, call_id=None)
            store.asks.add(lost).result()
            summary = await work_on(store, file, limit=1, max_cost_usd=1.0).run()
            assert (summary.teachers["gpt"].lost, len(gpt.requests)) == (1, 1)
            assert summary.cost_usd == pytest.approx(0.003)
            summary = await work_on(store, file, limit=1, max_cost_usd=1.0, again=True).run()
            assert len(gpt.requests) == 2
            (now,) = store.asks.of_replay("replay")
            assert (now.status, now.reserved_usd) == ("answered", 0.0)
            assert (now.cost_usd or 0) == pytest.approx(0.003 + (store.calls.get(now.call_id or "").cost_usd or 0))


async def test_a_stop_lets_what_is_under_way_end(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=10))
    hold = asyncio.Event()
    async with OpenAITeacher(rule(Turn(text="ok", hold=hold))) as gpt:
        file = teachers_of(tmp_path, table("gpt", gpt, family="gpt"))
        with Store.open(tmp_path / "s") as store:
            work = work_on(store, file, concurrency=2)
            running = asyncio.create_task(work.run())
            await until_seen(gpt, 2)
            assert work.stop()
            assert not work.stop()
            hold.set()
            summary = await running
            assert (summary.teachers["gpt"].answered, summary.left, summary.stopped) == (2, 8, True)
            assert (await work_on(store, file).run()).teachers["gpt"].answered == 8
        assert max(Counter(asked_about(gpt)).values()) == 1


async def test_replays_of_two_names_ask_for_themselves(tmp_path: Path):
    fill(tmp_path / "s", session("a"))
    async with OpenAITeacher() as gpt:
        file = teachers_of(tmp_path, table("gpt", gpt, family="gpt"))
        with Store.open(tmp_path / "s") as store:
            await work_on(store, file, name="one").run()
            await work_on(store, file, name="two", samples=2).run()
            (state,) = store.asks.answered_states()
            assert len(proposals(store, state)) == 3
            assert len(proposals(store, state, replay="one")) == 1
        assert len(gpt.requests) == 3
