"""What a replay costs, over real sockets: the judge, asked only where it must be, and the ceiling that holds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError
from understudy.preference.consensus import consensus
from understudy.preference.proposals import judge_of, proposals
from understudy.store import Store

from fakes.turns import Fail, Step, Turn, tool
from support.replay import (
    CHEAP,
    GOOD,
    AnthropicTeacher,
    OpenAITeacher,
    VLLMTeacher,
    fill,
    rule,
    session,
    table,
    teachers_of,
    work_on,
)

# --- the judge -----------------------------------------------------------------------------------------


async def test_a_judge_is_asked_only_where_teachers_do_not_agree(tmp_path: Path):
    fill(tmp_path / "s", session("agree"), session("differ"))

    def says(command: str) -> Any:
        def step(body: dict[str, Any]) -> Step:
            same = "task agree" in json.dumps(body)
            return Turn(tools=[tool("Bash", command="ls" if same else command)])

        return step

    judge_prompts: list[str] = []

    def judges(body: dict[str, Any]) -> Step:
        text = body["messages"][-1]["content"]
        judge_prompts.append(text)
        before = text.split("pytest -x")[0]
        return Turn(text=f" {before.count('<proposal number=')}.\n")

    async with (
        OpenAITeacher(says("pytest -x")) as one,
        VLLMTeacher(says("git push --force")) as two,
        OpenAITeacher(judges) as judge,
    ):
        file = teachers_of(
            tmp_path,
            table("one", one, family="gpt"),
            table("two", two, family="qwen"),
            table("judge", judge, family="gemini", max_tokens=20),
        )
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file).run()
            assert summary.judged == {"chosen": 1}
            assert len(judge_prompts) == 1
            assert "task differ" in judge_prompts[0]
            decisions = {
                state: consensus(proposals(store, state), judge=judge_of(store, state))
                for state in store.asks.answered_states()
            }
            by = {each.by: each for each in decisions.values() if each is not None}
            assert set(by) == {"tools", "judge"}
            assert "pytest -x" in json.dumps(by["judge"].action.tool_calls)
            assert {ask.kind for ask in store.asks.of_replay("replay")} == {"teacher", "judge"}
            await work_on(store, file).run()
            assert len(judge_prompts) == 1, "nor is it asked twice"


async def test_a_judge_that_names_no_number_chooses_nothing(tmp_path: Path):
    wrong = {"a": "0", "b": "3", "c": "both", "d": "1 or 2", "e": " ", "f": "proposal 1"}
    fill(tmp_path / "s", *(session(name, turns=1) for name in wrong))

    def judges(body: dict[str, Any]) -> Step:
        name_of_task = next(name for name in wrong if f"task {name}:" in json.dumps(body))
        return Turn(text=wrong[name_of_task])

    async with (
        OpenAITeacher(rule(Turn(tools=[tool("Bash", command="rm -r x")]))) as one,
        OpenAITeacher(rule(Turn(tools=[tool("Bash", command="make")]))) as two,
        AnthropicTeacher(judges) as judge,
    ):
        file = teachers_of(
            tmp_path, table("one", one, family="x"), table("two", two, family="y"), table("judge", judge)
        )
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file).run()
            assert summary.judged == {"no choice": 6}
            for state in store.asks.answered_states():
                assert consensus(proposals(store, state), judge=judge_of(store, state)) is None


# --- the ceiling ---------------------------------------------------------------------------------------


async def test_what_was_tried_and_then_does_not_fit_has_failed(tmp_path: Path):
    fill(tmp_path / "s", session("a"))
    wait = Fail(status=429, headers={"retry-after": "0.3"})
    async with OpenAITeacher(rule(wait, GOOD)) as one, OpenAITeacher(rule(Turn(prompt_tokens=4000))) as two:
        file = teachers_of(
            tmp_path,
            *(
                table(name, server, family=name, price=CHEAP, max_tokens=100)
                for name, server in (("a", one), ("b", two))
            ),
        )
        with Store.open(tmp_path / "s") as store:
            most = work_on(store, file).estimate()[1]["a"].worst_usd or 0.0
            summary = await work_on(store, file, max_cost_usd=most * 1.2, concurrency=1).run()
            first = summary.teachers["a"]
            assert (first.tries, first.failed, first.unaffordable, summary.left) == (1, 1, 0, 0)
            assert summary.teachers["b"].answered == 1


async def test_a_ceiling_without_a_price_sends_nothing(tmp_path: Path):
    fill(tmp_path / "s", session("a"))
    async with VLLMTeacher() as qwen:
        file = teachers_of(tmp_path, table("qwen", qwen, family="qwen"))
        with Store.open(tmp_path / "s") as store, pytest.raises(ConfigError, match="price of qwen"):
            work_on(store, file, max_cost_usd=1.0)
        assert not qwen.requests


async def test_a_teacher_that_bills_more_than_it_was_asked_for_is_noticed(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=6))
    async with OpenAITeacher(rule(Turn(text="x" * 500, tools=[tool("Bash", command="ls")]))) as gpt:
        file = teachers_of(tmp_path, table("gpt", gpt, family="gpt", max_tokens=50, price=CHEAP))
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file, max_cost_usd=1.0, concurrency=1).run()
            assert (summary.teachers["gpt"].overruns, len(gpt.requests)) == (1, 1)
            assert "more" not in (summary.teachers["gpt"].dismissed or "more")
            assert summary.left == 5
            (ask,) = store.asks.of_replay("replay")
            assert ask.cost_usd == pytest.approx(store.calls.get(ask.call_id or "").cost_usd)


async def test_an_answer_without_usage_counts_at_the_most_it_can_cost(tmp_path: Path):
    fill(tmp_path / "s", session("a"))

    class Silent(OpenAITeacher):
        def whole(self, answer: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in super().whole(answer, body).items() if key != "usage"}

    async with Silent() as gpt:
        file = teachers_of(tmp_path, table("gpt", gpt, family="gpt", max_tokens=100, price=CHEAP))
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file, max_cost_usd=1.0).run()
        assert summary.teachers["gpt"].answered == 1
        assert summary.cost_usd > 100 * 2e-6 + 4096e-6


@pytest.mark.parametrize("seed", [0, 2, 5, 7])
async def test_the_ceiling_holds_whatever_answers_cost(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    traces = [
        session(f"s{number}", turns=draw.randint(1, 6), text="é ß 中 " * draw.randint(0, 300))
        for number in range(6)
    ]
    directory = fill(tmp_path / "s", *traces)
    prices = [
        {
            "input": draw.choice([0.0, 0.1, 1.0, 3.3, 15.0]),
            "output": draw.choice([0.4, 2.0, 75.0]),
            "cached": draw.choice([0.05, 20.0]),
        }
        for _ in range(3)
    ]
    limit = draw.choice([0.01, 0.05, 0.1, 0.4])
    billed = [0.0, 0.0, 0.0]
    most: list[float] = []

    def answers(number: int) -> Any:
        def step(body: dict[str, Any]) -> Step:
            spent = store.asks.cost("replay")
            most.append(spent.cost_usd + spent.reserved_usd)
            kind = draw.random()
            if kind < 0.1:
                return Fail(status=429, headers={"retry-after": "0"})
            price, size = prices[number], len(json.dumps(body, ensure_ascii=False).encode())
            output_tokens = draw.randint(1, 180)
            if number < 2 or kind < 0.9:  # the third one may bill and break
                billed[number] += (
                    size * max(price["input"], price["cached"]) + output_tokens * price["output"]
                ) / 1e6
                return Turn(text="x" * (output_tokens - 1))
            billed[number] += (size * price["input"] + 200 * price["output"]) / 1e6
            return Fail(status=500, headers={"retry-after": "0"})

        return step

    async with (
        OpenAITeacher(answers(0)) as one,
        VLLMTeacher(answers(1)) as two,
        OpenAITeacher(answers(2)) as three,
    ):
        file = teachers_of(
            tmp_path,
            *(
                table(f"t{number}", server, family=f"f{number}", max_tokens=200, price=prices[number], tries=3)
                for number, server in enumerate((one, two, three))
            ),
        )
        with Store.open(directory) as store:
            for _ in range(2):  # what an earlier invocation spent counts as well
                summary = await work_on(store, file, max_cost_usd=limit, concurrency=6).run()
                spent = store.asks.cost("replay")
                assert spent.reserved_usd == 0.0
                assert spent.cost_usd == pytest.approx(summary.cost_usd)
                assert spent.cost_usd <= limit + 1e-9
                assert sum(billed) <= limit
                assert all(sum_ <= limit + 1e-9 for sum_ in most)
                unaffordable = sum(tally.unaffordable for tally in summary.teachers.values())
                assert summary.left == unaffordable or any(t.dismissed for t in summary.teachers.values())


async def test_what_fits_is_asked_though_something_dearer_does_not(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=3))
    async with OpenAITeacher() as dear, VLLMTeacher() as cheap:
        file = teachers_of(
            tmp_path,
            table("dear", dear, family="x", price={"input": 100.0, "output": 500.0}),
            table("cheap", cheap, family="y", price={"input": 0.0, "output": 0.01}),
        )
        with Store.open(tmp_path / "s") as store:
            summary = await work_on(store, file, max_cost_usd=0.01).run()
        assert (summary.teachers["dear"].unaffordable, len(dear.requests)) == (3, 0)
        assert summary.teachers["cheap"].answered == 3
