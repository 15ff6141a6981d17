"""Claude Code and every fault upstream: waited out where that helps, else told at once, and never hidden."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from understudy.gateway.server.http import RequestLimits

from fakes.turns import Drop, Fail, Stall, Step, Turn, Where, bash, say
from support.cli import ATOMIC, WAYS, CliRun, Rig, Way, in_ways
from support.conformance import Behaviour, play

pytestmark = pytest.mark.e2e

DONE = say("Done.")
LOST = say("This text is cut in the middle of the stream.", bash("touch lost"))
STEP = Turn(thinking="k", text="step", tools=[bash("echo step")])


def failed_then_done(rig: Rig, run: CliRun) -> None:
    """What failed is kept as failed; the try that worked is the only turn."""
    assert run.statuses == ["error"] * (len(run.calls) - 1) + ["ok"]
    assert [node.superseded for node in run.nodes] == [True] * (len(run.calls) - 1) + [False]
    assert not (rig.work / "lost").exists()


def failed_for_good(_: Rig, run: CliRun) -> None:
    """The agent was told, gave up, and nothing passes for an answer."""
    assert set(run.statuses) == {"error"}
    assert run.result["is_error"] is True
    assert all(call.error is not None for call in run.calls)


def fatal(name: str, step: Fail, status: int, like: str | None = None, request_count: int = 1) -> Behaviour:
    """The CLI gets this failure as often as `request_count` says, reports `status`, and ends."""
    script = [step] * request_count
    return Behaviour(name=name, script=script, error=status, result="", check=failed_for_good, like=like)


def waited_out(name: str, *steps: Step, retries: Sequence[int], like: str | None = None) -> Behaviour:
    """The agent tries again, told so by these statuses, until it works."""
    return Behaviour(name=name, script=[*steps, DONE], retries=retries, check=failed_then_done, like=like)


def bad(status: int, **headers: str) -> Fail:
    return Fail(status=status, message="bad thing", headers=headers)


PAGE = Fail(status=502, raw=b"<html>bad gateway</html>")
SOON = bad(429, **{"retry-after": "1"})
NEVER = bad(500, **{"x-should-retry": "false"})

OF_A_CHAT_SERVER = [
    fatal("400", bad(400), 400, "06_err400"),
    # What our key or our model's name is at the server, the agent can do nothing about: it must not try again.
    fatal("401", bad(401), 400),
    fatal("403", bad(403), 400),
    fatal("404", bad(404), 400),
    fatal("413", bad(413), 400),
    waited_out("500", bad(500), bad(500), retries=[529, 529]),
    waited_out("502 with a page", PAGE, retries=[529]),
    waited_out("503", bad(503), retries=[529]),
    waited_out("429 for a second", SOON, retries=[429]),
]
OF_ANTHROPIC = [
    fatal("400", bad(400), 400, "06_err400"),
    fatal("401", bad(401), 500),
    fatal("403", bad(403), 500),
    fatal("404", bad(404), 404, "06_err404", request_count=2),
    fatal("413", bad(413), 413),
    waited_out("500", bad(500), bad(500), retries=[500, 500], like="06_err500"),
    waited_out("502 with a page", PAGE, retries=[502], like="36_http_error_text"),
    waited_out("529", bad(529), retries=[529]),
    waited_out("429 for a second", SOON, retries=[429]),
    fatal("429 for minutes", bad(429, **{"retry-after": "120"}), 429, "36_429_long"),
    fatal("500 that is final", NEVER, 500, "06_should_retry_false"),
]


@pytest.mark.parametrize(
    ("behaviour", "rig"),
    in_ways(OF_A_CHAT_SERVER, [ATOMIC], "400", "401", "500", "429 for a second"),
    indirect=["rig"],
)
async def test_a_refusal_of_a_chat_server(rig: Rig, behaviour: Behaviour) -> None:
    await play(rig, behaviour)


@pytest.mark.parametrize(
    ("behaviour", "rig"),
    in_ways(
        OF_ANTHROPIC,
        [Way("messages", streaming=True)],
        *("400", "404", "500", "429 for a second", "429 for minutes", "500 that is final"),
    ),
    indirect=["rig"],
)
async def test_a_refusal_of_anthropic(rig: Rig, behaviour: Behaviour) -> None:
    await play(rig, behaviour)


@pytest.mark.parametrize(
    ("where", "rig"), in_ways(["text", "tool", "block", "end"], WAYS, "text", "tool"), indirect=["rig"]
)
async def test_an_answer_that_breaks_off_is_asked_for_again(rig: Rig, where: Where) -> None:
    """Before the first byte to the agent by a status; after it the CLI drops what it has without a word."""
    retries = [] if rig.way.streaming else [529]
    await play(rig, waited_out(where, Drop(turn=LOST, where=where), retries=retries))


@pytest.mark.parametrize("rig", WAYS, indirect=True, ids=str)
async def test_a_connection_that_is_lost_before_the_answer_is_made_anew_by_the_gateway(rig: Rig) -> None:
    run = await play(rig, Behaviour(name="lost", script=[Drop(turn=LOST, where="nothing"), DONE]))
    assert run.statuses == ["ok"]


@pytest.mark.parametrize("rig", [ATOMIC, Way("messages")], indirect=True, ids=str)
async def test_a_fault_in_the_middle_of_a_session_is_a_retry_of_one_turn(rig: Rig) -> None:
    run = await play(
        rig,
        Behaviour(
            name="mid",
            script=[STEP, Fail(status=529), Drop(turn=LOST, where="tool"), DONE],
            retries=[529, 529],
        ),
    )
    assert run.statuses == ["ok", "error", "error", "ok"]
    first, *tries = run.nodes
    assert [node.parent for node in tries] == [first] * 3
    assert [node.superseded for node in tries] == [True, True, False]
    assert first.heir is tries[-1]


async def test_a_refusal_in_the_middle_of_a_session_ends_it(rig: Rig) -> None:
    await play(
        rig,
        Behaviour(
            name="mid",
            script=[STEP, STEP, Fail(status=400, message="boom")],
            error=400,
            result="API Error: 400",
            like="41_server_400_mid",
        ),
    )


async def test_a_chat_server_that_asks_for_minutes_is_waited_for_half_a_minute_at_most(rig: Rig) -> None:
    """Told of two minutes, the CLI would give up at once."""
    rig.script(Fail(status=429, headers={"retry-after": "120"}), DONE)
    process = await rig.start("go")
    retry = await process.event("api_retry")
    assert retry["error_status"] == 429
    assert retry["retry_delay_ms"] <= 31_000
    await process.kill()


@pytest.mark.parametrize("rig", WAYS, indirect=True, ids=str)
async def test_a_server_that_stalls_is_left_when_the_agent_leaves(rig: Rig) -> None:
    stall = Stall()
    run = await play(
        rig,
        Behaviour(
            name="stall", script=[stall, DONE], env={"API_TIMEOUT_MS": "3000"}, request_count=2, retries=[None]
        ),
    )
    assert stall.disconnected.is_set()
    assert run.statuses == ["abandoned", "ok"]
    assert [node.superseded for node in run.nodes] == [True, False]


async def test_a_server_that_is_away_is_waited_for(rig: Rig) -> None:
    rig.script(DONE)
    await rig.model.leave()
    process = await rig.start("go")
    assert (await process.event("api_retry"))["error_status"] == 529
    await rig.model.come_back()
    run = await process.end()
    assert run.result["result"] == "Done."
    failed_then_done(rig, run)
    assert len(run.model_requests) == 1


async def test_the_fallback_model_answers_when_the_first_does_not(rig: Rig) -> None:
    run = await play(
        rig,
        Behaviour(
            name="fallback",
            script=[*[Fail(status=529)] * 3, DONE],
            flags=["--fallback-model", "my-fallback"],
            env={"CLAUDE_CODE_MAX_RETRIES": "4"},
            retries=[529, 529],
            check=failed_then_done,
            like="29_fallback_model",
        ),
    )
    assert [call.requested_model for call in run.calls] == [*["qwen3-coder"] * 3, "my-fallback"]


async def test_an_agent_that_is_interrupted_leaves_an_abandoned_call(rig: Rig) -> None:
    stall = Stall()
    rig.script(STEP, stall)
    process = await rig.start("go")
    await process.requests_received(2)
    process.interrupt()
    run = await process.end()
    async with asyncio.timeout(5):
        await stall.disconnected.wait()
    assert await rig.settled(2) == ["ok", "abandoned"]
    assert run.results == [] or run.result["is_error"] is True


async def test_a_failure_after_the_first_ping_is_tried_again(tmp_path: Path, claude: Path) -> None:
    """What has begun as a stream cannot fail by its status any more: the CLI is told by an error event."""
    hold = asyncio.Event()
    lost = Drop(turn=say("lost", bash("touch lost"), hold=hold), where="text")
    async with Rig(tmp_path, claude, limits=RequestLimits(headers_after_s=0.05, ping_every_s=0.2)) as rig:
        rig.script(lost, DONE)
        process = await rig.start("go")
        await process.requests_received()
        await asyncio.sleep(0.5)
        hold.set()
        run = await process.end()
    assert run.result["result"] == "Done."
    # A busy CLI that reads the ping and the error at once asks again without a word of it.
    assert run.retries in ([529], [])
    failed_then_done(rig, run)


async def test_a_wrong_key_ends_the_run_at_once(rig: Rig) -> None:
    run = await rig.claude(key="sk-understudy-wrong")
    assert run.result["api_error_status"] == 403
    assert (run.retries, run.calls, run.model_requests) == ([], [], [])


async def test_a_failure_that_no_retry_can_mend_says_so(rig: Rig) -> None:
    """The store refuses the call: the CLI is told not to try again, and nothing is sampled twice."""
    rig.script(DONE)
    run = await rig.claude(key=rig.keys.issue("an attempt that the store does not know"))
    assert run.result["api_error_status"] == 500
    assert (run.retries, len(run.model_requests)) == ([], 1)
