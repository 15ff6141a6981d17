"""From sessions through a replay over real sockets to preference pairs."""

from __future__ import annotations

from pathlib import Path

from understudy.preference.checks import PairCounts
from understudy.preference.pairs import replay_pairs
from understudy.store import Store

from support.replay import OpenAITeacher, VLLMTeacher, fill, session, table, teachers_of, work_on


async def test_pairs_of_what_teachers_answered(tmp_path: Path):
    fill(tmp_path / "s", session("a", turns=2), session("b", model="gpt-5"), session("c", model=None))
    async with OpenAITeacher() as gpt, VLLMTeacher() as qwen, VLLMTeacher() as glm:
        file = teachers_of(
            tmp_path,
            table("gpt", gpt, family="gpt", price={"input": 1.0, "output": 2.0}),
            table("qwen", qwen, family="qwen"),
            table("glm", glm, family="glm"),
        )
        with Store.open(tmp_path / "s") as store:
            await work_on(store, file).run()
            tally = PairCounts()
            pairs = list(replay_pairs(store, tally=tally))
    assert (tally.compared, tally.pairs) == (3, 3)
    assert sorted((pair.family, *pair.evidence["supporters"]) for pair in pairs) == [
        ("claude", "glm", "gpt", "qwen"),
        ("claude", "glm", "gpt", "qwen"),
        ("gpt", "glm", "qwen"),
    ]
    for pair in pairs:
        assert pair.chosen.tool_calls[0]["function"]["name"] == "Bash"
        assert pair.evidence["differs"]["arguments"] == ["command"]
        assert {each["teacher"] for each in pair.evidence["answers"]} == set(pair.evidence["asked"])
